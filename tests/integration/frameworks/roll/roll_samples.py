"""Samples of 20 steps of an RL run, a tiny model of Hugging Face, and ROLL's loss of a step in one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

SEQUENCE, SAMPLES, STEPS, VOCABULARY, KL = 64, 16, 20, 64, 0.1
TRAIN_TOKENS, TRAIN_ROUND, INFER_TOKENS, INFER_ROUND = 128, 16, 256, 32


@cache
def rows() -> list[dict[str, Any]]:
    """The samples in the order of a file: a prompt of 4 tokens, and a response of 4 to 60."""
    draw = np.random.default_rng(7)
    found = []
    for _ in range(SAMPLES * STEPS):
        size = 8 + int(draw.random() ** 2 * (SEQUENCE - 7))
        found.append(
            {
                "tokens": draw.integers(1, VOCABULARY, size).tolist(),
                "loss_mask": [0] * 4 + [1] * (size - 4),
                "advantages": draw.normal(size=size).astype(np.float32).tolist(),
                "ref_log_probs": (-4 + draw.normal(size=size) / 4).astype(np.float32).tolist(),
            }
        )
    return found


def rules(padded: bool) -> dict[str, Any]:
    """The rules with which a feed serves what ROLL's configuration asks for."""
    align = {"pack": TRAIN_ROUND} if padded else {"sample": 16}
    return {"budget": TRAIN_TOKENS, "padded": padded, "step": {"samples": SAMPLES}, "align": align}


def settings(padded: bool) -> dict[str, Any]:
    """The broker's settings. The producer would leave at the end of a pass, and more runs begin at 0."""
    field = {"dtype": "float32", "align": "target"}
    return {
        "rules": rules(padded), "streams": {"rollouts": {"partitions": 1, "passes": 3}},
        "fields": {"loss_mask": {}, "advantages": field, "ref_log_probs": field},
    }  # fmt: skip


def model() -> torch.nn.Module:
    """A tiny Llama in float64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    llama: torch.nn.Module = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=1, **sizes))
    return llama.double()


def one_process() -> list[float]:
    """The loss of each step, from one sample after another without padding, and an update with Adam."""
    llama, samples, losses = model(), rows(), []
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-2, weight_decay=0.0)
    for first in range(0, len(samples), SAMPLES):
        losses.append(sum(_backward(llama, sample) for sample in samples[first : first + SAMPLES]))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _backward(llama: torch.nn.Module, sample: dict[str, Any]) -> float:
    """A sample's part of the loss: PPO with old log-probs of this model, and the KL term k3."""
    ids, mask = torch.tensor(sample["tokens"])[None], torch.tensor(sample["loss_mask"][1:]).double()
    columns = {name: torch.tensor(sample[name][1:], dtype=torch.float64) for name in ("advantages", "ref_log_probs")}
    scores = llama(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    log_probs = scores.gather(-1, ids[0, 1:, None])[:, 0]
    gained = (log_probs - log_probs.detach()).exp() * columns["advantages"]
    drift = columns["ref_log_probs"] - log_probs
    of_tokens = -gained + KL * (drift.exp() - drift - 1)
    loss = (of_tokens * mask).sum() / mask.sum() / SAMPLES
    loss.backward()
    return float(loss.detach())
