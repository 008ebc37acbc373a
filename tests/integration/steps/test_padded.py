"""Padded micro-batches over real processes: a batch's rows, the same on every mesh, whatever dies."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streampack
from streampack.config.typed_yaml import convert
from streampack.errors import MeshError, UserError
from streampack.packs.step import Step
from streampack.sources import Source, SourceSettings, open_source
from tests.integration.running import (
    PATIENCE_S,
    RunningBroker,
    folder,
    in_process,
    producing_here,
    running,
    running_broker,
    the_error,
    until,
    write,
    write_jsonl,
)
from tests.soak.job import fixed_listen

ROLL = [7, 6, 8, 5, 1, 3, 8, 6]
SAMPLES, STEPS = 24, 16
SETTINGS: dict[str, Any] = {
    "tokens": "uint16",
    "rules": {"padded": True, "budget": 256, "step": {"samples": SAMPLES}, "align": {"sample": 4, "pack": 8}},
    "streams": {"web": {}},
}
Mesh = dict[str, int]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Sample n begins with token n + 1."""
    folder = write_rows(tmp_path_factory.mktemp("data"))
    return open_source(convert({"source": "jsonl", "shards": str(folder / "*.jsonl")}, SourceSettings))


def write_rows(folder: Path) -> Path:
    for shard, numbers in enumerate(np.arange(SAMPLES * STEPS).reshape(4, -1).tolist()):
        write_jsonl(folder / f"{shard}.jsonl", [{"tokens": [n + 1] * (4 + (n * 89) % 200)} for n in numbers])
    return folder


def meshes(dp: int, cp: int = 1, pp: int = 1) -> list[Mesh]:
    sizes = {"dp": dp, "cp": cp, "pp": pp}
    return [
        {**sizes, "dp_rank": d, "cp_rank": c, "pp_rank": p} for d in range(dp) for c in range(cp) for p in range(pp)
    ]


def read(
    endpoint: str, ranks: list[Mesh], format: str = "numpy", at: Callable[[int, int], None] = lambda *_: None,
    **more: Any,
) -> list[list[Step]]:  # fmt: skip
    """Every step of each rank, verified; ``at`` hears (rank, step)."""
    found: dict[int, list[Step]] = {}

    def run(rank: int) -> None:
        with streampack.connect(endpoint, mesh=ranks[rank], format=format, verify=True, prefetch=1, **more) as loader:
            steps = []
            for step in loader.steps():
                steps.append(step)
                at(rank, step.index)
            found[rank] = steps

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(found) == len(ranks)
    return [found[rank] for rank in range(len(ranks))]


def samples_of(steps: list[Step]) -> list[tuple[int, int, int]]:
    """Of one step on some ranks: every sample's identity."""
    return sorted(tuple(sample) for step in steps for sample in step.sample_ids.tolist())


def bytes_of(steps: list[Step]) -> list[Any]:
    names = ("input_ids", "labels", "position_ids", "padding_mask", "cu_seqlens_padded", "sample_ids")
    return [(step.digest, step.chain, [[pack[name].tobytes() for name in names] for pack in step]) for step in steps]


@pytest.fixture(scope="module")
def whole(source: Source) -> list[list[Step]]:
    """What nothing disturbs, on dp = 2 and cp = 2."""
    with running_broker(SETTINGS) as broker, producing_here(broker.producers, {"web": source}):
        return read(broker.trainers, meshes(dp=2, cp=2))


def test_the_example_of_roll_comes_to_two_ranks_within_its_budget(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "roll.jsonl", [{"tokens": [1 + i] * n} for i, n in enumerate(ROLL)])
    settings = SETTINGS | {
        "rules": {"padded": True, "budget": 10, "step": {"samples": 8}, "align": {"sample": 2, "pack": 2}},
        "streams": {"web": {"partitions": 1}},
        "state_dir": str(tmp_path / "state"),
    }  # fmt: skip
    roll = open_source(convert({"source": "jsonl", "shards": str(file), "shuffle": False}, SourceSettings))
    with running_broker(settings) as broker, producing_here(broker.producers, {"web": roll}):
        ranks = read(broker.trainers, meshes(dp=2), "padded")
    assert [[tuple(batch["input_ids"].shape) for batch in steps[0]] for steps in ranks] == [
        [(1, n) for n in (4, 6, 8, 8)]
    ] * 2
    found = [[batch["input_ids"][0][: batch["attention_mask"].sum()].tolist() for batch in steps[0]] for steps in ranks]
    assert found == [[[1 + i] * ROLL[i] for i in column] for column in ([4, 3, 7, 2], [5, 1, 0, 6])]
    assert {steps[0].num_loss_tokens for steps in ranks} == {sum(ROLL) - len(ROLL)}
    why = in_process("why", "--step", "0", "--dp-size", "2", "--state-dir", tmp_path / "state", "--json")
    packs = [pack for pack in json.loads(why.stdout)["packs"] if pack["dp_rank"] == 1]
    assert [(pack["length"], pack["samples"][0]["index"]) for pack in packs] == [(4, 5), (6, 1), (8, 0), (8, 6)]


