"""Where each token of a pack lies, and which of them a context-parallel rank holds.

A pack stores its samples one after another, each padded to the sample alignment, then one tail
segment of padding up to the pack's length. Two boundary arrays describe it: ``cu_seqlens`` for
real tokens, ``cu_seqlens_padded`` for storage; kernels that take one array get the padded one.
The same functions run in the broker, which cuts shards, and in the client, which rebuilds
positions, masks and labels from lengths alone. They know lengths, never where tokens are kept.

Context parallelism over W ranks, ``zigzag``, cuts each segment [s, e) in 2W equal chunks,
c = (e - s) / 2W; rank r holds chunks r and 2W - 1 - r, so that causal attention costs every rank
the same. It is the layout of TransformerEngine's ``thd_get_partitioned_indices``
(context_parallel.cu), which Megatron-Core and the RL frameworks built on it use. Its
preconditions (boundaries that end at T, every segment a multiple of 2W) are checked here, since
the kernel loses tokens silently without. ``zigzag_pack`` cuts the whole pack so (Megatron without
masks between documents, torch's head-tail balancer), ``contiguous`` gives rank r the stretch
[r * T / W, (r + 1) * T / W) (Ulysses, llama3-style ring attention).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.samples import I32, I64, IGNORE_INDEX

LAYOUTS = ("zigzag", "zigzag_pack", "contiguous", "whole")
"""Context-parallel layouts: two chunks of every segment a rank, or of the pack; a stretch of the pack; all of it."""


def round_up(value: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is >= ``value``."""
    return -(-value // multiple) * multiple


class Contents(NamedTuple):
    """Packs to be laid out: their samples' ``handles`` int64 [samples], one pack behind another, and of each, int64
    [packs], its ``counts`` of samples, ``widths`` (T), and ``aligns``: what its samples are padded to a multiple of."""

    handles: I64
    counts: I64
    widths: I64
    aligns: I64


@dataclass(frozen=True, slots=True)
class Layout:
    """One pack's boundaries.

    ``lengths`` int64 [samples], real tokens; ``cu_seqlens`` and ``cu_seqlens_padded`` int32
    [segments + 1]: where there is tail padding, it is one last segment of real length 0.
    """

    lengths: I64
    cu_seqlens: I32
    cu_seqlens_padded: I32

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    @property
    def num_segments(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        """T: real and padding tokens together."""
        return int(self.cu_seqlens_padded[-1])

    @property
    def max_seqlen(self) -> int:
        """The widest slot, in tokens."""
        return int(np.diff(self.cu_seqlens_padded).max())


def layout(lengths: I64, align: int, total: int) -> Layout:
    """Lay samples of ``lengths`` (int64 [n], real tokens) out in a pack of ``total`` tokens.

    Raises ValueError if a length is not positive or if the samples, each padded to a multiple of
    ``align``, do not fit.

    >>> layout(np.array([4, 2]), 1, 8).cu_seqlens_padded.tolist()
    [0, 4, 6, 8]
    """
    lengths = np.asarray(lengths, np.int64)
    return layouts(lengths, np.array([len(lengths)]), align, np.array([total])).packs()[0]


class Boundaries(NamedTuple):
    """Of several packs: ``cu_seqlens`` (``real``) and ``cu_seqlens_padded`` int32 [segments + packs], one pack's behind
    another's, and where each's begin, ``first`` int64 [packs + 1]."""

    real: I32
    padded: I32
    first: I64


@dataclass(frozen=True, slots=True)
class Layouts:
    """Several packs at once, their segments concatenated: one pass of numpy for all of them.

    ``lengths`` int64 [samples]; ``real``, ``start`` and ``stop`` int64 [segments]: real tokens and
    storage of each, from its own pack's start; ``first_sample`` and ``first_segment`` int64 [packs + 1].
    """

    lengths: I64
    real: I64
    start: I64
    stop: I64
    first_sample: I64
    first_segment: I64

    def boundaries(self) -> Boundaries:
        """Of all packs, one's behind another's."""
        counts = np.diff(self.first_segment)
        numbers = np.arange(len(counts))
        ends = np.arange(len(self.stop)) + np.repeat(numbers + 1, counts)
        summed = np.cumsum(self.real)
        before = np.concatenate([[0], summed])[self.first_segment[:-1]]
        real, padded = np.zeros((2, len(self.stop) + len(counts)), np.int32)
        real[ends] = summed - np.repeat(before, counts)
        padded[ends] = self.stop
        return Boundaries(real, padded, self.first_segment + np.arange(len(counts) + 1))

    def widest(self) -> I64:
        """The widest slot of each pack, int64 [packs]."""
        return np.maximum.reduceat(self.stop - self.start, self.first_segment[:-1])

    def packs(self) -> list[Layout]:
        """Each pack's own boundaries."""
        real, padded, first = self.boundaries()
        spans = zip(pairwise(first.tolist()), pairwise(self.first_sample.tolist()), strict=True)
        return [Layout(self.lengths[slice(*of)], real[slice(*at)], padded[slice(*at)]) for at, of in spans]


def layouts(lengths: I64, counts: I64, align: int | I64, totals: I64) -> Layouts:
    """Lay packs of ``counts`` int64 [p] samples and ``totals`` int64 [p] tokens each out, as ``layout`` does; same
    errors. ``align``: of all of them, or int64 [p] of each: so long are the rows of a padded micro-batch."""
    if len(lengths) and int(lengths.min()) <= 0:
        raise ValueError(f"got a sample of {int(lengths.min())} tokens, expected at least 1")
    first_sample = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=first_sample[1:])
    align = align if isinstance(align, int) else np.repeat(align, counts)
    slots = -(-lengths // align) * align
    filled = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(slots, out=filled[1:])
    tails = totals - (filled[first_sample[1:]] - filled[first_sample[:-1]])
    if len(tails) and int(tails.min()) < 0:
        worst = int(tails.argmin())
        room = int(totals[worst])
        raise ValueError(f"got {room - int(tails[worst])} tokens with padding, expected at most {room}")
    open_ = np.flatnonzero(tails)  # packs with tail padding, which is a segment of its own
    at = first_sample[open_ + 1]
    slots = np.insert(slots, at, tails[open_])
    first_segment = first_sample.copy()
    first_segment[1:] += np.cumsum(tails > 0)
    stop = np.cumsum(slots) - np.repeat(np.cumsum(totals) - totals, np.diff(first_segment))
    return Layouts(lengths, np.insert(lengths, at, 0), stop - slots, stop, first_sample, first_segment)


@dataclass(frozen=True, slots=True)
class Slices:
    """What one context-parallel rank holds of some packs, in its order.

    ``start`` and ``stop`` int64 [k]: places in the slice's own pack; ``segment`` int64 [k]: which of the
    ``Layouts``' segments it lies in; ``first`` int64 [packs + 1]: slices by pack.
    """

    start: I64
    stop: I64
    segment: I64
    first: I64


def cut(laid: Layouts, cp: int, rank: int, kind: str) -> Slices:
    """What ``rank`` of ``cp`` holds of each pack: slices that lie in one segment each.

    ``whole`` gives every segment, ``zigzag`` two slices of each; ``zigzag_pack`` and ``contiguous`` cut the pack
    as one, and what they give is cut again where segments meet. Raises ValueError, naming it, for what
    cannot be shared out evenly.

    >>> laid = layouts(np.array([8, 8]), np.array([2]), 1, 16)
    >>> [a.tolist() for a in (cut(laid, 2, 0, "zigzag").start, cut(laid, 2, 0, "zigzag").stop)]
    [[0, 6, 8, 14], [2, 8, 10, 16]]
    """
    if kind not in LAYOUTS:
        raise ValueError(f"got context-parallel layout {kind!r}, expected one of {', '.join(LAYOUTS)}")
    if not 0 <= rank < cp:
        raise ValueError(f"got context-parallel rank {rank}, expected 0 <= rank < {cp}")
    every = np.arange(len(laid.start))
    if kind == "whole" or cp == 1:
        return Slices(laid.start, laid.stop, every, laid.first_segment)
    if kind == "zigzag":
        size = laid.stop - laid.start
        _check_even(size, 2 * cp, "segment", "set align.sample and align.pack to multiples of it")
        chunk = size // (2 * cp)
        start = np.stack([laid.start + rank * chunk, laid.stop - (rank + 1) * chunk], axis=1).ravel()
        return Slices(start, start + np.repeat(chunk, 2), np.repeat(every, 2), 2 * laid.first_segment)
    total = laid.stop[laid.first_segment[1:] - 1]
    parts = 2 * cp if kind == "zigzag_pack" else cp
    _check_even(total, parts, "pack", "set the budget to a multiple of it")
    chunk = total // parts
    numbers = (rank, 2 * cp - 1 - rank) if kind == "zigzag_pack" else (rank,)
    return _intersect(laid, [(number * chunk, (number + 1) * chunk) for number in numbers])


def _check_even(sizes: I64, parts: int, what: str, advice: str) -> None:
    ragged = sizes % parts != 0
    if ragged.any():
        at = int(np.argmax(ragged))
        raise ValueError(f"got {what} {at} of {int(sizes[at])} tokens, expected a multiple of {parts}: {advice}")


def _intersect(laid: Layouts, intervals: list[tuple[I64, I64]]) -> Slices:
    """Each pack's intervals [a, b), int64 [packs] each, cut where segments meet; none is empty."""
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
    """``cut`` of one pack of these boundaries: starts and stops, int64 [k] each; same errors."""
    cu = np.asarray(cu_seqlens_padded, np.int64)
    size = np.diff(cu)
    number = np.array([0, len(size)])
    slices = cut(Layouts(size, size, cu[:-1], cu[1:], number, number), cp, rank, kind)
    return slices.start, slices.stop


def positions_of(starts: I64, stops: I64) -> I64:
    """The positions [start, stop) of all slices, one after another, int64 [sum of sizes]."""
    sizes = stops - starts
    some = sizes > 0
    positions = np.empty(int(sizes.sum()), np.int64)
    _count_up(starts[some], sizes[some], positions)
    return positions


def _count_up(starts: I64, sizes: I64, out: I64) -> None:
    """Fill ``out`` with starts[i], starts[i] + 1, ... for each slice, all of at least one, in place."""
    if len(out):
        out.fill(1)
        out[np.cumsum(sizes[:-1])] = starts[1:] - (starts + sizes)[:-1] + 1
        out[0] = starts[0]
        np.cumsum(out, out=out)


def derive_positions(offset: I64, size: I64, real: I64, position_ids: I64, padding_mask: NDArray[np.bool_]) -> I64:
    """Fill in the positions and the padding mask of some slices, one after another; int64 [pads], where padding is.

    Slice i is ``size[i]`` tokens and begins ``offset[i]`` tokens into its segment, which holds ``real[i]`` real
    ones; all int64 [k]. Positions, int64 [N], restart at 0 in each segment; the mask, [N], is True at padding.
    """
    ends = np.cumsum(size)
    _count_up(offset, size, position_ids)
    padding = positions_of(ends - size + np.clip(real - offset, 0, size), ends)  # it is all behind real tokens
    padding_mask[:] = False
    padding_mask[padding] = True
    return padding


def derive_labels(
    input_ids: I64, offset: I64, size: I64, real: I64, edges: I32 | None, padding: I64, labels: I64
) -> None:
    """Fill in ``labels`` int64 [N]: ``input_ids`` shifted inside each sample, -100 at its last real token and at
    ``padding``.

    Slices as in ``derive_positions``. ``edges`` int32 [k] holds the token that follows each slice in its sample
    (-100 where none does), since the label at a slice's end may be a token that another rank holds; None where
    slices are whole segments.
    """
    ends = np.cumsum(size)
    kept = np.clip(real - offset, 0, size)
    labels[:-1] = input_ids[1:]
    labels[-1:] = IGNORE_INDEX
    if edges is not None:
        labels[ends - 1] = edges
    last = (kept > 0) & (offset + kept == real)
    labels[(ends - size + kept - 1)[last]] = IGNORE_INDEX
    labels[padding] = IGNORE_INDEX


def derive(
    tokens: NDArray[Any], edges: I32, counted: NDArray[np.uint8], offset: I64, size: I64, real: I64, labelled: bool,
    input_ids: I64, labels: I64, position_ids: I64, padding_mask: NDArray[np.bool_],
) -> None:  # fmt: skip
    """Fill in the last four, [N] each, for slices one after another, as in ``derive_positions``.

    ``tokens`` int32 or uint16 [N]. ``edges`` int32 [k], the token after each slice; empty where slices are whole
    segments. ``counted`` uint8 [N]: 0 where a label does not count; empty where all do. ``labelled``: ``labels``
    holds those that were sent, and is only masked. ``layout_kernels`` is the same, compiled.
    """
    padding = derive_positions(offset, size, real, position_ids, padding_mask)
    input_ids[:] = tokens
    if labelled:
        labels[padding] = IGNORE_INDEX
    else:
        derive_labels(input_ids, offset, size, real, edges if len(edges) else None, padding, labels)
    if len(counted):
        labels[counted == 0] = IGNORE_INDEX
