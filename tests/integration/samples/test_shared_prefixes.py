"""Groups that share their first tokens: a real broker that is killed, its commands, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streampack
from streampack.errors import MeshError, StreampackError, UserError
from tests.integration.running import PATIENCE_S, RunningBroker, folder, running_broker, until, write
from tests.integration.running import streampack as command

GROUPS, MEMBERS = 40, 6


def settings(path: Path, share: bool = True, **changes: Any) -> dict[str, Any]:
    sides = {side: f"ipc://{path}/{side}" for side in ("producers", "trainers")}
    return {
        "run": "trees",
        "listen": {**sides, "http": "127.0.0.1:0"},
        "merge": "arrival",
        "state_dir": str(path / "state"),
        "rules": {"budget": 256, "window": {"samples": 32}, "step": {"packs": 2}, "share": "prefix" if share else None},
        "streams": {"rollouts": {"pushed": True, "partitions": 1}},
        "fields": {"group": {}, "loss_mask": {}, "advantage": {"dtype": "float32", "align": "target"}},
    } | changes


def group(number: int) -> list[dict[str, Any]]:
    """Answers to one prompt; every other one goes on from the first answer."""
    draw = np.random.default_rng(number)
    prompt = draw.integers(1, 1000, 20)
    first = np.concatenate([prompt, draw.integers(1, 1000, 10)])
    rows = [first, *(np.concatenate([(first if i % 2 else prompt), [1000 + i, number]]) for i in range(1, MEMBERS))]
    return [
        {"input_ids": row, "loss_mask": np.arange(len(row)) >= 20, "advantage": np.full(len(row), i, np.float32)}
        for i, row in enumerate(rows)
    ]


def work(endpoint: str, given: dict[int, dict[str, Any]], share: bool = True) -> None:
    how: dict[str, Any] = {"share": "prefix"} if share else {}
    with streampack.Producer(endpoint, stream="rollouts", buffer="4KiB") as rollouts:
        for number in range(GROUPS):
            given |= dict(zip(rollouts.send_group(group(number), **how), group(number), strict=True))
        rollouts.close(end=True)


def read(endpoint: str) -> list[tuple[int, np.ndarray, np.ndarray, np.ndarray, int]]:
    """Number, ids, labels, advantages and field ``group`` of each sample, in the order of steps."""
    found = []
    with streampack.connect(endpoint, format="numpy", verify=True, stall_timeout_s=PATIENCE_S) as loader:
        for step in loader.steps():
            for pack in step:
                ids = pack.input_ids if pack.path_index is None else pack.input_ids[pack.path_index]
                cu = pack.cu_seqlens if pack.cu_paths is None else pack.cu_paths
                for i, (_, number, _) in enumerate(pack.sample_ids.tolist()):
                    span = slice(*cu[i : i + 2].tolist())
                    values = pack.labels[span], pack["advantage"][span], int(pack["group"][i])
                    found.append((number, ids[span], *values))
    return found


def check(found: list[tuple[int, np.ndarray, np.ndarray, np.ndarray, int]], given: dict[int, dict[str, Any]]) -> None:
    assert sorted(number for number, *_ in found) == sorted(given) == list(range(GROUPS * MEMBERS))
    for number, ids, labels, advantages, of in found:
        sample = given[number]
        assert of == number // MEMBERS * MEMBERS
        assert ids.tolist() == sample["input_ids"].tolist()
        assert advantages[:-1].tolist() == sample["advantage"][1:].tolist()
        expected = np.where(sample["loss_mask"][1:], sample["input_ids"][1:], -100)
        assert labels.tolist() == [*expected.tolist(), -100]


def test_a_broker_that_is_killed_loses_no_sample_of_a_tree() -> None:
    """And its commands tell of the trees: status, metrics, report, ledger, why and replay."""
    given: dict[int, dict[str, Any]] = {}
    with folder() as path, ThreadPoolExecutor() as pool:
        config = settings(path)
        broker = RunningBroker(path, config)
        try:
            worker = pool.submit(work, broker.producers, given)
            until(lambda: broker.status()["streams"][0]["samples"] > 60)
            broker.kill()
            broker = RunningBroker(path, config)
            reader = pool.submit(read, broker.trainers)
            until(lambda: broker.feed()["steps"]["returned"] > 2)
            broker.kill()
            broker = RunningBroker(path, config)
            worker.result(PATIENCE_S)
            found = reader.result(PATIENCE_S)
            check(found, given)
            whole = sum(len(ids) for _, ids, *_ in found)
            text = broker.get("/metrics")
        finally:
            broker.kill()
        state = str(path / "state")
        report = json.loads(command("report", state, "--json").stdout)
        assert report["tokens"] + report["shared_tokens"] == whole
        assert report["sharing"]["sent"] == report["sharing"]["groups"] == GROUPS
        assert report["shared_tokens"] == report["sharing"]["shared_tokens"] > 0.5 * whole
        assert "streampack_shared_ratio" in text
        assert json.loads(command("ledger", "verify", "--state-dir", state, "--json").stdout)["good"]
        place = json.loads(command("why", "--state-dir", state, "--sample", "rollouts:8", "--json").stdout)["places"][
            -1
        ]
        assert 0 < place["shared"] < place["length"]
        broker_yaml = write(path / "broker.yaml", config)
        again = json.loads(command("replay", "--step", str(place["step"]), "-c", broker_yaml, "--json").stdout)
        assert again["equal"]


def test_report_and_plan_say_what_sharing_would_save() -> None:
    given: dict[int, dict[str, Any]] = {}
    with folder() as path:
        with running_broker(settings(path, share=False)) as broker:
            work(broker.producers, given, share=False)
            check(read(broker.trainers), given)
        state = str(path / "state")
        found = json.loads(command("report", state, "--json").stdout)
        assert (found["shared_tokens"], found["sharing"]["sent"]) == (0, 0)
        rows = [row["input_ids"] for sample in range(GROUPS) for row in group(sample)]
        assert found["sharing"]["tokens"] == sum(map(len, rows))
        assert 0.5 < found["sharing"]["shared_tokens"] / found["sharing"]["tokens"] < 0.9
        assert "would not be computed again. Set `share: prefix`" in found["sharing"]["sentence"]
        assert "pushed groups would not be computed again" in " ".join(command("plan", state).stdout.split())


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    with folder() as path, running_broker(settings(path)) as running:
        yield running


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"format": "thd"}, UserError, "expected format='thd' with masks='flex', or format='numpy'"),
        ({"format": "hf"}, UserError, "got format 'hf' with masks=None"),
        ({"format": "megatron", "masks": "flex"}, UserError, "got format 'megatron' with masks='flex'"),
        ({"mesh": {"cp": 2, "cp_rank": 0}}, MeshError, "expected cp=1 or `cp_layout: whole`"),
    ],
)
def test_streams_and_formats_that_cannot_hold_a_tree_are_refused(
    broker: RunningBroker, options: dict[str, Any], error: type[StreampackError], message: str
) -> None:
    given = {"format": "numpy", **options}
    with pytest.raises(error, match=message):
        streampack.connect(broker.trainers, timeout_s=PATIENCE_S, **given)


def test_a_trainer_that_can_say_a_tree_is_taken(broker: RunningBroker) -> None:
    streampack.connect(broker.trainers, format="thd", masks="flex", timeout_s=PATIENCE_S).close()


def test_groups_that_differ_in_a_field_that_the_model_reads_share_nothing_there() -> None:
    fields = {"kind": {"dtype": "int32"}}
    rows = [{"input_ids": [7] * 20, "kind": np.full(20, kind)} for kind in (0, 1, 1)]
    with folder() as path, running_broker(settings(path, fields=fields)) as broker:
        with streampack.Producer(broker.producers, stream="rollouts") as rollouts:
            rollouts.send_group(rows, share="prefix")
            rollouts.close(end=True)
        with streampack.connect(broker.trainers, format="numpy", verify=True) as loader:
            (pack,) = (pack for step in loader.steps() for pack in step if pack.num_samples)
        assert pack.shared is not None
        assert pack.shared.tolist() == [0, 0, 19]
