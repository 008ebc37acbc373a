"""Checks a plan of dynamic context parallelism by its definition, with none of the planner's code."""

from __future__ import annotations

from math import lcm

import numpy as np

from streampack.core.deal.dynamic_cp.cp_plan import CpCosts, CpPlan
from streampack.core.model.samples import I64


def check_plan(
    lengths: I64, plan: CpPlan, ranks: int, rank_tokens: int, max_group: int, costs: CpCosts, align: int = 1
) -> float:
    """Return the critical path of a plan; raise AssertionError if the plan breaks a rule.

    In each micro-batch every rank is in one group; groups are aligned powers of two up to ``max_group``; every sample
    is in one group; and no rank has more than ``rank_tokens``.
    """
    assert len(plan.group_of) == len(lengths)
    members: dict[int, list[int]] = {}
    for sample, group in enumerate(plan.group_of.tolist()):
        assert 0 <= group < len(plan.size), f"sample {sample} has no group"
        members.setdefault(group, []).append(sample)
    critical = 0.0
    for m in range(plan.num_micro_batches):
        covered, dearest = np.zeros(ranks, np.int64), 0.0
        for group in np.flatnonzero(plan.micro_batch == m).tolist():
            size, first = int(plan.size[group]), int(plan.first[group])
            assert size & (size - 1) == 0, f"group {group} has {size} ranks"
            assert size <= max_group, f"group {group} has {size} ranks"
            assert first % size == 0, f"group {group} of {size} ranks begins at {first}"
            covered[first : first + size] += 1
            unit = align if size == 1 else lcm(align, 2 * size)
            tokens, cost = 0, 0.0
            for sample in members.get(group, []):
                slot = -(-int(lengths[sample]) // unit) * unit
                tokens += slot
                link = costs.node if size <= costs.ranks_of_node else costs.across
                cost += (costs.a * slot + costs.b * slot**2) / size + link * costs.a * slot * (size - 1) / size
            assert tokens <= size * rank_tokens, f"group {group} has {tokens} tokens for {size} ranks"
            dearest = max(dearest, cost)
        assert (covered == 1).all(), f"micro-batch {m}: ranks are in {covered.tolist()} groups"
        critical += dearest
    assert plan.micro_batch.max(initial=0) < plan.num_micro_batches
    return critical
