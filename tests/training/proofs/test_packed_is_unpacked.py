"""Proof, on one rank: a packed step has the loss and every gradient of its samples alone, and no sample sees another.

Packs come from a real broker, a feed for each packer, with alignment and tail padding, masks of what is learned, empty
packs, and packs of one sample; each view is trained on as its framework would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import streampack
from streampack.config.typed_yaml import convert
from streampack.sources import SourceSettings, open_source
from streampack.training.attention import varlen_attention
from streampack.training.loss import packed_loss
from streampack.views.bshd import thd_chunks
from streampack.views.megatron import packed_seq_params
from tests.integration.running import RunningBroker, producing_here, running_broker, write_jsonl
from tests.training.proofs.tiny import (
    FIELDS,
    LONGEST,
    Alone,
    Attention,
    Tiny,
    assert_same,
    causal,
    found,
    learned,
    rows,
    summed_loss,
    within,
)

SAMPLES = rows(70)
FEEDS: dict[str, dict[str, Any]] = {
    "exact_fill": {},
    "aligned": {"align": {"sample": 4, "pack": 8}},
    "ragged": {"align": {"sample": 8, "pack": 16}, "shape": "exact"},
    "batches": {"align": {"sample": 2, "pack": 4}, "step": {"samples": 30, "min_micro_batches": 12}},
    "padded": {"padded": True, "step": {"samples": 24}, "align": {"sample": 4, "pack": 4}},
    "joint": {"balance": {"kind": "joint", "group": 2}},
    "sliding_ffd": {"packer": "sliding_ffd"},
    "buffer_first_fit": {"packer": "buffer_first_fit", "align": {"sample": 4, "pack": 4}},
    "concatenative": {"packer": "concatenative"},
    "modified_first_fit_decreasing": {"packer": "modified_first_fit_decreasing"},
    "first_fit_shuffle": {"packer": "first_fit_shuffle"},
    "best_fit_decreasing": {"packer": "best_fit_decreasing", "align": {"sample": 2, "pack": 2}},
    "greedy_knapsack": {"packer": "greedy_knapsack"},
    "karmarkar_karp": {"packer": "karmarkar_karp"},
    "none": {"packer": "none"},
}
WINDOW = {"window": {"samples": 16}}
ALL_VIEWS = ("exact_fill", "aligned", "batches")
"""Feeds of which every view is trained on."""


def thd(net: Tiny, batch: Any, tokens: int) -> Tensor:
    logits = net(batch.input_ids, batch.position_ids, within(batch.cu_seqlens_padded))
    return summed_loss(logits, batch.labels) / tokens


def by_helpers(net: Tiny, batch: Any, tokens: int) -> Tensor:
    logits = net(batch.input_ids, batch.position_ids, partial(varlen_attention, pack=batch))
    return packed_loss(summed_loss, logits, batch, batch.labels, denominator=tokens)


def hf(net: Tiny, batch: Any, tokens: int) -> Tensor:
    """As transformers' models do: the model shifts."""
    logits = net(batch["input_ids"], batch["position_ids"], within(batch["cu_seq_lens_q"]))
    return summed_loss(logits[:, :-1], batch["labels"][:, 1:]) / tokens


def hf_shifted(net: Tiny, batch: Any, tokens: int) -> Tensor:
    """By ``seq_idx`` this time, as linear attention finds where samples begin."""
    starts = torch.nonzero(torch.diff(batch["seq_idx"][0], prepend=torch.tensor([-1]))).flatten()
    return summed_loss(net(batch["input_ids"], batch["position_ids"], within(starts)), batch["shift_labels"]) / tokens


def megatron(net: Tiny, batch: Any, tokens: int) -> Tensor:
    """As Megatron's models do, which know no label that is ignored: the mask alone says what is learned."""
    bounds = packed_seq_params(batch)["cu_seqlens_q_padded"]
    logits = net(batch["tokens"], batch["position_ids"], within(bounds)).flatten(0, 1)
    each = functional.cross_entropy(logits, batch["labels"].flatten().clamp(min=0), reduction="none")
    loss: Tensor = (each * batch["loss_mask"].flatten()).sum() / tokens
    return loss


