"""``streampack plan`` and ``report``: as commands, and their predictions beside what a real broker does."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streampack_services.audit import why
from streampack_services.forecast.rank_loads import load_of
from streampack_services.ledger.formed_by import FormingRules
from streampack_services.ledger.run_hours import FeedHours, StepTimes, write_hours
from streampack_services.ledger.state_dir import read_ledger

import streampack
from streampack.core.packers import PACKERS
from tests.docs.pages import BLOCKS
from tests.integration.commands.planned_run import RULES, ask, make_files, producer
from tests.integration.running import (
    RunningBroker,
    in_process,
    running,
    running_broker,
    the_error,
    until,
    write,
    write_jsonl,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def served(files: Path) -> Iterator[RunningBroker]:
    """A broker whose two ranks have read all of one pass."""
    settings = json.loads((files / "broker.yaml").read_text())
    with running_broker(settings) as broker:
        tree = json.loads((files / "producer.yaml").read_text())
        config = write(files / "real.yaml", {**tree, "broker": broker.producers, "processes": 2})
        ranks = [{"dp": 2, "dp_rank": dp, "cp": 2, "cp_rank": cp} for dp in range(2) for cp in range(2)]
        with running("producer", "produce", "-c", config):
            clients = [streampack.connect(broker.trainers, mesh=mesh, format="numpy") for mesh in ranks]
            broker.num_steps = sum(1 for _ in zip(*(client.steps() for client in clients), strict=True))
            for client in clients:
                client.close()
        yield broker


@pytest.fixture(scope="module")
def snapshot(served: RunningBroker) -> dict[str, Any]:
    until(lambda: served.feed()["state"] == "ended" and served.feed()["steps"]["returned"] == served.num_steps)
    return served.feed()


def test_the_steps_predicted_from_the_sources_are_those_of_a_real_broker(
    files: Path, served: RunningBroker, snapshot: dict[str, Any]
) -> None:
    found = ask("plan", "-c", files / "producer.yaml", "-c", files / "broker.yaml", "--samples", "5000")
    base = found["settings"][0]
    assert found["whole"]
    assert (base["steps"], base["steps_low"], base["steps_high"]) == (served.num_steps,) * 3
    totals = snapshot["totals"]
    assert base["packs"] == totals["packs"] - totals["empty_packs"]
    slots = totals["packs"] * RULES["budget"]
    expected = {cause: tokens / slots for cause, tokens in snapshot["waste_tokens"].items()}
    assert base["waste"] == pytest.approx(expected)
    for name in ("utilization", "bin_balance", "cost_max_over_mean"):
        assert base[name] == pytest.approx(snapshot["figures"][name]), name


def test_a_log_gives_the_lengths_of_a_run_back_in_their_order(
    files: Path, served: RunningBroker, snapshot: dict[str, Any]
) -> None:
    found = ask("report", files / "state", "--gpus", "4", "--tokens-per-second", "1000")
    totals = snapshot["totals"]
    assert (found["samples"], found["tokens"], found["share"]) == (totals["samples"], totals["tokens"], 1.0)
    assert found["run"]["slots"] == (totals["packs"] - totals["empty_packs"]) * 512
    others = found["others"]
    assert others["greedy"]["saved_share"] > 0.05, "what was packed full must not be found full again"
    assert others["padding"]["slots"] > others["greedy"]["slots"] >= others["first_fit_decreasing"]["slots"]
    for row in others.values():
        assert row["saved_slots"] == row["slots"] - found["run"]["slots"]
        assert row["saved_gpu_hours"] == pytest.approx(row["saved_slots"] / 1000 / 3600)
        assert row["saved_hours"] == pytest.approx(row["saved_gpu_hours"] / 4)


def test_a_broker_knows_the_lengths_that_it_has_served(
    files: Path, served: RunningBroker, snapshot: dict[str, Any]
) -> None:
    by_log, by_status = ask("report", files / "state"), ask("report", served.http)
    assert "an address has no step times" in by_status["fit"]["why"]
    assert sum(row[0] for row in snapshot["lengths"]) == snapshot["totals"]["samples"]
    assert sum(row[1] for row in snapshot["lengths"]) == snapshot["totals"]["tokens"]
    assert {name: by_status["run"][name] for name in by_log["run"]} == by_log["run"], "a broker may know GPU hours, too"
    for name, row in by_log["others"].items():
        assert by_status["others"][name]["slots"] == pytest.approx(row["slots"], rel=0.1), "in another order"
    assert ask("report", f"file://{served.rendezvous}")["tokens"] == by_log["tokens"]


def test_a_report_fits_the_cost_to_step_times_and_says_what_a_better_one_would_gain(
    files: Path, served: RunningBroker, snapshot: dict[str, Any], tmp_path: Path
) -> None:
    """Times are planted: attention costs 100 times as much as the run's factors say."""
    state = shutil.copytree(files / "state", tmp_path / "state")
    with read_ledger(state) as ledger:
        history = why.feed_of(ledger, None)
        forming, times = FormingRules(ledger, history), dict[int, float]()
        for rows in ledger.steps(history.name):
            load = load_of(rows, forming.of(rows).rules, 2, 1)
            times[rows.step] = float((245.76 * load.tokens + load.attention).max(axis=1).sum()) * 1e-7
    write_hours(state, {history.name: FeedHours(step_times=StepTimes(dp=2, pp=1, seconds=times))})
    fit = ask("report", state)["fit"]
    assert fit["fitted"]["a"] == pytest.approx(245.76, rel=0.1)
    assert (fit["before"], fit["fitted"]["b"]) == ({"a": 24576, "b": 1}, 1)
    assert fit["r2"] == pytest.approx(1.0, abs=0.01)
    assert fit["r2"] > fit["r2_before"]
    assert fit["gain"] >= -0.01
    assert "a fitted cost 1.00" in in_process("report", state).stdout
    write_hours(state, {history.name: FeedHours(step_times=StepTimes(dp=2, pp=1, seconds={0: 1.0}))})
    assert ask("report", state)["fit"]["why"] == "got 1 step times with the same balance, expected at least 30"


