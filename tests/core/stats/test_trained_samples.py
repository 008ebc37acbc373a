"""Sums of trained samples over recorded steps survive in facts when the records are gone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.stats.trained_samples import LAST_STEPS, TrainedSamples

STEPS = st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2**31)), max_size=5), max_size=12)
"""(stream, tokens) of each sample of each step."""


def never(step: int) -> bool:
    return False


def added(totals: TrainedSamples, steps: list[list[tuple[int, int]]], first: int = 0) -> TrainedSamples:
    for step, samples in enumerate(steps[first:], first):
        rows = np.array(samples, np.int64).reshape(-1, 2)
        totals.add(step, rows[:, 0].astype("<u4"), rows[:, 1].astype("<u4"))
    return totals


@given(STEPS, st.integers(0, 12), st.integers(0, 12))
def test_facts_and_records_from_before_them_give_the_sums_of_all_steps(
    steps: list[list[tuple[int, int]]], returned: int, kept: int
) -> None:
    """The log keeps steps from ``kept`` on: some of these may be in the facts already."""
    totals = added(TrainedSamples(), steps)
    totals.count(returned, never)
    upto, sums = totals.facts()
    again = added(TrainedSamples(), steps, min(kept, upto))
    again.recover(upto, sums)
    for each in (totals, again):
        each.count(len(steps), never)
    samples = [sample for step in steps for sample in step]
    expected = [[stream for stream, _ in samples].count(number) for number in range(4)]
    assert again.facts() == totals.facts()
    assert totals.sums[0].tolist() == expected[: totals.sums.shape[1]]
    assert totals.sums[1].sum() == sum(tokens for _, tokens in samples)


def test_steps_of_a_new_lineage_count_beside_those_that_they_replace() -> None:
    totals = added(TrainedSamples(), [[(0, 5)], [(1, 7)], [(0, 1)]])
    totals.count(2, never)
    totals.branch(1)
    added(totals, [[], [(0, 100)]], 1)
    totals.count(2, never)
    assert totals.facts() == (2, [(2, 105), (1, 7)])


def test_the_last_sums_are_those_of_the_last_recorded_steps_and_forget_a_replaced_lineage() -> None:
    totals = added(TrainedSamples(), [[(0, 900)]] + [[(1, 3), (1, 4)]] * LAST_STEPS)
    totals.count(50, never)
    assert totals.last_sums.tolist() == [[0, 2 * LAST_STEPS], [0, 7 * LAST_STEPS]]
    totals.branch(60)
    assert totals.last_sums.tolist() == [[0, 2 * 59], [0, 7 * 59]]
    totals.add(60, np.array([2]), np.array([5]))
    assert totals.last_sums.tolist() == [[0, 2 * 59, 1], [0, 7 * 59, 5]]
