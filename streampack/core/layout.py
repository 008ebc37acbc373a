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
    if len(lengths) and int(lengths.min()) <= 0:
        raise ValueError(f"got a sample of {int(lengths.min())} tokens, expected at least 1")
    slots = -(-lengths // align) * align
    used = int(slots.sum())
    if used > total:
        raise ValueError(f"got {used} tokens with padding, expected at most {total}")
    tail = int(used < total)
    real = np.zeros(len(lengths) + 1 + tail, np.int32)
    padded = np.zeros_like(real)
    np.cumsum(lengths, out=real[1 : len(lengths) + 1])
    np.cumsum(slots, out=padded[1 : len(lengths) + 1])
    if tail:
        real[-1], padded[-1] = real[-2], total
    return Layout(lengths, real, padded)


def shard_slices(cu_seqlens_padded: I32, cp: int, rank: int, kind: str) -> tuple[I64, I64]:
    """Starts and stops in the pack, int64 [k] each, of what ``rank`` of ``cp`` holds, in its order.

    ``whole`` gives one slice a segment, ``zigzag`` two. Raises ValueError if a segment is not a
    multiple of 2 * cp (cp > 1), naming it.

    >>> [a.tolist() for a in shard_slices(np.array([0, 8, 16]), 2, 0, "zigzag")]
    [[0, 6, 8, 14], [2, 8, 10, 16]]
    """
    if kind not in LAYOUTS:
        raise ValueError(f"got context-parallel layout {kind!r}, expected one of {', '.join(LAYOUTS)}")
    if not 0 <= rank < cp:
        raise ValueError(f"got context-parallel rank {rank}, expected 0 <= rank < {cp}")
    cu = np.asarray(cu_seqlens_padded, np.int64)
    start, stop = cu[:-1], cu[1:]
    if kind == "whole" or cp == 1:
        return start.copy(), stop.copy()
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
    """The pack positions of a shard's tokens, int64 [T / cp], from its slices."""
    sizes = stops - starts
    shift = np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
    positions: I64 = np.arange(int(sizes.sum()), dtype=np.int64) + shift
    return positions


@dataclass(frozen=True, slots=True)
class Derived:
    """What a client derives for its shard from lengths: arrays of [T / cp]."""

    position_ids: I64
    labels: I64
    padding_mask: NDArray[np.bool_]


def derive(pack: Layout, input_ids: I64, starts: I64, stops: I64, edges: I32 | None) -> Derived:
    """Positions, labels and padding mask of a shard.

    ``input_ids`` int64 [T / cp] are the shard's tokens, ``starts`` and ``stops`` its slices.
    ``edges`` int32 [slices of samples] holds, for each slice, the token that follows it in its
    sample (-100 where none does): a label at a slice's end is a token that another rank holds.
    None where slices are whole segments. Positions restart at 0 in each segment; labels are
    shifted inside each sample and -100 at its last real token and at all padding.
    """
    sizes = stops - starts
    segment = np.searchsorted(pack.cu_seqlens_padded, starts, side="right") - 1
    begin = pack.cu_seqlens_padded[segment].astype(np.int64)
    real = np.diff(pack.cu_seqlens).astype(np.int64)[segment]
    ends = np.cumsum(sizes)
    local = np.arange(len(input_ids), dtype=np.int64)
    position_ids = local + np.repeat(starts - begin - (ends - sizes), sizes)
    left = np.repeat(real, sizes) - position_ids
    labels = np.empty_like(input_ids)
    labels[:-1] = input_ids[1:]
    if edges is not None:
        labels[ends[: len(edges)] - 1] = edges
    labels[left <= 1] = IGNORE_INDEX
    return Derived(position_ids, labels, left <= 0)
