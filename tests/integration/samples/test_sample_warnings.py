"""A sample that teaches nothing is delivered, and every view says so: the log, status, metrics and the check."""

from __future__ import annotations

import json
import logging
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest
from streampack_services.broker.status import BrokerStatus
from streampack_services.watch.status_report import show_status

import streampack
from tests.integration.running import in_process, until, write_jsonl

SENTENCE = "no token of the sample counts in the loss"
COMPLETIONS = [{"prompt": "why? ", "completion": "because"}, {"prompt": "how? ", "completion": ""}] * 4


def read(url: str) -> str:
    with urllib.request.urlopen(url) as answer:
        return str(answer.read().decode())


def test_samples_without_loss_tokens_are_counted_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_jsonl(tmp_path / "pairs.jsonl", COMPLETIONS)
    options: dict[str, Any] = {"tokenizer": {"name": "bytes", "append_eos": False}, "fields": {"loss_mask": {}}}
    with (
        caplog.at_level(logging.WARNING),
        streampack.local(str(file), budget=64, http="127.0.0.1:0", format="numpy", **options) as loader,
    ):
        samples = sum(len(pack.sample_ids) for pack in loader)
        assert samples == len(COMPLETIONS), "a warning drops nothing"
        assert loader.http is not None
        until(lambda: 'warning="' in read(f"{loader.http}/metrics"))
        metrics, status = (read(f"{loader.http}/{page}") for page in ("metrics", "status"))
    streams = json.loads(status)["streams"]
    assert streams[0]["warnings"] == {"no_loss_tokens": 4}
    assert 'streampack_sample_warnings_total{stream="data",warning="no_loss_tokens"} 4.0' in metrics
    lines = [record.getMessage() for record in caplog.records if SENTENCE in record.getMessage()]
    assert len(lines) == 1
    assert "pairs.jsonl" in lines[0]
    show_status(msgspec.json.decode(status, type=BrokerStatus))
    shown = " ".join(capsys.readouterr().out.split())
    assert f"data: warning no_loss_tokens, 4 samples: {SENTENCE}" in shown


def test_check_warns_of_the_first_rows(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "pairs.jsonl", COMPLETIONS)
    config = tmp_path / "producer.yaml"
    config.write_text(
        f"broker: tcp://127.0.0.1:7401\ntokenizer: {{name: bytes, append_eos: false}}\n"
        f"streams: {{web: {{source: jsonl, path: {tmp_path}/pairs.jsonl}}}}\n"
    )
    for arguments in ([], ["--samples", "2"]):
        assert SENTENCE in " ".join(in_process("check", config, *arguments).stdout.split())
    (warning,) = json.loads(in_process("check", config, "--json").stdout)["warnings"]
    assert (warning["word"], warning["samples"], warning["rows"]) == ("no_loss_tokens", 4, 8)