def test_ranks_share_shapes_and_their_shards_make_every_row_up(whole: list[list[Step]]) -> None:
    assert all(len(steps) == STEPS for steps in whole)
    seen = []
    for ranks in zip(*whole, strict=True):
        streampack.verify(list(ranks))
        shapes = {tuple((len(pack.input_ids), pack.max_seqlen) for pack in step) for step in ranks}
        assert len(shapes) == 1
        assert all(2 * held <= 256 and width % 8 == 0 for held, width in next(iter(shapes)))
        seen += samples_of([ranks[0], ranks[2]])
    assert len(set(seen)) == len(seen) == SAMPLES * STEPS


def test_a_killed_broker_gives_the_same_bytes(source: Source, whole: list[list[Step]]) -> None:
    with folder() as path:
        settings = SETTINGS | {"listen": fixed_listen(path), "state_dir": str(path / "state")}
        brokers = [RunningBroker(path, settings)]

        def kill(rank: int, step: int) -> None:
            if rank == 0 and step in (0, 6):  # others are at most 8 steps ahead, so none has finished and left
                brokers[-1].kill()
                brokers.append(RunningBroker(path, settings))

        try:
            with producing_here(brokers[0].producers, {"web": source}):
                found = read(brokers[0].trainers, meshes(dp=2, cp=2), at=kill)
        finally:
            brokers[-1].kill()
    assert len(brokers) == 3
    assert [bytes_of(steps) for steps in found] == [bytes_of(steps) for steps in whole]


def test_another_mesh_goes_on_with_the_same_batches(source: Source, whole: list[list[Step]]) -> None:
    """From a state after step 6, saved on one rank, at a broker that has no disk of the first."""
    with (
        running_broker(SETTINGS) as broker,
        producing_here(broker.producers, {"web": source}),
        streampack.connect(broker.trainers, format="padded", verify=True) as loader,
    ):
        before = [step for step, _ in zip(loader.steps(), range(7), strict=False)]
        state = json.loads(json.dumps(loader.state_dict(step=6)))
    with running_broker(SETTINGS) as broker, producing_here(broker.producers, {"web": source}):
        after: dict[int, list[Step]] = {}

        def run(rank: int) -> None:
            with streampack.connect(broker.trainers, mesh={"dp": 3, "dp_rank": rank}, format="padded") as loader:
                loader.load_state_dict(state)
                after[rank] = list(loader.steps())

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    found = [[step] for step in before] + [
        list(ranks) for ranks in zip(*(after[rank] for rank in range(3)), strict=True)
    ]
    assert len(found) == STEPS
    for ranks, expected in zip(found, zip(*whole, strict=True), strict=True):
        assert {step.chain for step in ranks} == {expected[0].chain}
        assert samples_of(ranks) == samples_of([expected[0], expected[2]])


def test_a_pipeline_is_served_where_its_trainer_declares_variable_lengths(source: Source) -> None:
    with running_broker(SETTINGS) as broker, producing_here(broker.producers, {"web": source}):
        with pytest.raises(MeshError, match=r"got pp=2 for padded micro-batches.*variable_lengths=True"):
            streampack.connect(broker.trainers, mesh=meshes(dp=1, pp=2)[0])
        first, last = read(broker.trainers, meshes(dp=1, pp=2), variable_lengths=True)
    assert [len(step) for step in first] == [len(step) for step in last]
    assert all(len(step) % 2 == 0 for step in first)
    assert len({len(pack.input_ids) for step in first for pack in step}) > 1


