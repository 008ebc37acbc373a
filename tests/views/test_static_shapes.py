"""Static shapes: every tensor has one shape in all packs, and means the same as without."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from msgspec.structs import replace as changed
from torch.utils._python_dispatch import TorchDispatchMode

import streampack
from streampack.batch_checks.step_check import check_step
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Rules
from streampack.errors import InvariantError, UserError
from streampack.views.device import SideStream, _moved
from streampack.views.formats import Views
from tests.packs.cases import Case, attached, cases
from tests.packs.tree_chain import Chain, prompts
from tests.packs.tree_chain import rules_of as rules_of_trees
from tests.views.shown import TWO, steps_of

MOST = 5
"""The most samples of a pack of ``cases``: some packs have them all, and a tail."""


def rules_of(case: Case) -> Rules:
    return changed(attached(case).rules, max_samples_per_pack=MOST)


@given(cases())
def test_boundaries_and_fields_of_samples_have_one_size(case: Case) -> None:
    case = replace(case, shape="fixed")
    rules = rules_of(case)
    for format in ("thd", "hf") if case.cp == 1 else ("thd",):
        for number, step in enumerate(steps_of(case)):
            views = Views(format, Mesh(), static_shapes=True)
            views.fit(rules)
            shown = views.make(step, rules)
            for batch in shown:
                pack = batch.canonical
                assert batch.max_seqlen == case.budget
                for name in ("cu_seqlens", "cu_seqlens_padded"):
                    bounds = pack[name].tolist()
                    assert getattr(batch, name).tolist() == bounds + bounds[-1:] * (MOST + 2 - len(bounds))
                for field in rules.fields:
                    if field.axis == "sample":
                        values = getattr(batch, field.name)
                        assert values.shape[0] == MOST
                        real = torch.as_tensor(pack[field.name]).to(values.dtype)
                        assert torch.equal(values[: pack.num_samples], real)
                        assert (values[pack.num_samples :] == field.pad).all()
            if number == 0 and case.cp == 1:
                check_step(shown, Mesh(), rules)


def test_verify_finds_a_segment_that_is_not_empty() -> None:
    rules = rules_of(TWO)
    shown = Views("thd", Mesh(), static_shapes=True).make(steps_of(TWO)[0], rules)
    check_step(shown, Mesh(), rules)
    shown[0]["cu_seqlens_padded"][-1] += 1
    with pytest.raises(InvariantError, match="cu_seqlens_padded: empty segments at the end of a pack"):
        check_step(shown, Mesh(), rules)


def test_one_compilation_serves_packs_of_any_number_of_samples() -> None:
    """Boundaries, fields of samples and ``max_seqlen`` are inputs of a compiled function; without, it recompiles."""
    from torch._dynamo.testing import CompileCounter  # takes a second

    found = {}
    for static in (True, False):
        counter = CompileCounter()
        torch._dynamo.reset()

        @torch.compile(backend=counter, fullgraph=True, dynamic=False)
        def used(ids: torch.Tensor, bounds: torch.Tensor, rewards: torch.Tensor, longest: int) -> torch.Tensor:
            return (ids * longest).sum() + (bounds[1:] - bounds[:-1]).sum() + rewards.sum()

        rng = np.random.default_rng(0)
        samples = [{"tokens": [7] * int(length), "reward": 0.5} for length in rng.integers(1, 120, 500)]
        reward = {"reward": {"dtype": "float32", "axis": "sample"}}
        with streampack.local(
            samples, budget=256, max_samples_per_pack=16, tail="drop", fields=reward, static_shapes=static
        ) as loader:
            for batch, _ in zip(loader, range(50), strict=False):
                total = used(batch.input_ids, batch.cu_seqlens_padded, batch.reward, batch.max_seqlen)
                assert total == batch.input_ids.sum() * batch.max_seqlen + 256 + 0.5 * batch.num_samples
                if counter.frame_count > 1 and not static:
                    break
        found[static] = counter.frame_count
    assert found == {True: 1, False: 2}


def test_a_step_lies_in_one_array_on_its_device() -> None:
    """All tensors that move, aligned and apart, with the values and the strides of those on the host."""
    case = Case([[[5, 6, 7], [8, 9]], [[3]], [[1] * 9]], align=4, budget=12, cp=1)
    step = Views("hf", Mesh(), masks="flex").make(steps_of(case)[0], attached(case).rules)
    copied = SideStream(torch.device("cpu")).copy(step)
    spans = {}
    for there, here in zip(copied, step, strict=True):
        assert list(there) == list(here)
        assert there["cu_seq_lens_q"] is there["cu_seq_lens_k"], "no tensor is copied twice"
        for one, other in zip(there.tensors().values(), here.tensors().values(), strict=True):
            assert torch.equal(one, other)
            assert (one.dtype, one.shape, one.is_contiguous()) == (other.dtype, other.shape, True)
            assert one.data_ptr() % 64 == 0
            assert one.untyped_storage().data_ptr() == copied[0].input_ids.untyped_storage().data_ptr()
            spans[one.data_ptr()] = one.data_ptr() + one.numel() * one.element_size()
        weights = torch.ones(len(there.padding_mask), requires_grad=True)
        kept = (weights * there.labels[0]).sum()
        copied[0].position_ids.mul_(2)
        kept.backward()
    begins = sorted(spans)
    assert all(spans[begin] <= after for begin, after in pairwise(begins))


def test_helpers_read_no_value_of_a_device() -> None:
    """On the device ``meta``, whose tensors have no values, each read of a value is an error."""
    rules = rules_of(TWO)
    for batch in Views("thd", Mesh(), masks="flex", static_shapes=True).make(steps_of(TWO)[0], rules):
        there = batch.to("meta")
        with pytest.raises(RuntimeError, match="meta"):
            there.cu_seqlens_padded[-1].item()
        total = len(batch.padding_mask)
        logits = torch.randn(total, 16, device="meta", requires_grad=True)

        def loss_fn(rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(rows, labels, reduction="sum")

        loss = streampack.packed_loss(loss_fn, logits, there, there.labels, denominator=there.step_num_loss_tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        assert logits.grad is not None
        q = torch.randn(total, 2, 8, device="meta")
        assert streampack.varlen_attention(q, q, q, there).shape == q.shape
        assert streampack.block_mask(there).kv_indices.device.type == "meta"
        assert streampack.document_ids(there).shape == (total,)


@pytest.mark.parametrize(
    ("format", "changes", "message"),
    [
        ("megatron", {}, r"got static_shapes with format 'megatron', expected one of: thd, hf, hf_shifted"),
        ("numpy", {}, r"got static_shapes with format 'numpy'"),
        ("thd", {"shape": "exact"}, r"got static_shapes for `rules.shape: exact`, expected `rules.shape: fixed`"),
        ("thd", {"max_samples_per_pack": None}, r"got static_shapes for a feed without `max_samples_per_pack`"),
    ],
)
def test_static_shapes_that_cannot_be_are_refused(format: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Views(format, Mesh(), static_shapes=True).fit(changed(rules_of(TWO), **changes))


class Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that make the host wait for a device, and copies from the host to another device."""

    WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.is_nonzero", "aten.equal")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits = self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.empty.memory_format:
            kwargs.pop("pin_memory", None)  # needs a device
        out = func(*args, **kwargs)
        name = str(func).rpartition(".")[0]
        self.waits += name in self.WAITS
        self.copies += name == "aten._to_copy" and args[0].device.type == "cpu" and out.device.type != "cpu"
        return out


