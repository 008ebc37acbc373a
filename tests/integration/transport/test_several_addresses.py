"""Who has two addresses is served by the broker that answers, and goes on at the same step when that one is gone."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import streampack
from streampack.core.sessions import patience, producer_base
from streampack.errors import Rejected, Unreachable, UserError
from streampack.transport import curve
from streampack.transport.curve import Door
from streampack.transport.keys import Key
from streampack.transport.relay_socket import default_relay
from streampack.transport.sockets import MOST_FRAMES, Dealer, Poller, Router, drain
from tests.integration.relay.relayed import SETTINGS, Ranks, Read, directly, source_in
from tests.integration.running import (
    PATIENCE_S,
    RunningBroker,
    Stopwatch,
    folder,
    in_process,
    producing_here,
    running,
    until,
    write,
)
from tests.integration.small_broker import STREAM, SmallBroker
from tests.soak.job import fixed_listen

SIZES = {"dp": 2, "cp": 2}
SOON_S = 7.0
"""The most seconds from the end of a broker to the next step of another one that waits."""


# Sockets


class Answering:
    """A router in a thread, which answers each message with its own name and the message."""

    def __init__(self, name: bytes, endpoint: str = "tcp://127.0.0.1:*", door: Door | None = None) -> None:
        self.name = name
        self.router = Router(endpoint, 1 << 24, door)
        self.endpoint = self.router.endpoint
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        poller = Poller([self.router])
        try:
            while not self.over.is_set():
                poller.wait(0.01)
                for peer, *frames in drain(self.router, 64):
                    self.router.send(peer.bytes, [self.name, *map(bytes, frames)])
        finally:
            self.router.close()

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


def free_address() -> str:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as found:
        return f"tcp://127.0.0.1:{found.getsockname()[1]}"


@contextmanager
def dealing(endpoint: str, key: Key | None = None) -> Iterator[tuple[Dealer, Callable[[bytes], list[bytes]]]]:
    """A dealer, and a function that sends it a message again and again, until there is an answer."""
    dealer = Dealer(endpoint, 1 << 24, key=key)
    poller = Poller([dealer])

    def asked(message: bytes) -> list[bytes]:
        deadline, sent_at = time.monotonic() + PATIENCE_S, -1.0
        while time.monotonic() < deadline:
            if time.monotonic() - sent_at > 0.2:
                sent_at = time.monotonic()
                dealer.send([message])
            poller.wait(0.05)
            dealer.check()
            for frames in drain(dealer, 64):
                if bytes(frames[1]) == message:
                    return list(map(bytes, frames))
        raise AssertionError("no answer")

    with contextlib.closing(dealer):
        yield dealer, asked


def test_the_first_address_that_answers_is_used_and_another_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "streampack.transport")
    nobody = free_address()
    with Answering(b"second") as second, dealing(f"{nobody},{second.endpoint}") as (dealer, asked):
        watch = Stopwatch()
        assert asked(b"one") == [b"second", b"one"]
        assert watch.seconds() < 3.0
        assert dealer.endpoint == second.endpoint
        for number in range(20):
            assert asked(b"%d" % number) == [b"second", b"%d" % number]
    assert caplog.messages == [f"connected to {second.endpoint}, as {nobody} does not answer"]


def test_a_dealer_moves_whenever_its_router_is_gone_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "streampack.transport")
    a, b = free_address(), free_address()
    with dealing(f"{a},{b}") as (dealer, asked):
        for turn, (name, endpoint) in enumerate([(b"a", a), (b"b", b), (b"a", a), (b"a", a)]):
            with Answering(name, endpoint):
                assert asked(b"turn %d" % turn) == [name, b"turn %d" % turn]
        assert dealer.seeks == "" or dealer.seeks == f"; no connection to {a} or {b}"
    assert caplog.messages == [f"connected to {b}, as {a} does not answer", f"connected to {a}, as {b} does not answer"]


def test_a_router_that_has_nothing_to_say_is_not_left() -> None:
    with ExitStack() as here:
        quiet = here.enter_context(contextlib.closing(Router("tcp://127.0.0.1:*", 1 << 20)))
        other = here.enter_context(Answering(b"other"))
        with dealing(f"{quiet.endpoint},{other.endpoint}") as (dealer, _):
            poller, until_s = Poller([dealer]), time.monotonic() + 8.0
            while time.monotonic() < until_s:
                dealer.send([b"anybody?"])  # nobody reads it, and nobody answers
                poller.wait(0.1)
                assert not dealer.check()
                assert dealer.receive() is None
            assert dealer.endpoint == quiet.endpoint


def test_with_one_address_a_dealer_keeps_its_socket() -> None:
    endpoint = free_address()
    with dealing(endpoint) as (dealer, asked):
        raw = dealer.raw
        with Answering(b"one", endpoint):
            asked(b"1")
        until_s = time.monotonic() + 3.0
        while time.monotonic() < until_s:
            assert not dealer.check()
            dealer.leave()
            time.sleep(0.05)
        with Answering(b"two", endpoint):
            assert asked(b"2") == [b"two", b"2"]
        assert dealer.raw is raw
        assert dealer.seeks == ""


def test_a_process_that_takes_connections_and_admits_nobody_is_left() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as frozen, Answering(b"alive") as alive:
        where = f"tcp://127.0.0.1:{frozen.getsockname()[1]}"
        with dealing(f"{where},{alive.endpoint}") as (dealer, asked):
            began, watch = time.monotonic(), Stopwatch()
            assert asked(b"one") == [b"alive", b"one"]
            assert time.monotonic() - began > 4.0
            assert watch.seconds() < 10.0
            assert dealer.endpoint == alive.endpoint


def test_the_caller_may_leave_an_address_and_hears_nothing_of_it_after() -> None:
    with ExitStack() as here:
        old, new = here.enter_context(Answering(b"old")), here.enter_context(Answering(b"new"))
        with dealing(f"{old.endpoint},{new.endpoint}") as (dealer, asked):
            assert asked(b"one") == [b"old", b"one"]
            for _ in range(100):
                assert dealer.send([b"two"])
            time.sleep(0.3)  # the answers have come, and are not read
            dealer.leave()
            dealer.check()
            poller, heard = Poller([dealer]), []
            deadline = time.monotonic() + PATIENCE_S
            while b"new" not in heard and time.monotonic() < deadline:
                dealer.send([b"two"])
                poller.wait(0.05)
                heard += [bytes(frames[0]) for frames in drain(dealer, 64)]
            assert set(heard) == {b"new"}


def test_a_message_of_too_many_frames_that_is_half_read_does_no_harm_to_a_move() -> None:
    with ExitStack() as here:
        old, new = here.enter_context(Answering(b"old")), here.enter_context(Answering(b"new"))
        with dealing(f"{old.endpoint},{new.endpoint}") as (dealer, asked):
            asked(b"one")
            dealer.send([b"many"] * 70)
            Poller([dealer]).wait(PATIENCE_S)
            frames = dealer.receive()
            assert frames is not None
            assert len(frames) > MOST_FRAMES
            dealer.leave()
            dealer.check()
            assert asked(b"two") == [b"new", b"two"]


@pytest.mark.parametrize("first", ["ipc", "tcp"])
def test_shared_memory_belongs_to_one_address(first: str) -> None:
    large = bytes(range(256)) * 4096
    with folder() as path:
        addresses = [f"ipc://{path}/broker", free_address()]
        addresses = addresses if first == "ipc" else addresses[::-1]
        with dealing(",".join(addresses)) as (dealer, asked):
            held = []
            for turn in range(4):
                name = b"turn %d" % turn
                with Answering(name, addresses[turn % 2]):
                    for number in range(30):
                        message = b"%d %d" % (turn, number) + large
                        assert asked(message) == [name, message]
                assert dealer.endpoint == addresses[turn % 2]
                held.append(message)


def test_keys_are_shown_to_every_address_and_a_refusal_names_its_own() -> None:
    broker, friend, stranger = curve.new_secret(), curve.new_secret(), curve.new_secret()
    public = curve.public_of(broker)
    key = Key(name="friend", secret=friend, broker=public)
    door = Door(broker, lambda shown, _: shown == key.public)
    a, b = free_address(), free_address()
    with dealing(f"{a},{b}", key) as (_, asked):
        with Answering(b"a", a, door):
            assert asked(b"1") == [b"a", b"1"]
        with Answering(b"b", b, door):
            assert asked(b"2") == [b"b", b"2"]
    for secret, theirs, says in (
        (stranger, public, "got a broker that rejects key 'friend'"),
        (friend, curve.public_of(stranger), "got a broker whose key is not the broker key in the file of key 'friend'"),
    ):
        wrong = Key(name="friend", secret=secret, broker=theirs)
        refused = pytest.raises(Rejected, match=f"{b}: {says}")
        with Answering(b"b", b, door), dealing(f"{a},{b}", wrong) as (_, asked), refused:
            asked(b"3")


class LateProxy:
    """A TCP proxy that closes each connection until ``open``, and passes all bytes from then on.

    It opens right after it has closed a connection of ZeroMQ, as if the broker came back at that moment.
    """

    def __init__(self, target: str, opens_after_s: float) -> None:
        self._target = ("127.0.0.1", int(target.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._opens_at, self._is_open = time.monotonic() + opens_after_s, False
        self.closed = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                first = connection.recv(10)
                if self._is_open:
                    self._pass(connection, first)
                    continue
                is_zeromq = first[8:9] == b"\1"
                connection.close()
                self.closed += is_zeromq
                self._is_open = is_zeromq and time.monotonic() > self._opens_at

    def _pass(self, near: socket.socket, first: bytes) -> None:
        far = socket.create_connection(self._target)
        far.sendall(first)
        for one, other in ((near, far), (far, near)):
            threading.Thread(target=self._copy, args=(one, other), daemon=True).start()

    def _copy(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
        other.close()

    def close(self) -> None:
        self._listener.close()


def test_a_broker_that_comes_back_behind_a_proxy_has_the_right_key() -> None:
    """The proxy ends handshakes while no broker is there. That says nothing about the broker's key."""
    broker, friend = curve.new_secret(), curve.new_secret()
    door = Door(broker, lambda shown, _: shown == curve.public_of(friend))
    key = Key(name="friend", secret=friend, broker=curve.public_of(broker))
    with (
        Answering(b"a", door=door) as answering,
        contextlib.closing(LateProxy(answering.endpoint, curve.UNCLEAR_S + 1.0)) as proxy,
        dealing(proxy.endpoint, key) as (_, asked),
    ):
        assert asked(b"1") == [b"a", b"1"]
        assert proxy.closed > 5


