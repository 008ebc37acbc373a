"""Trainers of Hugging Face, tiny models for them, and what tests look at while they train.

Apart from the tests, which import it where they run: whoever only collects them need not wait for the frameworks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
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
        key: given.pop(key)
        for key in ("eval_loader", "compute_loss_func", "callbacks", "steps_per_epoch")
        if key in given
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
    """Transformers' own has its logits in float32."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    found: torch.Tensor = cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch
    return found


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
