"""The examples of ``examples/`` as users run them: processes with a real broker and producer, killed and started again.

An example is ``python examples/NAME.py FOLDER STEPS``: it finds the broker by STREAMPACK_ENDPOINT, keeps its checkpoint
in FOLDER, goes on from the one that is there, and prints a line of JSON a step with ``step`` (from 0), ``loss`` and
``digest`` of the step where its framework shows it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.integration.running import PATIENCE_S, RunningBroker, running, running_broker, write, write_jsonl

EXAMPLES = Path(__file__).parents[2] / "examples"
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


def run(
    name: str,
    broker: RunningBroker,
    folder: Path,
    steps: int = STEPS,
    ranks: int | None = None,
    dies_at: int | None = None,
) -> list[Line]:
    """What the example prints, to its end or to where it is killed: right after the line of step ``dies_at``. With a
    number of ranks under torchrun."""
    folder.mkdir(exist_ok=True)
    launcher = [] if ranks is None else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = [str(EXAMPLES / f"{name}.py"), str(folder), str(steps)]
    if dies_at is not None:
        script = [str(Path(__file__).with_name("dying.py")), str(dies_at), *script]
    done = _python(broker, *launcher, *script)
    assert (done.returncode == 0) == (dies_at is None), done.stdout + done.stderr
    return _lines(done.stdout)


def killed_and_resumed_is_the_same(name: str, broker: RunningBroker, folder: Path, dies_at: int = 6) -> list[Line]:
    """A run that is killed behind its first checkpoint and started again has, step by step, the lines of one that was
    not. Gives the lines."""
    outputs, jobs = [], []
    for number, (where, dies) in enumerate([("whole", None), ("killed", dies_at), ("killed", None)]):
        (folder / where).mkdir(parents=True, exist_ok=True)
        outputs.append(folder / f"output-{number}")
        jobs.append(([str(folder / where), str(STEPS)], dies, str(outputs[-1])))
    done = _python(broker, "-m", "tests.integration.forks", str(EXAMPLES / f"{name}.py"), json.dumps(jobs))
    said = [output.read_text() if output.exists() else "" for output in outputs]
    assert done.stdout.endswith(f"[0, {-signal.SIGKILL}, 0]\n"), "\n".join([done.stdout, done.stderr, *said])
    whole, cut, rest = map(_lines, said)
    assert [line["step"] for line in whole] == list(range(STEPS))
    assert cut == whole[: dies_at + 1]
    assert 0 < rest[0]["step"] <= dies_at + 1, "it goes on from a checkpoint"
    assert rest == whole[rest[0]["step"] :]
    return whole


def _python(broker: RunningBroker, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=PATIENCE_S,
        env=os.environ | {"STREAMPACK_ENDPOINT": broker.trainers, "PYTHONPATH": paths},
    )  # fmt: skip


def _lines(said: str) -> list[Line]:
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]
