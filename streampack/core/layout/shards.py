"""Shards: the tokens of a pack that a context-parallel rank holds.

With context parallelism over W ranks, ``zigzag`` cuts each segment [s, e) into 2W equal chunks, c = (e - s) / 2W. Rank
r holds chunks r and 2W - 1 - r, so that causal attention costs every rank the same. This is the layout of
TransformerEngine's ``thd_get_partitioned_indices`` (context_parallel.cu), which Megatron-Core and the RL frameworks
built on it use. That kernel silently loses tokens unless boundaries end at T and every segment is a multiple of 2W, so
both are checked here.

``zigzag_pack`` cuts the whole pack in this way (Megatron without masks between documents, torch's head-tail balancer).
``contiguous`` gives rank r the range [r * T / W, (r + 1) * T / W) (Ulysses, llama3-style ring attention).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streampack.core.layout.boundaries import Layouts
from streampack.core.model.samples import I32, I64

LAYOUTS = ("zigzag", "zigzag_pack", "contiguous", "whole")
"""Context-parallel layouts: a rank holds two chunks of every segment, two of the pack, a range of the pack, or all."""


@dataclass(frozen=True, slots=True)
class Slices:
    """The slices of several packs that one context-parallel rank holds, in the rank's order.

    Attributes:
        start: int64 [k], where each slice begins in its pack.
        stop: int64 [k], where each slice ends in its pack.
        segment: int64 [k], the segment of ``Layouts`` that each slice lies in.
        first: int64 [packs + 1], the first slice of each pack.
    """

    start: I64
    stop: I64
    segment: I64
    first: I64


def cut(laid: Layouts, cp: int, rank: int, kind: str) -> Slices:
    """Return the slices of each pack that ``rank`` of ``cp`` ranks holds; each slice lies in one segment.

    ``whole`` gives every segment, ``zigzag`` two slices of each. ``zigzag_pack`` and ``contiguous`` cut the pack
    as one, and cut the result again where segments meet. Raises ValueError, which names the segment or pack, if a size
    cannot be cut evenly.

    >>> from streampack.core.layout.boundaries import layouts
    >>> laid = layouts(np.array([8, 8]), np.array([2]), 1, 16)
    >>> [a.tolist() for a in (cut(laid, 2, 0, "zigzag").start, cut(laid, 2, 0, "zigzag").stop)]
    [[0, 6, 8, 14], [2, 8, 10, 16]]
    """
    if kind not in LAYOUTS:
        raise ValueError(f"got context-parallel layout {kind!r}, expected one of {', '.join(LAYOUTS)}")
    if not 0 <= rank < cp:
        raise ValueError(f"got context-parallel rank {rank}, expected 0 <= rank < {cp}")
    all_slices = np.arange(len(laid.start))
    if kind == "whole" or cp == 1:
        return Slices(laid.start, laid.stop, all_slices, laid.first_segment)
    if kind == "zigzag":
        size = laid.stop - laid.start
        _check_even(size, 2 * cp, "segment", f"Set align.sample and align.pack to multiples of {2 * cp}")
        chunk = size // (2 * cp)
        start = np.stack([laid.start + rank * chunk, laid.stop - (rank + 1) * chunk], axis=1).ravel()
        return Slices(start, start + np.repeat(chunk, 2), np.repeat(all_slices, 2), 2 * laid.first_segment)
    total = laid.stop[laid.first_segment[1:] - 1]
    parts = 2 * cp if kind == "zigzag_pack" else cp
    _check_even(total, parts, "pack", f"Set the budget to a multiple of {parts}")
    chunk = total // parts
    numbers = (rank, 2 * cp - 1 - rank) if kind == "zigzag_pack" else (rank,)
    return _intersect(laid, [(number * chunk, (number + 1) * chunk) for number in numbers])


def cut_groups(laid: Layouts, sizes: I64, ranks: I64) -> Slices:
    """Return the slices of packs by ``zigzag``, each pack cut for a group of its own size.

    Pack i is cut for ``sizes[i]`` ranks, and the slices are those of rank ``ranks[i]``, int64 [packs]. A group of one
    rank has whole segments. Raises ValueError as ``cut`` does.
    """
    counts = np.diff(laid.first_segment)
    size, rank = np.repeat(sizes, counts), np.repeat(ranks, counts)
    length, wide = laid.stop - laid.start, size > 1
    _check_even(
        length, np.where(wide, 2 * size, 1), "segment", "Every sample is padded to twice the ranks of its group"
    )
    chunk = np.where(wide, length // (2 * size), length)
    pieces = 1 + wide
    before = np.append(0, np.cumsum(pieces))
    segment = np.repeat(np.arange(len(size)), pieces)
    second = np.arange(len(segment)) != before[segment]
    start = np.where(wide, laid.start + rank * chunk, laid.start)[segment]
    start = np.where(second, (laid.stop - (rank + 1) * chunk)[segment], start)
    return Slices(start, start + chunk[segment], segment, before[laid.first_segment])


def _check_even(sizes: I64, parts: int | I64, noun: str, advice: str) -> None:
    """Raise ValueError, which names the first wrong size, unless all ``sizes`` are multiples of ``parts``."""
    ragged = sizes % parts != 0
    if ragged.any():
        at = int(np.argmax(ragged))
        unit = parts if isinstance(parts, int) else int(parts[at])
        raise ValueError(f"got {int(sizes[at])} tokens in {noun} {at}, expected a multiple of {unit}. {advice}")


def _intersect(laid: Layouts, intervals: list[tuple[I64, I64]]) -> Slices:
    """Return the slices of each pack inside the ``intervals`` [a, b), cut where segments meet; no slice is empty.

    Each interval has bounds a and b for every pack, int64 [packs].
    """
    counts = np.diff(laid.first_segment)
    pack = np.repeat(np.arange(len(counts)), counts)
    start = np.stack([np.maximum(laid.start, a[pack]) for a, _ in intervals], axis=1)
    stop = np.stack([np.minimum(laid.stop, b[pack]) for _, b in intervals], axis=1)
    segment, interval = np.nonzero(start < stop)
    order = np.argsort(pack[segment] * len(intervals) + interval, kind="stable")
    segment, interval = segment[order], interval[order]
    first = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(np.bincount(pack[segment], minlength=len(counts)), out=first[1:])
    return Slices(start[segment, interval], stop[segment, interval], segment, first)


def shard_slices(cu_seqlens_padded: I32, cp: int, rank: int, kind: str) -> tuple[I64, I64]:
    """Return the slices of one pack that a rank holds, as ``cut`` does: starts and stops, int64 [k] each."""
    cu = np.asarray(cu_seqlens_padded, np.int64)
    size = np.diff(cu)
    number = np.array([0, len(size)])
    slices = cut(Layouts(size, size, cu[:-1], cu[1:], number, number), cp, rank, kind)
    return slices.start, slices.stop
