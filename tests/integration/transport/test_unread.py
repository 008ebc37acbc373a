"""What a socket reads ahead of its process is counted to the byte, and bounded, with keys and without."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streampack.transport import curve, unread
from streampack.transport.curve import Door
from streampack.transport.keys import Key
from streampack.transport.sockets import Dealer, Poller, Router, drain
from streampack.transport.unread import ADMITTED, HANDSHAKE_BYTES, MEMORY_SLACK, Connection, Unread, bytes_read
from tests.integration.running import PATIENCE_S, until
from tests.integration.transport.raw_peer import COMMAND, MORE, RawPeer, frame, shaken, take_all

LIMIT = 1 << 20
BROKER, FRIEND = curve.new_secret(), curve.new_secret()
KEY = Key(name="friend", secret=FRIEND, broker=curve.public_of(BROKER))


@contextlib.contextmanager
def router(secured: bool, limit: int = LIMIT) -> Iterator[tuple[Router, Unread]]:
    door = Door(BROKER, lambda key, _: key == KEY.public) if secured else None
    unread = Unread(limit)
    sock = Router("tcp://127.0.0.1:*", 1 << 24, door, unread)
    try:
        yield sock, unread
    finally:
        sock.close()


@pytest.mark.parametrize("secured", [False, True])
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(st.lists(st.integers(0, 600) | st.just(70_000), min_size=1, max_size=70), max_size=8))
def test_bytes_that_were_taken_are_those_that_the_kernel_counted(secured: bool, messages: list[list[int]]) -> None:
    with router(secured, 1 << 30) as (sock, unread), contextlib.closing(_dealer(sock, secured)) as dealer:
        poller = Poller([sock])
        _say(dealer, b"first", poller, sock)
        [connection] = unread.connections
        before = bytes_read(connection.fd) - connection.taken
        assert 0 < before < HANDSHAKE_BYTES
        count = connection.messages + len(messages)
        for sizes in messages:
            assert dealer.send([bytes(size) for size in sizes])
        until(lambda: take_all(poller, sock) == 0 and connection.messages == count)
        assert bytes_read(connection.fd) - connection.taken == before


def _dealer(sock: Router, secured: bool) -> Dealer:
    return Dealer(sock.endpoint, 1 << 24, key=KEY if secured else None)


def _say(dealer: Dealer, word: bytes, poller: Poller, sock: Router) -> None:
    """Send a message once the dealer was let in, and take it."""
    until(lambda: take_all(poller, sock) == 0 and dealer.send([word]))
    until(lambda: take_all(poller, sock) == 1)


@pytest.mark.parametrize("secured", [False, True])
def test_a_peer_that_sends_more_than_any_may_is_cut(secured: bool) -> None:
    """It was heard before, with a valid key where there are keys; the other peer notices nothing."""
    with router(secured) as (sock, unread), contextlib.ExitStack() as held:
        honest, flood = (held.enter_context(contextlib.closing(_dealer(sock, secured))) for _ in range(2))
        poller = Poller([sock])
        for dealer in (honest, flood):
            _say(dealer, b"hello", poller, sock)
        before = bytes_read(next(iter(unread.connections)).fd)
        for _ in range(2 * LIMIT // 10_000):
            flood.send([bytes(10_000)])

        def is_cut() -> bool:
            poller.wait(0.01)  # nothing is taken meanwhile
            return bool(cuts := sock.take_cuts()) and "more than any peer may send ahead" in cuts[0].why

        until(is_cut)
        assert len(unread.connections) >= 1
        assert bytes_read(next(iter(unread.connections)).fd) >= before
        until(lambda: honest.send([b"still here"]) and any(_is(f, b"still here") for f in _taken(poller, sock)))


def _taken(poller: Poller, sock: Router) -> list[list[bytes]]:
    poller.wait(0.01)
    return [[bytes(each) for each in frames] for frames in drain(sock, 1000)]


def _is(frames: list[bytes], said: bytes) -> bool:
    return frames[-1] == said


def test_strangers_that_never_end_a_message_are_cut_while_they_are_small() -> None:
    with router(False) as (sock, unread):
        poller = Poller([sock])
        peer = shaken(sock, poller)
        with peer:
            deadline = time.monotonic() + PATIENCE_S
            while peer.send(frame(b"x", MORE) * 10_000):
                take_all(poller, sock)
                assert time.monotonic() < deadline
        until(lambda: bool(take_all(poller, sock)) or bool(sock.take_cuts()))
        until(lambda: take_all(poller, sock) == 0 and not unread.connections)


def test_no_more_connections_are_let_in_than_were_drained() -> None:
    """Each may bring something; more come in once that was taken."""
    unread = Unread(LIMIT)
    assert unread.admissions() == ADMITTED
    unread.admitted(ADMITTED)
    assert unread.admissions() == 0
    unread.drained()
    assert unread.admissions() == ADMITTED


def test_memory_that_grows_while_nothing_is_unread_is_nobodys_fault() -> None:
    """A peer that sends a little afterwards is not cut for it."""
    with router(False) as (sock, _), contextlib.closing(_dealer(sock, False)) as dealer:
        poller = Poller([sock])
        _say(dealer, b"hello", poller, sock)
        grown = bytearray(4 * MEMORY_SLACK)
        grown[::4096] = b"x" * len(grown[::4096])
        for _ in range(30):  # as in a broker that runs on
            assert take_all(poller, sock) == 0
        dealer.send([bytes(LIMIT // 2)])
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            poller.wait(0.01)  # nothing is taken meanwhile
            time.sleep(0.01)
        assert not sock.take_cuts()
        assert take_all(poller, sock) == 1
        assert len(grown)


TAKES_NOTHING = """
import sys, time
from streampack.transport.sockets import Router
router = Router("tcp://127.0.0.1:*", 1 << 20)
print(router.endpoint, flush=True)
sys.stdin.readline()
taken = 0
while router.raw.poll(1000):
    router.raw.recv_multipart()
    taken += 1
