"""The mixin over transformers' Trainer and TRL's SFTTrainer: losses, gradients, evaluations, resuming, what is refused.

As processes that are killed: ``tests/integration/test_frameworks_hf.py`` and ``test_frameworks_trl.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from torch.nn.functional import cross_entropy
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

import streampack
from streampack.errors import MeshError, StateError, UserError
from streampack.integrations.hf import PackedTrainerMixin

VOCABULARY, BUDGET = 97, 64


class PackedTrainer(PackedTrainerMixin, Trainer):
    pass


class PackedSFTTrainer(PackedTrainerMixin, SFTTrainer):
    pass


def rows(count: int = 60) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    lengths = np.minimum(draw.geometric(0.08, count), BUDGET).tolist()
    return [{"tokens": draw.integers(1, VOCABULARY, length).tolist()} for length in lengths]


def local(given: list[dict[str, Any]] | None = None, **settings: Any) -> Any:
    own = {"budget": BUDGET, "packs": 3, "format": "hf", "tokens_key": "tokens", "shuffle": False}
    return streampack.local(given or rows(), **{**own, **settings})


def llama(**config: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": BUDGET,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**settings | config))


def arguments(folder: Path, kind: Any = TrainingArguments, **given: Any) -> Any:
    settings: dict[str, Any] = {
        "max_steps": 4, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "use_cpu": True, "learning_rate": 1e-2, "lr_scheduler_type": "constant",
    }  # fmt: skip
    return kind(
        str(folder),
        **settings | ({"bf16": False, "activation_checkpointing": False} if kind is SFTConfig else {}) | given,
    )


def made(folder: Path, loader: Any, *, sft: bool = False, model: Any = None, **given: Any) -> Any:
    """A trainer of a tiny model; what is no argument of trainers is one of TrainingArguments."""
    own: dict[str, Any] = {
        key: given.pop(key) for key in ("eval_loader", "compute_loss_func", "callbacks") if key in given
    }
    if sft:
        own["processing_class"] = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    kind, settings = (PackedSFTTrainer, SFTConfig) if sft else (PackedTrainer, TrainingArguments)
    trainer = kind(llama() if model is None else model, arguments(folder, settings, **given), loader=loader, **own)
    trainer.remove_callback(PrinterCallback)
    return trainer


def summed(model: Any, samples: list[list[int]]) -> torch.Tensor:
    """The loss of the samples, one by one."""
    each = [torch.tensor([tokens]) for tokens in samples if len(tokens) > 1]
    losses = [cross_entropy(model(ids, use_cache=False).logits[0, :-1], ids[0, 1:], reduction="sum") for ids in each]
    found: torch.Tensor = torch.stack(losses).sum()
    return found


class Compare(TrainerCallback):
    """Before each update: its gradients are those of the step's samples, one by one, over its tokens."""

    def __init__(self, within: float) -> None:
        self.within, self.losses, self.sizes = within, list[float](), list[int]()

    def on_pre_optimizer_step(self, *_: Any, model: Any, train_dataloader: Any, **kwargs: Any) -> None:
        step, given = train_dataloader.step, rows()
        samples = [given[index]["tokens"] for _, index, _ in step.sample_ids.tolist()]
        names, parameters = zip(*model.named_parameters(), strict=True)
        loss = summed(model, samples) / step.num_loss_tokens
        expected = torch.autograd.grad(loss, parameters)
        for name, parameter, gradient in zip(names, parameters, expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=self.within, atol=self.within, msg=name)
        self.losses.append(loss.item())
        self.sizes.append(len(step))


