"""Structs with a zero in every field, for tests that care about a few fields of a large one."""

from __future__ import annotations

import types
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

Struct = TypeVar("Struct", bound=msgspec.Struct)


def blank(kind: type[Struct], **values: Any) -> Struct:
    """Return a ``kind`` with these values, and zeros or nothing in the other fields without a default."""
    fields = msgspec.structs.fields(kind)
    zeros = {field.name: _zero(field.type) for field in fields if field.required and field.name not in values}
    return kind(**zeros, **values)


def _zero(kind: Any) -> Any:
    if get_origin(kind) is Literal:
        return get_args(kind)[0]
    if isinstance(kind, types.UnionType):
        return None if types.NoneType in get_args(kind) else _zero(get_args(kind)[0])
    made = get_origin(kind) or kind
    return blank(made) if issubclass(made, msgspec.Struct) else made()
