"""Samples of 50 steps, the rules of their feed, and a number that identifies a micro-batch."""

from __future__ import annotations

from random import Random
from typing import Any
from zlib import crc32

STEPS = 50
PACKS = 4
BUDGET = 64
SETTINGS: dict[str, Any] = {
    "rules": {"budget": BUDGET, "window": {"samples": 32}, "step": {"packs": PACKS}},
    "streams": {"data": {"passes": 3}},
}


def rows() -> list[dict[str, Any]]:
    """400 samples of 2 to 60 tokens below 64; a token is the one before plus a number of the sample."""
    draw = Random(0)
    shapes = [(draw.randint(2, 60), draw.randrange(64), draw.randrange(1, 4)) for _ in range(400)]
    return [{"tokens": [(start + step * i) % 64 for i in range(length)]} for length, start, step in shapes]


def number_of(batch: Any) -> int:
    """A number of the tokens, labels, boundaries, positions and counted labels of a micro-batch."""
    names = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens_q")
    return crc32(b"".join(batch[name].contiguous().numpy().tobytes() for name in names))