def test_no_step_of_fifty_makes_the_host_wait() -> None:
    """With packs that change: no value is read, of masks, boundaries, labels or the loss."""
    rng = np.random.default_rng(0)
    samples = [{"tokens": rng.integers(1, 32, int(length)).tolist()} for length in rng.integers(1, 120, 900)]
    table = torch.randn(32, 32, requires_grad=True)
    counted = Watched()
    with streampack.local(
        samples, budget=256, packs=1, max_samples_per_pack=16, tail="drop", static_shapes=True, masks="flex"
    ) as loader:
        steps = 0
        for step, _ in zip(loader.steps(), range(50), strict=False):
            steps += 1
            for batch in step:
                with counted:
                    places = torch.arange(256)
                    assert batch.block_mask.mask_mod(places, places, places, places).shape == (256,)
                    logits = table[batch.input_ids]
                    logprobs = streampack.target_logprobs(logits, batch.labels, batch)
                    loss = -streampack.packed_loss(torch.sum, logprobs, batch, denominator=step.num_loss_tokens)
                    loss.backward()  # type: ignore[no-untyped-call]
    assert (steps, counted.waits) == (50, 0)


def test_trees_make_the_host_not_wait_either() -> None:
    chain = Chain(rules_of_trees(96, batch=6))
    chain.send(prompts(6))
    (batch,) = Views("thd", Mesh(), masks="flex").make(chain.steps()[0], chain.rules)
    there, counted = batch.to("meta"), Watched()
    with counted:
        logits = torch.randn(96, 128, device="meta", requires_grad=True)
        logprobs = streampack.target_logprobs(logits, there.labels, there)
        assert len(streampack.per_sample(logits, there)) == 6
        streampack.packed_loss(torch.sum, logprobs, there, denominator=6).backward()  # type: ignore[no-untyped-call]
        assert there.block_mask.kv_indices.device.type == "meta"
    assert counted.waits == counted.copies == 0


@pytest.mark.parametrize("format", ["thd", "hf"])
def test_a_step_is_copied_once_and_not_tensor_by_tensor(format: str) -> None:
    case = Case([[[5, 6, 7], [8, 9]], [[3]], [[1] * 9]], align=4, budget=12, cp=1)
    step = Views(format, Mesh(), masks="flex").make(steps_of(case)[0], attached(case).rules)
    tensors = {key: tensor for batch in step for key, tensor in batch.tensors().items()}
    one_by_one, at_once = Watched(), Watched()
    with one_by_one:
        for batch in step:
            batch.to("meta")
    with at_once:
        _moved(tensors, torch.device("meta"))
    assert (one_by_one.copies, at_once.copies) == (len(tensors), 1)
    assert len(tensors) >= 3 * 7


def test_packs_with_trees_have_static_shapes_of_samples_too() -> None:
    chain = Chain(rules_of_trees(96, batch=10, max_samples_per_pack=8))
    chain.send(prompts(6))
    chain.send(prompts(4))
    views = Views("thd", Mesh(), masks="flex", static_shapes=True, verify=True)
    views.fit(chain.rules)
    for step in chain.steps():
        for batch in views.make(step, chain.rules):
            assert (len(batch.cu_seqlens_padded), len(batch.shared), len(batch.cu_paths)) == (10, 8, 9)
            assert batch.cu_paths[-1] == batch.canonical.cu_paths[-1]
            assert len(batch.reward) == 8
