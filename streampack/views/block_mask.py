"""The ``BlockMask`` of a pack for FlexAttention, on tables that are computed with the pack."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from streampack.packs.block_tables import BlockTables, fill_block_tables
from streampack.packs.pack import Pack
from streampack.packs.slabs import Slabs

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK_SIZE = 128
"""Queries, and keys, in a block: what FlexAttention's kernels use unless told otherwise."""


def table_tensor(pack: Pack, block_size: int, slabs: Slabs) -> torch.Tensor:
    """Return all arrays of a pack's block mask in one int32 tensor, whose memory is one of ``slabs``."""
    size = BlockTables.of(len(pack.padding_mask), int(pack.cu_seqlens_padded[-1]), block_size).size
    tables = np.frombuffer(slabs.take(4 * size), np.int32)
    fill_block_tables(tables, pack.cu_seqlens_padded, pack.positions(), block_size)
    return torch.from_numpy(tables)


def mask_of_tables(tables: torch.Tensor, pack: Pack, block_size: int) -> BlockMask:
    """Return the ``BlockMask`` whose arrays are views of ``tables``, on their device."""
    from torch.nn.attention.flex_attention import BlockMask  # takes a second

    num_queries, num_keys = len(pack.padding_mask), int(pack.cu_seqlens_padded[-1])
    places = BlockTables.of(num_queries, num_keys, block_size).places
    arrays = {name: tables[begin : begin + math.prod(shape)].view(shape) for name, (begin, shape) in places.items()}
    sees = _mask_mod(arrays, whole=num_queries == num_keys)
    blocks: dict[str, Any] = {
        name: array[None, None] for name, array in arrays.items() if name not in ("documents", "queries")
    }
    return BlockMask((num_queries, num_keys), BLOCK_SIZE=(block_size, block_size), mask_mod=sees, **blocks)


def _mask_mod(arrays: Mapping[str, torch.Tensor], whole: bool) -> Callable[..., torch.Tensor]:
    """Return the mask of a pack as a ``mask_mod``; ``whole``: this rank holds all tokens of the pack, in order."""
    documents, queries = arrays["documents"], arrays["queries"]

    def sees_on_shard(_b: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        place = queries[q]
        return (documents[place] == documents[kv]) & (place >= kv)

    def sees(_b: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return (documents[q] == documents[kv]) & (q >= kv)

    return sees if whole else sees_on_shard
