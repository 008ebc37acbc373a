"""Keys on real sockets: who has the right one trains as without keys; nobody else gets a word in, and is told why."""

from __future__ import annotations

import contextlib
import json
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from streampack_services.broker import authorization
from streampack_services.broker.authorization import new_key
from streampack_services.broker.service import BrokerService
from streampack_services.broker.serving.allowed_keys import Allowed
from streampack_services.daemons import rendezvous

import streampack as sp
from streampack.config.daemon_settings import BrokerConfig
from streampack.config.service_settings import Listen
from streampack.config.stream_settings import StreamSettings
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.result_messages import AskResults
from streampack.core.protocol.rights import key_of
from streampack.errors import Rejected
from streampack.transport import curve, sockets
from streampack.transport.curve import Door, Gate, new_secret
from streampack.transport.keys import Key, load_key
from streampack.transport.secret_files import write_secret
from streampack.transport.sockets import Dealer, Poller, Router, drain
from streampack.wire import frames as wire
from tests.integration.proxy import Proxy
from tests.integration.running import PATIENCE_S, folder, until, write_jsonl
from tests.integration.security.keyed import KeyPeer, producing, serving, trained


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of keys; beside it some of strangers."""
    made = tmp_path_factory.mktemp("security") / "keys"
    new_key(made, "tokenizers", "producer", {"streams": ["web"]})
    new_key(made, "others", "producer", {"streams": ["code"]})
    new_key(made, "trainers", "trainer", {})
    new_key(made, "rank-3", "trainer", {"feeds": ["train"], "ranks": {"dp": 3}})
    good = load_key(made / "trainers.key")
    forged = {
        "unknown": Key(name="unknown", secret=new_secret(), broker=good.broker),
        "of-another-broker": Key(name="trainers", secret=good.secret, broker=curve.public_of(new_secret())),
    }
    for name, key in forged.items():
        write_secret(made.parent / f"{name}.key", key.text())
    return made


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    rows: list[dict[str, Any]] = [{"tokens": list(range(1 + 7 * i % 90))} for i in range(300)]
    return str(write_jsonl(tmp_path_factory.mktemp("data") / "a.jsonl", rows))


@pytest.fixture(scope="module")
def broker(keys: Path) -> Iterator[BrokerService]:
    with serving(keys) as service:
        yield service


def test_with_keys_a_run_has_the_bytes_that_it_has_without(keys: Path, data: str) -> None:
    tokenizers = load_key(keys / "tokenizers.key")
    with serving(None) as plain, producing(plain, data, None) as failed:
        expected = trained(plain, "")
    assert len(expected) > 5
    with serving(keys) as guarded, producing(guarded, data, tokenizers) as failed:
        assert trained(guarded, keys / "trainers.key") == expected
    assert not failed
    with (
        folder() as path,
        serving(keys, lambda side: f"ipc://{path}/s/{side}") as near,
        producing(near, data, load_key(keys / "broker.key")),
    ):
        assert stat.S_IMODE((path / "s").stat().st_mode) == 0o700
        assert stat.S_IMODE((path / "s" / "p").stat().st_mode) & 0o077 == 0
        assert trained(near, keys / "broker.key") == expected


CLOSED = [
    ("", "got no key, expected one, because the broker requires keys. Pass the path of a key file with key_file"),
    ("../unknown.key", "got a broker that rejects key 'unknown', expected a broker whose allowed.yaml lists this key"),
    ("../of-another-broker.key", "got a broker whose key is not the broker key in the file of key 'trainers'"),
]


@pytest.mark.parametrize(
    ("key", "why"), [*CLOSED, ("tokenizers.key", "of role producer, expected a key of role trainer")]
)
def test_a_trainer_that_is_not_let_in_is_told_why(broker: BrokerService, keys: Path, key: str, why: str) -> None:
    with pytest.raises(Rejected) as refused:
        sp.connect(broker.endpoints["trainers"], format="numpy", key_file=keys / key if key else "")
    assert why in str(refused.value)
    assert not broker.core.num_readers
    if key == "../unknown.key":
        until(lambda: broker.snapshot.messages.strangers > 0)


@pytest.mark.parametrize(
    ("key", "why"),
    [
        *CLOSED[:2],
        ("trainers.key", "of role trainer, expected a key of role producer"),
        ("others.key", "got stream 'web'"),
    ],
)
def test_a_producer_that_is_not_let_in_is_told_why(
    broker: BrokerService, keys: Path, data: str, key: str, why: str
) -> None:
    with producing(broker, data, load_key(keys / key) if key else None) as failed:
        until(lambda: bool(failed))
    assert why in str(failed[0])
    assert not broker.core.leases.num_producers


def test_a_pusher_that_is_not_let_in_is_told_why(broker: BrokerService, keys: Path) -> None:
    with pytest.raises(Rejected, match="rejects key 'unknown'"):
        sp.Producer(broker.endpoints["producers"], stream="web", key_file=keys.parent / "unknown.key")
    with pytest.raises(Rejected, match="from key 'others', expected one of: code"):
        sp.Producer(broker.endpoints["producers"], stream="web", key_file=keys / "others.key")


def test_a_client_that_looks_for_a_broker_believes_the_one_whose_key_it_has(broker: BrokerService, keys: Path) -> None:
    found = {**broker.endpoints, "epoch": broker.core.epoch, "attempt": ""}
    own = load_key(keys / "broker.key")
    until(lambda: not rendezvous.rejection(found, "", own))  # it waits for 2 s: a busy machine takes longer
    assert "its broker does not answer" in rendezvous.rejection(found | {"epoch": 1}, "", own)
    until(lambda: "the broker requires keys" in rendezvous.rejection(found, "", None))


def test_a_broker_that_cannot_show_a_key_is_not_believed(keys: Path, data: str) -> None:
    with serving(None) as plain:
        with pytest.raises(Rejected, match="got a broker without keys for key 'trainers'"):
            sp.connect(plain.endpoints["trainers"], format="numpy", key_file=keys / "trainers.key")
        with producing(plain, data, load_key(keys / "tokenizers.key")) as failed:
            until(lambda: bool(failed))
        assert "got a broker without keys for key 'tokenizers'" in str(failed[0])


@pytest.mark.parametrize(("mesh", "feed"), [({"dp": 8, "dp_rank": 4}, "train"), ({"dp": 8, "dp_rank": 3}, "valid")])
def test_the_key_of_a_rank_is_of_no_use_for_another(
    broker: BrokerService, keys: Path, mesh: dict[str, int], feed: str
) -> None:
    with pytest.raises(Rejected, match=r"for key 'rank-3', expected .*\[forbidden\]"):
        sp.connect(broker.endpoints["trainers"], feed=feed, mesh=mesh, format="numpy", key_file=keys / "rank-3.key")
    with sp.connect(
        broker.endpoints["trainers"], mesh={"dp": 8, "dp_rank": 3}, format="numpy", key_file=keys / "rank-3.key"
    ):
        until(lambda: broker.core.num_readers == 1)
    until(lambda: broker.core.num_readers == 0)


def test_a_peer_whose_key_is_revoked_is_sent_away_at_once(keys: Path, data: str) -> None:
    for name, role in (("leaver", "trainer"), ("stayer", "trainer"), ("sender", "producer")):
        new_key(keys, name, role, {})
    with serving(keys) as service, producing(service, data, load_key(keys / "sender.key")) as failed:

        def connect(name: str, rank: int) -> sp.Client:
            mesh = {"dp": 2, "dp_rank": rank}
            at = service.endpoints["trainers"]
            return sp.connect(at, mesh=mesh, format="numpy", key_file=keys / f"{name}.key", stall_timeout_s=PATIENCE_S)

        with connect("leaver", 0) as leaver, connect("stayer", 1) as stayer:
            steps, others = leaver.steps(), stayer.steps()
            assert next(steps).digest == next(others).digest
            authorization.revoke(keys, "leaver")
            authorization.revoke(keys, "sender")
            until(lambda: service.core.num_readers == 1)
            with pytest.raises(Rejected, match="got a key that is no longer allowed"):
                list(steps)
            until(lambda: bool(failed))
            assert "got a key that is no longer allowed" in str(failed[0])
            until(lambda: service.core.num_readers == 1 and not service.core.leases.num_producers)
            with pytest.raises(Rejected, match="rejects key 'leaver'"):
                connect("leaver", 0)


@contextlib.contextmanager
def router(keys: Path) -> Iterator[tuple[Router, list[bytes]]]:
    """A router that lets keys in, and what came, in a thread."""
    minding = Allowed(keys, lambda: None)
    server = Router("tcp://127.0.0.1:*", 1 << 20, door=Door(minding.key.secret, minding.admits))
    heard: list[bytes] = []
    over = threading.Event()

    def serve() -> None:
        poller = Poller([server])
        while not over.is_set():
            poller.wait(0.02)
            heard.extend(b"".join(frame.bytes for frame in frames[1:]) for frames in drain(server, 64))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield server, heard
    finally:
        over.set()
        thread.join(PATIENCE_S)
        server.close()
        minding.close()


def test_with_nobody_at_the_door_nobody_gets_in(keys: Path) -> None:
    minding = Allowed(keys, lambda: None)
    server = Router("tcp://127.0.0.1:*", 1 << 20, door=Door(minding.key.secret, minding.admits))
    assert server._gate is not None
    server._gate.close()
    dealer = Dealer(server.endpoint, 1 << 20, key=load_key(keys / "trainers.key"))
    try:

        def refused() -> bool:
            assert not dealer.send([b"hello"])
            assert server.receive() is None
            try:
                dealer.check()
            except Rejected:
                return True
            return False

        until(refused)
    finally:
        dealer.close()
        server.close()
        minding.close()


@pytest.mark.parametrize("words", [[b"1.0", b"PLAIN"], [b"1.0", b"NULL"], [b"2.0", b"CURVE"], [b"1.0"], []])
def test_only_who_has_shown_a_key_is_let_in(keys: Path, words: list[bytes]) -> None:
    public = bytes.fromhex(load_key(keys / "trainers.key").public)
    good = [b"1.0", b"1", b"streampack", b"127.0.0.1", b"", b"CURVE", public]
    bad = [words[0], *good[1:5], words[1], public] if len(words) == 2 else good[: len(words)]
    context = zmq.Context()
    server, asking = context.socket(zmq.ROUTER), context.socket(zmq.REQ)
    gate = Gate(context, server, Door(new_secret(), lambda *_: True))
    asking.connect("inproc://zeromq.zap.01")
    try:
        for said, status in ((good, b"200"), (bad, b"400")):
            asking.send_multipart(said or [b""])
            gate.answer()
            assert asking.recv_multipart()[2] == status
    finally:
        for each in (gate, server, asking):
            each.close()
        context.term()


def test_a_broker_that_does_not_answer_yet_is_waited_for(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "HANDSHAKE_MS", 250)
    for name, seconds in (("LOOK_S", 0.02), ("QUICK_S", 0.2), ("UNCLEAR_S", 0.3)):
        monkeypatch.setattr(curve, name, seconds)
    minding = Allowed(keys, lambda: None)
    server = Router("tcp://127.0.0.1:*", 1 << 20, door=Door(minding.key.secret, minding.admits))
    dealer = Dealer(server.endpoint, 1 << 20, key=load_key(keys / "trainers.key"))
    failures: list[str] = []
    real = curve._mechanism

    def noted(endpoint: str) -> str:
        failures.append(real(endpoint))
        return failures[-1]

    monkeypatch.setattr(curve, "_mechanism", noted)
    try:

        def waits() -> bool:
            dealer.check()
            return failures.count("CURVE") >= 6

        until(waits)
        poller = Poller([server])

        def is_let_in() -> bool:
            dealer.check()
            dealer.send([b"hello"])
            poller.wait(0.02)
            return server.receive() is not None

        until(is_let_in)
    finally:
        dealer.close()
        server.close()
        minding.close()


def test_a_broker_whose_door_fails_ends(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> bool:
        raise ZeroDivisionError("the door is broken")

    monkeypatch.setattr(Allowed, "admits", failing)
    listen = Listen(producers="tcp://127.0.0.1:*", trainers="tcp://127.0.0.1:*", keys=str(keys))
    service = BrokerService(BrokerConfig(streams={"web": StreamSettings()}, listen=listen, memory="64MiB"))
    ended: list[BaseException] = []

    def run() -> None:
        try:
            service.run()
        except ZeroDivisionError as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    dealer = Dealer(service.endpoints["trainers"], 1 << 20, key=load_key(keys / "trainers.key"))
    try:
        thread.join(PATIENCE_S)
        assert ended
        assert not service.counters.ready
    finally:
        dealer.close()
        service.close()


def test_a_recorded_session_says_nothing_when_it_is_played_again(keys: Path) -> None:
    with router(keys) as (server, heard):
        with Proxy(server.endpoint) as proxy:
            proxy.up.kept = []
            dealer = Dealer(proxy.endpoint, 1 << 20, key=load_key(keys / "trainers.key"))
            try:
                until(lambda: dealer.send([b"pay me"]) and bool(heard))
            finally:
                dealer.close()
            recorded = b"".join(proxy.up.kept)
        assert len(recorded) > 64 + 200 + 100, "greeting, HELLO and INITIATE"
        assert b"pay me" not in recorded
        before = list(heard)
        host, port = server.endpoint.removeprefix("tcp://").rsplit(":", 1)
        for whole in (True, False):
            block = len(recorded) if whole else 97
            with socket.create_connection((host, int(port)), PATIENCE_S) as sock, contextlib.suppress(OSError):
                for at in range(0, len(recorded), block):
                    sock.sendall(recorded[at : at + block])
                    time.sleep(0.001)  # each has an answer before the next
                while sock.recv(4096):
                    continue  # until the router has had enough
        fresh = Dealer(server.endpoint, 1 << 20, key=load_key(keys / "trainers.key"))
        try:
            until(lambda: fresh.send([b"now"]) and heard[-1] == b"now")
        finally:
            fresh.close()
        assert set(heard[len(before) :]) == {b"now"}


def test_no_peer_speaks_for_another_by_taking_its_id(keys: Path) -> None:
    minding = Allowed(keys, lambda: None)
    server = Router("tcp://127.0.0.1:*", 1 << 20, door=Door(minding.key.secret, minding.admits))
    poller, peers = Poller([server]), []
    try:
        for name in ("trainers", "tokenizers"):
            dealer = Dealer.__new__(Dealer)
            key = load_key(keys / f"{name}.key")
            _connect_as(dealer, server.endpoint, key, b"the same id")
            try:
                while True:
                    dealer.send([b"hello"])
                    poller.wait(0.02)
                    if (frames := server.receive()) is not None:
                        break
            finally:
                dealer.close()
            peers.append(frames[0].bytes)
            assert frames[0].bytes == key.public.encode() + b"the same id"
        assert len(set(peers)) == 2
    finally:
        server.close()
        minding.close()


def _connect_as(dealer: Dealer, endpoint: str, key: Key, routing_id: bytes) -> None:
    """As ``Dealer`` would, with an id of its own choice: which no process of ours has, and any peer may claim."""
    real = zmq.Socket.connect

    def connect(self: Any, *args: Any) -> Any:
        self.setsockopt(zmq.ROUTING_ID, routing_id)
        return real(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zmq.Socket, "connect", connect)
        dealer.__init__(endpoint, 1 << 20, key=key)  # type: ignore[misc]


def test_messages_with_keys_cannot_be_read_on_the_way(keys: Path) -> None:
    with router(keys) as (server, heard), Proxy(server.endpoint) as proxy:
        proxy.up.kept = []
        dealer = Dealer(proxy.endpoint, 1 << 20, key=load_key(keys / "trainers.key"))
        text = json.dumps({"tokens": list(range(2000))}).encode()
        try:
            until(lambda: dealer.send([text]) and bool(heard))
        finally:
            dealer.close()
        assert heard[0] == text
        assert len(b"".join(proxy.up.kept)) > len(text)
        assert not any(text[i : i + 16] in b"".join(proxy.up.kept) for i in range(0, len(text), 500))


@pytest.mark.parametrize("side", ["producers", "trainers"])
def test_a_revoked_key_is_disconnected_within_two_seconds(
    keys: Path, side: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also a connection that floods, or has said nothing. Those of other keys stay."""
    role = {"producers": "producer", "trainers": "trainer"}[side]
    for name in (f"gone-{role}", f"stays-{role}"):
        new_key(keys, name, role, {})
    with serving(keys) as service, contextlib.ExitStack() as opened:
        unread = (service._sockets.producers if side == "producers" else service._sockets.trainers).router._unread
        assert unread is not None
        gone, stays = load_key(keys / f"gone-{role}.key"), load_key(keys / f"stays-{role}.key")
        speaks, _silent, floods, other = (KeyPeer(key, service.endpoints[side]) for key in (gone, gone, gone, stays))
        for peer in (speaks, _silent, floods, other):
            opened.callback(peer.raw.close)

        def known() -> list[bytes]:
            """The connections that are open, by their key; empty for those that have said nothing."""
            return sorted(key_of(each.peer) for each in list(unread.connections))

        for peer in (speaks, floods, other):
            peer.speak()
        all_keys = sorted([b"", gone.public.encode(), gone.public.encode(), stays.public.encode()])
        until(lambda: known() == all_keys)
        began = time.monotonic()
        authorization.revoke(keys, f"gone-{role}")
        while known() != [stays.public.encode()] and time.monotonic() - began < 10.0:
            floods.speak()
            time.sleep(0.001)
        assert known() == [stays.public.encode()]
        assert time.monotonic() - began < 2.0
    assert f"(key 'gone-{role}'): its key was revoked" in caplog.text


def test_a_key_whose_messages_are_refused_is_named_with_the_command_that_revokes_it(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """None of thousands of lines named the key."""
    new_key(keys, "noisy", "trainer", {"feeds": ["elsewhere"]})
    ask = AskResults(feed="train", number=1)
    with serving(keys) as service:
        peer = KeyPeer(load_key(keys / "noisy.key"), service.endpoints["trainers"])
        try:
            for _ in range(120):
                peer.raw.send_multipart(wire.encode(Envelope(run=0, epoch=0, fence=0, message=ask)))
            until(lambda: "key 'noisy': 100 of its messages were refused so far" in caplog.text)
        finally:
            peer.raw.close()
    assert f"run 'streampack keys revoke {keys} noisy'" in caplog.text
    lines = [line for line in caplog.messages if line.startswith("refused a peer: got feed 'train'")]
    assert lines
    assert all(line.endswith("(key 'noisy')") for line in lines)
