"""DEAL: every pack once, dear with dear, and no rank left with all the dear ones."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.deal import deal
from streampack.core.samples import I64

BALANCES = st.sampled_from(["none", "deal"])


@st.composite
def steps(draw: st.DrawFn) -> tuple[I64, int]:
    """Costs of a step's packs and a dp that divides them."""
    dp = draw(st.integers(1, 8))
    micro_batches = draw(st.integers(1, 8))
    costs = draw(st.lists(st.integers(0, 2**40), min_size=dp * micro_batches, max_size=dp * micro_batches))
    return np.array(costs, np.int64), dp


@given(steps(), BALANCES)
def test_every_pack_is_dealt_once(step: tuple[I64, int], balance: str) -> None:
    costs, dp = step
    dealt = deal(costs, dp, balance)
    assert dealt.dtype == np.int64
    assert dealt.shape == (len(costs) // dp, dp)
    assert sorted(dealt.ravel().tolist()) == list(range(len(costs)))


@given(steps())
def test_a_micro_batch_holds_packs_next_to_each_other_in_cost(step: tuple[I64, int]) -> None:
    costs, dp = step
    by_cost = sorted(range(len(costs)), key=lambda pack: (-int(costs[pack]), pack))
    for index, row in enumerate(deal(costs, dp, "deal").tolist()):
        assert sorted(row) == sorted(by_cost[index * dp : (index + 1) * dp]), "ties go by number"


@given(steps())
def test_the_dearest_goes_to_the_rank_with_the_least_load(step: tuple[I64, int]) -> None:
    costs, dp = step
    load = [0] * dp
    for row in deal(costs, dp, "deal").tolist():
        ranks = sorted(range(dp), key=lambda rank: (load[rank], rank))
        dealt = [(-int(costs[row[rank]]), row[rank]) for rank in ranks]
        assert dealt == sorted(dealt)
        for rank in range(dp):
            load[rank] += int(costs[row[rank]])


def test_a_step_dealt_by_hand() -> None:
    """Packs 3, 0, 5 | 1, 4, 2 by cost 9, 7, 7 | 4, 2, 1; rank 2 has the least load, then 1 (7, before 0's 9)."""
    costs = np.array([7, 4, 1, 9, 2, 7])
    assert deal(costs, 3, "deal").tolist() == [[3, 0, 5], [2, 1, 4]]
    assert deal(costs, 2, "deal").tolist() == [[3, 0], [1, 5], [4, 2]]
    assert deal(costs, 3, "none").tolist() == [[0, 1, 2], [3, 4, 5]]


def ratio(costs: I64, dealt: I64) -> float:
    """Max over mean of the ranks' cost, by micro-batch index, averaged."""
    rows = costs[dealt]
    return float((rows.max(axis=1) / rows.mean(axis=1)).mean())


def test_heavy_tails_are_balanced_better_than_in_turn() -> None:
    draw = np.random.default_rng(7)
    dealt, in_turn, totals, totals_in_turn = [], [], [], []
    for _ in range(200):
        costs = (draw.pareto(1.5, 64) * 1e6 + 1).astype(np.int64)
        rows, plain = deal(costs, 8, "deal"), deal(costs, 8, "none")
        dealt.append(ratio(costs, rows))
        in_turn.append(ratio(costs, plain))
        totals.append(costs[rows].sum(axis=0).max() / costs.sum() * 8)
        totals_in_turn.append(costs[plain].sum(axis=0).max() / costs.sum() * 8)
        assert dealt[-1] <= in_turn[-1]
    assert np.mean(dealt) < 0.6 * np.mean(in_turn)
    assert np.mean(totals) < np.mean(totals_in_turn)


@pytest.mark.parametrize("dp", [0, -1, 3, 5, 8])
def test_a_dp_that_does_not_divide_the_step_is_refused(dp: int) -> None:
    with pytest.raises(ValueError, match=f"got dp={dp} and a step of 4 packs, expected dp to divide it"):
        deal(np.arange(4), dp, "deal")
