"""Statistics of the steps that samples wait in the window, and the packer's bound on the wait. They decide nothing.

A sample's wait begins with the step that was being formed when it entered the packer's window, and ends with its own
step. Time behind the window does not count. For samples restored from a snapshot, the wait begins at the restart.
"""

from __future__ import annotations

import numpy as np

from streampack.core.model.samples import I64
from streampack.core.packers.packer import Packer
from streampack.core.stats.length_histogram import BUCKETS, bucket_of, least_of

AT_ONCE = 1 << 14
"""Samples gathered before they are counted."""


class Waits:
    """Counts of the steps that the samples of a ``Former`` waited.

    ``packs`` is the number of packs in a step; None in batch mode, which has no window.
    """

    def __init__(self, packer: Packer, packs: int | None) -> None:
        self._packer, self._packs = packer, packs
        self.window = 0
        """The largest window so far, in samples."""
        self._waited: list[I64] = []  # waits of samples that left, not counted yet
        self._num_waited = self._longest = 0
        self._most_held = 0
        self._counts: I64 = np.zeros(BUCKETS, np.int64)  # samples that left, by the bucket of the steps they waited

    def chosen(self, waited: I64, seen: int) -> None:
        """Record a choice of the packer; ``waited`` int64 [n] is the number of steps that each chosen sample waited.

        ``seen`` is the number of items in the packer's window.
        """
        self._waited.append(waited)
        self._num_waited += len(waited)
        self._most_held = max(self._most_held, seen)
        if self._num_waited > AT_ONCE:
            self._count()

    def _count(self) -> None:
        """Count the collected waits; counting the waits of many steps takes as long as counting those of one step."""
        waited = np.concatenate([*self._waited, np.zeros(0, np.int64)])
        self._counts += np.bincount(bucket_of(waited), minlength=BUCKETS)
        self._longest = max(self._longest, int(waited.max(initial=0)))
        self._waited, self._num_waited = [], 0

    def longest(self, step: int, since: I64) -> int:
        """Return the longest wait of a sample so far, in steps, including the samples that still wait.

        ``step`` is the next step; ``since`` int64 [n], the step at which each item held entered the window, or -1.
        """
        self._count()
        seen = since[since >= 0]
        return max(self._longest, step - int(seen.min(initial=step)))

    @property
    def p99(self) -> int:
        """The 99th percentile of waits, in steps; exact up to 64, and within 1/32 above."""
        self._count()
        upto = np.cumsum(self._counts)
        return least_of(int(np.searchsorted(upto, 0.99 * upto[-1]))) if upto[-1] else 0

    @property
    def bound(self) -> int | None:
        """The packer's bound on a sample's wait, in steps, for the largest window so far.

        None in batch mode, and for packers without a bound.
        """
        if self._packs is None:
            return None
        packs = self._packer.max_wait(self.window, self._most_held)
        return None if packs is None else -(-packs // self._packs)
