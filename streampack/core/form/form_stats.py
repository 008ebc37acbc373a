"""Statistics of the steps that a feed formed. They decide nothing.

Steps are collected, and counted on request or when there are dozens: counting dozens takes as long as counting one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.rules import Rules
from streampack.core.model.samples import I32, I64, SampleTable
from streampack.core.model.steps import PlannedPacks, PlannedStep
from streampack.core.stats.fill import Totals
from streampack.core.stats.length_histogram import LengthCounts
from streampack.core.stats.media_figures import MediaFigures
from streampack.core.stats.padding import CAUSES, depends_on_mesh, padding_of_packs

AT_ONCE = 1 << 14
"""Samples gathered before they are counted."""
FILL_BOUNDS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0)
"""Histogram bounds of a pack's real tokens over the budget; finer near 1, where packs are."""
Tail = tuple[int, int, int, bytes]
"""A tail that ``tail: drop`` dropped: (iteration, lineage, the step that follows, the first sample's row)."""
SAMPLES_BOUNDS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)


class ValueCounts:
    """A histogram: ``counts`` int64 [bounds + 1] is the number of values up to each bound, and above the last.

    ``sum`` is the sum of all values.

    >>> fill = ValueCounts((0.0, 0.5, 1.0))
    >>> fill.add(np.array([0.0, 0.5, 0.75, 1.0]))
    >>> fill.counts.tolist(), fill.sum
    ([1, 1, 2, 0], 2.25)
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts: I64 = np.zeros(len(bounds) + 1, np.int64)
        self.sum = 0.0

    def add(self, values: NDArray[np.float64]) -> None:
        """Count values, float64 [n]."""
        self.counts += np.bincount(np.searchsorted(self.bounds, values), minlength=len(self.counts))
        self.sum += float(values.sum())


class FormedFigures:
    """Statistics of the steps formed by ``rules``, in all iterations.

    With ``has_groups``, groups of ranks get other packs, and padding is not counted here.
    """

    def __init__(self, rules: Rules, has_groups: bool = False) -> None:
        self._rules, self._has_groups = rules, has_groups  # rules of the steps that wait to be counted
        self._totals, self._lengths = Totals(), LengthCounts()  # of what no step has, and of shared tokens
        self._by_budget = dict[int, Totals]()
        self._waste: I64 = np.zeros(len(CAUSES), np.int64)
        self._delivered_tokens = 0
        self._fill, self._samples = ValueCounts(FILL_BOUNDS), ValueCounts(SAMPLES_BOUNDS)
        self._packs: list[PlannedPacks] = []
        self._of_samples: list[I32] = []
        self._num_waiting = 0
        self._tails: set[Tail] = set()
        self.media = MediaFigures(rules) if rules.has_extra_bytes else None
        """Media in the packs; None without fields of axis item or patch."""

    def add(self, step: PlannedStep, table: SampleTable) -> None:
        """Add a formed step, whose samples are in ``table``."""
        packs = step.packs
        if step.rules is not self._rules:
            self._count()
            self._rules = step.rules
        lengths = table.length[packs.handles]
        if self.media is not None:
            items, patches, sizes = (
                column[packs.handles] for column in (table.items, table.patches, table.extra_bytes)
            )
            self.media.add(packs.bounds, packs.slots, items, patches, sizes, step.number)
        self._packs.append(packs)
        self._of_samples.append(lengths)
        self._num_waiting += 1 + len(lengths)
        if self._num_waiting > AT_ONCE:
            self._count()

    def drop(self, lengths: I32, tail: Tail) -> None:
        """Count samples that ``tail: drop`` dropped; ``lengths`` int32 [samples] are their tokens.

        A feed that goes back forms the same steps again and drops the same samples again; each dropped sample counts
        once.
        """
        if tail in self._tails:
            return
        self._tails.add(tail)
        self._totals.dropped_samples += len(lengths)
        self._totals.dropped_tokens += int(lengths.sum())

    @property
    def totals(self) -> Totals:
        """Totals of steps, packs, samples and tokens."""
        self._count()
        return sum(self._by_budget.values(), self._totals)

    @property
    def by_budget(self) -> dict[int, Totals]:
        """Totals of steps, packs, samples and tokens by budget."""
        self._count()
        return self._by_budget

    @property
    def waste(self) -> I64:
        """Padding tokens of the packs by cause, int64 [padding.CAUSES]; all 0 if the padding depends on the mesh."""
        self._count()
        return self._waste

    @property
    def delivered_tokens(self) -> int:
        """Real and padding tokens of the packs; 0 if the padding depends on the mesh."""
        self._count()
        return self._delivered_tokens

    @property
    def fill(self) -> ValueCounts:
        """Histogram of the packs' fill: real tokens divided by the budget."""
        self._count()
        return self._fill

    @property
    def samples(self) -> ValueCounts:
        """Histogram of the number of samples in a pack."""
        self._count()
        return self._samples

    @property
    def lengths(self) -> LengthCounts:
        """Histogram of the samples' lengths."""
        self._count()
        return self._lengths

    def _count(self) -> None:
        """Add the steps that wait since the last call to the totals, the padding and the histograms."""
        if not self._packs:
            return
        packs = PlannedPacks.joined(self._packs)
        lengths = np.concatenate(self._of_samples).astype(np.int64)
        self._by_budget.setdefault(self._rules.budget, Totals()).add(packs, len(self._packs))
        self._totals.shared_tokens += int(lengths.sum()) - int(packs.tokens.sum())
        if not (self._has_groups or depends_on_mesh(self._rules)):
            waste = padding_of_packs(packs, self._rules)
            self._waste = self._waste + waste
            self._delivered_tokens += int(packs.tokens.sum() + waste.sum())
        self._fill.add(packs.tokens / self._rules.budget)
        self._samples.add(packs.counts.astype(np.float64))
        self._lengths.add(lengths)
        self._packs, self._of_samples, self._num_waiting = [], [], 0