def bshd(net: Tiny, batch: Any, tokens: int) -> Tensor:
    """As AutoModel's models get it, by lengths."""
    (chunk,) = thd_chunks(batch, 1)
    logits = net(chunk["input_ids"], chunk["position_ids"], within(chunk["cu_seqlens"]))
    return summed_loss(logits, chunk["labels"]) / tokens


def torchtitan(net: Tiny, batch: Any, tokens: int) -> Tensor:
    """As its trainer does: a sample begins wherever a position is 0."""
    starts = torch.nonzero(batch["positions"][0] == 0).flatten()
    return summed_loss(net(batch["input"], batch["positions"], within(starts)), batch.labels) / tokens


def padded(net: Tiny, batch: Any, tokens: int) -> Tensor:
    return summed_loss(net(batch["input_ids"], batch["position_ids"], causal), batch["labels"]) / tokens


VIEWS: dict[str, tuple[str, Callable[[Tiny, Any, int], Tensor]]] = {
    "thd": ("thd", thd), "helpers": ("thd", by_helpers), "hf": ("hf", hf), "hf_shifted": ("hf_shifted", hf_shifted),
    "megatron": ("megatron", megatron), "bshd": ("bshd", bshd), "torchtitan": ("torchtitan", torchtitan),
    "padded": ("padded", padded),
}  # fmt: skip
"""A format, and a micro-batch's part of the step's loss as one trains on it, ``tokens`` being the step's."""
ATTENTIONS: dict[str, Callable[[Any], Attention]] = {
    "boundaries": lambda pack: within(pack.cu_seqlens_padded),
    "varlen_attention": lambda pack: partial(varlen_attention, pack=pack),
}


@pytest.fixture(scope="module")
def alone() -> Alone:
    return Alone(SAMPLES)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    file = write_jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", SAMPLES)
    settings = {"source": "jsonl", "shards": str(file)}
    sources = {f"of_{name}": open_source(convert(settings, SourceSettings)) for name in FEEDS}
    tree = {
        "rules": {"budget": 64, "step": {"packs": 4}},
        "fields": FIELDS,
        "streams": {name: {"partitions": 1} for name in sources},
        "feeds": {
            name: {"streams": [f"of_{name}"], "rules": rules if name == "padded" else WINDOW | rules}
            for name, rules in FEEDS.items()
        },
    }
    with running_broker(tree) as running, producing_here(running.producers, sources):
        yield running


@pytest.mark.parametrize(
    ("feed", "view"),
    [(feed, view) for feed in FEEDS for view in VIEWS
     if (view == "padded") == (feed == "padded") and (view in ("thd", "padded") or feed in ALL_VIEWS)],
)  # fmt: skip
def test_a_step_has_the_loss_and_gradients_of_its_samples_alone(
    broker: RunningBroker, alone: Alone, feed: str, view: str
) -> None:
    format, loss_of = VIEWS[view]
    with streampack.connect(broker.trainers, feed=feed, format=format, verify=True) as loader:
        assert_as_alone(loader, loss_of, alone)


