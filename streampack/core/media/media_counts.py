"""Items, patches, bytes and cost of each sample's media: what the packing core knows of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from streampack.core.media.media_format import check
from streampack.core.model.fields import Field
from streampack.core.model.keys.planning_keys import MediaLimits
from streampack.core.model.samples import I64

MEDIA_COUNT_BYTES = 8
"""Bytes of a sample in the frame of counts."""


class MediaColumns(Struct, frozen=True, forbid_unknown_fields=True):
    """Columns of a step's n samples: uint32 [n] each.

    Attributes:
        items_u32: Media items of each sample.
        bytes_u32: Bytes of each sample's media, which the frame ``media`` has one sample after another.
    """

    items_u32: bytes
    bytes_u32: bytes

    def cut(self, first: int, stop: int | None = None) -> MediaColumns:
        """Return the columns of samples [first, stop)."""
        at = slice(4 * first, None if stop is None else 4 * stop)
        return MediaColumns(self.items_u32[at], self.bytes_u32[at])

    def arrays(self, count: int) -> tuple[I64, I64]:
        """Return the items and the bytes of ``count`` samples, int64 [n]. Raises ValueError for another count."""
        if len(self.items_u32) != 4 * count or len(self.bytes_u32) != 4 * count:
            raise ValueError(
                f"got {len(self.items_u32)} and {len(self.bytes_u32)} bytes of media columns, expected {4 * count}"
            )
        items, sizes = (np.frombuffer(column, "<u4").astype(np.int64) for column in (self.items_u32, self.bytes_u32))
        _check_empty(items, sizes)
        return items, sizes


def _check_empty(items: I64, sizes: I64) -> None:
    """Raise ValueError if a sample has bytes of media and no items, or the other way round."""
    if ((items == 0) != (sizes == 0)).any():
        raise ValueError("got media of a sample without items, expected bytes for the items and for nothing else")


class MediaOfChunk(Struct, frozen=True):
    """The checked media of a chunk of n samples.

    Attributes:
        items: int64 [n], items of each sample.
        bounds: int64 [n + 1], where the media of each sample begin in the chunk's last payload frame.
        patches: int64 [n], patches of each sample.
        costs: int64 [n], cost of each sample's media, by the rules of its feed.
    """

    items: I64
    bounds: I64
    patches: I64
    costs: I64

    def after(self, skip: int) -> MediaOfChunk:
        """Return the media of the samples from the ``skip``-th on."""
        return MediaOfChunk(self.items[skip:], self.bounds[skip:], self.patches[skip:], self.costs[skip:])

    def total(self) -> MediaOfChunk:
        """Return the media of all samples as those of one sample."""
        items, patches, costs = (column.sum(keepdims=True) for column in (self.items, self.patches, self.costs))
        return MediaOfChunk(items, self.bounds[[0, -1]], patches, costs)


def read_media(
    frames: Sequence[Any], count: int, fields: Sequence[Field], factors: tuple[int, int, int]
) -> MediaOfChunk:
    """Check the media of a chunk, and count them.

    Args:
        frames: The chunk's last two payload frames: uint32 [n, 2], items and bytes of each sample, and the bytes.
        count: Samples of the chunk, n.
        fields: The declared fields of axis item and patch.
        factors: (a, b, c): an item of p patches costs ``a * p + b * p * p + c``.

    Raises:
        ValueError: Frames and fields do not fit together.
    """
    if len(frames) != 2 or memoryview(frames[0]).nbytes != MEDIA_COUNT_BYTES * count:
        raise ValueError(f"got no counts of media, expected {MEDIA_COUNT_BYTES * count} bytes of counts, and the media")
    columns, data = np.frombuffer(frames[0], "<u4").reshape(-1, 2).astype(np.int64), frames[1]
    items, sizes = columns.T
    _check_empty(items, sizes)
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    if bounds[-1] != memoryview(data).nbytes:
        raise ValueError(f"got {memoryview(data).nbytes} payload bytes of media, expected {int(bounds[-1])} bytes")
    patches, costs = np.zeros((2, count), np.int64)
    view, (a, b, c) = memoryview(data).cast("B"), factors
    for i in np.flatnonzero(items).tolist():
        counts = check(fields, view[bounds[i] : bounds[i + 1]], int(items[i]))
        patches[i] = counts.sum()
        costs[i] = int((counts * (a + b * counts) + c).sum())
    return MediaOfChunk(items, bounds, patches, costs)


def media_sizes(counts: Any) -> I64:
    """Return the bytes of each sample's media, int64 [n], given a chunk's frame of counts."""
    return np.frombuffer(counts, "<u4").reshape(-1, 2)[:, 1].astype(np.int64)


def over_limits(media: MediaOfChunk, limits: MediaLimits) -> NDArray[np.bool_]:
    """Return the samples that no pack may hold, because one alone exceeds its ``limits``, bool [n]."""
    found = np.zeros(len(media.items), np.bool_)
    for counts, most in ((media.items, limits.items), (media.patches, limits.patches)):
        if most is not None:
            found |= counts > most
    return found
