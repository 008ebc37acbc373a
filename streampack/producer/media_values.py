"""A sample's media as a program or a source gives them, turned into the bytes that a producer sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.media.media_format import MAX_ITEMS, MAX_PATCHES, encode
from streampack.core.media.references import Reference, reference_of
from streampack.core.model.fields import MEDIA, PATCHES, Field

ITEMS = "items"
"""Key of the number of a sample's media items, among its values."""
_ONE_REFERENCE = (str, bytes, bytearray, memoryview, Mapping, Reference)


def media_of(
    fields: Mapping[str, Any], declared: Sequence[Field], tokens: NDArray[Any]
) -> dict[str, NDArray[Any]] | str:
    """Return a sample's media by the keys ``MEDIA`` and ``ITEMS``, or the reason why they are invalid.

    A sample has a value for all fields of its media, or for none; an empty list may stand for none. The value of a
    field of axis ``patch`` is a list with an array for each item. It may be one array, if the sample says in
    ``patches`` how many rows each item has. A reference need not be in a list if the sample has one item.

    Args:
        fields: The values of the sample, by name.
        declared: The run's fields of axis item and patch.
        tokens: The sample's token ids.
    """
    present = [field for field in declared if fields.get(field.name) is not None]
    sizes = fields.get(PATCHES)
    if len(present) < len(declared) and all(_is_empty(fields[field.name]) for field in present):
        if sizes is not None and len(sizes):
            return f"{declared[0].name}: missing"
        return _wrong_placeholder(declared, np.zeros(0, np.int64), tokens) or {}
    if len(present) < len(declared):
        return f"{next(field.name for field in declared if field not in present)}: missing"
    counts: NDArray[Any] | None = None if sizes is None else np.asarray(sizes, None if len(sizes) else np.int64)
    if counts is not None and (counts.ndim != 1 or counts.dtype.kind not in "ui" or (counts < 0).any()):
        return f"{PATCHES}: dtype"
    values: dict[str, Any] = {}
    for field in declared:
        value = fields[field.name]
        if field.is_reference:
            try:
                listed = [value] if isinstance(value, _ONE_REFERENCE) else value
                values[field.name] = [reference_of(one).encode() for one in listed]
            except (ValueError, TypeError):
                return f"{field.name}: reference"
            continue
        if field.axis == "patch" and _is_by_item(value, field):
            parts = [_array_of(part, field) for part in value]
            if any(part is None for part in parts):
                return f"{field.name}: shape"
            own = np.array([len(part) for part in parts if part is not None], np.int64)
            if counts is not None and not np.array_equal(own, counts):
                return f"{field.name}: patches"
            counts, value = own, np.concatenate([_array_of([], field), *parts])
        array = _array_of(value, field)
        if array is None:
            return f"{field.name}: shape"
        stored = field.stored(array)
        if stored is None:
            return f"{field.name}: dtype"
        values[field.name] = stored
    items = {len(values[field.name]) for field in declared if field.axis == "item"}
    if counts is None:
        if any(field.axis == "patch" for field in declared):
            return f"{PATCHES}: missing"
        counts = np.zeros(min(items), np.int64)
    if items - {len(counts)} or len(counts) > MAX_ITEMS or counts.sum() > MAX_PATCHES:
        return "media: items"
    if any(len(values[field.name]) != counts.sum() for field in declared if field.axis == "patch"):
        return "media: patches"
    if wrong := _wrong_placeholder(declared, counts, tokens):
        return wrong
    data = np.frombuffer(encode(declared, counts, values), np.uint8)
    return {MEDIA: data, ITEMS: np.array([len(counts)], np.uint32)}


def _wrong_placeholder(declared: Sequence[Field], patches: NDArray[Any], tokens: NDArray[Any]) -> str | None:
    """Return the reason why tokens do not stand for the items; None if they do. ``patches`` [items] of each item."""
    for field in declared:
        if (placeholder := field.placeholder) is not None:
            expected = int((-(-patches // placeholder.patches)).sum())
            if int(np.isin(tokens, placeholder.tokens).sum()) != expected:
                return f"{field.name}: placeholders"
    return None


def _array_of(value: Any, field: Field) -> NDArray[Any] | None:
    """Return a value as an array [rows, *shape of the field]; None if it has another shape."""
    try:
        array: NDArray[Any] = np.asarray(value)
    except ValueError:  # ragged
        return None
    if array.shape[:1] == (0,):
        return np.zeros((0, *field.shape), field.storage)
    return array if array.ndim == 1 + len(field.shape) and array.shape[1:] == field.shape else None


def _is_empty(value: Any) -> bool:
    """Return whether the value of a field is a list or an array without entries."""
    return value.shape[:1] == (0,) if isinstance(value, np.ndarray) else isinstance(value, list | tuple) and not value


def _is_by_item(value: Any, field: Field) -> bool:
    """Return whether the value of a field of axis patch is a list with the values of each item."""
    if not isinstance(value, list | tuple) or not len(value):
        return isinstance(value, list | tuple)
    first = value[0]
    return (hasattr(first, "__len__") and not len(first)) or np.ndim(first) > len(field.shape)
