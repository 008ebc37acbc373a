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
    assert (one.num_samples, one.num_tokens, one.num_loss_tokens) == (len(lengths), sum(lengths), sum(loss))
    assert (other.num_samples, other.num_tokens, other.num_loss_tokens) == (len(lengths), sum(lengths), sum(loss))
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
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any], said: str) -> None:
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
