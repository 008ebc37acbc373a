"""A broker whose samples wait for late fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def late_settings(path: Path, **changes: Any) -> dict[str, Any]:
    sides = {side: f"ipc://{path}/{side}" for side in ("producers", "trainers")}
    return {
        "run": "late",
        "listen": {**sides, "http": "127.0.0.1:0"},
        "merge": "arrival",
        "state_dir": str(path / "state"),
        "rules": {"budget": 128, "window": {"samples": 16}, "step": {"packs": 2}},
        "streams": {"rollouts": {"pushed": True, "partitions": 1}},
        "fields": {
            "logprobs": {"dtype": "float32", "align": "target"},
            "advantages": {"dtype": "bfloat16", "align": "target", "late": True},
            "reward": {"dtype": "float64", "axis": "sample", "late": True},
        },
    } | changes


def rollout(number: int) -> dict[str, Any]:
    ids = np.random.default_rng(number).integers(1, 1000, 5 + number % 20)
    return {"input_ids": ids, "logprobs": np.full(len(ids), number, np.float32)}
