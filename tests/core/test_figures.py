"""The figures are NeMo-RL's, to the letter."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.figures import Figures, figures, from_moments


def test_the_figures_of_a_worked_example() -> None:
    got = figures(np.array([10, 10, 4]), 10)
    assert (got.packs, got.tokens, got.theoretical_min_packs) == (3, 24, 3)
    assert got.utilisation == pytest.approx(0.8)
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
    assert (empty.bin_balance, empty.utilisation, empty.waste_ratio, empty.packing_efficiency) == (0.0, 0.0, 1.0, 0.0)


@given(st.lists(st.integers(1, 50), min_size=2, max_size=30))
def test_the_figures_follow_their_definitions(sums: list[int]) -> None:
    got = figures(np.array(sums), 50)
    used = [s / 50 for s in sums]
    assert got.utilisation == pytest.approx(statistics.mean(used))
    assert got.waste_ratio == pytest.approx(1 - got.utilisation)
    assert got.bin_balance == pytest.approx(1 - statistics.stdev(used) / statistics.mean(used))
    assert got.theoretical_min_packs == -(-sum(sums) // 50) <= len(sums)
    assert got.packing_efficiency == pytest.approx(got.theoretical_min_packs / len(sums))
    moments = from_moments(len(sums), sum(sums), sum(s * s for s in sums), 50)
    assert moments.bin_balance == pytest.approx(got.bin_balance)
    assert (moments.utilisation, moments.packing_efficiency) == (got.utilisation, got.packing_efficiency)


@pytest.mark.parametrize(("sums", "budget"), [([9], 8), ([-1], 8), ([1], 0)])
def test_sums_that_cannot_be_are_refused(sums: list[int], budget: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        figures(np.array(sums), budget)
