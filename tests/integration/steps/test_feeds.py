"""Two feeds of one broker, with real processes: neither moves the other, and a finite one begins again at will."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import streampack
from tests.integration.running import (
    PATIENCE_S,
    Daemon,
    RunningBroker,
    running,
    running_broker,
    until,
    write,
    write_jsonl,
)

RULES = {"budget": 512, "window": {"samples": 64}, "step": {"packs": 4}}
TRAIN = {"web": {"weight": 0.7, "repeat": True, "partitions": 2}, "code": {"weight": 0.3, "repeat": True}}
BOTH = {
    "rules": RULES,
    "streams": {"val": {"partitions": 2}, **TRAIN},
    "feeds": {"train": {"streams": ["web", "code"]}, "valid": {"streams": ["val"], "rules": {"step": {"packs": 2}}}},
}
STEPS = 30


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for number, name in enumerate(("web", "code", "val")):
        rows = [{"text": name[0] * (1 + (number * 71 + i * 41) % 300)} for i in range(200)]
        write_jsonl(folder / f"{name}.jsonl", rows)
    return folder


def producing(broker: RunningBroker, files: Path, *names: str) -> Any:
    streams = {name: {"source": "jsonl", "shards": str(files / f"{name}.jsonl")} for name in names}
    config = write(files / f"{len(names)}.yaml", {"broker": broker.producers, "processes": 2, "streams": streams})
    return running("producer", "produce", "-c", config)


@pytest.fixture
def service(files: Path) -> Iterator[tuple[RunningBroker, Daemon]]:
    with running_broker(BOTH) as broker, producing(broker, files, "val", "web", "code") as producer:
        yield broker, producer


def in_two_ranks(work: Any) -> list[Any]:
    """What ``work(rank)`` gives in each of two threads."""
    found: list[Any] = [None, None]

    def run(rank: int) -> None:
        found[rank] = work(rank)

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(PATIENCE_S)
        assert not each.is_alive()
    return found


def digests(steps: Any, count: int | None = None) -> list[str]:
    return [step.digest for _, step in zip(range(count or 1 << 30), steps, strict=False)]


def test_a_validation_moves_no_training_and_is_the_same_each_time(files: Path, service: Any) -> None:
    broker, _ = service

    def both(rank: int) -> tuple[list[str], list[list[str]]]:
        mesh = {"dp": 2, "dp_rank": rank}
        with (
            streampack.connect(broker.trainers, mesh=mesh, format="numpy") as train,
            streampack.connect(broker.trainers, mesh=mesh, feed="valid", format="numpy") as valid,
        ):
            trained, validated = [], []
            for _ in range(3):
                trained += digests(train.steps(), STEPS // 3)
                validated.append(digests(valid.steps()))
            return trained, validated

    one, two = in_two_ranks(both)
    assert one == two
    trained, validated = one
    assert validated[0] == validated[1] == validated[2]
    assert len(validated[0]) > 10
    with (
        running_broker({"rules": RULES, "streams": TRAIN}) as alone,
        producing(alone, files, "web", "code"),
        streampack.connect(alone.trainers, format="numpy") as train,
    ):
        assert digests(train.steps(), STEPS) == trained


def test_the_next_iteration_of_a_small_feed_begins_at_once(service: Any) -> None:
    broker, _ = service

    def read(rank: int) -> list[float]:
        """Seconds to the first step of each iteration but the first."""
        with streampack.connect(
            broker.trainers, mesh={"dp": 2, "dp_rank": rank}, feed="valid", format="numpy"
        ) as valid:
            assert sum(1 for _ in valid.steps()) > 10
            took = []
            for _ in range(5):
                began = time.perf_counter()
                steps = valid.steps()
                next(steps)
                took.append(time.perf_counter() - began)
                assert sum(1 for _ in steps) > 9
            return took

    took = [seconds for rank in in_two_ranks(read) for seconds in rank]
    print("seconds to the first step of an iteration: " + ", ".join(f"{seconds:.3f}" for seconds in sorted(took)))
    assert sorted(took)[len(took) // 2] < 1.0, "it waited for something to be said again"


def test_status_shows_every_feed(service: Any) -> None:
    broker, _ = service
    with streampack.connect(broker.trainers, feed="valid") as valid:
        count = sum(1 for _ in valid.steps())
        assert sum(1 for _ in valid.steps()) == count
    until(lambda: broker.feed("valid")["steps"]["returned"] == count and broker.feed("valid")["round"] == 1)
    found = broker.feed("valid")
    assert found["totals"]["steps"] == 2 * count
    assert found["steps"] == {"formed": count, "returned": count, "end": count}
    assert broker.feed("train")["steps"]["returned"] == 0
    assert f'streampack_steps_total{{feed="valid"}} {2 * count}.0' in broker.get("/metrics")


def test_a_broker_that_ends_by_itself_sends_the_producers_of_several_feeds_away(files: Path) -> None:
    tree = {
        "rules": RULES, "streams": {"val": {}, "code": {}},
        "feeds": {"train": {"streams": ["code"]}, "valid": {"streams": ["val"]}},
    }  # fmt: skip
    with running_broker(tree, "--exit-when-finished") as broker, producing(broker, files, "val", "code") as producer:
        with streampack.connect(broker.trainers, feed="train", format="numpy") as train:
            assert sum(1 for _ in train.steps()) > 10
        assert broker.end() == 0
        assert producer.end() == 0
        assert re.search(r"the broker is stopping: \d+ samples", producer.said), producer.said
