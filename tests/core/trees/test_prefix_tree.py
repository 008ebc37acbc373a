"""Prefix trees: each row is a path, and each shared beginning is held once."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given

from streampack.core.trees.prefix_tree import PrefixTree, build_tree
from tests.core.trees.prefix_groups import common, groups


def places_of(tree: PrefixTree, row: int) -> np.ndarray:
    """Where the tokens of a row are among the tree's tokens."""
    begins = np.cumsum(tree.lengths) - tree.lengths
    spans = [np.arange(begins[s], begins[s] + tree.lengths[s]) for s in tree.path(row)]
    return np.concatenate(spans) if spans else np.zeros(0, np.int64)


def tokens_of(tree: PrefixTree, rows: list[np.ndarray]) -> np.ndarray:
    """The tokens of all segments."""
    segments = zip(tree.owners.tolist(), tree.starts.tolist(), tree.lengths.tolist(), strict=True)
    return np.concatenate([np.zeros(0, np.int32), *(rows[row][at : at + size] for row, at, size in segments)])


def trie(rows: list[np.ndarray]) -> set[tuple[int, ...]]:
    """All beginnings of all rows: the nodes of the trie that is not compressed."""
    return {tuple(row[: i + 1].tolist()) for row in rows for i in range(len(row))}


@given(groups())
def test_each_row_is_a_path_and_no_token_is_held_twice(rows: list[np.ndarray]) -> None:
    tree = build_tree(rows)
    tokens = tokens_of(tree, rows)
    assert tree.lengths.sum() == len(tokens) == len(trie(rows))
    for number, row in enumerate(rows):
        places = places_of(tree, number)
        assert tokens[places].tolist() == row.tolist()
        path = tree.path(number)
        starts = tree.starts[path].tolist()
        assert starts == [0, *np.cumsum(tree.lengths[path]).tolist()][: len(path)]
    for (a, one), (b, other) in combinations(enumerate(rows), 2):
        shared = len(set(places_of(tree, a).tolist()) & set(places_of(tree, b).tolist()))
        assert shared == common(one, other)


@given(groups())
def test_segments_are_numbered_depth_first_and_are_longest_runs(rows: list[np.ndarray]) -> None:
    tree = build_tree(rows)
    ends = tree.ends.tolist()
    for segment, parent in enumerate(tree.parents.tolist()):
        assert parent < segment
        below = [other for other in range(len(ends)) if parent_chain(tree, other, segment)]
        assert below == list(range(segment + 1, ends[segment]))
        children = [other for other, up in enumerate(tree.parents.tolist()) if up == segment]
        assert len(children) != 1 or segment in tree.leaves.tolist(), "a run ends where rows part or where a row ends"
        owners = tree.owners[children].tolist()
        assert owners == sorted(owners)


def parent_chain(tree: PrefixTree, segment: int, above: int) -> bool:
    """Return True if the segment ``above`` is on the path to ``segment``."""
    while (segment := int(tree.parents[segment])) >= 0:
        if segment == above:
            return True
    return False


@given(groups())
def test_tokens_with_several_values_are_equal_if_all_values_are(rows: list[np.ndarray]) -> None:
    wide = [np.stack([row, np.arange(len(row), dtype=np.int32)], 1) for row in rows]
    same, tree = build_tree(wide), build_tree(rows)
    assert same.lengths.tolist() == tree.lengths.tolist()
    apart = build_tree([np.stack([row, np.full_like(row, number)], 1) for number, row in enumerate(rows)])
    assert apart.lengths.sum() == sum(map(len, rows)), "rows that differ in the second value share nothing"
