"""What is known of a sample once the broker has taken it; a sample's id is (stream, index, part).

The core knows a sample's identity, length and checksum, never its tokens. A sample lives in one
row of the ``SampleTable``; its row number, the *handle*, is what every queue, window and pack
holds, so that the arena may move payload without anybody else noticing. Whether the next sample is of
the same group is a column beside the row, which leaves the table only where there are groups. Rows are columns of
numpy arrays because a broker at 100M tokens/s admits some 200,000 samples each second.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
from msgspec import UnsetType
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U32 = NDArray[np.uint32]

ROW = np.dtype(
    [
        ("stream", "<i4"), ("index", "<i8"), ("part", "<i4"), ("length", "<i4"), ("loss_tokens", "<i4"), ("crc", "<u4"),
    ]
)  # fmt: skip
"""One sample's row where it leaves the table: a reference with a checksum, 28 bytes, never the tokens."""

Keep = Literal["pack", "step"]
"""What a group must not be split over."""
PACK, STEP = 1, 2
KEEPS: dict[Keep, int] = {"pack": PACK, "step": STEP}
"""What a sample's column ``keep`` says: the next one in merge order belongs to it, in one pack or one step; 0: it is
alone, or its group's last."""

MANY_HANDLES, MARKS_PER_HANDLE = 4096, 32
"""So many handles, in a table of at most so many rows for each, are put in order by a mark for each row: eight times
as fast as a sort for 100,000 handles of 262,144 rows. Fewer are sorted."""

IGNORE_INDEX = -100
"""The label that no loss counts: a sample's last real token and all padding."""


def index_of(seq: int | I64, partition: int, partitions: int) -> int | I64:
    """A sample's index in its stream, from its number in its partition.

    Partitions take turns, so index order is the order of merging and both directions are closed
    forms: ``partition = index % partitions`` and ``seq = index // partitions``. Indices of a
    partition that ended before its peers are skipped, never reused.
    """
    return seq * partitions + partition


class SampleTable:
    """Columns of every sample held, by handle; grows when full, reuses freed handles first-in first-out."""

    def __init__(self, capacity: int = 4096) -> None:
        self.stream: I32 = np.zeros(capacity, np.int32)
        self.index: I64 = np.zeros(capacity, np.int64)
        self.part: I32 = np.zeros(capacity, np.int32)
        self.length: I32 = np.zeros(capacity, np.int32)
        self.loss_tokens: I32 = np.zeros(capacity, np.int32)
        self.crc: U32 = np.zeros(capacity, np.uint32)
        self.keep: NDArray[np.uint8] = np.zeros(capacity, np.uint8)
        self._free: I64 = np.arange(capacity, dtype=np.int64)
        self._head, self._num_free = 0, capacity
        self._marks = np.zeros(capacity, np.bool_)

    @property
    def capacity(self) -> int:
        """Handles are below this."""
        return len(self.length)

    def __len__(self) -> int:
        return self.capacity - self._num_free

    def take(self, count: int) -> I64:
        """``count`` free handles, int64 [count], those that have been free for longest."""
        while self._num_free < count:
            self._grow()
        found = self._first_free(count)
        self._head = (self._head + count) % self.capacity
        self._num_free -= count
        return found

    def free(self, handles: I64) -> None:
        """Give handles back; their rows may be overwritten.

        They are taken again in the order of their numbers, so that samples which come together have rows that lie
        together, whatever the order in which they went: a step's are found in a few cache lines of each column.
        """
        at = (self._head + self._num_free) % self.capacity
        in_order = self._in_order(handles)
        room = self.capacity - at
        self._free[at : at + len(handles)] = in_order[:room]
        self._free[: max(len(handles) - room, 0)] = in_order[room:]
        self._num_free += len(handles)

    def _in_order(self, handles: I64) -> I64:
        """Handles, which are all different, by their numbers."""
        if len(handles) < MANY_HANDLES or self.capacity > MARKS_PER_HANDLE * len(handles):
            return np.sort(handles)
        self._marks[handles] = True
        found = np.flatnonzero(self._marks)
        self._marks[found] = False
        return found

    def _first_free(self, count: int) -> I64:
        """A copy of the first ``count`` of the ring of free handles."""
        room = len(self._free) - self._head
        if count <= room:
            return self._free[self._head : self._head + count].copy()
        return np.concatenate([self._free[self._head :], self._free[: count - room]])

    def rows(self, handles: I64) -> NDArray[np.void]:
        """Rows of these samples, ``ROW`` [n]."""
        found = np.empty(len(handles), ROW)
        for name in ROW.names or ():
            found[name] = getattr(self, name)[handles]
        return found

    def keeps(self, handles: I64) -> bytes | UnsetType:
        """What these samples say of the next ones, uint8 [n] as bytes; UNSET where there are no groups."""
        found = self.keep[handles]
        return found.tobytes() if found.any() else msgspec.UNSET

    def enter(self, rows: NDArray[np.void], keeps: bytes | UnsetType = msgspec.UNSET) -> I64:
        """New handles for samples of ``rows``, ``ROW`` [n], that say ``keeps``."""
        handles = self.take(len(rows))
        for name in ROW.names or ():
            getattr(self, name)[handles] = rows[name]
        self.keep[handles] = np.frombuffer(keeps, np.uint8) if keeps else 0
        return handles

    def _grow(self) -> None:
        old = self.capacity
        for name in (*(ROW.names or ()), "keep"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(old, column.dtype)]))
        self._marks = np.zeros(2 * old, np.bool_)
        free = np.zeros(2 * old, np.int64)
        free[: self._num_free] = self._first_free(self._num_free)
        free[self._num_free : self._num_free + old] = np.arange(old, 2 * old)
        self._free, self._head = free, 0
        self._num_free += old
