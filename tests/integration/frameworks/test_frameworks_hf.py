"""Hugging Face's Trainer: runs that are killed go on. Two ranks: ``tests/training/hf/test_hf_ranks.py``."""

from __future__ import annotations

from pathlib import Path

from tests.integration.frameworks.example_runs import killed_and_resumed_is_the_same, serving
from tests.integration.running import until


def test_a_trainer_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    with serving() as broker:
        lines = killed_and_resumed_is_the_same("hf_trainer", broker, tmp_path)
        until(lambda: broker.feed()["committed"] == 9)  # the last that was saved; the status is made twice a second
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]
