"""Shared prefixes: the order of a group, the runs that fit a pack, and its paths and segments, beside the rows."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.trees.shared_prefixes import (
    check_shared,
    cut_trees,
    fit_trees,
    path_index,
    prefix_order,
    segments_of,
)
from tests.core.trees.prefix_groups import common, groups


def in_order(rows: list[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """Rows that are not empty in depth-first order, and the tokens that each shares with the row before it."""
    rows = [row for row in rows if len(row)]
    order, shared = prefix_order(rows)
    return [rows[i] for i in order], shared


@given(groups())
def test_rows_share_with_the_row_before_them_what_they_have_in_common(rows: list[np.ndarray]) -> None:
    order, shared = prefix_order(rows)
    assert sorted(order) == list(range(len(rows)))
    ordered = [rows[i] for i in order]
    lengths = np.array([len(row) for row in ordered])
    check_shared(shared, lengths, np.zeros(1, np.int64))
    for (one, other), count in zip(pairwise(ordered), shared[1:].tolist(), strict=True):
        assert count == max(min(common(one, other), len(other) - 1), 0)
    for place, row in enumerate(ordered):  # no row further up shares more than those between
        for far in range(place):
            assert common(ordered[far], row) <= min(common(a, b) for a, b in pairwise(ordered[far : place + 1]))


@given(groups(), st.integers(1, 30), st.integers(1, 6))
def test_runs_of_a_tree_fit_a_pack_and_are_filled_greedily(rows: list[np.ndarray], limit: int, most: int) -> None:
    order, shared = prefix_order(rows)
    lengths = np.array([len(rows[i]) for i in order])
    kept = np.where(lengths > limit, 0, lengths)  # as `overlong: drop` leaves them
    places = np.arange(len(rows))
    found = fit_trees(places, kept, places * 0, shared, limit, most)
    runs: list[list[int]] = []
    last = -1
    for at in places[kept > 0].tolist():
        if found.shared[at]:
            assert found.joined[last], "a piece that shares tokens is joined to the kept piece before it"
            assert found.shared[at] == min(common(rows[order[last]], rows[order[at]]), kept[at] - 1)
            runs[-1].append(at)
        else:
            assert last < 0 or not found.joined[last]
            runs.append([at])
        last = at
    sizes = [int(kept[run].sum() - found.shared[run].sum()) for run in runs]
    assert all(size <= limit and len(run) <= most for size, run in zip(sizes, runs, strict=True))
    for run, size, after in zip(runs, sizes, runs[1:], strict=False):
        share = common(rows[order[run[-1]]], rows[order[after[0]]])
        own = kept[after[0]] - min(share, kept[after[0]] - 1)
        assert share == 0 or kept[after[0]] == 1 or size + own > limit or len(run) == most


@given(groups(), st.integers(1, 60), st.integers(1, 9))
def test_trees_are_cut_where_packs_are_filled_better(rows: list[np.ndarray], budget: int, most: int) -> None:
    order, shared = prefix_order(rows)
    lengths = np.array([min(len(rows[i]), budget) for i in order])
    places = np.arange(len(rows))

    def sizes_of(limit: int | None) -> list[int]:
        """Tokens of each run."""
        pieces = places, lengths, places * 0, shared
        found = cut_trees(*pieces, budget, most) if limit is None else fit_trees(*pieces, limit, most)
        runs = list[int]()
        for at in places[lengths > 0].tolist():
            if not found.shared[at]:
                runs.append(0)
            runs[-1] += int(lengths[at] - found.shared[at])
        return runs

    def taken(sizes: list[int]) -> float:
        return sum(budget / (budget // size) for size in sizes)

    sizes = sizes_of(None)
    assert all(size <= budget for size in sizes)
    expected = min(taken(sizes_of(max(budget // k, 1))) for k in range(1, 9) if budget // k)
    assert abs(taken(sizes) - expected) < 1e-3


def test_pieces_of_a_split_sample_share_nothing() -> None:
    source, part = np.array([0, 1, 1, 2]), np.array([0, 0, 1, 0])
    found = fit_trees(source, np.array([4, 6, 2, 6]), part, np.array([0, 4, 6]), 8, None)
    assert found.shared.tolist() == [0, 0, 0, 0]
    assert not found.joined.any()


@given(groups(), st.integers(0, 5))
def test_paths_lead_to_the_tokens_of_their_rows(rows: list[np.ndarray], tail: int) -> None:
    ordered, shared = in_order(rows)
    lengths = np.array([len(row) for row in ordered], np.int64)
    own = lengths - shared
    starts = np.cumsum(own) - own
    packed = np.concatenate([row[count:] for row, count in zip(ordered, shared, strict=True)] or [np.zeros(0)])
    paths = path_index(shared, lengths, starts)
    assert packed[paths].tolist() == [token for row in ordered for token in row]
    seen = [set(one.tolist()) for one in np.split(paths, np.cumsum(lengths)[:-1])] if len(rows) else []
    total = int(own.sum()) + tail
    bounds, parents = segments_of(shared, lengths, starts, paths, total)
    assert bounds[[0, -1]].tolist() == [0, total]
    assert (np.diff(bounds) > 0).all()
    of_token = np.repeat(np.arange(len(parents)), np.diff(bounds))
    for query in range(total):
        if query >= int(own.sum()):
            expected = set(range(int(own.sum()), query + 1))
        else:  # all paths through a token agree on what comes before it
            expected = next({k for k in path if k <= query} for path in seen if query in path)
        above, segment = set[int](), int(of_token[query])
        while segment >= 0:
            above.add(segment)
            assert parents[segment] < segment
            segment = int(parents[segment])
        assert {k for k in range(query + 1) if int(of_token[k]) in above} == expected


@pytest.mark.parametrize(
    ("shared", "lengths", "firsts"),
    [
        ([1, 0], [2, 2], [0]),
        ([0, 3], [2, 4], [0]),
        ([0, 2], [3, 2], [0]),
        ([0, 1], [3, 3], [0, 1]),
        ([0, -1], [3, 3], [0]),
    ],
)
def test_a_column_that_makes_no_tree_is_rejected(shared: list[int], lengths: list[int], firsts: list[int]) -> None:
    with pytest.raises(ValueError, match="expected at most"):
        check_shared(np.array(shared), np.array(lengths), np.array(firsts))
