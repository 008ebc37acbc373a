"""Floods: one process with one valid key sends messages of one kind to a broker, as fast as it can.

    reports    `ReportValues` of invented names, for a step that was served long ago
    bundles    bundles of a relay with 256 `Attach` of invented readers each
    publish    `Publish` of one version after another
    results    `AskResults` of a step whose values take a megabyte; the answers are not read
    states     `AskState` of a checkpoint; the answers are not read
    hello      `Hello` of invented producers
    pings      `ReaderPing` of a rank
    gets       `Get` of a rank

The broker must have a feed ``spare`` beside the one that is measured. The ranks of ``results``, ``states``, ``pings``
and ``gets`` are of that feed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zmq

import streampack
from streampack.core.model.mesh import Mesh
from streampack.core.protocol.message import Envelope, Message
from streampack.core.protocol.producer_messages import Hello, Offer
from streampack.core.protocol.result_messages import AskResults, Publish, ReportValues
from streampack.core.protocol.trainer_messages import AskState, Attach, Attached, Get, ReaderPing
from streampack.errors import WireError
from streampack.transport.curve import show_key
from streampack.transport.keys import load_key
from streampack.wire import bundles
from streampack.wire import frames as wire

ROLES = {
    "reports": "trainer", "bundles": "relay", "publish": "trainer", "results": "trainer", "states": "trainer",
    "hello": "producer", "pings": "trainer", "gets": "trainer",
}  # fmt: skip
"""Role of the key, by flood."""
UNREAD = ("results", "states")
OF_A_RANK = ("states", "pings", "gets")
KEPT = 256
"""Different messages of a flood that are encoded before it begins."""
RESULT_SAMPLES = 25_000
OFFER = Offer(stream="web", source_digest="x")
Frames = list[bytes]


class Flooder:
    """Connections of one key to one broker, which send one kind of message.

    Args:
        where: The broker's rendezvous file.
        key_file: The key.
        kind: One of ``ROLES``.
        connections: Number of connections.
    """

    def __init__(self, where: dict[str, Any], key_file: Path, kind: str, connections: int) -> None:
        self.kind, self.sent = kind, 0
        self._where, self._key = where, load_key(key_file)
        self._context = zmq.Context()
        if kind == "results":
            self._report_much(key_file)
        self._sockets = [self._connected() for _ in range(1 if kind in OF_A_RANK else connections)]
        fence = self._attach() if kind in OF_A_RANK else 0
        self._messages = self._endless(fence)

    def close(self) -> None:
        self._context.destroy(0)

    def run(self, seconds: float) -> None:
        """Send for so long; read the answers unless they are to wait."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            before = self.sent
            for sock in self._sockets:
                for _ in range(16):
                    if not self.say(sock):
                        break
                if self.kind not in UNREAD:
                    _drain(sock)
            if self.sent == before:
                time.sleep(0.001)

    def say(self, sock: zmq.Socket[bytes]) -> bool:
        """Send one message; return False if the socket takes none."""
        try:
            sock.send_multipart(next(self._messages), zmq.NOBLOCK)
        except zmq.Again:
            return False
        self.sent += 1
        return True

    def _connected(self) -> zmq.Socket[bytes]:
        sock = self._context.socket(zmq.DEALER)
        sock.linger, sock.rcvhwm, sock.immediate = 0, 1 if self.kind in UNREAD else 0, 1
        if self.kind in UNREAD:
            sock.rcvbuf = 4096
        show_key(sock, self._key.secret, self._key.broker)
        sock.connect(self._where["producers" if self.kind == "hello" else "trainers"])
        return sock

    def _framed(self, message: Message, payload: tuple[Any, ...] = (), fence: int = 0) -> Frames:
        epoch = self._where["epoch"]
        envelope = Envelope(run=0, epoch=epoch, fence=fence, message=message, payload=payload)
        return [bytes(memoryview(frame)) for frame in wire.encode(envelope)]

    def _endless(self, fence: int) -> Iterator[Frames]:
        """The messages of the flood."""
        if self.kind == "publish":
            return (self._framed(self._publish(version)) for version in itertools.count(1))
        makes: dict[str, Callable[[int], Frames]] = {
            "reports": lambda n: self._framed(*self._report("train", 0, 500, [f"x{n}-{i}" for i in range(4)])),
            "bundles": self._bundle,
            "results": lambda n: self._framed(AskResults(feed="spare", number=n, cursor=0)),
            "states": lambda n: self._framed(AskState(feed="spare", step=3)),
            "hello": lambda n: self._framed(Hello(producer=f"x{n}", host="x", pid=n, offers=[OFFER])),
            "pings": lambda n: self._framed(ReaderPing(feed="spare", reader="x", done_upto=0, have_upto=0), (), fence),
            "gets": lambda n: self._framed(
                Get(feed="spare", lineage=0, start=0, stop=4, done_upto=0, request=n), (), fence
            ),
        }  # fmt: skip
        return itertools.cycle([makes[self.kind](n) for n in range(KEPT)])

    def _publish(self, version: int) -> Publish:
        return Publish(feed="train", number=version, version=version, step=1, attempt=(self._where["epoch"], 1))

    def _bundle(self, n: int) -> Frames:
        claims = [
            Attach(feed="train", reader=f"x{n}-{i}", host="x", pid=i, mesh=Mesh(dp=2), next_step=0) for i in range(256)
        ]
        envelopes = [Envelope(run=0, epoch=self._where["epoch"], fence=0, message=claim) for claim in claims]
        return bundles.encode_bundle([(claim.reader, each) for claim, each in zip(claims, envelopes, strict=True)])

    def _report(self, feed: str, step: int, samples: int, names: Sequence[str]) -> tuple[ReportValues, tuple[Any, ...]]:
        message = ReportValues(
            feed=feed, number=step, lineage=0, step=step, attempt=(self._where["epoch"], 1),
            part=0, parts=2 if feed == "train" else 1, names=tuple(names),
            streams_u32=bytes(4 * samples), indices_u64=np.arange(samples, dtype="<u8").tobytes(),
            parts_u32=bytes(4 * samples),
        )  # fmt: skip
        return message, tuple(bytes(8 * samples) for _ in names)

    def _report_much(self, key_file: Path) -> None:
        """Read some steps of the spare feed, then report values of invented samples for the first step."""
        with streampack.connect(
            self._where["trainers"], feed="spare", format="numpy", key_file=key_file, timeout_s=30.0
        ) as loader:
            for _, step in zip(range(12), loader.steps(), strict=False):
                list(step)
            sock = self._connected()
            for message in (AskResults(feed="spare", number=1), self._report("spare", 0, RESULT_SAMPLES, ["x"])):
                sock.send_multipart(self._framed(*message) if isinstance(message, tuple) else self._framed(message))
                assert sock.poll(10_000), "the broker did not answer"
                _drain(sock)
            sock.close()

    def _attach(self) -> int:
        """Claim the rank of the spare feed; return the fence of its attempt."""
        sock = self._sockets[0]
        attach = Attach(feed="spare", reader="x", host="x", pid=1, mesh=Mesh(), next_step=0)
        for _ in range(100):
            sock.send_multipart(self._framed(attach))
            while sock.poll(200):
                try:
                    answer = wire.decode(sock.recv_multipart())
                except WireError:
                    continue
                if isinstance(answer.message, Attached):
                    return answer.fence
        raise RuntimeError("the broker gave no rank")


def _drain(sock: zmq.Socket[bytes]) -> None:
    with contextlib.suppress(zmq.Again):
        while True:
            sock.recv(zmq.NOBLOCK)


def flood(
    where: dict[str, Any], key_file: Path, kind: str, connections: int, seconds: float, core: int, begun: Any, done: Any
) -> None:  # fmt: skip
    """Flood from a process on processor ``core``; ``begun`` is set once it begins, ``done`` gets how many it sent."""
    os.sched_setaffinity(0, {core})
    flooder = Flooder(where, key_file, kind, connections)
    begun.set()
    flooder.run(seconds)
    done.put(flooder.sent)
    flooder.close()