def test_a_plan_is_made_from_what_a_run_has_served(
    files: Path, served: RunningBroker, snapshot: dict[str, Any]
) -> None:
    by_log, by_status = ask("plan", files / "state"), ask("plan", served.http)
    for found in (by_log, by_status):
        base = found["settings"][0]
        assert base["mesh"]["dp"] == 1, "its ranks have left"
        assert base["align"] == {"sample": 4, "pack": 4}, "as the run has it"
        assert (base["budget"], base["window"], base["step_packs"]) == (512, 64, 4)
        assert abs(base["steps"] - served.num_steps) <= 1, "streams are mixed nearly as they were"
        assert found["lengths"]["tokens"] == snapshot["totals"]["tokens"]


def test_a_part_of_a_source_says_so_and_the_steps_lie_between(files: Path, served: RunningBroker) -> None:
    found = ask("plan", "-c", files / "producer.yaml", "-c", files / "broker.yaml", "--samples", "150")
    base = found["settings"][0]
    assert [stream["samples"] for stream in found["streams"]] == [150, 150]
    assert all(stream["share"] == pytest.approx(150 / 360, rel=0.01) for stream in found["streams"])
    assert base["steps_low"] < base["steps_high"]
    assert 0.7 * served.num_steps < base["steps"] < 1.3 * served.num_steps


@pytest.mark.parametrize("packer", ["exact_fill", "sliding_ffd", "first_fit_decreasing", "buffer_first_fit"])
def test_the_packs_of_any_packer_are_those_of_a_real_broker(files: Path, tmp_path: Path, packer: str) -> None:
    shards = str(files / "web-*.jsonl")
    options = ("--budget", "512", "--packs", "4", "--window", "64", "--packer", packer, "--overlong", "truncate")
    base = ask("plan", "-c", producer(tmp_path, shards), *options)["settings"][0]
    with streampack.local(shards, budget=512, packs=4, window=64, packer=packer, overlong="truncate") as loader:
        steps = [list(step) for step in loader.steps()]
    assert base["packer"] == packer
    assert base["steps"] == len(steps)
    assert base["packs"] == sum(len(pack.sample_ids) > 0 for step in steps for pack in step)


