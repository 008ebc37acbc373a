"""What is said of steps that are batches, and of other shapes, on a pipeline: beside what ranks of a real broker got.

By ``streampack plan`` and ``report``, ``why`` and ``replay``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streampack
from tests.integration.commands.planned_run import BROKER, RULES, ask, make_files
from tests.integration.running import RunningBroker, in_process, running, running_broker, the_error, until, write
from tests.integration.samples.pushed_run import pushed_settings

STEP = {"samples": 37, "min_micro_batches": 2}
MESH = ("--mesh", "dp=3,cp=2,pp=2")

FREE_PORTS = {"producers": "tcp://127.0.0.1:*", "trainers": "tcp://127.0.0.1:*", "http": "127.0.0.1:0"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_files(tmp_path_factory.mktemp("batches"))
    rules = {**RULES, "step": STEP, "shape": "exact"}
    broker = {**BROKER, "rules": rules, "planned_mesh": {"dp": 3, "cp": 2}, "state_dir": str(folder / "state")}
    write(folder / "broker.yaml", broker)
    return folder


@dataclass(frozen=True)
class Served:
    """A broker, and of each step that it has served the packs of all ranks."""

    broker: RunningBroker
    steps: list[list[streampack.Pack]]

    @property
    def num_steps(self) -> int:
        return len(self.steps)


@pytest.fixture(scope="module")
def served(files: Path) -> Iterator[Served]:
    """Ranks, of a pipeline of two stages the last ones, have read all of one pass."""
    with running_broker(json.loads((files / "broker.yaml").read_text())) as broker:
        tree = json.loads((files / "producer.yaml").read_text())
        config = write(files / "real.yaml", {**tree, "broker": broker.producers, "processes": 2})
        sizes = {"dp": 3, "cp": 2, "pp": 2, "pp_rank": 1}
        ranks = [{**sizes, "dp_rank": dp, "cp_rank": cp} for dp in range(3) for cp in range(2)]
        with running("producer", "produce", "-c", config):
            clients = [
                streampack.connect(broker.trainers, mesh=mesh, readers={"pp": [-1]}, format="numpy") for mesh in ranks
            ]
            together = zip(*(client.steps() for client in clients), strict=True)
            steps = [[pack for step in ranks_steps for pack in step] for ranks_steps in together]
            for client in clients:
                client.close()
        yield Served(broker, steps)


@pytest.fixture(scope="module")
def snapshot(served: Served) -> dict[str, Any]:
    until(lambda: is_over(served.broker, served.num_steps))
    return served.broker.feed()


def is_over(broker: RunningBroker, num_steps: int) -> bool:
    """What was said is of all steps, dealt too."""
    feed = broker.feed()
    return bool(feed["state"] == "ended" and feed["steps"]["returned"] == feed["totals"]["steps"] == num_steps)


def test_the_batches_predicted_from_the_sources_are_those_of_a_real_broker(
    files: Path, served: Served, snapshot: dict[str, Any]
) -> None:
    found = ask("plan", "-c", files / "producer.yaml", "-c", files / "broker.yaml", *MESH, "--samples", "5000")
    base, totals = found["settings"][0], snapshot["totals"]
    assert (base["steps"], base["step_samples"], base["step_packs"]) == (served.num_steps, 37, None)
    assert base["utilization"] == pytest.approx(snapshot["figures"]["utilization"])
    for name in ("cost_max_over_mean", "bin_balance"):
        assert base[name] == pytest.approx(snapshot["figures"][name]), name
    waste = snapshot["waste_tokens"]
    delivered = totals["tokens"] + sum(waste.values())
    assert waste["pipeline"], "stages exchange one shape"
    assert base["waste"] == pytest.approx({cause: tokens / delivered for cause, tokens in waste.items()})
    assert base["filled"] == pytest.approx(totals["tokens"] / delivered)
    assert "window" not in {row["axis"] for row in found["settings"]}
    assert "joint" not in {row["packer"] for row in found["settings"]}
    assert "step: {samples: 37, min_micro_batches: 2}" in found["broker_yaml"]
    assert "shape: exact" in found["broker_yaml"]
    assert "pp" not in found["broker_yaml"]


def test_a_report_on_batches_closes_each_in_all_ways(files: Path, served: Served, snapshot: dict[str, Any]) -> None:
    found, totals = ask("report", files / "state", "--micro-batch", "100000"), snapshot["totals"]
    assert (found["batches"], found["tokens"], found["share"]) == (served.num_steps, totals["tokens"], 1.0)
    assert found["run"]["slots"] == totals["slot_tokens"], "exact packs, as they were formed"
    assert found["others"]["greedy"]["slots"] == found["run"]["slots"], "exact ones of any packer are as long"
    assert found["others"]["padding"]["slots"] == sum(map(padded, served.steps)), "to the longest of each batch"
    by_status = ask("report", served.broker.http)
    run = {key: by_status["run"][key] for key in found["run"]}  # the status knows waits, too, where there were any
    assert (by_status["batches"], run) == (found["batches"], found["run"])


def padded(packs: list[streampack.Pack]) -> int:
    """Slots of a batch whose samples are as long as its longest."""
    slots = np.concatenate([np.diff(pack.cu_seqlens_padded)[: pack.num_samples] for pack in packs if not pack.cp_rank])
    return len(slots) * int(slots.max())


def test_why_and_replay_deal_as_the_pipeline_had_it(files: Path, served: Served, tmp_path: Path) -> None:
    where = ("--step", "7", "-c", files / "broker.yaml")
    got = {(pack.micro_batch, pack.dp_rank): pack for pack in served.steps[7] if not pack.cp_rank}
    for pack in ask("why", *where, "--dp-size", "3", "--pp-size", "2")["packs"]:
        mine = got.pop((pack["micro_batch"], pack["dp_rank"]))
        assert pack["pack"] == mine.pack
        assert pack["length"] == 2 * len(mine.input_ids), "of both context-parallel ranks"
        assert [sample["index"] for sample in pack["samples"]] == mine.sample_ids[:, 1].tolist()
    assert not got
    shown = in_process("why", *where, "--dp-size", "3", "--pp-size", "2").stdout
    assert " of " in shown, "what was split off says of which pack"
    mesh = ("--dp", "3", "--cp", "2", "--pp", "2", "-o", tmp_path / "step.npz")
    assert ask("replay", *where, "-p", files / "producer.yaml", *mesh)["equal"]
    with np.load(tmp_path / "step.npz") as arrays:
        for mine in served.steps[7]:
            name = f"dp{mine.dp_rank}.cp{mine.cp_rank}.{mine.micro_batch}.input_ids"
            assert np.array_equal(arrays[name], mine.input_ids), name
    line = the_error(in_process("why", *where, "--pp-size", "2"), 2)
    assert "Got --pp-size 2 without --dp-size. Pass the number of data-parallel ranks as --dp-size." in line


@pytest.mark.parametrize("step", [{"packs": 3}, {"end_of_batch": True}])
def test_batches_that_marks_closed_are_compared_closed(step: dict[str, Any], tmp_path: Path) -> None:
    """Of a stream that is cut into packs, too."""
    draws = np.random.default_rng(5)
    batches = [draws.integers(1, 60, count).tolist() for count in (14, 20, 9, 31)]
    streams = {"rollouts": {"pushed": True, "partitions": 1}}
    state = tmp_path / "state"
    changes = {"rules": {"budget": 64, "step": step}, "streams": streams, "state_dir": str(state), "listen": FREE_PORTS}
    with running_broker(pushed_settings(tmp_path, **changes)) as broker:
        with streampack.Producer(broker.producers, stream="rollouts", partition=0) as rollouts:
            for number, batch in enumerate(batches):
                rollouts.send_many([[7] * length for length in batch])
                rollouts.end_of_batch(number)
            rollouts.close(end=True)
        with streampack.connect(broker.trainers, format="numpy") as loader:
            num_steps = sum(1 for _ in loader.steps())
        until(lambda: is_over(broker, num_steps))
    found = ask("report", state)
    mean = ask("plan", state)["settings"][0]["step_samples"]
    assert found["batches"] == len(batches)
    for name, packer in (("greedy", "concatenative"), ("first_fit_decreasing", "first_fit_decreasing")):
        packs = sum(len(streampack.pack_lengths(batch, 64, packer)) for batch in batches)
        assert found["others"][name]["slots"] == 64 * packs, name
    assert mean == (None if "packs" in step else round(sum(map(len, batches)) / len(batches)))


def test_a_running_broker_s_batches_are_planned(served: Served, snapshot: dict[str, Any]) -> None:
    """Its lengths have no order, and its ranks have left."""
    base = ask("plan", served.broker.http, *MESH)["settings"][0]
    assert (base["step_samples"], base["shape"], base["mesh"]["pp"]) == (37, "exact", 2)
    assert abs(base["steps"] - served.num_steps) <= 1, "pieces of split samples are samples here"
    assert base["waste"]["pipeline"] > 0.05


def test_how_large_batches_are_that_marks_close_is_to_be_said(files: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.random.default_rng(1).integers(1, 500, 900))
    rules = {**RULES, "step": {"end_of_batch": True, "micro_batch_multiple": 2}}
    broker = {"rules": rules, "merge": "arrival", "state_dir": "x", "streams": {"rollouts": {"pushed": True}}}
    config = write(tmp_path / "broker.yaml", broker)
    line = the_error(in_process("plan", tmp_path / "lengths.npy", "-c", config), 2)
    assert "With `step: {end_of_batch: true}`, the size of a batch is not known." in line
    assert "Pass its number of samples with --batch." in line
    found = ask("plan", tmp_path / "lengths.npy", "-c", config, "--batch", "90", "--mesh", "dp=2")
    base = found["settings"][0]
    assert (base["steps"], base["step_samples"]) == (10, 90)
    assert base["micro_batches_low"] % 2 == base["micro_batches_high"] % 2 == 0
    assert found["notes"] == [
        "the forecast assumes batches of 90 samples; in a run, marks in the streams end the batches"
    ]
    assert "step: {end_of_batch: true, micro_batch_multiple: 2}" in found["broker_yaml"]


def test_the_lines_for_broker_yaml_keep_the_steps_of_the_configuration(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.random.default_rng(1).integers(1, 500, 900))
    rules = {
        "budget": 1024, "step": {"packs": 8}, "warmup": {"init": 512, "steps": 5}, "shape": {"buckets": [512]},
        "balance": {"hidden_size": 64, "order": "small_at_edges"}, "tail": "drop", "align": {"sample": "tight"},
    }  # fmt: skip
    mesh = {"dp": 2, "cp": 2, "tp": 2}
    config = write(tmp_path / "broker.yaml", {"rules": rules, "planned_mesh": mesh, "streams": {"web": {}}})
    found = ask("plan", tmp_path / "lengths.npy", "-c", config)
    file = tmp_path / "again.yaml"
    file.write_text(found["broker_yaml"] + "\nstreams: {web: {}}\n")
    took, again = found["take"], ask("plan", tmp_path / "lengths.npy", "-c", file)["settings"][0]
    for key in ("steps", "useful", "waste", "align", "shape", "packer", "window", "budget", "step_packs"):
        assert again[key] == took[key], key
    assert took["align"] == {"sample": 4, "pack": 4}


def test_lengths_of_less_than_a_batch_are_said_to_be_so(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.arange(1, 10))
    found = ask("plan", tmp_path / "lengths.npy", "--batch", "10", "--budget", "64")
    assert found["notes"] == ["the lengths do not fill a batch, so the figures are for a batch of 9 samples"]


def test_shapes_and_stages_show_what_they_cost(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.random.default_rng(1).integers(1, 500, 900))
    common = (tmp_path / "lengths.npy", "--budget", "1024", "--batch", "30", "--packer", "exact_fill,exact_fill")
    meshes = (
        "--mesh",
        "dp=4",
        "--mesh",
        "dp=4,pp=2",
        "--shape",
        "exact",
        "--shape",
        "fixed",
        "--shape",
        "multiple=128",
    )
    found = ask("plan", *common, *meshes)
    of = {(row["axis"], str(row["shape"]), row["mesh"]["pp"]): row for row in found["settings"]}
    exact, fixed = of["shape", "exact", 1], of["shape", "fixed", 1]
    multiple, stages = of["shape", "{'multiple': 128}", 1], of["mesh", "exact", 2]
    assert exact["filled"] == 1.0
    assert fixed["waste"]["pack_tail"] == pytest.approx(1 - fixed["filled"])
    assert multiple["waste"]["shape"] == pytest.approx(1 - multiple["filled"])
    assert stages["waste"]["pipeline"] == pytest.approx(1 - stages["filled"])
    assert exact["useful"] > multiple["useful"] > fixed["useful"]


def test_precision_asks_for_its_multiples(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.random.default_rng(1).integers(1, 500, 900))
    options = ("--mesh", "dp=2,cp=2,tp=2", "--precision", "mxfp8")
    found = ask("plan", tmp_path / "lengths.npy", *options, "--shape", "exact", "--batch", "64")
    rows = {row["axis"]: row for row in found["settings"]}
    assert rows["base"]["align"] == {"sample": 8, "pack": 256}
    assert rows["mesh"]["align"] == {"sample": 4, "pack": 128}, "tight, too"
    assert rows["base"]["waste"]["pack_tail"] > 0
    assert "precision: mxfp8" in found["broker_yaml"]
    file = tmp_path / "broker.yaml"
    file.write_text(found["broker_yaml"] + "\nstreams: {web: {}}\n")
    values = {row["path"]: row["value"] for row in ask("check", file)["values"]}
    assert (values["precision"], values["rules.step.samples"], values["rules.shape"]) == ("mxfp8", 64, "exact")


def test_tables_fit_a_narrow_terminal(
    served: Served, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "lengths.npy", np.random.default_rng(1).integers(1, 9000, 300))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    mesh = ("--mesh", "dp=16,cp=2,tp=2,pp=2", "--batch", "20", "--budget", "8192")
    of_report = ("report", "--gpus", "8", "--tokens-per-second", "9", files / "state")
    for options in (("plan", *mesh, tmp_path / "lengths.npy"), of_report):
        shown = in_process(*options).stdout
        lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
        table = lines[lines.index("") :][: lines.index("") + 12]
        assert max(map(len, table)) <= 80, "\n".join(table)
    assert "a wider terminal shows attention" in in_process("plan", *mesh, tmp_path / "lengths.npy").stdout
