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
    """Of each token that this rank holds, int32 [T'], the number of its sample in the pack, from 0; of the tail the one
    after the last. ``whole``: of the pack's tokens, [T], whatever the rank holds.

    On the batch's device. Raises UserError for a mapping made from a view, which knows no pack.

    >>> document_ids(batch).tolist()  # doctest: +SKIP
    [0, 0, 0, 0, 1, 1, 1, 1]
    """
    places, ids = _places(batch), _numbers(batch)
    return ids if whole else ids[places]


def block_causal_mask(batch: Pack | View, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Bool [1, 1, T', T], True where a token of this rank (row) sees one of the pack (column): sdpa's ``attn_mask``.

    With a floating ``dtype`` what eager attention adds to its scores: 0 there, elsewhere the least number of ``dtype``.
    On the batch's device; same errors as ``document_ids``.

    >>> out = scaled_dot_product_attention(q, k, v, attn_mask=block_causal_mask(batch))  # doctest: +SKIP
    """
    places, ids = _places(batch), _numbers(batch)
    keys = torch.arange(len(ids), device=ids.device)
    mask = ((ids[places, None] == ids) & (places[:, None] >= keys))[None, None]
    if dtype is None:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=ids.device).masked_fill_(~mask, torch.finfo(dtype).min)


def block_causal_mask_mod(batch: Pack | View) -> Callable[..., torch.Tensor]:
    """The same as a ``mask_mod(b, h, q, kv)`` of flex attention, for ``create_block_mask(..., Q_LEN=T', KV_LEN=T)``.

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
