"""Boundaries: the place of each sample in a pack.

A pack stores its samples one after another, each padded to the sample alignment, then one tail segment of padding up to
the pack's length. Two boundary arrays describe it: ``cu_seqlens`` for real tokens, ``cu_seqlens_padded`` for storage.
Kernels that take only one array get ``cu_seqlens_padded``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from streampack.core.model.samples import I32, I64


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


class Contents(NamedTuple):
    """Packs to lay out.

    Attributes:
        handles: int64 [samples], handles of the samples, one pack after another.
        counts: int64 [packs], samples of each pack.
        widths: int64 [packs], the length T of each pack in tokens.
        aligns: int64 [packs], the multiple to which each pack's samples are padded, in tokens.
        depths: int64 [samples], tokens that each sample shares with the sample before it; None without trees.
        sizes: int64 [packs], the ranks that share each pack, with dynamic context parallelism; else None.
        ranks: int64 [packs], the rank within each pack's group whose shards are read; None without ``sizes``.
    """

    handles: I64
    counts: I64
    widths: I64
    aligns: I64
    depths: I64 | None = None
    sizes: I64 | None = None
    ranks: I64 | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """The boundaries of one pack. Tail padding, if any, is one last segment of real length 0.

    Attributes:
        lengths: int64 [samples], real tokens.
        cu_seqlens: int32 [segments + 1], where segments begin if only real tokens count.
        cu_seqlens_padded: int32 [segments + 1], where segments begin in the pack.
    """

    lengths: I64
    cu_seqlens: I32
    cu_seqlens_padded: I32

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    @property
    def num_segments(self) -> int:
        """Number of segments: one per sample, and one more if there is tail padding."""
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        """The pack's length T: real and padding tokens together."""
        return int(self.cu_seqlens_padded[-1])

    @property
    def max_seqlen(self) -> int:
        """Tokens of the widest segment, padding included."""
        return int(np.diff(self.cu_seqlens_padded).max())


def layout(lengths: I64, align: int, total: int) -> Layout:
    """Return the boundaries of one pack of ``total`` tokens with samples of ``lengths`` (int64 [n], real tokens).

    Raises ValueError if a length is not positive or if the samples, each padded to a multiple of
    ``align``, do not fit.

    >>> layout(np.array([4, 2]), 1, 8).cu_seqlens_padded.tolist()
    [0, 4, 6, 8]
    """
    lengths = np.asarray(lengths, np.int64)
    return layouts(lengths, np.array([len(lengths)]), align, np.array([total])).packs()[0]


class Boundaries(NamedTuple):
    """The boundary arrays of several packs, concatenated.

    Attributes:
        real: int32 [segments + packs], ``cu_seqlens``.
        padded: int32 [segments + packs], ``cu_seqlens_padded``.
        first: int64 [packs + 1], where the arrays of each pack begin.
    """

    real: I32
    padded: I32
    first: I64


@dataclass(frozen=True, slots=True)
class Layouts:
    """The segments of several packs, concatenated, so that numpy handles all packs at once.

    Attributes:
        lengths: int64 [samples], real tokens of each sample.
        real: int64 [segments], real tokens of each segment.
        start: int64 [segments], where each segment begins in its pack.
        stop: int64 [segments], where each segment ends in its pack, padding included.
        first_sample: int64 [packs + 1], the first sample of each pack.
        first_segment: int64 [packs + 1], the first segment of each pack.
    """

    lengths: I64
    real: I64
    start: I64
    stop: I64
    first_sample: I64
    first_segment: I64

    def boundaries(self) -> Boundaries:
        """Return the boundary arrays of all packs, concatenated."""
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
        """Return the tokens of each pack's widest segment, padding included, int64 [packs]."""
        return np.maximum.reduceat(self.stop - self.start, self.first_segment[:-1])

    def packs(self) -> list[Layout]:
        """Return the boundaries of each pack."""
        real, padded, first = self.boundaries()
        spans = zip(pairwise(first.tolist()), pairwise(self.first_sample.tolist()), strict=True)
        return [Layout(self.lengths[slice(*samples)], real[slice(*at)], padded[slice(*at)]) for at, samples in spans]


def layouts(lengths: I64, counts: I64, align: int | I64, totals: I64) -> Layouts:
    """Return the boundaries of several packs, as ``layout`` does for one pack; raises the same errors.

    ``lengths`` int64 [samples] are real tokens; ``counts`` and ``totals`` int64 [packs] are each pack's samples and
    tokens. ``align`` is one multiple for all packs, or int64 [packs]; in a padded micro-batch it is the length of a
    row.
    """
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
        raise ValueError(f"got a pack of {room - int(tails[worst])} tokens with padding, expected at most {room}")
    open_ = np.flatnonzero(tails)  # packs with tail padding, which is a segment of its own
    at = first_sample[open_ + 1]
    slots = np.insert(slots, at, tails[open_])
    first_segment = first_sample.copy()
    first_segment[1:] += np.cumsum(tails > 0)
    stop = np.cumsum(slots) - np.repeat(np.cumsum(totals) - totals, np.diff(first_segment))
    return Layouts(lengths, np.insert(lengths, at, 0), stop - slots, stop, first_sample, first_segment)
