"""Bytes that wait to be sent, and dropped messages, are counted only while they say something about the peer."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from streampack.transport import unread as unread_module
from streampack.transport.sockets import Poller, Router, drain
from streampack.transport.unread import (
    AHEAD_BYTES,
    ANSWERS_WAIT,
    DROPPED_S,
    MAX_DROPPED,
    MESSAGES_WAIT,
    UNDRAINED_LOOKS,
    UNDRAINED_S,
    Connection,
    Unread,
)
from tests.integration.running import until
from tests.integration.transport.raw_peer import frame, shaken

MOST = 1 << 20
SIZE = 200_000


class Peers:
    """Two connections, ``aa0`` and ``aa1``, of one key, which an ``Unread`` knows."""

    def __init__(self, listener: socket.socket) -> None:
        self.unread = Unread(1 << 30, most_unsent=MOST)
        self.unread.key_digits = 2
        self.names = [b"aa0", b"aa1"]
        self.theirs = [socket.create_connection(listener.getsockname()) for _ in self.names]
        self.ours = [listener.accept()[0] for _ in self.names]
        for name, sock in zip(self.names, self.ours, strict=True):
            self.unread.opened(sock.fileno())
            assert self.unread.add_peer(name, sock.fileno()) is not None

    def send(self, number: int) -> bool:
        """Send a message that its peer reads; return False if it is to be dropped."""
        if not self.unread.may_send(self.names[number], SIZE):
            return False
        self.ours[number].sendall(bytes(SIZE))
        left = SIZE
        while left:
            left -= len(self.theirs[number].recv(left))
        return True

    def connection(self, number: int) -> Connection:
        """Return the connection of a peer."""
        connection = self.unread.connection_of(self.names[number])
        assert connection is not None
        return connection


@pytest.fixture
def peers() -> Iterator[Peers]:
    with contextlib.ExitStack() as opened:
        made = Peers(opened.enter_context(socket.create_server(("127.0.0.1", 0))))
        for sock in (*made.ours, *made.theirs):
            opened.enter_context(sock)
        yield made


@pytest.mark.parametrize("how", ["closed", "cut", "its descriptor is another's"])
def test_messages_to_an_ended_connection_do_not_wait(how: str, peers: Peers) -> None:
    """Its end is handled later. Until then, the other connections of its key got nothing."""
    for _ in range(3 * MOST // SIZE):
        assert peers.send(0)
    connection = peers.connection(0)
    if how == "cut":
        assert connection.cut()
    else:
        peers.ours[0].close()
    with contextlib.ExitStack() as opened:
        if how == "its descriptor is another's":
            newer = opened.enter_context(socket.create_connection(peers.ours[1].getsockname()))
            assert newer.fileno() == connection.fd
        assert connection.unsent == 0
        assert all(peers.send(1) for _ in range(3 * MOST // SIZE))


def test_a_kernel_without_the_counter_stops_no_answers(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread_module, "_BYTES_ACKED", 1 << 12)  # beyond what this kernel tells
    assert all(peers.send(0) for _ in range(3 * MOST // SIZE))


def test_messages_that_zeromq_does_not_take_do_not_wait() -> None:
    """The peer reads all that was sent in the end, so nothing waits for it."""
    unread = Unread(1 << 30)
    router = Router("tcp://127.0.0.1:*", 1 << 24, None, unread)
    poller, received = Poller([router]), list[Any]()
    with contextlib.closing(router), shaken(router, poller) as peer:
        peer.send(frame(b"hello"))

        def has_come() -> bool:
            poller.wait(0.01)
            received.extend(drain(router, 1))
            return bool(received)

        until(has_come)
        address = bytes(received[0][0])
        sent = sum(router.send(address, [bytes(10_000)]) for _ in range(4000))
        assert 0 < sent < 4000, "the peer does not read, and ZeroMQ's queue has an end"
        peer.socket.settimeout(0.2)
        [connection] = unread.connections
        assert connection.unsent > 0

        def all_is_read() -> bool:
            with contextlib.suppress(TimeoutError):
                while peer.socket.recv(1 << 20):
                    poller.wait(0.0)
            return connection.unsent == 0

        until(all_is_read, 10.0)  # ZeroMQ ends the connection after 15 s, because the peer answers no heartbeats


def test_few_dropped_messages_now_and_then_cut_no_connection(peers: Peers) -> None:
    for _ in range(2):
        for why in (MESSAGES_WAIT, ANSWERS_WAIT):
            peers.unread.note_dropped(b"aa0", MAX_DROPPED - 1, why)
        time.sleep(1.1 * DROPPED_S)
    assert not peers.unread.take_cuts()


@pytest.mark.parametrize("why", [MESSAGES_WAIT, ANSWERS_WAIT])
def test_many_dropped_messages_cut_the_connection_with_the_reason(why: str, peers: Peers) -> None:
    for _ in range(MAX_DROPPED + 10):
        peers.unread.note_dropped(b"aa0", 1, why)
    [cut] = peers.unread.take_cuts()
    assert (cut.peer, cut.why) == (b"aa0", f"{MAX_DROPPED} {why}")


@pytest.mark.parametrize("overflowed", [False, True])
def test_a_flooder_behind_a_peer_within_its_credit_is_cut(overflowed: bool, peers: Peers) -> None:
    """The peer with a credit has more unread, and may have it. Once messages were dropped, the next look cuts."""
    unread = Unread(1 << 30, credit=lambda peer: 8 * AHEAD_BYTES if peer == b"aa0" else 0)
    for number, sock in enumerate(peers.ours):
        unread.opened(sock.fileno())
        connection = unread.add_peer(peers.names[number], sock.fileno())
        assert connection is not None
        connection.messages = 1
        left = AHEAD_BYTES + (2 - number) * MOST
        while left:  # read ahead, and not taken
            peers.theirs[number].sendall(bytes(min(left, 1 << 16)))
            left -= len(sock.recv(1 << 16, socket.MSG_WAITALL))
    unread.check()
    assert not unread.take_cuts()
    if overflowed:
        unread.note_dropped(b"aa1", 1, MESSAGES_WAIT)

        def is_cut() -> bool:
            unread.check()
            return any(each.is_cut for each in unread.connections)

        until(is_cut, UNDRAINED_S / 2)
        assert [cut.peer for cut in unread.take_cuts()] == [b"aa1"]
        return
    ends = time.monotonic() + 2 * UNDRAINED_S
    looks = 0
    while looks < 2 * UNDRAINED_LOOKS or time.monotonic() < ends:
        unread.check()
        looks += 1
        time.sleep(0.02)
    assert [cut.peer for cut in unread.take_cuts()] == [b"aa1"]
