"""What a feed's steps were formed of, in figures that decide nothing.

They are counted when someone asks for them, or enough has come together: counting takes the same ten or twenty calls
for one step as for dozens.
"""

from __future__ import annotations

import numpy as np

from streampack.core.figures import Totals
from streampack.core.length_counts import LengthCounts
from streampack.core.rules import Rules
from streampack.core.samples import I32, I64
from streampack.core.steps import Packs, Step
from streampack.core.waste import CAUSES, waste_of_packs

AT_ONCE = 1 << 14
"""Samples that are counted at once."""
FILLS = (0, 500, 800, 900, 950, 980, 990, 995, 999, 1000)
"""Packs are counted by how full of real tokens they are, in thousandths of the budget: each up to one of these, above
the one before. Finer where packers are."""


class FormedFigures:
    """Of steps formed by ``rules``, in all iterations."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._totals, self._lengths = Totals(), LengthCounts()
        self._waste: I64 = np.zeros(len(CAUSES), np.int64)
        self._fills: I64 = np.zeros(len(FILLS), np.int64)
        self._packs: list[Packs] = []
        self._of_samples: list[I32] = []
        self._num_waiting = 0

    def add(self, step: Step, lengths: I32) -> None:
        """A step was formed, of samples of ``lengths``, int32 [samples]."""
        self._packs.append(step.packs)
        self._of_samples.append(lengths)
        self._num_waiting += 1 + len(lengths)
        if self._num_waiting > AT_ONCE:
            self._count()

    def drop(self, lengths: I32) -> None:
        """Samples were left over."""
        self._totals.dropped_samples += len(lengths)
        self._totals.dropped_tokens += int(lengths.sum())

    @property
    def totals(self) -> Totals:
        """Packs and tokens."""
        self._count()
        return self._totals

    @property
    def waste(self) -> I64:
        """Tokens of the packs that are nobody's, as they were formed, int64 [waste.CAUSES]."""
        self._count()
        return self._waste

    @property
    def fills(self) -> I64:
        """Packs by how full they are, int64 [FILLS]."""
        self._count()
        return self._fills

    @property
    def lengths(self) -> LengthCounts:
        """How long the samples were."""
        self._count()
        return self._lengths

    def _count(self) -> None:
        if not self._packs:
            return
        packs = Packs.joined(self._packs)
        self._totals.add(packs, len(self._packs))
        self._waste = self._waste + waste_of_packs(packs, self._rules)
        fills = np.searchsorted(FILLS, -(-packs.tokens * 1000 // self._rules.budget))
        self._fills = self._fills + np.bincount(np.minimum(fills, len(FILLS) - 1), minlength=len(FILLS))
        self._lengths.add(np.concatenate(self._of_samples).astype(np.int64))
        self._packs, self._of_samples, self._num_waiting = [], [], 0
