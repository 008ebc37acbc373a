"""Seconds of an optimizer step of TRL's GRPOTrainer, alone and with ``integrations.trl_grpo``.

    python -m benchmarks.rl.grpo_step [--steps 4] [--turns 2] [--shorter 8] [--hidden 128] [--layers 4] [--json]

One rank has 64 rollouts in 8 micro-batches. Lengths are those of ``rl_frameworks``, divided by ``--shorter``. A Llama
with random weights learns them: in bfloat16 on a GPU if there is one, else in float32. Rollouts are drawn, not
generated, so a step is planning, forward, backward and update. Both ways take turns (A B, B A). The first step of each
run is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.rl.rl_frameworks import lengths_of
from streampack.integrations import trl_grpo

VOCAB, ROWS, MICRO_BATCHES, PROMPT = 1000, 8, 8, 500


class Clock(TrainerCallback):  # type: ignore[misc]
    """Notes the seconds of each optimizer step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(now() - self.began)


def now() -> float:
    """Seconds, when the GPU has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def run(arguments: argparse.Namespace, with_adapter: bool) -> tuple[list[float], float, list[float]]:
    """Seconds of the steps but the first, peak memory in GB, and the losses of all steps."""
    step = 0

    def rollouts(prompts: list[str], _: Any) -> dict[str, Any]:
        nonlocal step
        draw = np.random.default_rng(step)
        lengths = np.array(lengths_of(step)[: len(prompts)])
        step += 1
        answers = np.maximum((lengths - PROMPT) // arguments.shorter, 2)
        prompt_ids = [draw.integers(2, VOCAB, PROMPT // arguments.shorter).tolist() for _ in prompts]
        completion_ids = [draw.integers(2, VOCAB, size).tolist() for size in answers]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(ids[0] % 7) for ids in completion_ids]

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=arguments.hidden, intermediate_size=4 * arguments.hidden,
        num_hidden_layers=arguments.layers, num_attention_heads=arguments.hidden // 32,
        max_position_embeddings=32_768, eos_token_id=0, pad_token_id=1, bos_token_id=None,
    )  # fmt: skip
    gpu = torch.cuda.is_available()
    model = LlamaForCausalLM(config).to(torch.bfloat16 if gpu else torch.float32)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE({"<eos>": 0, "<pad>": 1}, [])), eos_token="<eos>", pad_token="<pad>"
    )
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = GRPOConfig(
            folder, max_steps=arguments.steps, per_device_train_batch_size=ROWS, num_generations=8, logging_steps=1,
            gradient_accumulation_steps=MICRO_BATCHES, max_completion_length=16_384, report_to="none", optim="sgd",
            disable_tqdm=True, bf16=gpu, use_cpu=not gpu, save_strategy="no", gradient_checkpointing=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model, reward, settings, train_dataset=Dataset.from_dict({"prompt": [""] * 512}),
            processing_class=tokenizer, rollout_func=rollouts, callbacks=[clock],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        if with_adapter:
            trl_grpo.install(trainer)
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    peak = torch.cuda.max_memory_allocated() / 1e9 if gpu else 0.0
    return clock.seconds[1:], peak, [each["loss"] for each in trainer.state.log_history if "loss" in each]


def main() -> None:
    """Print the figures of both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"steps": 4, "turns": 2, "shorter": 8, "hidden": 128, "layers": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {"trl": [], "adapter": []}
    found: dict[str, dict[str, Any]] = {}
    for turn in range(arguments.turns):
        for name in ("trl", "adapter") if turn % 2 == 0 else ("adapter", "trl"):
            spent, peak, losses = run(arguments, name == "adapter")
            seconds[name] += spent
            found[name] = {
                "seconds": statistics.median(seconds[name]), "least": min(seconds[name]), "most": max(seconds[name]),
                "steps": len(seconds[name]), "peak_gb": peak, "losses": losses,
            }  # fmt: skip
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} cores"
    if arguments.json:
        print(json.dumps({"machine": machine, **found}))
        return
    print(machine)
    for name, figures in found.items():
        print(f"{name:8}", "  ".join(f"{key} {value}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
