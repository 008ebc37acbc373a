"""Items, patches, bytes and cost of each sample's media: what the packing core knows of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from streampack.core.media.media_format import check, decode
from streampack.core.model.fields import Field
from streampack.core.model.keys.planning_keys import MediaLimits
from streampack.core.model.lease_terms import StreamTerms
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64, MEDIA_ROW

MEDIA_COUNT_BYTES = 8
"""Bytes of a sample in the frame of counts."""


STEP_COLUMNS: Mapping[str, str] = {"items_u32": "items", "bytes_u32": "extra_bytes"}
"""The columns of ``MediaColumns``, and the columns of the ``SampleTable`` that they hold."""


class MediaColumns(Struct, frozen=True, forbid_unknown_fields=True):
    """Columns of a step's n samples: uint32 [n] each.

    Attributes:
        items_u32: Media items of each sample.
        bytes_u32: Bytes of each sample's media, which the frame ``media`` has one sample after another.
    """

    items_u32: bytes
    bytes_u32: bytes

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

    def columns(self, rows: I64) -> dict[str, I64]:
        """Return the columns of ``samples.MEDIA_ROW`` of the samples with numbers ``rows``, int64 [k], by name."""
        return {
            "items": self.items[rows], "patches": self.patches[rows],
            "extra_bytes": np.diff(self.bounds)[rows], "extra_cost": self.costs[rows],
        }  # fmt: skip

    def total(self) -> MediaOfChunk:
        """Return the media of all samples as those of one sample."""
        items, patches, costs = (column.sum(keepdims=True) for column in (self.items, self.patches, self.costs))
        return MediaOfChunk(items, self.bounds[[0, -1]], patches, costs)


def media_of_chunk(payload: Sequence[Any], count: int, terms: StreamTerms | None) -> MediaOfChunk | None:
    """Return the media of a chunk of ``count`` samples; None if the stream has none. Raises ValueError for wrong media.

    ``terms``: terms of the stream; None stands for those of a stream without media.
    """
    if terms is None or not terms.media_fields:
        return None
    return read_media(payload[-2:], count, terms.media_fields, terms.media_factors)


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


def media_of_sample(payload: Sequence[Any], sample: int, rules: Rules) -> dict[str, NDArray[Any]] | None:
    """Return the values of the media of a sample of a chunk by field; None if the sample has no items.

    ``payload``: the chunk's frames. ``sample``: number of the sample in the chunk.
    """
    items, sizes = np.frombuffer(payload[-2], "<u4").reshape(-1, 2).astype(np.int64).T
    if not items[sample]:
        return None
    end = int(sizes[: sample + 1].sum())
    data = payload[-1][end - int(sizes[sample]) : end]
    return decode(rules.media_fields, [data], items[sample : sample + 1]).values


def over_limits(media: MediaOfChunk, limits: MediaLimits) -> NDArray[np.bool_]:
    """Return the samples that no pack may hold, because one alone exceeds its ``limits``, bool [n]."""
    over = np.zeros(len(media.items), np.bool_)
    for counts, most in ((media.items, limits.items), (media.patches, limits.patches)):
        if most is not None:
            over |= counts > most
    return over


def wrong_media(
    rows: NDArray[np.void], extras: NDArray[np.void], starts: I64, rules: Rules, max_tokens: int, most: int
) -> str:  # fmt: skip
    """Return an error text if the media of a snapshot's samples break the rules, or exceed the memory; empty if not.

    Args:
        rows: The samples, ``samples.ROW`` [n].
        extras: Their other columns, ``samples.EXTRA_ROW`` [n].
        starts: Bounds of the pending packs in the rows, int64 [packs + 1].
        rules: The rules.
        max_tokens: Tokens of samples that fit in the memory.
        most: The largest cost of a sample.
    """
    if not rules.has_extra_bytes:
        return "got samples with media, expected none without fields of axis item or patch"
    items, patches, size, cost = (extras[name].astype(np.float64) for name in MEDIA_ROW.names or ())
    if ((items < 0) | (patches < 0) | (size < 0) | (cost < 0) | ((items == 0) & (size > 0))).any():
        return "got samples with less than no media, or with media and no items, expected media of items"
    tokens = float((-(-size // rules.token_bytes)).sum() + rows["length"].astype(np.float64).sum())
    if tokens > max_tokens or (cost > most).any():
        return f"got media of {size.sum():.0f} bytes, expected fewer. Give the broker more memory"
    limits = rules.limits or MediaLimits()
    for counts, limit in ((items, limits.items), (patches, limits.patches)):
        total = np.append(0, np.cumsum(counts))
        if limit is not None and ((np.diff(total[starts]) > limit).any() or (counts > limit).any()):
            return "got a pack or a sample whose media exceed the limits of a pack"
    return ""
