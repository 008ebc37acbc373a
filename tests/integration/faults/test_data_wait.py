"""Who waits, and for what: a real broker, real sockets, and something that is really too slow."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from streampack_services.broker.service import BrokerService

import streampack
from streampack.config.daemon_settings import BrokerConfig
from streampack.config.typed_yaml import convert
from streampack.core.serve.served_steps import ServedSteps
from streampack.core.stats.data_wait import CAUSES
from streampack.sources import Source, SourceSettings, TokenizerSettings, open_source, open_tokenizer
from streampack.sources.in_memory import InMemory
from tests.integration.proxy import Proxy
from tests.integration.running import PATIENCE_S, producing_here, until, write_jsonl

SETTINGS = {
    "listen": {"producers": "tcp://127.0.0.1:*", "trainers": "tcp://127.0.0.1:*"},
    "memory": "32MiB",
    "steps_ahead": 4,
    "rules": {"budget": 256, "window": {"samples": 8}, "step": {"packs": 2}},
    "streams": {"web": {"repeat": True, "partitions": 1}, "code": {"repeat": True, "partitions": 1}},
}

NOBODY: dict[str, Any] = {"starved_s": {}, "starved_streams": {}, "trainer_s": 0.0}


@dataclass
class Served:
    """A broker in a thread of this process."""

    service: BrokerService

    @property
    def trainers(self) -> str:
        return self.service.endpoints["trainers"]

    def producing(self, *streams: str) -> Any:
        sources = {stream: rows_of(stream) for stream in streams}
        return producing_here(self.service.endpoints["producers"], sources)

    @property
    def feed(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(msgspec.json.encode(self.service.snapshot.feeds["train"]))
        return found

    def row(self, rank: int = 0) -> dict[str, Any]:
        """What the broker says of a rank, and nothing before it is there."""
        rows = self.feed["readers"]
        return next((row for row in rows if row["dp_rank"] == rank), NOBODY)


def most(starved_s: dict[str, float], cause: str) -> bool:
    """Was it waited for that, most of all and for a while? As long as that goes on it will have been."""
    others = sum(seconds for each, seconds in starved_s.items() if each != cause)
    return starved_s.get(cause, 0.0) > 0.2 + 2 * others


def rows_of(stream: str) -> Source:
    rows = [{"tokens": [ord(stream[0])] * (1 + (7 * i) % 100)} for i in range(50)]
    return InMemory(rows, SourceSettings(source="python"), open_tokenizer(TokenizerSettings()))


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(SETTINGS) as broker:
        yield broker


@contextmanager
def serving(settings: dict[str, Any]) -> Iterator[Served]:
    service = BrokerService(convert(settings, BrokerConfig))
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        yield Served(service)
    finally:
        service.drain()
        service.drain()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


class Trainer:
    """A rank in a thread that takes steps as fast as they come until it is to ``hold`` one, and to the end."""

    def __init__(self, endpoint: str, dp: int = 1, rank: int = 0) -> None:
        self._endpoint, self._mesh = endpoint, {"dp": dp, "dp_rank": rank}
        self.steps, self.stats = 0, dict[str, float]()
        self.hold = threading.Event()
        self._go_on, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Trainer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._go_on.set()
        self.loader.close()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        self.loader = streampack.connect(self._endpoint, mesh=self._mesh, format="numpy", stall_timeout_s=PATIENCE_S)
        try:
            for _ in self.loader.steps():
                self.steps += 1
                if self.hold.is_set():
                    self._go_on.wait(PATIENCE_S)
                if self._over.is_set():
                    return
        except streampack.errors.StreampackError:
            assert self._over.is_set()


def test_a_stream_that_nobody_sends_is_named_and_then_a_broker_that_is_not_heard(served: Served) -> None:
    with Proxy(served.trainers) as network, served.producing("web"), Trainer(network.endpoint) as trainer:
        until(lambda: most(served.row()["starved_s"], "stream") and most(served.row()["starved_streams"], "code"))
        row = served.row()
        assert set(row["starved_s"]) == set(CAUSES)
        assert sum(row["starved_streams"].values()) == pytest.approx(row["starved_s"]["stream"])
        assert served.feed["waiting_for"]["stream"] == "code"
        assert not trainer.steps
        network.down.held = True
        until(lambda: by_cause(trainer)["network"] > 0.2)
        before = by_cause(trainer)
        until(lambda: by_cause(trainer)["network"] > before["network"] + 0.2)
        assert by_cause(trainer) == before | {"network": pytest.approx(before["network"], abs=PATIENCE_S)}
        network.down.held = False


def test_a_broker_is_waiting_while_a_rank_has_no_step_and_says_for_how_long(served: Served) -> None:
    with served.producing("web"), Trainer(served.trainers):
        until(lambda: served.service.snapshot.state == "waiting")
        now = served.service.snapshot
        assert now.stalled_s is not None
        assert now.stalled_s == now.feeds["train"].stalled_s
        assert now.stalled_s >= 5
        assert now.feeds["train"].state == "waiting"
        with served.producing("code"):
            until(lambda: served.service.snapshot.state == "serving")
            assert served.service.snapshot.stalled_s is None


def test_a_feed_that_no_rank_waits_for_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "streampack.broker")
    feeds = {"train": {"streams": ["web"]}, "eval": {"streams": ["code"]}}
    service = BrokerService(convert(SETTINGS | {"feeds": feeds}, BrokerConfig))

    def lines(first: int, last: int) -> list[str]:
        caplog.clear()
        for second in range(first, last):
            reporter.tick(float(second))
        return [text for record in caplog.records if "no step for" in (text := record.getMessage())]

    try:
        reporter = service._reporter
        idle = lines(1, 1000)
        assert len(idle) == len(feeds), idle
        evaluation = service.core.feeds["eval"].readers.steps
        monkeypatch.setattr(ServedSteps, "any_starved", property(lambda self: self is evaluation))
        starved = lines(1000, 1300)
        assert len(starved) > 5, "a rank waits now"
        assert all("feed 'eval'" in line for line in starved)
    finally:
        service.close()


def by_cause(trainer: Trainer) -> dict[str, float]:
    stats = trainer.loader.stats()
    return {cause: stats[f"starved_{cause}_s"] for cause in CAUSES}


def test_a_rank_that_is_not_there_is_waited_for_and_one_that_is_slow_is_at_its_trainer(served: Served) -> None:
    with ExitStack() as stack:
        stack.enter_context(served.producing("web", "code"))
        slow = Trainer(served.trainers, 2, 1)
        slow.hold.set()
        fast = stack.enter_context(Trainer(served.trainers, 2, 0))
        until(lambda: most(served.row(0)["starved_s"], "join"))
        stack.enter_context(slow)
        until(lambda: most(served.row(0)["starved_s"], "peers"))
        until(lambda: served.row(1)["trainer_s"] > 0.2 + 2 * sum(served.row(1)["starved_s"].values()))
        assert fast.steps == SETTINGS["steps_ahead"]


def test_steps_left_are_known_once_producers_know_their_shards_and_at_the_end_there_are_none(tmp_path: Path) -> None:
    for n in range(4):
        write_jsonl(tmp_path / f"{n}.jsonl", [{"tokens": [7] * 32} for _ in range(60)])
    source = open_source(SourceSettings(source="jsonl", shards=str(tmp_path / "*.jsonl")))
    settings = SETTINGS | {"streams": {"web": {"partitions": 2}}}
    with serving(settings) as served, producing_here(served.service.endpoints["producers"], {"web": source}):
        assert served.feed["steps_left"] is None
        with streampack.connect(served.trainers, format="numpy", stall_timeout_s=PATIENCE_S) as loader:
            steps = loader.steps()
            next(steps)
            until(lambda: is_sure(served.feed["steps_left"]))
            feed = served.feed
            whole = 1 + sum(1 for _ in steps)
            assert feed["steps_left"]["low"] <= whole - feed["steps"]["returned"] <= feed["steps_left"]["high"]
            assert whole == 4 * 60 * 32 / (2 * 256)
            until(lambda: served.feed["steps_left"] == {"estimate": 0, "low": 0, "high": 0})


def is_sure(left: dict[str, int] | None) -> bool:
    return left is not None and left["high"] - left["low"] <= 2
