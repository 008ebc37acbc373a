"""``megatron``: batches for ``get_batch`` of Megatron-LM, and the arguments of its ``PackedSeqParams``.

A pack is a row of S tokens. S is the run's budget and must be Megatron's ``seq_length``, for which other tensor ranks
allocate memory. Megatron's ``get_batch`` shards for context parallelism itself.

Both boundary arrays hold padded boundaries, as Megatron's own datasets do. Real boundaries in one of them would break
two things. With cp = 1, ``get_batch`` broadcasts only ``cu_seqlens``, so tensor ranks would attend over different
boundaries. And a middle pipeline stage takes the last entry of ``cu_seqlens`` for the length of the row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from streampack.core.layout.shards import shard_slices
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64, IGNORE_INDEX
from streampack.packs.columns import Columns
from streampack.packs.pack import Pack
from streampack.packs.slabs import Slabs
from streampack.views.tensors import ValuesByName, column_of, cut, other_values, positions_of, rows_of
from streampack.views.view import View, canonical

__all__ = ["packed_seq_params"]

_OF_TOKENS = ("tokens", "labels", "loss_mask", "position_ids")


def build_batches(
    columns: Columns, of_packs: ValuesByName, slabs: Slabs, rules: Rules
) -> tuple[ValuesByName, ValuesByName]:  # fmt: skip
    """Return the keys of some packs in ``megatron``, and the packs' other values, each a list by name.

    - ``tokens``, ``labels``, ``position_ids``: int64 [1, S]; three positions per token are [3, 1, S].
    - ``loss_mask``: float32 [1, S], 1 where the label counts.
    - ``cu_seqlens``, ``cu_seqlens_padded``: int32 [1, segments + 1], the same padded boundaries.
    - ``max_seqlen``: int32 [1], tokens of the longest segment.

    Among the other values are the pack's own ``cu_seqlens``, ``max_seqlen`` and declared ``loss_mask``, which the keys
    hide.
    """
    keys: ValuesByName = {}
    rest = other_values(of_packs, "input_ids", "labels", "position_ids", "cu_seqlens_padded")
    if "input_ids" in of_packs:
        labels = column_of(columns, "labels")
        counted = np.frombuffer(slabs.take(4 * len(labels.values)), np.float32)
        np.not_equal(labels.values, IGNORE_INDEX, out=counted)
        keys["tokens"] = rest["input_ids"] = rows_of(columns, "input_ids")
        keys["labels"] = rows_of(columns, "labels")
        keys["loss_mask"] = cut(torch.from_numpy(counted), labels.bounds, rows=1)
    keys["position_ids"] = positions_of(of_packs)
    keys["cu_seqlens"] = keys["cu_seqlens_padded"] = rows_of(columns, "cu_seqlens_padded")
    widest = torch.from_numpy(np.array(of_packs["max_seqlen"], np.int32))  # torch's default device may be another
    keys["max_seqlen"] = cut(widest, range(columns.count + 1))
    return keys, rest


def arranged(batch: View, cp: int) -> View:
    """Return a pack whose tokens are in an order that makes Megatron shard samples where it shards rows.

    Without ``sft``, Megatron's ``get_batch`` gives each of ``cp`` ranks two chunks of the row (``zigzag_pack``). But
    attention, rotary embeddings and multi-token prediction expect two chunks of each sample (``zigzag``). So the tokens
    of a rank's samples lie where Megatron takes the rank's part of the row. So do declared fields of axis
    ``token`` and all other values by token. Boundaries and ``batch.canonical`` stay the same.
    """
    bounds = batch["cu_seqlens"][0].numpy()
    order = np.empty(bounds[-1], np.int64)
    for rank in range(cp):
        samples, rows = (_indices(*shard_slices(bounds, cp, rank, kind)) for kind in ("zigzag", "zigzag_pack"))
        order[rows] = samples
    index = torch.from_numpy(order)
    changed = {name: batch[name][..., index] for name in _OF_TOKENS if name in batch}
    fields = () if batch.rules is None else batch.rules.fields
    rest = dict(batch.rest)
    for name in ("padding_mask", *(field.name for field in fields if field.axis == "token")):
        if name in rest:
            rest[name] = rest[name][index]
    if "input_ids" in rest:
        rest["input_ids"] = changed["tokens"]
    return View({**batch, **changed}, batch.canonical, rest, batch.rules, batch.copied)


def _indices(start: I64, stop: I64) -> I64:
    """Return the indices of slices, one slice after another."""
    sizes = stop - start
    indices: I64 = np.arange(sizes.sum()) + np.repeat(start - np.cumsum(sizes) + sizes, sizes)
    return indices


def packed_seq_params(batch: Pack | View) -> dict[str, Any]:
    """Return the arguments of ``megatron.core.packed_seq_params.PackedSeqParams`` for a pack.

    All four boundary arguments are the same tensor of padded boundaries of the whole pack. TransformerEngine then uses
    its faster kernels without gaps. Padding comes after its sample's tokens, which do not attend to the padding.

    Args:
        batch: A pack in any format, as the loader returned it.

    Returns:
        A dict by name:

        - ``qkv_format``: ``thd``.
        - ``cu_seqlens_q``, ``cu_seqlens_kv``, ``cu_seqlens_q_padded``, ``cu_seqlens_kv_padded``: int32 [segments + 1]
          on the batch's device.
        - ``max_seqlen_q``, ``max_seqlen_kv``: int, tokens of the longest segment.

    Raises:
        UserError: ``batch`` is a mapping made from a view, which holds no pack.

    Example:
        >>> params = PackedSeqParams(**packed_seq_params(batch))  # doctest: +SKIP
    """
    widest = canonical(batch).max_seqlen  # an int on the host: needs no synchronization with a device
    bounds: Any = batch.cu_seqlens_padded
    boundaries = (torch.from_numpy(bounds) if isinstance(bounds, np.ndarray) else bounds).reshape(-1)
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    return {"qkv_format": "thd", **dict.fromkeys(names, boundaries), "max_seqlen_q": widest, "max_seqlen_kv": widest}
