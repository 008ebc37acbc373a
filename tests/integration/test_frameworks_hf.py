"""Hugging Face's Trainer: runs that are killed go on, and two ranks train what one does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.frameworks import killed_and_resumed_is_the_same, run, serving


def test_a_trainer_goes_on_where_it_was_killed_and_two_ranks_have_its_losses(tmp_path: Path) -> None:
    with serving() as broker:
        one = killed_and_resumed_is_the_same("hf_trainer", broker, tmp_path)
        two = run("hf_trainer", broker, tmp_path / "two", steps=5, ranks=2)
    assert [line["digest"] for line in two] == [line["digest"] for line in one[:5]]
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one[:5]], rel=1e-5)
    assert one[-1]["loss"] < 0.9 * one[0]["loss"]
