"""A run of rollouts whose samples wait for late fields: values that other programs give to them."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import msgspec
import numpy as np
from crc32c import crc32c
from msgspec import UNSET

from streampack.core.journal.log_records import (
    BatchMarked,
    ChunkCompleted,
    ChunkStaged,
    LineageBegan,
    SamplesAmended,
    SamplesRejected,
    StepFormed,
)
from streampack.core.model.fields import Field
from streampack.core.model.samples import ROW, index_of
from streampack.core.protocol.events import Event, FromBroker, Tick
from streampack.core.protocol.producer_messages import Amend, Amended
from streampack.core.sessions.producer_base import Chunk
from streampack.core.sessions.pushing.amend_session import AmendSession, GiveValues
from streampack.core.sessions.pushing.push_session import EndBatch
from tests.world.planned import tokens_of
from tests.world.rollouts import PARTITIONS, Story, Unsafe, length_of, rollout_chunk, rules_with

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
    """Programs that push, and two that give values to samples that are safe, in any order and again and again.

    Unless it is ``amends``, no value is given. ``more`` are rules.
    """

    def __init__(
        self, seed: int, *, discards: bool = False, groups: bool = False, amends: bool = True, **more: Any
    ) -> None:
        self.groups, self.amends = groups, amends
        self.amenders: list[AmendSession] = []
        self.left: dict[tuple[int, int], set[str]] = {}
        """Values that each sample has not got yet; a value that was sent may get lost, and is repeated."""
        rules = rules_with(**{"fields": FIELDS, **more})
        self.marks = rules.batch is not None
        self.answers_to_amends: list[Amended] = []
        self.not_stored: dict[tuple[int, int], str] = {}
        """The reason of each sample that some answer named."""
        super().__init__(seed, rules, discards=discards, quota=192)

    def start_producer(self, streams: list[str]) -> bytes:
        for number in range(2):
            session = AmendSession(run=0, producer=f"amender{number}", host="host", pid=9, stream="rollouts")
            self.amenders.append(session)
            self.producers[b"amend%d" % number] = session  # type: ignore[assignment]
            self._to_producer(b"amend%d" % number, Tick(self.now))
        return super().start_producer(streams)

    def work(self, partition: int) -> None:
        buffer = self.pushers[partition].buffer
        first = buffer.next_seq
        if self.pushers[partition].begun and self.marks and buffer.next_mark < first // MARK:
            self.tell(partition, EndBatch(buffer.next_mark))
        else:
            super().work(partition)
        self.left |= {(partition, seq): set(NAMES) for seq in range(first, buffer.next_seq)}
        if self.amends and self.rng.random() < (0.3 if not self.over else 0.8):
            self.amend()

    def next_chunk(self, partition: int, first: int) -> Chunk:
        stop = min(first + self.rng.randint(1, 3), self.wanted, first - first % MARK + MARK)
        chunk = late_chunk(partition, first, stop)
        kept = self.groups and first % 2 and chunk.num_bytes <= 12 * self.rules.budget
        return msgspec.structs.replace(chunk, keep="pack") if kept else chunk

    def _to_producer(self, peer: bytes, event: Event) -> None:
        """Check an answer to an amender against the log, before the session takes it."""
        session: Any = self.producers.get(peer)
        answer = event.envelope.message if isinstance(event, FromBroker) else None
        if isinstance(session, AmendSession) and isinstance(answer, Amended) and answer.number in session.open:
            self.answers_to_amends.append(answer)
            self._check_answer(session.open[answer.number].message, answer)
        super()._to_producer(peer, event)

    def _check_answer(self, amend: Amend, answer: Amended) -> None:
        """The log has every value that was not refused; a sample that was refused was dropped."""
        for reason, seqs in (getattr(answer, "refused", None) or {}).items():
            assert reason in ("late_timeout", "discarded"), reason
            self.not_stored |= {(amend.partition, seq): reason for seq in np.frombuffer(seqs, "<u8").tolist()}
        missing = {
            (seq, name) for seq in np.frombuffer(amend.seqs_u64, "<u8").tolist() for name in amend.names
            if (amend.partition, seq) not in self.not_stored
        }  # fmt: skip
        for record in reversed(self.records()):
            if not missing:
                return
            if isinstance(record, SamplesAmended) and record.partition == amend.partition:
                missing -= {
                    (seq, name) for seq in np.frombuffer(record.seqs_u64, "<u8").tolist() for name in record.names
                }
        assert not missing, f"{missing} are not in the log, and the answer is: {answer}"

    def amend(self) -> None:
        """Give values to some samples of a partition; sometimes such as they have already."""
        number, partition = self.rng.randrange(2), self.rng.randrange(PARTITIONS)
        session, durable = self.amenders[number], self.pushers[partition].buffer.durable_seq
        lacking = [seq for p, seq in self.left if p == partition and seq < durable + 2 and self.left[p, seq]]
        if self.rng.random() < 0.1:
            lacking = list(range(min(durable, self.wanted)))
        if not lacking or not session.terms:
            return
        seqs = self.rng.sample(lacking, min(len(lacking), self.rng.randint(1, 4)))
        names = self.rng.choice([NAMES, NAMES[:1], NAMES[1:], NAMES[::-1]])
        self._to_producer(b"amend%d" % number, amend_of(partition, seqs, names, session.open.take_number()))
        for seq in seqs:
            self.left[partition, seq] -= set(names)


def played(live: Late, story: Story) -> Late:
    """A run after a story, to its end."""
    live.play([("push", 12), *story], torn=False)
    return live


def late_chunk(partition: int, first: int, stop: int) -> Chunk:
    chunk = rollout_chunk(partition, first, stop)
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


def check_late(live: Late) -> None:
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
