"""A broker under attack by whoever reaches its addresses: it goes on, its memory stays, and others notice nothing.

Mostly without keys, over loopback. What an attack can still do without them is in SECURITY.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from msgspec.structs import replace
from streampack_services.http import http_limits
from streampack_services.http.control import MAX_BODY_BYTES
from streampack_services.http.http_client import read_status
from streampack_services.http.server import HttpServer

import streampack as sp
from streampack.config.typed_yaml import convert
from streampack.core.model.mesh import Mesh
from streampack.core.protocol.message import Envelope, Message, Who
from streampack.core.protocol.producer_messages import Hello, Offer, ProducerPing, Samples
from streampack.core.protocol.trainer_messages import Attach
from streampack.errors import WireError
from streampack.sources import SourceSettings, open_source
from streampack.transport import curve, shared_memory, sockets, unread
from streampack.transport.keys import Key
from streampack.transport.slots import SLOT_BYTES, Mapping, Slots
from streampack.transport.sockets import Dealer, Poller, Router
from streampack.wire import frames as wire
from tests.integration.running import (
    PATIENCE_S,
    RunningBroker,
    executed,
    folder,
    producing_here,
    running_broker,
    until,
    write_jsonl,
)
from tests.integration.transport.raw_peer import COMMAND, GREETING, MORE, READY, RawPeer, frame

MOVES = 20 << 20
"""Bytes by which a broker's memory may move in an attack."""
SETTINGS: dict[str, Any] = {
    "run": "attacked",
    "rules": {"budget": 256, "window": {"samples": 16}, "step": {"packs": 2}},
    "streams": {"text": {"partitions": 2}, "more": {}},  # of two feeds: with several the producers stay
    "feeds": {"train": {"streams": ["text"]}, "valid": {"streams": ["more"]}},
    "limits": {"sample_tokens": 4096, "chunk": "16KiB", "peers": 40},
}

HELLO = Hello(producer="p", host="h" * 255, pid=1, offers=[Offer(stream="more", source_digest="d")])
ATTACH = Attach(feed="valid", knows_stages=True, reader="r", host="h" * 255, pid=1, mesh=Mesh(dp=2), next_step=0)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    """A broker and a producer of 200 samples, which ``steps`` reads again and again."""
    rows = [{"text": "t" * (1 + i * 7 % 90)} for i in range(200)]
    files = write_jsonl(tmp_path_factory.mktemp("data") / "text.jsonl", rows)
    source = open_source(convert({"source": "jsonl", "shards": str(files)}, SourceSettings))
    with executed(), running_broker(SETTINGS) as running, producing_here(running.producers, {"text": source}):
        running.chain = steps(running)
        yield running


def steps(broker: RunningBroker) -> str:
    """The digest of all steps of the feed, as an honest rank gets them."""
    with sp.connect(broker.trainers, format="numpy") as loader:
        return [step.chain for step in loader.steps()][-1]


