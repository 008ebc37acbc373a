"""A pushing producer against a small honest broker: what it was told is safe is in the log, once and in order.

The network drops, repeats and reorders; the broker is killed and loses what it had not written; producers are killed
and begin anew, or are stopped and wake up after others. The model keeps the protocol's rules and nothing more: it is no
part of streampack.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack.core.model.snapshot import Cursor
from streampack.core.protocol.events import Effect, Event, FromBroker, Send, Tick
from streampack.core.protocol.message import Bye, Envelope, Message, Reject, Who
from streampack.core.protocol.producer_messages import (
    Done,
    Eos,
    Flow,
    Hello,
    Lease,
    Mark,
    ProducerPing,
    Revoke,
    Samples,
    Sent,
)
from streampack.core.sessions.producer_base import Chunk, Failed, Finish, Leave
from streampack.core.sessions.pushing.push_buffer import CHUNK_BYTES, PushBuffer, size_of
from streampack.core.sessions.pushing.push_session import EndBatch, EndPartition, Push, PushSession
from streampack.wire import frames as wire

RUN, STREAM, PARTITION = 7, "rollouts", 3
BUFFER = 3 * CHUNK_BYTES + 200
ME = 77
AHEAD, QUOTA = 8, 96
"""Samples and bytes that the model takes before its merge does."""


def chunk_of_ids(ids: list[int]) -> Chunk:
    """Samples of one token, its id, of 8 bytes."""
    column = np.ones(len(ids), "<u4").tobytes()
    return Chunk(
        stream=STREAM, partition=PARTITION, session=(0, 0), lengths_u32=column, crcs_u32=column, loss_tokens_u32=column,
        num_bytes=8 * len(ids), cursor=(0, 0, 0), rejected={},
        payload=(np.array(ids, "<i8").tobytes(),),
    )  # fmt: skip


@dataclass
class Log:
    """What survives: samples by number, marks (seq, batch), the end; ``safe`` records of it are written."""

    records: list[tuple[str, Any]] = field(default_factory=list)
    safe: int = 0

    def samples(self, upto: int | None = None) -> list[int]:
        return [i for kind, it in self.records[:upto] if kind == "samples" for i in it[0]]

    @property
    def cursor(self) -> Cursor | None:
        """Of the last chunk."""
        return next((it[1] for kind, it in reversed(self.records) if kind == "samples"), None)

    def marks(self, upto: int | None = None) -> list[tuple[int, int]]:
        return [mark for kind, mark in self.records[:upto] if kind == "mark"]

    def ended(self, upto: int | None = None) -> bool:
        return any(kind == "end" for kind, _ in self.records[:upto])


class ModelBroker:
    """One partition's broker: sessions, absolute credits, go-back-N, a log that is written later than it is told."""

    def __init__(self, log: Log, epoch: int, patient: bool) -> None:
        self.log, self.epoch, self.patient = log, epoch, patient
        self.owner = ""
        self.session = 0
        self.merged = len(log.samples())
        self.taken_bytes = 0

    @property
    def expected(self) -> int:
        return len(self.log.samples())

    def receive(self, envelope: Envelope) -> list[tuple[str, Envelope]]:
        """What it answers, and to whom; ``peer`` is the last to have said HELLO, as a socket's would be."""
        message = envelope.message
        if isinstance(message, Hello):
            return self._hello(message)
        if not self.owner or envelope.epoch < self.epoch:
            return [("", self._of(Who()))]
        if isinstance(message, Samples | Mark | Eos | Sent):
            if envelope.fence != self.session:
                return [self._to(Revoke(stream=STREAM, partition=PARTITION), envelope.fence)]
            return self._in_session(message, envelope)
        if isinstance(message, ProducerPing) and message.producer != self.owner:
            return [(message.producer, self._of(Who()))]
        return [self._flow()]

    def merge(self, count: int) -> list[tuple[str, Envelope]]:
        self.merged = min(self.merged + count, self.expected)
        return [self._flow()] if self.owner else []

    def sync(self, count: int) -> list[tuple[str, Envelope]]:
        self.log.safe = min(self.log.safe + count, len(self.log.records))
        return [self._flow()] if self.owner else []

    def _hello(self, hello: Hello) -> list[tuple[str, Envelope]]:
        (offer,) = hello.offers
        assert (offer.stream, offer.partition) == (STREAM, PARTITION)
        if hello.producer != self.owner:
            if self.patient and self.log.safe < len(self.log.records):
                return []
            self.owner = hello.producer
        return self._again()

    def _again(self) -> list[tuple[str, Envelope]]:
        self.session += 1
        self.taken_bytes = 0
        lease = Lease(
            stream=STREAM, partition=PARTITION, partitions=4, first_seq=self.expected, cursor=self.log.cursor, seed=0,
            passes=1, dtype="int32", overlong="error", poison="error", max_sample_tokens=100, max_chunk_bytes=1000,
        )  # fmt: skip
        return [self._to(lease, self.session), self._flow()]

    def _flow(self) -> tuple[str, Envelope]:
        safe = self.log.safe
        return self._to(
            Flow(
                stream=STREAM, partition=PARTITION, expected_seq=self.expected, grant_seq=self.merged + AHEAD,
                grant_bytes=self.grant_bytes, durable_seq=len(self.log.samples(safe)),
                durable_marks=len(self.log.marks(safe)), ended=self.log.ended(safe),
            ), self.session,
        )  # fmt: skip

    @property
    def grant_bytes(self) -> int:
        return self.taken_bytes + QUOTA - 8 * (self.expected - self.merged)

    def _in_session(self, message: Message, envelope: Envelope) -> list[tuple[str, Envelope]]:
        if isinstance(message, Samples):
            ids = np.frombuffer(envelope.payload[0], "<i8").tolist()
            stop = message.base_seq + len(ids)
            if stop <= self.expected:
                return [self._flow()]
            if message.base_seq > self.expected:
                return self._again()
            assert stop <= self.merged + AHEAD, "samples beyond the credits"
            assert self.taken_bytes + 8 * len(ids) <= self.grant_bytes, "bytes beyond the credits"
            self.taken_bytes += 8 * len(ids)
            assert message.base_seq == self.expected, "a chunk was cut"
            assert not self.log.ended()
            self.log.records.append(("samples", (ids, message.cursor)))
        elif isinstance(message, Mark):
            if message.seq > self.expected:
                return self._again()
            number = len(self.log.marks())
            assert message.number <= number
            if message.number == number:
                assert message.seq == self.expected, "samples of the next batch came before the end of this one"
                self.log.records.append(("mark", (message.seq, message.batch)))
        elif isinstance(message, Eos):
            if message.total > self.expected:
                return self._again()
            assert message.total == self.expected
            if not self.log.ended():
                self.log.records.append(("end", message.total))
        elif isinstance(message, Sent) and message.next_seq > self.expected:
            return self._again()
        return [self._flow()]

    def _of(self, message: Message, fence: int = 0) -> Envelope:
        return Envelope(run=RUN, epoch=self.epoch, fence=fence, message=message)

    def _to(self, message: Message, fence: int) -> tuple[str, Envelope]:
        return self.owner, self._of(message, fence)


