"""Shared prefixes: a prefix tree as one number for each sample, the tokens that it shares with the sample before it.

The samples of a group are put in depth-first order (``prefix_order``). Then no two samples share more tokens than those
between them do. So the number of shared tokens of each sample with the one before it (``shared``) describes the whole
tree. A sample adds only its *own* tokens to a pack: its length without the shared ones. Each sample has at least one
token of its own, so a sample that is equal to the one before it repeats the last token.

    rows:    [P P P A A]  [P P P B]  [Q]
    shared:  0            3          0
    packed:  [P P P A A B Q]            positions 0 1 2 3 4 3 0

Tokens that follow each other in a pack and are on the same paths are a *segment*. Token q sees token k if k is on the
path of q, at or before q. These are the tokens of q's segment and of the segments above it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.samples import I32, I64, PACK, SampleTable
from streampack.core.trees.prefix_tree import build_tree


def prefix_order(rows: Sequence[NDArray[Any]]) -> tuple[list[int], I64]:
    """Return the rows of a group in depth-first order, and the tokens that each shares with the row before it.

    Empty rows come first. Rows that begin alike keep the order in which they were given. But a row comes before the
    rows of which it is a beginning.

    Args:
        rows: For each row, the values by which tokens are equal, [n] or [n, k]: see ``build_tree``.

    Returns:
        Numbers of the rows, and int64 [rows] shared tokens, at most each row's length - 1.

    Example:
        >>> order, shared = prefix_order([np.array([1, 2, 3]), np.array([4]), np.array([1, 2, 5, 6])])
        >>> order, shared.tolist()
        ([0, 2, 1], [0, 2, 0])
    """
    tree = build_tree(rows)
    order: list[int] = np.argsort(tree.leaves, kind="stable").tolist()
    shared, before = np.zeros(len(rows), np.int64), list[int]()
    for place, row in enumerate(order):
        path = tree.path(row)
        common = [one for one, other in zip(path, before, strict=False) if one == other]
        shared[place] = max(min(int(tree.lengths[common].sum()), len(rows[row]) - 1), 0)
        before = path
    return order, shared


def check_shared(shared: I64, lengths: I64, firsts: I64) -> None:
    """Raise ValueError unless shared tokens make trees.

    Args:
        shared: int64 [n], tokens that each sample shares with the sample before it.
        lengths: int64 [n], tokens of each sample.
        firsts: int64 [k], samples before which nothing can be shared, such as the first of each pack.
    """
    most = np.minimum(np.concatenate([[0], lengths[:-1]]), np.maximum(lengths - 1, 0)) if len(lengths) else lengths
    most[firsts] = 0
    wrong = (shared < 0) | (shared > most)
    if wrong.any():
        at = int(wrong.argmax())
        raise ValueError(
            f"got a sample of {int(lengths[at])} tokens that shares {int(shared[at])} of them with the sample before "
            f"it, expected at most {int(most[at])}"
        )


class SharedPieces(NamedTuple):
    """The tokens that pieces of samples share in the trees that fit a pack, and the pieces that end such a tree.

    Attributes:
        shared: int64 [n], tokens that each piece shares with the kept piece before it.
        joined: bool [n], True if the next kept piece shares tokens with this one.
    """

    shared: I64
    joined: NDArray[np.bool_]

    def after(self, first: int) -> SharedPieces:
        """Return the pieces from the ``first`` one on."""
        return SharedPieces(self.shared[first:], self.joined[first:])

    def own(self, lengths: I64) -> I64:
        """Return the tokens that each piece adds to its pack, int64 [n]; ``lengths`` int64 [n] are its tokens."""
        return lengths - self.shared

    def enter(self, table: SampleTable, handles: I64, kept: NDArray[np.bool_]) -> dict[str, I64]:
        """Mark in ``table`` which pieces stay together, and return the columns of ``EXTRAS`` that trees set.

        Args:
            table: The table of samples.
            handles: int64 [k], the handles of the kept pieces.
            kept: bool [n], the pieces that are kept.
        """
        table.keep[handles[self.joined[kept]]] = PACK
        return {"shared": self.shared[kept]}


def fit_trees(source: I64, length: I64, part: I64, shared: I64, limit: int | None, most: int | None) -> SharedPieces:
    """Cut the tree of a chunk into runs of pieces whose trees fit a pack.

    Pieces are taken in order, and a run ends where the next piece would not fit. The shared tokens repeat in each run.
    Pieces of a sample that was split share nothing.

    Args:
        source: int64 [n], position in the chunk of each piece's sample.
        length: int64 [n], tokens of each piece; 0 for a dropped sample.
        part: int64 [n], number of each piece in its sample.
        shared: int64 [samples], tokens that each sample of the chunk shares with the sample before it.
        limit: The most tokens of a tree; None for no limit.
        most: The most samples of a tree; None for no limit.

    Example:
        >>> one = np.arange(3)
        >>> fit_trees(one, np.array([4, 4, 4]), one * 0, np.array([0, 3, 3]), 5, None).shared.tolist()
        [0, 3, 0]
    """
    depths, joined = np.zeros(len(source), np.int64), np.zeros(len(source), np.bool_)
    reach = tokens = count = 0  # leading tokens that the sample has in common with the last kept one; the run so far
    before, sample = -1, -1
    split = np.append(part[1:], 0) > 0  # a piece that another piece of its sample follows
    for i, (piece_sample, size, number, cut) in enumerate(
        zip(source.tolist(), length.tolist(), part.tolist(), split.tolist(), strict=True)
    ):
        while sample < piece_sample:
            sample += 1
            reach = min(reach, int(shared[sample]))
        if size == 0:
            continue
        own = 0 if number or cut else min(reach, size - 1)
        fits = (limit is None or tokens + size - own <= limit) and (most is None or count < most)
        if own and fits:
            depths[i], joined[before] = own, True
            tokens, count = tokens + size - own, count + 1
        else:
            tokens, count = size, 1
        reach = 0 if number or cut else size
        before = i
    return SharedPieces(depths, joined)


MOST_CUTS = 8
"""``cut_trees`` tries runs of up to the budget, a half of it, and so on, to this fraction."""


def cut_trees(source: I64, length: I64, part: I64, shared: I64, budget: int, most: int | None) -> SharedPieces:
    """Cut the tree of a chunk into runs of pieces that fill packs well; arguments as for ``fit_trees``.

    Two trees of 0.6 budgets do not fit one pack, so long runs leave packs half empty. Short runs repeat the shared
    tokens. Runs of up to ``budget / k`` tokens are tried, for k from 1 on. The k with the fewest tokens of packs wins.
    A run of s tokens counts ``budget / floor(budget / s)``: its share of a pack with other runs of its size.

    Example:
        >>> shared = np.array([0, 2, 2, 2])
        >>> one = np.arange(4)
        >>> cut_trees(one, np.array([5, 5, 5, 5]), one * 0, shared, 18, None).shared.tolist()
        [0, 2, 2, 2]
        >>> cut_trees(one, np.array([5, 5, 5, 5]), one * 0, shared, 24, None).shared.tolist()
        [0, 2, 0, 2]
    """
    best = fit_trees(source, length, part, shared, budget, most)
    least = _tokens_of_packs(best, length, budget)
    for k in range(2, MOST_CUTS + 1):
        other = fit_trees(source, length, part, shared, budget // k, most)
        if (tokens := _tokens_of_packs(other, length, budget)) < least:
            best, least = other, tokens
    return best


def _tokens_of_packs(pieces: SharedPieces, length: I64, budget: int) -> int:
    """Return an estimate of the tokens of packs that the runs of ``pieces`` take, times 2**20; see ``cut_trees``.

    ``length``: int64 [n], tokens of each piece; 0 for a dropped sample.
    """
    kept = length > 0
    own, ends = (length - pieces.shared)[kept], np.flatnonzero(~pieces.joined[kept])
    sizes = np.diff(np.append(0, np.cumsum(own)[ends]))
    if not len(sizes):
        return 0
    runs_in_pack = np.maximum(budget // np.maximum(sizes, 1), 1)
    tokens: int = ((budget << 20) // runs_in_pack).sum().item()
    return tokens


def path_index(shared: I64, lengths: I64, starts: I64) -> I64:
    """Return where the tokens of each sample are in their pack, int64 [sum of lengths], one sample after another.

    Args:
        shared: int64 [n], tokens that each sample shares with the sample before it.
        lengths: int64 [n], tokens of each sample.
        starts: int64 [n], where the own tokens of each sample begin in the pack.

    Example:
        >>> path_index(np.array([0, 3]), np.array([5, 4]), np.array([0, 5])).tolist()
        [0, 1, 2, 3, 4, 0, 1, 2, 5]
    """
    ends = np.cumsum(lengths)
    begins = ends - lengths
    places: I64 = np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(starts - shared - begins, lengths)
    for i in np.flatnonzero(shared).tolist():  # the samples before are complete by then
        at, above, size = int(begins[i]), int(begins[i - 1]), int(shared[i])
        places[at : at + size] = places[above : above + size]
    return places


class Segments(NamedTuple):
    """The segments of a pack with trees, in the order of its tokens.

    Attributes:
        bounds: int32 [segments + 1], where segments begin in the pack, and T.
        parents: int32 [segments], the segment above each segment; -1 for none.
    """

    bounds: I32
    parents: I32


def segments_of(shared: I64, lengths: I64, starts: I64, paths: I64, num_tokens: int) -> Segments:
    """Return the segments of a pack; padding at its end is a segment of its own.

    Args:
        shared: int64 [n], tokens that each sample shares with the sample before it.
        lengths: int64 [n], tokens of each sample.
        starts: int64 [n], where the own tokens of each sample begin in the pack.
        paths: int64, the result of ``path_index``.
        num_tokens: Tokens of the pack (T).

    Example:
        >>> shared, lengths, starts = np.array([0, 3]), np.array([5, 4]), np.array([0, 5])
        >>> segments = segments_of(shared, lengths, starts, path_index(shared, lengths, starts), 8)
        >>> segments.bounds.tolist(), segments.parents.tolist()
        ([0, 3, 5, 6, 8], [-1, 0, 0, -1])
    """
    forks = np.flatnonzero(shared)
    above = paths[(np.cumsum(lengths) - lengths)[forks] + shared[forks] - 1]  # the last shared token of each fork
    end = int(starts[-1] + lengths[-1] - shared[-1]) if len(starts) else 0
    bounds = np.unique(np.concatenate([[0], starts, above + 1, [end, num_tokens]]).astype(np.int32))
    parents = np.arange(-1, len(bounds) - 2, dtype=np.int32)  # a segment continues the one before it ...
    number = np.searchsorted(bounds, starts)
    parents[number] = -1  # ... but the own tokens of a sample follow the last token that it shares
    parents[number[forks]] = np.searchsorted(bounds, above, "right") - 1
    if end < num_tokens:
        parents[np.searchsorted(bounds, end)] = -1
    return Segments(bounds, parents)
