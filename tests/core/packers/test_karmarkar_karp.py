"""Largest differencing: every item once, sums alike, and as a packer never over the budget."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.packers.blocks.karmarkar_karp import KarmarkarKarp, difference_columns, karmarkar_karp

costs_lists = st.lists(st.integers(0, 100), max_size=40)


@given(costs_lists, st.integers(1, 10), st.booleans())
def test_every_item_is_in_one_part(costs: list[int], parts: int, equal_sizes: bool) -> None:
    found = karmarkar_karp(costs, parts, equal_sizes=equal_sizes)
    assert len(found) == parts
    assert sorted(i for part in found for i in part) == list(range(len(costs)))
    assert all(part == sorted(part) for part in found)
    sums = [sum(costs[i] for i in part) for part in found]
    assert sums == sorted(sums)
    assert max(sums) - min(sums) <= max(costs, default=0), "never worse than the largest item"
    sizes = [len(part) for part in found]
    if equal_sizes:
        assert max(sizes) - min(sizes) <= 1
    elif len(costs) >= parts:
        assert min(sizes) >= 1


def test_a_partition_is_the_one_by_hand() -> None:
    """8|7, 6|5 and 4: 4 meets 7 (11|8), then 5 and 6 (16|14). The best is 15|15: it is a heuristic."""
    assert karmarkar_karp([8, 7, 6, 5, 4], 2) == [[0, 2], [1, 3, 4]]
    assert karmarkar_karp([8, 7, 6, 5, 4, 3], 2, equal_sizes=True) in ([[0, 3, 5], [1, 2, 4]], [[0, 3, 4], [1, 2, 5]])
    assert karmarkar_karp([5], 3) == [[], [], [0]]
    assert karmarkar_karp([], 0) == []


@given(st.lists(st.integers(1, 30), min_size=2, max_size=8))
def test_two_parts_are_within_a_sixth_of_the_best(costs: list[int]) -> None:
    """7/6: Fischetti and Martello, Worst-case analysis of the differencing method, Math. Programming 37 (1987)."""
    best = min(
        max(sum(c for c, side in zip(costs, sides, strict=True) if side == part) for part in (0, 1))
        for sides in product((0, 1), repeat=len(costs))
    )
    assert 6 * max(sum(costs[i] for i in part) for part in karmarkar_karp(costs, 2)) <= 7 * best


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_rows_keep_their_numbers_and_columns_are_alike(rows: int, width: int, data: st.DataObject) -> None:
    numbers = st.lists(st.integers(0, 1000), min_size=width, max_size=width)
    table = np.array([sorted(data.draw(numbers), reverse=True) for _ in range(rows)], np.int64)
    columns = difference_columns(table)
    assert np.sort(columns, axis=1).tolist() == [list(range(width))] * rows
    placed = np.empty_like(table)
    np.put_along_axis(placed, columns, table, axis=1)
    assert np.ptp(placed.sum(axis=0)) <= np.ptp(table, axis=1).max()


@st.composite
def sets(draw: st.DrawFn) -> tuple[list[int], int]:
    budget = draw(st.integers(1, 60))
    return draw(st.lists(st.integers(1, budget), max_size=40)), budget


@given(sets(), st.booleans(), st.sampled_from([None, 1, 3]), st.data())
def test_no_pack_is_over_its_budget_or_cap(
    asked: tuple[list[int], int], equal_sizes: bool, cap: int | None, data: st.DataObject
) -> None:
    lengths, budget = asked
    sizes = data.draw(st.lists(st.integers(1, cap or 3), min_size=len(lengths), max_size=len(lengths)))
    packs = KarmarkarKarp(equal_sizes=equal_sizes, max_samples_per_pack=cap).pack(lengths, budget, sizes)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in pack) <= budget for pack in packs)
    assert cap is None or all(sum(sizes[i] for i in pack) <= cap for pack in packs)


def test_rolls_pack_over_budget_is_not_repeated() -> None:
    """8 samples of 7 tokens, at most 8 in a pack: ROLL's count is ceil(56 / 8) = 7, and one of its packs has 14."""
    assert KarmarkarKarp().pack([7] * 8, 8, [1] * 8) == [[7], [6], [5], [4], [3], [2], [1], [0]]


def test_long_samples_are_weighed_by_their_squares() -> None:
    lengths = [8, 4, 4, 4, 4]
    by_squares = KarmarkarKarp(a=0, b=1).pack(lengths, 16, [1] * 5)
    assert sorted(map(sorted, by_squares)) == [[0], [1, 2, 3, 4]]


@pytest.mark.parametrize("wrong", [{"a": -1}, {"b": -1}, {"a": 0, "b": 0}])
def test_costs_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"got a=.* and b=.*, expected at least 0"):
        KarmarkarKarp(**wrong)  # type: ignore[arg-type]
