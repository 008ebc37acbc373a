"""What the bytes of an input mean: a tree in msgpack, JSON or YAML, or nothing more than bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack
import msgspec
import yaml


class Form(NamedTuple):
    """``read`` gives the tree, or None where there is none; ``write`` its bytes."""

    read: Callable[[bytes], Any]
    write: Callable[[Any], bytes]


def packed(tree: Any) -> bytes:
    """A tree as an input in msgpack. Integers beyond 64 bits become the nearest that it holds; other values, text."""
    try:
        found: bytes = msgpack.packb(_in_64_bits(tree), default=str)
    except (ValueError, OverflowError, RecursionError):
        return b"\xc0"
    return found


def _in_64_bits(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _in_64_bits(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_in_64_bits(value) for value in tree]
    if isinstance(tree, int) and not isinstance(tree, bool):
        return min(max(tree, -(2**63)), 2**64 - 1)
    return tree


def unpacked(data: bytes) -> Any:
    """The tree; None where there is none."""
    try:
        return msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError):  # TypeError: a list for a key
        return None


def _from_json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _to_json(tree: Any) -> bytes:
    try:
        return json.dumps(tree, default=repr).encode(errors="replace")
    except (ValueError, TypeError, RecursionError):
        return b"null"


def _from_yaml(data: bytes) -> Any:
    try:
        return msgspec.yaml.decode(data)
    except (ValueError, RecursionError, yaml.YAMLError):
        return None


def _to_yaml(tree: Any) -> bytes:
    try:
        return msgspec.yaml.encode(tree)
    except (ValueError, TypeError, RecursionError):
        return _to_json(tree)


MSGPACK = Form(unpacked, packed)
JSON = Form(_from_json, _to_json)
YAML = Form(_from_yaml, _to_yaml)
BYTES = Form(lambda _: None, lambda tree: tree)
