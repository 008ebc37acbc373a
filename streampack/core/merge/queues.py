"""Entries that wait for a merge: a queue for each partition, and the ends of passes and partitions.

This is the part of a merge that does not depend on its order. An entry is a piece of a sample, a tombstone for a
rejected sample (length 0), or a barrier at the end of the partition's pass. No entry of the next pass is taken until
every partition that has not ended is at its barrier; ``next_pass`` then removes the barriers.

A recorded change of rules takes effect at a *position*: the number of samples merged before it, over all partitions. A
run that is replayed reaches the same position. Streams and partitions keep their numbers for good. A removed stream
keeps its number and stays empty; an added stream comes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streampack.core.merge.entries import LENGTH, entries, with_partitions, with_room
from streampack.core.merge.merge_kernels import drop_all, drop_first, push_entries
from streampack.core.model.samples import I64

BARRIER = -1
"""The length of a barrier: the entry that ends a pass."""
BLOCK = 64
"""Entries in a block; a partition with waiting entries holds at least one block."""
NOWHERE = 2**62
"""A position that no run reaches."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Samples taken from a merge, in merge order.

    Attributes:
        handles: int64 [n].
        lengths: int64 [n], in tokens.
        blocked: The partition whose sample is missing; None if the merge waits for none.
        moved: int64 [k], the partitions that entries were taken from, even if all of these entries were rejected
            samples.
    """

    handles: I64
    lengths: I64
    blocked: int | None
    moved: I64


class Queues:
    """The entries of all partitions that are not merged yet; the base class of both merges.

    Args:
        partitions: Number of partitions of each stream. Partition numbers continue from one stream to the next.
        block: Entries in a block of memory.
        removed: Numbers of streams that were removed.

    Attributes:
        merged_samples: int64 [partitions], samples taken so far, rejected ones included.
        merged_tokens: int64 [partitions], tokens taken so far.
    """

    def __init__(self, partitions: Sequence[int], block: int, removed: Sequence[int] = ()) -> None:
        count = sum(partitions)
        self._first = np.concatenate([[0], np.cumsum(partitions)]).astype(np.int64)
        self._queues = entries(count, block)
        self._ended = np.zeros(count, np.bool_)
        self._num_barriers = 0
        """Number of barriers in the queues."""
        self._stuck = False
        """True while the next sample is missing and nothing has come since it was found missing."""
        self._fresh = True
        """True while no entry of this pass has been taken."""
        self._passes = 0
        """Number of passes before this one, empty ones included."""
        self._idle = np.zeros(count, np.bool_)
        """True for each partition of a paused stream."""
        self.merged_samples = np.zeros(count, np.int64)
        self.merged_tokens = np.zeros(count, np.int64)
        for stream in removed:
            self._ended[self._first[stream] : self._first[stream + 1]] = True

    def push(self, partition: int, handles: I64, lengths: I64, parts: I64) -> None:
        """Append entries to a partition's queue; all int64 [n]. Length 0 is a tombstone."""
        self._append(partition, handles, lengths, parts)

    def end_pass(self, partition: int) -> None:
        """End a partition's pass: entries that follow belong to its next pass."""
        self._append(partition, np.array([-1]), np.array([BARRIER]), np.array([0]))
        self._num_barriers += 1

    def end(self, partition: int) -> None:
        """End a partition: no entry follows. Calling this again has no effect."""
        self._ended[partition], self._stuck = True, False

    def waiting(self, partition: int) -> int:
        """Return the number of entries in a partition's queue, barriers included."""
        return int(self._queues.tail[partition] - self._queues.head[partition])

    def missing(self, most: int) -> list[int]:
        """Return up to ``most`` partitions without entries that the order of the merge needs soon, the next first."""
        return []

    @property
    def position(self) -> int:
        """Number of samples merged so far, rejected ones included."""
        return int(self.merged_samples.sum())

    @property
    def stopped(self) -> bool:
        """True if a stream with ``on_exhaust: stop`` has ended, so that no more samples are merged."""
        return False

    @property
    def closed(self) -> bool:
        """True if no more samples will be merged: all streams have ended or pause, or one has stopped the merge."""
        if self.stopped:
            return True
        if not (self._ended | self._idle).all():
            return False
        return bool((self._done | self._idle).all())

    @property
    def has_barriers(self) -> bool:
        """True if a barrier is in a queue: some partition has ended its pass, and others have not."""
        return self._num_barriers > 0

    @property
    def between_passes(self) -> bool:
        """True if every stream has completed its pass, so that ``next_pass`` may begin another."""
        if not self._num_barriers or self.stopped:
            return False
        at_barrier = self._at_barrier
        return bool((at_barrier & ~self._idle).any() and (at_barrier | self._done | self._idle).all())

    @property
    def may_grow(self) -> bool:
        """True if a stream may be added. Between two passes none may: its first pass would be ambiguous."""
        return not self._fresh or not self._passes

    def next_pass(self) -> None:
        """Remove the barriers that all streams have reached. Call it only ``between_passes``."""
        at_barrier = self._at_barrier
        for partition in np.flatnonzero(at_barrier).tolist():
            drop_first(self._queues, partition)
        self._num_barriers -= int(at_barrier.sum())
        self._fresh, self._stuck = True, False
        self._passes += 1

    def drop(self) -> I64:
        """Drop all waiting entries; return their samples' handles, int64 [n]. Nothing may be pushed afterwards."""
        return self._drop_entries(range(len(self._ended)))

    def _restream(self, partitions: Sequence[int], removed: Sequence[int]) -> I64:
        """Remove the streams numbered ``removed``, and add the new streams at the end of ``partitions``.

        Returns the handles of the entries dropped with the removed streams, int64 [n]. Raises ValueError if a known
        stream's number of partitions differs, or for a new stream between two passes.
        """
        counts = np.diff(self._first).tolist()
        if list(partitions[: len(counts)]) != counts:
            raise ValueError(
                f"got streams with {list(partitions)} partitions, expected a list that begins with {counts}, because "
                f"known streams keep their partitions"
            )
        if len(partitions) > len(counts) and not self.may_grow:
            raise ValueError(
                "got a new stream between two passes, expected the new stream after the first merged sample of a pass"
            )
        self._first = np.concatenate([[0], np.cumsum(partitions)]).astype(np.int64)
        self._queues = with_partitions(self._queues, sum(partitions))
        for name in ("_ended", "_idle", "merged_samples", "merged_tokens"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros(sum(partitions) - len(old), old.dtype)]))
        rows = [p for stream in removed for p in range(self._first[stream], self._first[stream + 1])]
        self._ended[rows] = True
        return self._drop_entries(rows)

    def pause(self, streams: Sequence[int]) -> None:
        """Let exactly these streams pause: they give no samples, and do not hold the end open."""
        self._idle[:], self._stuck = False, False
        for stream in streams:
            self._idle[self._first[stream] : self._first[stream + 1]] = True

    def _drop_entries(self, rows: Sequence[int]) -> I64:
        """Drop the waiting entries of the partitions ``rows``; return their samples' handles, int64 [n]."""
        waiting = [np.zeros(0, np.int64)]
        for p in rows:
            dropped = np.empty(self.waiting(p), np.int64)
            count, barriers = drop_all(self._queues, p, dropped)
            waiting.append(dropped[:count])
            self._num_barriers -= barriers
        self._stuck = False
        return np.concatenate(waiting)

    @property
    def ended_streams(self) -> NDArray[np.bool_]:
        """True for each stream without further samples to merge, bool [streams]."""
        return np.logical_and.reduceat(self._done, self._first[:-1]) | self.stopped

    @property
    def giving_streams(self) -> NDArray[np.bool_]:
        """True for each stream that may give more samples in this pass, bool [streams]."""
        waits = self._done | self._at_barrier | self._idle
        return np.logical_or.reduceat(~waits, self._first[:-1]) & (not self.stopped)

    @property
    def _done(self) -> NDArray[np.bool_]:
        """True for each partition that has ended and whose entries are all merged; bool [partitions]."""
        is_finished: NDArray[np.bool_] = self._ended & (self._queues.head == self._queues.tail)
        return is_finished

    @property
    def _at_barrier(self) -> NDArray[np.bool_]:
        """True for each partition whose next entry is a barrier; bool [partitions]."""
        head, tail, first, _, entry, *_ = self._queues
        at_barrier: NDArray[np.bool_] = head < tail
        waiting = np.flatnonzero(at_barrier)
        at_barrier[waiting] = entry[first[waiting], head[waiting] % entry.shape[1], LENGTH] == BARRIER
        return at_barrier

    def _append(self, partition: int, handles: I64, lengths: I64, parts: I64) -> None:
        """Append entries to a partition's queue, with more memory if needed."""
        self._queues = with_room(self._queues, partition, len(handles))
        push_entries(self._queues, partition, handles, lengths, parts)
        self._stuck = False
