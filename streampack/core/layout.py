"""Where each token of a pack lies, and which of them a context-parallel rank holds.

A pack stores its samples one after another, each padded to the sample alignment, then one tail
segment of padding up to the pack's length. Two boundary arrays describe it: ``cu_seqlens`` for
real tokens, ``cu_seqlens_padded`` for storage; kernels that take one array get the padded one.
The same functions run in the broker, which cuts shards, and in the client, which rebuilds
positions, masks and labels from lengths alone. They know lengths, never where tokens are kept.

Context parallelism over W ranks cuts each segment [s, e) in 2W equal chunks, c = (e - s) / 2W;
rank r holds chunks r and 2W - 1 - r, so that causal attention costs every rank the same. It is
the layout of TransformerEngine's ``thd_get_partitioned_indices`` (context_parallel.cu), which
Megatron-Core and the RL frameworks built on it use. Its preconditions (boundaries that end at T,
every segment a multiple of 2W) are checked here, since the kernel loses tokens silently without.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from streampack.core.samples import I32, I64, IGNORE_INDEX

LAYOUTS = ("zigzag", "whole")
"""Context-parallel layouts: each rank's two chunks of every segment, or the whole pack to each."""


def round_up(value: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is >= ``value``."""
    return -(-value // multiple) * multiple


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
    return layouts(lengths, np.array([len(lengths)]), align, total).packs()[0]


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

    def packs(self) -> list[Layout]:
        """Each pack's own boundaries."""
        real, stop, count = self.real.astype(np.int32), self.stop.astype(np.int32), len(self.first_segment) - 1
        spans = pairwise(self.first_segment.tolist())
        samples = list(pairwise(self.first_sample.tolist()))
        found = []
        for i, (begin, end) in zip(range(count), spans, strict=True):
            bounds = np.zeros((2, end - begin + 1), np.int32)
            np.cumsum(real[begin:end], out=bounds[0, 1:])
            bounds[1, 1:] = stop[begin:end]
            found.append(Layout(self.lengths[slice(*samples[i])], bounds[0], bounds[1]))
        return found


def layouts(lengths: I64, counts: I64, align: int, total: int) -> Layouts:
    """Lay packs of ``counts`` int64 [p] samples each out, as ``layout`` does; same errors."""
    if len(lengths) and int(lengths.min()) <= 0:
        raise ValueError(f"got a sample of {int(lengths.min())} tokens, expected at least 1")
    first_sample = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=first_sample[1:])
    slots = -(-lengths // align) * align
    filled = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(slots, out=filled[1:])
    tails = total - (filled[first_sample[1:]] - filled[first_sample[:-1]])
    if len(tails) and int(tails.min()) < 0:
        raise ValueError(f"got {total - int(tails.min())} tokens with padding, expected at most {total}")
    open_ = np.flatnonzero(tails)  # packs with tail padding, which is a segment of its own
    at = first_sample[open_ + 1]
    slots = np.insert(slots, at, tails[open_])
    first_segment = first_sample.copy()
    first_segment[1:] += np.cumsum(tails > 0)
    stop = np.cumsum(slots) - np.repeat(np.arange(len(counts)) * total, np.diff(first_segment))
    return Layouts(lengths, np.insert(lengths, at, 0), stop - slots, stop, first_sample, first_segment)


def shard_slices(cu_seqlens_padded: I32, cp: int, rank: int, kind: str) -> tuple[I64, I64]:
    """Starts and stops in the pack, int64 [k] each, of what ``rank`` of ``cp`` holds, in its order.

    ``whole`` gives one slice a segment, ``zigzag`` two. Raises ValueError if a segment is not a
    multiple of 2 * cp (cp > 1), naming it.

    >>> [a.tolist() for a in shard_slices(np.array([0, 8, 16]), 2, 0, "zigzag")]
    [[0, 6, 8, 14], [2, 8, 10, 16]]
    """
    cu = np.asarray(cu_seqlens_padded, np.int64)
    return cut(cu[:-1], cu[1:], cp, rank, kind)


def cut(start: I64, stop: I64, cp: int, rank: int, kind: str) -> tuple[I64, I64]:
    """``shard_slices`` of segments [start, stop), of one pack or of many."""
    if kind not in LAYOUTS:
        raise ValueError(f"got context-parallel layout {kind!r}, expected one of {', '.join(LAYOUTS)}")
    if not 0 <= rank < cp:
        raise ValueError(f"got context-parallel rank {rank}, expected 0 <= rank < {cp}")
    if kind == "whole" or cp == 1:
        return start, stop
    ragged = (stop - start) % (2 * cp) != 0
    if ragged.any():
        at = int(np.argmax(ragged))
        raise ValueError(
            f"got segment {at} of {int(stop[at] - start[at])} tokens, expected a multiple of 2 * cp = {2 * cp}: "
            f"set align.sample and align.pack to multiples of it"
        )
    chunk = (stop - start) // (2 * cp)
    starts = np.stack([start + rank * chunk, stop - (rank + 1) * chunk], axis=1).ravel()
    stops = np.stack([start + (rank + 1) * chunk, stop - rank * chunk], axis=1).ravel()
    return starts, stops


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


def derive(
    input_ids: I64, offset: I64, size: I64, real: I64, edges: I32 | None,
    labels: I64, position_ids: I64, padding_mask: NDArray[np.bool_],
) -> None:  # fmt: skip
    """Fill in the labels, positions and padding mask of a shard, or of several one after another.

    ``input_ids`` int64 [N] are the tokens; the last three arrays, [N] as well, are filled in.
    Slice i is ``size[i]`` tokens and begins ``offset[i]`` tokens into its segment, which holds
    ``real[i]`` real ones; all int64 [k]. ``edges`` int32 [k] holds the token that follows each
    slice in its sample (-100 where none does): the label at a slice's end is a token that another
    rank holds. None where slices are whole segments.

    Positions restart at 0 in each segment; labels are shifted inside each sample and -100 at its
    last real token and at all padding.
    """
    ends = np.cumsum(size)
    begins = ends - size
    kept = np.clip(real - offset, 0, size)  # real tokens of each slice; padding is all behind them
    _count_up(offset, size, position_ids)
    padding = positions_of(begins + kept, ends)
    padding_mask[:] = False
    padding_mask[padding] = True
    labels[:-1] = input_ids[1:]
    labels[-1:] = IGNORE_INDEX
    if edges is not None:
        labels[ends - 1] = edges
    last = (kept > 0) & (offset + kept == real)
    labels[(begins + kept - 1)[last]] = IGNORE_INDEX
    labels[padding] = IGNORE_INDEX
