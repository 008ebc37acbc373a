"""Runs of a framework's own trainer: forks of one process that has imported it, and a broker that serves rows.

Each run prints a line of JSON a step with ``step`` (from 0) and ``loss``. The framework's own dataset reads the same
rows, in the order of their file, which the environment names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer, models

from tests.integration.running import RunningBroker, running, running_broker, write, write_jsonl

ROOT = Path(__file__).parents[3]
ROWS = "ROWS_OF_SAMPLES"
STEPS = 20
Line = dict[str, Any]
SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
"""Sizes of a small model."""


def write_model(path: Path, model: Any) -> None:
    """A model of transformers, with the same weights each time it is run, and a tokenizer that nobody asks."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1, generator=draw)
    model.save_pretrained(path)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(path / "tokenizer.json"))
    write(path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def write_rows(path: Path) -> Path:
    """600 samples of 2 to 40 tokens below 64."""
    draw = Random(0)
    return write_jsonl(
        path, [{"tokens": [draw.randrange(1, 64) for _ in range(draw.randint(2, 40))]} for _ in range(600)]
    )


@contextmanager
def serving_rows(rows: Path, rules: dict[str, Any], **settings: Any) -> Iterator[RunningBroker]:
    """A broker that serves a file of rows in its order."""
    with running_broker({"rules": rules, "streams": {"data": {"partitions": 1}}, **settings}) as broker:
        streams = {"data": {"source": "jsonl", "shards": str(rows), "shuffle": False}}
        settings = {"broker": broker.producers, "processes": 1, "streams": streams}
        with running("producer", "produce", "-c", write(broker.rendezvous.parent / "p.yaml", settings)):
            yield broker


@dataclass(frozen=True)
class Job:
    """A run with these arguments, of one or more ranks, to its end or to the line of step ``dies_at``."""

    arguments: list[str]
    dies_at: int | None = None
    ranks: int = 1


def run_jobs(
    program: str, jobs: Mapping[str, Job], folder: Path, rows: Path, packages: Path | None = None, **environment: str
) -> dict[str, list[Line]]:
    """The lines of each job, one after another: ``program`` is a module beside this one, or in a folder beside it.

    ``packages``: a folder with packages that the program needs instead of those that are installed.
    """
    script = str(Path(__file__).parent / f"{program.replace('.', '/')}.py")
    outputs = {name: folder / f"{name}.txt" for name in jobs}
    todo = [[script, job.arguments, job.dies_at, job.ranks, str(outputs[name])] for name, job in jobs.items()]
    paths = os.pathsep.join(map(str, filter(None, (packages, ROOT))))
    told = os.environ | {"PYTHONPATH": paths, ROWS: str(rows), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", f"tests.integration.frameworks.{program}", json.dumps(todo)]
    done = subprocess.run(command, env=told, capture_output=True, text=True, timeout=300)
    said = {name: output.read_text() if output.exists() else "" for name, output in outputs.items()}
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    codes = json.loads(done.stdout.splitlines()[-1])
    expected = [0 if job.dies_at is None else -9 for job in jobs.values()]
    assert codes == expected, (codes, said)
    return {
        name: [json.loads(line) for line in text.splitlines() if line.startswith('{"step"')]
        for name, text in said.items()
    }


def losses(lines: list[Line]) -> list[float]:
    return [line["loss"] for line in lines]
