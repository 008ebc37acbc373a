"""Mixtures through real processes: shares that hold, whoever reads, and a stream that ends the feed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streampack
from tests.integration.running import Daemon, RunningBroker, running_broker, until, write, write_jsonl

MEANS = {"short": 20, "middle": 200, "long": 2000}
"""Tokens of a sample: 100 x apart."""
WEIGHTS = {"short": 0.2, "middle": 0.3, "long": 0.5}
GOAL = 10_000_000
SETTINGS: dict[str, Any] = {
    "tokens": "uint16",
    "memory": "128MiB",
    "rules": {"budget": 16384, "window": {"samples": 256}, "step": {"packs": 16}},
    "streams": {name: {"weight": weight, "repeat": True} for name, weight in WEIGHTS.items()},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draw = tmp_path_factory.mktemp("mixture"), np.random.default_rng(1)
    for name, mean in MEANS.items():
        for shard in range(8):
            lengths = draw.integers(1, 2 * mean - 1, 80_000 // mean).tolist()
            write_jsonl(folder / f"{name}-{shard}.jsonl", [{"text": name[0] * length} for length in lengths])
    return folder


def produced_by(broker: RunningBroker, files: Path, processes: int, names: dict[str, str]) -> Daemon:
    """``streampack produce`` for streams of the files' ``names``."""
    streams = {stream: {"source": "jsonl", "shards": str(files / f"{name}-*.jsonl")} for stream, name in names.items()}
    tree = {"broker": broker.producers, "processes": processes, "streams": streams}
    folder = broker.log.parent
    return Daemon(folder, "produce", "produce", "-c", write(folder / "producer.yaml", tree))


def read_mixture(files: Path, processes: int) -> tuple[list[str], dict[str, float]]:
    """Digests of the steps that hold the first ten million tokens, and each stream's share of their tokens."""
    tokens, digests = np.zeros(len(MEANS), np.int64), []
    with running_broker(SETTINGS) as broker:
        producer = produced_by(broker, files, processes, {name: name for name in MEANS})
        try:
            with streampack.connect(broker.trainers) as loader:
                for step in loader.steps():
                    digests.append(step.digest)
                    for pack in step:
                        np.add.at(tokens, pack.sample_ids[:, 0], np.diff(pack.cu_seqlens)[: len(pack.sample_ids)])
                    if tokens.sum() >= GOAL:
                        break
        finally:
            producer.kill()
    return digests, dict(zip(MEANS, (tokens / tokens.sum()).tolist(), strict=True))


def test_a_mixture_holds_its_token_shares_whatever_the_lengths_and_the_producers(files: Path) -> None:
    digests, shares = read_mixture(files, 1)
    print(f"shares of {GOAL} tokens: {shares}")
    assert len(digests) >= GOAL // (16384 * 16)
    for name, weight in WEIGHTS.items():
        assert abs(shares[name] - weight) < 0.01 * weight
    assert read_mixture(files, 4)[0] == digests


def test_a_stream_that_stops_the_feed_lets_everybody_go(files: Path) -> None:
    """The other stream has no end, and its producer must not be waited for, nor told to go on."""
    settings = SETTINGS | {
        "rules": {"budget": 4096, "window": {"samples": 64}, "step": {"packs": 4}, "between_passes": "drain"},
        "streams": {"once": {"on_exhaust": "stop", "partitions": 2}, "ever": {"repeat": True, "partitions": 2}},
    }
    with running_broker(settings) as broker:
        producer = produced_by(broker, files, 2, {"once": "long", "ever": "middle"})
        try:
            with streampack.connect(broker.trainers) as loader:
                ids = [tuple(row) for pack in loader for row in pack.sample_ids.tolist()]
            assert sum(stream == 0 for stream, *_ in ids) == 8 * 40
            assert sum(stream == 1 for stream, *_ in ids) == 8 * 400, "its first pass: that is when the other is missed"
            assert producer.end(20) == 0, producer.said
            until(lambda: all(row["ended_partitions"] == row["partitions"] for row in broker.status()["streams"]))
        finally:
            producer.kill()