def memory(broker: RunningBroker) -> int:
    return int(Path(f"/proc/{broker.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files(broker: RunningBroker) -> int:
    return len(os.listdir(f"/proc/{broker.process.pid}/fd"))


@contextlib.contextmanager
def unmoved(broker: RunningBroker, moves: int = MOVES) -> Iterator[None]:
    """In the block an attack: a rank gets the same steps meanwhile and afterwards, and the broker grows by less than
    ``moves`` bytes.
    """
    before = memory(broker)
    yield
    assert steps(broker) == broker.chain
    assert broker.process.poll() is None
    assert broker.get("/livez") == "alive\n"
    assert memory(broker) - before < moves


@contextlib.contextmanager
def all_taken(broker: RunningBroker) -> Iterator[None]:
    """After the block the broker has taken all that was sent in it: it counts no more damaged messages."""
    yield
    counted = [-1]

    def counts_no_more() -> bool:
        time.sleep(1.2)  # the status is made twice a second
        counted.append(broker.status()["messages"]["damaged"])
        return counted[-1] == counted[-2]

    until(counts_no_more)


@contextlib.contextmanager
def meanwhile(work: Callable[[], object]) -> Iterator[None]:
    """``work`` again and again in a thread, as long as the block takes, and once at least."""
    over, failed = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            while True:
                work()
                if over.is_set():
                    return
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(PATIENCE_S)
    assert not failed, failed


# What is no ZeroMQ


def test_connections_that_say_nothing_or_garbage_keep_nobody_out(broker: RunningBroker) -> None:
    rng = random.Random(0)
    with unmoved(broker), contextlib.ExitStack() as held, meanwhile(lambda: steps(broker)):
        for number in range(500):
            for address in (broker.producers, broker.trainers):
                peer = held.enter_context(RawPeer(address, shake=False))
                if number % 2:
                    peer.send(rng.choice((rng.randbytes(200), GREETING[:30], b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64)))


def test_handshakes_that_break_off_or_lie_end_the_connection(broker: RunningBroker) -> None:
    lies = (
        GREETING.replace(b"NULL", b"PLAI"),
        GREETING + frame(b"\x05READY" + b"\xff" * 100, COMMAND),
        GREETING + frame(b"\x05ERROR\x03bad", COMMAND),
        GREETING + b"\x06" + b"\xff" * 8,  # a command of 2**64 - 1 bytes
        GREETING + READY + b"\x02" + b"\xff" * 8,  # a frame of as many
        GREETING + READY + b"\x02" + (1 << 40).to_bytes(8, "big"),
        GREETING + READY + b"\x02\x80" + bytes(7),  # of a negative number
    )
    with unmoved(broker):
        for lie in lies:
            with RawPeer(broker.producers, shake=False) as peer:
                peer.send(lie)
                assert peer.is_closed(), lie


def test_nobody_can_foretell_the_ids_that_peers_are_given() -> None:
    """ZeroMQ ends a process that gives one to a peer which another has chosen for its own."""
    given = set()
    for _ in range(2):
        ctypes.CDLL(None).srand(1)  # as every process begins
        router = Router("tcp://127.0.0.1:*", 1 << 20)
        try:
            with RawPeer(router.endpoint) as peer:
                assert peer.send(frame(b"hello"))
                assert router.raw.poll(int(1000 * PATIENCE_S))
                given.add(router.raw.recv_multipart()[0])
        finally:
            router.close()
    assert len(given) == 2


def test_frames_without_end_end_their_connection(broker: RunningBroker) -> None:
    endless = frame(b"x", MORE) * 50_000
    for address in (broker.producers, broker.trainers):
        with unmoved(broker, 3 * MOVES), RawPeer(address) as peer, meanwhile(lambda: steps(broker)):
            sent = 0
            while peer.send(endless):
                sent += 1
                assert sent < 10_000


def test_a_connection_that_breaks_off_with_messages_unread_harms_nobody(broker: RunningBroker) -> None:
    """A reset after messages and heartbeats that were not read yet: it ended brokers with a high-water mark."""
    ping = frame(b"\x04PING\0\0", COMMAND)
    with unmoved(broker, 3 * MOVES), all_taken(broker), meanwhile(lambda: steps(broker)):
        attacks = 0
        while attacks < 20:
            with contextlib.suppress(ConnectionError):  # nobody new is let in while much is unread
                peer = RawPeer((broker.producers, broker.trainers)[attacks % 2])
                attacks += 1
                peer.send(frame(b"") * 3500 + ping * 20 + frame(b"") * 400)
                _reset(peer)


def test_a_hundred_connections_that_break_off_at_once_harm_nobody(broker: RunningBroker) -> None:
    with unmoved(broker, 3 * MOVES), all_taken(broker), meanwhile(lambda: steps(broker)):
        for address in (broker.producers, broker.trainers):
            with contextlib.suppress(ConnectionError), contextlib.ExitStack() as held:
                for _ in range(100):
                    peer = RawPeer(address)
                    held.callback(_reset, peer)
                    peer.send(frame(b"x") * 4000)


def test_a_peer_whose_messages_cannot_be_decoded_is_cut(broker: RunningBroker) -> None:
    with unmoved(broker), all_taken(broker), RawPeer(broker.producers) as peer:
        assert peer.send(frame(b"garbage") * unread.MAX_DAMAGED)
        assert peer.is_closed()
    until(lambda: "messages could not be decoded" in broker.said)


def _reset(peer: RawPeer) -> None:
    """Close a connection with a reset."""
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


def test_a_message_of_many_frames_is_one_that_is_dropped_and_counted(broker: RunningBroker) -> None:
    before = broker.status()["messages"]["damaged"]
    with unmoved(broker), RawPeer(broker.producers) as peer:
        for _ in range(3):
            assert peer.send(frame(b"", MORE) * 20_000 + frame(b"last"))
        until(lambda: broker.status()["messages"]["damaged"] == before + 3)


def test_some_frames_of_an_oversized_message_are_read_and_the_next_message_is_whole() -> None:
    router = Router("tcp://127.0.0.1:*", 1 << 20)
    dealer = Dealer(router.endpoint, 1 << 20)
    try:
        poller, got = Poller([router]), list[list[bytes]]()
        for count in (3, sockets.MOST_FRAMES - 1, sockets.MOST_FRAMES, 10 * sockets.AT_ONCE, 2):
            until(lambda count=count: dealer.send([b"%d" % n for n in range(count)]))  # type: ignore[misc]
        turns = 0
        while len(got) < 5:
            poller.wait(1.0)
            turns += 1
            while (frames := router.receive()) is not None:
                got.append([bytes(each) for each in frames[1:]])
        assert [len(each) for each in got] == [3, sockets.MOST_FRAMES - 1, *[sockets.MOST_FRAMES] * 2, 2]
        assert got[-1] == [b"0", b"1"]
        assert turns > 5, "others have their turn while it is dropped"
    finally:
        dealer.close()
        router.close()


# What is no message, or none of this sender


def test_a_peer_that_says_nothing_but_that_it_shares_memory_is_heard_in_turn() -> None:
    with folder() as path:
        router = Router(f"ipc://{path}/s", 1 << 20)
        plain: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        try:
            plain.linger = 0
            plain.connect(router.endpoint)
            for _ in range(3 * sockets.AT_ONCE):
                plain.send(shared_memory.SPEAKS)
            plain.send(b"said")
            assert router.raw.poll(int(1000 * PATIENCE_S))
            turns = 0
            while (found := router.receive()) is None:
                turns += 1
                assert turns < 1000
                router.raw.poll(100)
            assert bytes(found[1]) == b"said"
            assert turns >= 3
        finally:
            plain.close()
            router.close()


def test_thousands_of_names_of_producers_and_readers_are_not_remembered(broker: RunningBroker) -> None:
    def flood(address: str, messages: list[Message]) -> None:
        dealers = [Dealer(address, 1 << 20) for _ in range(60)]
        for dealer, message in zip(itertools.cycle(dealers), messages, strict=False):
            dealer.send(wire.encode(Envelope(run=0, epoch=0, fence=0, message=message)))
        for dealer in dealers:
            dealer.close()

    refused, after, files = broker.status()["messages"]["refused"], list[int](), open_files(broker)
    for turn in range(5):
        name = f"{turn} " * 20
        flood(broker.producers, [replace(HELLO, producer=f"{name}{n}") for n in range(1500)])
        flood(broker.trainers, [replace(ATTACH, reader=f"{name}{n}") for n in range(1500)])
        refused += 100
        until(lambda least=refused: broker.status()["messages"]["refused"] > least)  # type: ignore[misc]
        assert broker.status()["producers"] <= 40
        assert len(broker.feed("valid")["readers"]) <= 40
        until(lambda: open_files(broker) <= files + 10)  # else it holds the connections of all turns
        after.append(memory(broker))
    assert after[-1] - after[1] < MOVES, "beyond what the first connections took"
    assert steps(broker) == broker.chain


def test_a_session_that_is_said_again_by_others_changes_no_step(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every message of an honest rank and a producer, at once from another peer, and later in both orders."""
    said: list[tuple[str, list[bytes]]] = []
    send, lock = Dealer.send, threading.Lock()

    def heard(dealer: Dealer, frames: list[Any]) -> bool:
        with lock:
            said.append((dealer.endpoint, [bytes(memoryview(each)) for each in frames]))
            others[dealer.endpoint].send_multipart(said[-1][1])
        return send(dealer, frames)

    with unmoved(broker), contextlib.ExitStack() as held:
        addresses = (broker.producers, broker.trainers)
        others = {address: held.enter_context(contextlib.closing(_plain(address))) for address in addresses}
        monkeypatch.setattr(Dealer, "send", heard)
        assert steps(broker) == broker.chain
        monkeypatch.undo()
        with lock:
            assert {address for address, _ in said} == set(addresses)
            for address, frames in [*said, *said[::-1]]:
                others[address].send_multipart(frames)
        for address, last in ((broker.producers, ATTACH), (broker.trainers, HELLO)):  # at the wrong one: answered
            others[address].send_multipart(wire.encode(Envelope(run=0, epoch=0, fence=0, message=last)))
            while getattr(_said(others[address]), "code", "") != "wrong_address":
                continue


def _said(plain: zmq.Socket[bytes]) -> Message:
    assert plain.poll(int(1000 * PATIENCE_S))
    return wire.decode(plain.recv_multipart()).message


def _plain(address: str) -> zmq.Socket[bytes]:
    plain: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    plain.linger = 0
    plain.connect(address)
    return plain


def test_damaged_messages_are_counted_and_harm_nobody(broker: RunningBroker) -> None:
    """Each bit of a header, and of what follows some, in messages that were whole."""
    hello = Hello(producer="p", host="h", pid=1, offers=[Offer(stream="text", source_digest="d")])
    chunk = Samples(
        stream="text", partition=0, base_seq=0, lengths_u32=bytes(4), crcs_u32=bytes(4), loss_tokens_u32=bytes(4),
        cursor=(0, 0, 0),
    )  # fmt: skip
    before, damaged = broker.status()["messages"]["damaged"], list[list[bytes]]()
    for message in (hello, chunk, ProducerPing(producer="p"), Who()):
        frames = [bytes(each) for each in wire.encode(Envelope(run=1, epoch=1, fence=1, message=message))]
        for number, each in enumerate(frames):
            for bit in range(0, 8 * len(each), 5):
                changed = bytearray(each)
                changed[bit // 8] ^= 1 << bit % 8
                damaged.append([*frames[:number], bytes(changed), *frames[number + 1 :]])
    with unmoved(broker), contextlib.ExitStack() as held:
        at_once = unread.MAX_DAMAGED - 1  # of more the connection is cut
        for start in range(0, len(damaged), at_once):
            plain = held.enter_context(contextlib.closing(_plain(broker.producers)))
            for message_frames in damaged[start : start + at_once]:
                plain.send_multipart(message_frames)
        until(lambda: broker.status()["messages"]["damaged"] == before + len(damaged))
        metrics = broker.get("/metrics")
    assert f'streampack_bad_messages_total{{reason="damaged"}} {before + len(damaged)}.0' in metrics


# HTTP


@pytest.fixture
def server(broker: RunningBroker) -> Iterator[HttpServer]:
    status = read_status(broker.http, PATIENCE_S)
    server = HttpServer("127.0.0.1:0", lambda: status)
    server.start()
    yield server
    server.close()


def _connect(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def _post(length: int) -> bytes:
    """The head of a request that changes weights."""
    lines = ("POST /control/weights HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", "Connection: close")
    return "\r\n".join([*lines, f"Content-Length: {length}", "\r\n"]).encode()


def _answer(connection: socket.socket) -> bytes:
    """All that comes until it is closed."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            found += piece
    return found


def test_connections_to_http_that_say_nothing_keep_nobody_out(broker: RunningBroker) -> None:
    with unmoved(broker), contextlib.ExitStack() as held:
        first = held.enter_context(_connect(broker.http))
        for _ in range(2 * http_limits.MOST_CONNECTIONS):
            held.enter_context(_connect(broker.http)).sendall(b"GET /status HTTP/1.1\r\nHost: ")
        assert broker.get("/livez") == "alive\n"
        assert _answer(first) == b"", "it gave way"


@pytest.mark.parametrize(
    "said",
    [b"", b"GET / HTTP/1.1\r\n", b"POST /livez HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\nabc"],
    ids=["nothing", "half a request", "half a body"],
)
def test_a_request_that_does_not_end_is_not_waited_for(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(http_limits, "WHOLE_S", 0.3)
    with _connect(server.url) as connection:
        connection.sendall(said)
        _answer(connection)


def test_a_request_that_is_too_large_is_refused(broker: RunningBroker) -> None:
    with _connect(broker.http) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: " + b"x" * (1 << 20))
        assert not _answer(connection).startswith(b"HTTP/1.1 200")
    body = b'{"weights": {"' + b"x" * MAX_BODY_BYTES
    with _connect(broker.http) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(_post(1 << 40) + body)
        assert _answer(connection).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "body", [b"[" * 60_000, b'{"weights": ' + b'{"a": ' * 9000, b'{"weights": {"a": 1e999}}', b"\xff" * 9]
)
def test_a_body_that_is_no_request_is_refused(broker: RunningBroker, body: bytes) -> None:
    with _connect(broker.http) as connection:
        connection.sendall(_post(len(body)) + body)
        assert _answer(connection).startswith(b"HTTP/1.1 400")


# Shared memory


def test_memory_that_is_cut_short_once_it_is_mapped_cannot_be_and_what_it_holds_is_checked_as_it_is_read() -> None:
    """Reading what a peer has cut off would end the process (SIGBUS)."""
    slots = Slots(2)
    try:
        mapping = Mapping(slots.name)
        with pytest.raises(PermissionError):
            os.ftruncate(slots.name.fd, 4096)
        frames = [bytes(each) for each in wire.encode(Envelope(run=1, epoch=1, fence=1, message=Who()))]
        meta = slots.memory(0, len(frames[1]))
        meta[:] = np.frombuffer(frames[1], np.uint8)
        assert wire.decode([frames[0], mapping.view(0, len(meta))]).message == Who()
        meta[:] = 0x81
        with pytest.raises(WireError, match="crc32c differs"):
            wire.decode([frames[0], Mapping(slots.name).view(0, len(meta))])
    finally:
        slots.close()


def test_memory_of_more_than_slots_hold_is_not_mapped() -> None:
    slots = Slots(1, 2 * SLOT_BYTES)
    try:
        with pytest.raises(ValueError, match="slots of"):
            Mapping(slots.name)
    finally:
        slots.close()


# With keys


def test_with_keys_frames_without_end_take_no_memory_and_those_who_have_one_are_heard() -> None:
    """From peers that shake hands without a key, with a key's words and no key, and with a key that nobody let in."""
    broker, friend, stranger = (curve.new_secret() for _ in range(3))
    router = Router(
        "tcp://127.0.0.1:*", 1 << 20, door=curve.Door(broker, lambda key, _: key == curve.public_of(friend))
    )
    keys = [Key(name=name, secret=secret, broker=curve.public_of(broker)) for name, secret in
            (("friend", friend), ("stranger", stranger))]  # fmt: skip
    known, unknown = (Dealer(router.endpoint, 1 << 20, key=key) for key in keys)
    curved = GREETING.replace(b"NULL\0", b"CURVE")
    over = threading.Event()
    endless = threading.Thread(target=_endless, args=(router.endpoint, [GREETING + READY, curved], over))
    try:
        poller, heard = Poller([router, known]), list[list[bytes]]()
        before = _resident()
        endless.start()
        while len(heard) < 200 or endless.is_alive():
            known.send([b"%d" % len(heard), b"good"])
            unknown.send([b"bad"])
            poller.wait(0.01)
            while (frames := router.receive()) is not None:
                heard.append([bytes(each) for each in frames[1:]])
        assert {frames[-1] for frames in heard} == {b"good"}
        assert _resident() - before < MOVES
    finally:
        over.set()
        endless.join(PATIENCE_S)
        for each in (known, unknown, router):
            each.close()


def _endless(endpoint: str, greetings: list[bytes], over: threading.Event) -> None:
    """64 MB of frames, or what is taken of them, over 40 connections."""
    frames = frame(b"x" * 50, MORE) * 30_000
    for number in range(40):
        if over.is_set():
            return
        with RawPeer(endpoint, shake=False) as peer:
            peer.send(greetings[number % len(greetings)])
            peer.send(frames)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
