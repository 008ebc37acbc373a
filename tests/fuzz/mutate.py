"""Mutations: of plain trees (maps, lists, numbers, text, bytes), and of bytes.

What a decoder reads is mostly a tree, so it is changed as one, and put into its form again: a flipped bit of msgpack
would seldom come further than its first byte. Everything is drawn from the ``random.Random`` given, so that a seed
gives the same inputs again.
"""

from __future__ import annotations

from random import Random
from typing import Any

NUMBERS = (
    -1, 0, 1, 2, 3, 7, 8, 16, 63, 64, 127, 128, 255, 256, 1023, 4096, 65_535, 65_536, 2**20 - 1, 2**20, 2**31 - 1,
    2**31, 2**32 - 1, 2**32, 2**53, 2**62 - 1, 2**62, 2**63 - 1, -(2**63), 2**64 - 1,
    2**64, -(2**64), 10**30,
)  # fmt: skip
TEXTS = ("", "a", "web", "\x00", "\ud7ff", "é", "x" * 200, "x" * 201, "x" * 2001, "../..", "nan", "1e999", "-0")
MOST_NODES = 4000
MOST_BYTES = 1 << 16


def mutated(tree: Any, others: list[Any], rng: Random) -> Any:
    """A copy of ``tree`` with one to a few changes; parts of ``others`` may come into it."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
        other = rng.choice(others) if others else tree
        tree = _changed(tree, other, rng)
    return tree


def _changed(tree: Any, other: Any, rng: Random) -> Any:
    """One change, somewhere: at each level either here or below."""
    if isinstance(tree, dict) and tree and rng.random() < 0.9:
        key = rng.choice(list(tree))
        at_random = rng.random()
        if at_random < 0.05:
            return {name: value for name, value in tree.items() if name != key}
        if at_random < 0.08:
            return tree | {rng.choice((*TEXTS[:4], "extra")): _leaf(None, rng)}
        if at_random < 0.12:
            return tree | {key: _part(other, rng)}
        return tree | {key: _changed(tree[key], _same(other, key), rng)}
    if isinstance(tree, list) and tree and rng.random() < 0.9:
        at = rng.randrange(len(tree))
        match rng.randrange(12):
            case 0:
                return tree[:at] + tree[at + 1 :]
            case 1 if len(tree) < MOST_NODES:
                return [*tree[:at], tree[at], *tree[at:]]
            case 2:
                to = rng.randrange(len(tree))
                return _swapped(tree, at, to)
            case 3 if isinstance(other, list) and other and len(tree) < MOST_NODES:
                return [*tree[:at], rng.choice(other), *tree[at:]]
            case 4 if isinstance(other, list) and len(tree) + len(other) < MOST_NODES:
                return tree[:at] + other[rng.randrange(len(other) + 1) :]
            case _:
                return [*tree[:at], _changed(tree[at], _same(other, at), rng), *tree[at + 1 :]]
    return _leaf(tree, rng)


def _swapped(tree: list[Any], a: int, b: int) -> list[Any]:
    tree = list(tree)
    tree[a], tree[b] = tree[b], tree[a]
    return tree


def _same(other: Any, key: Any) -> Any:
    """What ``other`` has in the same place, if it has."""
    if isinstance(other, dict) and isinstance(key, str):
        return other.get(key)
    return other[key % len(other)] if isinstance(other, list) and other and isinstance(key, int) else other


def _part(tree: Any, rng: Random) -> Any:
    """Some part of a tree."""
    while isinstance(tree, (dict, list)) and tree and rng.random() < 0.7:
        tree = rng.choice(list(tree.values()) if isinstance(tree, dict) else tree)
    return tree


def _leaf(value: Any, rng: Random) -> Any:
    """Another value in the place of one: mostly of its kind."""
    if rng.random() < 0.1:
        return rng.choice((None, True, False, 0, -1, 2**63, 0.5, float("nan"), "", b"", [], {}, [[]], {"a": []}))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        near = value + rng.choice((-8, -2, -1, 1, 2, 8)), value * 2, value // 2, -value
        far = rng.randrange(1 << rng.choice((8, 16, 24, 62))), *rng.sample(NUMBERS, 4)
        return rng.choice((*near, *far))
    if isinstance(value, float):
        return rng.choice((0.0, -0.0, -1.0, value * 2, value / 3, 1e300, 1e-300, float("inf"), float("nan")))
    if isinstance(value, str):
        cut = rng.randrange(len(value) + 1)
        return rng.choice((*TEXTS, value[:cut], value + value[cut:], value[:cut] + "0" + value[cut:]))[:MOST_BYTES]
    if isinstance(value, bytes):
        return mutated_bytes(value, rng)
    return rng.choice((None, 0, 1, "a", b"\0", [0], {"a": 1}))


def mutated_bytes(data: bytes, rng: Random) -> bytes:
    """Bytes with one to a few changes."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(found) + 1)
        match rng.randrange(8):
            case 0 | 1 if found:
                found[at % len(found)] ^= 1 << rng.randrange(8)
            case 2:
                number = rng.choice(NUMBERS) % 2**64
                width = rng.choice((1, 2, 4, 8))
                found[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, rng.choice(("little", "big")))
            case 3:
                del found[at : at + rng.choice((1, 2, 4, 8, 16, len(found)))]
            case 4 if len(found) < MOST_BYTES:
                found[at:at] = rng.randbytes(rng.choice((1, 4, 16)))
            case 5 if len(found) < MOST_BYTES:
                stop = min(at + rng.choice((1, 4, 64)), len(found))
                found[at:at] = found[at:stop]
            case 6:
                found[at : at + 4] = bytes(4)
            case _:
                found[at : at + 1] = bytes([rng.randrange(256)])
    return bytes(found[:MOST_BYTES])
