"""TRL's SFTTrainer: runs that are killed go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.frameworks.example_runs import killed_and_resumed_is_the_same, serving


def test_an_sft_trainer_goes_on_where_it_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    with serving() as broker:
        lines = killed_and_resumed_is_the_same("trl_sft", broker, tmp_path)
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]
