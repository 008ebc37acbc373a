"""What DEAL makes of steps: how evenly ranks are loaded, and what padding a mesh adds to FORM's.

Ranks run in lock step, so costs are compared at each micro-batch index, and then over whole steps. Tokens by rank are
also those that packs in the order of their numbers would have given: before and after balancing. Means are over all
that was dealt; a step that is dealt again, over another mesh, counts again.
"""

from __future__ import annotations

from dataclasses import astuple

import numpy as np

from streampack.core.deal.deal_kernels import loads
from streampack.core.deal.dynamic_batches import PaddedFigures
from streampack.core.model.samples import I64
from streampack.core.model.steps import PlannedPacks
from streampack.core.stats.fill import Totals
from streampack.core.stats.padding import CAUSES

MOST_SHOWN = 64
_OF_RANKS = ("min", "max", "mean", "spread")


class DealtFigures:
    """``add`` takes each step as it is dealt."""

    def __init__(self) -> None:
        self.steps = 0
        self.cost_max_over_mean = 0.0
        """Cost of the dearest pack over the mean, over ranks at each micro-batch index; mean over what was dealt."""
        self.step_cost_max_over_mean = 0.0
        """Cost of the dearest rank of a step over the mean; likewise."""
        self.waste: I64 = np.zeros(len(CAUSES), np.int64)
        """Where a mesh has a say: tokens that are nobody's, as steps were first dealt, int64 [CAUSES]."""
        self.delivered_tokens = 0
        """Likewise: real ones and those."""
        self.split_packs = self.empty_packs = 0
        """Of batches: packs more than were formed, split off for the mesh, and the empty ones that it needed beside; as
        steps were first dealt."""
        self.padded = PaddedFigures(0, 0, 0)
        """Of padded micro-batches, as steps were first dealt."""
        self.padded_totals = Totals()
        """The same, a micro-batch of a rank being a pack."""
        self.skipped_tokens = 0
        """Of steps that are passed over."""
        self._rows = self._cost_steps = 0
        self._before = [0, 0, 0]
        """Of the ranks' tokens, over all steps: the least, the greatest, and all together."""
        self._after = [0, 0, 0]
        self._ranks = 1
        self._latest: tuple[I64, I64] | None = None  # costs of the packs of the step that was dealt last, and the deal

    def skip(self, packs: PlannedPacks) -> None:
        """A step of these packs is passed over."""
        self.skipped_tokens += int(packs.tokens.sum())

    def deliver(self, tokens: I64, waste: I64) -> None:
        """A step is first dealt as packs of ``tokens``, int64 [packs], which waste ``waste``, int64 [CAUSES]."""
        self.waste += waste
        self.delivered_tokens += int(tokens.sum() + waste.sum())

    def add_padded(self, step: PaddedFigures, held: I64, tokens: I64, slots: I64) -> None:
        """A step is first dealt as padded micro-batches of ``held`` samples of ``tokens`` tokens, ``slots`` when
        aligned; int64 [packs].
        """
        empty = int((held == 0).sum())
        self.empty_packs += empty
        counted = Totals(
            1, len(held), empty, int(held.sum()), int(tokens.sum()), int(slots.sum()), int(tokens @ tokens),
            int(slots @ slots),
        )  # fmt: skip
        self.padded_totals = Totals(*map(sum, zip(astuple(self.padded_totals), astuple(counted), strict=True)))
        total = self.padded
        self.padded = PaddedFigures(
            total.valid_tokens + step.valid_tokens, total.original_tokens + step.original_tokens,
            total.actual_tokens + step.actual_tokens,
        )  # fmt: skip

    def add(self, costs: I64, tokens: I64, dealt: I64) -> None:
        """A step's packs cost ``costs`` and hold ``tokens``, int64 [packs]; rank r's m-th is ``dealt[m, r]``."""
        self._ranks, self._latest = dealt.shape[1], (costs, dealt)
        found = np.empty((3, 3), np.int64)
        ratios, rows = loads(costs, tokens, dealt, np.zeros((3, self._ranks), np.int64), found)
        of_costs, after, before = found.tolist()
        if rows:
            self._cost_steps += 1
            ratio = of_costs[1] * self._ranks / of_costs[2]
            self.step_cost_max_over_mean += (ratio - self.step_cost_max_over_mean) / self._cost_steps
            self.cost_max_over_mean = (self.cost_max_over_mean * self._rows + ratios) / (self._rows + rows)
            self._rows += rows
        self.steps += 1
        self._before = [old + new for old, new in zip(self._before, before, strict=True)]
        self._after = [old + new for old, new in zip(self._after, after, strict=True)]

    def costs_by_rank(self) -> list[list[float]]:
        """Of the step that was dealt last, what each data-parallel rank's micro-batches cost, the first ``MOST_SHOWN``
        of them, over what one costs in the mean: [ranks][micro-batches]. Empty before one was dealt.
        """
        if self._latest is None:
            return []
        costs = np.take(*self._latest)
        of_each: list[list[float]] = (costs[:MOST_SHOWN] / max(costs.mean(), 1e-9)).round(3).T.tolist()
        return of_each

    def rank_tokens(self) -> dict[str, dict[str, float]]:
        """Real tokens of a rank's step: ``before`` and ``after`` balancing, the ``min``, ``max``, ``mean`` and
        ``spread`` (max - min) over ranks, mean over steps.
        """
        return {"before": self._means(self._before), "after": self._means(self._after)}

    def _means(self, sums: list[int]) -> dict[str, float]:
        low, high, mean = (each / max(self.steps, 1) for each in sums)
        return dict(zip(_OF_RANKS, (low, high, mean / self._ranks, high - low), strict=True))
