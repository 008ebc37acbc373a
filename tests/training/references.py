"""What one would compute by hand."""

from __future__ import annotations

import torch


def attention_by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, window: int | None
) -> torch.Tensor:
    """Of one sample, [n, H, D]: softmax of what a token may see."""
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    places = torch.arange(len(q), device=q.device)
    back = places[:, None] - places
    seen = (back >= 0) & (back < (window or len(q)))
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
