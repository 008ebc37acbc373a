"""``megatron``: what ``get_batch`` of Megatron-LM takes of its data iterator, and arguments of ``PackedSeqParams``.

A row of S tokens, S the run's budget, which is to be Megatron's ``seq_length``: other tensor ranks make room for so
many. Both boundary arrays are those of storage. Megatron's own datasets give no others; with real ones beside them,
tensor rank 0 would attend over the one and the rest over the other (with cp = 1 ``get_batch`` broadcasts
``cu_seqlens`` alone), and a middle stage of a pipeline, which takes the last entry of ``cu_seqlens`` for the row's
length, would cut the padded ones short. ``get_batch`` shards for context parallelism itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from streampack.core.model.samples import IGNORE_INDEX
from streampack.packs.columns import Column, Columns
from streampack.packs.pack import Pack
from streampack.packs.slabs import Slabs
from streampack.views.tensors import ValuesByName, beside, cut, tensor
from streampack.views.view import View, canonical


def build_batches(columns: Columns, of_packs: ValuesByName, slabs: Slabs) -> tuple[ValuesByName, ValuesByName]:
    """``tokens``, ``labels``, ``position_ids`` int64 and ``loss_mask`` float32 [1, S]; ``cu_seqlens`` and
    ``cu_seqlens_padded`` int32 [1, segments + 1], ``max_seqlen`` int32 [1]. Three positions a token are [3, 1, S].

    Beside them ``input_ids``, which is ``tokens``, and all else that packs have; the pack's own ``cu_seqlens``,
    ``max_seqlen`` and declared ``loss_mask`` lie in ``rest``, where keys do not hide them.
    """
    bounds = columns.attributes["cu_seqlens_padded"]
    assert isinstance(bounds, Column)
    keys: ValuesByName = {}
    rest = beside(of_packs, "input_ids", "labels", "position_ids", "cu_seqlens_padded")
    if "input_ids" in of_packs:
        ids, labels = columns.attributes["input_ids"], columns.attributes["labels"]
        assert isinstance(ids, Column)
        assert isinstance(labels, Column)
        counted = np.frombuffer(slabs.take(4 * len(labels.values)), np.float32)
        np.not_equal(labels.values, IGNORE_INDEX, out=counted)
        keys["tokens"] = rest["input_ids"] = cut(tensor(ids.values), ids.bounds, rows=1)
        keys["labels"] = cut(tensor(labels.values), labels.bounds, rows=1)
        keys["loss_mask"] = cut(torch.from_numpy(counted), labels.bounds, rows=1)
    keys["position_ids"] = [positions.unsqueeze(-2) for positions in of_packs["position_ids"]]
    keys["cu_seqlens"] = keys["cu_seqlens_padded"] = cut(tensor(bounds.values), bounds.bounds, rows=1)
    widest = torch.from_numpy(np.array(of_packs["max_seqlen"], np.int32))  # whatever the default device
    keys["max_seqlen"] = cut(widest, range(columns.count + 1))
    return keys, rest


def packed_seq_params(batch: Pack | View) -> dict[str, Any]:
    """The arguments of ``megatron.core.packed_seq_params.PackedSeqParams`` for a pack in any format: ``qkv_format``
    ``thd``, four boundary arrays, int32 [segments + 1] on the batch's device, two widest slots, ints.

    All four are one tensor, the boundaries of the whole pack's storage, whatever part of it this rank holds:
    TransformerEngine takes packs for gapless only where both arrays are the same object, and its kernels that know no
    gaps are the faster ones. What lies in a gap follows its sample's tokens, which do not see it. Raises UserError for
    a mapping made from a view, which knows no pack.

    >>> PackedSeqParams(**packed_seq_params(batch))  # doctest: +SKIP
    """
    widest = canonical(batch).max_seqlen  # the host's number: asks no device
    found: Any = batch.cu_seqlens_padded
    boundaries = (torch.from_numpy(found) if isinstance(found, np.ndarray) else found).reshape(-1)
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    return {"qkv_format": "thd", **dict.fromkeys(names, boundaries), "max_seqlen_q": widest, "max_seqlen_kv": widest}
