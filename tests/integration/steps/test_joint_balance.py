"""A broker that balances by ``joint``: its own figures on lengths with a heavy tail, and a kill changes nothing."""

from __future__ import annotations

import json
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import streampack
from tests.integration.running import RunningBroker, folder, running, write, write_jsonl
from tests.soak.job import fixed_listen

DP, BUDGET, STEPS, KILLED_AFTER = 4, 2048, 120, 60
RULES = {
    "budget": BUDGET, "window": {"samples": 512}, "step": {"packs": DP}, "overlong": "truncate",
    "balance": {"kind": "joint", "a": 0, "patience": 32},
}  # fmt: skip
"""The cost is attention's alone, and a rank has one pack a step: the hardest to balance."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Lognormal lengths, with the tail of rollouts beside a budget of 32768."""
    path = tmp_path_factory.mktemp("rollouts")
    draws = np.random.default_rng(11)
    for number in range(8):
        lengths = np.clip(draws.lognormal(6.5, 1.2, 2000) / 16, 1, BUDGET).astype(int).tolist()
        write_jsonl(path / f"{number}.jsonl", [{"tokens": list(range(1, length + 1))} for length in lengths])
    return str(path / "*.jsonl")


def start(path: Path) -> RunningBroker:
    """A broker of the state in ``path``; one that was there before has the same addresses."""
    listen = fixed_listen(path) if not (path / "broker.yaml").exists() else None
    settings: dict[str, Any] = {
        "tokens": "uint16", "rules": RULES, "planned_mesh": {"dp": DP}, "streams": {"rollouts": {"repeat": True}},
        "state_dir": str(path / "state"), "listen": listen, "memory": "64MiB",
    }  # fmt: skip
    return RunningBroker(path, settings if listen else json.loads((path / "broker.yaml").read_text()))


def served(shards: str, path: Path, killed_after: int | None = None) -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """What four ranks get of STEPS steps, digests of each step and of each rank's bytes; and the broker's metrics."""
    found = []
    with ExitStack() as stack:
        broker = start(path)
        stack.callback(broker.kill)
        tree = {"broker": broker.producers, "streams": {"rollouts": {"source": "jsonl", "shards": shards}}}
        stack.enter_context(running("producer", "produce", "-c", write(path / "producer.yaml", tree)))
        meshes = [{"dp": DP, "dp_rank": rank} for rank in range(DP)]
        ranks = [
            stack.enter_context(streampack.connect(broker.trainers, mesh=mesh, format="numpy", verify=True))
            for mesh in meshes
        ]
        for number, steps in zip(range(STEPS), zip(*(rank.steps() for rank in ranks), strict=True), strict=False):
            assert {step.index for step in steps} == {number}
            found.append((steps[0].digest, *map(_bytes_of, steps)))
            if number == killed_after:
                broker.kill()
                broker = start(path)
                stack.callback(broker.kill)
        families = text_string_to_metric_families(broker.get("/metrics"))
        return found, {each.name: each.value for family in families for each in family.samples}


def _bytes_of(step: streampack.Step) -> str:
    return sha256(b"".join(pack["input_ids"].tobytes() + pack.sample_ids.tobytes() for pack in step)).hexdigest()


def test_joint_packs_cost_the_same_are_full_and_are_the_same_after_a_kill(shards: str) -> None:
    with folder() as one, folder() as two:
        golden, metrics = served(shards, one)
        assert len(golden) == STEPS
        assert metrics["streampack_cost_max_over_mean_ratio"] <= 1.05
        assert metrics["streampack_utilization_ratio"] >= 0.995
        assert 0 < metrics["streampack_longest_wait_steps"] <= metrics["streampack_wait_bound_steps"]
        assert metrics["streampack_outliers_waiting"] > 0
        again, _ = served(shards, two, KILLED_AFTER)
        assert again == golden
