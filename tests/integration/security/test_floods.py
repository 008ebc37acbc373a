"""Floods by a process with one valid key: they take a bounded memory, and hold up no other key.

``python -m benchmarks.attacks.floods`` measures the same for longer, with ranks that take steps beside it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from pathlib import Path

import pytest
from streampack_services.broker.authorization import new_key
from streampack_services.broker.report_limit import KEY_BURST
from streampack_services.broker.service import BrokerService
from streampack_services.broker.serving.peer_messages import WAITING_BYTES

from benchmarks.attacks.attack import Rank
from benchmarks.attacks.flooder import Flooder
from benchmarks.attacks.floods import serving as serving_processes
from streampack.config.daemon_settings import BrokerConfig
from streampack.config.rules_settings import RulesSettings, StepSettings
from streampack.config.service_settings import Listen
from streampack.config.stream_settings import StreamSettings
from streampack.core.model.mesh import Mesh
from streampack.core.protocol.effects import FromTrainer
from streampack.core.protocol.events import Effect, Event
from streampack.core.protocol.message import Envelope, Message, Who
from streampack.core.protocol.result_messages import AskResults
from streampack.core.protocol.rights import key_of
from streampack.core.protocol.trainer_messages import AskSnapshot, Attach
from streampack.transport.keys import load_key
from streampack.transport.sockets import Dealer, Poller, drain
from streampack.wire import frames as wire
from tests.integration.running import until
from tests.integration.security.keyed import KeyPeer, running, serving

FLOOD_S = 3.0
MORE_BYTES = 128 << 20
"""A broker on a busy machine notices a flood later; ``benchmarks.attacks.floods`` measures on one that is not busy."""


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment has no key after the test."""
    monkeypatch.setenv("STREAMPACK_KEY_FILE", "")


@pytest.mark.parametrize("kind", ["reports", "publish", "results", "hello"])
def test_a_flood_of_one_key_takes_a_bounded_memory_and_is_named_once(kind: str, no_key: None) -> None:
    with serving_processes(kind) as service:
        rank = Rank(service, 0.05)
        try:
            until(lambda: len(rank.waits) > 40)
            flooder = Flooder(service.where, service.folder / "keys" / "attacker.key", kind, 8)
            before, most = service.resident_bytes, 0
            floods = threading.Thread(target=flooder.run, args=(FLOOD_S,))
            floods.start()
            while floods.is_alive():
                most = max(most, service.resident_bytes)
                time.sleep(0.02)
            steps = len(rank.waits)
            until(lambda: len(rank.waits) > steps + 20)
        finally:
            rank.over = True
            rank.close()
        flooder.close()
        log = (service.folder / "broker.log").read_text()
    assert flooder.sent > 100
    assert most - before < MORE_BYTES
    blocked = [line for line in log.splitlines() if "blocked key" in line]
    assert len(blocked) <= 1
    assert log.count("(key 'attacker')") <= 2


