"""The limits that ``http_limits`` adds to uvicorn: these tests fail where uvicorn's internals move.

``test_attacks`` has the attacks themselves, on a broker.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from streampack_services.broker.status import BrokerStatus
from streampack_services.http import http_limits
from streampack_services.http.server import HttpServer

from tests.blank import blank
from tests.integration.running import PATIENCE_S

STATUS = blank(BrokerStatus, run="limited", ready=True, state="serving", taken_at=1e12)
WHOLE_S = 0.4
HEAD = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"


class Served:
    """A server whose next answer waits for ``go``."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.server = HttpServer("127.0.0.1:0", self._snapshot)
        self.host, port = self.server.url.removeprefix("http://").split(":")
        self.port = int(port)

    def _snapshot(self) -> BrokerStatus:
        self.go.wait(PATIENCE_S)
        return STATUS

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=PATIENCE_S)


def read_all(connection: socket.socket) -> bytes:
    """What arrives until the server closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            found += piece
    return found


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(http_limits, "WHOLE_S", WHOLE_S)
    found = Served()
    found.server.start()
    yield found
    found.go.set()
    found.server.close()


def test_a_connection_that_asks_in_time_is_kept_longer_than_one_request_may_take(served: Served) -> None:
    client = http.client.HTTPConnection(served.host, served.port, timeout=PATIENCE_S)
    client.connect()
    first = client.sock
    until = time.monotonic() + 3 * WHOLE_S
    while time.monotonic() < until:
        client.request("GET", "/livez")
        assert client.getresponse().read() == b"alive\n"
        assert client.sock is first
        time.sleep(WHOLE_S / 8)
    client.close()


def test_a_second_request_that_does_not_end_closes_the_connection(served: Served) -> None:
    with served.connect() as connection:
        connection.sendall(HEAD + b"\r\n" + HEAD)
        answer = read_all(connection)
    assert answer.count(b"alive\n") == 1


def test_an_answer_that_takes_longer_than_a_request_may_is_given(served: Served) -> None:
    served.go.clear()
    with served.connect() as connection:
        connection.sendall(HEAD + b"Connection: close\r\n\r\n")
        time.sleep(2 * WHOLE_S)
        served.go.set()
        answer = read_all(connection)
    assert answer.endswith(b"alive\n")


def test_a_new_connection_replaces_the_one_that_has_waited_longest(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_limits, "WHOLE_S", PATIENCE_S)
    monkeypatch.setattr(http_limits, "MOST_CONNECTIONS", 2)
    with served.connect() as oldest, served.connect() as second, served.connect() as third:
        assert read_all(oldest) == b""
        for each in (second, third):
            each.sendall(HEAD + b"\r\n")
            assert each.recv(1 << 16).startswith(b"HTTP/1.1 200")