def of_double(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    """transformers' own has its logits in float32."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    found: torch.Tensor = cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch
    return found


BATCHES: dict[str, dict[str, Any]] = {
    "packs": {},
    "samples": {"samples": 20},
    "padded": {"samples": 20, "padded": True},
}


@pytest.mark.parametrize("kind", list(BATCHES))
def test_an_update_has_the_loss_and_gradients_of_its_samples(tmp_path: Path, kind: str) -> None:
    compare = Compare(1e-9)
    with local(**BATCHES[kind]) as loader:
        model = llama().double()
        trainer = made(
            tmp_path,
            loader,
            model=model,
            callbacks=[compare],
            compute_loss_func=of_double,
            max_grad_norm=0,
            max_steps=3,
        )
        trainer.train()
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert logged == pytest.approx(compare.losses, rel=1e-6)  # the Trainer adds them up in float32
    assert len(logged) == 3
    assert len(set(compare.sizes)) == (1 if kind == "packs" else 2), "so many micro-batches as a step has"


@pytest.mark.parametrize("format", ["hf", "hf_shifted"])
@pytest.mark.parametrize("sft", [False, True])
def test_trainers_own_losses_are_those_of_the_samples(tmp_path: Path, sft: bool, format: str) -> None:
    compare = Compare(1e-5)
    with local(format=format, samples=20) as loader:
        trainer = made(tmp_path, loader, sft=sft, callbacks=[compare], max_grad_norm=0, max_steps=3, learning_rate=1e-3)
        trainer.model.config.use_cache = True  # as parts of a configuration have it that the Trainer does not know
        trainer.train()
    logged = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["loss"] for line in logged] == pytest.approx(compare.losses, rel=1e-5)
    assert all(0.5 < line["packing_efficiency"] <= 1 for line in logged)


@pytest.mark.parametrize("sft", [False, True])
def test_an_evaluation_is_by_token_over_the_whole_feed_each_time(tmp_path: Path, sft: bool) -> None:
    with local() as loader, local(rows(20), packs=1) as valid:
        trainer = made(tmp_path, loader, sft=sft, eval_loader=valid, eval_strategy="steps", eval_steps=2)
        before, again = trainer.evaluate(), trainer.evaluate()
        with torch.no_grad():
            alone = [row["tokens"] for row in rows(20)]
            expected = float(summed(trainer.model.eval(), alone)) / sum(len(tokens) - 1 for tokens in alone)
        trainer.train()
    assert before["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert again["eval_loss"] == before["eval_loss"]
    found = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line][-2:]
    assert before["eval_loss"] > found[0] > found[1]


def test_feeds_for_evaluation_have_names_and_metrics_their_logits(tmp_path: Path) -> None:
    shapes = []

    def metrics(found: Any) -> dict[str, float]:
        shapes.append((found.predictions.shape, found.label_ids.shape))
        return {"count": len(found.predictions)}

    with local() as loader, local(rows(9), packs=1) as easy, local(rows(20), packs=1) as hard:
        trainer = made(tmp_path, loader, eval_loader={"easy": easy, "hard": hard})
        trainer.compute_metrics = metrics
        found = trainer.evaluate()
    assert found["eval_easy_loss"] != found["eval_hard_loss"]
    assert found["eval_hard_count"] > found["eval_easy_count"]
    assert shapes == [
        ((n, BUDGET, VOCABULARY), (n, BUDGET)) for n in (found["eval_easy_count"], found["eval_hard_count"])
    ]


class Seen(TrainerCallback):
    """The digests of the steps that are trained, and where a checkpoint would have gone on, before and after each."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        self.places: list[int] = []

    def on_pre_optimizer_step(self, *_: Any, train_dataloader: Any, **kwargs: Any) -> None:
        self.digests.append(train_dataloader.step.digest)
        self.places.append(train_dataloader.state()["next_step"])

    def on_step_end(self, *_: Any, train_dataloader: Any, **kwargs: Any) -> None:
        self.places.append(train_dataloader.state()["next_step"])


def trained(folder: Path, max_steps: int, save_steps: int, resume: str | None = None) -> tuple[Seen, list[Any]]:
    seen = Seen()
    with local(rows(30)) as loader:
        trainer = made(
            folder, loader, callbacks=[seen], max_steps=max_steps, save_strategy="steps", save_steps=save_steps
        )
        trainer.train(resume_from_checkpoint=resume and str(folder / resume))
    return seen, trainer.state.log_history


def test_a_checkpoint_at_the_end_of_a_finite_feed_goes_on_with_the_feed_again(tmp_path: Path) -> None:
    with local(rows(30)) as loader:
        feed = [step.digest for step in loader.steps()]
    count = len(feed)
    whole, log = trained(tmp_path, 2 * count + 1, save_steps=count)
    assert whole.digests == [*feed, *feed, feed[0]]
    rest, rest_log = trained(tmp_path, 2 * count + 1, save_steps=count, resume=f"checkpoint-{count}")
    assert rest.digests == [*feed, feed[0]]
    assert [line for line in rest_log if "loss" in line] == [line for line in log if "loss" in line]
    assert whole.places[: 2 * count] == [place for k in range(count) for place in (k, k + 1)]
    saved = json.loads((tmp_path / f"checkpoint-{count}" / "trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["LoaderState"]["attributes"]["saved"]["next_step"] == count


def test_training_again_begins_where_it_began(tmp_path: Path) -> None:
    seen = Seen()
    with local(repeat=True) as loader:
        trainer = made(tmp_path, loader, callbacks=[seen], max_steps=3)
        trainer.train()
        trainer.train()
    assert seen.digests[:3] == seen.digests[3:]


def test_callbacks_that_are_restored_from_a_checkpoint_leave_the_loader_where_it_belongs(tmp_path: Path) -> None:
    seen = Seen()
    with local() as loader:
        made(tmp_path, loader, max_steps=2, save_strategy="steps", save_steps=2).train()
    with local() as loader:
        trainer = made(
            tmp_path, loader, max_steps=3, callbacks=[seen], save_strategy="steps", save_steps=3,
            restore_callback_states_from_checkpoint=True,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=True)
    assert seen.places == [2, 3]
    saved = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["LoaderState"]["attributes"]["saved"]["next_step"] == 3


@pytest.fixture(scope="module")
def loader() -> Iterator[Any]:
    with local() as found:
        yield found


def test_a_checkpoint_of_another_dataset_is_refused(tmp_path: Path, loader: Any) -> None:
    made(tmp_path, loader, max_steps=1, save_strategy="steps", save_steps=1).train()
    path = tmp_path / "checkpoint-1" / "trainer_state.json"
    saved = json.loads(path.read_text())
    del saved["stateful_callbacks"]["LoaderState"]
    path.write_text(json.dumps(saved))
    with pytest.raises(StateError, match="1 updates without a loader's state"):
        made(tmp_path, loader, max_steps=2).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"max_steps": -1}, "got max_steps=-1, expected max_steps of at least 1"),
        ({"gradient_accumulation_steps": 4}, "got gradient_accumulation_steps=4, expected 1"),
        ({"auto_find_batch_size": True}, "got auto_find_batch_size=True"),
        ({"train_sampling_strategy": "group_by_length"}, "got train_sampling_strategy='group_by_length'"),
        ({"use_cache": True}, "got use_cache=True, expected False"),
        ({"sft": True, "packing": True}, "got packing=True, expected False: the broker packs"),
        ({"sft": True, "padding_free": True}, "got padding_free=True"),
        ({"sft": True, "completion_only_loss": True}, "got completion_only_loss=True.*loss_mask"),
    ],
)
def test_settings_that_packs_cannot_have_are_refused(
    tmp_path: Path, loader: Any, setting: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        made(tmp_path, loader, **setting)


def test_loaders_that_cannot_be_are_refused(tmp_path: Path, loader: Any) -> None:
    with local(format="thd") as other, pytest.raises(UserError, match="got a loader with format='thd', expected 'hf'"):
        made(tmp_path, other)
    with local(repeat=True) as endless, pytest.raises(UserError, match="an eval_loader that never ends"):
        made(tmp_path, loader, eval_loader=endless)
    with pytest.raises(UserError, match="one loader for training and evaluation"):
        made(tmp_path, loader, eval_loader=loader)
    with pytest.raises(UserError, match="got train_dataset beside a loader"):
        PackedTrainer(llama(), arguments(tmp_path), loader=loader, train_dataset=[1])
    positions = {"position_ids": {"dtype": "int32"}}
    supplied = [row | {"position_ids": list(range(len(row["tokens"])))} for row in rows()]
    with local(supplied, fields=positions) as own, pytest.raises(UserError, match="got declared position_ids with"):
        made(tmp_path, own)


def test_trainers_that_lose_the_denominator_are_refused(tmp_path: Path, loader: Any) -> None:
    model = llama()
    model.accepts_loss_kwargs = False
    with pytest.raises(UserError, match="got LlamaForCausalLM, to which this Trainer passes no num_items_in_batch"):
        made(tmp_path, loader, model=model)
    with pytest.raises(UserError, match=r"got TrainingArguments for an SFTTrainer, expected trl\.SFTConfig"):
        PackedSFTTrainer(llama(), arguments(tmp_path), loader=loader)


def tiny(kind: str, attention: str, **config: Any) -> Any:
    """A model of that type; names of sizes differ."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "n_embd": 32,
        "num_key_value_heads": 2, "head_dim": 8, "n_layer": 2, "n_head": 4, "intermediate_size": 32, "ffn_dim": 32,
        "num_local_experts": 4, "num_experts_per_tok": 2, "word_embed_proj_dim": 32, "max_position_embeddings": BUDGET,
    }  # fmt: skip
    known = CONFIG_MAPPING[kind]()
    given = {name: value for name, value in sizes.items() if hasattr(known, name)}
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**given | config), attn_implementation=attention)


@pytest.mark.parametrize(
    ("kind", "attention", "apart"),
    [
        ("llama", "eager", True),
        ("qwen3_moe", "sdpa", True),
        ("gemma3_text", "sdpa", True),
        ("gpt2", "sdpa", True),
        ("opt", "sdpa", False),
        ("bloom", "eager", False),
        ("gpt_oss", "eager", False),
        ("mamba", "eager", False),
    ],
)
def test_models_in_which_samples_see_each_other_are_refused(
    tmp_path: Path, loader: Any, kind: str, attention: str, apart: bool
) -> None:
    """And those alone: what changes a sample's logits is tried beside it."""
    model = tiny(kind, attention).eval()
    positions = torch.tensor([[*range(5), *range(6)]])
    ids = torch.arange(1, 12)[None]
    other = torch.cat([ids[:, :5] + 20, ids[:, 5:]], dim=1)
    with torch.no_grad():
        one, two = (model(input_ids=x, position_ids=positions, use_cache=False).logits[0, 5:] for x in (ids, other))
    assert torch.allclose(one, two, atol=1e-6) == apart  # experts get other shapes, and add in another order
    if apart:
        made(tmp_path, loader, model=model)
        assert all(parameter.grad is None for parameter in model.parameters())
    else:
        with pytest.raises(UserError, match=f"with attn_implementation='{attention}', in which samples of a pack see"):
            made(tmp_path, loader, model=model)


def test_models_of_padded_rows_may_be_any(tmp_path: Path) -> None:
    with local(samples=20, padded=True) as rows_of_samples:
        made(tmp_path, rows_of_samples, model=tiny("opt", "sdpa"), max_steps=1).train()


def test_a_trainer_whose_own_arguments_come_first_is_given_them_by_name(tmp_path: Path, loader: Any) -> None:
    class Own(Trainer):
        def __init__(self, settings: str, **given: Any) -> None:
            super().__init__(**given)
            self.settings = settings

    class PackedOwn(PackedTrainerMixin, Own):
        pass

    assert PackedOwn(llama(), arguments(tmp_path), loader=loader, settings="own").settings == "own"


def test_a_rank_that_reads_for_another_is_refused(tmp_path: Path, loader: Any) -> None:
    from streampack.integrations import hf_checks

    args = arguments(tmp_path)
    hf_checks._place(streampack.Mesh(), args, 1)
    with pytest.raises(MeshError, match=r"got a loader of dp=1/2 .* in process 0 of 1"):
        hf_checks._place(streampack.Mesh(dp=2, dp_rank=1), args, 1)
