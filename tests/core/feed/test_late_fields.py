"""Late fields: every sample is admitted once, with the values that were given to it, in the order of completion."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from streampack.core.journal.log_records import (
    BatchMarked,
    ChunkCompleted,
    ChunkStaged,
    EndStaged,
    LineageBegan,
    SamplesAmended,
    SamplesRejected,
    StepFormed,
    StreamFacts,
)
from streampack.core.model.fields import Field
from streampack.core.model.rules import Batch
from streampack.core.model.samples import ROW, index_of
from streampack.core.protocol.events import Event, FromBroker, Tick
from streampack.core.protocol.producer_messages import Amend, Amended
from streampack.core.sessions.producer_base import Leave
from streampack.core.sessions.pushing.amend_session import AmendSession, GiveValues
from streampack.core.sessions.pushing.push_buffer import PushBuffer, size_of
from streampack.core.sessions.pushing.push_session import EndBatch, EndPartition, Push, PushSession
from tests.core.feed import test_going_back as rollouts
from tests.core.feed.test_going_back import PARTITIONS, Rollouts, Unsafe, chunk_of, length_of
from tests.core.planned import tokens_of

FIELDS: tuple[Field, ...] = (
    Field(name="logprobs", dtype="float32", align="target"),
    Field(name="advantages", dtype="float32", align="target", late=True),
    Field(name="reward", dtype="float64", axis="sample", late=True),
)
NAMES = ("advantages", "reward")
MARK = 5
"""Samples of a partition between two marks."""


@functools.cache
def value_of(name: str, partition: int, seq: int) -> bytes:
    """The value of a field of a sample, as it is stored."""
    draw = np.random.default_rng([len(name), partition, seq])
    if name == "reward":
        return draw.normal(size=1).astype("<f8").tobytes()
    return draw.normal(size=length_of(partition, seq)).astype("<f4").tobytes()


class Late(Unsafe):
    """Programs that push, and two that give values to samples that are safe, in any order and again and again."""

    def __init__(self, seed: int, *, discards: bool = False, groups: bool = False, **more: Any) -> None:
        before = rollouts.RULES
        self.groups = groups
        rollouts.RULES = msgspec.structs.replace(before, fields=FIELDS, **more)
        self.amenders: list[AmendSession] = []
        self.left: dict[tuple[int, int], set[str]] = {}
        """Values that each sample has not got yet; a value that was sent may get lost, and is repeated."""
        self.marks = rollouts.RULES.batch is not None
        self.answers_to_amends: list[Amended] = []
        self.not_stored: dict[tuple[int, int], str] = {}
        """The reason of each sample that some answer named."""
        try:
            super().__init__(seed, discards=discards, quota=192)
        finally:
            rollouts.RULES = before

    def start_producer(self, streams: list[str]) -> bytes:
        for number in range(2):
            session = AmendSession(run=0, producer=f"amender{number}", host="host", pid=9, stream="rollouts")
            self.amenders.append(session)
            self.producers[b"amend%d" % number] = session  # type: ignore[assignment]
            self._to_producer(b"amend%d" % number, Tick(self.now))
        return super().start_producer(streams)

    def turn(self) -> None:
        partition = self.rng.randrange(PARTITIONS)
        session, peer = self.pushers[partition], b"push%d" % partition
        first = session.buffer.next_seq
        if session.begun and self.marks and session.buffer.next_mark < first // MARK:
            self._to_producer(peer, EndBatch(session.buffer.next_mark))
        elif session.begun and first < self.wanted:
            stop = min(first + self.rng.randint(1, 3), self.wanted, first - first % MARK + MARK)
            chunk = late_chunk(partition, first, stop)
            if self.groups and first % 2 and chunk.num_bytes <= 12 * self.rules.budget:
                chunk = msgspec.structs.replace(chunk, keep="pack")
            if session.room(size_of(chunk)):
                self._to_producer(peer, Push(chunk))
                self.left |= {(partition, seq): set(NAMES) for seq in range(first, stop)}
        elif session.begun and self.over and not session.end_requested:
            self._to_producer(peer, EndPartition())
        if self.rng.random() < (0.3 if not self.over else 0.8):
            self.amend()
        super(Rollouts, self).turn()

    def _to_producer(self, peer: bytes, event: Event) -> None:
        """Check an answer to an amender against the log, before the session takes it."""
        session: Any = self.producers.get(peer)
        answer = event.envelope.message if isinstance(event, FromBroker) else None
        if isinstance(session, AmendSession) and isinstance(answer, Amended) and answer.number in session.open:
            self.answers_to_amends.append(answer)
            self._check_answer(session.open[answer.number].message, answer)
        super()._to_producer(peer, event)

    def _check_answer(self, given: Amend, answer: Amended) -> None:
        """The log has every value that was not refused; a sample that was refused was dropped."""
        for reason, seqs in (getattr(answer, "refused", None) or {}).items():
            assert reason in ("late_timeout", "discarded"), reason
            self.not_stored |= {(given.partition, seq): reason for seq in np.frombuffer(seqs, "<u8").tolist()}
        missing = {
            (seq, name) for seq in np.frombuffer(given.seqs_u64, "<u8").tolist() for name in given.names
            if (given.partition, seq) not in self.not_stored
        }  # fmt: skip
        for record in reversed(self.records()):
            if not missing:
                return
            if isinstance(record, SamplesAmended) and record.partition == given.partition:
                missing -= {
                    (seq, name) for seq in np.frombuffer(record.seqs_u64, "<u8").tolist() for name in record.names
                }
        assert not missing, f"{missing} are not in the log, and the answer is: {answer}"

    def amend(self) -> None:
        """Give values to some samples of a partition; sometimes such as they have already."""
        number, partition = self.rng.randrange(2), self.rng.randrange(PARTITIONS)
        session, durable = self.amenders[number], self.pushers[partition].buffer.durable_seq
        mine = [seq for p, seq in self.left if p == partition and seq < durable + 2 and self.left[p, seq]]
        if self.rng.random() < 0.1:
            mine = list(range(min(durable, self.wanted)))
        if not mine or not session.terms:
            return
        seqs = self.rng.sample(mine, min(len(mine), self.rng.randint(1, 4)))
        names = self.rng.choice([NAMES, NAMES[:1], NAMES[1:], NAMES[::-1]])
        given = amend_of(partition, seqs, names, session.open.take_number())
        self._to_producer(b"amend%d" % number, given)
        for seq in seqs:
            self.left[partition, seq] -= set(names)


def late_chunk(partition: int, first: int, stop: int) -> Any:
    chunk = chunk_of(partition, first, stop)
    tokens = [tokens_of("rollouts", partition, seq, length_of(partition, seq)) for seq in range(first, stop)]
    logprobs = [value_of("logprobs", partition, seq) for seq in range(first, stop)]
    crcs = np.array([crc32c(values, crc32c(ids)) for ids, values in zip(tokens, logprobs, strict=True)], "<u4")
    return msgspec.structs.replace(
        chunk, payload=(b"".join(tokens), b"".join(logprobs)), crcs_u32=crcs.tobytes(), num_bytes=3 * chunk.num_bytes,
        cursor=(partition + 1, 0, stop),
    )  # fmt: skip


def amend_of(partition: int, seqs: list[int], names: tuple[str, ...], number: int, process: int = 0) -> GiveValues:
    columns = [[value_of(name, partition, seq) for seq in seqs] for name in names]
    lengths = np.array([length_of(partition, seq) for seq in seqs], "<u4").tobytes()
    message = Amend(
        stream="rollouts", partition=partition, number=number, process=process or partition + 1,
        seqs_u64=np.array(seqs, "<u8").tobytes(), names=names,
        crcs_u32=np.array([[crc32c(value) for value in column] for column in columns], "<u4").tobytes(),
        lengths_u32=lengths if "advantages" in names else UNSET,
    )  # fmt: skip
    return GiveValues(message, tuple(b"".join(column) for column in columns))


def check(live: Late) -> None:
    """Every sample is in the log once, complete; steps have those that were not dropped, each once."""
    sent: dict[int, list[int]] = {p: [] for p in range(PARTITIONS)}
    admitted: dict[int, list[int]] = {p: [] for p in range(PARTITIONS)}
    empty, lost, steps = set[int](), set[int](), dict[int, list[int]]()
    came: list[tuple[int, set[int]]] = []
    batches: dict[int, list[int]] = {p: [] for p in range(PARTITIONS)}
    for lsn in range(len(live.disk.records)):
        record, payload = live.disk.decode(lsn)
        if isinstance(record, ChunkStaged):
            assert record.base_seq == len(sent[record.partition])
            sent[record.partition] += range(record.base_seq, record.base_seq + len(record.lengths_u32) // 4)
        elif isinstance(record, ChunkCompleted):
            p, seqs = record.partition, np.frombuffer(record.sent_u64, "<u8").tolist()
            assert record.base_seq == len(admitted[p])
            lengths = np.frombuffer(record.lengths_u32, "<u4").tolist()
            assert len(seqs) == len(lengths)
            if any(lengths):
                assert lengths == [length_of(p, seq) for seq in seqs]
                assert bytes(payload[0]) == b"".join(tokens_of("rollouts", p, s, length_of(p, s)) for s in seqs)
                for name, frame in zip(("logprobs", *NAMES), payload[1:], strict=True):
                    assert bytes(frame) == b"".join(value_of(name, p, seq) for seq in seqs), "the values of another"
            indices = set(np.asarray(index_of(record.base_seq + np.arange(len(seqs)), p, PARTITIONS)).tolist())
            empty |= set() if any(lengths) else indices
            admitted[p] += seqs
            came.append((lsn, indices))
        elif isinstance(record, BatchMarked):
            batches[record.partition].append(record.seq)
            assert set(admitted[record.partition]) == set(range(MARK * (record.number + 1))), "of another batch"
        elif isinstance(record, LineageBegan):
            assert record.since is not None
            lost |= {i for at, indices in came if at >= record.since for i in indices}
            steps = {step: indices for step, indices in steps.items() if step < record.step}
        elif isinstance(record, SamplesRejected):
            assert set(record.reasons) <= {"discarded", "late_timeout"}
        elif isinstance(record, StepFormed):
            steps[record.step] = np.frombuffer(record.rows, ROW)["index"].tolist()
    packed = Counter(index for indices in steps.values() for index in indices)
    for p in range(PARTITIONS):
        assert sorted(admitted[p]) == sent[p] == list(range(live.wanted)), "lost, or twice"
    assert set(packed.values()) <= {1}
    assert set(packed) == set(range(PARTITIONS * live.wanted)) - empty - lost


def run(live: Late, story: list[tuple[str, int]]) -> Late:
    for what, n in [("push", 12), *story]:
        rollouts.do(live, "back" if what == "torn" else what, n)
    live.over = True
    live.finish()
    return live


@given(rollouts.moves(), st.integers(0, 999), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=80)
def test_each_sample_is_admitted_once_with_its_values(
    story: list[tuple[str, int]], seed: int, discards: bool, groups: bool
) -> None:
    live = run(Late(seed, discards=discards, groups=groups), story)
    check(live)
    assert not any(answer.refusal for answer in live.answers_to_amends)


@given(rollouts.moves(), st.integers(0, 999), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=80)
def test_values_that_come_too_late_are_refused_by_sample(
    story: list[tuple[str, int]], seed: int, discards: bool, groups: bool
) -> None:
    live = run(Late(seed, discards=discards, groups=groups, late_timeout_s=1), story)
    check(live)
    dropped = {
        (record.partition, seq) for record in live.records() if isinstance(record, ChunkCompleted) and record.rejected
        for seq in np.frombuffer(record.sent_u64, "<u8").tolist()
    }  # fmt: skip
    late = {sample for sample, reason in live.not_stored.items() if reason == "late_timeout"}
    assert late <= dropped
    assert not any(answer.refusal for answer in live.answers_to_amends)


def test_values_come_too_late_in_the_stories() -> None:
    runs = [run(Late(seed, late_timeout_s=1), [("push", 4), ("turns", 9), ("kill", 0)]) for seed in range(8)]
    assert {reason for live in runs for reason in live.not_stored.values()} == {"late_timeout"}


def test_a_staged_partition_takes_no_sample_after_its_end_also_from_another_process() -> None:
    """The end is not safe yet when another process begins, and samples before it wait for values."""
    live = Late.__new__(Late)
    live.amend = lambda: None  # type: ignore[method-assign]
    Late.__init__(live, 1)
    live.wanted, live.over = 9, True
    live.until(lambda: any(isinstance(record, EndStaged) for record in live.records()))
    partition = next(record.partition for record in live.records() if isinstance(record, EndStaged))
    live._to_producer(b"push%d" % partition, Leave())
    other = PushSession(
        run=0, producer="other", process=99, host="host", pid=9, stream="rollouts", partition=partition,
        buffer=PushBuffer(1 << 16),
    )  # fmt: skip
    live.producers[b"other"] = other
    live.until(lambda: other.begun)
    assert (other.ended, other.buffer.next_seq) == (True, 9)
    live._to_producer(b"other", Push(late_chunk(partition, 9, 10)))
    chunks = [each for each in live.records() if isinstance(each, ChunkStaged) and each.partition == partition]
    assert sum(len(chunk.lengths_u32) // 4 for chunk in chunks) == 9


def test_dropped_samples_are_known_after_their_records_are_deleted() -> None:
    live = run(Late(4, late_timeout_s=1), [("push", 4), ("turns", 9), ("kill", 0)])
    facts = live.broker.leases.records.facts()["rollouts"]
    facts = msgspec.msgpack.decode(msgspec.msgpack.encode(facts), type=StreamFacts)
    next_ = Late(4, late_timeout_s=1).broker.leases
    next_.records.learn("rollouts", facts)
    for p in range(PARTITIONS):
        before, staged = (leases.partitions.intakes[p].staged for leases in (live.broker.leases, next_))
        assert before is not None
        assert staged is not None
        assert staged.drops.ranges == before.drops.ranges
        assert {staged.drop_reason(seq) for seq in range(live.wanted)} <= {"", "late_timeout"}
    assert any(facts.dropped or ())


@given(rollouts.moves(), st.integers(0, 999))
@settings(deadline=None, max_examples=80)
def test_a_batch_keeps_its_samples_however_late_their_values_come(story: list[tuple[str, int]], seed: int) -> None:
    check(run(Late(seed, batch=Batch()), [each for each in story if each[0] not in ("back", "torn")]))


def test_the_order_is_that_of_completion() -> None:
    live = Late(3)
    live.wanted = 0
    orders = set()
    for seed in range(5):
        live = run(Late(seed), [("push", 4), ("turns", 9)])
        orders.add(tuple(
            seq for record in live.records() if isinstance(record, ChunkCompleted) and record.partition == 0
            for seq in np.frombuffer(record.sent_u64, "<u8").tolist()
        ))  # fmt: skip
    assert len(orders) == 5, "it depends on when values came"


@pytest.mark.parametrize("default", [None, 0.5])
def test_values_that_never_come_are_filled_in_or_their_samples_dropped(default: float | None) -> None:
    fields = (FIELDS[0], *(msgspec.structs.replace(each, default=default) for each in FIELDS[1:]))
    live = Late.__new__(Late)
    live.amend = lambda: None  # type: ignore[method-assign]
    Late.__init__(live, 1, late_timeout_s=30) if default is None else _with(live, fields)
    live.wanted, live.over = 9, True
    live.finish()
    records = [record for record in live.records() if isinstance(record, ChunkCompleted)]
    lengths = [length for record in records for length in np.frombuffer(record.lengths_u32, "<u4").tolist()]
    assert len(lengths) == PARTITIONS * live.wanted
    assert any(lengths) == (default is not None)
    if default is None:
        assert sum(record.rejected["late_timeout"] for record in records) == PARTITIONS * live.wanted


def _with(live: Late, fields: tuple[Field, ...]) -> None:
    global FIELDS
    before, FIELDS = FIELDS, fields
    try:
        Late.__init__(live, 1, late_timeout_s=30)
    finally:
        FIELDS = before