print(taken)
"""


def test_a_connection_that_breaks_while_nothing_is_taken_ends_no_process() -> None:
    """8 KB and a reset ended a process whose socket had a receive high-water mark: ZeroMQ had stopped the input of the
    connection, and aborted when it broke. A broker that was frozen ended in the same way.
    """
    child = subprocess.Popen(
        [sys.executable, "-c", TAKES_NOTHING],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    peer = RawPeer(child.stdout.readline().strip())
    assert peer.send(frame(b"") * 3500 + frame(b"\x04PING\0\0", COMMAND) * 20 + frame(b"") * 400)
    time.sleep(0.5)  # ZeroMQ reads ahead meanwhile
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()
    time.sleep(0.5)
    said, errors = child.communicate("go on\n", timeout=PATIENCE_S)
    assert child.returncode == 0, errors
    assert int(said) == 3900


def test_a_cut_of_a_connection_that_is_being_closed_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ closes the connection just before it is cut, and something else gets the number of its descriptor."""
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as held:

        def pair() -> tuple[socket.socket, socket.socket]:
            peer = held.enter_context(socket.create_connection(server.getsockname()))
            return held.enter_context(server.accept()[0]), peer

        look = unread._option
        for replaces in (lambda: None, pair):
            ours, peer = pair()
            connection = Connection(ours.fileno(), 0.0)
            after = list[Any]()

            def closes(*asked: Any, ours: Any = ours, replaces: Any = replaces, after: Any = after) -> bytes:
                found = look(*asked)
                if ours.fileno() >= 0:
                    ours.close()
                    after.append(replaces())
                return found

            with monkeypatch.context() as patched:
                patched.setattr(unread, "_option", closes)
                assert connection.cut() in ("", f"127.0.0.1:{peer.getsockname()[1]}")
            if replaces is pair:
                other, its_peer = after[0]
                its_peer.send(b"x")
                assert other.recv(1) == b"x", "the new connection is whole"


@pytest.mark.parametrize("known", [True, False])
def test_messages_left_by_an_ended_connection_do_not_hide_the_next_one(known: bool) -> None:
    """The next connection has the same descriptor. It gets answers, also if the last one said nothing before."""
    with router(False) as (sock, unread):
        poller = Poller([sock])

        def is_connected() -> bool:
            poller.wait(0.01)
            return bool(unread.connections)

        first = _dealer(sock, False)
        until(is_connected)
        if known:
            _say(first, b"first", poller, sock)
        [descriptor] = [each.fd for each in unread.connections]
        until(lambda: is_connected() and first.send([b"goodbye" * 1000]))
        until(lambda: bytes_read(descriptor) > 7000)
        first.close()
        until(lambda: not is_connected())
        with contextlib.closing(_dealer(sock, False)) as second:
            until(is_connected)
            assert [each.fd for each in unread.connections] == [descriptor]
            peers = list[bytes]()
            while len(peers) < 3:
                second.send([b"hello"])
                poller.wait(0.01)
                peers += [bytes(frames[0]) for frames in drain(sock, 1000) if bytes(frames[1]) == b"hello"]
            assert len(set(peers)) == 1
            assert unread.takes_answers(peers[0])
            [connection] = unread.connections
            assert (connection.peer, connection.is_stranger) == (peers[0], False)


def test_a_file_that_has_the_descriptor_of_an_ended_connection_is_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        ours = server.accept()[0]
        connection, number = Connection(ours.fileno(), 0.0), ours.fileno()
        ours.close()
        with open("/dev/null") as file:
            assert file.fileno() == number
            before = os.listdir("/proc/self/fd")
            assert connection.cut() == ""
            assert os.listdir("/proc/self/fd") == before
