"""A broker as its shell runs it, in one thread and without sockets: a real arena, a log in memory, two feeds.

Honest producers and a client, in front of it, show what is said in a run; whoever is hostile says something like it.
What a message names of the run, its broker and its session is filled in as whoever sends it has heard it, where it
says -1: nothing that is refused at once would find much.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from streampack.core.broker import Broker
from streampack.core.columns.chunk_body import chunk_as
from streampack.core.journal.journal import Journal
from streampack.core.model.capacity import Capacity, FeedPlan, wanted_tokens
from streampack.core.model.fields import Field
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Batch, Rules, StreamRules
from streampack.core.protocol.effects import Change, Drain, FromProducer, FromTrainer
from streampack.core.protocol.events import Event, FromBroker, Send, Tick
from streampack.core.protocol.message import Envelope, Message
from streampack.core.protocol.producer_messages import Eos, Lease, Mark, Offer, Samples, Sent
from streampack.core.protocol.relay_messages import relay_of
from streampack.core.protocol.trainer_messages import Attached
from streampack.core.sessions.client_events import Deliver, Detach, Ended, Returned
from streampack.core.sessions.client_session import ClientSession
from streampack.core.sessions.producer_base import Chunk, Finish
from streampack.core.sessions.producer_session import EndOfPartition, ProducerSession, Read
from streampack.errors import WireError
from streampack.wire import bundles
from streampack.wire import frames as wire
from streampack.wire.frames import ALL_MESSAGES
from tests.fuzz.forms import packed
from tests.world.chunks import message_of
from tests.world.shell import Sending, Shell, arena_for, held_tokens

RUN, EPOCH, RIGHT = 9, 7, -1
BUDGET, LONGEST, QUOTA, MOST_PEERS = 16, 24, 64, 8
LENGTHS = (3, 5, 16, 1, 0, 7)
SIDES = (FromProducer, FromTrainer)
KINDS = {kind.TYPE: kind for kind in ALL_MESSAGES}
READ = Rules(
    budget=BUDGET, packs=2, window=4,
    streams=(StreamRules("a", 1.0, 2, poison="drop"), StreamRules("b", 2.0, 1, poison="drop", overlong="split")),
)  # fmt: skip
PUSHED = Rules(
    budget=BUDGET, packs=2, window=4, merge="arrival", streams=(StreamRules("p", 1.0, 2, pushed=True, poison="drop"),)
)
LATE = Rules(
    budget=BUDGET, packs=2, window=4, merge="arrival", streams=PUSHED.streams,
    fields=(Field(name="reward", dtype="float64", axis="sample", late=True),),
)  # fmt: skip
PACED = msgspec.structs.replace(LATE, batch=Batch(samples=4), max_policy_lag=1, paces=True)
FEEDS = {"train": READ, "push": PUSHED}


class Stage(Shell):
    """The broker and its shell; ``told`` is what it sent, by peer."""

    def __init__(self, feeds: Mapping[str, Rules] = FEEDS) -> None:
        super().__init__()
        self._plans = [
            FeedPlan(name, rules, wanted_tokens(rules, LONGEST), max_readers=MOST_PEERS)
            for name, rules in feeds.items()
        ]
        self.tokens = held_tokens(self._plans, QUOTA)
        self.now, self.epoch = 0.0, EPOCH - 1
        self.told: dict[bytes, list[Envelope]] = {}
        self.fences: dict[Any, int] = {}
        """Fences, by peer and partition."""
        self.restart()

    def restart(self) -> None:
        """Start a broker with what the log holds. The one before was killed, if there was one."""
        self.epoch += 1
        core = Broker(
            run=RUN, epoch=self.epoch, feeds=self._plans, capacity=Capacity(QUOTA, LONGEST, 4 * LONGEST, MOST_PEERS),
            steps_ahead=2, journal=Journal(keeps=True), run_name="fuzz",
        )  # fmt: skip
        self.arena = arena_for(self.tokens, LONGEST, self._plans[0].rules)
        self.told.clear()
        self.fences.clear()
        self.start(core, self.arena)
        self.tick(0.0)

    def hear(self, side: int, peer: bytes, envelope: Envelope) -> None:
        """A message of a peer, at the address of producers (0) or trainers (1)."""
        self.handle(SIDES[side](peer, envelope))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.handle(Tick(self.now))

    def check(self) -> None:
        """What is remembered is bounded, whatever was said."""
        core = self.core
        assert core.leases.num_producers <= MOST_PEERS
        assert all(feed.readers.num_readers <= MOST_PEERS for feed in core.feeds.values())
        assert self.arena.live_tokens <= self.tokens
        assert all(feed.memory.held_tokens <= feed.memory.limit_tokens for feed in core.feeds.values())

    def carry(self, effect: Sending, envelope: Envelope) -> bool:
        peer, heard = effect.peer, wire.decode(wire.encode(envelope))  # it fits into what its type declares
        if (relay := relay_of(peer)) is not None:  # it fits into a bundle, as the service sends it
            bundles.encode_bundle([(relay[1], envelope)])
        self.told.setdefault(peer, []).append(heard)
        message = heard.message
        if isinstance(message, Lease):
            self.fences[peer, message.stream, message.partition] = heard.fence
        elif isinstance(message, Attached):
            self.fences[peer] = heard.fence
        return True


# Inputs: lists of things that happen


def item(side: int, peer: int, envelope: Envelope) -> list[Any]:
    """A message as part of an input: what it names of the run is filled in when it is sent."""
    plain = msgspec.to_builtins(envelope.message, builtin_types=(bytes,))
    payload = [bytes(memoryview(frame)) for frame in envelope.payload]
    return ["m", side, peer, envelope.message.TYPE, RIGHT, RIGHT, RIGHT, plain, payload]


def read_item(given: Any, fences: dict[Any, int]) -> tuple[int, bytes, Envelope] | None:
    """(side, peer, message) of part of an input; None where it is none that decodes."""
    if not (isinstance(given, list) and len(given) == 9 and all(isinstance(each, int) for each in given[1:7])):
        return None
    _, side, peer_number, kind, run, epoch, fence, plain, payload = given
    peer = b"%d" % (peer_number % 16)
    if kind not in KINDS or not isinstance(payload, list) or not all(isinstance(frame, bytes) for frame in payload):
        return None
    try:
        message = msgspec.msgpack.decode(packed(plain), type=KINDS[kind])
    except (msgspec.DecodeError, ValueError):
        return None
    if fence == RIGHT:
        key: Any = peer
        if isinstance(message, Samples | Eos | Sent | Mark):
            key = (peer, message.stream, message.partition)
        fence = fences.get(key, 0)
    if isinstance(message, Samples) and not payload:
        payload = [bytes(4 * min(sum(lengths_of(message)), 1 << 16))]
    numbers = [RUN if run == RIGHT else run, EPOCH if epoch == RIGHT else epoch, fence]
    run, epoch, fence = (number % wire.MAX_FENCE for number in numbers)
    try:
        frames = wire.encode(Envelope(run=run, epoch=epoch, fence=fence, message=message, payload=tuple(payload)))
        return side % 2, peer, wire.decode(frames)
    except WireError:
        return None


def lengths_of(message: Samples) -> list[int]:
    whole = message.lengths_u32[: len(message.lengths_u32) // 4 * 4]
    return list(map(int, np.frombuffer(whole, "<u4")))


def chunk_message(stream: str, partition: int, base_seq: int, lengths: list[int], **more: Any) -> Envelope:
    """Samples as a producer sends them."""
    message = message_of((stream, partition), base_seq, lengths, cursor=(base_seq + len(lengths), 0, 0), **more)
    return Envelope(run=RUN, epoch=EPOCH, fence=0, message=message, payload=(bytes(4 * sum(lengths)),))


def chunk_event(key: tuple[str, int], base_seq: int, lengths: list[int], **more: Any) -> Chunk:
    """The same samples, as a producer hands them to its session."""
    envelope = chunk_message(*key, base_seq, lengths)
    assert isinstance(envelope.message, Samples)
    of = {"session": (0, 0), "num_bytes": 4 * sum(lengths), "payload": envelope.payload, "base_seq": 0, **more}
    return chunk_as(Chunk, envelope.message, **of)


# Honest peers


class Honest:
    """Two producers and a rank in front of a stage, to the end of feed ``train``: what each has heard and said."""

    def __init__(self) -> None:
        self.stage = Stage()
        self.said: list[list[Any]] = []
        offers = [Offer(stream=name, source_digest="data") for name in ("a", "b")]
        self.producers = {
            b"%d" % n: ProducerSession(run=0, producer=f"producer{n}", host="host", pid=n, offers=offers)
            for n in (0, 1)
        }
        self.client = ClientSession(run=0, feed="train", reader="reader", host="host", pid=1, mesh=Mesh(), prefetch=1)
        self.steps: list[Deliver] = []
        self._heard = dict.fromkeys([*self.producers, b"2"], 0)
        self._ended = False

    def play(self) -> None:
        """All that happens."""
        for _ in range(400):
            self.stage.tick(0.5)
            self.said.append(["t", 0.5])
            for peer, producer in list(self.producers.items()):
                self._produce(peer, producer, Tick(self.stage.now))
            self._read(Tick(self.stage.now))
            for peer, heard in self._heard.items():
                news = self.stage.told.get(peer, [])[heard:]
                self._heard[peer] += len(news)
                for envelope in news:
                    if peer in self.producers:
                        self._produce(peer, self.producers[peer], FromBroker(envelope))
                    elif peer == b"2":
                        self._read(FromBroker(envelope))
            if self._ended:
                self._read(Detach())
                return
        raise AssertionError("nothing moves")

    def _say(self, side: int, peer: bytes, envelope: Envelope) -> None:
        self.said.append(item(side, int(peer), envelope))
        self.stage.hear(side, peer, envelope)

    def _produce(self, peer: bytes, producer: ProducerSession, event: Event) -> None:
        for effect in producer.handle(event):
            if isinstance(effect, Send):
                self._say(0, peer, effect.envelope)
            elif isinstance(effect, Read):
                self._produce(peer, producer, chunk_of(effect))
            elif isinstance(effect, Finish):
                self.producers.pop(peer, None)

    def _read(self, event: Event) -> None:
        for effect in self.client.handle(event):
            if isinstance(effect, Send):
                self._say(1, b"2", effect.envelope)
            elif isinstance(effect, Deliver):
                self.steps.append(effect)
                self._read(Returned(len(self.steps)))
            elif isinstance(effect, Ended):
                self._ended = True


def chunk_of(read: Read) -> Chunk | EndOfPartition:
    """What is read for a lease: some chunks of ``LENGTHS``, and its end."""
    key, count = (read.lease.stream, read.lease.partition), len(LENGTHS)
    if read.seq >= 4 * count:
        return EndOfPartition(key, read.session)
    return chunk_event(key, read.seq, list(LENGTHS), session=read.session)


def change(token: int, ask: Any, at_step: int | None = None, feed: str = "train") -> Change:
    return Change(token, feed, ask, at_step, "fuzz")


__all__ = ["Drain", "Honest", "Message", "Stage", "change", "chunk_message", "item", "read_item"]
