"""Samples of a pack do not see each other in any format, by the masks that pages name for each kind of attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

import streampack
from streampack.views.view import canonical

ROWS = [list(range(1, 13)), list(range(20, 45)), list(range(50, 70))]
FORMATS = ("thd", "hf", "hf_shifted", "megatron", "bshd", "torchtitan", "numpy")


def attended(kind: str, batch: Any, x: torch.Tensor) -> torch.Tensor:
    """Return attention over x [T, 16] by the mask of a batch, for sdpa, eager or flex attention."""
    q = x[None, None]
    if kind == "flex":
        found: Any = flex_attention(q, q, q, block_mask=streampack.block_mask(batch))
        return found[0, 0]  # type: ignore[no-any-return]
    if kind == "sdpa":
        return scaled_dot_product_attention(q, q, q, attn_mask=streampack.block_causal_mask(batch))[0, 0]
    return ((q @ q.mT + streampack.block_causal_mask(batch, torch.float32)).softmax(-1) @ q)[0, 0]


@pytest.mark.filterwarnings("ignore")  # of flex attention without a compiler
@pytest.mark.parametrize("kind", ["sdpa", "eager", "flex"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_sample_does_not_move_the_outputs_of_others(format: str, kind: str) -> None:
    torch.manual_seed(0)
    embed = torch.nn.Embedding(97, 16)
    outputs = []
    for rows in (ROWS, [[91, 92, 93, *ROWS[0][3:]], *ROWS[1:]]):
        with streampack.local(rows, budget=64, format=format, shuffle=False, shape="fixed") as loader:
            batch = next(iter(loader))
        pack = canonical(batch)
        ids = torch.as_tensor(pack.input_ids).flatten()
        outputs.append(streampack.per_sample(attended(kind, batch, embed(ids).detach()), batch))
        numbers = pack.sample_ids[:, 1].tolist()
    moved = {n: float((a - b).abs().max()) for n, a, b in zip(numbers, *outputs, strict=True)}
    assert moved[0] > 1e-3
    assert (moved[1], moved[2]) == (0, 0)
