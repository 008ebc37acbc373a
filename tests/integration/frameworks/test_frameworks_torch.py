"""torch's own loops: what they are given to go on from, all have the losses and steps of plain torch, never killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.frameworks.example_runs import STEPS, Run, check_the_same, killed_and_resumed, run, serving


def test_loops_of_torch_go_on_where_they_were_killed(tmp_path: Path) -> None:
    """All of one broker, since all have one model: what FSDP on two ranks has is compared with plain torch, too."""
    packs, ranks = tmp_path / "packs", tmp_path / "ranks"
    with serving() as broker:
        whole, *plain, cut, rest, two, one = run(
            broker,
            *killed_and_resumed("plain_torch", tmp_path / "plain"),
            Run("stateful_dataloader", packs, dies_at=6),
            Run("stateful_dataloader", packs),
            Run("torch_distributed", ranks, dies_at=6, ranks=2),
            Run("torch_distributed", ranks, ranks=1),
        )
    check_the_same(whole, *plain)
    check_the_same([{"step": line["step"], "loss": line["loss"]} for line in whole], cut, rest)
    assert ([line["step"] for line in two], [line["step"] for line in one]) == (list(range(7)), list(range(4, STEPS)))
    for line in two + one:
        assert line["digest"] == whole[line["step"]]["digest"]
        assert line["loss"] == pytest.approx(whole[line["step"]]["loss"], rel=1e-9)
