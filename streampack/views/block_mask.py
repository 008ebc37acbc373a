"""The ``BlockMask`` of a pack for FlexAttention, on tables that are computed with the pack."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from streampack.packs.block_tables import BlockTables, fill_block_tables
from streampack.packs.pack import Pack
from streampack.packs.slabs import Slabs
from streampack.packs.trees.pack_paths import has_paths, pack_segments

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK_SIZE = 128
"""Queries, and keys, in a block: what FlexAttention's kernels use unless told otherwise."""


def table_tensor(pack: Pack, block_size: int, slabs: Slabs) -> torch.Tensor:
    """Return all arrays of a pack's block mask in one int32 tensor, whose memory is one of ``slabs``."""
    trees = has_paths(pack)
    size = BlockTables.of(len(pack.padding_mask), int(pack.cu_seqlens_padded[-1]), block_size, trees).size
    tables = np.frombuffer(slabs.take(4 * size), np.int32)
    bounds, parents = pack_segments(pack) if trees else (pack.cu_seqlens_padded, None)
    fill_block_tables(tables, bounds, pack.positions(), block_size, parents)
    return torch.from_numpy(tables)


def mask_of_tables(tables: torch.Tensor, pack: Pack, block_size: int) -> BlockMask:
    """Return the ``BlockMask`` whose arrays are views of ``tables``, on their device."""
    from torch.nn.attention.flex_attention import BlockMask  # takes a second

    num_queries, num_keys = len(pack.padding_mask), int(pack.cu_seqlens_padded[-1])
    arrays = BlockTables.of(num_queries, num_keys, block_size, has_paths(pack)).cut(tables)
    documents, queries, ends = arrays.pop("documents"), arrays.pop("queries"), arrays.pop("ends", None)
    sees = mask_mod(documents, None if num_queries == num_keys else queries, ends)
    blocks = {name: array[None, None] for name, array in arrays.items()}
    return BlockMask((num_queries, num_keys), BLOCK_SIZE=(block_size, block_size), mask_mod=sees, **blocks)


def mask_mod(
    documents: torch.Tensor, queries: torch.Tensor | None, ends: torch.Tensor | None = None
) -> Callable[..., torch.Tensor]:
    """Return the mask of a pack as a ``mask_mod``.

    Args:
        documents: int [T], the segment of each token of the pack.
        queries: int [T'], the place in the pack of each token that this rank holds; None for a rank that holds the
            whole pack.
        ends: int [T], one past the last segment that is below the segment of each token; None for a pack without trees.
            Segments are numbered depth first.
    """
    if ends is not None:
        return _of_trees(documents, ends)

    def sees_on_shard(_b: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        assert queries is not None
        place = queries[q]
        return (documents[place] == documents[kv]) & (place >= kv)

    def sees(_b: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return (documents[q] == documents[kv]) & (q >= kv)

    return sees if queries is None else sees_on_shard


def _of_trees(documents: torch.Tensor, ends: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return the mask of a pack with trees: a token sees its own segment and those above it, up to itself."""

    def sees(_b: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        below = (documents[kv] <= documents[q]) & (documents[q] < ends[kv])
        return below & (q >= kv)

    return sees