@pytest.fixture(scope="module")
def unmasked() -> dict[str, Alone]:
    derived = [{"tokens": sample["tokens"], "row": sample["row"]} for sample in SAMPLES]
    sent = [{**sample, "labels": [-100 if t % 5 == 0 else t // 2 for t in sample["tokens"]]} for sample in derived]
    return {"derived": Alone(derived), "sent": Alone(sent)}


@pytest.mark.parametrize(
    ("labels", "view"), [("derived", view) for view in VIEWS if view != "padded"] + [("sent", "thd"), ("sent", "hf")]
)
def test_a_step_without_masks_or_with_labels_of_its_own_has_the_loss_of_its_samples_alone(
    unmasked: dict[str, Alone], labels: str, view: str
) -> None:
    alone, (format, loss_of) = unmasked[labels], VIEWS[view]
    fields = {"row": FIELDS["row"]} | ({"labels": {}} if labels == "sent" else {})
    with local(alone.samples, fields, format) as loader:
        assert_as_alone(loader, loss_of, alone)


def assert_as_alone(loader: Any, loss_of: Callable[[Tiny, Any, int], Tensor], alone: Alone) -> None:
    """Each step's loss and gradients, and that every sample was in one."""
    net, seen = Tiny(), []
    for step in loader.steps():
        of = [row for batch in step for row in batch.row.tolist()]
        assert step.num_loss_tokens == learned(alone.samples[row] for row in of)
        total = 0.0
        for batch in step:
            loss = loss_of(net, batch, step.num_loss_tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        assert_same(found(net, total), alone.step(of))
        seen += of
    assert sorted(seen) == list(range(len(alone.samples)))


def test_the_packs_have_what_could_go_wrong(broker: RunningBroker) -> None:
    """Alignment padding, tails, empty packs, packs without a loss, samples of one token and of the whole budget."""
    seen = {}
    for feed in ALL_VIEWS:
        with streampack.connect(broker.trainers, feed=feed, format="thd") as loader:
            seen[feed] = list(loader)
    tails = {feed: sum(0 < p.num_samples < p.num_segments for p in packs) for feed, packs in seen.items()}
    empty = {feed: sum(p.num_samples == 0 for p in packs) for feed, packs in seen.items()}
    assert min(tails.values()) > 0
    assert min(empty["exact_fill"], empty["batches"]) > 0
    for feed in ("aligned", "batches"):
        assert any(int(p.cu_seqlens[n]) < int(p.cu_seqlens_padded[n]) for p in seen[feed] if (n := p.num_samples))
    lengths = torch.cat([p.cu_seqlens.diff()[: p.num_samples] for p in seen["exact_fill"]])
    assert {1, LONGEST} <= set(lengths.tolist())
    assert any(p.num_samples and not p.num_loss_tokens for packs in seen.values() for p in packs)


def local(samples: Sequence[dict[str, Any]], fields: dict[str, Any] = FIELDS, format: str = "thd") -> Any:
    return streampack.local(
        samples, budget=64, packs=4, align=4, tokens_key="tokens", fields=fields, format=format, verify=True
    )


def packs_of(samples: list[dict[str, Any]]) -> list[Any]:
    with local(samples) as loader:
        return list(loader)


def slots(pack: Any) -> list[slice]:
    """Where the real tokens of each sample lie."""
    starts, lengths = pack.cu_seqlens_padded.tolist(), pack.cu_seqlens.diff().tolist()
    return [slice(starts[i], starts[i] + lengths[i]) for i in range(pack.num_samples)]


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_sample_that_changes_leaves_the_outputs_of_all_others_bit_identical(attention: str) -> None:
    """One sample of each pack has other tokens in the source; what is compared went through the broker both times."""
    net, before = Tiny(), packs_of(SAMPLES)
    shared = [pack for pack in before if pack.num_samples > 1]
    changed = {int(pack.row[pack.num_samples // 2]) for pack in shared}
    after = packs_of([{**s, "tokens": [1 + t % 7 for t in s["tokens"]]} if s["row"] in changed else s for s in SAMPLES])
    others = 0
    for pack, other in zip(before, after, strict=True):
        assert torch.equal(pack.row, other.row)
        with torch.no_grad():
            got, expected = (net(p.input_ids, p.position_ids, ATTENTIONS[attention](p)) for p in (other, pack))
        for row, slot in zip(pack.row.tolist(), slots(pack), strict=True):
            assert torch.equal(got[slot], expected[slot]) == (row not in changed), row
            assert torch.equal(other.labels[slot], pack.labels[slot]) or row in changed
            others += row not in changed
    assert len(changed) > 5
    assert others > 40


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_no_gradient_of_a_samples_outputs_reaches_another(attention: str) -> None:
    """With respect to the embeddings: exactly zero at other samples, at padding and at the tail."""
    net, pairs = Tiny(), 0
    for pack in packs_of(SAMPLES):
        embedded = net.embedding(pack.input_ids).detach().requires_grad_()
        outputs = net.of_embedded(embedded, pack.position_ids, ATTENTIONS[attention](pack))
        for slot in slots(pack):
            (gradient,) = torch.autograd.grad(outputs[slot].square().sum(), embedded, retain_graph=True)
            assert gradient[slot].count_nonzero() == gradient[slot].numel()
            assert gradient.count_nonzero() == gradient[slot].count_nonzero()
            pairs += pack.num_segments - 1
    assert pairs > 100
