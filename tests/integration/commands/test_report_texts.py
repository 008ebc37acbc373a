"""What ``why``, ``ledger``, ``replay``, ``check`` and ``export`` print, whole: a change of a word shows as a line.

Where a text changes on purpose, write it anew:

    python -m tests.integration.commands.test_report_texts
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from streampack_services.export import PLACES
from streampack_services.log.log import Log

from streampack.core.journal.log_records import LineageBegan, Record, SamplesRejected, StepFormed
from streampack.wire.record_frames import encode_record
from tests.integration.running import in_process, write, write_jsonl
from tests.services.recorded import resealed, two_lineages, with_values, without

FIXTURES = Path(__file__).parents[2] / "fixtures"
WRITTEN = FIXTURES / "written_before"
WIDTH = 80
BROKER = {
    "run": "texts", "memory": "64MiB", "planned_mesh": {"dp": 4, "cp": 2},
    "limits": {"sample_tokens": 4096, "chunk": "64KiB"},
    "rules": {"budget": 4096, "step": {"packs": 16}, "overlong": "truncate"},
    "fields": {"loss_mask": {"default": 1}},
    "streams": {"web": {"weight": 0.7, "overlong": "split"}, "code": {"weight": 0.3, "repeat": True, "partitions": 2}},
}  # fmt: skip


def shown(*words: str | Path) -> list[str]:
    """The command and what it prints, on its output or as an error."""
    result = in_process(*words)
    lines = [line.rstrip() for line in (result.stdout + result.stderr).splitlines()]
    if words[0] in ("why", "ledger", "replay") or "--all" in words:
        assert max(map(len, result.stdout.splitlines()), default=0) <= WIDTH
        assert "…" not in result.stdout
    return [f"$ streampack {' '.join(map(str, words))}", *lines, ""]


def write_log(records: list[Record]) -> None:
    """Write the log of a run into the folder ``state``."""
    log = Log.open(Path("state"), durability="process", on_safe=lambda: None)
    for record in records:
        log.append(record.TYPE, encode_record(record))
    log.flush()
    log.close()


def extract() -> tuple[str, ...]:
    """Write the state_dir of an earlier streampack, and the options that name its broker.yaml and producer.yaml."""
    with tarfile.open(WRITTEN / "state.tar.gz") as archive:
        archive.extractall(".", filter="data")
    write(Path("broker.yaml"), json.loads((WRITTEN / "broker.json").read_text()) | {"state_dir": "state"})
    streams = {path.stem: {"source": "jsonl", "shards": str(path)} for path in (WRITTEN / "sources").glob("*.jsonl")}
    write(Path("producer.yaml"), {"broker": "tcp://127.0.0.1:1", "streams": streams})
    return "-c", "broker.yaml", "-p", "producer.yaml"


def why() -> Iterator[str]:
    run, where = two_lineages(), ("--state-dir", "state")
    began = next(record for record in run.records if isinstance(record, LineageBegan))
    write_log(with_values(run.records, {"loss": 0.5, "entropy": float("nan")}))
    yield from shown("why", "--step", "4", *where)
    yield from shown("why", "--step", str(began.step), "--dp-size", "4", *where)
    rejected = next(record for record in run.records if isinstance(record, SamplesRejected))
    index = int.from_bytes(rejected.indices_u64[:8], "little")
    for sample in ("web:3", f"{rejected.stream}:{index}", "web:270", "code:89", "code:x"):
        yield from shown("why", "--sample", sample, *where)


def why_of_old_files() -> Iterator[str]:
    where = extract()
    changed = str(json.loads((WRITTEN / "expected.json").read_text())["changed_at"])
    steps = (
        ("--step", "24"),
        ("--step", changed),
        ("--step", "7", "--feed", "rollouts"),
        ("--step", "23", "--feed", "valid"),
    )
    for words in steps:
        yield from shown("why", *words, "--dp-size", "2", *where[:2])
    for sample in ("web:9", "code:7", "web.jsonl:5", "rollouts:0:3"):
        yield from shown("why", "--sample", sample, *where)


def ledger() -> Iterator[str]:
    run, where = two_lineages(), ("--state-dir", "state")
    step = [record for record in run.records if isinstance(record, StepFormed)][3]
    records = resealed([without(step, 1) if record is step else record for record in run.records])
    write_log(records)
    yield from shown("ledger", "verify", *where)
    path, damaged = Path("state/ledger.sqlite"), [record for record in records if isinstance(record, StepFormed)][4]
    path.write_bytes(path.read_bytes().replace(damaged.digest[:8], bytes(8)))
    yield from shown("ledger", "verify", *where)
    yield from shown("ledger", "rebuild", *where)


def ledger_of_old_files() -> Iterator[str]:
    where = extract()
    yield from shown("ledger", "verify", *where[:2])
    yield from shown("ledger", "rebuild", *where[:2])


def replay() -> Iterator[str]:
    where = extract()
    for feed, step in (("train", "27"), ("valid", "9"), ("rollouts", "7")):
        lines = shown("replay", "--step", step, "--feed", feed, *where, "--dp", "2", "-o", "step.npz")
        yield from (re.sub(r"[0-9.]+ s$", "0.1 s", line) for line in lines)


def check() -> Iterator[str]:
    rows: list[dict[str, Any]] = [{"text": "a few words " * n, "loss_mask": [1] * (12 * n)} for n in range(1, 4)]
    tokens: list[dict[str, Any]] = [
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 1]},
        {"input_ids": []},
    ]
    write(Path("broker.yaml"), BROKER)
    sources = {name: {"source": "jsonl", "shards": str(write_jsonl(Path(f"{name}.jsonl"), values))}
               for name, values in (("web", rows), ("code", tokens))}  # fmt: skip
    write(Path("producer.yaml"), {"streams": sources})
    yield from shown("check", "broker.yaml")
    yield from shown("check", "broker.yaml", "--all")
    yield from shown("check", "producer.yaml", "--samples", "2")
    yield from shown("check", "broker.yaml", "producer.yaml")
    write(Path("producer.yaml"), {"streams": {"web": sources["web"]}})
    yield from shown("check", "broker.yaml", "producer.yaml", "--samples", "1")


def export() -> Iterator[str]:
    write(Path("broker.yaml"), BROKER)
    for place in PLACES:
        config = ("-c", "broker.yaml") if "config" in PLACES[place].options else ()
        lines = shown("export", place, f"out/{place}", *config)
        yield from (re.sub(r"(docker build .*/Dockerfile) .*", r"\1 CONTEXT", line) for line in lines)
    yield from shown("export", "slurm", "out/slurm")


TEXTS = {
    "why.txt": (why, why_of_old_files), "ledger.txt": (ledger, ledger_of_old_files), "replay.txt": (replay,),
    "check.txt": (check,), "export.txt": (export,),
}  # fmt: skip


def text_of(name: str) -> str:
    """The text of a file, made by its commands in new folders."""
    lines = list[str]()
    for part in TEXTS[name]:
        with tempfile.TemporaryDirectory(prefix="sp", dir="/tmp") as folder, contextlib.chdir(folder):
            lines += part()
    return "\n".join(lines)


@pytest.mark.parametrize("name", TEXTS)
def test_a_command_prints_what_is_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    text = text_of(name)
    assert text.splitlines() == (FIXTURES / "texts" / name).read_text().splitlines()


if __name__ == "__main__":
    os.environ["COLUMNS"] = str(WIDTH)
    for name in TEXTS:
        (FIXTURES / "texts" / name).write_text(text_of(name))
