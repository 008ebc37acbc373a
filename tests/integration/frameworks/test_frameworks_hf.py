"""Hugging Face's Trainer: runs that are killed go on, also with the ranks and the shards of ``accelerate launch``.

Evaluations of two ranks: ``tests/training/hf/test_hf_ranks.py``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.frameworks.example_runs import (
    EXAMPLES,
    Line,
    Run,
    check_the_same_losses,
    killed_and_resumed_is_the_same,
    run,
    serving,
)
from tests.integration.running import RunningBroker, forked, until

RANKS = ["--num_machines", "1", "--num_processes", "2", "--mixed_precision", "no", "--dynamo_backend", "no"]
LAUNCHES = {
    "ddp": ["--multi_gpu"],
    "fsdp2": ["--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"],
}
STEPS = 20


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def one_process(broker: RunningBroker, tmp_path_factory: pytest.TempPathFactory) -> list[Line]:
    (lines,) = run(broker, Run("hf_trainer", tmp_path_factory.mktemp("hf") / "one", steps=STEPS))
    return lines


def launched(broker: RunningBroker, kind: str, folder: Path, **environment: str) -> tuple[list[Line], int, str]:
    """The lines of ``accelerate launch``, its exit code, and its errors."""
    words = [*LAUNCHES[kind], *RANKS, str(EXAMPLES / "hf_trainer.py"), str(folder), str(STEPS)]
    paths = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    environment |= {"STREAMPACK_ENDPOINT": broker.trainers, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = forked("tests.integration.frameworks.accelerated", *words, environment=environment)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return lines, done.returncode, done.stdout + done.stderr


def test_a_trainer_goes_on_where_it_was_killed(broker: RunningBroker, tmp_path: Path) -> None:
    lines = killed_and_resumed_is_the_same("hf_trainer", broker, tmp_path)
    until(lambda: broker.feed()["committed"] == 9)  # the last that was saved; the status is made twice a second
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]


@pytest.mark.parametrize("kind", list(LAUNCHES))
def test_two_ranks_of_accelerate_launch_are_killed_and_go_on_with_the_losses_of_one_process(
    kind: str, broker: RunningBroker, one_process: list[Line], tmp_path: Path
) -> None:
    cut, code, said = launched(broker, kind, tmp_path, DIES_AT="9")
    assert (code, "Signal 9" in said) == (1, True), said
    rest, code, said = launched(broker, kind, tmp_path)
    assert code == 0, said
    sharded = list(tmp_path.glob("checkpoint-8/pytorch_model_fsdp_*"))
    assert bool(sharded) == (kind == "fsdp2")
    check_the_same_losses(one_process, cut, rest, begins=8)
