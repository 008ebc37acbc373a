"""``PrefixTree``: rows of tokens whose beginnings are shared, as a compressed trie.

A *segment* is a longest run of tokens that belongs to the same rows. Segments form a forest. A row is a path from a
root to a segment. If it is a prefix of another row, it ends at an inner segment. Equal rows end at the same segment.

Segments are numbered depth first: a segment comes after its parent, and its descendants follow it without a gap. So the
descendants of segment s are ``s + 1`` to ``ends[s] - 1``. Two comparisons tell whether a segment is below another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.samples import I32


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTree:
    """The segments of a group of rows, depth first; S is the number of segments, M the number of rows.

    Example:
        >>> tree = build_tree([np.array([5, 6, 7, 1]), np.array([5, 6, 7, 2, 3])])
        >>> tree.lengths.tolist(), tree.parents.tolist(), tree.leaves.tolist()
        ([3, 1, 2], [-1, 0, 0], [1, 2])
    """

    lengths: I32
    """int32 [S] tokens of each segment, at least 1."""
    parents: I32
    """int32 [S] the segment before it on the path; -1 for the first segment of a path."""
    ends: I32
    """int32 [S] one past the last descendant: the smallest later segment that is not below this one."""
    leaves: I32
    """int32 [M] the last segment of each row; -1 for an empty row."""
    owners: I32
    """int32 [S] the first row that has the segment."""
    starts: I32
    """int32 [S] tokens on the path before each segment: the position of its first token."""

    def path(self, row: int) -> list[int]:
        """Return the segments of a row, from its root."""
        path, segment = list[int](), int(self.leaves[row])
        while segment >= 0:
            path.append(segment)
            segment = int(self.parents[segment])
        return path[::-1]


@dataclass(slots=True)
class _Node:
    """A segment while the tree is built."""

    owner: int
    start: int
    length: int
    rows: list[int] = field(default_factory=list)
    """Rows that end here."""
    children: list[_Node] = field(default_factory=list)


def build_tree(rows: Sequence[NDArray[Any]]) -> PrefixTree:
    """Return the tree of some rows, in time linear in their tokens for groups of one prompt.

    Children are in the order of the first row that has them.

    Args:
        rows: For each row, the values by which tokens are equal: token ids [n], or [n, k] with k values for each token.
    """
    root = _Node(0, 0, 0)
    for number, row in enumerate(rows):
        _insert(root, rows, number, len(row))
    return _numbered(root, len(rows))


def _insert(root: _Node, rows: Sequence[NDArray[Any]], number: int, size: int) -> None:
    """Add a row: follow the segments that it shares, split the last one if it shares a part, and add the rest."""
    node, at = root, 0
    while at < size:
        child = next((c for c in node.children if _same(rows, c, number, at)), None)
        if child is None:
            child = _Node(number, at, size - at)
            node.children.append(child)
            node, at = child, size
            break
        common = _common(rows[child.owner][at : at + child.length], rows[number][at:])
        if common < child.length:
            below = _Node(child.owner, at + common, child.length - common, child.rows, child.children)
            child.length, child.rows, child.children = common, [], [below]
        node, at = child, at + common
    node.rows.append(number)


def _same(rows: Sequence[NDArray[Any]], node: _Node, number: int, at: int) -> bool:
    """Return True if a row has the first token of a segment at position ``at``."""
    return bool(np.all(rows[node.owner][at] == rows[number][at]))


def _common(one: NDArray[Any], other: NDArray[Any]) -> int:
    """Return the number of tokens that two runs have in common from their beginning."""
    size = min(len(one), len(other))
    differ = one[:size] != other[:size]
    differ = differ.any(axis=tuple(range(1, differ.ndim))) if differ.ndim > 1 else differ
    return int(differ.argmax()) if differ.any() else size


def _numbered(root: _Node, num_rows: int) -> PrefixTree:
    """Number the segments depth first."""
    lengths, parents, owners, starts = list[int](), list[int](), list[int](), list[int]()
    leaves = np.full(num_rows, -1, np.int32)
    pending = [(child, -1) for child in reversed(root.children)]
    while pending:
        node, parent = pending.pop()
        number = len(lengths)
        lengths.append(node.length)
        parents.append(parent)
        owners.append(node.owner)
        starts.append(node.start)
        leaves[node.rows] = number
        pending += [(child, number) for child in reversed(node.children)]
    arrays = (np.array(values, np.int32) for values in (lengths, parents, owners, starts))
    of_lengths, of_parents, of_owners, of_starts = arrays
    return PrefixTree(of_lengths, of_parents, descendant_ends(of_parents), leaves, of_owners, of_starts)


def descendant_ends(parents: I32) -> I32:
    """Return one past the last descendant of each segment, int32 [S], for segments that are numbered depth first.

    >>> descendant_ends(np.array([-1, 0, 1, 0, -1], np.int32)).tolist()
    [4, 3, 3, 4, 5]
    """
    ends = np.arange(1, len(parents) + 1, dtype=np.int32)
    for segment in range(len(parents) - 1, -1, -1):
        parent = parents[segment]
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[segment])
    return ends
