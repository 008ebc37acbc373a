"""The media of one sample as bytes: its items' patch counts, and the values of all fields of axis item and patch.

For a sample with k items and p patches in all, little-endian and without gaps:

- uint32 [k], patches of each item;
- for each field, in the order of the rules: [k, ...] of axis ``item``, or [p, ...] of axis ``patch``. For a field of
  references: uint32 [k], the bytes of each, and the references one after another (``references``).

A sample without items has no bytes. Values are copied when they are decoded, since nothing here is aligned.

>>> from streampack.core.model.fields import Field
>>> sizes = Field(name="grid", dtype="uint8", axis="item", shape=(2,))
>>> pixels = Field(name="pixels", dtype="uint8", axis="patch")
>>> data = encode((sizes, pixels), np.array([2, 1]), {"grid": np.array([[1, 2], [1, 1]]), "pixels": np.arange(3)})
>>> media = decode((sizes, pixels), [data], np.array([2]))
>>> media.patches.tolist(), media.values["grid"].tolist(), media.values["pixels"].tolist()
([2, 1], [[1, 2], [1, 1]], [0, 1, 2])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.fields import Field
from streampack.core.model.samples import I64

MAX_ITEMS = 1 << 16
"""Most items of a sample."""
MAX_PATCHES = 1 << 24
"""Most patches of a sample, so that its cost fits 64 bits."""


class DecodedMedia(NamedTuple):
    """The media of several samples, one after another.

    Attributes:
        patches: int64 [items], patches of each item.
        values: By field: [items, ...] of axis ``item``, [patches, ...] of axis ``patch``, in the dtype of its storage.
            References are an array of objects [items], each the bytes of one.
    """

    patches: I64
    values: dict[str, NDArray[Any]]


def num_bytes(fields: Sequence[Field], items: int, patches: int) -> int:
    """Return the bytes of a sample's media without the references themselves; 0 without items."""
    counts = {"item": items, "patch": patches}
    size = (4 * items if field.is_reference else counts[field.axis] * field.value_bytes for field in fields)
    return 4 * items + sum(size) if items else 0


def encode(fields: Sequence[Field], patches: NDArray[Any], values: Mapping[str, NDArray[Any]]) -> bytes:
    """Return a sample's media as bytes.

    Args:
        fields: The declared fields of axis item and patch.
        patches: [k], patches of each item.
        values: The value of every field, with k or sum(patches) rows; bfloat16 as its bits, references as bytes.
    """
    if not len(patches):
        return b""
    parts = [np.ascontiguousarray(patches, "<u4").tobytes()]
    for field in fields:
        if field.is_reference:
            data = list(values[field.name])
            parts += [np.array([len(item) for item in data], "<u4").tobytes(), *data]
        else:
            parts.append(np.ascontiguousarray(values[field.name], field.storage).tobytes())
    return b"".join(parts)


def patches_of(data: Any, items: int) -> I64:
    """Return the patches of each of a sample's ``items``, int64 [items]. Raises ValueError if ``data`` is too short."""
    if len(data) < 4 * items:
        raise ValueError(f"got {len(data)} bytes of media, expected at least {4 * items} bytes for {items} items")
    return np.frombuffer(data, "<u4", items).astype(np.int64)


def check(fields: Sequence[Field], data: Any, items: int) -> I64:
    """Return the patches of each item of a sample, int64 [items]. Raises ValueError if ``data`` is no such media."""
    if items > MAX_ITEMS:
        raise ValueError(f"got a sample with {items} media items, expected at most {MAX_ITEMS}")
    patches = patches_of(data, items)
    total = int(patches.sum())
    if total > MAX_PATCHES:
        raise ValueError(f"got a sample with {total} patches, expected at most {MAX_PATCHES}")
    expected, at = num_bytes(fields, items, total), 4 * items
    for field in fields:
        if field.is_reference and len(data) >= expected:
            sizes = np.frombuffer(data, "<u4", items, at).astype(np.int64)
            expected, at = expected + int(sizes.sum()), at + 4 * items + int(sizes.sum())
        else:
            at += field.value_bytes * (items if field.axis == "item" else total)
    if len(data) != expected:
        raise ValueError(
            f"got {len(data)} bytes of media for {items} items and {total} patches, expected {expected} bytes"
        )
    return patches


def decode(fields: Sequence[Field], data: Sequence[Any], items: I64) -> DecodedMedia:
    """Return the media of several samples, one after another.

    Args:
        fields: The declared fields of axis item and patch.
        data: The media bytes of each sample.
        items: int64 [n], items of each sample.

    Raises:
        ValueError: The bytes of a sample do not fit its items and the fields.
    """
    samples = [(check(fields, item, count), item) for item, count in zip(data, items.tolist(), strict=True) if count]
    patches = np.concatenate([counts for counts, _ in samples]) if samples else np.zeros(0, np.int64)
    values: dict[str, NDArray[Any]] = {}
    totals = {"item": len(patches), "patch": int(patches.sum())}
    offsets = [4 * len(counts) for counts, _ in samples]
    for field in fields:
        if field.is_reference:
            references = np.empty(len(patches), object)
            place = 0
            for number, (counts, item) in enumerate(samples):
                begin, k = offsets[number], len(counts)
                sizes = np.frombuffer(item, "<u4", k, begin).astype(np.int64)
                ends = begin + 4 * k + np.cumsum(sizes)
                for start, end in zip((ends - sizes).tolist(), ends.tolist(), strict=True):
                    references[place] = bytes(item[start:end])
                    place += 1
                offsets[number] = int(ends[-1])
            values[field.name] = references
            continue
        to = np.empty((totals[field.axis], *field.shape), field.storage)
        flat, at = to.reshape(-1).view(np.uint8), 0
        for number, (counts, item) in enumerate(samples):
            size = field.value_bytes * (len(counts) if field.axis == "item" else int(counts.sum()))
            begin = offsets[number]
            flat[at : at + size] = np.frombuffer(item, np.uint8, size, begin)
            at, offsets[number] = at + size, begin + size
        values[field.name] = to
    return DecodedMedia(patches, values)
