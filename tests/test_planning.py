"""plan_step: one step over any mesh, every sample once, the same counts on all ranks, and the way back."""

from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streampack
from streampack import planning
from streampack.core.form.former import Former
from streampack.core.model.fields import Field
from streampack.core.model.keys.planning_keys import Balance, MediaLimits
from streampack.core.model.rules import Batch, Rules
from streampack.core.model.samples import I64, SampleTable
from streampack.core.packers import PACKERS
from streampack.errors import ConfigError, SampleError
from streampack.planning import StepPlan, plan_step

PACKED = [name for name in PACKERS if name != "none"]


@st.composite
def asked(draw: st.DrawFn) -> tuple[list[int], dict[str, Any]]:
    align = draw(st.sampled_from([1, 1, 2, 4]))
    budget = align * draw(st.integers(1, 16))
    options: dict[str, Any] = {
        "budget": budget, "dp": draw(st.integers(1, 5)), "align": align,
        "micro_batch_multiple": draw(st.integers(1, 3)), "min_micro_batches": draw(st.integers(1, 4)),
        "order": draw(st.sampled_from(["packer", "largest_first", "small_at_edges"])),
    }  # fmt: skip
    if draw(st.booleans()):
        options |= {"mode": "padded"}
    else:
        balances = st.sampled_from(["none", "deal", "karmarkar_karp"])
        options |= {"packer": draw(st.sampled_from(PACKED)), "balance": draw(balances)}
    return draw(st.lists(st.integers(1, budget), max_size=50)), options


def samples_of(plan: StepPlan) -> list[int]:
    return [i for rank in plan.packs for pack in rank for i in pack]


