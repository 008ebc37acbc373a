"""Masks of packs: attention under them is attention inside each sample, whole packs and shards alike."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import streampack
from streampack.core.model.mesh import Mesh
from streampack.errors import UserError
from streampack.training.masks import block_causal_mask, block_causal_mask_mod, document_ids
from streampack.views.formats import Views
from streampack.views.view import View
from tests.packs.cases import Case, attached, cases
from tests.views.shown import TWO, seen, steps_of

SHARDED = Case([[[5, 6, 7, 8, 9, 10], [1, 2, 3]]], align=8, budget=24, cp=2)
TENSORS = ("thd", "hf", "hf_shifted", "megatron", "bshd", "torchtitan")


def heads(total: int) -> tuple[torch.Tensor, ...]:
    """q, k, v [1, 2, T, 4] in float64."""
    draw = torch.Generator().manual_seed(total)
    return tuple(torch.randn(1, 2, total, 4, dtype=torch.float64, generator=draw) for _ in range(3))


def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    """Causal attention of each segment by itself."""
    parts = ([each[:, :, begin:end] for each in (q, k, v)] for begin, end in pairwise(bounds))
    return torch.cat([scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in parts], 2)


@settings(max_examples=25)
@given(cases())
def test_attention_under_the_mask_is_each_samples_own_on_every_rank(case: Case) -> None:
    steps = [Views("thd", Mesh()).make(step, attached(case).rules) for step in steps_of(case)]
    for shards in zip(*steps, strict=True):
        whole, bounds = shards[0].canonical, shards[0].cu_seqlens_padded.tolist()
        q, k, v = heads(bounds[-1])
        expected = alone(q, k, v, bounds)
        for batch in shards:
            places = torch.from_numpy(batch.canonical.positions())
            mask = block_causal_mask(batch)
            assert (mask.dtype, mask.shape) == (torch.bool, (1, 1, len(places), bounds[-1]))
            found = scaled_dot_product_attention(q[:, :, places], k, v, attn_mask=mask)
            assert torch.allclose(found, expected[:, :, places], rtol=0, atol=1e-12)
            scores = q[:, :, places] @ k.mT / 2 + block_causal_mask(batch, torch.float64)
            assert torch.allclose(scores.softmax(-1) @ v, expected[:, :, places], rtol=0, atol=1e-12), "eager"
            segments = np.repeat(np.arange(whole.num_segments), np.diff(whole.cu_seqlens_padded))
            assert document_ids(batch, whole=True).tolist() == segments.tolist()
            assert document_ids(batch).tolist() == segments[places.numpy()].tolist()
            real = ~torch.from_numpy(batch.canonical.padding_mask)
            keys = torch.from_numpy(np.concatenate([shard.canonical.positions() for shard in shards]))
            padded = torch.cat([shard.padding_mask for shard in shards])
            assert not mask[0, 0][real][:, keys[padded]].any(), "real tokens see no padding"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("case", [TWO, SHARDED], ids=["alone", "shared"])
def test_flex_attention_by_documents_is_each_samples_own(case: Case) -> None:
    for step in steps_of(case):
        for batch in step:
            bounds = batch.cu_seqlens_padded.tolist()
            q, k, v = heads(bounds[-1])
            places = torch.from_numpy(batch.positions())
            blocks = create_block_mask(
                block_causal_mask_mod(batch), None, None, len(places), bounds[-1], device="cpu", BLOCK_SIZE=4
            )
            found = flex_attention(q[:, :, places], k, v, block_mask=blocks)
            assert torch.allclose(found, alone(q, k, v, bounds)[:, :, places], rtol=0, atol=1e-12)


@pytest.mark.parametrize("format", TENSORS)
def test_every_view_has_the_masks_of_its_pack(format: str) -> None:
    for pack, batch in zip(steps_of(TWO)[0], seen(TWO, format), strict=True):
        assert torch.equal(block_causal_mask(batch), block_causal_mask(pack))
        assert torch.equal(document_ids(batch), document_ids(pack))


def test_two_samples_and_a_tail_have_the_mask_by_hand() -> None:
    batch = seen(Case([[[5, 6], [8]]], align=1, budget=5, cp=1), "thd")[0]
    assert document_ids(batch).tolist() == [0, 0, 1, 2, 2]
    assert block_causal_mask(batch)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1],
    ]  # fmt: skip
    assert block_causal_mask(batch, torch.bfloat16)[0, 0, 0].tolist() == [0, *[torch.finfo(torch.bfloat16).min] * 4]
    assert block_causal_mask(batch.to("meta")).device.type == "meta"


def test_a_mapping_of_a_views_keys_has_no_mask() -> None:
    with pytest.raises(UserError, match=r"got a batch of type .* without its pack"):
        streampack.block_causal_mask(View(dict(seen(TWO, "thd")[0])))