def test_samples_that_cannot_be_used_are_counted(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * (i % 7)} for i in range(70)])
    found = ask("plan", "-c", producer(tmp_path, str(tmp_path / "a.jsonl")), "--budget", "64")
    assert (found["rejected"], found["lengths"]["samples"], found["whole"]) == (10, 60, True)
    assert "data: rejected 10 samples: empty" in found["notes"]
    assert "poison: drop}" in found["broker_yaml"]
    write_jsonl(tmp_path / "b.jsonl", [{"text": ""}] * 3)
    line = the_error(in_process("plan", "-c", producer(tmp_path, str(tmp_path / "b.jsonl"))), 1)
    assert "data: all 3 samples were rejected ({'empty': 3})." in line


def test_a_run_that_goes_on_has_no_known_length_of_a_pass(files: Path) -> None:
    shards = str(files / "web-*.jsonl")
    with streampack.local(shards, budget=512, packs=4, overlong="split", repeat=True, http="127.0.0.1:0") as loader:
        for _ in zip(range(40), loader.steps(), strict=False):
            pass
        assert loader.http is not None
        until(lambda: bool(ask("status", str(loader.http))["feeds"]["train"]["totals"]["steps"] >= 40))
        found = ask("plan", str(loader.http))
        shown = " ".join(in_process("plan", str(loader.http)).stdout.split())
        report = ask("report", str(loader.http))
    assert found["settings"][0]["steps"] is None
    assert found["settings"][0]["mesh"] == {"dp": 1, "cp": 1, "tp": 1, "pp": 1}
    assert "samples were read; the size of a pass is not known" in shown
    assert "The number of steps per pass is not known" in shown
    assert report["others"]["greedy"]["saved_slots"] > 0


