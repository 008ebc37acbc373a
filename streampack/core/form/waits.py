"""How many steps samples wait in the window, and the bound that their packer promises: figures that decide nothing.

A sample waits from the step whose packs were being chosen when its packer first saw it (see ``window``: before that it
is behind the window, whatever was read ahead) to the one that it is in. What was held when a feed began, from a
snapshot, waits from there on: the figures are of this broker.
"""

from __future__ import annotations

import numpy as np

from streampack.core.model.samples import I64
from streampack.core.packers.packer import Packer
from streampack.core.stats.length_histogram import BUCKETS, bucket_of, least_of

AT_ONCE = 1 << 14
"""Samples that are counted at once."""


class Waits:
    """Of the samples that a former holds, in their order; ``packs`` make a step, or None where batches do: whose
    samples wait for none but each other.
    """

    def __init__(self, packer: Packer, window: int, packs: int | None) -> None:
        self._packer, self._window, self._packs = packer, window, packs
        self._waited: list[I64] = []  # of the samples in steps, not counted yet
        self._num_waited = self._longest = 0
        self._most_held = 0
        self._counts: I64 = np.zeros(BUCKETS, np.int64)  # of the samples in steps, by the steps that they waited

    def chosen(self, waited: I64, seen: int) -> None:
        """A choice was made: some leave that have ``waited`` so many steps, int64 [n]; so many were ``seen``."""
        self._waited.append(waited)
        self._num_waited += len(waited)
        self._most_held = max(self._most_held, seen)
        if self._num_waited > AT_ONCE:
            self._count()

    def _count(self) -> None:
        """Count those that have left: as many at once as have come together, which takes as long as one step's."""
        waited = np.concatenate([*self._waited, np.zeros(0, np.int64)])
        self._counts += np.bincount(bucket_of(waited), minlength=BUCKETS)
        self._longest = max(self._longest, int(waited.max(initial=0)))
        self._waited, self._num_waited = [], 0

    def longest(self, step: int, since: I64) -> int:
        """Steps that a sample has waited, at most, where ``step`` is formed next, and those held were first seen
        ``since`` then, int64 [n], -1 for those that were not.
        """
        self._count()
        seen = since[since >= 0]
        return max(self._longest, step - int(seen.min(initial=step)))

    @property
    def p99(self) -> int:
        """Steps that 99 of 100 samples waited at most: exact to 64, to one part in 32 above."""
        self._count()
        upto = np.cumsum(self._counts)
        return least_of(int(np.searchsorted(upto, 0.99 * upto[-1]))) if upto[-1] else 0

    @property
    def bound(self) -> int | None:
        """Steps that no sample waits beyond, with as many held as there were at most; None where packers slide no
        window, or promise nothing.
        """
        if self._packs is None:
            return None
        packs = self._packer.max_wait(self._window, self._most_held)
        return None if packs is None else -(-packs // self._packs)
