"""The figures are NeMo-RL's, to the letter."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.journal.log_records import StepFormed, TailDropped
from streampack.core.model.rules import Rules, StreamRules
from streampack.core.model.samples import ROW
from streampack.core.stats.fill import Figures, figures, from_moments, of_budgets
from tests.world.live import Live
from tests.world.planned import Data


def test_the_figures_of_a_worked_example_are_those_by_hand() -> None:
    got = figures(np.array([10, 10, 4]), 10)
    assert (got.packs, got.tokens, got.theoretical_min_packs) == (3, 24, 3)
    assert got.utilization == pytest.approx(0.8)
    assert got.waste_ratio == pytest.approx(0.2)
    assert got.bin_balance == pytest.approx(1 - statistics.stdev([1, 1, 0.4]) / 0.8)
    assert got.packing_efficiency == 1.0


def test_no_packs_have_no_figures() -> None:
    assert figures(np.empty(0, np.int64), 8) == Figures(0, 0, 0.0, 0.0, 0.0, 0, 0.0)


def test_one_pack_is_balanced() -> None:
    assert figures(np.array([3]), 8).bin_balance == 1.0


def test_balance_may_be_negative_and_empty_packs_have_none() -> None:
    assert figures(np.array([8, 0, 0, 0]), 8).bin_balance == pytest.approx(-1.0)
    empty = figures(np.zeros(3, np.int64), 8)
    assert (empty.bin_balance, empty.utilization, empty.waste_ratio, empty.packing_efficiency) == (0.0, 0.0, 1.0, 0.0)


@given(st.lists(st.integers(1, 50), min_size=2, max_size=30))
def test_the_figures_follow_their_definitions(sums: list[int]) -> None:
    got = figures(np.array(sums), 50)
    used = [s / 50 for s in sums]
    assert got.utilization == pytest.approx(statistics.mean(used))
    assert got.waste_ratio == pytest.approx(1 - got.utilization)
    assert got.bin_balance == pytest.approx(1 - statistics.stdev(used) / statistics.mean(used))
    assert got.theoretical_min_packs == -(-sum(sums) // 50) <= len(sums)
    assert got.packing_efficiency == pytest.approx(got.theoretical_min_packs / len(sums))
    moments = from_moments(len(sums), sum(sums), sum(s * s for s in sums), 50)
    assert moments.bin_balance == pytest.approx(got.bin_balance)
    assert (moments.utilization, moments.packing_efficiency) == (got.utilization, got.packing_efficiency)


@given(st.dictionaries(st.sampled_from([8, 32, 50]), st.lists(st.integers(0, 8), min_size=2, max_size=9), min_size=1))
def test_packs_of_several_budgets_are_measured_by_how_full_each_is(sums: dict[int, list[int]]) -> None:
    got = of_budgets({budget: (len(each), sum(each), sum(s * s for s in each)) for budget, each in sums.items()})
    used = [tokens / budget for budget, each in sums.items() for tokens in each]
    assert got.packs == len(used)
    assert got.utilization == pytest.approx(sum(map(sum, sums.values())) / sum(b * len(e) for b, e in sums.items()))
    if any(used):
        assert got.bin_balance == pytest.approx(1 - statistics.stdev(used) / statistics.mean(used), abs=1e-6)
    assert got.theoretical_min_packs == sum(-(-sum(each) // budget) for budget, each in sums.items())
    assert of_budgets({}) == Figures()


@pytest.mark.parametrize(("sums", "budget"), [([9], 8), ([-1], 8), ([1], 0)])
def test_sums_that_cannot_be_are_refused(sums: list[int], budget: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        figures(np.array(sums), budget)


@given(
    st.integers(0, 999),
    st.sampled_from([None, 4, 16]),
    st.lists(st.tuples(st.sampled_from(["read", "back", "kill"]), st.integers(0, 9)), max_size=8),
)
def test_a_sample_that_is_left_over_counts_once_however_often_its_step_is_formed_again(
    seed: int, pass_samples: int | None, story: list[tuple[str, int]]
) -> None:
    """Also of passes that are shorter than a step: several tails lie before one step then."""
    data: Data = {"web": [[7, 3, 12, 9, 5, 16, 2, 8] * 10]}
    passes = 80 // (pass_samples or 80)
    rules = Rules(
        budget=32, packs=3, window=4, seed=3, tail="drop", between_passes="continue" if passes == 1 else "drain",
        streams=(StreamRules("web", 1.0, 1, passes=passes),),
    )  # fmt: skip
    live, killed = Live(rules, data, seed, pass_samples=pass_samples), False
    for what, n in story:
        if what == "read":
            live.read(live.had + n)
        elif what == "back":
            live.go_back(max(live.had - n, 0))
        else:
            live.start_broker()
            killed = True
    live.finish()
    records = [record for record in live.records() if isinstance(record, TailDropped)]
    left = sum(len(record.rows) for record in records) // ROW.itemsize
    in_steps = sum(record.num_samples for record in live.records() if isinstance(record, StepFormed))
    assert left
    assert left + in_steps == 80
    counted = live.feed.figures.totals.dropped_samples
    assert counted <= left if killed else counted == left