def test_a_long_run_is_thinned_out(
    files: Path, served: RunningBroker, snapshot: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ask("report", files / "state")
    monkeypatch.setattr("streampack_services.forecast.run_lengths.MOST", 300)
    found = ask("report", files / "state")
    assert found["share"] < 0.7
    assert found["run"] == whole["run"]
    for name, row in found["others"].items():
        assert row["slots"] == pytest.approx(whole["others"][name]["slots"], rel=0.2), name


# The command line


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    drawn = np.clip(np.random.default_rng(0).lognormal(5, 1, 3000), 1, 3000).astype(np.int64)
    np.save(tmp_path / "lengths.npy", drawn)
    return tmp_path / "lengths.npy"


def test_the_lines_for_broker_yaml_can_be_used(lengths: Path, tmp_path: Path) -> None:
    lines = ask("plan", lengths, "--budget", "2048", "--mesh", "dp=4,cp=2")["broker_yaml"]
    file = tmp_path / "broker.yaml"
    file.write_text(lines + "\nstreams: {web: {}}\n")
    checked = ask("check", file)
    values = {row["path"]: row["value"] for row in checked["values"]}
    assert (values["rules.budget"], values["planned_mesh.cp"], values["rules.overlong"]) == (2048, 2, "truncate")


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lengths with a heavy tail."""
    file = tmp_path_factory.mktemp("uneven") / "lengths.npy"
    np.save(file, np.clip(np.random.default_rng(0).lognormal(6.5, 1.2, 12_000), 1, 32768).astype(np.int64))
    return file


@pytest.mark.parametrize(("window", "memory"), [("1024", "1GiB"), ("4096", "3GiB")])
def test_where_costs_differ_joint_balance_is_advised_and_its_lines_can_be_used(
    uneven: Path, tmp_path: Path, window: str, memory: str
) -> None:
    """Also where it needs more memory than a broker takes by itself."""
    packers = ("--packer", "exact_fill,joint", "--window", f"{window},{window}", "--budget", "32768,32768")
    found = ask("plan", uneven, *packers, "--mesh", "dp=8", "--packs", "8", "--total", "1000000")
    of = {row["packer"]: row for row in found["settings"] if row["axis"] == "packer"}
    assert of["exact_fill"]["cost_max_over_mean"] > 1.2
    assert of["joint"]["cost_max_over_mean"] < 1.02
    assert found["take"]["packer"] == "joint"
    file = tmp_path / "broker.yaml"
    file.write_text(found["broker_yaml"] + "\nstreams: {web: {}}\n")
    values = {row["path"]: row["value"] for row in ask("check", file)["values"]}
    assert (values["rules.packer"], values["rules.balance.kind"], values["rules.balance.group"]) == (
        "exact_fill", "joint", 8,
    )  # fmt: skip
    assert values["memory"] == memory


def test_a_run_that_balances_by_joint_is_planned_as_it_is_and_its_group_follows_the_mesh_unless_given(
    uneven: Path, tmp_path: Path
) -> None:
    rules = {"budget": 32768, "step": {"packs": 8}}
    options = ("--packer", "joint,exact_fill", "--window", "256,256", "--budget", "32768,32768")

    def planned(**balance: Any) -> list[Any]:
        tree = {**rules, "balance": {"kind": "joint", **balance}}
        config = write(tmp_path / "broker.yaml", {"rules": tree, "planned_mesh": {"dp": 4}, "streams": {"web": {}}})
        found = ask("plan", uneven, "-c", config, *options, "--mesh", "dp=8", "--packs", "16")
        assert found["settings"][0]["packer"] == "joint"
        return [found["settings"][0]["attention_max_over_mean"], "group: 2" in found["broker_yaml"]]

    (own, _), (given, said) = planned(), planned(group=2)
    assert own < given, "eight are alike, not two"
    assert said


def test_grids_and_meshes_are_what_was_asked_for(lengths: Path) -> None:
    found = ask(
        "plan", lengths, "--budget", "4096,1024", "--window", "64,128,", "--packer", "concatenative,exact_fill",
        "--mesh", "dp=2", "--mesh", "dp=3,cp=3", "--shape", "exact", "--shape", "buckets=512,1024",
    )  # fmt: skip
    assert [row["shape"] for row in found["settings"] if row["axis"] == "shape"] == [
        "exact", {"buckets": [512, 1024]},
    ]  # fmt: skip
    rows = [(row["axis"], row["budget"], row["window"], row["packer"], row["mesh"]["dp"], row["step_packs"])
            for row in found["settings"] if row["axis"] != "shape"]  # fmt: skip
    assert rows == [
        ("base", 4096, 64, "concatenative", 2, 64),
        ("budget", 1024, 64, "concatenative", 2, 256),
        ("budget", 4096, 64, "concatenative", 2, 64),
        ("window", 4096, 64, "concatenative", 2, 64),
        ("window", 4096, 128, "concatenative", 2, 64),
        ("packer", 4096, 64, "concatenative", 2, 64),
        ("packer", 4096, 64, "exact_fill", 2, 64),
        ("mesh", 4096, 64, "concatenative", 2, 64),
        ("mesh", 4092, 64, "concatenative", 3, 63),
    ]
    assert found["take"]["packer"] == "exact_fill"
    assert found["notes"] == []
    found = ask("plan", lengths, "--mesh", "dp=3", "--packer", "exact_fill")
    assert found["notes"] == ["a step has 63 packs instead of 64, because the packs of a step must be a multiple of dp"]


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A broker.yaml with ``cp: dynamic``."""
    feed = {"cp": "dynamic", "rank_tokens": 256, "max_group": 8, "exchange": {"node": 0.05, "across": 0.2}}
    conf = {
        "rules": {"budget": 2048, "step": {"packs": 7}, "shape": "exact", "overlong": "truncate"},
        "streams": {"data": {}}, "feeds": {"train": feed}, "planned_mesh": {"dp": 4, "cp": 4},
    }  # fmt: skip
    return write(tmp_path_factory.mktemp("grouped") / "broker.yaml", conf)


def test_the_plan_of_the_page_has_groups_that_cost_no_more_than_the_best_static_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = [block for block in BLOCKS if block.page == "docs/how-to/dynamic-cp.md"]
    (tmp_path / "broker.yaml").write_text(next(block.code for block in blocks if block.language == "yaml"))
    lengths = np.random.default_rng(0).lognormal(6.5, 1.3, 20_000)
    np.save(tmp_path / "lengths.npy", np.clip(lengths, 1, 64_000).astype(int))
    monkeypatch.chdir(tmp_path)
    command, *words = next(block.code for block in blocks if block.language == "bash").split()
    assert command == "streampack"
    dynamic, static, free, static_free = ask(*words)["layouts"]
    assert 1 <= dynamic["costliest_over_mean"] <= static["costliest_over_mean"]
    assert 1 <= free["costliest_over_mean"] <= static_free["costliest_over_mean"]
    assert free["costliest_over_mean"] <= dynamic["costliest_over_mean"]
    assert dynamic["exchanged_per_token"] < static["exchanged_per_token"]
    text = " ".join(in_process(*words).stdout.split())
    assert "less time than with `cp: static` and cp=8. - Ranks exchange" in text
    page = (Path(__file__).parents[3] / "docs/how-to/dynamic-cp.md").read_text()
    shown = page.split("```\nlengths.npy")[1].split("```")[0]
    assert [line for line in shown.splitlines()[1:] if " ".join(line.split()) not in text] == []


def test_a_plan_with_groups_says_what_overlong_samples_lose(tmp_path: Path, grouped: Path) -> None:
    conf = tmp_path / "broker.yaml"
    conf.write_text(grouped.read_text().replace(', "overlong": "truncate"', ""))
    (tmp_path / "lengths.txt").write_text(" ".join(map(str, [*range(1, 50), 2500])))
    report = ask("plan", tmp_path / "lengths.txt", "-c", conf)
    assert (report["overlong"], report["lost_share"]) == (1, pytest.approx((2500 - 2048) / (1225 + 2500)))
    assert "1 of 50 samples are longer than the budget. `overlong: truncate` loses 12.13% of all tokens" in str(report)


def test_a_plan_with_groups_says_so_if_ranks_exchange_more_than_with_static_cp(tmp_path: Path, grouped: Path) -> None:
    conf = tmp_path / "broker.yaml"
    conf.write_text(grouped.read_text().replace('"packs": 7', '"samples": 3'))
    (tmp_path / "lengths.txt").write_text(" ".join(map(str, range(1, 51))))
    report = ask("plan", tmp_path / "lengths.txt", "-c", conf)
    dynamic, static, *_ = (row["exchanged_per_token"] for row in report["layouts"])
    assert f"Ranks exchange {dynamic / static - 1:.1%} more tokens." in report["why"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--budget", "2048"), "Got --budget for a feed with `cp: dynamic`"),
        (("--mesh", "dp=8", "--mesh", "dp=4"), "Got a second --mesh for a feed with `cp: dynamic`"),
        (("--mesh", "dp=4"), "got a budget of 2048 tokens with 4 dp x cp ranks, expected at most 1024"),
        (("--mesh", "dp=16,pp=2"), "got `cp: dynamic` with pp=2"),
        (("--overlong", "error"), "expected at most the budget of 2048 tokens"),
        (("--png", "plan.png"), "Got --png plan.png for a feed with `cp: dynamic`, which has no chart"),
    ],
)
def test_options_that_a_plan_with_groups_would_ignore_are_refused(
    lengths: Path, grouped: Path, words: tuple[str, ...], line: str
) -> None:
    assert line in the_error(in_process("plan", lengths, "-c", grouped, *words), 2)