def test_an_address_that_zeromq_does_not_take_is_refused_at_once() -> None:
    with pytest.raises(UserError, match=r"cannot connect to 'tcp://ho\$t:7402': got Invalid argument"):
        Dealer("tcp://127.0.0.1:7402,tcp://ho$t:7402", 1 << 20)


# A pushing producer


def test_a_pushing_producer_moves_to_the_newest_broker_and_not_back() -> None:
    """The older broker answers again, as one does that was frozen; the producer must not stay there."""
    old, second = SmallBroker(epoch=5), free_address()
    new: SmallBroker | None = None
    try:
        with streampack.Producer(f"{old.endpoint},{second}", stream=STREAM, partition=1) as producer:
            producer.send([1, 2, 3])
            producer.flush()
            assert len(old.taken) == 1
            old.stop()
            new = SmallBroker(second, epoch=6, first_seq=1)
            producer.send([4, 5])
            producer.flush()
            assert [taken.lengths for taken in new.taken] == [[2]]
            new.stop()
            old = SmallBroker(old.endpoint, epoch=5, first_seq=2)
            until(lambda: bool(old.heard))
            new = SmallBroker(second, epoch=7, first_seq=2)
            producer.send([6])
            producer.flush()
            assert [taken.lengths for taken in new.taken] == [[1]]
            assert not old.taken
    finally:
        old.stop()
        if new is not None:
            new.stop()


