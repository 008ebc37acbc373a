"""Tensor-parallel ranks that all read: one line says what fewer readers, or a relay, would save."""

from __future__ import annotations

import logging
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import streampack as sp
from streampack.client.reader import ADVISE_AFTER_STEPS
from streampack.sources import SourceSettings, open_source
from tests.integration.running import folder, producing_here, running_broker, write_jsonl


def read(trainers: str, tp_rank: int, readers: Any) -> None:
    mesh = {"tp": 2, "tp_rank": tp_rank}
    with sp.connect(trainers, mesh=mesh, readers=readers, format="numpy") as loader:
        for step in loader.steps():
            if step.index == ADVISE_AFTER_STEPS:
                return


@pytest.mark.parametrize(("readers", "ranks"), [(None, (0, 1)), ({"tp": [0]}, (0,))])
def test_ranks_that_read_the_same_say_once_what_they_could_save(
    readers: Any, ranks: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "streampack.client")
    settings = {"rules": {"budget": 256, "step": {"packs": 2}}, "streams": {"web": {"repeat": True}}}
    with folder() as path, running_broker(settings) as broker:
        rows = [{"tokens": [1] * (1 + 31 * i % 97)} for i in range(300)]
        source = open_source(SourceSettings("jsonl", str(write_jsonl(Path(path) / "a.jsonl", rows))))
        with producing_here(broker.producers, {"web": source}), ThreadPoolExecutor(len(ranks)) as pool:
            list(pool.map(lambda rank: read(broker.trainers, rank, readers), ranks))
    said = [line.getMessage() for line in caplog.records if "tensor-parallel ranks" in line.getMessage()]
    if readers is not None:
        assert said == []
        return
    (line,) = said
    assert re.search(r"2 tensor-parallel ranks .* would save about \d+\.\d MB/s.*readers=\{'tp': \[0\]\}", line)
