"""A log, a ledger and checkpoints that an earlier streampack wrote are read, and the run goes on with the same steps.

``tests/fixtures/written_before/generate.py`` says what is in them and which commit wrote them.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

import streampack
from streampack.errors import StateError
from tests.integration.running import (
    PATIENCE_S,
    RunningBroker,
    in_process,
    running,
    running_broker,
    the_error,
    write,
)
from tests.integration.running import streampack as command

WRITTEN = Path(__file__).parents[2] / "fixtures" / "written_before"
SETTINGS = json.loads((WRITTEN / "broker.json").read_text())
EXPECTED = json.loads((WRITTEN / "expected.json").read_text())
STREAMS = ("web", "code", "check")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A copy of the state_dir that the earlier broker left when it was killed."""
    with tarfile.open(WRITTEN / "state.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "state"


def producer_yaml(folder: Path, endpoint: str) -> Path:
    sources = {name: {"source": "jsonl", "shards": str(WRITTEN / "sources" / f"{name}.jsonl")} for name in STREAMS}
    return write(folder / "producer.yaml", {"broker": endpoint, "streams": sources})


@contextmanager
def serving(folder: Path, settings: dict[str, Any]) -> Iterator[RunningBroker]:
    """A broker of today, and a producer of the recorded sources."""
    with (
        running_broker(settings) as broker,
        running("producer", "produce", "-c", producer_yaml(folder, broker.producers)),
    ):
        yield broker


def connect(broker: RunningBroker, feed: str) -> streampack.Client:
    found = streampack.connect(broker.trainers, feed=feed, format="numpy", verify=True, stall_timeout_s=PATIENCE_S)
    if feed in EXPECTED["checkpoints"]:
        found.load_state_dict(EXPECTED["checkpoints"][feed])
    return found


def holds(found: Any, expected: Any) -> bool:
    """Return whether ``found`` has all that is expected. It may have more keys, and word its reasons (``why``) anew."""
    if isinstance(expected, dict):
        return isinstance(found, dict) and all(
            key in found and (bool(found[key]) == bool(value) if key == "why" else holds(found[key], value))
            for key, value in expected.items()
        )
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(holds, found, expected))
    return bool(found == expected)


def test_trainers_go_on_from_old_checkpoints_with_the_recorded_steps(state: Path, tmp_path: Path) -> None:
    with serving(tmp_path, SETTINGS | {"state_dir": str(state)}) as broker:
        for feed, expected in EXPECTED["steps"].items():
            with connect(broker, feed) as loader:
                assert [[step.index, step.digest] for step in loader.steps()] == expected, feed
    found = in_process("ledger", "verify", "--state-dir", state, "--json")
    assert found.returncode == 0, found.stdout + found.stderr
    feeds = json.loads(found.stdout)["feeds"]
    assert all(feeds[feed]["ended"] for feed in EXPECTED["steps"])


def test_an_old_checkpoint_is_enough_without_the_old_log(tmp_path: Path) -> None:
    expected = [step for step in EXPECTED["steps"]["train"] if step[0] < EXPECTED["changed_at"]]
    assert len(expected) > 2
    settings = SETTINGS | {"state_dir": str(tmp_path / "empty")}
    with running_broker(settings) as broker, pytest.raises(StateError, match="write `") as said:
        connect(broker, "train")
    line = re.search(r"write `(.*)` in broker.yaml", str(said.value))
    assert line is not None
    overlay = yaml.safe_load(line[1])["rules"]
    settings |= {"state_dir": str(tmp_path / "new"), "rules": settings["rules"] | overlay}
    with serving(tmp_path, settings) as broker, connect(broker, "train") as loader:
        steps = loader.steps()
        assert [[step.index, step.digest] for step, _ in zip(steps, expected, strict=False)] == expected


def test_the_ledger_answers_from_old_files_as_it_did(state: Path) -> None:
    found = in_process("ledger", "verify", "--state-dir", state, "--json")
    assert found.returncode == 0, found.stdout + found.stderr
    assert holds(json.loads(found.stdout), EXPECTED["verify"])
    for words, expected in EXPECTED["why"]:
        found = in_process("why", *words, "--state-dir", state, "--json")
        assert found.returncode == 0, found.stderr
        assert holds(json.loads(found.stdout), expected), words


@pytest.mark.parametrize(("feed", "step"), [("train", 5), ("train", 27), ("valid", 9), ("rollouts", 7)])
def test_steps_of_an_old_log_are_replayed(state: Path, tmp_path: Path, feed: str, step: int) -> None:
    """Step 5 of train is in the ledger alone: its segment was cut."""
    broker = write(tmp_path / "broker.yaml", SETTINGS | {"state_dir": str(state)})
    where = ("-c", broker, "-p", producer_yaml(tmp_path, "tcp://127.0.0.1:1"))
    found = in_process("replay", "--step", str(step), "--feed", feed, *where, "--json")
    assert found.returncode == 0, found.stderr
    cut = EXPECTED["why"][0][1]
    recorded = {cut["step"]: cut["digest"]} | dict(EXPECTED["steps"][feed])
    assert json.loads(found.stdout)["digest"] == recorded[step]


def test_a_log_whose_first_segment_no_broker_deleted_is_refused_by_name(state: Path, tmp_path: Path) -> None:
    """The earlier broker deleted segments, which the ledger has; a later one marks what it deletes."""
    settings = SETTINGS | {"state_dir": str(state)}
    with serving(tmp_path, settings):
        first, second, *_ = sorted(state.glob("*.log"))
    assert [path.stem for path in state.glob("*.cut")] == [first.stem]
    assert int(first.stem) > 0
    first.unlink()
    listen = {"producers": "tcp://127.0.0.1:*", "trainers": "tcp://127.0.0.1:*", "http": "127.0.0.1:0"}
    config = write(tmp_path / "broker.yaml", settings | {"listen": listen})
    said = the_error(command("broker", "-c", config), 1)
    records = f"with records {int(first.stem)} to {int(second.stem) - 1}"
    assert f"{first}: byte 0: got no such file, expected the first segment of the log, {records}" in said
