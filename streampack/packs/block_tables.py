"""Block tables: which blocks of keys each block of queries sees, computed from boundaries, without evaluating a mask.

FlexAttention computes blocks of B queries by B keys. It skips blocks in which no query sees a key, and evaluates the
mask in *partial* blocks, where some query does not see some key. In *full* blocks, each query sees each key.

A token sees the tokens of its own segment up to itself. Take a run of queries that are adjacent in one segment. The
keys that any of them sees are one interval, from the segment's first token to the last query. The keys that all of them
see are a shorter interval, up to the first query. Counting the intervals that cover a block of keys gives the tables.

In a prefix tree, a token also sees the segments above its own. Each of them is one more interval, which all queries of
the run see to its end. Intervals that touch are joined: a block of keys that two of them cover together is full.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streampack.core.layout.boundaries import round_up
from streampack.core.model.samples import I32, I64
from streampack.core.trees.prefix_tree import descendant_ends

ALIGN = 16
"""Each table begins at a multiple of this many elements. Compiled kernels need aligned inputs, or copy them."""


class BlockTables(NamedTuple):
    """Where the arrays of a block mask lie in one int32 array: name -> (begin, shape).

    T' is the number of queries that this rank holds, T the number of keys, nQ and nK the numbers of their blocks. The
    first ``num_blocks`` entries of each row of indices count. The others are the remaining blocks, so that the shape
    depends on T', T and B alone.

    Example:
        >>> BlockTables.of(num_queries=256, num_keys=256, block_size=128).places["kv_indices"]
        (272, (2, 2))
    """

    places: dict[str, tuple[int, tuple[int, ...]]]
    """Array name -> first element and shape:

    - ``documents`` [T]: the segment of each key.
    - ``ends`` [T]: one past the last segment that is below the segment of each key; only for trees.
    - ``queries`` [T']: the place in the pack of each query.
    - ``kv_num_blocks`` [nQ], ``kv_indices`` [nQ, nK]: partial blocks of keys for each block of queries.
    - ``full_kv_num_blocks``, ``full_kv_indices``: full blocks, in the same shapes.
    - ``q_num_blocks`` [nK], ``q_indices`` [nK, nQ], ``full_q_num_blocks``, ``full_q_indices``: the same by keys."""
    size: int
    """Number of elements of the array."""

    @classmethod
    def of(cls, num_queries: int, num_keys: int, block_size: int, trees: bool = False) -> BlockTables:
        """Return the layout for packs of a length; ``trees``: the packs may hold prefix trees."""
        num_q, num_k = -(-num_queries // block_size), -(-num_keys // block_size)
        shapes: dict[str, tuple[int, ...]] = {"documents": (num_keys,), "queries": (num_queries,)}
        shapes |= {"ends": (num_keys,)} if trees else {}
        for side, shape in (("kv", (num_q, num_k)), ("q", (num_k, num_q))):
            for name in (side, f"full_{side}"):
                shapes[f"{name}_num_blocks"], shapes[f"{name}_indices"] = shape[:1], shape
        places: dict[str, tuple[int, tuple[int, ...]]] = {}
        end = 0
        for name, size in shapes.items():
            places[name] = (end, size)
            end = round_up(end + math.prod(size), ALIGN)
        return cls(places, end)

    def cut(self, values: Any) -> dict[str, Any]:
        """Return the arrays by name, as views of ``values``, an array or tensor of ``size`` elements."""
        return {
            name: values[begin : begin + math.prod(shape)].reshape(shape)
            for name, (begin, shape) in self.places.items()
        }


def fill_block_tables(tables: I32, bounds: I32, queries: I64, block_size: int, parents: I32 | None = None) -> None:
    """Fill the arrays of a block mask: causal attention within each segment of a pack, and to the segments above it.

    Args:
        tables: int32 [BlockTables.size], the array to fill.
        bounds: int32 [segments + 1], padded boundaries of the whole pack, from 0 to T.
        queries: int64 [T'], place in the pack of each token that this rank holds.
        block_size: Number of queries, and of keys, in a block.
        parents: int32 [segments], the segment above each segment, or -1, numbered depth first; None for a pack without
            trees.
    """
    num_rows, num_keys = len(queries), int(bounds[-1])
    layout = BlockTables.of(num_rows, num_keys, block_size, trees=parents is not None)
    num_q, num_k = -(-num_rows // block_size), -(-num_keys // block_size)
    documents = np.repeat(np.arange(len(bounds) - 1, dtype=np.int32), np.diff(bounds))
    begin = _runs(queries, documents, block_size)
    count = np.diff(begin, append=num_rows)
    block, first, segments = begin // block_size, queries[begin], documents[queries[begin]]
    by_any = np.zeros((num_q, num_k + 1), np.int64)
    by_all = np.zeros_like(by_any)
    last = first + count
    for low, until, until_all in _intervals(bounds, segments, first, last, parents):
        rows = low < until  # runs that have such an interval
        _cover(by_any, block[rows], low[rows] // block_size, (until[rows] - 1) // block_size + 1, 1)
        _cover(by_all, block[rows], -(-low[rows] // block_size), until_all[rows] // block_size, count[rows])
    by_any, by_all = (np.cumsum(table, axis=1)[:, :num_k] for table in (by_any, by_all))
    full = by_all == block_size  # a short last block is partial, as for create_block_mask
    partial = (by_any > 0) & ~full
    by_name: dict[str, NDArray[Any]] = {"documents": documents, "queries": queries}
    if parents is not None:
        by_name["ends"] = descendant_ends(parents)[documents]
    for side, (some, every) in (("kv", (partial, full)), ("q", (partial.T, full.T))):
        for name, marked in ((side, some), (f"full_{side}", every)):
            by_name[f"{name}_num_blocks"] = marked.sum(axis=1)
            by_name[f"{name}_indices"] = np.argsort(~marked, axis=1, kind="stable")
    for name, array in layout.cut(tables).items():
        array[...] = by_name[name]


def _runs(queries: I64, documents: I32, block_size: int) -> I64:
    """Return the first row of each run of queries: adjacent in one segment and in one block."""
    rows = np.arange(1, len(queries))
    segments = documents[queries]
    breaks = (np.diff(queries) != 1) | (np.diff(segments) != 0) | (rows % block_size == 0)
    return np.concatenate([np.zeros(min(1, len(queries)), np.int64), rows[breaks]])


def _intervals(
    bounds: I32, segments: I32, first: I64, last: I64, parents: I32 | None
) -> Iterator[tuple[I64, I64, I64]]:
    """Yield intervals of keys for all runs at once: begin, end for some query, and end for all queries of the run.

    The first one is that of the run's own segment, with the segments above it as far as they touch. Each later one is
    of segments further up. A run that has no more intervals gets empty ones.
    """
    low, until, until_all = bounds[segments].astype(np.int64), last, first + 1
    if parents is not None and len(segments):
        above = parents[segments]
        while (above >= 0).any():
            begin, end = bounds[above].astype(np.int64), bounds[above + 1].astype(np.int64)
            has = above >= 0
            touch = has & (end == low)
            apart = has & ~touch
            if apart.any():
                yield np.where(apart, low, 0), np.where(apart, until, 0), np.where(apart, until_all, 0)
            low, until = np.where(has, begin, low), np.where(apart, end, until)
            until_all = np.where(apart, end, until_all)
            above = np.where(has, parents[above], -1)
    yield low, until, until_all


def _cover(changes: I64, block: I64, begin: I64, end: I64, weight: int | I64) -> None:
    """Add intervals of blocks of keys to ``changes``, int64 [nQ, nK + 1]: 1 where they begin, -1 where they end.

    Interval i covers blocks [begin, end) of keys for the block of queries ``block[i]``, with a weight. Empty intervals
    cover nothing.
    """
    some = begin < end
    weight = weight[some] if isinstance(weight, np.ndarray) else weight
    np.add.at(changes, (block[some], begin[some]), weight)
    np.subtract.at(changes, (block[some], end[some]), weight)
