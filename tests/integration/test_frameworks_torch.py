"""torch's own loops: what they are given to go on from, all have the losses and steps of plain torch, never killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.frameworks import STEPS, killed_and_resumed_is_the_same, run, serving


def test_loops_of_torch_go_on_where_they_were_killed(tmp_path: Path) -> None:
    """All of one broker, since all have one model: what FSDP on two ranks has is compared with plain torch, too."""
    with serving() as broker:
        whole = killed_and_resumed_is_the_same("plain_torch", broker, tmp_path / "plain")
        packs = killed_and_resumed_is_the_same("stateful_dataloader", broker, tmp_path / "packs")
        two = run("torch_distributed", broker, tmp_path / "ranks", ranks=2, dies_at=6)
        one = run("torch_distributed", broker, tmp_path / "ranks", ranks=1)
    assert packs == [{"step": line["step"], "loss": line["loss"]} for line in whole]
    assert ([line["step"] for line in two], [line["step"] for line in one]) == (list(range(7)), list(range(4, STEPS)))
    for line in two + one:
        assert line["digest"] == whole[line["step"]]["digest"]
        assert line["loss"] == pytest.approx(whole[line["step"]]["loss"], rel=1e-9)
