"""A broker that stood still, stopped or on a machine that slept, heard nobody: it drops none of its peers for that.

A real broker with real sockets, in the thread of the test, on a clock that the test moves.
"""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace

import pytest
from streampack_services import broker as shell
from streampack_services.broker import BrokerService

from streampack import wire
from streampack.config import BrokerConfig
from streampack.core.leases import SILENT_S
from streampack.core.messages import Attach, Envelope, Mesh
from streampack.transport import Dealer
from streampack.typed_tree import convert
from tests.integration.running import until

SETTINGS = {
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
    attach = Attach(feed="train", reader="r", host="here", pid=1, mesh=Mesh(), next_step=0)
    with contextlib.closing(service), contextlib.closing(Dealer(service.endpoints["trainers"], 1 << 20)) as rank:

        def attached() -> bool:
            rank.send(wire.encode(Envelope(run=service.config.run_id, epoch=0, fence=0, message=attach)))
            service._turn()
            return service.core.num_readers == 1

        service._turn()
        until(attached)
        clock.skipped += 10 * SILENT_S
        service._turn()
        assert service.core.num_readers == 1, "it was heard of until the broker stood still"
        turns = 0
        while service.core.num_readers:
            turns += 1
            assert turns < 100 * SILENT_S, "it is silent, and the broker there to hear it"
            clock.skipped += 2 * shell.TICK_S
            service._turn()
        assert turns * 2 * shell.TICK_S >= SILENT_S - 1