class World:
    """A broker, the producer of today, what is on its way between them, and what every producer was promised."""

    def __init__(self, patient: bool = True) -> None:
        self.patient = patient
        self.broker = ModelBroker(Log(), 1, patient)
        self.up: list[Envelope] = []
        self.down: list[tuple[str, Envelope]] = []
        self.now, self.names, self.next_id = 0.0, 0, 0
        self.promised: dict[int, int] = {}
        """By sequence number, the id of what a producer was told is safe."""
        self.promised_marks: dict[int, tuple[int, int]] = {}
        self.pushed_by: dict[int, int] = {}
        """By id, the process."""
        self.ever: set[tuple[int, int]] = set()
        """(sequence number, id) that were ever in the log."""
        self.stopped: tuple[PushSession, dict[int, int], dict[int, tuple[int, int]]] | None = None
        """Another process, which neither hears nor says anything now."""
        self.begin()

    def begin(self) -> None:
        """A new process; what the one before had, and was not safe, is gone with it. What it sent may still come, but
        for its HELLO: a process that is gone takes no lease.
        """
        self.names += 1
        self.up = [envelope for envelope in self.up if not isinstance(envelope.message, Hello)]
        self.session = PushSession(
            run=0, producer=f"process {self.names}", process=self.names, host="host", pid=self.names,
            stream=STREAM, partition=PARTITION, buffer=PushBuffer(BUFFER),
        )  # fmt: skip
        self.pushed: dict[int, int] = {}
        self.marked: dict[int, tuple[int, int]] = {}
        self.ended = False
        self.tell(Tick(self.now))

    def swap(self) -> None:
        """The process is stopped, and another goes on, or begins."""
        stopped, self.stopped = self.stopped, (self.session, self.pushed, self.marked)
        if stopped is None:
            self.begin()
        else:
            self.session, self.pushed, self.marked = stopped

    def tell(self, event: Event) -> None:
        effects = self.session.handle(event)
        for effect in effects:
            if isinstance(effect, Send):
                self.up.append(wire.decode(wire.encode(effect.envelope)))
        self.check()
        if any(isinstance(effect, Finish) for effect in effects):
            me, first = self.session.process, self.session.first_seq
            assert first is not None
            assert any(seq >= first and self.pushed_by[number] != me for seq, number in self.ever), effects
            self.begin()

    def check(self) -> None:
        session = self.session
        assert session.buffer.num_bytes <= BUFFER
        if not session.begun:
            return
        for seq, number in self.pushed.items():
            if seq < session.buffer.durable_seq:
                self.promised[seq] = number
        for number, mark in self.marked.items():
            if all(each.number > number for each in session.buffer.marks):
                self.promised_marks[number] = mark
        safe = self.broker.log.samples(self.broker.log.safe)
        assert all(safe[seq] == number for seq, number in self.promised.items())
        marks = self.broker.log.marks(self.broker.log.safe)
        assert all(marks[number] == mark for number, mark in self.promised_marks.items())
        assert len(set(self.broker.log.samples())) == self.broker.expected, "a sample is in the log twice"

    def push(self, count: int) -> None:
        chunk = chunk_of_ids(list(range(self.next_id, self.next_id + count)))
        if self.ended or not self.session.room(size_of(chunk)):
            return
        for i in range(count):
            self.pushed[self.session.buffer.next_seq + i] = self.next_id + i
            self.pushed_by[self.next_id + i] = self.session.process
        self.next_id += count
        self.tell(Push(chunk))

    def mark(self) -> None:
        if self.session.begun and not self.ended and self.patient:
            self.marked[self.session.buffer.next_mark] = (self.session.buffer.next_seq, self.next_id)
            self.tell(EndBatch(self.next_id))

    def end(self) -> None:
        if self.session.begun and self.patient:
            self.ended = True
            self.tell(EndPartition())

    def deliver_up(self, at: int) -> None:
        if self.up:
            self.down += self.broker.receive(self.up.pop(self._which(at, len(self.up))))
            self.ever |= set(enumerate(self.broker.log.samples()))

    def deliver_down(self, at: int) -> None:
        if self.down:
            to, envelope = self.down.pop(self._which(at, len(self.down)))
            if to in ("", self.session.producer):
                self.tell(FromBroker(envelope))

    def _which(self, at: int, count: int) -> int:
        """The oldest, mostly."""
        return at // 8 % count if at % 8 == 0 else 0

    def crash(self, kept: int) -> None:
        """The broker is killed: of what is not safe some may have been written."""
        log = self.broker.log
        kept = log.safe + kept % (len(log.records) - log.safe + 1)
        self.broker = ModelBroker(Log(log.records[:kept], kept), self.broker.epoch + 1, self.patient)

    def step(self, action: str, at: int) -> None:
        """One thing happens, chosen by ``at`` where there are several."""
        if action == "push":
            self.push(1 + at % 5)
        elif action in ("mark", "end", "begin", "swap"):
            getattr(self, action)()
        elif action in ("deliver_up", "deliver_down", "crash"):
            getattr(self, action)(at)
        elif action in ("drop", "repeat"):
            way: list[Any] = self.up if at % 2 else self.down
            if way:
                way.append(way[at // 2 % len(way)]) if action == "repeat" else way.pop(at // 2 % len(way))
        elif action == "tick":
            self.now += 0.1 * (at % 16)
            self.tell(Tick(self.now))
        else:
            self.down += self.broker.merge(at % 8) if action == "merge" else self.broker.sync(at % 4)

    def settle(self) -> None:
        """Faults stop; everything must come to be safe."""
        for _ in range(60):
            self.now += 0.5
            self.tell(Tick(self.now))
            while self.up or self.down:
                self.deliver_up(0)
                self.deliver_down(0)
            self.down += [*self.broker.merge(1000), *self.broker.sync(1000)]
            if self.session.begun and self.session.flushed:
                return
        raise AssertionError(f"not safe after 30 s without faults: {self.session.waiting_for()}")


WEIGHTS = {
    "push": 40, "mark": 8, "deliver_up": 120, "deliver_down": 120, "drop": 6, "repeat": 6, "tick": 40, "merge": 30,
    "sync": 30, "crash": 2, "begin": 2,
}  # fmt: skip


def faulty(world: World, seed: int, weights: dict[str, int]) -> None:
    """1000 things happen, drawn by ``seed``: hypothesis draws short lists, which seldom get anywhere."""
    drawn = Random(seed)
    for action in drawn.choices(list(weights), list(weights.values()), k=1000):
        world.step(action, drawn.randrange(1 << 16))


@settings(max_examples=60)
@given(seed=st.integers(0, 1 << 32), end=st.booleans())
def test_samples_said_to_be_safe_are_in_the_log_once_and_in_order(seed: int, end: bool) -> None:
    world = World()
    faulty(world, seed, WEIGHTS)
    world.settle()
    world.push(2)
    if end:
        world.end()
    world.settle()
    log = world.broker.log
    assert log.samples()[world.session.buffer.next_seq - len(world.pushed) :] == list(world.pushed.values())
    assert log.ended() == end
    assert world.session.buffer.num_bytes == 0
    assert set(world.pushed) <= set(world.promised)
    assert set(world.marked) <= set(world.promised_marks)


@settings(max_examples=50)
@given(seed=st.integers(0, 1 << 32))
def test_a_process_takes_over_while_samples_of_the_one_before_are_not_safe(seed: int) -> None:
    """A broker that leases at once what it may still lose; and processes that are stopped while another pushes, and
    wake up: their samples are neither lost nor taken for the other's without an error.
    """
    world = World(patient=False)
    faulty(world, seed, WEIGHTS | {"swap": 3})
    world.settle()
    world.push(2)
    world.settle()
    assert set(world.pushed) <= set(world.promised)


@given(counts=st.lists(st.integers(1, 5), min_size=1, max_size=30))
def test_a_fast_network_needs_no_time(counts: list[int]) -> None:
    """Samples are safe as fast as messages go: no timer is waited for but that of the first HELLO."""
    world = World()
    for count in counts:
        for _ in range(10):
            while world.up or world.down:
                world.deliver_up(0)
                world.deliver_down(0)
            world.down += [*world.broker.merge(1000), *world.broker.sync(1000)]
        world.push(count)
        world.mark()
    assert world.now == 0.0
    assert len(world.pushed) == sum(counts)


# Cases


class Bench:
    """A session told things by hand; ``said`` is what it sent since it was last looked at."""

    def __init__(self) -> None:
        self.session = PushSession(
            run=0,
            producer="me",
            process=ME,
            host="host",
            pid=1,
            stream=STREAM,
            partition=PARTITION,
            buffer=PushBuffer(BUFFER),
        )
        self.effects: list[Effect] = self.session.handle(Tick(0.0))

    def hear(self, message: Message, fence: int = 0, epoch: int = 1) -> None:
        envelope = Envelope(run=RUN, epoch=epoch, fence=fence, message=message)
        self.effects += self.session.handle(FromBroker(envelope))

    def do(self, *events: Event) -> None:
        for event in events:
            self.effects += self.session.handle(event)

    def lease(self, first_seq: int, session: int, epoch: int = 1, by: int = ME, **flow: Any) -> None:
        lease = Lease(
            stream=STREAM, partition=PARTITION, partitions=4, first_seq=first_seq, cursor=(by, 0, first_seq), seed=0,
            passes=1, dtype="int32", overlong="error", poison="error", max_sample_tokens=100, max_chunk_bytes=1000,
        )  # fmt: skip
        self.hear(lease, session, epoch)
        self.flow(session, epoch, **{"expected_seq": first_seq, "durable_seq": first_seq} | flow)

    def flow(self, session: int, epoch: int = 1, **changes: Any) -> None:
        terms: dict[str, Any] = {
            "stream": STREAM, "partition": PARTITION, "expected_seq": 0, "grant_seq": 1000, "grant_bytes": 10_000,
            "durable_seq": 0,
        }  # fmt: skip
        self.hear(Flow(**terms | changes), session, epoch)

    @property
    def said(self) -> list[Message]:
        said = [effect.envelope.message for effect in self.effects if isinstance(effect, Send)]
        self.effects.clear()
        return said

    @property
    def error(self) -> Finish:
        (finish,) = [effect for effect in self.effects if isinstance(effect, Finish)]
        return finish


@pytest.fixture
def bench() -> Bench:
    """One that has pushed samples 10 to 14, of which 10 and 11 are safe."""
    bench = Bench()
    bench.lease(10, 1)
    bench.do(Push(chunk_of_ids([0, 1])), Push(chunk_of_ids([2])), Push(chunk_of_ids([3, 4])))
    bench.flow(1, expected_seq=15, durable_seq=12)
    assert [m.base_seq for m in bench.said if isinstance(m, Samples)] == [10, 12, 13]
    assert bench.session.buffer.num_bytes == size_of(chunk_of_ids([0])) + size_of(chunk_of_ids([0, 0]))
    return bench


def bases(said: list[Message]) -> list[int]:
    return [message.base_seq for message in said if isinstance(message, Samples)]


def test_a_process_says_who_it_is_and_which_partition_it_pushes_to() -> None:
    (hello, ping) = Bench().said
    assert isinstance(hello, Hello)
    assert [(offer.stream, offer.partition) for offer in hello.offers] == [(STREAM, PARTITION)]
    assert isinstance(ping, ProducerPing)


def test_samples_are_numbered_once_all_earlier_ones_are_safe() -> None:
    bench = Bench()
    bench.lease(10, 1, durable_seq=8)
    assert not bench.session.begun
    assert not bench.session.room(1)
    bench.lease(8, 1, epoch=2, durable_seq=8, durable_marks=2)
    assert bench.session.buffer.next_seq == 8
    bench.do(EndBatch(5))
    (mark,) = [message for message in bench.said if isinstance(message, Mark)]
    assert (mark.number, mark.seq, mark.batch) == (2, 8, 5)


def test_a_new_session_sends_again_what_the_broker_has_not(bench: Bench) -> None:
    bench.lease(13, 2, durable_seq=12)
    assert bases(bench.said) == [13]


def test_a_broker_that_lost_what_was_not_safe_gets_it_again(bench: Bench) -> None:
    bench.do(EndBatch(1))
    bench.lease(12, 1, epoch=2)
    said = bench.said
    assert bases(said) == [12, 13]
    assert isinstance(said[-1], Mark), "what else it may not know is said at once"


def test_a_broker_that_lost_what_was_safe_is_an_error(bench: Bench) -> None:
    bench.lease(10, 1, epoch=2)
    assert bench.error.code == "sequence"
    assert bench.error.error == (
        "stream 'rollouts' partition 3: the broker asks for sample 10, but its log already had all samples before 12. "
        "The log was lost or replaced. Restore the broker's state_dir, or start a new run."
    )


@pytest.mark.parametrize("where", ["lease", "expected", "durable", "marks", "cursor"])
def test_a_broker_that_has_more_than_was_pushed_is_an_error(where: str, bench: Bench) -> None:
    if where == "lease":
        bench.lease(16, 2)
    elif where == "cursor":
        bench.lease(13, 2, by=ME + 1)
    elif where == "expected":
        bench.flow(1, expected_seq=16, durable_seq=12)
    elif where == "durable":
        bench.flow(1, expected_seq=15, durable_seq=16)
    else:
        bench.flow(1, expected_seq=15, durable_seq=12, durable_marks=1)
    assert bench.error.code == "sequence"
    assert (
        "Another process pushes to the same partition. Give each process a partition of its own." in bench.error.error
    )


def test_samples_behind_a_mark_wait_until_it_is_safe(bench: Bench) -> None:
    bench.do(EndBatch(1), Push(chunk_of_ids([5])), EndBatch(2), Push(chunk_of_ids([6])))
    (mark,) = bench.said
    assert isinstance(mark, Mark)
    assert (mark.number, mark.seq) == (0, 15)
    bench.flow(1, expected_seq=15, durable_seq=15)
    assert bench.said == []
    assert bench.session.waiting_for() == "the broker's log to store the end of batch 1"
    bench.flow(1, expected_seq=15, durable_seq=15, durable_marks=1)
    said = bench.said
    assert bases(said) == [15]
    assert isinstance(said[-1], Mark)
    assert (said[-1].number, said[-1].seq) == (1, 16)


def test_a_mark_and_an_end_are_said_until_they_are_known(bench: Bench) -> None:
    bench.do(EndBatch(1), EndPartition(), Tick(1.0), Tick(2.0))
    assert sum(isinstance(message, Mark) for message in bench.said) == 3
    bench.flow(1, expected_seq=15, durable_seq=15, durable_marks=1)
    bench.do(Tick(3.0))
    ends = [message for message in bench.said if isinstance(message, Eos)]
    assert [end.total for end in ends] == [15, 15]
    before = bench.session.flushed
    bench.flow(1, expected_seq=15, durable_seq=15, durable_marks=1, ended=True)
    bench.do(Tick(4.0))
    assert (before, bench.session.flushed) == (False, True)
    assert not any(isinstance(message, Eos) for message in bench.said)


def test_samples_that_were_sent_and_did_not_come_are_asked_for(bench: Bench) -> None:
    bench.do(Push(chunk_of_ids([5])), Tick(1.0), Tick(2.0))
    (sent,) = [message for message in bench.said if isinstance(message, Sent)]
    assert sent.next_seq == 16


def test_credits_are_those_of_the_session() -> None:
    bench = Bench()
    bench.lease(0, 1, grant_seq=2, grant_bytes=100)
    bench.do(*[Push(chunk_of_ids([i])) for i in range(3)])
    assert bases(bench.said) == [0, 1]
    assert "credit" in bench.session.waiting_for()
    bench.flow(1, expected_seq=2, grant_seq=3, grant_bytes=20)
    assert bases(bench.said) == [2], "credits never shrink"
    bench.lease(2, 2, durable_seq=2, grant_seq=9, grant_bytes=7)
    assert bases(bench.said) == [], "bytes count anew in a session"
    bench.flow(2, expected_seq=2, durable_seq=2, grant_seq=9, grant_bytes=8)
    assert bases(bench.said) == [2]


def test_messages_of_others_and_of_the_past_change_nothing(bench: Bench) -> None:
    bench.lease(12, 3, epoch=2)
    before = bench.said
    assert bases(before) == [12, 13]
    bench.lease(13, 9, epoch=1)
    bench.lease(12, 2, epoch=2)
    bench.flow(2, epoch=2, expected_seq=40, durable_seq=40)
    bench.hear(Revoke(stream=STREAM, partition=PARTITION), 2, 2)
    other = Flow(stream=STREAM, partition=PARTITION + 1, expected_seq=99, grant_seq=99, grant_bytes=99, durable_seq=99)
    bench.hear(other, 3, 2)
    bench.effects += bench.session.handle(
        FromBroker(Envelope(run=RUN + 1, epoch=9, fence=0, message=Reject(code="x", detail="of another run")))
    )
    assert bench.effects == []
    assert bench.session.buffer.durable_seq == 12


def test_a_broker_that_stops_is_waited_for(bench: Bench) -> None:
    bench.hear(Bye(reason="the broker is stopping"))
    assert [type(message) for message in bench.said] == [Bye]
    bench.do(Tick(1.0))
    assert isinstance(bench.said[0], Hello)
    assert "stopping" in bench.session.waiting_for()
    bench.lease(12, 1, epoch=2)
    assert bases(bench.said) == [12, 13]
    assert "stopping" not in bench.session.waiting_for()


@pytest.mark.parametrize("how", ["done", "flow"])
def test_a_feed_that_wants_no_more_is_an_error_where_samples_are_left(how: str, bench: Bench) -> None:
    if how == "done":
        bench.hear(Done())
    else:
        bench.flow(1, expected_seq=15, durable_seq=12, ended=True)
    assert bench.error.code == "ended"
    assert not bench.session.flushed


def test_a_process_that_is_started_after_the_end_learns_it_and_the_next_number() -> None:
    bench = Bench()
    bench.lease(7, 1, ended=True)
    session = bench.session
    assert (session.begun, session.ended, session.buffer.next_seq) == (True, True, 7)
    bench.do(EndPartition(), Tick(1.0))
    assert session.flushed, "it has ended"
    assert not any(isinstance(effect, Finish) for effect in bench.effects)
    assert not any(isinstance(message, Eos) for message in bench.said)
    bench.do(Push(chunk_of_ids([5])))
    assert (bench.error.code, session.buffer.next_seq) == ("ended", 7)


def test_a_feed_that_wants_no_more_is_no_error_where_all_samples_are_safe(bench: Bench) -> None:
    bench.flow(1, expected_seq=15, durable_seq=15)
    bench.hear(Done())
    assert (bench.error.error, bench.error.code) == ("", "ended")
    assert bench.session.ended


def test_a_feed_that_goes_back_takes_samples_again(bench: Bench) -> None:
    bench.flow(1, expected_seq=15, durable_seq=15, ended=True)
    ended = [bench.session.ended]
    bench.lease(15, 2)
    bench.do(Push(chunk_of_ids([5])))
    assert [*ended, bench.session.ended] == [True, False]
    assert bases(bench.said) == [15]


def test_a_refusal_is_the_brokers_own_words(bench: Bench) -> None:
    bench.hear(Reject(code="malformed", detail="got a bad chunk"))
    assert (bench.error.code, bench.error.error) == ("malformed", "got a bad chunk")


def test_a_lost_lease_is_asked_for_again(bench: Bench) -> None:
    bench.hear(Revoke(stream=STREAM, partition=PARTITION), 1)
    bench.do(Push(chunk_of_ids([5])))
    assert bench.said == []
    assert "which another process holds" in bench.session.waiting_for()
    bench.do(Tick(1.0))
    assert any(isinstance(message, Hello) for message in bench.said)
    bench.do(Tick(1.6))
    bench.hear(Who())
    assert any(isinstance(message, Hello) for message in bench.said)
    bench.lease(15, 2, durable_seq=12)
    assert bases(bench.said) == [15]


def test_a_session_says_goodbye_and_why_it_failed(bench: Bench) -> None:
    bench.do(Failed("ValueError('no')"), Leave(), Tick(9.0))
    ping, bye = bench.said
    assert isinstance(ping, ProducerPing)
    assert ping.failure == "ValueError('no')"
    assert isinstance(bye, Bye)


def test_an_empty_buffer_takes_what_is_larger_than_it() -> None:
    bench = Bench()
    bench.lease(0, 1, grant_seq=0)
    large = chunk_of_ids(list(range(1000)))
    assert size_of(large) > BUFFER
    assert bench.session.room(size_of(large))
    bench.do(Push(large))
    assert not bench.session.room(1)