def test_a_key_of_one_packer_does_not_keep_the_others_from_being_forecast(lengths: Path, tmp_path: Path) -> None:
    rules = {"packer": "modified_first_fit_decreasing", "leftovers": "emptiest", "budget": 2048}
    write(tmp_path / "broker.yaml", {"rules": rules, "streams": {"web": {}}})
    found = ask("plan", lengths, "-c", tmp_path / "broker.yaml")
    tried = {row["packer"]: row for row in found["settings"] if row["axis"] == "packer"}
    assert set(tried) == PACKERS.keys() - {"none"}
    assert [name for name, row in tried.items() if "utilization" not in row] == []
    kept = {"modified_first_fit_decreasing": "leftovers: emptiest", "exact_fill": "packer: exact_fill"}
    assert kept[found["take"]["packer"]] in found["broker_yaml"]


def test_lengths_may_be_a_sample_of_a_pass(lengths: Path) -> None:
    found = ask("plan", lengths, "--total", "300000", "--budget", "4096", "--packer", "exact_fill")
    base = found["settings"][0]
    assert found["streams"][0]["share"] == pytest.approx(0.01)
    assert base["steps_low"] < base["steps"] < base["steps_high"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "got no lengths, expected the number of tokens of each sample"),
        ("5\n7\n-3\n", "got -3 tokens for sample 2, expected 1 to 2147483647"),
        ("5\n0\n", "got 0 tokens for sample 1"),
        ("5\n7.5\n", "got '7.5' for sample 1, expected a whole number of tokens"),
        ("5\nseven\n", "got 'seven' for sample 1, expected"),
        ("5\n99999999999\n", "got 99999999999 tokens for sample 1, expected 1 to 2147483647"),
        ("5\n99999999999999999999999\n", "got '99999999999999999999999' for sample 1, expected"),
        ("5 \x00 6", "got '\\x00' for sample 1, expected"),
    ],
)
def test_a_value_that_is_no_length_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "lengths.txt").write_text(text)
    assert said in the_error(in_process("plan", tmp_path / "lengths.txt"), 2)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.ones(3), "got shape (3,) and dtype float64, expected one array of integers of shape [samples]"),
        (np.ones((2, 2), int), "got shape (2, 2) and dtype int64"),
        (np.array([3, -1]), "got -1 tokens for sample 1"),
        (np.zeros(0, int), "got no lengths"),
    ],
)
def test_an_array_that_is_no_lengths_is_named(tmp_path: Path, array: Any, said: str) -> None:
    np.save(tmp_path / "lengths.npy", array)
    assert said in the_error(in_process("plan", tmp_path / "lengths.npy"), 2)


