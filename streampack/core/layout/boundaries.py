"""Where the samples of a pack lie.

A pack stores its samples one after another, each padded to the sample alignment, then one tail segment of padding up to
the pack's length. Two boundary arrays describe it: ``cu_seqlens`` for real tokens, ``cu_seqlens_padded`` for storage.
Kernels that take one array get the padded one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from streampack.core.model.samples import I32, I64


def round_up(value: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is >= ``value``."""
    return -(-value // multiple) * multiple


class Contents(NamedTuple):
    """Packs to be laid out: their samples' ``handles`` int64 [samples], one pack behind another, and of each, int64
    [packs], its ``counts`` of samples, ``widths`` (T), and ``aligns``: what its samples are padded to a multiple of.
    """

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
    another's, and where each's begin, ``first`` int64 [packs + 1].
    """

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
    errors. ``align``: of all of them, or int64 [p] of each: so long are the rows of a padded micro-batch.
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
        raise ValueError(f"got {room - int(tails[worst])} tokens with padding, expected at most {room}")
    open_ = np.flatnonzero(tails)  # packs with tail padding, which is a segment of its own
    at = first_sample[open_ + 1]
    slots = np.insert(slots, at, tails[open_])
    first_segment = first_sample.copy()
    first_segment[1:] += np.cumsum(tails > 0)
    stop = np.cumsum(slots) - np.repeat(np.cumsum(totals) - totals, np.diff(first_segment))
    return Layouts(lengths, np.insert(lengths, at, 0), stop - slots, stop, first_sample, first_segment)
