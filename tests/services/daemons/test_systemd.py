"""What systemd hears of a daemon, on a real socket."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator

import pytest
from streampack_services.broker.status import BrokerStatus
from streampack_services.daemons.systemd import STATUS_EVERY_S, Systemd

from tests.blank import blank


@pytest.fixture
def manager() -> Iterator[socket.socket]:
    """With a name in the abstract namespace, as where NOTIFY_SOCKET begins with @."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as own:
        own.bind(f"\0streampack-test-{os.getpid()}")
        yield own


def env(**others: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": f"@streampack-test-{os.getpid()}", **others}


def heard(manager: socket.socket) -> list[list[str]]:
    """Every datagram since, as its lines."""
    found = []
    while True:
        try:
            found.append(manager.recv(4096).decode().splitlines())
        except BlockingIOError:
            return found


def test_each_state_is_said_once_and_a_status_now_and_then(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    systemd = Systemd(env())
    systemd.tell(status="starting")
    systemd.tell(ready=True, status="serving\nstep 1")
    systemd.tell(ready=True, status="step 2")
    assert heard(manager) == [["STATUS=starting"], ["READY=1", "STATUS=serving step 1"]]
    now += STATUS_EVERY_S
    systemd.tell(ready=True, status="step 3")
    systemd.tell(ready=True, stopping=True, status="draining")
    systemd.tell(ready=True, stopping=True, status="draining")
    assert heard(manager) == [["STATUS=step 3"], ["STOPPING=1", "STATUS=draining"]]


def test_a_broker_is_ready_once_it_serves_and_none_that_is_told_to_stop_is_waited_for(manager: socket.socket) -> None:
    systemd = Systemd(env())
    systemd.tell_of_broker(blank(BrokerStatus, state="starting"))
    systemd.tell_of_broker(blank(BrokerStatus, state="serving", ready=True))
    assert heard(manager) == [["STATUS=starting:"], ["READY=1", "STATUS=serving:"]]
    Systemd(env()).tell_of_broker(blank(BrokerStatus, state="draining"))
    assert heard(manager) == [["READY=1", "STOPPING=1", "STATUS=draining:"]]


def test_a_watchdog_is_fed_twice_as_often_as_it_must_be(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    systemd = Systemd(env(WATCHDOG_USEC="30000000", WATCHDOG_PID=str(os.getpid())))
    for _ in range(61):
        systemd.tell()
        now += 0.5
    assert heard(manager) == [["WATCHDOG=1"]] * 3, "at 0, 15 and 30 s"


@pytest.mark.parametrize("others", [{}, {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}])
def test_the_watchdog_of_another_process_is_not_fed(manager: socket.socket, others: dict[str, str]) -> None:
    Systemd(env(**others)).tell()
    assert heard(manager) == []


def test_without_a_manager_and_with_one_that_is_gone_a_daemon_goes_on() -> None:
    Systemd({}).tell(ready=True)
    Systemd({"NOTIFY_SOCKET": "/nowhere/notify", "WATCHDOG_USEC": "1000"}).tell(ready=True)
