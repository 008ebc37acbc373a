"""``pretrain`` of Megatron-LM on several meshes, killed and resumed: packs and losses of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.frameworks.framework_runs import STEPS, Job, Line, run_jobs, serving_rows, write_rows
from tests.integration.frameworks.megatron_lm import CHECKOUT, PACKAGES
from tests.integration.running import RunningBroker

MESHES = {
    "pp": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    "tp": "--tensor-model-parallel-size 2",
    "cp": "--context-parallel-size 2",
}
pytestmark = pytest.mark.skipif(
    not (PACKAGES / "megatron").is_dir(), reason="neither STREAMPACK_MEGATRON nor .venv/megatron has Megatron-LM"
)
with_checkout = pytest.mark.skipif(not CHECKOUT, reason="STREAMPACK_MEGATRON names no checkout of Megatron-LM")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl")


@pytest.fixture(scope="module")
def broker(rows: Path) -> Iterator[RunningBroker]:
    rules = {"budget": 128, "window": {"samples": 32}, "step": {"packs": 4}}
    feeds = {"train": {"streams": ["data"], "cp_layout": "whole"}}
    with serving_rows(rows, rules, feeds=feeds, planned_mesh={"cp": 2}) as running:
        yield running


def run(broker: RunningBroker, jobs: dict[str, Job], folder: Path, rows: Path) -> dict[str, list[Line]]:
    told = {"STREAMPACK_ENDPOINT": broker.trainers}
    return run_jobs("megatron_lm.pretrain_ranks", jobs, folder, rows, PACKAGES, **told)


def saving(folder: Path, arguments: str) -> list[str]:
    return ["--save", str(folder), "--load", str(folder), *arguments.split()]


def check(whole: list[Line], lines: list[Line], steps: range) -> None:
    """The lines of these steps, which have the packs of the whole run, its losses and norms of gradients to 1e-6."""
    assert [line["step"] for line in lines] == list(steps)
    for line in lines:
        expected = whole[line["step"]]
        assert line["packs"] == expected["packs"]
        assert [line["loss"], line["norm"]] == pytest.approx([expected["loss"], expected["norm"]], rel=1e-6)


def test_pretrain_goes_on_from_a_kill_on_another_mesh_with_the_losses_of_one_process(
    broker: RunningBroker, tmp_path: Path, rows: Path
) -> None:
    jobs = {"whole": Job([])}
    for (name, mesh), dies_at in zip(MESHES.items(), (9, 14, None), strict=True):
        jobs[name] = Job(saving(tmp_path / "saved", mesh), dies_at, ranks=2)
    lines = run(broker, jobs, tmp_path, rows)
    whole = lines["whole"]
    assert len({line["packs"] for line in whole}) == len(whole) == STEPS
    assert whole[-1]["loss"] < 0.8 * whole[0]["loss"]
    check(whole, lines["pp"], range(10))
    check(whole, lines["tp"], range(8, 15))
    check(whole, lines["cp"], range(12, STEPS))


@with_checkout
def test_whole_runs_on_each_mesh_have_the_losses_of_one_process(
    broker: RunningBroker, tmp_path: Path, rows: Path
) -> None:
    jobs = {"whole": Job([])} | {name: Job(mesh.split(), ranks=2) for name, mesh in MESHES.items()}
    predicts = "--mtp-num-layers 1 --train-iters 4"
    jobs["predicting"] = Job(predicts.split())
    layouts = {"last": "Et|tt|t|mL", "middle": "Etttt|m|L"}
    for name, layout in layouts.items():
        stages = 2 if name == "last" else 3
        mesh = f"{predicts} --pipeline-model-parallel-size {stages} --pipeline-model-parallel-layout {layout}"
        jobs[name] = Job(mesh.split(), ranks=stages)
    lines = run(broker, jobs, tmp_path, rows)
    for name in MESHES:
        check(lines["whole"], lines[name], range(STEPS))
    for name in layouts:
        check(lines["predicting"], lines[name], range(4))
