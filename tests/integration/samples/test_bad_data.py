"""Data as it comes: a cut tar, an empty file, NaN, a field of another length: a line, a counter, nothing else lost."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streampack
from tests.integration.running import Daemon, RunningBroker, running_broker, the_error, until, write
from tests.integration.running import streampack as command

SETTINGS: dict[str, Any] = {
    "rules": {"budget": 256, "window": {"samples": 16}, "step": {"packs": 2}, "poison": "drop"},
    "streams": {"web": {"partitions": 3}},
    "fields": {"advantages": {"dtype": "float32", "align": "target"}},
}
FILES, EACH = 4, 25


def tokens_of(number: int) -> list[int]:
    return list(range(1, 3 + number * 7 % 60))  # at least 2 tokens, so that each sample has a loss token


def write_tars(folder: Path) -> list[Path]:
    paths = [folder / f"web-{i}.tar" for i in range(FILES)]
    for i, path in enumerate(paths):
        with tarfile.open(path, "w") as archive:
            for number in range(i * EACH, (i + 1) * EACH):
                add(archive, f"{number:03}.npy", np.array(tokens_of(number), np.int32))
                add(archive, f"{number:03}.advantages.npy", np.zeros(len(tokens_of(number)), np.float32))
    return paths


def add(archive: tarfile.TarFile, name: str, array: Any) -> None:
    raw = io.BytesIO()
    np.save(raw, array)
    info = tarfile.TarInfo(name)
    info.size = len(raw.getvalue())
    archive.addfile(info, io.BytesIO(raw.getvalue()))


def write_rows(folder: Path) -> list[Path]:
    paths = [folder / f"web-{i}.jsonl" for i in range(FILES)]
    for i, path in enumerate(paths):
        rows = [
            {"tokens": tokens_of(n), "advantages": [0.5] * len(tokens_of(n))} for n in range(i * EACH, (i + 1) * EACH)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def change_row(path: Path, line: int, **changes: Any) -> None:
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    rows[line] |= changes
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# Each does damage to the second file, and says which samples are lost by it.


def cut(path: Path) -> range:
    """In the middle of its eleventh sample: each is two members of two blocks."""
    os.truncate(path, 10 * 2 * 1024 + 700)
    return range(EACH + 10, 2 * EACH)


def empty(path: Path) -> range:
    os.truncate(path, 0)
    return range(EACH, 2 * EACH)


def nan(path: Path) -> range:
    change_row(path, 7, tokens=[1, float("nan"), 3])
    return range(EACH + 7, EACH + 8)


def nan_length(path: Path) -> range:
    change_row(path, 7, tokens=float("nan"))
    return range(EACH + 7, EACH + 8)


def another_length(path: Path) -> range:
    change_row(path, 7, advantages=[0.5])
    return range(EACH + 7, EACH + 8)


CASES = {
    "a cut tar": (write_tars, cut, "damaged", "web-1.tar: at byte"),
    "a tar of 0 bytes": (write_tars, empty, "damaged", "web-1.tar: got 0 bytes, expected a tar archive"),
    "NaN among ids": (write_rows, nan, "json", "web-1.jsonl:line 8"),
    "NaN for ids": (write_rows, nan_length, "json", "web-1.jsonl:line 8"),
    "a field of another length": (write_rows, another_length, "advantages: length", "web-1.jsonl:line 8"),
}


@pytest.fixture(scope="module")
def strict() -> Iterator[RunningBroker]:
    """With a stream for each case, since all producers of one must read the same."""
    settings = SETTINGS | {
        "rules": SETTINGS["rules"] | {"poison": "error"},
        "streams": {f"web{case}": {"partitions": 3} for case in range(len(CASES))},
    }
    with running_broker(settings) as broker:
        yield broker


def producer_yaml(folder: Path, broker: RunningBroker, pattern: str, name: str = "web") -> Path:
    source = "webdataset" if pattern.endswith("tar") else "jsonl"
    stream = {"source": source, "shards": str(folder / pattern)}
    return write(folder / "producer.yaml", {"broker": broker.producers, "streams": {name: stream}})


@pytest.mark.parametrize("case", CASES)
def test_with_drop_it_is_one_line_and_a_counter_and_nothing_else_is_lost(case: str, tmp_path: Path) -> None:
    write_files, damage, reason, said = CASES[case]
    paths = write_files(tmp_path)
    lost = damage(paths[1])
    with running_broker(SETTINGS) as broker:
        producer = Daemon(tmp_path, "producer", "produce", "-c", producer_yaml(tmp_path, broker, f"*{paths[0].suffix}"))
        try:
            with streampack.connect(broker.trainers, format="numpy") as loader:
                found = sorted(
                    tuple(pack.input_ids[start : start + length].tolist())
                    for pack in loader
                    for start, length in zip(pack.cu_seqlens_padded[:-1], np.diff(pack.cu_seqlens), strict=True)
                    if length
                )
            assert producer.end() == 0
        finally:
            producer.kill()
        until(lambda: f'stream="web",reason="{reason}"' in broker.get("/metrics"))
        assert found == sorted(tuple(tokens_of(n)) for n in range(FILES * EACH) if n not in lost)
        metrics = broker.get("/metrics")
        assert f'streampack_rejected_samples_total{{stream="web",reason="{reason}"}} 1' in metrics
        lines = [line for line in producer.said.splitlines() if " WARNING " in line]
        assert len(lines) == 1, producer.said
        assert said in lines[0]
        assert f"1 rejected ({reason} 1)" in producer.said


@pytest.mark.parametrize("case", CASES)
def test_with_error_it_ends_the_producer_with_the_same_line(case: str, tmp_path: Path, strict: RunningBroker) -> None:
    write_files, damage, _, said = CASES[case]
    paths = write_files(tmp_path)
    damage(paths[1])
    stream = [*CASES].index(case)
    result = command("produce", "-c", producer_yaml(tmp_path, strict, f"*{paths[0].suffix}", f"web{stream}"))
    line = the_error(result, 1 if "tar" in case else 2)
    assert said in line
    assert "poison: drop" in line
    strict.wait_for(said)
