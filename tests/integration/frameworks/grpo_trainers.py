"""Runs of TRL's GRPOTrainer on a small model, with and without streampack's micro-batches.

``python grpo_trainers.py FOLDER`` is one of several ranks, as under torchrun. It writes the runs of ``ON_RANKS`` into
FOLDER, as JSON.
"""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from streampack.integrations import trl_grpo

VOCAB, EOS, PAD = 64, 0, 1
ON_RANKS: list[dict[str, Any]] = [
    {"loss_type": "grpo", "beta": 0.1},
    {"loss_type": "dapo", "steps_per_generation": 8},
]


@dataclass
class Run:
    """A run: loss of each step, change of all weights, and rows and tokens of the micro-batches that it computed."""

    losses: list[float]
    change: list[float]
    shapes: list[tuple[int, int]] = field(default_factory=list)
    rollouts: list[list[int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens that were computed, with padding."""
        return sum(rows * length for rows, length in self.shapes)


def model_in(folder: Path) -> Path:
    """A folder with a small model that is saved there: TRL reads its reference model from it."""
    if not (folder / "model").exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=256, eos_token_id=EOS, pad_token_id=PAD, bos_token_id=None,
        )  # fmt: skip
        LlamaForCausalLM(config).double().save_pretrained(folder / "model")
    return folder / "model"


def trainer_of(folder: Path, model: Any = None, **settings: Any) -> Any:
    """A trainer whose rollouts have a long tail of lengths; a third of them is cut, and tools wrote some tokens."""
    calls = 0

    def generate(prompts: list[str], trainer: Any) -> dict[str, Any]:
        nonlocal calls
        draw = random.Random(1000 * trainer.accelerator.process_index + calls)
        calls += 1
        answers = [[draw.randrange(2, VOCAB) for _ in range(1 + int(draw.random() ** 3 * 40))] for _ in prompts]
        whole = [[*answer, EOS] if draw.random() < 0.7 else answer for answer in answers]
        tools = [[int(draw.random() < 0.9) for _ in answer] for answer in whole]
        prompt_ids = [[int(word) for word in prompt.split()] for prompt in prompts]
        sampled = [[-5 * draw.random() for _ in answer] for answer in whole] if trainer.use_vllm else None
        return {"prompt_ids": prompt_ids, "completion_ids": whole, "logprobs": sampled, "env_mask": tools}

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(answer) % 7 + len(answer) / 10 for answer in completion_ids]

    draw = random.Random(5)
    prompts = [" ".join(str(draw.randrange(2, VOCAB)) for _ in range(draw.randrange(2, 12))) for _ in range(32)]
    defaults = {
        "max_steps": 3, "learning_rate": 1e-2, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_generations": 4, "logging_steps": 1,
        "max_completion_length": 64, "report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False,
        "save_strategy": "no", "gradient_checkpointing": False,
    }  # fmt: skip
    arguments = GRPOConfig(str(folder), **(defaults | settings))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE({"<eos>": EOS, "<pad>": PAD}, [])), eos_token="<eos>", pad_token="<pad>"
    )
    if model is None:
        model = LlamaForCausalLM.from_pretrained(model_in(folder), dtype=torch.float64)
    data = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    trainer = GRPOTrainer(
        model, reward, arguments, train_dataset=data, processing_class=tokenizer, rollout_func=generate
    )
    trainer.remove_callback(PrinterCallback)
    if "vllm_importance_sampling_mode" in settings:  # as with vLLM, which gives the log-probs of its samples
        trainer.use_vllm, trainer._last_loaded_step = True, -1
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    return trainer


def trained(trainer: Any) -> Run:
    """The run of a trainer to its end."""
    run, compute_loss = Run([], []), trainer.compute_loss

    def noting(model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        rows, length = inputs["completion_ids"].shape
        run.shapes.append((rows, length + inputs["prompt_ids"].shape[1]))
        kept = inputs["completion_mask"].bool()
        run.rollouts += [ids[mask].tolist() for ids, mask in zip(inputs["completion_ids"], kept, strict=True)]
        return compute_loss(model, inputs, *rest, **more)

    trainer.compute_loss = noting
    before = torch.cat([each.detach().flatten().clone() for each in trainer.model.parameters()])
    trainer.train()
    after = torch.cat([each.detach().flatten() for each in trainer.model.parameters()])
    run.change = (after - before).tolist()
    run.losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return run


def both(folder: Path, **settings: Any) -> tuple[Run, Run]:
    """A run of TRL alone, and one with streampack's micro-batches, of the same rollouts."""
    theirs = trained(trainer_of(folder, **settings))
    trainer = trainer_of(folder, **settings)
    trl_grpo.install(trainer)
    trl_grpo.install(trainer)  # changes nothing
    return theirs, trained(trainer)


if __name__ == "__main__":
    torch.set_num_threads(1)
    runs = [[vars(run) for run in both(Path(sys.argv[1]), **settings)] for settings in ON_RANKS]
    (Path(sys.argv[1]) / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(runs))
    torch.distributed.destroy_process_group()