@given(asked())
def test_all_ranks_have_as_many_micro_batches_and_no_pack_is_over_budget(
    asked: tuple[list[int], dict[str, Any]],
) -> None:
    lengths, options = asked
    plan = plan_step(lengths, **options)
    align = options["align"]
    assert sorted(samples_of(plan)) == list(range(len(lengths)))
    assert len(plan.packs) == options["dp"]
    assert {len(rank) for rank in plan.packs} == {plan.num_micro_batches}
    assert plan.num_micro_batches >= options["min_micro_batches"]
    assert plan.num_micro_batches % options["micro_batch_multiple"] == 0
    for rank in plan.packs:
        for pack, (rows, width) in zip(rank, plan.shapes, strict=True):
            assert rows * width <= options["budget"]
            slots = [-(-lengths[i] // align) * align for i in pack]
            if options.get("mode") == "padded":
                assert len(pack) <= rows
                assert max(slots, default=0) <= width
            else:
                assert sum(slots) <= width
    assert plan.costs.shape == (plan.num_micro_batches, options["dp"])
    assert plan.cost_ratio >= 1
    assert plan.after.mean == plan.before.mean == sum(lengths) / options["dp"]


@given(asked())
def test_the_way_back_restores_the_order(asked: tuple[list[int], dict[str, Any]]) -> None:
    lengths, options = asked
    plan = plan_step(lengths, **options)
    assert plan.order().tolist() == samples_of(plan)
    results = np.array([[lengths[i], i] for i in plan.order()]).reshape(-1, 2)
    assert plan.restore(results).tolist() == [[length, i] for i, length in enumerate(lengths)]
    with pytest.raises(SampleError, match="expected"):
        plan.restore(np.zeros(len(lengths) + 1))


@given(asked(), st.integers(1, 6))
def test_denominators_and_samples_are_the_same_on_any_mesh(asked: tuple[list[int], dict[str, Any]], dp: int) -> None:
    lengths, options = asked
    loss = [length // 2 for length in lengths]
    one, other = (plan_step(lengths, **options | {"dp": each}, loss_tokens=loss) for each in (options["dp"], dp))
    for plan in (one, other):
        assert (plan.num_samples, plan.num_tokens) == (len(lengths), sum(lengths))
        assert plan.num_loss_tokens == max(sum(loss), 1), "a denominator, which is never 0"
    assert sorted(samples_of(one)) == sorted(samples_of(other))
    assert plan_step(lengths, **options).num_loss_tokens is None


@given(asked())
def test_a_plan_is_the_same_wherever_it_is_made(asked: tuple[list[int], dict[str, Any]]) -> None:
    lengths, options = asked
    assert plan_step(np.array(lengths, np.int32), **options).packs == plan_step(lengths, **options).packs


def test_costs_are_of_padded_lengths() -> None:
    plan = plan_step([5, 3], 16, 1, align=4)
    assert plan.costs.tolist() == [[24576 * 8 + 64 + 24576 * 4 + 16]]
    assert plan_step([5, 3], 16, 1, hidden_size=2).costs.tolist() == [[12 * 8 + 25 + 9]]
    assert plan_step([5, 3], 16, 1, a=0, b=2).costs.tolist() == [[2 * 34]]
    assert plan_step([5, 3], 16, 2, mode="padded", a=1, b=0).costs.tolist() == [[5, 5]], "padded: of the shape"


def test_packs_in_turn_are_nemo_rls_shards() -> None:
    """bins[rank::dp], in the packer's order."""
    plan = plan_step([4, 4, 4, 4], 4, 2, packer="concatenative", balance="none", order="packer")
    assert plan.packs == [[[0], [2]], [[1], [3]]]


def test_ranks_are_balanced_by_largest_differencing_and_the_spread_says_so() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1, 512).astype(int).clip(1, 8192)
    plan = plan_step(np.sort(lengths), 8192, 8, packer="concatenative", balance="karmarkar_karp")
    assert plan.before.difference > 5 * plan.after.difference
    assert plan.before.least <= plan.before.mean <= plan.before.most


def test_karmarkar_karp_packs_are_as_few_as_fit_then_a_multiple() -> None:
    lengths = [7] * 8
    assert plan_step(lengths, 8, 1, packer="karmarkar_karp").num_micro_batches == 8, "one each: two are over the budget"
    assert plan_step(lengths, 16, 1, packer="karmarkar_karp").num_micro_batches == 4
    assert plan_step(lengths, 16, 1, packer="karmarkar_karp", min_micro_batches=5).num_micro_batches == 5
    assert plan_step(lengths, 16, 1, packer="karmarkar_karp", pp=3).num_micro_batches == 6


def test_figures_are_of_real_and_of_aligned_tokens() -> None:
    plan = plan_step([5, 3], 16, 1, align=4)
    assert plan.figures is not None
    assert plan.aligned is not None
    assert (plan.figures.utilization, plan.aligned.utilization) == (0.5, 0.75)
    padded = plan_step([5, 3], 16, 1, mode="padded", align=4)
    assert padded.padded is not None
    assert padded.padded.actual_tokens == 16


def test_too_few_samples_are_empty_packs_or_an_error() -> None:
    assert plan_step([3], 8, 2).packs == [[[0]], [[]]]
    with pytest.raises(SampleError, match="got 1 samples, which leave 1 of 2 micro-batches of 2 ranks empty"):
        plan_step([3], 8, 2, empty="error")


# Media


@st.composite
def with_media(draw: st.DrawFn) -> tuple[list[int], list[list[int]], dict[str, Any]]:
    align = draw(st.sampled_from([1, 2]))
    budget = align * draw(st.integers(1, 24))
    most = {"patches": draw(st.integers(1, 30)), "items": draw(st.integers(1, 5))}
    limits = {name: most[name] for name in draw(st.sets(st.sampled_from(sorted(most))))}
    samples = draw(st.lists(st.tuples(st.integers(1, budget), st.lists(st.integers(0, 9), max_size=6)), max_size=40))
    for _, patches in samples:  # no sample exceeds a limit alone
        while patches and (sum(patches) > limits.get("patches", 99) or len(patches) > limits.get("items", 99)):
            patches.pop()
    options: dict[str, Any] = {
        "budget": budget, "dp": draw(st.integers(1, 4)), "align": align, "limits": limits,
        "a": draw(st.integers(0, 9)), "b": draw(st.integers(0, 2)), "item_cost": draw(st.integers(0, 50)),
        "patch_costs": (draw(st.integers(0, 40)), draw(st.integers(0, 3))),
        "balance": draw(st.sampled_from([None, "level", "deal", "karmarkar_karp", "none"])),
        "order": draw(st.sampled_from(["packer", "largest_first", "small_at_edges"])),
        "min_micro_batches": draw(st.integers(1, 3)),
    }  # fmt: skip
    return [length for length, _ in samples], [patches for _, patches in samples], options


def cost_by_hand(length: int, patches: list[int], options: dict[str, Any]) -> int:
    slots = -(-length // options["align"]) * options["align"]
    a, b = options["patch_costs"]
    media = sum(a * each + b * each**2 + options["item_cost"] for each in patches)
    return int(options["a"] * slots + options["b"] * slots**2 + media)


@given(with_media())
def test_packs_keep_limits_of_media_and_cost_what_a_hand_gets(
    asked: tuple[list[int], list[list[int]], dict[str, Any]],
) -> None:
    lengths, patches, options = asked
    plan = plan_step(lengths, patches=patches, **options)
    assert sorted(samples_of(plan)) == list(range(len(lengths)))
    assert {len(rank) for rank in plan.packs} == {plan.num_micro_batches}
    assert plan.patches is not None
    for at, rank in enumerate(plan.packs):
        for micro_batch, pack in enumerate(rank):
            assert sum(-(-lengths[i] // options["align"]) * options["align"] for i in pack) <= options["budget"]
            counts = {"patches": sum(sum(patches[i]) for i in pack), "items": sum(len(patches[i]) for i in pack)}
            assert all(counts[name] <= limit for name, limit in options["limits"].items())
            cost = sum(cost_by_hand(lengths[i], patches[i], options) for i in pack)
            assert (plan.costs[micro_batch, at], plan.patches[micro_batch, at]) == (cost, counts["patches"])
    path = plan.costs.max(axis=1).sum()
    if options["balance"] in (None, "level"):
        full = plan_step(lengths, patches=patches, **options | {"balance": "deal"})
        assert path <= full.costs.max(axis=1).sum()
        assert plan.num_micro_batches <= full.num_micro_batches
    elif options["balance"] != "none":
        by_micro_batch = np.sort(plan.costs, axis=None)[::-1].reshape(-1, options["dp"])
        assert path == by_micro_batch.max(axis=1).sum(), "no dealing of these packs has a shorter critical path"


@given(with_media())
def test_media_that_cost_nothing_and_have_no_limits_change_nothing(
    asked: tuple[list[int], list[list[int]], dict[str, Any]],
) -> None:
    lengths, patches, options = asked
    free = options | {"limits": None, "patch_costs": (0, 0), "item_cost": 0}
    assert plan_step(lengths, patches=patches, **free).packs == plan_step(lengths, **free).packs


def test_packs_of_a_step_are_those_that_a_broker_forms_of_a_batch() -> None:
    """The oracle is FORM with the same rules, on a batch of all samples, and DEAL on its packs."""
    draws = np.random.default_rng(5)
    lengths = draws.integers(1, 90, 200)
    patches = [draws.integers(1, 30, count).tolist() for count in draws.integers(0, 4, 200)]
    sums = np.array([sum(each) for each in patches])
    counts = [len(each) for each in patches]
    media = Field(name="pixels", dtype="uint8", axis="patch")
    rules = Rules(
        budget=256, batch=Batch(samples=200, micro_batch_multiple=1), media_fields=(media,),
        limits=MediaLimits(patches=90, items=7), balance=Balance(a=10, b=1, patches=(300, 2), items=40),
    )  # fmt: skip
    table = SampleTable(200)
    handles = table.take(200)
    table.length[handles] = lengths
    costs = [sum(300 * p + 2 * p * p + 40 for p in each) for each in patches]
    columns = {"items": counts, "patches": sums, "extra_cost": costs}
    table.put(handles, {name: np.array(column) for name, column in columns.items()})
    former = Former(rules, table)
    former.admit(handles, lengths)
    former.closed = True
    request = former.request()
    assert request is not None
    (step,) = former.apply(request.choose())
    positions = np.argsort(handles)
    formed = [sorted(positions[pack].tolist()) for pack in np.split(step.packs.handles, step.packs.bounds[1:-1])]
    plan = plan_step(
        lengths, 256, dp=1, patches=patches, patch_costs=(300, 2), item_cost=40, a=10,
        limits={"patches": 90, "items": 7}, order="packer",
    )  # fmt: skip
    assert sorted(sorted(pack) for pack in plan.packs[0]) == sorted(formed)
    assert sorted(plan.costs[:, 0].tolist()) == sorted(step.packs.costs.tolist())


def test_costs_of_media_balance_ranks_whose_tokens_are_alike() -> None:
    draws = np.random.default_rng(0)
    lengths = draws.integers(200, 400, 256)
    patches = [[int(each)] if draws.random() < 0.3 else [] for each in draws.lognormal(6, 1, 256).clip(1, 2000)]
    blind = plan_step(lengths, 2048, 8, patches=patches)
    aware = plan_step(lengths, 2048, 8, patches=patches, patch_costs=(100_000, 1))
    assert blind.patches is not None
    assert aware.patches is not None

    def imbalance(of: I64) -> float:
        return float(of.max(axis=1).sum() / of.mean(axis=1).sum())

    assert imbalance(aware.patches) < 0.5 * imbalance(blind.patches)
    assert aware.cost_ratio < 1.06


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"patches": [[1]]}, SampleError, "got patches for 1 samples, expected a list .* for each of 2 samples"),
        ({"patches": [[1], [-2]]}, SampleError, "sample 1: got -2 patches, expected integers from 0 to"),
        ({"patches": [[1], [2.5]]}, SampleError, "sample 1: got 2.5 patches"),
        ({"limits": {"patches": 8}}, SampleError, "sample 1: got 9 patches, expected at most the limit of 8"),
        ({"limits": {"items": 1}}, SampleError, "sample 1: got 2 items, expected at most the limit of 1"),
        ({"limits": {"images": 1}}, ConfigError, "limits: got 'images', expected patches or items"),
        ({"limits": {"items": 0}}, ConfigError, r"limits\['items'\]: got 0"),
        ({"limits": {"patches": 9}, "packer": "sliding_ffd"}, ConfigError, "expected 'exact_fill'"),
        ({"patch_costs": 3}, ConfigError, "patch_costs: got 3, expected two integers"),
        ({"patch_costs": (1, -1)}, ConfigError, r"patch_costs\[1\]: got -1"),
        ({"patch_costs": (2**63, 0)}, ConfigError, r"patch_costs\[0\]: got \d+, expected an integer below 4294967296"),
        ({"limits": ["patches"]}, ConfigError, r"limits: got \['patches'\], expected a mapping"),
        ({"patches": [1, 2]}, SampleError, "sample 0: got patches 1, expected a list with those of each item"),
        ({"item_cost": -1}, ConfigError, "item_cost: got -1"),
        ({"mode": "padded"}, ConfigError, 'patches: got media with mode="padded"'),
        ({"patches": None, "limits": {"items": 1}}, ConfigError, "limits: got .* without patches"),
        ({"patches": None, "patch_costs": (1, 0)}, ConfigError, "patch_costs: got 1 without patches"),
    ],
)
def test_media_that_cannot_be_are_refused(wrong: dict[str, Any], error: type[Exception], said: str) -> None:
    options: dict[str, Any] = {"patches": [[1], [4, 5]]} | wrong
    with pytest.raises(error, match=said):
        plan_step([5, 3], 8, 2, **options)


# Groups of ranks


@given(
    st.lists(st.integers(1, 256), min_size=1, max_size=60),
    st.sampled_from([4, 6, 8]),
    st.sampled_from([(0, 0), (0.05, 0.2)]),
)
def test_each_rank_has_the_pack_of_its_group_and_each_sample_comes_back_once(
    lengths: list[int], dp: int, exchange: tuple[float, float]
) -> None:
    plan = plan_step(lengths, 64, dp, mode="dynamic_cp", exchange=exchange)
    assert plan.cp_groups is not None
    for m in range(plan.num_micro_batches):
        for rank in range(dp):
            first, size = plan.cp_groups[m, rank].tolist()
            assert first <= rank < first + size
            assert plan.packs[rank][m] == plan.packs[first][m]
            assert plan.cp_groups[m, first].tolist() == [first, size]
    assert plan.restore(plan.order()).tolist() == list(range(len(lengths)))
    assert plan.costs.shape == (plan.num_micro_batches, dp)


# Errors


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"dp": 0}, "dp: got 0"),
        ({"budget": 8.0}, "budget: got 8.0"),
        ({"mode": "both"}, "mode: got 'both', expected one of packed, padded"),
        ({"order": "smallest"}, "order: got 'smallest'"),
        ({"balance": "joint"}, "balance: got 'joint'"),
        ({"empty": "drop"}, "empty: got 'drop'"),
        ({"mode": "padded", "packer": "exact_fill"}, "packer: got 'exact_fill'"),
        ({"mode": "padded", "pp": 2}, "pp: got 2, expected 1"),
        ({"loss_tokens": [1]}, "got numbers of loss tokens for 1 samples"),
        ({"loss_tokens": [1, -1]}, "sample 1: got -1 loss tokens, expected at least 0"),
        ({"a": -5}, "a: got -5"),
        ({"b": 2.5}, "b: got 2.5"),
        ({"hidden_size": 0}, "hidden_size: got 0"),
        ({"packer": "best"}, "packer: got 'best'"),
        ({"lengths": [3, 9]}, "sample 1: got 9 tokens"),
        ({"mode": "dynamic_cp", "lengths": [3, 17]}, "got a sample of 17 tokens, expected at most 16"),
        ({"mode": "dynamic_cp", "lengths": [3, 0]}, "sample 1: got 0 tokens, expected at least 1"),
        ({"mode": "dynamic_cp", "budget": 9}, r"budget: got 9, expected a multiple of 2 \* align = 2"),
        ({"mode": "dynamic_cp", "exchange": (0.2, -1)}, "exchange: got .* expected two numbers from 0 to 64"),
        ({"mode": "dynamic_cp", "max_group": 0}, "max_group: got 0"),
        ({"mode": "dynamic_cp", "packer": "exact_fill"}, "packer: got a value with mode"),
        ({"mode": "dynamic_cp", "pp": 2}, "got a value with mode"),
        ({"max_group": 2}, 'max_group: got 2 with mode=.packed., expected mode="dynamic_cp"'),
    ],
)
def test_arguments_that_cannot_be_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, SampleError), match=said):
        plan_step(**{"lengths": [3, 4], "budget": 8, "dp": 2, **wrong})


@pytest.mark.parametrize("wrong", [[1, 2], None, 5, np.zeros(3), np.array(7)])
def test_results_that_are_not_one_for_each_sample_are_refused(wrong: Any) -> None:
    plan = plan_step([3, 4], 8)
    with pytest.raises(SampleError, match=r"got results of (type|shape) .*, expected"):
        plan.restore(wrong)


def test_the_example_in_its_docstring_holds() -> None:
    assert streampack.plan_step is plan_step
    assert doctest.testmod(planning).failed == 0
