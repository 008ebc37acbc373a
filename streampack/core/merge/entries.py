"""Memory for the entries of all partitions that wait for a merge, in blocks that the partitions share.

Each partition is a queue, a chain of blocks; a block is free again once its last entry is taken. So memory grows with
the total number of waiting entries, not with the longest queue times the number of partitions. An entry is three
numbers: a sample's handle, its length, and the number of the piece of the sample. ``queues`` describes them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from streampack.core.model.samples import I32, I64

HANDLE, LENGTH, PART = 0, 1, 2
NO_BLOCK = -1


class Entries(NamedTuple):
    """The queues of all partitions. Arrays that are not described otherwise are int64 [partitions].

    Attributes:
        head: Number of the first waiting entry; entries of a partition are numbered from 0 on.
        tail: Number of the next entry to be pushed.
        first: Block of the first waiting entry.
        last: Block of the last waiting entry.
        entry: int32 [blocks, size, 3], ``size`` a power of two. Entry ``n`` of a partition is row ``n % size``.
        after: int64 [blocks], the block that follows each block in its queue, or in the chain of free blocks.
        free: int64 [2]: the first free block, and the number of free blocks.
    """

    head: I64
    tail: I64
    first: I64
    last: I64
    entry: I32
    after: I64
    free: I64

    @property
    def num_entries(self) -> int:
        """Number of entries that the blocks have memory for."""
        return self.entry[..., 0].size


def entries(partitions: int, block: int) -> Entries:
    """Return empty queues for ``partitions`` partitions, in blocks of ``block`` entries, a power of two."""
    (head, tail), (first, last) = np.zeros((2, partitions), np.int64), np.full((2, partitions), NO_BLOCK, np.int64)
    free = np.array([NO_BLOCK, 0], np.int64)
    return Entries(head, tail, first, last, np.zeros((0, block, 3), np.int32), np.zeros(0, np.int64), free)


def with_room(old: Entries, partition: int, count: int) -> Entries:
    """Return the queues, with more blocks if needed, so that ``count`` entries can be pushed to ``partition``."""
    blocks, block, _ = old.entry.shape
    tail = int(old.tail[partition])
    missing = -(-(tail + count) // block) + (-tail // block) - int(old.free[1])
    if missing <= 0:
        return old
    total = blocks + max(missing, blocks)
    entry = np.zeros((total, block, 3), np.int32)  # the system gives memory when it is first written to
    entry[:blocks] = old.entry
    after = np.arange(1, total + 1)
    after[:blocks] = old.after
    after[-1] = old.free[0]
    free = np.array([blocks, int(old.free[1]) + total - blocks], np.int64)
    return old._replace(entry=entry, after=after, free=free)


def with_partitions(old: Entries, count: int) -> Entries:
    """Return the queues with empty queues appended, so that there are ``count`` partitions."""
    more = entries(count - len(old.head), 1)
    columns = {name: np.concatenate([getattr(old, name), getattr(more, name)]) for name in Entries._fields[:4]}
    return old._replace(**columns)
