"""Which tokens of a pack see which: for attention that takes a mask and no boundaries (sdpa, eager, flex).

A token sees those of its own sample up to itself. Alignment padding belongs to the sample that it follows, the tail is
one of its own: so real tokens see no padding, and every row of a mask has a token to see, itself, which keeps the
softmax of padding finite. Where context parallelism cuts a pack, the rank's tokens are the rows and the whole pack's
the columns, in the pack's order: keys gathered from all ranks go there by ``canonical.positions()`` of each.

A mask takes T * T bytes; attention by boundaries (``varlen_attention``, the format ``hf``) needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from streampack.packs.pack import Pack
from streampack.views.view import View, canonical


def document_ids(batch: Pack | View, *, whole: bool = False) -> torch.Tensor:
    """Return the number of each token's sample within the pack.

    Args:
        batch: A pack in any format, as the loader returned it.
        whole: True for all T tokens of the pack, False for the T' tokens that this rank holds.

    Returns:
        int32 [T'] or [T] on the batch's device, from 0. Alignment padding belongs to the sample before it; tail padding
        has the number after the last sample.

    Raises:
        UserError: ``batch`` is a mapping made from a view, which holds no pack.

    Example:
        >>> document_ids(batch).tolist()  # doctest: +SKIP
        [0, 0, 0, 0, 1, 1, 1, 1]
    """
    places, ids = _places(batch), _numbers(batch)
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
    places, ids = _places(batch), _numbers(batch)
    keys = torch.arange(len(ids), device=ids.device)
    mask = ((ids[places, None] == ids) & (places[:, None] >= keys))[None, None]
    if dtype is None:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=ids.device).masked_fill_(~mask, torch.finfo(dtype).min)


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
    places, ids = _places(batch), _numbers(batch)

    def sees(_b: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return (ids[places[q]] == ids[kv]) & (places[q] >= kv)

    return sees


def _places(batch: Pack | View) -> torch.Tensor:
    """Where in the pack each token of this rank lies, int64 [T'], on the batch's device."""
    return torch.from_numpy(canonical(batch).positions()).to(_device(batch))


def _numbers(batch: Pack | View) -> torch.Tensor:
    """Of each token of the pack its segment's number, int32 [T], on the batch's device."""
    slots = np.diff(canonical(batch).cu_seqlens_padded)
    return torch.from_numpy(np.repeat(np.arange(len(slots), dtype=np.int32), slots)).to(_device(batch))


def _device(batch: Pack | View) -> Any:
    return getattr(batch.padding_mask, "device", "cpu")
