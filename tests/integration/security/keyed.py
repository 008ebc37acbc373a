"""A broker with keys, and its peers."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq
from streampack_services.broker.service import BrokerService

import streampack as sp
from streampack.config.daemon_settings import BrokerConfig
from streampack.config.rules_settings import RulesSettings, StepSettings
from streampack.config.service_settings import Listen
from streampack.config.stream_settings import StreamSettings
from streampack.core.protocol.message import Envelope, Who
from streampack.errors import StreampackError
from streampack.producer.loop import ProducerLoop
from streampack.sources import SourceSettings, open_source
from streampack.tokenizers.bytes_tokenizer import BytesTokenizer
from streampack.transport import curve
from streampack.transport.keys import Key
from streampack.wire import frames as wire
from tests.integration.running import PATIENCE_S

_names = itertools.count()


@contextlib.contextmanager
def serving(keys: Path | None, listen: Callable[[str], str] = lambda _: "tcp://127.0.0.1:*") -> Iterator[BrokerService]:
    """A broker in a thread."""
    where = Listen(producers=listen("p"), trainers=listen("t"), keys=str(keys) if keys else None)
    rules = RulesSettings(budget=128, step=StepSettings(packs=8))
    config = BrokerConfig(streams={"web": StreamSettings(partitions=2)}, listen=where, memory="32MiB", rules=rules)
    with running(BrokerService(config)) as service:
        yield service


@contextlib.contextmanager
def running(service: BrokerService) -> Iterator[BrokerService]:
    """Run a broker in a thread."""
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        yield service
    finally:
        service.drain()
        service.drain()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@contextlib.contextmanager
def producing(broker: BrokerService, data: str, key: Key | None) -> Iterator[list[StreampackError]]:
    """A producer in a thread; what it failed with."""
    failed: list[StreampackError] = []
    source = open_source(SourceSettings(source="jsonl", shards=data), BytesTokenizer())
    loop = ProducerLoop(broker.endpoints["producers"], {"web": source}, key=key)

    def run() -> None:
        try:
            loop.run()
        except StreampackError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield failed
    finally:
        loop.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def trained(broker: BrokerService, key_file: Path | str) -> list[tuple[str, bytes, bytes]]:
    """Digest, tokens and labels of every step."""
    with sp.connect(broker.endpoints["trainers"], format="numpy", verify=True, key_file=key_file) as loader:
        steps = [(step, list(step)) for step in loader.steps()]
    return [
        (step.digest, b"".join(pack.input_ids.tobytes() for pack in packs), b"".join(p.labels.tobytes() for p in packs))
        for step, packs in steps
    ]


class KeyPeer:
    """A connection that has shaken hands, and never connects again."""

    def __init__(self, key: Key, endpoint: str) -> None:
        self.raw: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.raw.setsockopt(zmq.LINGER, 0)
        self.raw.setsockopt(zmq.RECONNECT_IVL, -1)
        curve.show_key(self.raw, key.secret, key.broker)
        watch: zmq.Socket[bytes] = self.raw.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.raw.connect(endpoint)
        assert watch.poll(int(1000 * PATIENCE_S))
        self.raw.disable_monitor()
        watch.close()

    def speak(self) -> None:
        """A message without an effect, unless the queue is full."""
        with contextlib.suppress(zmq.Again):
            self.raw.send_multipart(wire.encode(Envelope(run=0, epoch=0, fence=0, message=Who())), zmq.NOBLOCK)