def test_a_pushing_producer_leaves_a_broker_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats of its connection have answers: ZeroMQ's own thread works."""
    monkeypatch.setattr(producer_base, "VAIN_S", 2.0)
    first, second = SmallBroker(epoch=5), SmallBroker(epoch=6)
    try:
        with streampack.Producer(f"{first.endpoint},{second.endpoint}", stream=STREAM, partition=1) as producer:
            producer.send([1, 2, 3])
            producer.flush()
            until_s = time.monotonic() + 8.0
            while time.monotonic() < until_s:  # it is not left while it answers
                time.sleep(0.1)
                assert not second.heard
            first.silent = True
            second.expected = 1
            producer.send([4, 5])
            producer.flush()
            assert [taken.lengths for taken in second.taken] == [[2]]
    finally:
        first.stop()
        second.stop()


# Real processes


@pytest.fixture(scope="module")
def golden() -> list[Read]:
    with pytest.MonkeyPatch.context() as patch:
        return directly(patch, SIZES)


@dataclass
class Pair:
    """Two folders for brokers of one run, and what others are given to find either of them."""

    folders: list[Path]
    listens: list[dict[str, str]]
    brokers: list[RunningBroker] = field(default_factory=list)

    def both(self, side: str) -> str:
        return ",".join(listen[side] for listen in self.listens)

    def start(self, number: int) -> RunningBroker:
        broker = RunningBroker(self.folders[number], SETTINGS | {"listen": self.listens[number]})
        self.brokers.append(broker)
        return broker


