"""torch's own loops: what they are given to go on from, all have the losses and steps of plain torch, never killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import BLOCKS, ROOT
from tests.integration.frameworks.example_runs import (
    EXAMPLES,
    STEPS,
    Run,
    check_the_same,
    killed_and_resumed,
    run,
    serving,
)

HERE = str(Path(__file__).relative_to(ROOT))


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


def test_a_loop_with_accelerate_goes_on_where_it_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that are killed, the same two, and one rank after them have the losses and gradients of one."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # as accelerate launch --cpu
    name, ranks = "accelerate_loop", tmp_path / "ranks"
    with serving() as broker:
        whole, cut, rest, one = run(
            broker,
            Run(name, tmp_path / "whole"),
            Run(name, ranks, dies_at=6, ranks=2),
            Run(name, ranks, ranks=2, steps=8),
            Run(name, ranks, ranks=1),
        )
    assert [[line["step"] for line in lines] for lines in (cut, rest, one)] == [[*range(7)], [*range(4, 8)], [8, 9]]
    for line in cut + rest + one:
        expected = whole[line["step"]]
        assert line["digest"] == expected["digest"]
        for figure in ("loss", "grad_norm"):
            assert line[figure] == pytest.approx(expected[figure], rel=1e-5)


def test_the_loop_of_the_page_about_accelerate_is_the_example() -> None:
    (block,) = [each for each in BLOCKS if each.page == "docs/how-to/accelerate.md" and each.reason == HERE]
    code = (EXAMPLES / "accelerate_loop.py").read_text()
    assert block.code.removeprefix("# train.py\n") == code[code.index("import json") :]


def test_groups_of_ranks_that_change_have_the_losses_of_one_rank(tmp_path: Path) -> None:
    rules, lines = {"shape": "exact"}, []
    for ranks in (4, 1):
        feed = {"cp": "dynamic", "rank_tokens": 128 // ranks, "exchange": {"node": 1}}
        with serving(rules, feeds={"train": feed}, planned_mesh={"dp": ranks}) as broker:
            lines += run(broker, Run("dynamic_cp", tmp_path / str(ranks), ranks=ranks, steps=6))
    four, one = lines
    assert [line["step"] for line in four] == list(range(6))
    assert {size for line in four for size in line["sizes"]} == {1, 2, 4}
    for got, expected in zip(four, one, strict=True):
        assert got["digest"] == expected["digest"]
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-9)
    assert one[-1]["loss"] < 0.9 * one[0]["loss"]


def test_the_loop_and_the_mask_of_the_page_are_those_of_the_example() -> None:
    lines = [line.strip() for line in (EXAMPLES / "dynamic_cp.py").read_text().splitlines()]
    blocks = [block for block in BLOCKS if block.page == "docs/how-to/dynamic-cp.md" and block.reason == HERE]
    assert len(blocks) == 2
    for block in blocks:
        assert [line for line in block.code.splitlines() if line.strip() not in lines] == []
