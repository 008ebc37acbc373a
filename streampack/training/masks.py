"""Attention masks of a pack, for attention that takes a mask instead of boundaries (sdpa, eager, flex).

A token sees the tokens of its own sample up to itself, also those that samples share. Alignment padding counts as part
of the sample before it, and the pack's tail as a sample of its own. So real tokens see no padding, and each token sees
at least itself, which keeps the softmax of padding finite. With context parallelism, rows are the rank's tokens, and
columns are the tokens of the whole pack in order. Keys gathered from all ranks are put in that order by
``canonical.positions()`` of each rank.

A mask takes T * T bytes. Attention by boundaries (``varlen_attention``, the format ``hf``) needs no mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from streampack.core.trees.prefix_tree import descendant_ends
from streampack.errors import UserError
from streampack.packs.pack import Pack
from streampack.packs.slabs import Slabs
from streampack.packs.trees.pack_paths import has_paths, pack_segments
from streampack.views.block_mask import BLOCK_SIZE, mask_mod, mask_of_tables, table_tensor
from streampack.views.view import View, canonical

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def block_mask(batch: Pack | View, block_size: int = BLOCK_SIZE) -> BlockMask:
    """Return the ``BlockMask`` of a pack for FlexAttention: the mask of ``block_causal_mask``, in blocks.

    Its tables are computed from the pack's boundaries, on the host. No mask is evaluated, and no device waits. A batch
    of a loader with ``connect(..., masks="flex")`` brings its tables along; then nothing is computed. The shapes of the
    tables depend on T', T and ``block_size`` alone.

    Args:
        batch: A pack in any format, as the loader returned it.
        block_size: Number of queries, and of keys, in a block.

    Returns:
        A ``BlockMask`` [1, 1, T', T] on the batch's device. Its ``mask_mod`` is that of ``block_causal_mask_mod``.

    Raises:
        UserError: ``block_size`` is below 1, or ``batch`` is a mapping made from a view, which holds no pack.

    Example:
        >>> out = flex_attention(q, k, v, block_mask=block_mask(batch))  # doctest: +SKIP
    """
    if block_size < 1:
        raise UserError(f"got block_size={block_size}, expected at least 1")
    pack, tables = canonical(batch), None
    if isinstance(batch, View) and block_size == BLOCK_SIZE:
        tables = batch.rest.get("block_tables")
    if tables is None:
        tables = table_tensor(pack, block_size, Slabs()).to(_device(batch))
    return mask_of_tables(tables, pack, block_size)


def document_ids(batch: Pack | View, *, whole: bool = False) -> torch.Tensor:
    """Return the number of each token's sample within the pack.

    Args:
        batch: A pack in any format, as the loader returned it.
        whole: True for all T tokens of the pack, False for the T' tokens that this rank holds.

    Returns:
        int32 [T'] or [T] on the batch's device, from 0. Alignment padding belongs to the sample before it; tail padding
        has the number after the last sample. A token that samples share has the number of the first of them.

    Raises:
        UserError: ``batch`` is a mapping made from a view, which holds no pack.

    Example:
        >>> document_ids(batch).tolist()  # doctest: +SKIP
        [0, 0, 0, 0, 1, 1, 1, 1]
    """
    places, ids = _places(batch), _segment_numbers(batch)
    return ids if whole else ids[places]


def block_causal_mask(batch: Pack | View, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the causal attention mask of a pack, in which samples do not attend to each other.

    Args:
        batch: A pack in any format, as the loader returned it.
        dtype: A floating dtype for an additive mask, as eager attention takes it. Default: a boolean mask, as
            ``scaled_dot_product_attention`` takes it.

    Returns:
        Tensor [1, 1, T', T] on the batch's device. Rows are this rank's tokens, columns all tokens of the pack. A
        boolean mask is True where a row attends to a column. An additive mask is 0 there, and the least number of
        ``dtype`` elsewhere.

    Raises:
        UserError: ``batch`` is a mapping made from a view, which holds no pack.

    Example:
        >>> out = scaled_dot_product_attention(q, k, v, attn_mask=block_causal_mask(batch))  # doctest: +SKIP
    """
    places, sees = _places(batch), block_causal_mask_mod(batch)
    rows = torch.arange(len(places), device=places.device)[:, None]
    keys = torch.arange(int(canonical(batch).cu_seqlens_padded[-1]), device=places.device)
    mask = sees(None, None, rows, keys)[None, None]
    if dtype is None:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def block_causal_mask_mod(batch: Pack | View) -> Callable[..., torch.Tensor]:
    """Return the mask of ``block_causal_mask`` as a ``mask_mod(b, h, q, kv)`` for flex attention.

    Args:
        batch: A pack in any format, as the loader returned it.

    Returns:
        A function for ``create_block_mask(..., Q_LEN=T', KV_LEN=T)``.

    Raises:
        UserError: ``batch`` is a mapping made from a view, which holds no pack.

    Example:
        >>> mask = create_block_mask(block_causal_mask_mod(batch), None, None, T, T)  # doctest: +SKIP
    """
    pack = canonical(batch)
    if not has_paths(pack):
        return mask_mod(_segment_numbers(batch), _places(batch))
    bounds, parents = pack_segments(pack)
    sizes = np.diff(bounds)
    of_tokens = (np.repeat(np.arange(len(sizes), dtype=np.int32), sizes), np.repeat(descendant_ends(parents), sizes))
    documents, ends = (torch.from_numpy(values).to(_device(batch)) for values in of_tokens)
    return mask_mod(documents, None, ends)


def _places(batch: Pack | View) -> torch.Tensor:
    """Return the place in the pack of each of the rank's T' tokens, int64 [T'], on the batch's device."""
    return torch.from_numpy(canonical(batch).positions()).to(_device(batch))


def _segment_numbers(batch: Pack | View) -> torch.Tensor:
    """Return the segment number of each token of the pack, int32 [T], on the batch's device."""
    slots = np.diff(canonical(batch).cu_seqlens_padded)
    return torch.from_numpy(np.repeat(np.arange(len(slots), dtype=np.int32), slots)).to(_device(batch))


def _device(batch: Pack | View) -> Any:
    """Return the device of the batch's tensors, ``cpu`` for numpy arrays."""
    return getattr(batch.padding_mask, "device", "cpu")
