"""``streampack plan`` while a run goes on: large windows get no advantage from samples that wait in the window.

Most samples fill 70% of a pack, and few are short. A packer with a large window first forms the packs that are full.
So the steps of a run that has just begun are better than those of the whole run.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streampack
from tests.integration.commands.planned_run import ask
from tests.integration.running import RunningBroker, running, running_broker, until, write, write_jsonl

BUDGET, SAMPLES, PACKS = 128, 3000, 8
WINDOWS = "64,512,4096"


def make_lengths() -> list[int]:
    draws = np.random.default_rng(1)
    long, short = draws.integers(80, 95, SAMPLES), draws.integers(25, 50, SAMPLES)
    lengths: list[int] = np.where(draws.random(SAMPLES) < 0.9, long, short).tolist()
    return lengths


def settings(folder: Path, window: int) -> dict[str, Any]:
    return {
        "run": "windows", "state_dir": str(folder / "state"), "streams": {"data": {"partitions": 2}},
        "rules": {"budget": BUDGET, "window": {"samples": window}, "step": {"packs": PACKS}},
    }  # fmt: skip


def utilizations(*arguments: str | Path) -> dict[int, float]:
    """The forecast of each window, and what is advised as -1."""
    found = ask("plan", *arguments, "--window", WINDOWS, "--packer", "exact_fill", "--budget", str(BUDGET))
    rows = [row for row in found["settings"] if row["axis"] == "window" and row["packer"] == "exact_fill"]
    return {row["window"]: row["utilization"] for row in rows} | {-1: found["take"]["window"]}


def of_run(broker: RunningBroker) -> float:
    """The utilization that the broker reports."""
    return float(broker.feed()["figures"]["utilization"])


@pytest.mark.parametrize("window", [64, 1024])
def test_a_plan_of_a_live_run_is_that_of_its_lengths_and_of_its_end(tmp_path: Path, window: int) -> None:
    lengths = make_lengths()
    shard = write_jsonl(tmp_path / "data.jsonl", [{"text": "x" * length} for length in lengths])
    (tmp_path / "lengths.txt").write_text("\n".join(str(length + 1) for length in lengths))  # a text gets an end token
    of_file = utilizations(tmp_path / "lengths.txt", "-c", write(tmp_path / "broker.yaml", settings(tmp_path, window)))
    with running_broker(settings(tmp_path, window)) as broker:
        streams = {"data": {"source": "jsonl", "shards": str(shard)}}
        config = write(tmp_path / "producer.yaml", {"streams": streams, "broker": broker.producers})
        with (
            running("producer", "produce", "-c", config),
            streampack.connect(broker.trainers, mesh={"dp": 1, "dp_rank": 0}, format="numpy") as loader,
        ):
            steps = loader.steps()
            for _ in itertools.islice(steps, 150):
                pass
            until(lambda: broker.feed()["steps"]["returned"] >= 149)
            early, of_broker, of_log = of_run(broker), utilizations(broker.http), utilizations(tmp_path / "state")
            (note,) = ask("plan", tmp_path / "state")["notes"]
            for _ in steps:
                pass
            until(lambda: broker.feed()["state"] == "ended")
            end = of_run(broker)
    assert early > end + 0.01 * (window > 64), "the first packs of a large window are the best"
    assert of_broker == pytest.approx(of_file, abs=0.01)
    assert of_broker[64] == pytest.approx(end, abs=0.01)
    if "samples that wait in the window are not known" in note:
        assert window > 64, "a snapshot is rare, and the first one comes late"
    else:
        assert of_log == pytest.approx(of_file, abs=0.01)
