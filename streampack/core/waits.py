"""How many steps samples wait in the window, and the bound that their packer promises: figures that decide nothing.

A sample waits from the step whose packs were being chosen when its packer first saw it (see ``window``: before that it
is behind the window, whatever was read ahead) to the one that it is in. What was held when a feed began, from a
snapshot, waits from there on: the figures are of this broker.
"""

from __future__ import annotations

import numpy as np

from streampack.core.length_counts import BUCKETS, bucket_of, least_of
from streampack.core.packers import Choice, Packer
from streampack.core.packers.exact_fill import ExactFill
from streampack.core.packers.joint import Joint, max_wait
from streampack.core.samples import I64

_UNSEEN = -1


class Waits:
    """Of the samples that a former holds, in their order; ``packs`` make a step, or None where batches do: whose
    samples wait for none but each other."""

    def __init__(self, packer: Packer, window: int, packs: int | None) -> None:
        self._packer, self._window, self._packs = packer, window, packs
        self._since: I64 = np.zeros(0, np.int64)
        self._longest = 0
        self._most_held = 0
        self._counts: I64 = np.zeros(BUCKETS, np.int64)  # of the samples in steps, by the steps that they waited

    def begin(self, ages: I64, step: int) -> None:
        """Samples are held as a snapshot has them, with their ``ages`` int64 [n]; ``step`` is formed next."""
        self._since = np.where(ages >= 0, step, _UNSEEN)

    def chosen(self, choice: Choice, step: int) -> None:
        """A choice was made for ``step``: some leave, others have been seen, at least."""
        seen = choice.ages >= 0
        seen[choice.indices] = True
        since = np.pad(self._since, (0, len(seen) - len(self._since)), constant_values=_UNSEEN)
        since[seen & (since < 0)] = step
        waited = step - since[choice.indices]
        self._counts += np.bincount(bucket_of(waited), minlength=BUCKETS)
        self._longest = max(self._longest, int(waited.max(initial=0)))
        self._most_held = max(self._most_held, int(seen.sum()))
        stays = np.ones(len(seen), np.bool_)
        stays[choice.indices] = False
        self._since = since[stays]

    def longest(self, step: int) -> int:
        """Steps that a sample has waited, at most, where ``step`` is formed next."""
        seen = self._since[self._since >= 0]
        return max(self._longest, step - int(seen.min(initial=step)))

    @property
    def p99(self) -> int:
        """Steps that 99 of 100 samples waited at most: exact to 64, to one part in 32 above."""
        upto = np.cumsum(self._counts)
        return least_of(int(np.searchsorted(upto, 0.99 * upto[-1]))) if upto[-1] else 0

    @property
    def bound(self) -> int | None:
        """Steps that no sample waits beyond, with as many held as there were at most; None where packers slide no
        window, or promise nothing."""
        if self._packs is None:
            return None
        match self._packer:
            case ExactFill():
                packs = self._window + self._most_held
            case Joint():
                packs = self._packer.group * max_wait(self._packer.group, self._packer.patience, self._most_held)
            case _:
                return None
        return -(-packs // self._packs)
