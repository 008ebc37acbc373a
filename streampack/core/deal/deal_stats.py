"""Statistics of dealt steps: the load of ranks, and the padding that a mesh adds to FORM's.

Ranks run in lock step, so costs are compared at each micro-batch index, and then over whole steps. Tokens by rank are
counted after balancing, and as they would be with packs in the order of their numbers, before balancing. Means are over
all dealt steps; a step that is dealt again, on another mesh, counts again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

import numpy as np
from numpy.typing import NDArray

from streampack.core.deal.deal_kernels import loads
from streampack.core.deal.dynamic_batches import PaddedFigures
from streampack.core.model.samples import I64
from streampack.core.model.steps import PlannedPacks
from streampack.core.stats.fill import Totals
from streampack.core.stats.padding import CAUSES

F64 = NDArray[np.float64]
MOST_SHOWN = 64
"""Most micro-batches of a rank whose costs are shown."""
_CP = ("dynamic", "static")
_OF_RANKS = ("min", "max", "mean", "spread")


class RankCosts:
    """The micro-batch costs of one dealt step, by rank. It never changes, so any thread may read it.

    Args:
        costs: Cost of each pack, int64 [packs].
        dealt: The m-th pack of rank r is ``dealt[m, r]``, int64 [m, ranks].
    """

    def __init__(self, costs: I64, dealt: I64) -> None:
        self._costs, self._dealt = costs, dealt
        self._mean = max(float(np.take(costs, dealt).mean()), 1e-9)

    def of(self, ranks: Sequence[int]) -> list[list[float]]:
        """Return the costs of the micro-batches of some ranks, divided by the mean over the step, as [ranks][m].

        The lists hold at most ``MOST_SHOWN`` micro-batches. A rank that the step was not dealt to has an empty list.
        """
        dealt = [rank for rank in ranks if rank < self._dealt.shape[1]]
        costs = self._costs[self._dealt[:MOST_SHOWN, dealt]] / self._mean
        by_rank = dict(zip(dealt, costs.round(3).T.tolist(), strict=True))
        return [by_rank.get(rank, []) for rank in ranks]

    def means(self) -> F64:
        """Return the mean cost of each rank, divided by the mean over the step, float64 [ranks]."""
        means: F64 = np.take(self._costs, self._dealt[:MOST_SHOWN]).mean(axis=0) / self._mean
        return means


@dataclass(slots=True)
class GroupFigures:
    """Groups of ranks, and what they save compared with groups of one size, of each step as first dealt.

    That size is the smallest power of two with room for the longest sample of the step, which static context
    parallelism needs for all samples.

    Attributes:
        groups: Number of groups with samples, by their number of ranks.
        exchanged_tokens: Tokens that ranks get from others of their group in a ring, with each layout: ``dynamic`` and
            ``static``. Each rank of g gets (g - 1) / g of a sample.
        chunk_padding_tokens: Padding of samples to the chunks of their ranks, with each layout.
    """

    groups: dict[str, int] = field(default_factory=dict)
    exchanged_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_CP, 0))
    chunk_padding_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_CP, 0))

    @property
    def saved_exchange_ratio(self) -> float | None:
        """Share of the static exchange that groups save; None without one."""
        return _saved(self.exchanged_tokens)

    @property
    def saved_chunk_padding_ratio(self) -> float | None:
        """Share of the static padding to chunks that groups save; None without one."""
        return _saved(self.chunk_padding_tokens)

    def add(self, lengths: I64, sizes: I64, counts: I64, aligns: I64) -> None:
        """Count a step.

        Args:
            lengths: Tokens of each sample, int64 [samples].
            sizes: Ranks of the groups of each sample, int64 [2, samples]: the own group, and that of static cp.
            counts: Groups with samples of 1, 2, 4 ... ranks, int64 [levels].
            aligns: Multiple to which each sample is padded there, int64 [2, samples].
        """
        for level in np.flatnonzero(counts).tolist():
            name = str(1 << level)
            self.groups[name] = self.groups.get(name, 0) + int(counts[level])
        self.groups = dict(sorted(self.groups.items(), key=lambda item: int(item[0])))
        padding = (-(-lengths // aligns) * aligns - lengths).sum(axis=1)
        exchanged = ((sizes - 1) * lengths).sum(axis=1)
        for cp, more, tokens in zip(_CP, padding.tolist(), exchanged.tolist(), strict=True):
            self.chunk_padding_tokens[cp] += more
            self.exchanged_tokens[cp] += tokens


def _saved(tokens: dict[str, int]) -> float | None:
    """Return the share of the static tokens that dynamic context parallelism saves; None without any."""
    dynamic, static = (tokens[cp] for cp in _CP)
    return 1 - dynamic / static if static else None


class DealtFigures:
    """Statistics of the steps of a feed, updated as each step is dealt."""

    def __init__(self) -> None:
        self.steps = 0
        self.cost_max_over_mean = 0.0
        """Load imbalance of micro-batches: max / mean cost over ranks at one index, averaged over all indices."""
        self.step_cost_max_over_mean = 0.0
        """Load imbalance of steps: max / mean cost over ranks, averaged over all steps."""
        self.waste: I64 = np.zeros(len(CAUSES), np.int64)
        """Padding tokens by cause, int64 [CAUSES], where they depend on the mesh; of each step as first dealt."""
        self.delivered_tokens = 0
        """Real and padding tokens, counted as ``waste`` is."""
        self.split_packs = self.empty_packs = 0
        """In batch mode, packs split off and empty packs added for the mesh; of each step as first dealt."""
        self.padded: PaddedFigures | None = None
        """Tokens of padded micro-batches, of each step as first dealt; None if steps are dealt as packs."""
        self.groups: GroupFigures | None = None
        """Groups of ranks; None without dynamic context parallelism."""
        self.padded_by_budget = dict[int, Totals]()
        """Totals of padded micro-batches by budget, each counted as a pack; of each step as first dealt."""
        self.skipped_tokens = 0
        """Real tokens of skipped steps."""
        self._rows = self._cost_steps = 0
        self._before = [0, 0, 0]
        """Least, greatest and total of the ranks' tokens before balancing, summed over steps."""
        self._after = [0, 0, 0]
        """The same after balancing."""
        self._ranks = 1
        self._latest: tuple[I64, I64] | None = None  # (costs of the packs, dealt) of the last dealt step

    def skip(self, packs: PlannedPacks) -> None:
        """Count the tokens of a skipped step with these packs."""
        self.skipped_tokens += int(packs.tokens.sum())

    def deliver(self, tokens: I64, waste: I64) -> None:
        """Count the delivered tokens of a step when it is first dealt.

        ``tokens`` int64 [packs] are real tokens, ``waste`` int64 [CAUSES] padding tokens by cause.
        """
        self.waste += waste
        self.delivered_tokens += int(tokens.sum() + waste.sum())

    def add_padded(self, step: PaddedFigures, counts: I64, tokens: I64, slots: I64, budget: int) -> None:
        """Count the padded micro-batches of a step with this ``budget`` when it is first dealt.

        ``counts``, ``tokens`` and ``slots``, int64 [packs], are the samples, real tokens and aligned tokens of each
        micro-batch.
        """
        empty = int((counts == 0).sum())
        self.empty_packs += empty
        counted = Totals(
            1, len(counts), empty, int(counts.sum()), int(tokens.sum()), int(slots.sum()), int(tokens @ tokens),
            int(slots @ slots),
        )  # fmt: skip
        self.padded_by_budget[budget] = self.padded_by_budget.get(budget, Totals()) + counted
        total = astuple(self.padded or PaddedFigures())
        self.padded = PaddedFigures(*map(sum, zip(total, astuple(step), strict=True)))

    def add(self, costs: I64, tokens: I64, dealt: I64) -> None:
        """Count the load of a dealt step; ``costs`` and ``tokens`` int64 [packs].

        ``dealt`` int64 [m, ranks]: the m-th pack of rank r is ``dealt[m, r]``.
        """
        self._ranks, self._latest = dealt.shape[1], (costs, dealt)
        extremes = np.empty((3, 3), np.int64)
        ratios, rows = loads(costs, tokens, dealt, np.zeros((3, self._ranks), np.int64), extremes)
        of_costs, after, before = extremes.tolist()
        if rows:
            self._cost_steps += 1
            ratio = of_costs[1] * self._ranks / of_costs[2]
            self.step_cost_max_over_mean += (ratio - self.step_cost_max_over_mean) / self._cost_steps
            self.cost_max_over_mean = (self.cost_max_over_mean * self._rows + ratios) / (self._rows + rows)
            self._rows += rows
        self.steps += 1
        self._before = [old + new for old, new in zip(self._before, before, strict=True)]
        self._after = [old + new for old, new in zip(self._after, after, strict=True)]

    @property
    def latest_costs(self) -> RankCosts | None:
        """The micro-batch costs of the last dealt step, by rank; None before a step was dealt."""
        return None if self._latest is None else RankCosts(*self._latest)

    def rank_tokens(self) -> dict[str, dict[str, float]]:
        """Return the real tokens per rank and step, ``before`` and ``after`` balancing, averaged over steps.

        Each entry has the ``min``, ``max``, ``mean`` and ``spread`` (max - min) over ranks.
        """
        return {"before": self._means(self._before), "after": self._means(self._after)}

    def _means(self, sums: list[int]) -> dict[str, float]:
        """Return min, max, mean and spread over ranks, averaged over steps; ``sums`` are (least, greatest, total)."""
        low, high, mean = (total / max(self.steps, 1) for total in sums)
        return dict(zip(_OF_RANKS, (low, high, mean / self._ranks, high - low), strict=True))
