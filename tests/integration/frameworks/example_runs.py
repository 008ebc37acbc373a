"""The examples of ``examples/`` as users run them: processes with a real broker and producer, killed and started again.

An example is ``python examples/NAME.py FOLDER STEPS``: it finds the broker by STREAMPACK_ENDPOINT, keeps its checkpoint
in FOLDER, goes on from the one that is there, and prints a line of JSON a step with ``step`` (from 0), ``loss`` and
``digest`` of the step where its framework shows it.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.running import RunningBroker, forked, running, running_broker, write, write_jsonl

EXAMPLES = Path(__file__).parents[3] / "examples"
STEPS = 10
RULES: dict[str, Any] = {"budget": 128, "window": {"samples": 32}, "step": {"packs": 4}}
Line = dict[str, Any]


@contextmanager
def serving(rules: dict[str, Any] | None = None, **settings: Any) -> Iterator[RunningBroker]:
    """A broker with a producer of 400 texts, over and over: every attempt begins where its checkpoint says, or at 0."""
    rows = [{"text": "abcdefgh "[i % 5 :] * (1 + i * 7 % 9)} for i in range(400)]
    tree = {"rules": RULES | (rules or {}), "streams": {"data": {"passes": 3}}, **settings}
    with running_broker(tree) as broker:
        files = write_jsonl(broker.rendezvous.parent / "text.jsonl", rows)
        streams = {"data": {"source": "jsonl", "shards": str(files)}}
        config = write(
            broker.rendezvous.parent / "p.yaml", {"broker": broker.producers, "processes": 1, "streams": streams}
        )
        with running("producer", "produce", "-c", config):
            yield broker


@dataclass(frozen=True)
class Run:
    """An example to its end, or to where it is killed, right after the line of step ``dies_at``; with a number of ranks
    as under torchrun. Runs in the same folder go on from what those before them have saved.
    """

    name: str
    folder: Path
    dies_at: int | None = None
    ranks: int | None = None
    steps: int = STEPS


def run(broker: RunningBroker, *runs: Run) -> list[list[Line]]:
    """What each prints, one after another."""
    outputs = [each.folder / f"output-{number}" for number, each in enumerate(runs)]
    jobs = []
    for each, output in zip(runs, outputs, strict=True):
        each.folder.mkdir(parents=True, exist_ok=True)
        script, arguments = str(EXAMPLES / f"{each.name}.py"), [str(each.folder), str(each.steps)]
        jobs.append([script, arguments, each.dies_at, each.ranks, str(output)])
    paths = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    told = {"STREAMPACK_ENDPOINT": broker.trainers, "PYTHONPATH": paths}
    done = forked("tests.integration.forks", json.dumps(jobs), environment=told)
    said = [output.read_text() if output.exists() else "" for output in outputs]
    expected = [0 if each.dies_at is None else -signal.SIGKILL for each in runs]
    assert done.stdout.endswith(f"{expected}\n"), "\n".join([done.stdout, done.stderr, *said])
    return [[json.loads(line) for line in each.splitlines() if line.startswith("{")] for each in said]


def killed_and_resumed(name: str, folder: Path, dies_at: int = 6) -> tuple[Run, Run, Run]:
    """A whole run, one that is killed behind its first checkpoint, and the same one started again."""
    killed = folder / "killed"
    return Run(name, folder / "whole"), Run(name, killed, dies_at), Run(name, killed)


def check_the_same(whole: list[Line], cut: list[Line], rest: list[Line]) -> None:
    """A run that is killed and started again has, step by step, the lines of one that was not."""
    assert [line["step"] for line in whole] == list(range(STEPS))
    assert 0 < len(cut) < STEPS
    assert cut == whole[: len(cut)]
    assert 0 < rest[0]["step"] <= len(cut), "it goes on from a checkpoint"
    assert rest == whole[rest[0]["step"] :]


def check_the_same_losses(whole: list[Line], cut: list[Line], rest: list[Line], begins: int) -> None:
    """Ranks that are killed, and go on at step ``begins``, have the steps of one process, and its losses to 1e-6.

    Likewise the norms of gradients where lines have them: AdamW and clipped gradients hide a factor of the loss.
    """
    assert [line["step"] for line in whole] == list(range(len(whole)))
    assert rest[0]["step"] == begins <= cut[-1]["step"] + 1
    assert rest[-1]["step"] == len(whole) - 1
    for line in cut + rest:
        for name, expected in whole[line["step"]].items():
            assert line[name] == (pytest.approx(expected, rel=1e-6) if isinstance(expected, float) else expected)


def killed_and_resumed_is_the_same(name: str, broker: RunningBroker, folder: Path) -> list[Line]:
    """The lines of a whole run, when it was compared with one that was killed and started again."""
    whole, cut, rest = run(broker, *killed_and_resumed(name, folder))
    check_the_same(whole, cut, rest)
    return whole
