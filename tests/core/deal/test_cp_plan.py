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
from streampack.core.deal.dynamic_cp.cp_plan import (
    CLOSE,
    CpCosts,
    costs_refusal,
    descending,
    levels_of,
    plan_groups,
    plan_uniform,
)
from streampack.core.deal.dynamic_cp.cp_plan_kernels import (
    BUCKETS,
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
    node, across = draw(st.sampled_from([(0.0, 0.0), (0.05, 0.2), (0.5, 2.0), (0.5, 0.0)]))
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
@example(Drawn(np.full(30, 16161), 5, 16384, 8, CpCosts(100, 1), 8))
@example(Drawn(np.array([2049, *[4096] * 12, 1]), 33, 2048, 64, CpCosts(node=0.5, across=0.0), 1))
def test_a_plan_is_not_above_groups_of_one_size(drawn: Drawn) -> None:
    plan, levels = plan_groups(*drawn), levels_of(min(drawn.ranks, drawn.max_group), drawn.align, drawn.costs)
    longest = int(drawn.lengths.max(initial=1))
    most_above = CLOSE if drawn.costs.node + drawn.costs.across == 0 else 1
    for level in range(len(levels)):
        if padded(longest, level, levels) <= drawn.rank_tokens << level:
            uniform = plan_uniform(drawn.lengths, drawn.ranks, drawn.rank_tokens, 1 << level, drawn.costs, drawn.align)
            check_plan(drawn.lengths, uniform, *drawn[1:])
            assert plan.critical_path <= uniform.critical_path * most_above


@given(drawn_steps())
def test_a_plan_follows_from_the_lengths_in_any_order(drawn: Drawn) -> None:
    one, other = plan_groups(*drawn), plan_groups(drawn.lengths[::-1], *drawn[1:])
    assert (one.critical_path, one.num_micro_batches) == (other.critical_path, other.num_micro_batches)
    assert one.size.tolist() == other.size.tolist()


class PlainGroup(NamedTuple):
    level: int
    batch: int
    samples: list[int]


def place_plainly(
    lengths: list[int], levels_of_samples: list[int], least: int, ranks: int, micro_batches: int, rank_tokens: int,
    total: int, full: int, target: int, costly: int, levels: I64, a: int, b: int,
) -> list[PlainGroup] | None:  # fmt: skip
    """Place samples as ``place_samples`` does, by searching all samples and groups each time."""
    unit = int(levels[0, 1])
    groups: list[PlainGroup] = []
    used, heights = list[int](), list[int]()

    def cost(level: int, *samples: int) -> int:
        return sum(int(cost_of(lengths[i], level, levels, a, b)) for i in samples)

    def has_room(group: PlainGroup, sample: int) -> bool:
        tokens = sum(int(padded(lengths[i], group.level, levels)) for i in [*group.samples, sample])
        return tokens <= rank_tokens << group.level

    left = [i for i, level in enumerate(levels_of_samples) if level > least or cost(least, i) > costly]
    others = range(len(left), len(lengths))
    while left:
        used.append(0)
        height = -1
        while True:
            longest = {levels_of_samples[i]: i for i in reversed(left) if 1 << levels_of_samples[i] <= ranks - used[-1]}
            if not longest:
                break
            level = max(sorted(longest), key=lambda level: cost(level, longest[level]))
            if height < 0:
                share = max(total, 0) // ranks
                height = max(min(target - target % unit, 2 * (share - share % unit)), cost(level, longest[level]))
            group = PlainGroup(level, len(used) - 1, [longest[level]])
            for i in sorted(left, key=lambda i: (-levels_of_samples[i], i)):
                is_new = i != group.samples[0] and levels_of_samples[i] <= level
                if is_new and has_room(group, i) and cost(level, *group.samples, i) <= height:
                    group.samples.append(i)
            left = [i for i in left if i not in group.samples]
            groups.append(group)
            used[-1] += 1 << level
            filled = cost(level, *group.samples)
            total -= filled + min(height - filled, full) << level
        total -= min(height, full) * (ranks - used[-1])
        heights.append(height)
    share = max(total, 0) // (ranks * max(micro_batches - len(used), 1))
    share -= share % unit
    above = share if micro_batches <= len(used) else 0
    while len(used) < micro_batches:
        used.append(0)
        heights.append(share)
    for m in range(len(used)):
        while used[m] < ranks:
            level = max(level for level in range(least + 1) if used[m] + (1 << level) <= ranks)
            groups.append(PlainGroup(level, m, []))
            used[m] += 1 << level
    span, shift = above + max(heights) + cost(least, *others[:1]), 0
    while span >> shift >= BUCKETS:
        shift += 1

    def bucket(group: PlainGroup) -> int:
        lacks = cost(group.level, *group.samples) - heights[group.batch] + max(heights)
        return min(lacks >> shift, BUCKETS - 1)

    line, asleep = list(groups), list[PlainGroup]()
    for i in others:
        woken = [group for group in reversed(asleep) if has_room(group, i)]
        asleep = [group for group in asleep if not any(group is other for other in woken)]
        line += woken
        while True:
            if not line:
                return None
            group = line.pop(min(range(len(line)), key=lambda k: bucket(line[k])))
            if has_room(group, i):
                group.samples.append(i)
                line.append(group)
                break
            asleep.append(group)
    return groups


@given(drawn_steps(), st.integers(0, 3), st.integers(1, 4), st.integers(0, 2), st.integers(0, 4))
def test_samples_are_placed_as_a_plain_search_places_them(
    drawn: Drawn, least: int, micro_batches: int, wider: int, quarters: int
) -> None:
    costs = drawn.costs
    levels = levels_of(min(drawn.ranks, drawn.max_group), drawn.align, costs)
    lengths, least = -np.sort(-drawn.lengths), min(least, len(levels) - 1)
    level_of = np.minimum(least_levels(lengths, least, drawn.rank_tokens, levels) + wider, len(levels) - 1)
    total = total_cost(lengths, level_of, levels, costs.a, costs.b)
    full = min(drawn.rank_tokens * costs.a * int(levels[0, 1]), total)
    mean = total // (drawn.ranks * micro_batches)
    arguments = (
        least, drawn.ranks, micro_batches, drawn.rank_tokens, total, full, mean * quarters // 4, mean // 5, levels,
        costs.a, costs.b,
    )  # fmt: skip
    critical, count, group_of, cost, level, batch_of = place_samples(lengths, level_of, *arguments)
    plain = place_plainly(lengths.tolist(), level_of.tolist(), *arguments)
    if plain is None:
        assert critical == -1
        return
    assert list(zip(level.tolist(), batch_of.tolist(), strict=True)) == [group[:2] for group in plain]
    for number, group in enumerate(plain):
        assert np.flatnonzero(group_of == number).tolist() == sorted(group.samples)
    assert count == max(batch_of) + 1
    assert critical == sum(cost[batch_of == m].max() for m in range(count))


@given(st.lists(st.integers(0, 9) | st.integers(0, 1 << 62), max_size=40))
def test_values_are_ordered_largest_first_and_ties_by_number(values: list[int]) -> None:
    assert descending(np.array(values, np.int64)).tolist() == sorted(range(len(values)), key=lambda i: -values[i])


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
    batch_of = np.zeros(len(groups), np.int64)
    critical = deal_groups(cost, level, descending(cost), batch_of, ranks, micro_batches)
    if left:
        assert critical == -1
        return
    assert [np.flatnonzero(batch_of == m).tolist() for m in range(micro_batches)] == expected
    assert critical == sum(max(groups[j][0] for j in taken) for taken in expected)


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