@contextmanager
def pair() -> Iterator[Pair]:
    """Two places for brokers, of which one runs."""
    with folder() as one, folder() as two:
        found = Pair([one, two], [fixed_listen(one), fixed_listen(two)])
        try:
            found.start(0)
            yield found
        finally:
            for broker in found.brokers:
                broker.kill()


def test_a_client_does_not_leave_a_broker_that_waits_or_has_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "VAIN_S", 2.0)
    monkeypatch.setenv("STREAMPACK_RELAY", "off")
    with pair() as it, folder() as path, ExitStack() as here:
        other = here.enter_context(contextlib.closing(Router("tcp://127.0.0.1:*", 1 << 20)))
        with Ranks(f"{it.listens[0]['trainers']},{other.endpoint}", {"dp": 1}, most=3) as ranks:
            until_s = time.monotonic() + 10.0
            while time.monotonic() < until_s:  # it waits for a producer, and the broker says so
                time.sleep(0.1)
                assert other.receive() is None
            here.enter_context(producing_here(it.both("producers"), source_in(path)))
            ranks.allow(3)
            until_s = time.monotonic() + 10.0
            while time.monotonic() < until_s:  # it has every step that it wants, and nobody says anything
                time.sleep(0.1)
                assert other.receive() is None


def seconds_to_next_step(ranks: Ranks, steps: int, began: float) -> float:
    """Let each rank read so many steps, more than it has prefetched; return the seconds since ``began``."""
    ranks.allow(steps)
    return time.monotonic() - began


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("waits_s", [0.0, 3.0])
def test_ranks_and_producers_go_on_in_place_with_the_other_broker(
    golden: list[Read], monkeypatch: pytest.MonkeyPatch, how: signal.Signals, waits_s: float
) -> None:
    monkeypatch.setenv("STREAMPACK_RELAY", "off")
    with pair() as it, folder() as path:
        source_in(path)
        streams = {"web": {"source": "jsonl", "shards": str(path / "?.jsonl"), "tokens_key": "tokens"}}
        config = write(path / "producer.yaml", {"broker": it.both("producers"), "streams": streams})
        with running("producer", "produce", "-c", config) as producer:
            with Ranks(it.both("trainers"), SIZES, most=10) as ranks:
                ranks.allow(10)
                it.brokers[0].signal(how)
                began, watch = time.monotonic(), Stopwatch()
                time.sleep(waits_s)
                second = it.start(1)
                ready_s = time.monotonic() - began
                took_s = seconds_to_next_step(ranks, 14, began)
                print(f"{how.name}: ready after {ready_s:.1f} s, steps of all ranks after {took_s:.1f} s")
                assert took_s < ready_s + 3.0 or watch.seconds(second.process.pid) < SOON_S
                ranks.allow(30)
                if how is signal.SIGSTOP:  # the second is away for a moment, and all meet the first again
                    it.brokers[0].signal(signal.SIGCONT)
                    epoch = second.status()["epoch"]
                    second.kill()
                    time.sleep(4.0)
                    assert it.start(1).status()["epoch"] > epoch
                ranks.allow(math.inf)
            assert producer.process.poll() is None or producer.process.wait(PATIENCE_S) == 0
    assert [rank.read for rank in ranks.ranks] == golden


