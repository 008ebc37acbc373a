"""Structs with a zero, or with some value, in every field."""

from __future__ import annotations

import enum
import types
import zlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

Struct = TypeVar("Struct", bound=msgspec.Struct)


def blank(kind: type[Struct], **values: Any) -> Struct:
    """Return a ``kind`` with these values, and zeros or nothing in the other fields without a default."""
    fields = msgspec.structs.fields(kind)
    zeros = {field.name: _zero(field.type) for field in fields if field.required and field.name not in values}
    return kind(**zeros, **values)


def _zero(kind: Any) -> Any:
    if get_origin(kind) is Annotated:
        return _zero(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return get_args(kind)[0]
    if isinstance(kind, types.UnionType):
        return None if types.NoneType in get_args(kind) else _zero(get_args(kind)[0])
    made = get_origin(kind) or kind
    return blank(made) if issubclass(made, msgspec.Struct) else made()


def full(kind: Any, made: Mapping[type, Any], path: str = "") -> Any:
    """Return a value of a type with something in every field, lists and dicts too. It follows from the field's path.

    ``made``: values of types that need others.
    """
    if kind in made:
        return made[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return full(arguments[0], made, path)
    if origin in (Union, types.UnionType):
        return full(next(each for each in arguments if each not in (types.NoneType, msgspec.UnsetType)), made, path)
    if origin is Literal:
        return arguments[zlib.crc32(path.encode()) % len(arguments)]
    if origin is dict:
        return {
            full(arguments[0], made, f"{path}.{name}"): full(arguments[1], made, f"{path}.{name}")
            for name in ("one", "two")
        }
    if origin is list or (origin is tuple and arguments[1:] == (...,)):
        return origin(full(arguments[0], made, f"{path}.{at}") for at in range(2))
    if origin is tuple:
        return tuple(full(each, made, f"{path}.{at}") for at, each in enumerate(arguments))
    if issubclass(kind, msgspec.Struct):
        try:
            return kind(
                **{each.name: full(each.type, made, f"{path}.{each.name}") for each in msgspec.structs.fields(kind)}
            )
        except ValueError:  # rules that contradict each other
            return blank(kind)
    if kind is bool:
        return True
    if issubclass(kind, enum.Enum):
        return next(iter(kind))
    number = zlib.crc32(path.encode()) % 1000
    return path.rpartition(".")[2] if kind is str else kind(number)
