"""The keys of a pushed stream's samples, so that a sample that a program pushes again is admitted once.

A *write* is one job that pushes samples with keys, such as a dataset that is written by many tasks. Tasks are retried,
and push samples again. The index knows the keys of the current write. It is a set of 16-byte digests, in memory, and
has a limit; a full index admits no more. When the job is complete, it commits its write: the index forgets the keys,
and the next write begins. A late chunk of an earlier write, such as one of a task that was believed dead, is dropped
as a whole. So the index needs no key of an earlier write.

The keys are in the log: in the records of their chunks, or in a record of their own when those are deleted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 16
"""Bytes of a key: a digest of the program's own key."""
REPEATED = "repeated"
"""Reason of samples that are dropped because a sample with their key was admitted before."""


@dataclass(slots=True)
class KeyIndex:
    """The keys of one stream's current write.

    Attributes:
        limit: The most keys.
        write: Number of the current write.
        committed_lsn: Log sequence number of the record that committed the write before; -1 if there is none.
    """

    limit: int
    write: int = 0
    committed_lsn: int = -1
    _known: set[bytes] = field(default_factory=set)
    _kept: deque[tuple[int, bytes]] = field(default_factory=deque)
    """Keys that a record of the log holds, with the record's log sequence number."""

    def __len__(self) -> int:
        return len(self._known)

    @property
    def room(self) -> int:
        """The number of keys that may be added."""
        return max(self.limit - len(self._known), 0)

    def add(self, keys: bytes, write: int, lsn: int) -> NDArray[np.bool_]:
        """Add the keys of a chunk that is recorded at ``lsn``; return which samples are to be dropped, bool [n].

        A sample is dropped if its key is known, or if the chunk is of an earlier write.
        """
        digests = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
        repeated = np.ones(len(digests), np.bool_)
        if write < self.write:
            return repeated
        index = self._known
        for i, key in enumerate(digests):
            if key not in index:
                index.add(key)
                repeated[i] = False
        self._kept.append((lsn, keys))
        return repeated

    def commit(self, lsn: int) -> None:
        """Forget all keys, and begin the next write; the commit is recorded at ``lsn``."""
        self.begin(self.write + 1)
        self.committed_lsn = lsn

    def begin(self, write: int) -> None:
        """Begin a write, if it is later than the current one, and forget the keys of earlier writes."""
        if write > self.write:
            self.write = write
            self._known.clear()
            self._kept.clear()

    def recover(self, keys: bytes, write: int, lsn: int) -> None:
        """Add the keys of a record of an earlier broker."""
        self.begin(write)
        self.add(keys, write, lsn)

    def take_below(self, lsn: int) -> Iterator[bytes]:
        """Yield the keys of records below ``lsn``, which will be deleted; the caller records them with ``keep``."""
        while self._kept and self._kept[0][0] < lsn:
            yield self._kept.popleft()[1]

    def keep(self, keys: bytes, lsn: int) -> None:
        """Note that the record at ``lsn`` holds keys that are known."""
        self._kept.append((lsn, keys))

    def safe_write(self, upto: int) -> int:
        """Return the number of the current write, as far as it is recorded below ``upto``."""
        return self.write if self.committed_lsn < upto else self.write - 1
