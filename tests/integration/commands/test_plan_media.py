"""``streampack plan`` of samples with media: its predictions beside what a real broker does, and its advice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import streampack
from streampack.sources import SourceSettings, open_source
from tests.integration.commands.planned_media import RULES, make_media_files
from tests.integration.commands.planned_run import ask
from tests.integration.running import (
    RunningBroker,
    in_process,
    producing_here,
    running,
    running_broker,
    the_error,
    until,
    write,
)


@pytest.fixture(scope="module", params=["deal", "joint"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_media_files(tmp_path_factory.mktemp("data"), balance=RULES["balance"] | {"kind": request.param})


@pytest.fixture(scope="module")
def served(files: Path) -> Iterator[RunningBroker]:
    """A broker whose two ranks have read all of one pass."""
    with running_broker(json.loads((files / "broker.yaml").read_text())) as broker:
        tree = json.loads((files / "producer.yaml").read_text())
        config = write(files / "real.yaml", {**tree, "broker": broker.producers, "processes": 2})
        with running("producer", "produce", "-c", config):
            ranks = [{"dp": 2, "dp_rank": dp} for dp in range(2)]
            clients = [streampack.connect(broker.trainers, mesh=mesh, format="numpy") for mesh in ranks]
            broker.num_steps = sum(1 for _ in zip(*(client.steps() for client in clients), strict=True))
            for client in clients:
                client.close()
        until(lambda: broker.feed()["state"] == "ended" and broker.feed()["steps"]["returned"] == broker.num_steps)
        yield broker


def shares(media: dict[str, Any]) -> dict[str, float]:
    """The shares of packs that each axis fills, of the counts in a status or a report."""
    packs = media["bound_by"]
    return {axis: count / sum(packs.values()) for axis, count in packs.items()}


def test_the_steps_predicted_from_the_sources_are_those_of_a_real_broker(files: Path, served: RunningBroker) -> None:
    found, feed = ask("plan", "-c", files / "producer.yaml", "-c", files / "broker.yaml"), served.feed()
    base, totals, media = found["settings"][0], feed["totals"], feed["media"]
    assert found["whole"]
    assert (base["steps"], base["steps_low"], base["steps_high"]) == (served.num_steps,) * 3
    assert base["packs"] == totals["packs"] - totals["empty_packs"]
    slots = totals["packs"] * RULES["budget"]
    assert base["waste"] == pytest.approx({cause: tokens / slots for cause, tokens in feed["waste_tokens"].items()})
    for name in ("utilization", "bin_balance", "cost_max_over_mean", "step_cost_max_over_mean"):
        assert base[name] == pytest.approx(feed["figures"][name]), name
    assert base["bound_by"] == pytest.approx(shares(media))
    assert min(base["bound_by"].values()) > 0, "each axis fills some pack"
    assert (base["most_patches"], base["most_items"]) == (media["most_patches"], media["most_items"])
    assert base["unfit"] > 0
    assert base["overlong"] > 0
    assert found["rejected"] == 6, "one in each file"
    report = ask("report", files / "state")
    assert base["bound_by"] == pytest.approx(shares(report["media"]))
    assert base["filled"] * totals["packs"] == pytest.approx(
        report["run"]["utilization"] * (totals["packs"] - totals["empty_packs"])
    )


def test_a_log_gives_the_media_of_a_run_back(files: Path, served: RunningBroker) -> None:
    media = served.feed()["media"]
    for arguments in ((), ("-c", files / "broker.yaml")):
        found = ask("plan", files / "state", *arguments)
        base = found["settings"][0]
        assert found["media"]["items"] == media["items"]
        assert found["media"]["patches"]["total"] == media["patches"]
        assert found["media"]["bytes"] == media["bytes"]
        assert base["unfit"] == 0, "the run has dropped these"
        assert abs(base["steps"] - served.num_steps) <= 1, "streams are mixed nearly as they were"
        assert base["bound_by"] == pytest.approx(shares(media), abs=0.1)
    by_status = ask("plan", served.http)
    assert by_status["media"] is None
    assert "neither the limits nor the cost of media" in by_status["notes"][-1], "a status has no sizes of samples"


def test_costs_of_a_log_are_those_of_other_factors_too(files: Path, served: RunningBroker, tmp_path: Path) -> None:
    """The squares of patches follow from the recorded cost, so another broker.yaml may have other factors."""
    other = json.loads((files / "broker.yaml").read_text())
    other["rules"]["balance"] = {"a": 1, "b": 0, "patches": [0, 3]}
    write(tmp_path / "broker.yaml", other)
    by_log = ask("plan", files / "state", "-c", tmp_path / "broker.yaml")["settings"][0]
    by_files = ask("plan", "-c", files / "producer.yaml", "-c", tmp_path / "broker.yaml")["settings"][0]
    assert by_log["cost_max_over_mean"] == pytest.approx(by_files["cost_max_over_mean"], rel=0.1)


def test_patches_that_fill_most_packs_are_counted(tmp_path: Path) -> None:
    make_media_files(tmp_path, limits={"patches": 45}, balance={"hidden_size": 64})
    both = ("-c", tmp_path / "producer.yaml", "-c", tmp_path / "broker.yaml")
    found = ask("plan", *both)
    take = found["take"]
    assert take["bound_by"]["patches"] > 0.5
    assert take["patches_max_over_mean"] > 1.05
    assert take["rules"]["limits"] == {"patches": 45}
    assert "limits: {patches: 45}" in found["broker_yaml"]


def test_limits_that_bind_rarely_bring_no_advice(tmp_path: Path) -> None:
    make_media_files(tmp_path, limits={"patches": 100_000})
    found = ask("plan", "-c", tmp_path / "producer.yaml", "-c", tmp_path / "broker.yaml")
    assert found["take"]["bound_by"] == {"tokens": 1.0, "patches": 0.0}
    assert found["take"]["unfit"] == 0
    assert not [each for each in found["why"] if "limits" in each or "balance: {patches" in each]


def test_media_of_a_part_of_a_source_are_an_estimate(files: Path, served: RunningBroker) -> None:
    found = ask("plan", "-c", files / "producer.yaml", "-c", files / "broker.yaml", "--samples", "60")
    base = found["settings"][0]
    assert not found["whole"]
    assert 0.7 * served.num_steps < base["steps"] < 1.3 * served.num_steps
    assert sum(base["bound_by"].values()) == pytest.approx(1)


@pytest.mark.parametrize("overlong", ["drop", "truncate", "split"])
def test_each_policy_for_long_samples_with_media_is_that_of_a_broker(tmp_path: Path, overlong: str) -> None:
    make_media_files(tmp_path, overlong=overlong, budget=256)
    found = ask("plan", "-c", tmp_path / "producer.yaml", "-c", tmp_path / "broker.yaml")
    base, config = found["settings"][0], json.loads((tmp_path / "broker.yaml").read_text())
    sources = json.loads((tmp_path / "producer.yaml").read_text())["streams"]
    with running_broker(config) as broker, producing_here(
        broker.producers,
        {name: open_source(msgspec.convert(each, SourceSettings)) for name, each in sources.items()},
    ), streampack.connect(broker.trainers, format="numpy") as loader:  # fmt: skip
        steps = [[len(pack["cu_items"]) > 1 for pack in step] for step in loader.steps()]
        until(lambda: broker.feed()["state"] == "ended")
        media = broker.feed()["media"]
    assert base["steps"] == len(steps)
    assert base["packs"] == sum(map(sum, steps))
    assert base["bound_by"] == pytest.approx(shares(media))


def test_media_over_a_limit_are_an_error_where_they_should_be(files: Path) -> None:
    both = ("-c", files / "producer.yaml", "-c", files / "broker.yaml", "--budget", "1024")
    line = the_error(in_process("plan", *both, "--overlong", "error"), 2)
    assert "expected at most the limits of a pack. Raise `limits` in broker.yaml, or pass --overlong drop." in line


def test_without_broker_yaml_only_tokens_are_read(files: Path) -> None:
    found = ask("plan", "-c", files / "producer.yaml")
    assert found["media"] is None
    assert found["notes"][-1] == (
        "the forecast counts tokens only: to read media in pixel_values, pass -c broker.yaml, too"
    )
