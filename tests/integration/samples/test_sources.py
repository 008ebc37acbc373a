"""Every format through a real producer and broker; what is broken in one stream ends in one line."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import streampack
from streampack.sources import SourceSettings
from tests.integration.running import RunningBroker, running, running_broker, the_error, write
from tests.integration.running import streampack as command
from tests.sources.writers import EVERY, WRITERS

KINDS = ["jsonl", "webdataset", "parquet", "text", "paragraph", "file", "megatron", "huggingface"]
RULES = {"budget": 128, "window": {"samples": 64}, "step": {"packs": 2}}


def tree_of(settings: SourceSettings) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(settings)
    return {key: value for key, value in found.items() if value not in (None, {})}


def producer_file(folder: Path, broker: str, streams: dict[str, Any]) -> Path:
    tree = {"broker": broker, "processes": 2, "tokenizer": {"append_eos": False}, "streams": streams}
    return write(folder / "producer.yaml", tree)


def test_a_run_of_every_format_delivers_every_sample_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    sources = {}
    for kind in KINDS:
        (tmp_path / kind).mkdir()
        sources[kind] = tree_of(WRITERS[kind](tmp_path / kind))
    (tmp_path / "near_items.py").write_text(f"items = {EVERY!r}\n\n\ndef generate():\n    yield from items\n")
    sources["list"] = {"source": "python", "path": "near_items:items"}
    sources["replayed"] = {"source": "python", "path": "near_items:generate"}
    streams = {name: {"partitions": 3} for name in sources}
    with running_broker({"rules": RULES, "streams": streams}) as broker:
        file = producer_file(tmp_path, broker.producers, sources)
        with running("producer", "produce", "-c", file), streampack.connect(broker.trainers, format="numpy") as loader:
            found = [text for pack in loader for text in texts_of(pack)]
    names = sorted(sources)  # streams are numbered in the order of the configuration, whatever it is
    for number in range(len(names)):
        assert sorted(text for stream, text in found if stream == number) == EVERY
    assert len(found) == len(EVERY) * len(sources)


def texts_of(pack: streampack.Pack) -> list[tuple[int, str]]:
    bounds = zip(pack.cu_seqlens_padded.tolist(), np.diff(pack.cu_seqlens).tolist(), strict=False)
    streams = pack.sample_ids[:, 0].tolist()
    return [
        (stream, bytes(pack.input_ids[start : start + length].astype(np.uint8)).decode())
        for stream, (start, length) in zip(streams, bounds, strict=False)
    ]


@pytest.mark.parametrize("kind", ["parquet", "megatron", "huggingface"])
def test_a_file_that_is_cut_ends_the_producer_in_one_line(kind: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    settings = WRITERS[kind](data)
    path = max(data.glob("*.bin" if kind == "megatron" else "*"), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[:-20])
    with running_broker({"rules": RULES, "streams": {"web": {}}}) as broker:
        line = produce(tmp_path, broker, settings)
    assert path.name in line
    assert "cut short" in line


def produce(folder: Path, broker: RunningBroker, settings: SourceSettings) -> str:
    file = producer_file(folder, broker.producers, {"web": tree_of(settings)})
    return the_error(command("produce", "-c", file), 1)
