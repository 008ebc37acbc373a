"""The hf views against transformers itself: its collator field by field, its models' losses to 1e-5."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import streampack

if TYPE_CHECKING:  # seconds, which collecting need not take
    from transformers import LlamaForCausalLM

VOCABULARY = 97
IGNORED = -100
BUDGET = 64


def rows(count: int, seed: int, masked: bool = False) -> list[dict[str, Any]]:
    draw = np.random.default_rng(seed)
    lengths = np.minimum(draw.geometric(0.08, count), BUDGET).tolist()
    found = [{"tokens": draw.integers(1, VOCABULARY, length).tolist()} for length in lengths]
    return [{**row, "loss_mask": draw.integers(0, 2, len(row["tokens"])).tolist()} if masked else row for row in found]


def batches(samples: list[dict[str, Any]], /, format: str, **settings: Any) -> Iterator[Any]:
    """Packs of the samples through a real broker, every invariant asserted."""
    arguments: dict[str, Any] = {"budget": BUDGET, "packs": 4, "shuffle": False, "tokens_key": "tokens", "verify": True}
    with streampack.local(samples, **{**arguments, **settings}, format=format) as loader:
        yield from loader


def samples_of(batch: Any, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A pack's samples, as the rows were: tokens, and labels with those masked out ignored, unshifted."""
    found = []
    for _, index, _ in batch.sample_ids.tolist():
        tokens, mask = samples[index]["tokens"], samples[index].get("loss_mask")
        labels = [t if keep else IGNORED for t, keep in zip(tokens, mask or [1] * len(tokens), strict=True)]
        found.append({"input_ids": tokens, "labels": labels})
    return found


def test_200_packs_are_what_the_flattening_collator_returns() -> None:
    from transformers import DataCollatorWithFlattening

    samples = rows(1100, seed=1)
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    full = padded = 0
    for batch in batches(samples, "hf"):
        features = [{"input_ids": each["input_ids"]} for each in samples_of(batch, samples)]
        tail = BUDGET - sum(len(each["input_ids"]) for each in features)
        if tail:  # one more sequence, of zeros that no label speaks of: positions and boundaries are the collator's
            features = [{**each, "labels": each["input_ids"]} for each in features]
            features.append({"input_ids": [0] * tail, "labels": [IGNORED] * tail})
        expected = collate(features)
        assert list(batch) == list(expected)
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert batch[name].dtype == value.dtype, name
                assert torch.equal(batch[name], value), name
            else:
                assert (type(batch[name]), batch[name]) == (type(value), value), name
        full, padded = full + (not tail), padded + bool(tail)
    assert full >= 200
    assert padded > 0


