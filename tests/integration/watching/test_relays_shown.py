"""Relays in the status, the metrics, ``streampack status`` and ``top``: connected, and gone without a goodbye."""

from __future__ import annotations

import re
import signal
import socket

import pytest

import streampack as sp
from streampack.sources import SourceSettings, open_source
from tests.integration.running import (
    RunningBroker,
    folder,
    in_process,
    producing_here,
    running,
    running_broker,
    until,
    write_jsonl,
)

HOST = socket.gethostname()


def relay_up(broker: RunningBroker) -> dict[str, str]:
    """The value of ``streampack_relay_up`` by host."""
    return dict(re.findall(r'^streampack_relay_up\{host="([^"]*)"\} (\S+)$', broker.get("/metrics"), re.MULTILINE))


@pytest.mark.parametrize(("end", "lost"), [(signal.SIGKILL, True), (signal.SIGTERM, False)])
def test_a_relay_is_shown_while_it_is_there_and_once_it_is_lost(
    end: signal.Signals, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "rules": {"budget": 256, "window": {"samples": 64}, "step": {"packs": 4}},
        "streams": {"web": {"partitions": 1, "repeat": True}},
    }
    with folder() as path, running_broker(settings) as broker:
        at = f"ipc://{path}/relay.sock"
        monkeypatch.setenv("STREAMPACK_RELAY", at)
        source = open_source(SourceSettings("jsonl", str(write_jsonl(path / "a.jsonl", [{"tokens": [1] * 50}] * 50))))
        assert broker.status()["relays"] == {"connected": 0, "lost": 0, "ranks": 0, "hosts": []}
        assert relay_up(broker) == {}
        with (
            running("relay", "relay", "--broker", broker.trainers, "--listen", at) as relay,
            producing_here(broker.producers, {"web": source}),
            sp.connect(broker.trainers, format="numpy") as loader,
        ):
            steps = loader.steps()
            next(steps)
            until(lambda: broker.status()["relays"]["ranks"] == 1)
            until(lambda: relay_up(broker) == {HOST: "1.0"})
            assert broker.feed()["ranks"]["nodes"][0]["relay"] == "connected"
            assert "1 relay, 1 rank" in in_process("status", broker.http).stdout
            assert "1 relay, 1 rank" in in_process("top", broker.http, "--once").stdout
            relay.signal(end)
            until(lambda: broker.status()["relays"]["ranks"] == 0)
            next(steps)
            until(lambda: relay_up(broker) == ({HOST: "0.0"} if lost else {}))
            assert broker.status()["relays"]["lost"] == lost
            told = in_process("status", broker.http).stdout
            assert (f"lost: {HOST}" in told) == lost
            assert broker.feed()["ranks"]["nodes"][0]["relay"] == ("lost" if lost else None)
