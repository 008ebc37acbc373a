"""Commands that change a run: a real broker, producer and trainer do from a step on what the answer has named."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streampack
from tests.integration.running import PATIENCE_S, Daemon, RunningBroker, running_broker, the_error, write, write_jsonl
from tests.integration.running import streampack as command

SETTINGS: dict[str, Any] = {
    "tokens": "uint16",
    "steps_ahead": 2,
    "rules": {"budget": 256, "window": {"samples": 16}, "step": {"packs": 4}},
    "streams": {
        "web": {"weight": 0.7, "repeat": True, "partitions": 2},
        "code": {"weight": 0.3, "repeat": True, "partitions": 1},
    },
}
MATH = 100
"""Samples of the stream that joins later."""
READ = 40
HELD = 3
"""Steps for which what was merged before a change suffices: two steps' tokens, and what the window holds."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("changing")
    for name, count, step in (("web", 700, 41), ("code", 300, 17), ("math", MATH, 29)):
        write_jsonl(folder / f"{name}.jsonl", [{"text": name[0] * (1 + i * step % 90)} for i in range(count)])
    return folder


def producing(broker: RunningBroker, files: Path, *streams: str) -> Daemon:
    """``streampack produce`` of these streams."""
    tree = {name: {"source": "jsonl", "shards": str(files / f"{name}.jsonl")} for name in streams}
    path = write(broker.log.parent / f"{streams[0]}.yaml", {"broker": broker.producers, "streams": tree})
    return Daemon(broker.log.parent, streams[0], "produce", "-c", path)


@contextmanager
def running(files: Path) -> Iterator[tuple[RunningBroker, ExitStack]]:
    """A run, and what is ended before it is."""
    with running_broker(SETTINGS) as broker, ExitStack() as stack:
        stack.callback(producing(broker, files, "web", "code").kill)
        yield broker, stack


def asked(broker: RunningBroker, *words: str) -> subprocess.CompletedProcess[str]:
    return command(*words, "--endpoint", broker.http, "--json")


def answered(broker: RunningBroker, *words: str) -> int:
    """The step that the answer names."""
    result = asked(broker, *words)
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    assert said["feed"] == "train"
    step: int = said["step"]
    return step


def connect(broker: RunningBroker) -> streampack.Client:
    return streampack.connect(broker.trainers, format="numpy", verify=True, prefetch=1, stall_timeout_s=PATIENCE_S)


@pytest.fixture(scope="module")
def golden(files: Path) -> list[str]:
    """Digests of a run that nobody changes."""
    with running(files) as (broker, _), connect(broker) as loader:
        steps = loader.steps()
        return [next(steps).digest for _ in range(READ)]


def tokens_of(step: streampack.Step) -> list[int]:
    """Real tokens of the step by stream."""
    found = np.zeros(3, np.int64)
    for pack in step:
        np.add.at(found, pack.sample_ids[:, 0], np.diff(pack.cu_seqlens)[: len(pack.sample_ids)])
    tokens: list[int] = found.tolist()
    return tokens


@pytest.mark.parametrize("at", [None, 15])
def test_shares_change_at_the_step_that_the_answer_names(files: Path, golden: list[str], at: int | None) -> None:
    with running(files) as (broker, _), connect(broker) as loader:
        steps = loader.steps()
        found = [next(steps) for _ in range(5)]
        when = () if at is None else ("--at-step", str(at))
        begins = answered(broker, "set", "weights", "web=0.2", "code=0.8", "--note", "more code", *when)
        assert begins == at if at is not None else 5 <= begins <= 5 + 2 * SETTINGS["steps_ahead"]
        said = f"feed 'train' changes from step {begins} on: weights web=0.2 code=0.8 (more code)"
        assert said in broker.said
        found += [next(steps) for _ in range(READ - 5)]
    assert [step.digest for step in found[:begins]] == golden[:begins]
    differs = next(k for k, step in enumerate(found) if step.digest != golden[k])
    assert begins <= differs <= begins + HELD
    before = np.sum([tokens_of(step) for step in found[:begins]], 0)
    after = np.sum([tokens_of(step) for step in found[begins + HELD :]], 0)
    assert before[1] / before.sum() == pytest.approx(0.3, abs=0.05)
    assert after[1] / after.sum() == pytest.approx(0.8, abs=0.03)


def test_streams_join_and_leave_at_the_step_that_the_answer_names(files: Path, golden: list[str]) -> None:
    with running(files) as (broker, stack), connect(broker) as loader:
        steps = loader.steps()
        found = [next(steps) for _ in range(5)]
        add = "math={weight: 0.7, passes: 1, partitions: 1}"
        begins = answered(broker, "set", "streams", "--add", add, "--remove", "code", "--at-step", "12")
        assert begins == 12
        stack.callback(producing(broker, files, "math").kill)
        found += [next(steps) for _ in range(READ - 5)]
    assert [step.digest for step in found[:begins]] == golden[:begins]
    ids = np.concatenate([step.sample_ids for step in found[begins:]])
    assert sorted(ids[ids[:, 0] == 2][:, 1].tolist()) == list(range(MATH)), "each once"
    assert sum(tokens_of(step)[1] for step in found[begins + HELD :]) == 0
    assert sum(tokens_of(step)[1] for step in found[:begins]) > 0


def test_steps_skipped_before_anybody_reads_are_passed_over(files: Path, golden: list[str]) -> None:
    with running(files) as (broker, _):
        assert answered(broker, "skip", "--steps", "2-4") == 2
        assert answered(broker, "skip", "--steps", "0") == 0
        assert "feed 'train' skips steps 2 to 4" in broker.said
        with connect(broker) as loader:
            steps = loader.steps()
            found = [next(steps) for _ in range(8)]
            assert loader.stats()["skipped_steps"] == 4
    assert [step.index for step in found] == [1, *range(5, 12)]
    assert [step.digest for step in found] == [golden[step.index] for step in found]


def test_steps_that_a_rank_may_have_had_are_skipped_once_the_trainers_have_stopped(
    files: Path, golden: list[str]
) -> None:
    """Steps that are not formed yet: while they run."""
    with running(files) as (broker, _):
        with connect(broker) as loader:
            steps = loader.steps()
            found = [next(steps) for _ in range(4)]
            list(found[-1])
            state = loader.state_dict()
            found += [next(steps) for _ in range(4)]
            error = the_error(asked(broker, "skip", "--steps", "5-6"), 1)
            assert "got step 5, expected " in error
            assert "stop the trainers, skip the step, and restart the trainers from a checkpoint before step 5" in error
            assert answered(broker, "skip", "--steps", "15-17") == 15
            found += [next(steps) for _ in range(12)]
            assert [step.index for step in found] == [*range(15), *range(18, 23)][: len(found)]
        assert answered(broker, "skip", "--steps", "5-6") == 5
        with connect(broker) as loader:
            loader.load_state_dict(state)
            steps = loader.steps()
            again = [next(steps) for _ in range(15)]
    assert [step.index for step in again] == [4, *range(7, 15), *range(18, 24)]
    assert all(step.digest == golden[step.index] for step in [*found, *again])
