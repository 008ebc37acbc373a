"""Rollouts that a number determines, the model that learns from them, and the settings of both sides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

VOCAB, STEPS, SAMPLES, DP = 64, 20, 16, 2
BUDGET, FORWARD_BUDGET, MULTIPLE, LR, KL = 64, 128, 8, 0.1, 0.05
MODES = ("packs", "padded")
PER_TOKEN = ("advantages", "reference_policy_logprobs", "generation_logprobs")
GOLDEN = Path(__file__).parent / "golden.json"
ROUND: dict[str, dict[str, int]] = {"packs": {}, "padded": {"round": MULTIPLE}}
DYNAMIC = {"input_key": "input_ids", "input_lengths_key": "input_lengths", "sequence_length_round": MULTIPLE}
PACKING = {
    "algorithm": "modified_first_fit_decreasing", "input_key": "input_ids", "input_lengths_key": "input_lengths",
    "sequence_length_pad_multiple": MULTIPLE,
}  # fmt: skip


def rollout(number: int) -> dict[str, Any]:
    """Return rollout ``number``: its tokens, and values at the places of the tokens."""
    size = 3 + number * 7 % 29
    return {
        "tokens": [1 + (number * 31 + place * place * 17) % (VOCAB - 1) for place in range(size)],
        "loss_mask": [place >= 2 for place in range(size)],
        "advantages": [(number % 5 - 2) / 2 for _ in range(size)],
        "generation_logprobs": [-3.0] * size,
        "reference_policy_logprobs": [-4 - (place % 3) / 4 for place in range(size)],
        "number": number,
    }


def settings(mode: str) -> dict[str, Any]:
    """Return the settings of a broker that serves the micro-batches that NeMo-RL would make."""
    own: dict[str, Any] = (
        {"padded": True}
        if mode == "padded"
        else {
            "packer": "modified_first_fit_decreasing",
            "leftovers": "emptiest",
            "balance": {"kind": "none", "order": "packer"},
            "shape": "exact",
        }
    )
    per_token = {"dtype": "float32", "align": "target"}
    return {
        "tokens": "uint16", "streams": {"rollouts": {}},
        "rules": {
            "budget": BUDGET, "step": {"samples": SAMPLES}, "align": {"sample": MULTIPLE, "pack": MULTIPLE}, **own,
        },
        "fields": {
            "loss_mask": {}, **dict.fromkeys(PER_TOKEN, per_token),
            "number": {"dtype": "int64", "axis": "sample"},
        },
    }  # fmt: skip


def batch_of(numbers: list[int]) -> dict[str, torch.Tensor]:
    """Return rollouts as the right-padded rows that NeMo-RL's driver has."""
    samples = [rollout(number) for number in numbers]
    lengths = [len(sample["tokens"]) for sample in samples]
    batch: dict[str, torch.Tensor] = {"input_lengths": torch.tensor(lengths)}
    batch["sample_mask"] = torch.ones(len(samples), dtype=torch.float)
    names = {"tokens": "input_ids", "loss_mask": "token_mask"} | {name: name for name in PER_TOKEN}
    width = -(-max(lengths) // MULTIPLE) * MULTIPLE  # make_sequence_length_divisible_by
    for ours, name in names.items():
        rows = torch.zeros(len(samples), width, dtype=torch.int64 if ours == "tokens" else torch.float)
        for row, sample in zip(rows, samples, strict=True):
            row[: len(sample[ours])] = torch.tensor(sample[ours], dtype=row.dtype)
        batch[name] = rows
    return batch


def micro_batches(lengths: torch.Tensor, bounds: list[list[int]], widths: list[int], mode: str) -> list[Any]:
    """Return the lengths of the rows of each micro-batch, or for padded ones the shape [B, S]."""
    if mode == "padded":
        return [[end - begin, width] for (begin, end), width in zip(bounds, widths, strict=True)]
    return [lengths[begin:end].tolist() for begin, end in bounds]


def results_of(path: Path) -> dict[str, Any]:
    """Return the results of a run that is stored at ``path``."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def model() -> Any:
    """Return a small Llama whose weights do not depend on a random generator."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, pad_token_id=0,
        attn_implementation="sdpa",
    )  # fmt: skip
    made = LlamaForCausalLM(config).double()
    with torch.no_grad():
        for number, (name, parameter) in enumerate(made.named_parameters()):
            if "norm" not in name:
                places = torch.arange(parameter.numel(), dtype=torch.float64)
                parameter.copy_((torch.sin(places * (1.7 + number / 10) + number) / 4).view(parameter.shape))
    return made


def batching(mode: str) -> dict[str, Any]:
    """Return the keys of NeMo-RL's ``policy`` that choose how micro-batches are made."""
    packing = {"train_mb_tokens": BUDGET, "logprob_mb_tokens": FORWARD_BUDGET}
    return {
        "dynamic_batching": {"enabled": mode == "padded", "sequence_length_round": MULTIPLE, **packing},
        "sequence_packing": {"enabled": mode == "packs", "algorithm": PACKING["algorithm"], **packing},
    }


def policy_config(path: str) -> dict[str, Any]:
    """Return the ``policy`` of a NeMo-RL configuration for the model saved at ``path``."""
    return {
        "model_name": path, "precision": "float32", "train_global_batch_size": SAMPLES, "train_micro_batch_size": 1,
        "logprob_batch_size": 1, "max_grad_norm": None, "offload_optimizer_for_logprob": False, "generation": None,
        "optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": LR}},
        "dtensor_cfg": {
            "cpu_offload": False, "tensor_parallel_size": 1, "context_parallel_size": 1, "sequence_parallel": False,
            "activation_checkpointing": False, "custom_parallel_plan": None,
        },
        **batching("padded"),
    }  # fmt: skip
