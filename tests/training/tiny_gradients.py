"""A tiny model, and the gradients of one step."""

from __future__ import annotations

import torch

import streampack


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(257, 8), torch.nn.Linear(8, 257))


def gradients(net: torch.nn.Module, step: streampack.Step, ranks: int) -> list[float]:
    """Of one step: the norm of each parameter's."""
    net.zero_grad()
    for batch in step:
        loss = torch.nn.functional.cross_entropy(net(batch.input_ids), batch.labels, reduction="sum")
        (loss / step.num_loss_tokens * ranks).backward()  # type: ignore[no-untyped-call]
    return [float(each.grad.norm()) for each in net.parameters() if each.grad is not None]
