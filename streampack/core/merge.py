"""Merge: which stream gives the next sample, as a function of seed, weights and position.

Streams take turns by stride scheduling (Waldspurger and Weihl, 1995): each has a clock that runs
on by ``stride * tokens`` for every sample it gives, and the stream whose clock is lowest is next,
ties by number. Strides are integers, inversely proportional to the weights, so token shares hold
whatever the lengths, and nothing depends on which producer was faster. A stream that has ended
drops out; one that is silent stalls the rest, and ``blocked`` names it.

Within a stream its partitions take turns, those that ended being passed over. Entries wait in one
ring a partition; a ring grows only when the over-long policy splits samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from msgspec import Struct

from streampack.core.kernels import merge_take
from streampack.core.rules import MAX_WEIGHT_RATIO
from streampack.core.samples import I64

STRIDE_ONE = 1 << 20


def strides(weights: list[float]) -> I64:
    """Integer strides, int64 [streams]: clock per token, lowest for the heaviest stream.

    Raises ValueError if a weight is not positive or the ratio of two exceeds 4096.
    """
    heaviest = max(weights)
    for weight in weights:
        if not weight > 0 or heaviest / weight > MAX_WEIGHT_RATIO:
            raise ValueError(f"got weight {weight:g}, expected one above {heaviest / MAX_WEIGHT_RATIO:g}")
    return np.array([round(STRIDE_ONE * heaviest / weight) for weight in weights], np.int64)


def phase(seed: int, stream: int) -> int:
    """Tokens of head start that the seed gives a stream: splitmix64 of both, below 1024."""
    z = (seed * 0x9E3779B97F4A7C15 + (stream + 1) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (z ^ (z >> 31)) % 1024


@dataclass(frozen=True, slots=True)
class Taken:
    """Samples in merge order: ``handles`` and ``lengths`` int64 [n]; the partition waited for, or None;
    the partitions that moved on, int64 [k], be it over rejected samples alone."""

    handles: I64
    lengths: I64
    blocked: int | None
    moved: I64


class MergeState(Struct, frozen=True):
    """A merge between two samples: by stream clock, turn, live; by partition ended, samples and tokens taken."""

    clock: list[int]
    turn: list[int]
    live: list[bool]
    ended: list[bool]
    merged_samples: list[int]
    merged_tokens: list[int]


class Merge:
    """The merge of some streams; partitions are numbered through, streams in their order.

    ``partitions`` int per stream. ``merged_samples`` and ``merged_tokens`` int64 [partitions] count
    what was taken. State is small integers and rings of entries not yet merged.
    """

    def __init__(self, weights: list[float], partitions: list[int], seed: int, width: int = 1024) -> None:
        self._stride = strides(weights)
        self._clock = np.array([phase(seed, s) for s in range(len(weights))], np.int64) * self._stride
        self._first = np.concatenate([[0], np.cumsum(partitions)]).astype(np.int64)
        count = int(self._first[-1])
        self._turn = np.zeros(len(weights), np.int64)
        self._live = np.ones(len(weights), np.bool_)
        self._head = np.zeros(count, np.int64)
        self._tail = np.zeros(count, np.int64)
        self._ended = np.zeros(count, np.bool_)
        self.merged_samples = np.zeros(count, np.int64)
        self.merged_tokens = np.zeros(count, np.int64)
        self._handle = np.zeros((count, width), np.int64)
        self._length = np.zeros((count, width), np.int64)
        self._part = np.zeros((count, width), np.int64)

    def push(self, partition: int, handles: I64, lengths: I64, parts: I64) -> None:
        """Entries that follow the partition's last; all int64 [n], length 0 being a tombstone."""
        tail, count = int(self._tail[partition]), len(handles)
        while tail + count - int(self._head[partition]) > self._handle.shape[1]:
            self._widen()
            tail = int(self._tail[partition])
        slots = np.arange(tail, tail + count) % self._handle.shape[1]
        self._handle[partition, slots] = handles
        self._length[partition, slots] = lengths
        self._part[partition, slots] = parts
        self._tail[partition] = tail + count

    def end(self, partition: int) -> None:
        """No entry follows; idempotent."""
        self._ended[partition] = True

    def take(self, max_tokens: int) -> Taken:
        """All that can be merged now, until ``max_tokens`` are reached (the last sample may pass them)."""
        if self._live.any():
            self._clock -= self._clock[self._live].min()
        bound = int((self._tail - self._head).sum())
        handles, lengths = np.empty(bound, np.int64), np.empty(bound, np.int64)
        before = self.merged_samples.copy()
        count, blocked = merge_take(
            self._clock, self._stride, self._first, self._turn, self._live, self._head, self._tail, self._ended,
            self._handle, self._length, self._part, self.merged_samples, self.merged_tokens,
            max_tokens, handles, lengths,
        )  # fmt: skip
        moved = np.flatnonzero(self.merged_samples != before)
        return Taken(handles[:count], lengths[:count], None if blocked < 0 else int(blocked), moved)

    def waiting(self, partition: int) -> int:
        """Entries of a partition not merged yet."""
        return int(self._tail[partition] - self._head[partition])

    def state(self) -> MergeState:
        """What decides the order of all that is not merged yet; entries that wait are read again."""
        done = self._ended & (self._head == self._tail)
        return MergeState(
            self._clock.tolist(), self._turn.tolist(), self._live.tolist(), done.tolist(),
            self.merged_samples.tolist(), self.merged_tokens.tolist(),
        )  # fmt: skip

    def load(self, state: MergeState) -> None:
        """Go on from a state, in a merge of the same streams that has taken nothing.

        Each partition's next entry is the one after its first ``merged_samples``.
        """
        columns = (self._clock, self._turn, self._live, self._ended, self.merged_samples, self.merged_tokens)
        for column, values in zip(columns, msgspec.structs.astuple(state), strict=True):
            column[:] = values

    @property
    def closed(self) -> bool:
        """Every stream has ended and all was taken."""
        return bool(self._ended.all() and (self._head == self._tail).all())

    def _widen(self) -> None:
        old = self._handle.shape[1]
        for name in ("_handle", "_length", "_part"):
            rows = getattr(self, name)
            grown = np.zeros((rows.shape[0], 2 * old), np.int64)
            for p in range(rows.shape[0]):
                slots = np.arange(self._head[p], self._tail[p]) % old
                grown[p, : len(slots)] = rows[p, slots]
            setattr(self, name, grown)
        self._tail -= self._head
        self._head[:] = 0
