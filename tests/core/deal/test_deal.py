"""DEAL: every pack once, dear with dear, and no rank left with all the dear ones."""

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.deal.deal import BALANCES, ORDERS, arrange, deal, num_packs, split_dearest
from streampack.core.model.samples import I64

balances = st.sampled_from(BALANCES)


@st.composite
def steps(draw: st.DrawFn) -> tuple[I64, int]:
    """Costs of a step's packs and a dp that divides them."""
    dp = draw(st.integers(1, 8))
    micro_batches = draw(st.integers(1, 8))
    costs = draw(st.lists(st.integers(0, 2**40), min_size=dp * micro_batches, max_size=dp * micro_batches))
    return np.array(costs, np.int64), dp


@given(steps(), balances)
def test_every_pack_is_dealt_once(step: tuple[I64, int], balance: str) -> None:
    costs, dp = step
    dealt = deal(costs, dp, balance)
    assert dealt.dtype == np.int64
    assert dealt.shape == (len(costs) // dp, dp)
    assert sorted(dealt.ravel().tolist()) == list(range(len(costs)))


@given(steps(), st.sampled_from(["deal", "karmarkar_karp"]))
def test_a_micro_batch_holds_packs_next_to_each_other_in_cost(step: tuple[I64, int], balance: str) -> None:
    costs, dp = step
    by_cost = sorted(range(len(costs)), key=lambda pack: (-int(costs[pack]), pack))
    for index, row in enumerate(deal(costs, dp, balance).tolist()):
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


def test_a_step_is_dealt_as_by_hand() -> None:
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
    with pytest.raises(ValueError, match=f"got dp={dp} for a step of 4 packs, expected a divisor of 4"):
        deal(np.arange(4), dp, "deal")


def test_largest_differencing_leaves_totals_more_alike_than_dealing_in_turn() -> None:
    draw = np.random.default_rng(3)
    dealt, differenced = [], []
    for _ in range(50):
        costs = draw.integers(1, 10**6, 64)
        dealt.append(float(np.ptp(costs[deal(costs, 8, "deal")].sum(axis=0))))
        differenced.append(float(np.ptp(costs[deal(costs, 8, "karmarkar_karp")].sum(axis=0))))
    assert np.mean(differenced) < 0.7 * np.mean(dealt)


@pytest.mark.parametrize("balance", BALANCES)
def test_a_large_mesh_is_dealt_in_no_time(balance: str) -> None:
    """512 ranks x 8 micro-batches: less than a millisecond, 50 ms at most on a busy machine."""
    costs = np.random.default_rng(0).integers(1, 10**12, 4096)
    began = time.process_time()
    deal(costs, 512, balance)
    assert time.process_time() - began < 0.05


@st.composite
def packed(draw: st.DrawFn) -> tuple[list[list[int]], I64]:
    """Packs of a step, and each sample's cost."""
    sizes = draw(st.lists(st.integers(1, 6), max_size=12))
    costs = draw(st.lists(st.integers(0, 50), min_size=sum(sizes), max_size=sum(sizes)))
    ends = np.cumsum([0, *sizes]).tolist()
    order = draw(st.permutations(range(sum(sizes))))
    return [list(order[a:b]) for a, b in pairwise(ends)], np.array(costs, np.int64)


@given(packed(), st.integers(0, 60))
def test_packs_are_split_before_empty_ones_come_and_no_sample_changes_its_step(
    step: tuple[list[list[int]], I64], more: int
) -> None:
    packs, costs = step
    found = split_dearest(packs, costs, len(packs) + more)
    assert len(found) == len(packs) + more
    assert sorted(i for pack in found for i in pack) == list(range(len(costs)))
    for pack in filter(None, found):
        whole = next(each for each in packs if set(pack) <= set(each))
        assert pack == [i for i in whole if i in pack], "a part of one pack, in its order: it fits the budget"
    if any(not pack for pack in found):
        assert all(len(pack) <= 1 for pack in found)
        assert found == [pack for pack in found if pack] + [[]] * sum(not pack for pack in found)


@given(packed())
def test_the_dearest_pack_is_split_first_and_evenly(step: tuple[list[list[int]], I64]) -> None:
    packs, costs = step
    several = [number for number, pack in enumerate(packs) if len(pack) > 1]
    if not several:
        return
    dearest = max(several, key=lambda number: (costs[packs[number]].sum(), -number))
    found = split_dearest(packs, costs, len(packs) + 1)
    assert [number for number, pack in enumerate(packs) if found[number] != pack] == [dearest]
    one, other = costs[found[dearest]].sum(), costs[found[-1]].sum()
    assert 0 <= one - other <= costs[packs[dearest]].max()


def test_fewer_packs_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="got 2 packs, expected at most 1"):
        split_dearest([[0], [1]], np.array([1, 1]), 1)


@given(st.integers(0, 100), st.integers(1, 8), st.integers(1, 5), st.integers(1, 9))
def test_the_number_of_packs_is_the_least_that_will_do(packs: int, dp: int, multiple: int, least: int) -> None:
    found = num_packs(packs, dp, multiple, least)
    assert found % (dp * multiple) == 0
    assert found >= max(packs, dp * least)
    assert found - dp * multiple < max(packs, dp * least)


@given(steps(), balances, st.sampled_from(ORDERS))
def test_an_order_moves_whole_micro_batches(step: tuple[I64, int], balance: str, order: str) -> None:
    costs, dp = step
    dealt = deal(costs, dp, balance)
    arranged = arrange(dealt, costs, order)
    assert sorted(arranged.tolist()) == sorted(dealt.tolist())
    dearest = costs[arranged].max(axis=1).tolist()
    if order == "largest_first":
        assert dearest == sorted(dearest, reverse=True)
    elif order == "small_at_edges":
        peak = dearest.index(max(dearest))
        assert dearest[: peak + 1] == sorted(dearest[: peak + 1])
        assert dearest[peak:] == sorted(dearest[peak:], reverse=True)
    else:
        assert arranged.min(axis=1).tolist() == sorted(dealt.min(axis=1).tolist())


def test_small_micro_batches_are_at_both_edges_as_in_roll_and_verl() -> None:
    """By workload, longest first, then [::2][::-1] + [1::2]."""
    rows = np.arange(5).reshape(-1, 1)
    assert arrange(rows, np.array([5, 9, 7, 8, 6]), "small_at_edges").ravel().tolist() == [0, 2, 1, 3, 4]