def test_numbers_are_lengths_in_any_text(tmp_path: Path) -> None:
    marked = "\ufeff3 4\n5"  # as Windows writes it
    for name, text in (("a.txt", "3 4\n5"), ("b.txt", marked), ("a.jsonl", "3\n4\n5\n"), ("a", "3\n4\n5")):
        (tmp_path / name).write_text(text)
        assert ask("plan", tmp_path / name, "--budget", "64")["lengths"]["tokens"] == 12
    np.save(tmp_path / "a.npy", np.array([3, 4, 5], np.uint16))
    assert ask("plan", tmp_path / "a.npy", "--budget", "64")["lengths"]["tokens"] == 12


def test_overlong_samples_are_an_error_where_they_should_be(lengths: Path) -> None:
    line = the_error(in_process("plan", lengths, "--budget", "64", "--overlong", "error"), 2)
    assert (
        "of stream data, expected at most the budget of 64 tokens. Pass a larger --budget, or --overlong truncate"
        in line
    )
    over = int((np.load(lengths) > 512).sum())
    assert ask("plan", lengths, "--budget", "512")["take"]["overlong"] == over
    assert ask("plan", lengths, "--budget", "512", "--overlong", "split")["settings"][0]["lost_share"] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--budget", "8k"), "--budget is '8k'. Pass whole numbers above 0"),
        (("--window", "0"), "--window is '0'. Pass whole numbers above 0"),
        (("--packer", "best"), "--packer is 'best'. Pass one of: exact_fill"),
        (("--mesh", "dp=2,ep=2"), "--mesh is 'dp=2,ep=2'. Pass sizes of dp, cp, tp and pp"),
        (("--overlong", "cut"), "--overlong is 'cut'. Pass one of: error"),
        (("--mesh", "cp=3", "--budget", "1000"), "budget: got 1000, expected a multiple of 6"),
        (("--shape", "tight"), "--shape is 'tight'. Pass fixed, exact, multiple=512 or buckets=2048,4096"),
        (("--shape", "multiple=1,2"), "--shape is 'multiple=1,2'. Pass fixed"),
        (("--precision", "fp4"), "--precision is 'fp4'. Pass one of: fp8_blockwise, mxfp8, fp8"),
        (("--packs", "4", "--batch", "4"), "Got both --packs and --batch."),
        (("--window", "4", "--batch", "4"), "Got --window, but each step is a whole batch"),
        (("--total", "7"), "--total is 7 samples, but the file has 3,000 lengths. Pass at least 3000."),
        (("--budget", "134217728"), "expected less than 134217728 times with `packer: exact_fill`"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_with_its_cause(lengths: Path, arguments: tuple[str, ...], said: str) -> None:
    assert said in the_error(in_process("plan", lengths, *arguments), 2)


def test_missing_arguments_are_named(files: Path, tmp_path: Path) -> None:
    assert "There are no lengths to plan for." in the_error(in_process("plan"), 2)
    assert "There are no lengths to plan for." in the_error(in_process("plan", "-c", files / "broker.yaml"), 2)
    assert "cannot be read" in the_error(in_process("plan", tmp_path / "no.npy"), 2)
    for data in (tmp_path / "no.jsonl", files / "web-0.jsonl", files / "web-*.jsonl"):
        assert "name the data files in a producer.yaml and pass -c producer.yaml" in the_error(
            in_process("plan", data), 2
        )
    assert "is a folder without a log" in the_error(in_process("plan", tmp_path), 2)
    assert "is a folder without a log" in the_error(in_process("report", tmp_path), 2)
    for file in (tmp_path / "no.npy", files / "web-0.jsonl"):
        line = the_error(in_process("report", file), 2)
        assert (
            "is neither a broker's state_dir nor a broker's address. For a file of lengths, run 'streampack plan"
            in line
        )
    assert "got no answer" in the_error(in_process("plan", "http://127.0.0.1:1"), 75)
    assert "Pass only one of them" in the_error(in_process("plan", "x.npy", "-c", files / "producer.yaml"), 2)


def test_pictures_are_drawn(files: Path, served: RunningBroker, lengths: Path, tmp_path: Path) -> None:
    for command, what in (("plan", lengths), ("report", files / "state")):
        png = tmp_path / f"{command}.png"
        result = in_process(command, what, "--png", png)
        assert result.returncode == 0, result.stderr
        assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    (tmp_path / "folder.png").mkdir()
    wrong = in_process("report", files / "state", "--png", tmp_path / "folder.png")
    assert "cannot be written: Is a directory" in the_error(wrong, 2)
    for command, what in (("plan", lengths), ("report", files / "state")):
        wrong = in_process(command, what, "--png", tmp_path / "no" / "a.png")
        assert "The folder of --png" in the_error(wrong, 2)
        assert not wrong.stdout, "said before the command has computed anything"
    wrong = in_process("plan", lengths, "--png", tmp_path / "a.pdf")
    assert the_error(wrong, 2).endswith("a.pdf. Pass a file name that ends in .png.")


def test_without_matplotlib_a_picture_says_what_to_install(lengths: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    wrong = in_process("plan", lengths, "--png", "a.png")
    assert "pip install matplotlib" in the_error(wrong, 2)
    assert not wrong.stdout, "said before the plan is computed"
    assert not os.path.exists("a.png")


def test_fifty_thousand_lengths_take_seconds(tmp_path: Path) -> None:
    drawn = np.clip(np.random.default_rng(0).lognormal(6, 1, 50_000), 1, 8192).astype(np.int64)
    np.save(tmp_path / "lengths.npy", drawn)
    begin = time.monotonic()
    found = ask("plan", tmp_path / "lengths.npy", "--mesh", "dp=8")
    assert found["lengths"]["samples"] == 50_000
    assert time.monotonic() - begin < 30, "3 to 5 s where nothing else runs"
