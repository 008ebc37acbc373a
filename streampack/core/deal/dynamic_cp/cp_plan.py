"""Plans the micro-batches of a step, and the groups of ranks that compute its samples.

The ranks are those of the data-parallel and context-parallel axes in one line. In each micro-batch they are parted into
groups of 1, 2, 4 and more consecutive ranks. A group has one pack, and each of its ranks a shard of every sample. The
plan aims at the smallest sum, over micro-batches, of the costliest rank.

A try has a size of the smallest groups and a least number of micro-batches. Costly samples may get larger groups than
their tokens need, up to a limit. A try fills one micro-batch after another with costly samples. The costliest one
decides the height of the micro-batch, and no group passes it. Short samples then fill what is left. At the end, groups
of like cost move to the same micro-batch. Bounds rule out most tries. Groups of one size are among the tries. So a plan
is never worse than static context parallelism of any size that has room, or by 0.5 % at most if the exchange is free.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, lcm

import numpy as np
from numpy.typing import NDArray

from streampack.core.deal.dynamic_cp.cp_plan_kernels import (
    ONE,
    deal_groups,
    least_levels,
    padded,
    place_samples,
    total_cost,
    widen,
)
from streampack.core.model.samples import I64

CLOSE = 1.005
"""A plan within this factor of its bound is not improved."""
BETTER = 0.997
"""A plan with more micro-batches must cost less than this share of the best."""
MANY_SAMPLES = 2
"""Samples of middle length that a group should hold."""
COSTLY = 5
"""A sample is costly if it costs a rank more than one of so many parts of a micro-batch, in most tries."""
WORK, WORK_OF_SAMPLE = 50_000, 4
"""Samples and groups that all tries of a step may place, about: a number, and more for each sample."""
WORK_OF_TRY = 1000
"""The work of a try besides its samples and groups."""
MOST_SUM = 2.0**62
"""The largest sum of costs, so that no number overflows."""


@dataclass(frozen=True)
class CpCosts:
    """The cost of a sample for each rank of its group.

    For s tokens on g ranks it is (a s + b s²) / g + exchange a s (g - 1) / g.

    Attributes:
        a: Cost per token.
        b: Cost per squared token.
        node: Exchange of a token within a node, as a share of ``a``.
        across: Exchange of a token across nodes, as a share of ``a``.
        ranks_of_node: Ranks of a node. Groups up to this size lie within one.
    """

    a: int = 24576
    b: int = 1
    node: float = 0.0
    across: float = 0.0
    ranks_of_node: int = 8


@dataclass(frozen=True)
class CpPlan:
    """The groups of a step's micro-batches. The groups of a micro-batch have every rank once.

    Attributes:
        group_of: int64 [samples], the group of each sample.
        size: int64 [groups], the ranks of each group: a power of two.
        first: int64 [groups], the first rank of each group, a multiple of its size.
        micro_batch: int64 [groups], the micro-batch of each group.
        costs: int64 [groups], the cost of each rank of a group, rounded down.
        num_micro_batches: Number of micro-batches.
        critical_path: Sum, over micro-batches, of the costliest rank, in the unit of the costs.
    """

    group_of: I64
    size: I64
    first: I64
    micro_batch: I64
    costs: I64
    num_micro_batches: int
    critical_path: float

    def samples(self) -> tuple[I64, I64]:
        """Return the samples group by group, int64 [samples], and where each group begins, int64 [groups + 1].

        The samples of a group are in their order in the step.
        """
        bounds = np.zeros(len(self.size) + 1, np.int64)
        np.cumsum(np.bincount(self.group_of, minlength=len(self.size)), out=bounds[1:])
        return np.argsort(self.group_of, kind="stable"), bounds

    def dealt(self, ranks: int) -> I64:
        """Return the group of each rank in each micro-batch, int64 [micro_batches, ranks]."""
        order = np.lexsort((self.first, self.micro_batch))
        return np.repeat(order, self.size[order]).reshape(self.num_micro_batches, ranks)


@dataclass(eq=False)
class GroupRequest:
    """A request for the groups of a step on a mesh; ``choose`` may run in any thread.

    Attributes:
        lengths: int64 [samples]; this and the next fields are the arguments of ``plan_groups``.
        plan: The plan, once it is made.
    """

    lengths: I64
    ranks: int
    rank_tokens: int
    max_group: int
    costs: CpCosts
    align: int
    plan: CpPlan | None = None

    def choose(self) -> CpPlan:
        """Return the plan; make it now unless it is made."""
        if self.plan is not None:
            return self.plan
        return plan_groups(self.lengths, self.ranks, self.rank_tokens, self.max_group, self.costs, self.align)


def plan_groups(
    lengths: I64, ranks: int, rank_tokens: int, max_group: int, costs: CpCosts, align: int = 1
) -> CpPlan:  # fmt: skip
    """Plan the micro-batches and groups of a step.

    Args:
        lengths: int64 [samples], tokens of each sample, at least 1.
        ranks: Number of ranks.
        rank_tokens: Most tokens of a rank in a micro-batch; an even multiple of ``align``.
        max_group: Most ranks of a group. Groups are powers of two, up to ``ranks``.
        costs: The cost of samples.
        align: Multiple of tokens to which samples are padded. In a group of g they are also padded to 2 g.

    Raises:
        ValueError: A sample is longer than the largest group has room for, or the costs are too large.

    >>> plan = plan_groups(np.array([96, 16, 16, 16, 16]), 4, 32, 4, CpCosts(node=0.05))
    >>> plan.size[plan.group_of].tolist(), plan.num_micro_batches
    ([4, 1, 1, 1, 1], 2)
    """
    return _plan(lengths, ranks, rank_tokens, levels_of(min(max_group, ranks), align, costs), costs)


def warm_up() -> None:
    """Compile the kernels, or load them from the disk, by planning a small step."""
    plan_groups(np.array([20, 4, 4]), 2, 16, 2, CpCosts(node=0.1))


def plan_uniform(
    lengths: I64, ranks: int, rank_tokens: int, size: int, costs: CpCosts, align: int = 1
) -> CpPlan:  # fmt: skip
    """Plan a step with groups of one ``size``, as static context parallelism has; arguments as for ``plan_groups``."""
    levels = levels_of(size, align, costs)
    return _plan(lengths, ranks, rank_tokens, levels, costs, least=len(levels) - 1)


def _plan(lengths: I64, ranks: int, rank_tokens: int, levels: I64, costs: CpCosts, least: int = 0) -> CpPlan:
    """Plan a step with groups of the levels from ``least`` on."""
    most = len(levels) - 1
    longest = int(lengths.max(initial=1))
    if padded(longest, most, levels) > rank_tokens << most:
        raise ValueError(
            f"got a sample of {longest} tokens, expected at most {rank_tokens << most}, which {1 << most} ranks of "
            f"{rank_tokens} tokens hold. Raise rank_tokens or max_group, or use more ranks"
        )
    _check_sum(lengths, levels, costs)
    order = descending(lengths)
    tries = _Tries(lengths[order], ranks, rank_tokens, levels, costs)
    critical, count, groups, cost, level, micro_batch = tries.best(least)
    group_of, size = np.empty(len(lengths), np.int64), 1 << level
    group_of[order] = groups
    in_line = np.lexsort((-size, micro_batch))  # largest first, so that groups are aligned
    first = np.empty_like(size)
    first[in_line] = (np.cumsum(size[in_line]) - size[in_line]) % ranks
    return CpPlan(group_of, size, first, micro_batch, cost >> most, count, critical / (1 << most))


def descending(values: I64) -> I64:
    """Return the order of values of at least 0, largest first, ties by number; int64 [n].

    Sorting numbers that hold value and place is much faster than sorting places by values.
    """
    most, bits = int(values.max(initial=0)), len(values).bit_length()
    if most.bit_length() + bits > 63:
        return np.argsort(-values, kind="stable")
    return np.sort((most - values << bits) | np.arange(len(values))) & (1 << bits) - 1


def levels_of(max_group: int, align: int, costs: CpCosts) -> I64:
    """Return the levels of groups up to ``max_group`` ranks, int64 [levels, 3]: see ``cp_plan_kernels``."""
    sizes = [1 << level for level in range(max_group.bit_length())]
    links = [costs.node if size <= costs.ranks_of_node else costs.across for size in sizes]
    rows = [
        (lcm(align, 2 * size) if size > 1 else align, sizes[-1] // size, round(link * ONE) * (size - 1))
        for size, link in zip(sizes, links, strict=True)
    ]
    return np.array(rows, np.int64)


def _check_sum(lengths: I64, levels: I64, costs: CpCosts) -> None:
    """Raise ValueError if the costs of all samples could overflow."""
    if refusal := _sum_refusal(_most_costs(lengths, levels, costs).sum(), int(lengths.max(initial=0)), levels, costs):
        raise ValueError(f"got {refusal}")


def costs_refusal(costs: CpCosts, max_group: int, align: int, longest: int, tokens: int) -> str:
    """Return why the costs of a step could overflow; empty if they cannot.

    The other arguments are as for ``plan_groups``. The step has samples of 1 to ``longest`` tokens, and ``tokens`` in
    all.
    """
    levels, ends = levels_of(max_group, align, costs), np.array([1, longest])
    return _sum_refusal(tokens * (_most_costs(ends, levels, costs) / ends).max(), longest, levels, costs)


def _most_costs(lengths: I64, levels: I64, costs: CpCosts) -> NDArray[np.float64]:
    """Return a bound of what each sample can cost in the kernels' unit, float64 [n]; it grows faster than lengths."""
    slots = lengths.astype(np.float64) + levels[-1, 0]
    most: NDArray[np.float64] = costs.a * (1 + levels[:, 2].max() / ONE) * slots + costs.b * slots * slots
    return np.ldexp(most, len(levels))


