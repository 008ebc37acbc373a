"""Memory for what waits for a merge: entries of all partitions, in blocks that they share.

Each partition is a queue, a chain of blocks; a block is free again once its last entry is taken. So memory follows
what waits over all partitions, not the most that ever waited in one of them times their number. An entry is three
numbers: a sample's handle, its length, and which piece of the sample it is. What they mean is ``queues``'s matter.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from streampack.core.model.samples import I32, I64

HANDLE, LENGTH, PART = 0, 1, 2
NO_BLOCK = -1


class Entries(NamedTuple):
    """Queues of ``partitions``: partition ``p`` holds its entries number ``head[p]`` to ``tail[p]``.

    ``entry`` int32 [blocks, a power of two, 3]. Entry ``n`` of a partition is row ``n % size`` of a block; ``first``
    and ``last`` are each partition's blocks, ``after`` the block that follows each block. ``free`` int64 [2]: the first
    free block, and how many there are; ``after`` chains them, too.
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
        """Entries that there is memory for."""
        return self.entry[..., 0].size


def entries(partitions: int, block: int) -> Entries:
    """Empty queues, in blocks of ``block`` entries, a power of two."""
    (head, tail), (first, last) = np.zeros((2, partitions), np.int64), np.full((2, partitions), NO_BLOCK, np.int64)
    free = np.array([NO_BLOCK, 0], np.int64)
    return Entries(head, tail, first, last, np.zeros((0, block, 3), np.int32), np.zeros(0, np.int64), free)


def with_room(given: Entries, partition: int, count: int) -> Entries:
    """The same queues, grown if need be so that ``count`` entries can be pushed to a partition."""
    blocks, block, _ = given.entry.shape
    tail = int(given.tail[partition])
    missing = -(-(tail + count) // block) + (-tail // block) - int(given.free[1])
    if missing <= 0:
        return given
    total = blocks + max(missing, blocks)
    entry = np.zeros((total, block, 3), np.int32)  # the system gives memory when it is first written to
    entry[:blocks] = given.entry
    after = np.arange(1, total + 1)
    after[:blocks] = given.after
    after[-1] = given.free[0]
    free = np.array([blocks, int(given.free[1]) + total - blocks], np.int64)
    return given._replace(entry=entry, after=after, free=free)


def with_partitions(given: Entries, count: int) -> Entries:
    """The same queues, and empty ones after them, ``count`` in all."""
    more = entries(count - len(given.head), 1)
    columns = {name: np.concatenate([getattr(given, name), getattr(more, name)]) for name in Entries._fields[:4]}
    return given._replace(**columns)