def test_a_relay_moves_and_its_ranks_stay_with_it(golden: list[Read], monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as it, folder() as path, ExitStack() as daemons:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
        trainers = it.both("trainers")
        relay = daemons.enter_context(running("relay", "relay", "--broker", trainers))
        relay.wait_for(
            f"reading from {trainers} for the ranks of this host; ranks connect to {default_relay(trainers)}"
        )
        daemons.enter_context(producing_here(it.both("producers"), source_in(path)))
        with Ranks(trainers, SIZES, most=10) as ranks:
            ranks.allow(10)
            assert ranks.all_by_relay(), "it is found by the list as written"
            it.brokers[0].signal(signal.SIGKILL)
            began, watch = time.monotonic(), Stopwatch()
            pid = it.start(1).process.pid
            took_s, ran_s = seconds_to_next_step(ranks, 14, began), watch.seconds(pid)
            print(f"by relay: steps of all ranks after {took_s:.1f} s, {ran_s:.1f} s of a free machine")
            assert ran_s < SOON_S
            second = it.listens[1]["trainers"]
            assert f"connected to {second}, as {it.listens[0]['trainers']} does not answer" in relay.said
            ranks.allow(math.inf)
            assert ranks.all_by_relay()
    assert [rank.read for rank in ranks.ranks] == golden


def test_a_client_that_waits_in_vain_names_the_addresses_that_it_tried(caplog: pytest.LogCaptureFixture) -> None:
    a, b = free_address(), free_address()
    vain = pytest.raises(Unreachable, match=f"^{a},{b}: got no answer in 6 s")
    with vain, streampack.connect(f"{a},{b}", format="numpy", timeout_s=6.0) as loader:
        next(iter(loader))
    with pytest.raises(Unreachable, match=f"^{a},{b}: got no answer in 0.5 s"):
        streampack.Producer(f"{a},{b}", stream=STREAM, timeout_s=0.5)
    assert any(f"an answer of the broker; no connection to {a} or {b}" in each for each in caplog.messages)


@pytest.mark.parametrize("side", ["trainers", "producers"])
def test_a_rendezvous_file_may_name_several_addresses(side: str, tmp_path: Path) -> None:
    a, b = free_address(), free_address()
    path = write(tmp_path / "streampack.json", {side: f"{a},{b}", "run": "1", "epoch": 1})
    connects: dict[str, Callable[[str], object]] = {
        "trainers": lambda where: streampack.connect(where, format="numpy", timeout_s=0.5).state_dict(),
        "producers": lambda where: streampack.Producer(where, stream=STREAM, timeout_s=0.5),
    }
    with pytest.raises(Unreachable, match=f"^{a},{b}: got no answer in 0.5 s"):
        connects[side](f"file://{path}")


@pytest.mark.parametrize("given", ["tcp://a:7402,", "tcp://a:7402,tcp://a:7402"])
def test_every_place_refuses_a_bad_list(given: str, tmp_path: Path) -> None:
    says = "of which number 2 is empty" if given.endswith(",") else "which name tcp://a:7402 twice"
    config = write(
        tmp_path / "producer.yaml", {"broker": given, "streams": {"web": {"source": "jsonl", "shards": "x"}}}
    )
    for command in (["relay", "--broker", given], ["check", config]):
        assert says in in_process(*command).stderr
    with pytest.raises(UserError, match=says):
        streampack.connect(given)
    with pytest.raises(UserError, match=says):
        streampack.Producer(given, stream=STREAM)
