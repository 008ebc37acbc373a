"""Shuffles that are the same on every machine, Python and numpy: sorting by 64-bit keys.

Key ``i`` is output ``i`` of a splitmix64 generator (Steele, Lea, Flood, "Fast Splittable Pseudorandom
Number Generators", OOPSLA 2014, section 5; the constants are those of Vigna's splitmix64.c) whose
state is a hash of some ints: what is ordered, and the seed. Equal keys, which 64 bits make all but
impossible, go by index.

Why this and not ``numpy.random``: NEP 19 keeps the bit streams of numpy's generators, but not
``Generator.permutation``, from version to version. Here there is nothing but multiplication, shift
and exclusive-or modulo 2**64 and a sort; the golden vectors of the tests hold it still.
PYTHONHASHSEED does not enter: no ``hash()`` is taken.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SHARDS, SAMPLES, BLOCKS, PACKED = 1, 2, 3, 4
"""What is ordered, the first word of a state: they must never share keys."""


def shuffled(count: int, seed: int) -> list[int]:
    """0..``count``-1 in the order in which ``seed``, any int (taken modulo 2**64), lets a packer see them.

    >>> shuffled(5, seed=0)
    [0, 1, 3, 4, 2]
    """
    order: list[int] = np.argsort(keys(count, state(PACKED, seed)), kind="stable").tolist()
    return order


def keys(count: int, state: int) -> NDArray[np.uint64]:
    """The first ``count`` outputs of splitmix64 from ``state`` on."""
    keys = np.arange(1, count + 1, dtype=np.uint64)
    keys *= np.uint64(GAMMA)  # array arithmetic wraps modulo 2**64 and says nothing, as wanted
    keys += np.uint64(state)
    keys ^= keys >> np.uint64(30)
    keys *= np.uint64(_MIX_1)
    keys ^= keys >> np.uint64(27)
    keys *= np.uint64(_MIX_2)
    keys ^= keys >> np.uint64(31)
    return keys


def state(*words: int) -> int:
    """A 64-bit hash of some ints: each is folded in and mixed before the next, so that their places matter."""
    state = 0
    for word in words:
        state = mix((state + GAMMA ^ word) & MASK)
    return state


def mix(x: int) -> int:
    """The finalizer of splitmix64: a bijection of 0..2**64-1."""
    x = (x ^ x >> 30) * _MIX_1 & MASK
    x = (x ^ x >> 27) * _MIX_2 & MASK
    return x ^ x >> 31