def test_a_key_with_many_connections_holds_up_no_other_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message of the attacker takes 10 ms. Its 40 connections had 40 turns for one of the other key."""
    keys = tmp_path / "keys"
    for name in ("attacker", "honest"):
        new_key(keys, name, "trainer", {})
    ours = {name: load_key(keys / f"{name}.key") for name in ("attacker", "honest")}
    handled, honest = list[bytes](), ours["honest"].public.encode()
    with serving(keys) as service:
        _make_costly(service, ours["attacker"].public.encode(), handled, monkeypatch)
        many = [KeyPeer(ours["attacker"], service.endpoints["trainers"]) for _ in range(40)]
        one = KeyPeer(ours["honest"], service.endpoints["trainers"])
        ask = wire.encode(Envelope(run=0, epoch=0, fence=0, message=AskResults(feed="train", number=1)))
        try:
            for _ in range(40):
                for peer in many:
                    peer.raw.send_multipart(ask)
            until(lambda: len(handled) > 80)
            waits = []
            for number in range(1, 6):
                before = len(handled)
                one.raw.send_multipart(ask)
                until(functools.partial(_has, handled, honest, number))
                waits.append([at for at, key in enumerate(handled) if key == honest][number - 1] - before)
        finally:
            for peer in (*many, one):
                peer.raw.close()
    assert sorted(waits)[2] < 20, "messages of the attacker before one of the other key"


def test_a_snapshot_is_handled_while_messages_of_its_trainer_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be larger than all other messages of a key that may wait. It was dropped, and each repeated one too."""
    rules = RulesSettings(budget=8192, step=StepSettings(packs=32))
    config = BrokerConfig(
        streams={"web": StreamSettings()}, rules=rules, memory="64MiB",
        listen=Listen(producers="tcp://127.0.0.1:*", trainers="tcp://127.0.0.1:*"),
    )  # fmt: skip
    service, handled = BrokerService(config), list[type[Message]]()
    handle = service.core.handle

    def costly(event: Event) -> list[Effect]:
        if isinstance(event, FromTrainer):
            handled.append(type(event.envelope.message))
            time.sleep(0.02)
        return handle(event)

    monkeypatch.setattr(service.core, "handle", costly)
    ask = Envelope(run=0, epoch=0, fence=0, message=AskResults(feed="train", number=1))
    large = Envelope(run=0, epoch=0, fence=0, message=Who(), payload=(bytes(WAITING_BYTES + 1),))
    with running(service), contextlib.closing(Dealer(service.endpoints["trainers"], 1 << 24)) as trainer:
        _ask_for_snapshot(trainer)
        for envelope in (*[ask] * 100, large):
            assert trainer.send(wire.encode(envelope))
        until(lambda: handled.count(AskResults) == 100, 30)
        until(lambda: Who in handled, 5)


def test_lines_about_a_key_that_were_left_out_are_counted_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next line, here about another key, comes after their number."""
    keys = tmp_path / "keys"
    for name in ("attacker", "honest"):
        new_key(keys, name, "trainer", {})
    too_large = Attach(
        feed="train", knows_stages=True, reader="x", host="h", pid=1, mesh=Mesh(dp=1 << 16, cp=4), next_step=0
    )
    refused = wire.encode(Envelope(run=0, epoch=0, fence=0, message=too_large))
    with serving(keys) as service:
        for name, count in (("attacker", KEY_BURST + 5), ("honest", 1)):
            peer = KeyPeer(load_key(keys / f"{name}.key"), service.endpoints["trainers"])
            for _ in range(count):
                peer.raw.send_multipart(refused)
            for _ in range(count):
                assert peer.raw.poll(30_000)
                peer.raw.recv_multipart()
            peer.raw.close()
    texts = [record.getMessage() for record in caplog.records]
    [at] = [at for at, text in enumerate(texts) if text == "suppressed 5 log lines that peers caused"]
    assert "(key 'honest')" in texts[at + 1]


def _ask_for_snapshot(trainer: Dealer) -> None:
    """Attach to a step that has a snapshot, until the broker asks for it."""
    attach = Attach(
        feed="train",
        knows_stages=True,
        reader="x",
        host="h",
        pid=1,
        mesh=Mesh(),
        next_step=5,
        ready=True,
        snapshot_digest=bytes([1] * 16),
    )
    until(lambda: trainer.send(wire.encode(Envelope(run=0, epoch=0, fence=0, message=attach))))
    poller, answers = Poller([trainer]), list[Message]()

    def is_asked() -> bool:
        poller.wait(0.05)
        answers.extend(wire.decode(frames).message for frames in drain(trainer, 100))
        return any(isinstance(answer, AskSnapshot) for answer in answers)

    until(is_asked, 30)


def _has(handled: list[bytes], key: bytes, number: int) -> bool:
    """Return whether at least ``number`` messages of a key were handled."""
    return handled.count(key) >= number


def _make_costly(service: BrokerService, key: bytes, handled: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each message of a key take 10 ms, and note the key of each message that is handled."""
    handle = service.core.handle

    def costly(event: Event) -> list[Effect]:
        if isinstance(event, FromTrainer):
            handled.append(key_of(event.peer))
            if handled[-1] == key:
                time.sleep(0.01)
        return handle(event)

    monkeypatch.setattr(service.core, "handle", costly)
