"""The listening socket of the HTTP side: asyncio must use it, and no accepted connection may be left waiting."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket
import sys
import types
import urllib.request
from typing import Any

import pytest
from streampack_services.http.http_limits import Listening, accepted_at_once
from streampack_services.http.server import AppServer, standby_app


def test_uvloop_does_not_replace_the_way_to_accept_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images with vLLM have uvloop installed."""
    made: list[str] = []

    def new_event_loop() -> asyncio.AbstractEventLoop:
        made.append("uvloop")
        return asyncio.new_event_loop()

    monkeypatch.setitem(sys.modules, "uvloop", types.SimpleNamespace(new_event_loop=new_event_loop))
    monkeypatch.delitem(sys.modules, "uvicorn.loops.uvloop", raising=False)
    server = AppServer("127.0.0.1:0", standby_app("alone", lambda: pytest.fail("its state was asked for")))
    server.start()
    with contextlib.closing(server), urllib.request.urlopen(f"{server.url}/livez", timeout=30) as answer:
        assert answer.read() == b"alive\n"
    assert made == []


def test_an_aborted_connection_does_not_leave_accepted_ones_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = socket.socket.accept
    num_accepted = 0

    def aborted_at_second(listening: socket.socket) -> tuple[socket.socket, Any]:
        nonlocal num_accepted
        num_accepted += 1
        if num_accepted == 2:
            raise ConnectionAbortedError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED))
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", aborted_at_second)
    with Listening() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        with socket.create_connection(listening.getsockname()):
            listening.accept()[0].close()


def test_a_newcomer_behind_a_burst_is_accepted_before_it_sends_its_request() -> None:
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(Listening())
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.setblocking(False)
        address = listening.getsockname()
        for _ in range(3 * accepted_at_once()):
            stack.enter_context(socket.create_connection(address)).sendall(b"GET / HTTP/1.1\r\n")
        newcomer = stack.enter_context(socket.create_connection(address))
        accepted = set()
        with contextlib.suppress(BlockingIOError):
            while True:
                accepted.add(stack.enter_context(listening.accept()[0]).getpeername())
        assert newcomer.getsockname() in accepted
        assert len(accepted) == accepted_at_once()


def test_connections_that_come_while_others_are_accepted_are_not_left_waiting() -> None:
    """As asyncio accepts: a few at a time, whenever the system says that connections wait."""
    count = accepted_at_once()
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(Listening())
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.setblocking(False)
        peers: set[Any] = set()

        def connect(number: int) -> None:
            for _ in range(number):
                peer = stack.enter_context(socket.create_connection(listening.getsockname()))
                peer.sendall(b"GET / HTTP/1.1\r\n")
                peers.add(peer.getsockname())

        connect(count // 2 + 1)
        accepted = set()
        while select.select([listening], [], [], 0.2)[0]:
            with contextlib.suppress(BlockingIOError):
                for _ in range(count):
                    accepted.add(stack.enter_context(listening.accept()[0]).getpeername())
                    if len(accepted) == count // 2 + 1:
                        connect(count - 1)
        assert accepted == peers
