"""What waits for a merge: a ring of entries for each partition, and how passes and partitions end.

The half of a merge that is the same in whatever order it takes samples. An entry is a piece of a sample, a
tombstone for a sample that is none (length 0), or a barrier: what follows is of the partition's
next pass. Nothing of a next pass is taken until every partition that has not ended is at its
barrier; ``next_pass`` then goes over them. A ring grows only when the over-long policy splits samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streampack.core.samples import I64

BARRIER = -1
"""The length of an entry that is the end of a pass."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Samples in merge order: ``handles`` and ``lengths`` int64 [n]; the partition waited for, or None;
    the partitions that moved on, int64 [k], be it over rejected samples alone."""

    handles: I64
    lengths: I64
    blocked: int | None
    moved: I64


class Rings:
    """``count`` partitions' entries that are not merged yet, up to ``width`` each before it has to grow.

    ``merged_samples`` and ``merged_tokens`` int64 [partitions] count what was taken.
    """

    def __init__(self, count: int, width: int) -> None:
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
        self._enter(partition, handles, lengths, parts)

    def end_pass(self, partition: int) -> None:
        """What follows is of the partition's next pass."""
        self._enter(partition, np.array([-1]), np.array([BARRIER]), np.array([0]))

    def end(self, partition: int) -> None:
        """No entry follows; idempotent."""
        self._ended[partition] = True

    def waiting(self, partition: int) -> int:
        """Entries of a partition not merged yet, barriers among them."""
        return int(self._tail[partition] - self._head[partition])

    @property
    def stopped(self) -> bool:
        """A stream that was to stop the rest has ended: what is not merged never will be."""
        return False

    @property
    def closed(self) -> bool:
        """Nothing will ever be merged again: every stream has ended and all was taken, or one has stopped the rest."""
        return self.stopped or bool(self._done.all())

    @property
    def between_passes(self) -> bool:
        """Every stream has given its pass whole, and ``next_pass`` begins another."""
        at_barrier = self._at_barrier
        return not self.stopped and bool(at_barrier.any() and (at_barrier | self._done).all())

    def next_pass(self) -> None:
        """Go over the barriers that all streams are at; only ``between_passes``."""
        self._head += self._at_barrier

    def drop(self) -> I64:
        """Forget what waits; handles, int64 [n], of its samples. Nothing is pushed afterwards."""
        width, rows = self._handle.shape[1], range(len(self._head))
        slots = [np.arange(self._head[p], self._tail[p]) % width for p in rows]
        waiting = [self._handle[p, slots[p]][self._length[p, slots[p]] > 0] for p in rows]
        self._head[:] = self._tail
        return np.concatenate(waiting)

    @property
    def _done(self) -> NDArray[np.bool_]:
        """By partition: ended, and all of it taken."""
        found: NDArray[np.bool_] = self._ended & (self._head == self._tail)
        return found

    @property
    def _at_barrier(self) -> NDArray[np.bool_]:
        rows = np.arange(len(self._head))
        lengths = self._length[rows, self._head % self._length.shape[1]]
        found: NDArray[np.bool_] = (self._head < self._tail) & (lengths == BARRIER)
        return found

    def _enter(self, partition: int, handles: I64, lengths: I64, parts: I64) -> None:
        tail, count = int(self._tail[partition]), len(handles)
        while tail + count - int(self._head[partition]) > self._handle.shape[1]:
            self._widen()
            tail = int(self._tail[partition])
        width = self._handle.shape[1]
        start = tail % width
        before = min(count, width - start)  # as two slices, where the entries go around the ring's end
        for ring, values in ((self._handle, handles), (self._length, lengths), (self._part, parts)):
            ring[partition, start : start + before] = values[:before]
            if before < count:
                ring[partition, : count - before] = values[before:]
        self._tail[partition] = tail + count

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
