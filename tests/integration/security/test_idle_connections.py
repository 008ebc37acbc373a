"""Connections that say nothing take all descriptors that the system allows: the broker goes on, and lets others in."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import time
import urllib.parse
from collections.abc import Sequence

import pytest

import streampack as sp
from tests.integration.commands.endless_run import ENDLESS, producer_config
from tests.integration.running import (
    PATIENCE_S,
    STREAMPACK,
    RunningBroker,
    folder,
    running,
    running_broker,
    until,
    write,
)
from tests.integration.running import streampack as command


def with_files(monkeypatch: pytest.MonkeyPatch, files: int) -> None:
    """Commands that start from now on may open so many files at most."""
    shell = ("sh", "-c", f'ulimit -n {files} && exec "$@"', "sh")

    def start(arguments: Sequence[str], out: int, err: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*shell, *STREAMPACK, *arguments], stdout=out, stderr=err)

    monkeypatch.setattr("tests.integration.running._start", start)


def address(broker: RunningBroker, side: str) -> tuple[str, int]:
    found = urllib.parse.urlsplit(getattr(broker, side))
    assert found.hostname is not None
    assert found.port is not None
    return found.hostname, found.port


@pytest.mark.parametrize("files", [96, 256])
@pytest.mark.parametrize("side", ["producers", "trainers", "http"])
def test_idle_connections_end_no_broker_and_keep_nobody_out(
    monkeypatch: pytest.MonkeyPatch, files: int, side: str
) -> None:
    """A broker opened a file in its loop, so it ended once they had taken every descriptor."""
    with contextlib.ExitStack() as opened, folder() as path:
        with monkeypatch.context() as patch:
            with_files(patch, files)
            broker = opened.enter_context(running_broker(ENDLESS))
        opened.enter_context(running("producer", "produce", "-c", producer_config(path, broker.producers)))
        with sp.connect(broker.trainers, format="numpy", stall_timeout_s=60.0) as loader:
            steps = loader.steps()
            next(steps)
            for _ in range(2 * files):
                with contextlib.suppress(OSError):
                    opened.enter_context(socket.create_connection(address(broker, side), timeout=1.0))
            for _ in range(20):
                next(steps)
            assert broker.process.poll() is None, broker.said
            assert broker.get("/livez") == "alive\n"
        began = time.monotonic()
        with sp.connect(broker.trainers, format="numpy", timeout_s=30.0):
            assert time.monotonic() - began < 10.0, "a newcomer gets in"


def test_a_burst_of_http_connections_never_takes_more_than_256(monkeypatch: pytest.MonkeyPatch) -> None:
    """All connections that had come at once were accepted before the oldest were closed."""
    with contextlib.ExitStack() as opened, monkeypatch.context() as patch:
        with_files(patch, 4096)
        broker = opened.enter_context(running_broker(ENDLESS))

        def num_files() -> int:
            return len(os.listdir(f"/proc/{broker.process.pid}/fd"))

        before, most = num_files(), 0
        for _ in range(1500):
            attacker = opened.enter_context(socket.socket())
            attacker.setblocking(False)
            attacker.connect_ex(address(broker, "http"))
        began = time.monotonic()
        while time.monotonic() - began < 5.0:
            most = max(most, num_files() - before)
            time.sleep(0.002)
        assert 0 < most <= 256
        assert broker.get("/livez") == "alive\n"


def test_a_first_request_is_answered_without_a_free_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """It imported modules."""
    with contextlib.ExitStack() as opened, monkeypatch.context() as patch:
        with_files(patch, 256)
        broker = opened.enter_context(running_broker(ENDLESS))
        number = len(os.listdir(f"/proc/{broker.process.pid}/fd"))
        with socket.create_connection(address(broker, "http")) as probe:
            until(lambda: len(os.listdir(f"/proc/{broker.process.pid}/fd")) > number)
            most = resource.prlimit(broker.process.pid, resource.RLIMIT_NOFILE, (3, 256))
            probe.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            probe.settimeout(PATIENCE_S)
            assert probe.recv(1 << 12).startswith(b"HTTP/1.1 200")
            resource.prlimit(broker.process.pid, resource.RLIMIT_NOFILE, most)


def test_a_limit_that_is_too_low_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with folder() as path, monkeypatch.context() as patch:
        with_files(patch, 48)
        done = command("broker", "-c", write(path / "broker.yaml", ENDLESS | {"memory": "32MiB"}))
    assert "got at most 48 open files, expected at least 64, and one more for each rank and producer" in done.stderr
    assert done.returncode == 2
