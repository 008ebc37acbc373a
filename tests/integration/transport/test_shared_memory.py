"""Sockets of one host: large frames go by reference between processes that can read each other's memory, all others as
ever.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import zmq

from streampack.transport import links
from streampack.transport.shared_memory import SPEAKS, Link
from streampack.transport.slots import FEW_SLOTS, NUM_SLOTS, SLOT_BYTES, Mapping
from streampack.transport.sockets import Dealer, Poller, Router

LARGE = 1 << 20
PATIENCE_S = 30.0


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/socket"


@pytest.fixture
def router(endpoint: str) -> Iterator[Router]:
    router = Router(endpoint, 1 << 24)
    yield router
    router.close()


def until(condition: Callable[[], Any], *sockets: Any) -> Any:
    poller, end = Poller(sockets), time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end
        poller.wait(0.05)
    return found


def links_of(sock: Router | Dealer) -> links.Links:
    assert sock._links is not None
    return sock._links


def link_of(dealer: Dealer) -> Link:
    return links_of(dealer)._by_peer[b""]


def lend_both_ways(router: Router, dealer: Dealer) -> bytes:
    """Until each lends the other memory; the router's name for the dealer."""
    for _ in range(10):
        dealer.send([bytes(LARGE)])
        peer: bytes = until(router.receive, router, dealer)[0].bytes
        router.send(peer, [bytes(LARGE)])
        until(dealer.receive, dealer)
        if link_of(dealer).lends and router.room(peer, LARGE) is not None:
            return peer
    raise AssertionError("nothing was lent")


