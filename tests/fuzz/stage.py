"""A broker as its shell runs it, in one thread and without sockets: a real arena, a log in memory, two feeds.

Honest producers and a client, in front of it, show what is said in a run; whoever is hostile says something like it.
What a message names of the run, its broker and its session is filled in as whoever sends it has heard it, where it
says -1: nothing that is refused at once would find much.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from streampack_services.broker.arena import SLACK, Arena

from streampack.core.broker import Broker
from streampack.core.journal.journal import Journal
from streampack.core.journal.log_effects import Append, Cut, Recall, Recalled, Safe, WasCut
from streampack.core.model.capacity import Capacity, FeedPlan, wanted_tokens
from streampack.core.model.fields import Field
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Batch, Rules, StreamRules
from streampack.core.protocol.effects import (
    Answer,
    Change,
    Drain,
    Form,
    Formed,
    FromProducer,
    FromTrainer,
    Release,
    SendProducer,
    SendShard,
    SendTrainer,
    Store,
)
from streampack.core.protocol.events import Effect, Event, FromBroker, Report, Send, Tick
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
from tests.simulation.disk import Disk

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
EXACT = msgspec.structs.replace


class Stage:
    """The broker and its shell; ``said`` is what it sent, by peer."""

    def __init__(self, feeds: Mapping[str, Rules] = FEEDS) -> None:
        self._plans = [
            FeedPlan(name, rules, wanted_tokens(rules, LONGEST), max_readers=MOST_PEERS)
            for name, rules in feeds.items()
        ]
        partitions = sum(stream.partitions for plan in self._plans for stream in plan.rules.streams)
        self.tokens = sum(plan.merged_tokens for plan in self._plans) + QUOTA * partitions
        self.disk, self.now, self.epoch = Disk(), 0.0, EPOCH - 1
        self.said: dict[bytes, list[Envelope]] = {}
        self.told: dict[Any, int] = {}
        """Fences, by peer and partition."""
        self.start()

    def start(self) -> None:
        """A broker with what the log holds, in the place of the one before: that was killed, if there was one."""
        self.epoch += 1
        rules = self._plans[0].rules
        size = (int(self.tokens * SLACK / LONGEST) + 4) * LONGEST * rules.token_bytes
        self.arena = Arena(size, "int32", LONGEST, rules.fields)
        self.core = Broker(
            run=RUN, epoch=self.epoch, feeds=self._plans, capacity=Capacity(QUOTA, LONGEST, 4 * LONGEST, MOST_PEERS),
            steps_ahead=2, journal=Journal(keeps=True), run_name="fuzz",
        )  # fmt: skip
        for lsn in range(self.first_lsn, len(self.disk.records)):
            self.core.recover(lsn, self.disk.decode(lsn)[0])
        self.core.journal.next_lsn = self.core.journal.safe_upto = len(self.disk.records)
        self._events: deque[Event] = deque()
        self.said.clear()
        self.told.clear()
        self._perform_all(self.core.begin())
        self.tick(0.0)

    first_lsn = 0
    """Records below this number were deleted."""

    def handle(self, event: Event) -> None:
        """One event, and all that follows from it."""
        self._perform_all(self.core.handle(event))
        while self.core.journal.safe_upto < len(self.disk.records):
            self._perform_all(self.core.handle(Safe(len(self.disk.records))))

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

    def _perform_all(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._perform(effect)
        while self._events:
            for effect in self.core.handle(self._events.popleft()):
                self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Store):
            self.arena.store(effect.handles, effect.offsets, effect.lengths, effect.rows, effect.payload)
        elif isinstance(effect, Release):
            self.arena.release(effect.handles)
        elif isinstance(effect, SendShard):
            payload = self.arena.gather(effect.contents, effect.frames, effect.cp, effect.cp_ranks, effect.layout)
            self._send(effect.peer, EXACT(effect.envelope, payload=payload))
        elif isinstance(effect, SendProducer | SendTrainer):
            self._send(effect.peer, effect.envelope)
        elif isinstance(effect, Append):
            self.disk.append(effect.record, effect.payload)
        elif isinstance(effect, Recall):
            self._events.append(Recalled(effect.feed, effect.lsn, *self.disk.decode(effect.lsn)))
        elif isinstance(effect, Cut):
            self.first_lsn = effect.lsn
            self._events.append(WasCut(effect.lsn))
        elif isinstance(effect, Form):
            self._events.append(Formed(effect.feed, effect.request.choose(), effect.request))
        else:
            assert isinstance(effect, Report | Answer), effect

    def _send(self, peer: bytes, envelope: Envelope) -> None:
        heard = wire.decode(wire.encode(envelope))  # what it says fits into what its type declares
        if (relay := relay_of(peer)) is not None:  # it fits into a bundle, as the service sends it
            bundles.encode_bundle([(relay[1], envelope)])
        self.said.setdefault(peer, []).append(heard)
        message = heard.message
        if isinstance(message, Lease):
            self.told[peer, message.stream, message.partition] = heard.fence
        elif isinstance(message, Attached):
            self.told[peer] = heard.fence


# Inputs: lists of things that happen


def item(side: int, peer: int, envelope: Envelope) -> list[Any]:
    """A message as part of an input: what it names of the run is filled in when it is sent."""
    plain = msgspec.to_builtins(envelope.message, builtin_types=(bytes,))
    payload = [bytes(memoryview(frame)) for frame in envelope.payload]
    return ["m", side, peer, envelope.message.TYPE, RIGHT, RIGHT, RIGHT, plain, payload]


def read_item(given: Any, told: dict[Any, int]) -> tuple[int, bytes, Envelope] | None:
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
        fence = told.get(key, 0)
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
    column = np.array(lengths, np.int64)
    message = Samples(
        stream=stream, partition=partition, base_seq=base_seq, lengths_u32=column.astype("<u4").tobytes(),
        crcs_u32=np.arange(len(lengths), dtype="<u4").tobytes(),
        loss_tokens_u32=np.maximum(column - 1, 0).astype("<u4").tobytes(), cursor=(base_seq + len(lengths), 0, 0),
        rejected={"empty": lengths.count(0)} if 0 in lengths else {}, **more,
    )  # fmt: skip
    return Envelope(run=RUN, epoch=EPOCH, fence=0, message=message, payload=(bytes(4 * sum(lengths)),))


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
                news = self.stage.said.get(peer, [])[heard:]
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
    envelope = chunk_message(*key, read.seq, list(LENGTHS))
    message = envelope.message
    assert isinstance(message, Samples)
    return Chunk(
        stream=key[0], partition=key[1], session=read.session, lengths_u32=message.lengths_u32,
        crcs_u32=message.crcs_u32,
        loss_tokens_u32=message.loss_tokens_u32, num_bytes=4 * sum(LENGTHS), cursor=message.cursor,
        rejected=message.rejected, payload=envelope.payload,
    )  # fmt: skip


def change(token: int, ask: Any, at_step: int | None = None, feed: str = "train") -> Change:
    return Change(token, feed, ask, at_step, "fuzz")


__all__ = ["Drain", "Honest", "Message", "Stage", "change", "chunk_message", "item", "read_item"]