def test_padded_rows_are_what_the_padding_collator_returns() -> None:
    """But for labels of first tokens, which no model's loss looks at, and positions, which the collator leaves out."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast

    samples = rows(60, seed=1, masked=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"pad": 0})), pad_token="pad")
    collate = DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=4)
    settings: dict[str, Any] = {"samples": 20, "padded": True, "align": 4, "fields": {"loss_mask": {}}}
    seen = list(batches(samples, "hf", **settings))
    for batch in seen:
        expected = collate(samples_of(batch, samples))
        assert set(batch) == {*expected, "position_ids"}
        for name, value in expected.items():
            assert batch[name].dtype == value.dtype, name
            begin = 1 if name == "labels" else 0
            assert torch.equal(batch[name][:, begin:], value[:, begin:]), name
    assert sum(batch.num_samples for batch in seen) == 60


@pytest.fixture(scope="module", params=["eager", "sdpa"])
def model(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "attn_implementation": request.param,  # noqa: E501
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**shape))


def loss_and_gradient(model: LlamaForCausalLM, losses: Any) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    total = 0.0
    for loss in losses:
        loss.backward()
        total += float(loss.detach())
    return total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("align", [1, 4])
@pytest.mark.parametrize("format", ["hf", "hf_shifted"])
def test_a_packed_loss_is_the_samples_own(model: LlamaForCausalLM, format: str, align: int, masked: bool) -> None:
    """Loss and gradients of whole packs, alignment and tail padding among them, equal those sample by sample."""
    samples = rows(60, seed=2, masked=masked)
    settings: dict[str, Any] = {"align": align, "fields": {"loss_mask": {"dtype": "uint8"}} if masked else {}}
    seen = list(batches(samples, format, **settings))
    count = sum(batch.num_loss_tokens for batch in seen)
    assert sum(batch.num_samples for batch in seen) == 60

    def alone(each: dict[str, Any]) -> Any:
        one = {name: torch.tensor([value]) for name, value in each.items()}
        return model(**one, use_cache=False, num_items_in_batch=count).loss

    each = [sample for batch in seen for sample in samples_of(batch, samples)]
    expected = loss_and_gradient(model, (alone(sample) for sample in each if len(sample["input_ids"]) > 1))
    got = loss_and_gradient(model, (model(**batch, use_cache=False, num_items_in_batch=count).loss for batch in seen))
    assert got[0] == pytest.approx(expected[0], abs=1e-5)
    assert torch.allclose(got[1], expected[1], atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # of flex attention without a compiler
@pytest.mark.parametrize("model", ["flex_attention"], indirect=True)
def test_a_model_takes_the_block_mask_of_its_batch(model: LlamaForCausalLM) -> None:
    samples = rows(20, seed=3)
    for batch in batches(samples, "hf", masks="flex"):
        with torch.no_grad():
            found = model(**batch, attention_mask=batch.block_mask, use_cache=False).logits
        model.set_attn_implementation("eager")
        pairs = zip(streampack.per_sample(batch.input_ids, batch), streampack.per_sample(found, batch), strict=True)
        for ids, logits in pairs:
            with torch.no_grad():
                assert torch.allclose(model(ids[None]).logits[0], logits, atol=1e-5)
        model.set_attn_implementation("flex_attention")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("format", ["hf", "hf_shifted", "padded"])
def test_a_padded_loss_is_the_samples_own(model: LlamaForCausalLM, format: str, masked: bool) -> None:
    """Loss and gradients of padded micro-batches, by the model or by hand, equal those sample by sample."""
    samples = rows(60, seed=2, masked=masked)
    fields = {"loss_mask": {"dtype": "uint8"}} if masked else {}
    seen = list(batches(samples, format, samples=20, padded=True, align=4, fields=fields))
    count = sum(batch.num_loss_tokens for batch in seen)
    assert sum(batch.num_samples for batch in seen) == 60
    assert len({batch.input_ids.shape for batch in seen}) > 5

    def alone(each: dict[str, Any]) -> Any:
        one = {name: torch.tensor([value]) for name, value in each.items()}
        return model(**one, use_cache=False, num_items_in_batch=count).loss

    def together(batch: Any) -> Any:
        if format != "padded":
            return model(**batch, use_cache=False, num_items_in_batch=count).loss
        logits = model(batch.input_ids, batch.attention_mask, use_cache=False).logits.flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, batch.labels.flatten(), reduction="sum") / count

    each = [sample for batch in seen for sample in samples_of(batch, samples)]
    expected = loss_and_gradient(model, (alone(sample) for sample in each if len(sample["input_ids"]) > 1))
    got = loss_and_gradient(model, (together(batch) for batch in seen))
    assert got[0] == pytest.approx(expected[0], abs=1e-5)
    assert torch.allclose(got[1], expected[1], atol=1e-5)


def test_the_packing_mask_is_what_makes_them_equal(model: LlamaForCausalLM) -> None:
    """Without the positions that say where samples begin, samples see each other and the loss is another.

    The call of the model refuses such positions, so it is told that it is checked already.
    """
    from streampack.views.isolation.hf_dependence import inside

    batch = next(iter(batches(rows(60, seed=2), "hf")))
    assert batch.num_samples > 1
    whole = torch.arange(BUDGET)[None]
    with torch.no_grad(), inside():
        apart = model(**batch, use_cache=False).loss
        together = model(**{**batch, "position_ids": whole}, use_cache=False).loss
    assert abs(float(apart - together)) > 1e-4
