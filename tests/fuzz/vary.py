"""Valid messages, changed by the types of their fields: every message still decodes, and says something else.

``mutate`` changes trees and bytes, most of which are refused by the decoder. This module asks ``msgspec`` for the type
of each field, and draws another value of the type: a bound, a neighbor, or a value that another message has in a field
of the same name. Columns of numbers (``*_u32``, ``*_u64``) change by number, or all together in length.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from random import Random
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, inspect
from msgspec.structs import replace

from streampack.core.protocol.message import Envelope, Message
from streampack.errors import WireError
from streampack.wire import frames as wire
from tests.fuzz.mutate import NUMBERS, TEXTS, mutated_bytes
from tests.fuzz.stage import KINDS

MOST_TEXTS = 24
"""Values of one field that are remembered."""
MOST_ITEMS = 300
_COLUMNS = {"_u32": "<u4", "_u64": "<u8"}


@functools.cache
def _type_of(kind: Hashable) -> Any:
    return inspect.type_info(kind)


class Vary:
    """Changes messages; what it draws, it draws from ``rng``."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self._known: dict[tuple[str, type], dict[Any, None]] = {}

    def learn(self, value: Any, name: str = "") -> None:
        """Remember the values of a message's fields, by name."""
        if isinstance(value, msgspec.Struct):
            for field in value.__struct_fields__:
                self.learn(getattr(value, field), field)
        elif isinstance(value, list | tuple):
            for item in value[:8]:
                self.learn(item, name)
        elif isinstance(value, dict):
            for key, item in list(value.items())[:8]:
                self.learn(key, name)
                self.learn(item, name)
        elif isinstance(value, int | str | bytes) and not isinstance(value, bool):
            values = self._known.setdefault((name, type(value)), {})
            values[value] = None
            if len(values) > MOST_TEXTS:
                del values[next(iter(values))]

    def envelope(self, envelope: Envelope) -> Envelope | None:
        """Return a changed message as its receiver decodes it; None if the change has made it invalid."""
        rng, message, payload = self.rng, envelope.message, list(envelope.payload)
        try:
            for _ in range(rng.choice((1, 1, 1, 2, 2, 4))):
                message = self._message(message)
            if rng.random() < 0.15:
                message, payload = self._length(message, payload)
            if rng.random() < 0.1:
                payload = self._payload(payload)
            changed = replace(envelope, message=message, payload=tuple(payload), payload_crc=None)
            for name in ("run", "epoch", "fence"):
                if rng.random() < 0.05:
                    changed = replace(changed, **{name: self._number(getattr(envelope, name), 0, 2**62 - 1)})
            return wire.decode([bytes(memoryview(frame)) for frame in wire.encode(changed)])
        except (WireError, ValueError, OverflowError, TypeError):
            return None

    def _message(self, message: Message) -> Message:
        """Return a message with another value somewhere; sometimes another kind with the same fields."""
        found: Message = self._struct(message, _type_of(type(message)))
        if self.rng.random() > 0.03:
            return found
        kind = self.rng.choice(list(KINDS.values()))
        values = {name: getattr(found, name) for name in found.__struct_fields__ if name in kind.__struct_fields__}
        for field in _type_of(kind).fields:
            if field.required and field.name not in values:
                values[field.name] = self._drawn(field.type, field.name)
        return kind(**values)

    def _struct(self, value: Any, kind: Any) -> Any:
        field = self.rng.choice(kind.fields) if kind.fields else None
        if field is None:
            return value
        old, optional = getattr(value, field.name), not field.required
        if old is UNSET:
            new = self._drawn(field.type, field.name)
        elif optional and type(value)(**_required(value)) and self.rng.random() < 0.1:
            return type(value)(**{k: v for k, v in _values(value).items() if k != field.name})
        else:
            new = self._changed(old, field.type, field.name)
        return type(value)(**_values(value) | {field.name: new})

    def _changed(self, value: Any, kind: Any, name: str) -> Any:
        """Return another value of the type ``kind``, near to ``value`` or not."""
        rng = self.rng
        if isinstance(kind, inspect.UnionType):
            fits = [each for each in kind.types if _fits(value, each)]
            others = [each for each in kind.types if each not in fits]
            if others and (not fits or rng.random() < 0.25):
                return self._drawn(rng.choice(others), name)
            return self._changed(value, fits[0], name)
        if isinstance(kind, inspect.StructType) and isinstance(value, msgspec.Struct):
            return self._struct(value, kind)
        if isinstance(kind, inspect.ListType | inspect.VarTupleType) and isinstance(value, list | tuple) and value:
            return type(value)(self._items(list(value), kind, name))
        if isinstance(kind, inspect.TupleType):
            at = rng.randrange(len(value))
            return tuple(
                self._changed(item, kind.item_types[n], name) if n == at else item for n, item in enumerate(value)
            )
        if isinstance(kind, inspect.DictType) and value:
            key = rng.choice(list(value))
            match rng.randrange(4):
                case 0:
                    return {k: v for k, v in value.items() if k != key}
                case 1:
                    return value | {self._drawn(kind.key_type, name): self._drawn(kind.value_type, name)}
                case _:
                    return value | {key: self._changed(value[key], kind.value_type, name)}
        if isinstance(kind, inspect.BytesType):
            return self._bytes(value, name)
        if isinstance(kind, inspect.IntType):
            return self._number(value, *_bounds(kind), name=name)
        return self._drawn(kind, name)

    def _items(self, items: list[Any], kind: Any, name: str) -> list[Any]:
        rng, at = self.rng, self.rng.randrange(len(items))
        match rng.randrange(8):
            case 0:
                return items[:at] + items[at + 1 :]
            case 1:
                return [*items, items[at]]
            case 2:
                return [*items, self._drawn(kind.item_type, name)]
            case 3:
                return (items * MOST_ITEMS)[: min(kind.max_length or MOST_ITEMS, MOST_ITEMS)]
            case 4:
                return []
            case _:
                return [*items[:at], self._changed(items[at], kind.item_type, name), *items[at + 1 :]]

    def _drawn(self, kind: Any, name: str) -> Any:
        """Return some value of a type."""
        rng = self.rng
        match kind:
            case inspect.UnionType():
                return self._drawn(rng.choice(kind.types), name)
            case inspect.NoneType():
                return None
            case inspect.BoolType():
                return rng.random() < 0.5
            case inspect.IntType():
                return self._number(0, *_bounds(kind), name=name)
            case inspect.FloatType():
                return rng.choice((0.0, -0.0, -1.0, 0.5, 1e9, 1e12, 1e300, float("inf"), float("nan")))
            case inspect.StrType():
                most = kind.max_length or 1 << 12
                return rng.choice((*self._of(name, str), *self._of(name, str), *TEXTS, "x" * most))[:most]
            case inspect.BytesType():
                return self._bytes(b"", name)
            case inspect.LiteralType():
                return rng.choice(kind.values)
            case inspect.ListType() | inspect.VarTupleType():
                items = [self._drawn(kind.item_type, name) for _ in range(rng.choice((0, 1, 1, 2, 5)))]
                return items if isinstance(kind, inspect.ListType) else tuple(items)
            case inspect.TupleType():
                return tuple(self._drawn(each, name) for each in kind.item_types)
            case inspect.DictType():
                return {
                    self._drawn(kind.key_type, name): self._drawn(kind.value_type, name)
                    for _ in range(rng.randrange(3))
                }
            case inspect.StructType():
                return kind.cls(**{
                    each.name: self._drawn(each.type, each.name)
                    for each in kind.fields if each.required or rng.random() < 0.3
                })  # fmt: skip
        raise TypeError(f"got a field of type {kind}, which vary does not know")

    def _of(self, name: str, kind: type) -> list[Any]:
        return list(self._known.get((name, kind), ()))

    def _number(self, value: int, low: int, high: int, name: str = "") -> int:
        rng, known = self.rng, self._of(name, int)
        near = value + rng.choice((-2, -1, 1, 2)), value * 2, value // 2
        far = low, low + 1, high, high - 1, rng.choice(NUMBERS), rng.randrange(1 << rng.choice((4, 8, 20, 62)))
        found: int = rng.choice((*near, *far, *(rng.sample(known, min(4, len(known))))))
        return max(low, min(found, high))

    def _bytes(self, value: bytes, name: str) -> bytes:
        rng, known = self.rng, self._of(name, bytes)
        dtype = _COLUMNS.get(name[-4:])
        if known and rng.random() < 0.2:
            return bytes(rng.choice(known))
        if dtype is None or not value or rng.random() < 0.15:
            return mutated_bytes(value, rng)
        column = np.frombuffer(value[: len(value) // int(dtype[2]) * int(dtype[2])], dtype).copy()
        if len(column):
            at, most = rng.randrange(len(column)), 2 ** (8 * int(dtype[2])) - 1
            column[at] = self._number(int(column[at]), 0, most)
        return column.tobytes()

    def _length(self, message: Message, payload: list[Any]) -> tuple[Message, list[Any]]:
        """Return a message whose columns all have another number of rows, and a payload that fits."""
        columns = {name: getattr(message, name) for name in message.__struct_fields__ if name[-4:] in _COLUMNS}
        sizes = {name: len(data) // int(_COLUMNS[name[-4:]][2]) for name, data in columns.items() if data}
        if not sizes:
            return message, payload
        before = max(sizes.values())
        after = self.rng.choice((0, 1, before - 1, before + 1, 2 * before, 40))
        resized = {
            name: _resized(columns[name], int(_COLUMNS[name[-4:]][2]) * after) for name in sizes if columns[name]
        }
        frames = [_resized(frame, len(bytes(frame)) * after // max(before, 1)) for frame in payload]
        return replace(message, **resized), frames

    def _payload(self, payload: list[Any]) -> list[Any]:
        rng, frames = self.rng, [bytes(memoryview(frame)) for frame in payload]
        if not frames:
            return [bytes(rng.choice((0, 1, 8, 64, 4096)))]
        at = rng.randrange(len(frames))
        match rng.randrange(4):
            case 0:
                return frames[:at] + frames[at + 1 :]
            case 1:
                return [*frames, frames[at]]
            case 2:
                return [*frames[:at], _resized(frames[at], rng.choice((0, 1, 8, 4096))), *frames[at + 1 :]]
            case _:
                return [*frames[:at], mutated_bytes(frames[at], rng), *frames[at + 1 :]]


def _resized(data: Any, size: int) -> bytes:
    """Return ``size`` bytes that repeat ``data``."""
    body = bytes(memoryview(data)) or b"\0"
    return (body * (size // len(body) + 1))[:size]


def _values(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__struct_fields__ if getattr(value, name) is not UNSET}


def _required(value: Any) -> dict[str, Any]:
    kind: Any = type(value)
    names = {field.name for field in _type_of(kind).fields if field.required}
    return {name: each for name, each in _values(value).items() if name in names}


def _bounds(kind: Any) -> tuple[int, int]:
    low = kind.ge if kind.ge is not None else -(2**63)
    high = kind.le if kind.le is not None else (kind.lt - 1 if kind.lt is not None else 2**64 - 1)
    return low, high


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value is of a type, among the types of one union."""
    expected: dict[type, type | tuple[type, ...]] = {
        inspect.NoneType: type(None), inspect.BoolType: bool, inspect.IntType: int, inspect.FloatType: float,
        inspect.StrType: str, inspect.BytesType: bytes, inspect.StructType: msgspec.Struct, inspect.DictType: dict,
        inspect.ListType: list, inspect.VarTupleType: tuple, inspect.TupleType: tuple, inspect.LiteralType: (str, int),
    }  # fmt: skip
    return isinstance(value, expected[type(kind)])
