"""Attention over packs: each sample's is what it would be alone, whichever kernel computes it."""

from __future__ import annotations

from importlib import import_module
from inspect import Signature, signature
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import streampack
from streampack.errors import UserError
from streampack.training.attention import by_flash, by_torch, first_that_takes, one_by_one
from tests.packs.cases import Case, cases
from tests.training.references import attention_by_hand
from tests.views.shown import views_of

TWO = Case([[[5, 6, 7], [8, 9]], [[3]]], align=4, budget=12, cp=1)
SHARED = Case([[[5, 6, 7], [8, 9]], [[3]]], align=4, budget=12, cp=2)


def draw(count: int, heads: int, seed: int) -> torch.Tensor:
    found = torch.randn(count, heads, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return found.requires_grad_()


@settings(max_examples=30)
@given(
    cases().filter(lambda case: case.cp == 1), st.sampled_from([1, 2]), st.sampled_from([None, 0.3]),
    st.sampled_from([None, 1, 3]),
)  # fmt: skip
def test_packed_attention_and_its_gradients_are_those_of_each_sample_alone(
    case: Case, grouped: int, scale: float | None, window: int | None
) -> None:
    for batch in views_of(case)[0]:
        q, k, v = (draw(len(batch.input_ids), heads, seed) for seed, heads in enumerate((2 * grouped, 2, 2)))
        found = streampack.varlen_attention(q, k, v, batch, scale=scale, window=window)
        assert found.shape == q.shape
        assert found.isfinite().all()
        weights = draw(len(q), 2 * grouped, 9).detach()
        together = torch.autograd.grad((found * weights)[~batch.padding_mask].sum(), (q, k, v))
        cut = (streampack.per_sample(each, batch) for each in (q, k, v))
        alone = [attention_by_hand(of_q, of_k, of_v, scale, window) for of_q, of_k, of_v in zip(*cut, strict=True)]
        for one, other in zip(streampack.per_sample(found, batch), alone, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
        if alone:
            each = zip(alone, streampack.per_sample(weights, batch), strict=True)
            apart = torch.autograd.grad(torch.stack([(one * by).sum() for one, by in each]).sum(), (q, k, v))
            for got, expected in zip(together, apart, strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


# Kernels that run on a GPU alone: what they are told, by stand-ins that compute it


def computes(like: Signature) -> Any:
    """A kernel with the signature of one, which takes what that takes and computes what its arguments say."""

    def kernel(*args: Any, **kwargs: Any) -> torch.Tensor:
        bound = like.bind(*args, **kwargs)
        bound.apply_defaults()
        got = bound.arguments
        q, k, v, bounds, other, widest, last = list(got.values())[:7]
        assert (bounds is other, widest) == (True, last)
        left, right = got.get("window_size", (-1, -1))
        assert got.get("is_causal", False) or got.get("causal", False) or right == 0, "it looks at nothing ahead"
        assert q.shape[1] == k.shape[1] or got.get("enable_gqa", False) or "causal" in got, "knows no groups"
        scale = got.get("scale", got.get("softmax_scale"))
        return one_by_one(q, k, v, bounds, widest, scale, None if left < 0 else left + 1)

    kernel.__signature__ = like  # type: ignore[attr-defined]
    return kernel


def torch_2_10(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: Any, max_k: Any,
               is_causal: bool = False, return_aux: Any = None) -> None: ...  # fmt: skip
def torch_2_11(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: Any, max_k: Any, *,
               return_aux: Any = None, scale: Any = None, window_size: Any = (-1, -1)) -> None: ...  # fmt: skip
def flash_attn_2_8(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any,
                   dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1),
                   softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
                   return_attn_probs: bool = False, block_table: Any = None) -> None: ...  # fmt: skip


def torch_here() -> Any:
    """The one of the torch that is installed: two seconds to import, for these tests alone."""
    return import_module("torch.nn.attention.varlen").varlen_attn


def no_values() -> Any:
    return import_module("torch._subclasses").FakeTensorMode()


def signature_of(like: Any) -> Signature:
    return signature(torch_here() if like is torch_here else like)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("like", [torch_2_10, torch_2_11, torch_here, flash_attn_2_8], ids=lambda like: like.__name__)
def test_each_version_of_a_kernel_is_told_to_compute_the_same(
    like: Any, heads: int, scale: float | None, window: int | None
) -> None:
    batch = views_of(TWO)[0][0]
    q, k, v = (draw(12, count, seed) for seed, count in enumerate((heads, 2, 2)))
    given = q, k, v, batch.cu_seqlens_padded, batch.max_seqlen, scale, window
    by = by_flash if like is flash_attn_2_8 else by_torch
    kernel = computes(signature_of(like))
    if like is torch_2_10 and window is not None:
        with pytest.raises(
            UserError, match=r"got window=\d with torch .*, expected torch 2\.11 or later, or an installed flash-attn"
        ):
            by(kernel, *given)
    else:
        expected = streampack.varlen_attention(q, k, v, batch, scale=scale, window=window)
        torch.testing.assert_close(by(kernel, *given), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("format", ["thd", "hf", "megatron"])
@pytest.mark.parametrize(("backend", "like"), [("torch", torch_here), ("flash_attn", flash_attn_2_8)])
def test_kernels_get_the_padded_boundaries_of_every_format(
    backend: Any, like: Any, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"streampack.training.attention._{backend}", lambda: computes(signature_of(like)))
    for batch in views_of(TWO, format)[0]:
        q, k, v = (draw(12, count, seed) for seed, count in enumerate((4, 2, 2)))
        expected = streampack.varlen_attention(q, k, v, batch, backend="sdpa")
        found = streampack.varlen_attention(q, k, v, batch, backend=backend)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_a_sample_that_fills_its_pack_is_a_row_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no kernel for packed sequences, unless one is named, or only a window of it is seen."""
    case = Case([[[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]], [[1, 2, 3, 4, 5]]], align=4, budget=12, cp=1)
    asked = list[int]()

    def kernel(q: torch.Tensor, k: Any, v: Any, bounds: Any, *_: Any, **options: Any) -> torch.Tensor:
        asked.append(len(bounds))
        return q

    kernel.__signature__ = signature_of(torch_here)  # type: ignore[attr-defined]
    monkeypatch.setattr("streampack.training.attention._torch", lambda: kernel)
    monkeypatch.setattr("streampack.training.attention.first_that_takes", lambda q: "torch")
    full, part = views_of(case)[0]
    q, k, v = (draw(12, 2, seed) for seed in range(3))
    found = streampack.varlen_attention(q, k, v, full)
    torch.testing.assert_close(found, attention_by_hand(q, k, v, None, None), rtol=1e-9, atol=1e-12)
    assert asked == []
    streampack.varlen_attention(q, k, v, full, backend="torch")
    streampack.varlen_attention(q, k, v, full, window=3)
    streampack.varlen_attention(q, k, v, part)
    assert asked == [2, 2, 3]


def test_the_first_kernel_that_takes_the_tensors_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(size: int = 64, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> str:
        with no_values():  # no GPU: tensors of one, that hold nothing
            return first_that_takes(torch.empty(12, 4, size, dtype=dtype, device=device))

    assert of() == of(dtype=torch.float16) == of(size=256) == "torch"
    monkeypatch.setattr("streampack.training.attention._flash_attn", lambda: flash_attn_2_8)
    assert of() == "flash_attn"
    assert of(size=60) == of(size=264) == of(dtype=torch.float32) == of(device="cpu") == "sdpa"


def test_the_installed_torch_takes_what_its_kernel_is_told() -> None:
    """Its own code and checks, with tensors that have shapes and no values."""
    with no_values():
        q, k = torch.empty(12, 4, 8, dtype=torch.bfloat16), torch.empty(12, 2, 8, dtype=torch.bfloat16)
        bounds = torch.empty(4, dtype=torch.int32)
        assert by_torch(torch_here(), q, k, k, bounds, 4, 0.3, 3).shape == (12, 4, 8)


def test_packs_that_cannot_be_attended_are_refused_in_a_line() -> None:
    batch = views_of(TWO)[0][0]
    q, k = draw(12, 4, 0), draw(12, 3, 0)
    with pytest.raises(
        UserError, match=r"expected k and v with the same number of heads, and q with a multiple of this number"
    ):
        streampack.varlen_attention(q, k, k, batch)
    with pytest.raises(UserError, match=r"expected shape \[12, heads, head size\] for each"):
        streampack.varlen_attention(q[None], k, k, batch)
    with pytest.raises(UserError, match="got window=0, expected at least 1, because each token attends to itself"):
        streampack.varlen_attention(q, q, q, batch, window=0)
    with pytest.raises(UserError, match="got backend='flash_attn', which is not installed here"):
        streampack.varlen_attention(q, q, q, batch, backend="flash_attn")
    with pytest.raises(UserError, match="got backend='flash', expected one of: flash_attn, torch, sdpa, or None"):
        streampack.varlen_attention(q, q, q, batch, backend="flash")  # type: ignore[arg-type]
    shard = views_of(SHARED)[0][0]
    part = draw(len(shard.input_ids), 2, 0)
    with pytest.raises(
        UserError, match=r"got 1/2 of a pack on this rank \(zigzag\), expected the whole pack\. Use ring"
    ):
        streampack.varlen_attention(part, part, part, shard)