def num_memory_files() -> int:
    """ZeroMQ's own are closed by its thread, some time after a peer is gone."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found += os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:streampack")
    return found


def is_gone(router: Router, peer: bytes) -> bool:
    """Read first: ZeroMQ keeps a closed connection, and its full queue, until all of its messages are read."""
    while router.receive() is not None:
        pass
    try:
        router.raw.send_multipart([peer, SPEAKS], zmq.NOBLOCK)
    except zmq.ZMQError as error:
        return error.errno == zmq.EHOSTUNREACH
    return False


def send_large(endpoint: str, count: int, byte: int) -> None:
    """A process: large messages, a second and more apart until they are lent, and then at once."""
    dealer = Dealer(endpoint, 1 << 24)
    poller = Poller([dealer])
    sent = 0
    while sent < count:
        link = link_of(dealer)
        sent += link.lends
        dealer.send([b"head", bytes([byte]) * LARGE, b"lent" if link.lends else b"sent"])
        poller.wait(0.01)
        assert dealer.receive() is None  # hears what has come free
    dealer.send([b"head", b"all", b"sent"])
    until(dealer.receive, dealer)
    dealer.close()


@pytest.fixture
def start() -> Iterator[Callable[..., BaseProcess]]:
    context = multiprocessing.get_context("spawn")
    started: list[BaseProcess] = []

    def start(*args: Any) -> BaseProcess:
        started.append(context.Process(target=send_large, args=args, daemon=True))
        started[-1].start()
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.join()


def test_large_frames_of_another_process_are_lent_and_given_back(
    router: Router, endpoint: str, start: Callable[..., BaseProcess]
) -> None:
    process = start(endpoint, 4 * NUM_SLOTS, 7)
    lent = 0
    while True:
        peer, head, body, how = until(router.receive, router)
        assert bytes(head) == b"head"
        if bytes(body) == b"all":
            break
        assert bytes(memoryview(body)) == b"\7" * LARGE
        lent += isinstance(body, memoryview) and bytes(how) == b"lent"
        del body
    assert lent > 2 * FEW_SLOTS  # one that finds no slot free is sent
    assert len(links_of(router)._known) == 1
    router.send(peer.bytes, [b"done"])
    process.join(PATIENCE_S)
    assert process.exitcode == 0


def test_a_router_that_was_started_again_goes_on_with_what_is_lent(
    endpoint: str, start: Callable[..., BaseProcess]
) -> None:
    start(endpoint, 10**6, 3)
    for _ in range(2):
        router = Router(endpoint, 1 << 24)
        held: list[Any] = []
        while len(held) < 2:  # not given back: what was held when it was killed comes back all the same
            _, _, body, _ = until(router.receive, router)
            held += [body] if isinstance(body, memoryview) else []
        assert all(bytes(each) == b"\3" * LARGE for each in held)
        router.close()


def test_a_router_lends_to_dealers_of_its_host(router: Router, endpoint: str) -> None:
    dealer = Dealer(endpoint, 1 << 24)
    dealer.send([b"hello"])
    peer = until(router.receive, router, dealer)[0].bytes
    end = time.monotonic() + PATIENCE_S
    answers: list[Any] = []
    while not any(isinstance(body, memoryview) for body in answers):
        assert time.monotonic() < end
        room = router.room(peer, LARGE)
        router.send(peer, [b"\5" * LARGE if room is None else room])
        if room is not None:
            room[:] = 5  # it is the same memory
        answers += until(dealer.receive, dealer)
        router.receive()
    assert all(bytes(memoryview(body)) == b"\5" * LARGE for body in answers)
    dealer.close()


def test_a_peer_that_is_no_streampack_gets_plain_frames(router: Router, endpoint: str) -> None:
    plain: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    plain.linger = 0
    plain.connect(endpoint)
    plain.send_multipart([b"hello", bytes(LARGE)])
    peer = until(router.receive, router)[0].bytes
    for _ in range(3):
        assert router.room(peer, LARGE) is None
        assert router.send(peer, [b"\1" * LARGE])
        assert plain.poll(int(1000 * PATIENCE_S))
        assert plain.recv_multipart() == [b"\1" * LARGE]
    plain.close()


def test_memory_shared_with_peers_that_are_gone_is_given_up(router: Router, endpoint: str) -> None:
    left = []
    for _ in range(5):
        dealer = Dealer(endpoint, 1 << 24)
        peer = lend_both_ways(router, dealer)
        dealer.close()
        until(functools.partial(is_gone, router, peer))
        ours = links_of(router)
        left.append((len(ours._by_peer), len(ours._known), num_memory_files()))
    assert left[1:] == left[:1] * 4


def test_the_first_of_many_peers_are_lent_memory_and_the_others_are_sent_all(
    router: Router, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "MOST_LINKS", 1)
    first, second = Dealer(endpoint, 1 << 24), Dealer(endpoint, 1 << 24)
    lend_both_ways(router, first)
    for _ in range(3):
        second.send([b"\3" * LARGE])
        peer, body = until(router.receive, router, second)
        router.send(peer.bytes, [b"\4" * LARGE])
        assert bytes(memoryview(body)) == b"\3" * LARGE
        assert bytes(memoryview(until(second.receive, second)[0])) == b"\4" * LARGE
    assert link_of(second).refused
    first.send([bytes(LARGE)])
    assert isinstance(until(router.receive, router, first)[1], memoryview)
    first.close()
    second.close()


def test_nothing_is_lent_over_tcp() -> None:
    router = Router("tcp://127.0.0.1:*", 1 << 24)
    dealer = Dealer(router.endpoint, 1 << 24)
    for _ in range(3):
        dealer.send([bytes(LARGE)])
        _, body = until(router.receive, router, dealer)
        assert not isinstance(body, memoryview)
    dealer.close()
    router.close()


def test_a_payload_that_cannot_be_mapped_is_sent(
    router: Router, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mapping, "__init__", _refuse)  # as /proc of another container does
    dealer = Dealer(endpoint, 1 << 24)
    for _ in range(3):
        dealer.send([b"\2" * SLOT_BYTES])
        _, body = until(router.receive, router, dealer)
        assert bytes(memoryview(body)) == b"\2" * SLOT_BYTES
        until(lambda: dealer.receive() or link_of(dealer).refused, dealer)
    assert not links_of(router)._known
    dealer.close()


def _refuse(*_: Any) -> None:
    raise FileNotFoundError
