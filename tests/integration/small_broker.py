"""The smallest broker that keeps the protocol of pushed streams: one partition, in a thread, real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.protocol.message import Bye, Envelope, Message, Who
from streampack.core.protocol.producer_messages import Eos, Flow, Hello, Lease, Mark, Samples
from streampack.transport.sockets import Poller, Router, drain
from streampack.wire import frames as wire
from tests.integration.running import PATIENCE_S

RUN, STREAM = 5, "rollouts"
TERMS: dict[str, Any] = {
    "stream": STREAM, "partition": 1, "partitions": 4, "cursor": None, "seed": 0, "passes": 1, "dtype": "int32",
    "fields": (), "overlong": "error", "poison": "error", "max_sample_tokens": 100, "max_chunk_bytes": 1600,
}  # fmt: skip


@dataclass
class Taken:
    """A chunk, as it came."""

    message: Samples
    payload: list[bytes]

    @property
    def lengths(self) -> list[int]:
        lengths: NDArray[np.uint32] = np.frombuffer(self.message.lengths_u32, "<u4")
        return list(map(int, lengths))

    def column(self, at: int, dtype: str) -> list[Any]:
        return list(np.frombuffer(self.payload[at], dtype))


@dataclass
class SmallBroker:
    """Takes one partition's samples in order, in a thread; ``safe`` says how many it calls durable."""

    endpoint: str = "tcp://127.0.0.1:*"
    epoch: int = 1
    first_seq: int = 0
    terms: dict[str, Any] = field(default_factory=dict)
    safe: Callable[[int], int] = lambda taken: taken
    taken: list[Taken] = field(default_factory=list)
    heard: list[Message] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)
    ended: bool = False
    silent: bool = False
    say: list[Message] = field(default_factory=list)
    """For the test to have something said."""

    def __post_init__(self) -> None:
        self.router = Router(self.endpoint, 1 << 24)
        self.endpoint = self.router.endpoint
        self.expected, self.session, self.stopping = self.first_seq, 0, False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        poller = Poller([self.router])
        peer = b""
        try:
            while not self.stopping:
                poller.wait(0.01)
                for frames in drain(self.router, 64):
                    peer = frames[0].bytes
                    self.receive(peer, wire.decode(frames[1:]))
                while self.say:
                    self.send(peer, self.say.pop(0))
        finally:
            self.router.close()

    def receive(self, peer: bytes, envelope: Envelope) -> None:
        message = envelope.message
        self.heard.append(message)
        if self.silent:
            return
        if isinstance(message, Hello):
            self.session += 1
            self.send(peer, Lease(**TERMS | self.terms, first_seq=self.expected))
        elif isinstance(message, Bye):
            return
        elif envelope.epoch < self.epoch:
            self.send(peer, Who())
            return
        elif isinstance(message, Samples) and (envelope.fence, message.base_seq) == (self.session, self.expected):
            self.taken.append(Taken(message, [bytes(frame) for frame in envelope.payload]))
            self.expected += len(self.taken[-1].lengths)
        elif isinstance(message, Mark) and message.number == len(self.marks):
            self.marks.append((message.seq, message.batch))
        elif isinstance(message, Eos):
            self.ended = True
        flow = Flow(
            stream=self.terms.get("stream", STREAM), partition=1, expected_seq=self.expected, grant_seq=1 << 40,
            grant_bytes=1 << 40, durable_seq=self.safe(self.expected), durable_marks=len(self.marks),
            ended=self.ended,
        )  # fmt: skip
        self.send(peer, flow)

    def send(self, peer: bytes, message: Message) -> None:
        fence = self.session if isinstance(message, Lease | Flow) else 0
        self.router.send(peer, wire.encode(Envelope(run=RUN, epoch=self.epoch, fence=fence, message=message)))

    def heard_of(self, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for message in list(self.heard))

    def stop(self) -> None:
        self.stopping = True
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
