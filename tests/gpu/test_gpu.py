"""On a GPU: kernels of variable length against each sample alone, steps copied ahead of use, and the benchmark."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import streampack
from benchmarks.training.train_gpu import main
from streampack.core.model.mesh import Mesh
from streampack.views.formats import Views
from tests.packs.cases import Case
from tests.packs.tree_chain import Chain, prompts, rules_of
from tests.training.references import attention_by_hand
from tests.views.shown import views_of

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch's own compiler, as the next one
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
PACKS = [[700, 1, 33, 128, 500], [2040], [2048], []]
CASE = Case([[[7] * length for length in pack] for pack in PACKS], align=8, budget=2048, cp=1)
FLASH = pytest.param("flash_attn", marks=pytest.mark.skipif(find_spec("flash_attn") is None, reason="no flash-attn"))


@pytest.mark.parametrize("backend", ["torch", FLASH])
@pytest.mark.parametrize(("heads", "scale", "window"), [(2, None, None), (8, 0.2, None), (8, None, 64)])
def test_packed_attention_in_bf16_is_that_of_each_sample_alone(
    backend: Any, heads: int, scale: float | None, window: int | None
) -> None:
    """Outputs and gradients, against a softmax in float32 of the same values; gaps, a tail, and a pack of nothing."""
    for batch in (each.to("cuda") for each in views_of(CASE)[0]):
        draw = torch.Generator("cuda").manual_seed(0)
        q, k, v, weights = (
            torch.randn(2048, count, 64, generator=draw, device="cuda", dtype=torch.bfloat16)
            for count in (heads, 2, 2, heads)
        )
        weights[batch.padding_mask] = 0
        halves = [each.clone().requires_grad_() for each in (q, k, v)]
        found = streampack.varlen_attention(
            halves[0], halves[1], halves[2], batch, scale=scale, window=window, backend=backend
        )
        assert found.isfinite().all()
        exact = [each.float().requires_grad_() for each in (q, k, v)]
        cut = zip(*(streampack.per_sample(each, batch) for each in exact), strict=True)
        alone = [attention_by_hand(of_q, of_k, of_v, scale, window) for of_q, of_k, of_v in cut]
        for one, other in zip(streampack.per_sample(found, batch), alone, strict=True):
            torch.testing.assert_close(one.float(), other, rtol=2e-2, atol=2e-2)
        together = torch.autograd.grad((found * weights).sum(dtype=torch.float32), halves)
        assert all(each.isfinite().all() for each in together)
        if alone:
            each_weighted = zip(alone, streampack.per_sample(weights, batch), strict=True)
            apart = torch.autograd.grad(torch.stack([(one * by).sum() for one, by in each_weighted]).sum(), exact)
            for got, expected in zip(together, apart, strict=True):
                torch.testing.assert_close(got.float(), expected, rtol=5e-2, atol=5e-2)


def test_steps_copied_ahead_are_the_packs() -> None:
    """On a stream of their own, while this one computes: what is read of them is what the packs hold."""
    samples = [list(range(1, 2 + i * 37 % 200)) for i in range(1, 400)]
    busy = torch.randn(2048, 2048, device="cuda")
    with streampack.local(samples, budget=1024, packs=2, device="cuda") as loader:
        for step in loader.steps():
            busy = busy @ busy / 2048**0.5
            for batch in step:
                assert batch.input_ids.is_cuda
                for name in ("input_ids", "labels", "position_ids", "cu_seqlens_padded"):
                    assert np.array_equal(batch[name].cpu().numpy(), getattr(batch.canonical, name))


def test_a_packed_loss_on_the_gpu_is_that_on_the_cpu() -> None:
    batch = views_of(CASE)[0][0]
    logits = torch.randn(2048, 16, dtype=torch.float64)

    def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")

    losses = [
        streampack.packed_loss(loss_fn, logits.to(device), there, there.labels, denominator=7).item()
        for device, there in (("cpu", batch), ("cuda", batch.to("cuda")))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


@pytest.mark.parametrize("trees", [False, True])
def test_flex_attention_under_the_masks_of_batches_is_dense_attention(trees: bool) -> None:
    """Compiled, forward and backward, for packs with and without prefix trees."""
    chain = Chain(rules_of(1024, batch=24))
    for _ in range(4):
        chain.send(prompts(6, prompt=150, answer=20), share=trees)
    attend = torch.compile(flex_attention)
    for batch in Views("thd", Mesh(), masks="flex").make(chain.steps()[0], chain.rules):
        there = batch.to("cuda")
        draw = torch.Generator("cuda").manual_seed(0)
        q, k, v = (torch.randn(1, 2, 1024, 64, generator=draw, device="cuda").requires_grad_() for _ in range(3))
        weights = torch.randn(1, 2, 1024, 64, generator=draw, device="cuda")
        weights[:, :, there.padding_mask] = 0
        found = attend(q, k, v, block_mask=there.block_mask)
        mask = streampack.block_causal_mask(there)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        torch.testing.assert_close(found * weights, expected * weights, rtol=2e-2, atol=2e-2)
        together, apart = (torch.autograd.grad((out * weights).sum(), (q, k, v)) for out in (found, expected))
        for got, want in zip(together, apart, strict=True):
            torch.testing.assert_close(got, want, rtol=5e-2, atol=5e-2)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_fifty_steps_do_not_make_the_host_wait() -> None:
    """Torch raises for each operation that waits for the GPU; the shapes are those of one compilation."""
    from torch._dynamo.testing import CompileCounter  # takes a second

    rng = np.random.default_rng(0)
    samples = [{"tokens": rng.integers(1, 32, int(length)).tolist()} for length in rng.integers(1, 120, 900)]
    table, counter = torch.randn(32, 32, device="cuda", requires_grad=True), CompileCounter()
    used = torch.compile(lambda ids, bounds: table[ids].sum() + bounds.diff().sum(), backend=counter, dynamic=False)
    with streampack.local(
        samples, budget=256, packs=1, max_samples_per_pack=16, tail="drop", static_shapes=True, masks="flex",
        device="cuda",
    ) as loader:  # fmt: skip
        for number, step in enumerate(loader.steps()):
            if number == 50:
                break
            torch.cuda.set_sync_debug_mode("error" if number else "default")
            try:
                for batch in step:
                    used(batch.input_ids, batch.cu_seqlens_padded)
                    assert batch.block_mask.kv_indices.is_cuda
                    logprobs = streampack.target_logprobs(table[batch.input_ids], batch.labels, batch)
                    loss = streampack.packed_loss(torch.sum, logprobs, batch, denominator=step.num_loss_tokens)
                    loss.backward()  # type: ignore[no-untyped-call]
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert counter.frame_count == 1


def test_the_benchmark_has_its_figures(capsys: Any) -> None:
    main(["--quick", "--json", "--peak-tflops", "989"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(report["ways"]) == {"padded", "greedy", "streampack", "block masks"}
    assert all(0 < way["mfu"] < 1 and way["tokens_per_s"] > 0 for way in report["ways"].values())
