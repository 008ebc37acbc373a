"""Block tables: which blocks of keys each block of queries sees, computed from boundaries, without evaluating a mask.

FlexAttention computes blocks of B queries by B keys. It skips blocks in which no query sees a key, and evaluates the
mask in *partial* blocks, where some query does not see some key. In *full* blocks, each query sees each key.

A token sees the tokens of its own segment up to itself. Take a run of queries that are adjacent in one segment. The
keys that any of them sees are one interval, from the segment's first token to the last query. The keys that all of them
see are a shorter interval, up to the first query. Counting the intervals that cover a block of keys gives the tables.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streampack.core.layout.boundaries import round_up
from streampack.core.model.samples import I32, I64

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
    - ``queries`` [T']: the place in the pack of each query.
    - ``kv_num_blocks`` [nQ], ``kv_indices`` [nQ, nK]: partial blocks of keys for each block of queries.
    - ``full_kv_num_blocks``, ``full_kv_indices``: full blocks, in the same shapes.
    - ``q_num_blocks`` [nK], ``q_indices`` [nK, nQ], ``full_q_num_blocks``, ``full_q_indices``: the same by keys."""
    size: int
    """Number of elements of the array."""

    @classmethod
    def of(cls, num_queries: int, num_keys: int, block_size: int) -> BlockTables:
        """Return the layout for packs of a length."""
        num_q, num_k = -(-num_queries // block_size), -(-num_keys // block_size)
        shapes: dict[str, tuple[int, ...]] = {"documents": (num_keys,), "queries": (num_queries,)}
        for side, shape in (("kv", (num_q, num_k)), ("q", (num_k, num_q))):
            for name in (side, f"full_{side}"):
                shapes[f"{name}_num_blocks"], shapes[f"{name}_indices"] = shape[:1], shape
        places: dict[str, tuple[int, tuple[int, ...]]] = {}
        end = 0
        for name, size in shapes.items():
            places[name] = (end, size)
            end = round_up(end + int(np.prod(size)), ALIGN)
        return cls(places, end)


def fill_block_tables(tables: I32, bounds: I32, queries: I64, block_size: int) -> None:
    """Fill the arrays of a block mask: causal attention within each segment of a pack.

    Args:
        tables: int32 [BlockTables.size], the array to fill.
        bounds: int32 [segments + 1], padded boundaries of the whole pack, from 0 to T.
        queries: int64 [T'], place in the pack of each token that this rank holds.
        block_size: Number of queries, and of keys, in a block.
    """
    num_rows, num_keys = len(queries), int(bounds[-1])
    layout = BlockTables.of(num_rows, num_keys, block_size)
    num_q, num_k = -(-num_rows // block_size), -(-num_keys // block_size)
    documents = np.repeat(np.arange(len(bounds) - 1, dtype=np.int32), np.diff(bounds))
    begin = _runs(queries, documents, block_size)
    count = np.diff(begin, append=num_rows)
    block, first, low = begin // block_size, queries[begin], bounds[documents[queries[begin]]].astype(np.int64)
    blocks = (num_q, num_k)
    by_any = _covered(blocks, block, low // block_size, (first + count - 1) // block_size + 1, np.ones_like(count))
    by_all = _covered(blocks, block, -(-low // block_size), (first + 1) // block_size, count)
    full = by_all == block_size  # a short last block is partial, as for create_block_mask
    partial = (by_any > 0) & ~full
    found: dict[str, NDArray[Any]] = {"documents": documents, "queries": queries}
    for side, (some, every) in (("kv", (partial, full)), ("q", (partial.T, full.T))):
        for name, marked in ((side, some), (f"full_{side}", every)):
            found[f"{name}_num_blocks"] = marked.sum(axis=1)
            found[f"{name}_indices"] = np.argsort(~marked, axis=1, kind="stable")
    for name, (at, shape) in layout.places.items():
        tables[at : at + int(np.prod(shape))] = found[name].reshape(-1)


def _runs(queries: I64, documents: I32, block_size: int) -> I64:
    """Return the first row of each run of queries: adjacent in one segment and in one block."""
    rows = np.arange(1, len(queries))
    segments = documents[queries]
    breaks = (np.diff(queries) != 1) | (np.diff(segments) != 0) | (rows % block_size == 0)
    return np.concatenate([np.zeros(min(1, len(queries)), np.int64), rows[breaks]])


def _covered(blocks: tuple[int, int], block: I64, begin: I64, end: I64, weight: I64) -> I64:
    """Return the sum of the weights of the intervals that cover each block of keys, int64 [nQ, nK].

    Interval i covers blocks [begin, end) of keys for the block of queries ``block[i]``. Empty intervals cover nothing.
    """
    changes = np.zeros((blocks[0], blocks[1] + 1), np.int64)
    some = begin < end
    np.add.at(changes, (block[some], begin[some]), weight[some])
    np.subtract.at(changes, (block[some], end[some]), weight[some])
    total: I64 = np.cumsum(changes, axis=1)[:, : blocks[1]]
    return total
