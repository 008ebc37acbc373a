"""Proof: a pack whose samples share tokens has the loss and every gradient of its samples alone.

Groups are random trees. They pass the way from ``send_group`` to the views of a trainer (``tree_chain``). Attention is
the dense mask in plain torch, ``scaled_dot_product_attention``, and FlexAttention with the tables that batches bring.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention

from streampack.core.model.mesh import Mesh
from streampack.training.loss import packed_loss, per_sample, target_logprobs
from streampack.training.masks import block_causal_mask, block_mask
from streampack.views.formats import Views
from tests.packs.tree_chain import Chain, Sample, groups, rules_of
from tests.training.proofs.tiny import DIM, HEADS, KV_HEADS, Attention, Found, Tiny, assert_same, causal, found

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def dense(batch: Any) -> Attention:
    """Attention by hand, with scores of all pairs under the mask."""
    allowed = block_causal_mask(batch)[0, 0]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=-2) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), v)

    return attend


def sdpa(batch: Any) -> Attention:
    mask = block_causal_mask(batch)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return attend


def flex(batch: Any) -> Attention:
    blocks = block_mask(batch)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
        out = flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out[0].transpose(0, 1)

    return attend


@pytest.fixture(autouse=True)
def _flex_goes_backward_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has a backward pass of FlexAttention in plain operations, but refuses to start it on a CPU."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


ATTENTIONS = {"dense": dense, "sdpa": sdpa, "flex": flex}


def sft(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed cross-entropy of one sample."""
    return functional.cross_entropy(logits, labels, reduction="sum")


def grpo(logprobs: Tensor, old: Tensor, advantages: Tensor, labels: Tensor) -> Tensor:
    """The clipped objective of one sample: the mean over its learned tokens."""
    ratio, learned = (logprobs - old).exp(), labels != -100
    each = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (each * learned).sum() / learned.sum().clamp(min=1)


def logprobs_of(logits: Tensor, labels: Tensor) -> Tensor:
    picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return torch.where(labels != -100, picked, 0)


def alone(samples: list[Sample], loss: str) -> Found:
    """Each sample by itself through the model, and the mean over samples."""
    net, total = Tiny(), 0.0
    for sample in samples:
        ids = torch.tensor(sample["input_ids"], dtype=torch.int64)
        mask, advantages = (torch.from_numpy(sample[name]) for name in ("loss_mask", "advantage"))
        labels = torch.cat([torch.where(mask[1:] == 0, -100, ids[1:]), torch.tensor([-100])])
        logits = net(ids, torch.arange(len(ids)), causal)
        if loss == "sft":
            of_sample = sft(logits, labels)
        else:
            shifted = torch.cat([advantages[1:], torch.zeros(1)])
            of_sample = grpo(logprobs_of(logits, labels), old(labels), shifted, labels)
        (of_sample / len(samples)).backward()  # type: ignore[no-untyped-call]
        total += of_sample.item() / len(samples)
    return found(net, total)


def old(labels: Tensor) -> Tensor:
    """Log-probs of an earlier policy, from the labels."""
    return -4.0 - (labels % 7) / 10


def packed(chain: Chain, loss: str, attention: str) -> Found:
    """The same samples in packs, as a trainer gets them."""
    net, total = Tiny(), 0.0
    views = Views("thd", Mesh(), masks="flex", verify=True)
    views.fit(chain.rules)
    for step in chain.steps():
        for batch in views.make(step, chain.rules):
            positions = batch.position_ids.clamp(max=63)
            logits = net(batch.input_ids, positions, ATTENTIONS[attention](batch))
            if loss == "sft":
                part = packed_loss(sft, logits, batch, batch.labels, denominator=step.num_samples)
            else:
                logprobs = target_logprobs(logits, batch.labels, batch)
                values = old(batch.labels), batch.advantage, batch.labels
                part = packed_loss(grpo, logprobs, batch, *values, denominator=step.num_samples)
            part.backward()  # type: ignore[no-untyped-call]
            total += part.item()
    return found(net, total)


@pytest.mark.parametrize("loss", ["sft", "grpo"])
@pytest.mark.parametrize("attention", list(ATTENTIONS))
@settings(max_examples=12)
@given(given_=st.lists(groups(vocabulary=60), min_size=1, max_size=3))
def test_a_packed_tree_has_the_loss_and_gradients_of_its_rows(
    attention: str, loss: str, given_: list[list[Sample]]
) -> None:
    chain = Chain(rules_of(128, batch=sum(map(len, given_))))
    for group in given_:
        chain.send(group)
    samples = list(chain.given.values())
    if not any(sample["loss_mask"][1:].any() for sample in samples):
        return
    expected, got = alone(samples, loss), packed(chain, loss, attention)
    assert abs(got.loss - expected.loss) <= 1e-9 * max(abs(expected.loss), 1e-9)
    for name, value in expected.gradients.items():
        largest = value.abs().max().item()
        assert (got.gradients[name] - value).abs().max().item() <= 1e-9 * largest + 1e-15, name


def answers(lengths: list[int], prompt: int = 20, seed: int = 0) -> list[Sample]:
    """Answers to one prompt, which differ in their first token."""
    draw = np.random.default_rng(seed)
    start = draw.integers(1, 40, prompt)
    found_ = list[Sample]()
    for i, length in enumerate(lengths):
        ids = np.concatenate([start, [41 + i], draw.integers(1, 40, length - 1)]).astype(np.int32)
        mask = (np.arange(len(ids)) >= prompt).astype(np.uint8)
        found_.append(
            {
                "input_ids": ids, "loss_mask": mask, "advantage": np.full(len(ids), 1.0 - i),
                "segment": np.zeros(len(ids), np.int32), "reward": float(i),
            }
        )  # fmt: skip
    return found_


@pytest.mark.parametrize("attention", list(ATTENTIONS))
def test_a_changed_branch_leaves_the_others_as_they_are(attention: str) -> None:
    """Bit for bit, with equal lengths and one thread."""
    threads, outputs = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for changed in (3, 5):
            group = answers([12, 12, 12, 12])
            ids = group[1]["input_ids"]
            group[1] = {**group[1], "input_ids": np.where(np.arange(len(ids)) > 25, changed, ids).astype(np.int32)}
            chain = Chain(rules_of(128, batch=4))
            numbers = chain.send(group)
            (batch,) = Views("thd", Mesh(), masks="flex").make(chain.steps()[0], chain.rules)
            logits = Tiny()(batch.input_ids, batch.position_ids.clamp(max=63), ATTENTIONS[attention](batch))
            by_number = dict(zip(batch.sample_ids[:, 1].tolist(), per_sample(logits, batch), strict=True))
            outputs.append([by_number[number] for number in numbers])
    finally:
        torch.set_num_threads(threads)
    for i, (one, other) in enumerate(zip(*outputs, strict=True)):
        assert torch.equal(one, other) == (i != 1)


def test_a_shared_target_counts_once_for_each_sample_that_has_it() -> None:
    group: list[Sample] = [{**each, "loss_mask": np.ones_like(each["loss_mask"])} for each in answers([4, 4])]
    chain = Chain(rules_of(128, batch=2))
    chain.send(group)
    (step,) = chain.steps()
    assert step.num_loss_tokens == 2 * 23
    expected, got = alone(group, "sft"), packed(_again(group), "sft", "dense")
    assert_same(got, expected)


def _again(group: list[Sample]) -> Chain:
    chain = Chain(rules_of(128, batch=len(group)))
    chain.send(group)
    return chain