def test_why_and_replay_know_what_each_rank_had(source: Source, tmp_path: Path) -> None:
    producer = {"source": "jsonl", "shards": str(write_rows(tmp_path) / "*.jsonl")}
    with folder() as path:
        settings = SETTINGS | {"listen": fixed_listen(path), "state_dir": str(path / "state")}
        broker = RunningBroker(path, settings)
        try:
            config = write(path / "producer.yaml", {"broker": broker.producers, "streams": {"web": producer}})
            with running("producer", "produce", "-c", config):
                ranks = read(broker.trainers, meshes(dp=2))
        finally:
            broker.kill()
        where = ("-c", path / "broker.yaml")
        said = in_process("why", "--step", "3", "--dp-size", "2", *where, "--json")
        again = in_process(
            "replay", "--step", "3", "--dp", "2", *where, "-p", config, "-o", path / "step.npz", "--json"
        )
        of_pipeline = in_process("replay", "--step", "3", "--pp", "2", *where, "-p", config, "--json")
        shown = in_process("why", "--step", "3", *where).stdout
        dealt = in_process("why", "--step", "3", "--dp-size", "2", *where).stdout
        assert "its batches depend on the mesh, which a log does not record" in the_error(
            in_process("report", path / "state"), 2
        )
        with np.load(path / "step.npz") as written:
            replayed = {name: written[name] for name in written.files}
    packs = {pack.pack: pack for steps in ranks for pack in steps[3]}
    found = json.loads(said.stdout)["packs"]
    assert [(each["pack"], each["micro_batch"], each["dp_rank"]) for each in found] == [
        (number, pack.micro_batch, pack.dp_rank) for number, pack in sorted(packs.items())
    ]
    for each in found:
        pack = packs[each["pack"]]
        ids = [[0, sample["index"], sample["part"]] for sample in each["samples"]]
        assert ids == pack.sample_ids.tolist()
        assert [sample["offset"] for sample in each["samples"]] == pack.cu_seqlens_padded[: pack.num_samples].tolist()
        assert (each["rows"] * each["row_tokens"], each["row_tokens"]) == (len(pack.input_ids), pack.max_seqlen)
        name = f"dp{pack.dp_rank}.cp0.{pack.micro_batch}.input_ids"
        assert replayed[name].tobytes() == pack.input_ids.tobytes()
    assert json.loads(again.stdout)["equal"]
    staged = json.loads(of_pipeline.stdout)
    assert staged["equal"]
    assert len(staged["packs"]) % 2 == 0
    assert f"{SAMPLES} one per row" in shown
    assert all(f"{each['rows']} x {each['row_tokens']}" in dealt for each in found)


def test_status_and_metrics_say_what_padding_was_removed(source: Source, whole: list[list[Step]]) -> None:
    with (
        running_broker(SETTINGS) as broker,
        producing_here(broker.producers, {"web": source}),
        streampack.connect(broker.trainers, format="numpy") as loader,
    ):
        steps = list(loader.steps())
        until(lambda: bool(broker.feed()["steps"]["formed"] == STEPS and broker.feed()["state"] == "ended"))
        feed, metrics = broker.feed(), broker.get("/metrics")
        shown, saved = in_process("status", broker.http), in_process("report", broker.http, "--json")
    real = sum(int(pack.cu_seqlens[-1]) for step in steps for pack in step)
    computed = sum(int(pack.cu_seqlens_padded[-1]) for step in steps for pack in step)
    widest = sum(SAMPLES * max(pack.max_seqlen for pack in step) for step in steps)
    assert feed["dynamic_batching"] == {
        "valid_tokens": real, "original_tokens": widest, "actual_tokens": computed,
        "removed_padding_tokens": widest - computed, "removed_padding_ratio": (widest - computed) / widest,
    }  # fmt: skip
    assert feed["delivered_tokens"] == computed
    assert feed["totals"]["packs"] == sum(len(step) for step in steps)
    assert feed["figures"]["utilization"] == pytest.approx(real / (256 * feed["totals"]["packs"]))
    assert f'streampack_dynamic_batching_tokens_total{{feed="train",kind="actual"}} {float(computed)}' in metrics
    assert 'streampack_removed_padding_ratio{feed="train"}' in metrics
    assert f"{(widest - computed) / widest:.2%} of batches padded to the longest sample" in shown.stdout
    assert json.loads(saved.stdout)["run"]["slots"] == computed