def _sum_refusal(total: float, longest: int, levels: I64, costs: CpCosts) -> str:
    """Return why costs with a sum of up to ``total`` overflow; empty if they do not."""
    total = max(total, costs.a * float(levels[:, 2].max()) * (longest + int(levels[-1, 0])))
    if total <= MOST_SUM:
        return ""
    return (
        f"costs of a step of up to {total:.1e}, expected at most {MOST_SUM:.1e}. The factors are a={costs.a} and "
        f"b={costs.b}, and the exchange is {costs.node:g} and {costs.across:g}. Use smaller a and b"
    )


_Placed = tuple[int, int, I64, I64, I64, I64]
"""What ``place_samples`` returns."""


class _Tries:
    """The placements that are tried for samples of ``lengths`` int64 [n], longest first."""

    def __init__(self, lengths: I64, ranks: int, rank_tokens: int, levels: I64, costs: CpCosts) -> None:
        self._lengths, self._ranks, self._rank_tokens = lengths, ranks, rank_tokens
        self._factors = levels, costs.a, costs.b
        self._most = len(levels) - 1
        self._near = min(costs.ranks_of_node.bit_length() - 1, self._most)
        self._has_exchange = costs.node + costs.across > 0
        self._rises = bool((np.diff(levels[:, 2]) >= 0).all())  # the exchange, with the size of groups
        self._fewest = max(-(-int(lengths.sum()) // (ranks * rank_tokens)), 1)
        self._most_misses = 0 if self._has_exchange else 1  # fewer other tries are likely without exchange
        self._bounds = dict[int, tuple[int, I64]]()
        self._best: _Placed | None = None
        self._work_left = WORK + WORK_OF_SAMPLE * len(lengths)

    def best(self, smallest: int) -> _Placed:
        """Return the best placement in groups of the level ``smallest`` or higher; its cost is in the kernels' unit."""
        for least, limit, *height in self._candidates(smallest):
            bound, level_of = self._bound(least)
            is_static = limit == least and bool((level_of == least).all())
            if self._ranks % (1 << least):  # the last groups are smaller
                bound = self._bound(0)[0] if self._rises else 0
            if not self._is_good(bound, self._bound(smallest)[0], is_static):
                self._try_micro_batches(least, limit, *height, must_try=is_static)
        assert self._best is not None  # each sample alone in a micro-batch has room
        return self._best

    def _candidates(self, smallest: int) -> list[tuple[int, int, int, int]]:
        """Return levels of the smallest groups, limits to which costly samples get larger ones, heights, and parts.

        The least height of a micro-batch is in quarters of the mean. A sample is costly if it costs more than one of
        the parts of the mean. Likely candidates come first. Without exchange, larger groups cost only padding. The best
        hold several samples of the length that half of the tokens lie above. With exchange, groups of one rank are
        best, and costly samples should stay within a node.
        """
        most, near = self._most, self._near
        if self._has_exchange:
            wider = [(0, most, 3), (0, near, 2), (2, near, 3)]
            likely = [(0, 0, 3, COSTLY), *((*each, COSTLY) for each in wider if each[0] < each[1]), (0, 0, 4, COSTLY)]
            likely += [(level, level, *each) for level in range(1, most + 1) for each in ((4, 1), (3, COSTLY))]
        else:
            sums = np.cumsum(self._lengths)
            middle = int(self._lengths[np.searchsorted(sums, sums[-1] // 2)]) if len(sums) else 1
            tokens = MANY_SAMPLES * middle
            start = next((level for level in range(most) if self._rank_tokens << level >= tokens), most)
            order = (*range(start, most + 1), *range(start))
            likely = [(level, most, quarters, COSTLY) for level in order for quarters in (4, 3)]
            likely += [(level, level, quarters, COSTLY) for level in order for quarters in (4, 3)]
        return list(dict.fromkeys(each for each in likely if smallest <= each[0] <= each[1]))

    def _bound(self, least: int) -> tuple[int, I64]:
        """Return a bound of the critical path with groups of the level ``least`` or higher, and the samples' levels."""
        if least not in self._bounds:
            level_of = least_levels(self._lengths, least, self._rank_tokens, self._factors[0])
            bound = total_cost(self._lengths, level_of, *self._factors) // self._ranks
            self._bounds[least] = bound >> self._most << self._most, level_of
        return self._bounds[least]

    def _is_good(self, bound: int, least_bound: int, must_try: bool) -> bool:
        """Return whether tries with a critical path of at least ``bound`` cannot make the best plan much better.

        True also if no time is left. With ``must_try``, only tries that cannot make the plan better at all are left
        out. Without exchange, a plan that is ``CLOSE`` ends all tries.
        """
        if self._best is None:
            return False
        cost = self._best[0]
        is_close = cost <= least_bound * CLOSE
        if bound >= cost or must_try:
            return bound >= cost or (is_close and not self._has_exchange)
        return bound >= cost * BETTER or is_close or self._work_left <= 0

    def _try_micro_batches(self, least: int, limit: int, quarters: int, parts: int, *, must_try: bool) -> None:
        """Try one more micro-batch after another, until that no longer makes the plan better."""
        own, misses = inf, 0
        micro_batches, bound = self._fewest, self._bound(least)[0]
        while own == inf or must_try or self._work_left > 0:
            made = self._place(least, limit, quarters, parts, micro_batches)
            if made is None:
                return
            if made[0] >= 0:
                if self._is_better(made, must_try):
                    self._best = made
                misses += made[0] >= own * BETTER
                if made[0] <= bound * CLOSE or misses > self._most_misses:
                    return
                own = min(own, made[0])
            micro_batches = max(micro_batches, made[1]) + 1

    def _is_better(self, made: _Placed, at_all: bool) -> bool:
        """Return whether a placement costs less than the best.

        With more micro-batches it must cost much less, unless ``at_all``.
        """
        if self._best is None:
            return True
        return made[0] < self._best[0] * (BETTER if made[1] > self._best[1] and not at_all else 1)

    def _place(self, least: int, limit: int, quarters: int, parts: int, micro_batches: int) -> _Placed | None:
        """Place the samples in groups of at least ``least``, costly ones in larger groups, up to ``limit``.

        Return None if the plan cannot be better than the best, or would be the same with a smaller limit.
        """
        bound, level_of = self._bound(least)
        total = bound * self._ranks
        if limit > least:
            level_of = widen(self._lengths, level_of, bound // micro_batches, limit, *self._factors)
            total = total_cost(self._lengths, level_of, *self._factors)
            is_over = self._best is not None and total // self._ranks >= self._best[0]
            if is_over or (self._has_exchange and level_of[0] <= self._near < limit):
                return None
        share, a = self._ranks * micro_batches, self._factors[1]
        full = min(self._rank_tokens * a << self._most, total)
        placed: _Placed = place_samples(
            self._lengths, level_of, least, self._ranks, micro_batches, self._rank_tokens, total, full,
            total * quarters // (4 * share), total // (parts * share), *self._factors,
        )  # fmt: skip
        critical, count, group_of, cost, level, batch_of = placed
        self._work_left -= len(self._lengths) + count * (self._ranks >> least) + WORK_OF_TRY
        if critical < 0:
            return placed
        batches = np.empty_like(batch_of)
        less = deal_groups(cost, level, descending(cost), batches, self._ranks, count)
        return placed if not 0 <= less < critical else (less, count, group_of, cost, level, batches)
