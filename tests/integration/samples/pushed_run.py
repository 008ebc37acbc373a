"""A broker for pushed samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import streampack

SAMPLES = 3


def pushed_settings(path: Path, **changes: Any) -> dict[str, Any]:
    """Return the settings of a run in ``path``. A broker that is started again listens where the first one did."""
    sides = {side: f"ipc://{path}/{side}" for side in ("producers", "trainers")}
    return {
        "run": "grpo",
        "listen": {**sides, "http": "127.0.0.1:0"},
        "merge": "arrival",
        "state_dir": str(path / "state"),
        "rules": {"budget": 64, "window": {"samples": 16}, "step": {"packs": 2}},
        "streams": {"rollouts": {"pushed": True, "partitions": 2}},
        "fields": {"group": {}, "policy_version": {}},
    } | changes


def samples_of(step: streampack.Step) -> list[tuple[int, int, int]]:
    """(token, group, policy version) of each; all of it is checked to be whole."""
    samples = []
    for pack in step:
        starts, lengths = pack.cu_seqlens_padded[:-1].tolist(), np.diff(pack.cu_seqlens).tolist()
        for i in range(pack.num_samples):
            ids = pack.input_ids[starts[i] : starts[i] + lengths[i]].tolist()
            assert len(set(ids)) == 1
            samples.append((ids[0], int(pack["group"][i]), int(pack["policy_version"][i])))
    return samples


def pushed_group(number: int) -> list[list[int]]:
    """Samples that say whose they are."""
    return [[number] * (3 + number % 7 + i) for i in range(SAMPLES)]
