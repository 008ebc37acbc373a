"""A broker that stood still, stopped or on a machine that slept, heard nobody: it drops none of its peers for that.

A real broker with real sockets, in the thread of the test, on a clock that the test moves.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from streampack_services.broker import service as shell
from streampack_services.broker.service import BrokerService

import streampack as sp
from streampack.config.daemon_settings import BrokerConfig
from streampack.config.typed_yaml import convert
from streampack.core.intake.leases import PRODUCER_SILENT_S
from streampack.core.model.mesh import Mesh
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.trainer_messages import Attach
from streampack.sources import SourceSettings, open_source
from streampack.transport.sockets import Dealer
from streampack.wire import frames as wire
from tests.integration.running import PATIENCE_S, executed, producing_here, running_broker, until, write_jsonl

SETTINGS: dict[str, Any] = {
    "listen": {"producers": "tcp://127.0.0.1:*", "trainers": "tcp://127.0.0.1:*"},
    "memory": "32MiB",
    "rules": {"budget": 256, "window": {"samples": 8}, "step": {"packs": 2}},
    "streams": {"web": {}},
}


def test_a_broker_that_stood_still_drops_nobody_and_one_that_runs_drops_who_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(skipped=0.0)
    moved = {"monotonic": lambda: time.monotonic() + clock.skipped}
    monkeypatch.setattr(shell, "time", SimpleNamespace(**(vars(time) | moved)))
    service = BrokerService(convert(SETTINGS, BrokerConfig))
    attach = Attach(feed="train", knows_stages=True, reader="r", host="here", pid=1, mesh=Mesh(), next_step=0)
    with contextlib.closing(service), contextlib.closing(Dealer(service.endpoints["trainers"], 1 << 20)) as rank:

        def attached() -> bool:
            rank.send(wire.encode(Envelope(run=service.config.run_id, epoch=0, fence=0, message=attach)))
            service._turn()
            return service.core.num_readers == 1

        service._turn()
        until(attached)
        clock.skipped += 10 * PRODUCER_SILENT_S
        service._turn()
        assert service.core.num_readers == 1, "it was heard of until the broker stood still"
        turns = 0
        while service.core.num_readers:
            turns += 1
            assert turns < 100 * PRODUCER_SILENT_S, "it is silent, and the broker there to hear it"
            clock.skipped += 2 * shell.TICK_S
            service._turn()
        assert turns * 2 * shell.TICK_S >= PRODUCER_SILENT_S - 1


FROZEN_S = 20.0
"""Longer than ZeroMQ's heartbeats allow: all peers have given their connections up when the broker goes on. After 18 s
some had not, and the broker lived on without the fix, too."""


def test_a_broker_that_was_frozen_goes_on_with_its_ranks(tmp_path: Path) -> None:
    """Its process used to be aborted inside ZeroMQ (a connection that broke while its input was stopped)."""
    rows = [{"tokens": [7] * (1 + 7919 * row % 90)} for row in range(500)]
    source = open_source(SourceSettings(source="jsonl", shards=str(write_jsonl(tmp_path / "a.jsonl", rows))))
    settings = {
        **SETTINGS,
        "listen": {**SETTINGS["listen"], "http": "127.0.0.1:0"},
        "streams": {"web": {"repeat": True}},
    }
    chains: list[dict[int, str]] = [{}, {}]
    failed: list[BaseException] = []
    over = threading.Event()

    def read(rank: int, endpoint: str) -> None:
        try:
            mesh = sp.Mesh(dp=2, dp_rank=rank)
            with sp.connect(endpoint, format="numpy", mesh=mesh, stall_timeout_s=2 * FROZEN_S) as loader:
                for step in loader.steps():
                    chains[rank][step.index] = step.chain
                    if over.wait(0.01):
                        return
        except BaseException as error:
            failed.append(error)

    def go_on(more: int) -> None:
        goal = min(map(len, chains)) + more
        until(lambda: bool(failed) or broker.process.poll() is not None or min(map(len, chains)) >= goal)
        assert broker.process.poll() is None, broker.said
        assert not failed, failed

    with executed(), running_broker(settings) as broker, producing_here(broker.producers, {"web": source}):
        ranks = [threading.Thread(target=read, args=(rank, broker.trainers)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        try:
            go_on(20)
            broker.signal(signal.SIGSTOP)
            time.sleep(FROZEN_S)
            broker.signal(signal.SIGCONT)
            go_on(50)
        finally:
            over.set()
            for rank in ranks:
                rank.join(PATIENCE_S)
    both = chains[0].keys() & chains[1].keys()
    assert len(both) >= 60
    assert all(chains[0][step] == chains[1][step] for step in both)