def test_fields_are_rows_of_their_samples_and_shifted_with_them() -> None:
    lengths = [3, 9, 1, 12, 7, 8, 2, 5]
    samples = [
        {"tokens": [1 + i] * n, "advantages": [100 * i + at for at in range(n)], "reward": i}
        for i, n in enumerate(lengths)
    ]
    fields = {"advantages": {"dtype": "float32", "align": "target"}, "reward": {"dtype": "float32", "axis": "sample"}}
    given: dict[str, Any] = {"fields": fields, "tokens_key": "tokens", "shuffle": False, "verify": True}
    with streampack.local(samples, budget=24, samples=8, padded=True, align=4, **given) as loader:
        (step,) = loader.steps()
    for batch in step:
        assert batch.advantages.shape == batch.input_ids.shape
        assert batch.reward.tolist() == [sample for _, sample, _ in batch.sample_ids.tolist()]
        for row, (_, sample, _) in zip(batch.advantages.tolist(), batch.sample_ids.tolist(), strict=True):
            targets = [100 * sample + at for at in range(1, lengths[sample])]
            assert row == targets + [0] * (len(row) - len(targets))
    assert sum(batch.num_samples for batch in step) == len(lengths)


def test_samples_over_the_budget_go_by_their_policy_and_fit_a_row() -> None:
    """Whatever is left of them is a row by itself at most, its alignment too."""
    samples = [{"tokens": [1 + i] * n} for i, n in enumerate([30, 5, 24, 49, 23, 3, 21, 8])]
    held = {}
    for policy in ("truncate", "split", "drop"):
        given: dict[str, Any] = {"tokens_key": "tokens", "shuffle": False, "verify": True, "format": "numpy"}
        with streampack.local(samples, budget=24, samples=4, padded=True, align=8, overlong=policy, **given) as loader:
            packs = list(loader)
        assert max(len(pack.input_ids) for pack in packs) == 24
        held[policy] = sum(int(pack.cu_seqlens[-1]) for pack in packs)
    assert held == {"truncate": 24 * 3 + 60, "split": 30 + 49 + 24 + 60, "drop": 24 + 60}


def test_check_shows_what_padded_brings_and_plan_says_that_it_forecasts_packs(tmp_path: Path) -> None:
    config = write(tmp_path / "broker.yaml", SETTINGS)
    values = {
        each["path"]: (each["value"], each["source"])
        for each in json.loads(in_process("check", config, "--json").stdout)["values"]
    }
    assert values["rules.packer"] == ("none", "derived")
    assert values["rules.shape"] == ("exact", "derived")
    np.save(tmp_path / "lengths.npy", np.arange(1, 100))
    line = the_error(in_process("plan", tmp_path / "lengths.npy", "-c", config), 2)
    assert "`padded: true`, but plan forecasts packs" in line


@pytest.fixture
def feeds(source: Source) -> Iterator[RunningBroker]:
    """A feed that packs, ``train``, and one that pads, ``valid``."""
    settings = SETTINGS | {
        "rules": {"budget": 256, "step": {"packs": 2}, "align": {"sample": 4, "pack": 8}},
        "streams": {"web": {}, "other": {}},
        "feeds": {"train": {"streams": ["web"]}, "valid": {"streams": ["other"], "rules": SETTINGS["rules"]}},
    }
    with running_broker(settings) as broker, producing_here(broker.producers, {"web": source, "other": source}):
        yield broker


def test_a_format_that_the_feed_has_not_is_refused_and_what_compilers_must_know_is_said(
    feeds: RunningBroker, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UserError, match=r"got format 'padded' for a feed that packs"):
        streampack.connect(feeds.trainers, format="padded")
    with (
        caplog.at_level(logging.WARNING, "streampack.client"),
        streampack.connect(feeds.trainers, feed="valid") as loader,
    ):
        batch = next(iter(loader))
    (said,) = [record.message for record in caplog.records if "torch.compile" in record.message]
    assert said.startswith("feed valid: its micro-batches are padded and may differ in shape")
    assert list(batch) == ["input_ids", "labels", "attention_mask", "position_ids"]
    assert batch.input_ids.shape == batch.attention_mask.shape
    assert np.array_equal(batch.input_ids.numpy() > 0, batch.attention_mask.numpy() == 1)
