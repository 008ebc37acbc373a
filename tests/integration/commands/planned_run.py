"""A run that is planned: its rules, files and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.integration.running import in_process, write, write_jsonl

RULES = {"budget": 512, "window": {"samples": 64}, "step": {"packs": 4}, "overlong": "split"}


STREAMS = {"web": {"weight": 0.7, "partitions": 3}, "code": {"weight": 0.3, "partitions": 2}}


BROKER = {"rules": RULES, "planned_mesh": {"dp": 2, "cp": 2}, "streams": STREAMS, "run": "planned"}


def ask(*arguments: str | Path) -> dict[str, Any]:
    """Return the JSON answer of a command."""
    result = in_process(*arguments, "--json")
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def producer(folder: Path, shards: str) -> Path:
    """A producer.yaml of one stream, data."""
    return write(folder / "producer.yaml", {"streams": {"data": {"source": "jsonl", "shards": shards}}})


def make_files(folder: Path) -> Path:
    """broker.yaml, producer.yaml and the data of two streams, six files each, of samples of 1 to 700 tokens."""
    draws = np.random.default_rng(3)
    for name in STREAMS:
        for number in range(6):
            lengths = np.clip(draws.lognormal(4.3, 1.0, 60), 1, 700).astype(int).tolist()
            write_jsonl(folder / f"{name}-{number}.jsonl", [{"text": "x" * length} for length in lengths])
    streams = {name: {"source": "jsonl", "shards": str(folder / f"{name}-*.jsonl")} for name in STREAMS}
    write(folder / "producer.yaml", {"streams": streams})
    write(folder / "broker.yaml", {**BROKER, "state_dir": str(folder / "state")})
    return folder
