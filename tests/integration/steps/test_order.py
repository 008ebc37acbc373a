"""The mixture that trainers get from a broker with default rules: near the weights, and soon near new weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import streampack
from streampack.core.form.auto_window import auto_window
from streampack.packs.step import Step
from streampack.sources import Source, SourceSettings, open_source
from tests.integration.running import in_process, producing_here, running_broker, write_jsonl

WEIGHTS = {"web": 0.5, "books": 0.3, "chat": 0.2}
SETTINGS: dict[str, Any] = {
    "tokens": "uint16",
    "rules": {"budget": 1024, "step": {"packs": 8}, "overlong": "split"},
    "limits": {"sample_tokens": 100_000},
    "memory": "64MiB",
    "streams": {name: {"weight": weight, "repeat": True} for name, weight in WEIGHTS.items()},
}
NEW = {"web": 0.1, "books": 0.5, "chat": 0.4}


def opened(stream: int, path: Path) -> Source:
    """A source of 400 texts with a long tail. Books are the longest; each token is the number of its stream."""
    lengths = np.random.default_rng(stream).lognormal((6.3, 7.0, 5.5)[stream], 1.1, 400).astype(int) + 1
    return open_source(
        SourceSettings("jsonl", shards=str(write_jsonl(path, [{"tokens": [stream] * n} for n in lengths.tolist()])))
    )


def off(steps: list[Step], weights: list[float]) -> float:
    """The largest distance of a stream's share of the tokens of these steps from its weight."""
    ids = [pack.input_ids[: int(pack.cu_seqlens[pack.num_samples])] for step in steps for pack in step]
    tokens = np.bincount(np.concatenate(ids), minlength=3)
    return float(np.abs(tokens / tokens.sum() - np.array(weights)).max())


def test_the_mixture_follows_the_weights_and_new_weights_within_the_window(tmp_path: Path) -> None:
    sources = {name: opened(number, tmp_path / f"{name}.jsonl") for number, name in enumerate(WEIGHTS)}
    with (
        running_broker(SETTINGS) as broker,
        producing_here(broker.producers, sources),
        streampack.connect(broker.trainers, format="numpy") as loader,
    ):
        iterator = loader.steps()
        steps = [next(iterator) for _ in range(80)]
        assert all(off(steps[at : at + 20], [*WEIGHTS.values()]) < 0.1 for at in range(10, 60))
        words = [f"{name}={weight}" for name, weight in NEW.items()]
        done = in_process("set", "weights", *words, "--yes", "--json", "-e", broker.http)
        first = json.loads(done.stdout)["step"]
        steps += [next(iterator) for _ in range(first + 60 - len(steps))]
    window = auto_window([step.num_samples for step in steps[first - 4 : first]])
    samples = 0
    for at in range(first, first + 40):
        if off(steps[at : at + 20], [*NEW.values()]) < 0.1:
            break
        samples += steps[at].num_samples
    assert samples <= 1.2 * window
