"""Plans of dynamic context parallelism: valid by their definition, as a plain oracle places samples, and never worse
than groups of one size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streampack.core.deal.dynamic_cp import cp_plan_kernels
from streampack.core.deal.dynamic_cp.cp_plan import CpCosts, costs_refusal, levels_of, plan_groups, plan_uniform
from streampack.core.deal.dynamic_cp.cp_plan_kernels import (
    MOST_COMPARED,
    cost_of,
    deal_groups,
    least_levels,
    padded,
    place_samples,
    total_cost,
)
from streampack.core.deal.mesh_validation import mesh_refusal
from streampack.core.model.keys.planning_keys import Balance
from streampack.core.model.mesh import DynamicCp, Mesh
from streampack.core.model.rules import Batch, Rules
from streampack.core.model.samples import I64
from tests.core.deal.cp_checker import check_plan


class Drawn(NamedTuple):
    lengths: I64
    ranks: int
    rank_tokens: int
    max_group: int
    costs: CpCosts
    align: int


@st.composite
def drawn_steps(draw: st.DrawFn) -> Drawn:
    align = draw(st.sampled_from([1, 1, 2, 16]))
    ranks = draw(st.integers(1, 24))
    rank_tokens = draw(st.sampled_from([32, 64, 256])) * align
    max_group = draw(st.sampled_from([1, 2, 4, 8, 16]))
    most = 1 << (min(ranks, max_group).bit_length() - 1)
    longest = most * rank_tokens
    lengths = draw(st.lists(st.integers(1, longest) | st.integers(1, 32), max_size=60))
    a, b = draw(st.sampled_from([(24576, 1), (1, 0), (0, 1), (100, 1)]))
    node, across = draw(st.sampled_from([(0.0, 0.0), (0.05, 0.2), (0.5, 2.0)]))
    costs = CpCosts(a, b, node, across, draw(st.sampled_from([1, 2, 8])))
    return Drawn(np.array(lengths, np.int64), ranks, rank_tokens, max_group, costs, align)


@given(drawn_steps())
@example(Drawn(np.zeros(0, np.int64), 4, 64, 4, CpCosts(), 1))
def test_every_sample_has_one_group_with_room_and_every_rank_one_group_in_each_micro_batch(drawn: Drawn) -> None:
    plan = plan_groups(*drawn)
    critical = check_plan(drawn.lengths, plan, *drawn[1:])
    assert plan.critical_path == pytest.approx(critical, rel=1e-3, abs=len(plan.size) * 50.0)


@given(drawn_steps())
@example(Drawn(np.array([25, 33]), 5, 32, 4, CpCosts(24576, 1, 0.5, 2.0), 1))  # the last rank is a group of its own
def test_a_plan_with_exchange_is_never_above_groups_of_one_size(drawn: Drawn) -> None:
    if drawn.costs.node == 0:
        return
    plan, levels = plan_groups(*drawn), levels_of(min(drawn.ranks, drawn.max_group), drawn.align, drawn.costs)
    longest = int(drawn.lengths.max(initial=1))
    for level in range(len(levels)):
        if padded(longest, level, levels) <= drawn.rank_tokens << level:
            uniform = plan_uniform(drawn.lengths, drawn.ranks, drawn.rank_tokens, 1 << level, drawn.costs, drawn.align)
            check_plan(drawn.lengths, uniform, *drawn[1:])
            assert plan.critical_path <= uniform.critical_path


@given(drawn_steps())
def test_a_plan_follows_from_the_lengths_in_any_order(drawn: Drawn) -> None:
    one, other = plan_groups(*drawn), plan_groups(drawn.lengths[::-1], *drawn[1:])
    assert (one.critical_path, one.num_micro_batches) == (other.critical_path, other.num_micro_batches)
    assert one.size.tolist() == other.size.tolist()


class PlainGroup(NamedTuple):
    level: int
    batch: int
    first: int
    samples: list[int]


def place_plainly(
    lengths: list[int], levels_of_samples: list[int], least: int, ranks: int, micro_batches: int, rank_tokens: int,
    target: int, levels: I64, a: int, b: int,
) -> list[PlainGroup] | None:  # fmt: skip
    """Place samples as ``place_samples`` does, by searching all groups for each sample."""
    groups: list[PlainGroup] = []
    cursor = 0
    used, goal = [0] * micro_batches, [target] * micro_batches

    def cost(group: PlainGroup, *more: int) -> int:
        return sum(cost_of(lengths[i], group.level, levels, a, b) for i in [*group.samples, *more])

    def fits(group: PlainGroup, sample: int) -> bool:
        tokens = sum(int(padded(lengths[i], group.level, levels)) for i in [*group.samples, sample])
        return tokens <= rank_tokens << group.level

    def put(group: PlainGroup, sample: int) -> None:
        group.samples.append(sample)

    def open_group(level: int, batch: int) -> PlainGroup:
        groups.append(PlainGroup(level, batch, used[batch], []))
        used[batch] += 1 << level
        return groups[-1]

    wide = [i for i, level in enumerate(levels_of_samples) if level > least]
    for i in wide:
        level = levels_of_samples[i]
        same = [g for g in groups if g.level == level and fits(g, i)]
        same = [g for g in same if cost(g, i) <= goal[g.batch]]
        free = [m for m in range(micro_batches) if ranks - used[m] >= 1 << level]
        if same:
            group = max(same, key=cost)
        elif free:
            alone = cost_of(lengths[i], level, levels, a, b)
            group = open_group(level, min(free, key=lambda m: (max(alone - goal[m], 0), used[m], m)))
        else:
            turned = [groups[(cursor + k) % len(groups)] for k in range(len(groups))]
            larger = [g for g in turned if fits(g, i)][:MOST_COMPARED]
            if not larger:
                return None
            if len(larger) == MOST_COMPARED:
                cursor = groups.index(larger[-1]) + 1
            group = min(larger, key=lambda g: cost(g, i) - goal[g.batch])
        put(group, i)
        goal[group.batch] = max(goal[group.batch], cost(group))
    for m in range(micro_batches):
        while used[m] < ranks:
            open_group(max(level for level in range(least + 1) if used[m] + (1 << level) <= ranks), m)
    for i in range(len(wide), len(lengths)):
        room = [g for g in groups if fits(g, i)]
        if not room:
            return None
        put(min(room, key=lambda g: cost(g) - goal[g.batch]), i)
    return groups


@given(drawn_steps(), st.integers(0, 3), st.integers(1, 4), st.integers(0, 2))
def test_samples_are_placed_as_a_plain_search_places_them(
    drawn: Drawn, least: int, micro_batches: int, wider: int
) -> None:
    costs = drawn.costs
    levels = levels_of(min(drawn.ranks, drawn.max_group), drawn.align, costs)
    lengths, least = -np.sort(-drawn.lengths), min(least, len(levels) - 1)
    level_of = np.minimum(least_levels(lengths, least, drawn.rank_tokens, levels) + wider, len(levels) - 1)
    target = total_cost(lengths, level_of, levels, costs.a, costs.b) // (drawn.ranks * micro_batches)
    arguments = (least, drawn.ranks, micro_batches, drawn.rank_tokens, target, levels, costs.a, costs.b)
    critical, group_of, _, level, batch_of, first_of = place_samples(lengths, level_of, *arguments)
    plain = place_plainly(lengths.tolist(), level_of.tolist(), *arguments)
    if plain is None:
        assert critical == -1
        return
    assert list(zip(level.tolist(), batch_of.tolist(), first_of.tolist(), strict=True)) == [g[:3] for g in plain]
    for number, group in enumerate(plain):
        assert np.flatnonzero(group_of == number).tolist() == group.samples


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=12), st.sampled_from([8, 12]))
def test_micro_batches_take_the_costliest_groups_that_have_room(drawn: list[tuple[int, int]], ranks: int) -> None:
    missing = -sum(1 << level for _, level in drawn) % ranks
    groups = [*drawn, *[(0, 0)] * missing]
    micro_batches = sum(1 << level for _, level in groups) // ranks
    left, expected = sorted(range(len(groups)), key=lambda j: (-groups[j][0], j)), list[list[int]]()
    for _ in range(micro_batches):
        room, taken = ranks, list[int]()
        while room and (best := next((j for j in left if 1 << groups[j][1] <= room), None)) is not None:
            left.remove(best)
            taken.append(best)
            room -= 1 << groups[best][1]
        expected.append(sorted(taken))
    cost, level = np.array(groups).T.copy()
    batch_of, first_of = np.zeros((2, len(groups)), np.int64)
    critical = deal_groups(cost, level, batch_of, first_of, ranks, micro_batches)
    if left:
        assert critical == -1
        return
    assert [np.flatnonzero(batch_of == m).tolist() for m in range(micro_batches)] == expected
    assert critical == sum(max(groups[j][0] for j in taken) for taken in expected)
    assert not (first_of % (1 << level)).any()
    for taken in expected:
        assert sorted(r for j in taken for r in range(first_of[j], first_of[j] + (1 << groups[j][1]))) == [
            *range(ranks)
        ]


@given(drawn_steps())
def test_kernels_and_their_python_forms_make_the_same_plan(drawn: Drawn) -> None:
    compiled, names = plan_groups(*drawn), ("deal_groups", "least_levels", "place_samples", "total_cost", "widen")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(f"streampack.core.deal.dynamic_cp.cp_plan.{name}", getattr(cp_plan_kernels, name).py_func)
        plain = plan_groups(*drawn)
    for one, other in zip(vars(compiled).values(), vars(plain).values(), strict=True):
        assert np.array_equal(one, other)


def test_a_sample_that_no_group_holds_is_refused_with_the_sizes_that_would_hold_it() -> None:
    expected = r"got a sample of 300 tokens, expected at most 256, which 4 ranks of 64 tokens hold\. Raise rank_tokens"
    with pytest.raises(ValueError, match=expected):
        plan_groups(np.array([8, 300]), 8, 64, 4, CpCosts())


def test_costs_that_would_overflow_are_refused() -> None:
    with pytest.raises(ValueError, match="Use smaller a and b"):
        plan_groups(np.array([1 << 20] * 64), 64, 1 << 20, 64, CpCosts(a=1 << 31, b=1 << 11))


def test_long_samples_get_more_ranks_and_short_ones_get_one() -> None:
    plan = plan_groups(np.array([512, *[64] * 24]), 16, 128, 16, CpCosts(node=0.05, across=0.2))
    sizes = plan.size[plan.group_of]
    assert sizes[0] >= 4
    assert set(sizes[1:].tolist()) == {1}


@given(
    st.integers(0, 2**32 - 1), st.integers(0, 2**12 - 1), st.floats(0, 64), st.integers(0, 12), st.integers(1, 20),
    st.integers(0, 40), st.sampled_from([1, 16, 48]),
)  # fmt: skip
@example(2**32 - 1, 2**12 - 1, 64.0, 12, 20, 40, 1)
@example(24576, 1, 0.2, 6, 20, 33, 1)
def test_costs_that_a_feed_may_have_overflow_for_no_step(
    a: int, b: int, across: float, group: int, longest: int, tokens: int, align: int
) -> None:
    """The steps with the largest costs, of samples of the longest and of the shortest length."""
    longest, total = 1 << longest, 1 << min(tokens, longest + 12)
    costs = CpCosts(a, b, 0.0, across)
    wrong = costs_refusal(costs, 1 << group, align, longest, total)
    for length in (1, longest):
        lengths = np.full(min(total // length, 3000), length)
        wrong_of_step = costs_refusal(costs, 1 << group, align, length, int(lengths.sum()))
        assert not wrong_of_step or wrong, "a smaller step costs less"
        if not wrong and len(lengths):
            plan_groups(lengths, 1 << group, -(-longest // 32) * 32 * align, 1 << group, costs, align)
    if not wrong:
        return
    assert f"expected at most 4.6e+18. The factors are a={a} and b={b}" in wrong


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"batch": Batch(samples=8, micro_batch_multiple=2)}, "with step.micro_batch_multiple, expected"),
        ({"batch": Batch(samples=8, min_micro_batches=2)}, "with step.min_micro_batches, expected"),
        ({"batch": Batch(samples=8, empty="error")}, "with step.empty: error, expected"),
        ({"balance": Balance("none")}, "with balance.kind: none, expected"),
        ({"max_samples_per_pack": 4}, "with max_samples_per_pack, expected"),
        ({"packer": "none", "micro_batch_size": 1}, "with micro_batch_size, expected"),
        ({"packs": 1 << 17, "budget": 1 << 18, "balance": Balance(a=2**32 - 1, b=4095)}, "a=4294967295 and b=4095"),
        ({"batch": Batch(), "budget": 1 << 18, "balance": Balance(a=2**32 - 1)}, "a=4294967295 and b=1"),
        ({"balance": Balance("joint", group=4)}, ""),
        ({"batch": Batch()}, ""),
    ],
)
def test_settings_that_groups_would_ignore_are_refused(change: dict[str, Any], text: str) -> None:
    layout = DynamicCp(rank_tokens=8192, max_group=64).layout
    refusal = mesh_refusal(Mesh(dp=64), Rules(**{"packs": 64, **change}), layout)
    assert refusal == text if not text else text in refusal
    assert "\n" not in refusal
