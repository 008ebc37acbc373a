"""The staged partitions of all feeds: writes their records, and decides about timeouts.

Without late fields there are none. ``intake`` calls ``take`` after each change, and admits what it returns. A message
``Amend`` is answered once its record is safe. A value that comes again is answered, too, but not recorded again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import UNSET

from streampack.core.columns.chunk_body import chunk_as
from streampack.core.journal.journal import Journal
from streampack.core.journal.log_effects import Recall, Recalled
from streampack.core.journal.log_records import ChunkStaged, EndStaged, MarkStaged, SamplesAmended
from streampack.core.merge.queues import NOWHERE
from streampack.core.model.fields import Field
from streampack.core.model.rules import LATE_TIMEOUT_S, Rules
from streampack.core.protocol.events import Effect, Report
from streampack.core.protocol.producer_messages import Amend, Amended, Mark, Samples
from streampack.core.staging.amendments import Amendments, LateValue, Refused, parse_amend
from streampack.core.staging.dropped_samples import DroppedSamples, by_reason, contradiction
from streampack.core.staging.staged_chunk import StagedChunk
from streampack.core.staging.staged_partition import StagedPartition, time_out
from streampack.core.staging.tickets import InFlight, Tickets

StagedRecord = ChunkStaged | SamplesAmended | MarkStaged | EndStaged
MOST_EARLY, MOST_EARLY_BYTES = 256, 16 << 20
"""Most messages, and bytes of values, that are kept for samples that have not come."""
CHECK_S = 1.0
"""Seconds between two looks for samples that have waited too long."""


class AmendAnswer(NamedTuple):
    """The answer to message ``number`` of ``producer``, which is sent once the records below ``lsn`` are safe.

    It is made then, so that it also names samples that were dropped after their values came.
    """

    lsn: int
    producer: str
    number: int
    p: int
    given: Amendments
    refusal: str = ""
    """Reason that the whole message is refused, or that values contradict earlier ones."""


class Early(NamedTuple):
    """A message of ``producer`` with values for samples of partition ``p`` that have not come."""

    p: int
    message: Amend
    payload: tuple[bytes, ...]
    producer: str

    def repeats(self, other: Early) -> bool:
        """Return whether this is the same message as an earlier one."""
        return (self.producer, self.message.number) == (other.producer, other.message.number)


class LateWaits(NamedTuple):
    """Samples that wait for late fields: their number, the age of the oldest in seconds, and what that one lacks.

    ``refused``: number of samples whose values came and were not stored, by reason.
    """

    samples: int
    oldest_s: float
    fields: list[str]
    refused: dict[str, int]


class _StagedFeed(NamedTuple):
    """A feed with late fields: its staged partitions, and the timeout of their samples in seconds."""

    partitions: list[int]
    timeout_s: int


class Staging:
    """The staged partitions of all feeds, by partition number ``p``."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._of: dict[int, StagedPartition] = {}
        self._feeds: dict[str, _StagedFeed] = {}
        self.tickets: dict[str, Tickets] = {}
        """Tickets of each paced feed."""
        self._answers: deque[AmendAnswer] = deque()
        self._now = self._checked = 0.0
        self._early: list[Early] = []
        self._changed: list[int] = []
        """Partitions of which something may be admitted at the next tick."""
        self._refused: dict[int, Counter[str]] = {}
        """Number of samples whose values were not stored, by partition and reason."""
        self._counted: dict[int, DroppedSamples] = {}
        """These samples, by partition: each counts once, however often its values come."""
        self.timed_out = 0
        """Number of samples that were dropped because a late field did not come."""

    def open(
        self, feed: str, p: int, stream: str, partition: int, rules: Rules
    ) -> StagedPartition:  # fmt: skip
        """Add partition ``p`` of ``feed``, whose samples wait for late fields or for their turn; return it."""
        self._of[p] = StagedPartition(
            stream, partition, rules.fields, paced=rules.paces, has_extra=rules.has_extra_bytes
        )  # fmt: skip
        self._feeds.setdefault(feed, _StagedFeed([], rules.late_timeout_s or LATE_TIMEOUT_S)).partitions.append(p)
        if rules.paces and rules.max_policy_lag is not None and rules.batch is not None:
            self.tickets.setdefault(feed, Tickets(rules.max_policy_lag, rules.batch.samples or 1))
        return self._of[p]

    def next_in_turn(self, feed: str) -> tuple[int, StagedChunk] | None:
        """Return the complete chunk of ``feed`` that was begun first, with its partition; None if there is none."""
        in_turn = [(*next_, p) for p in self.of_feed(feed) if (next_ := self._of[p].next_in_turn()) is not None]
        if not in_turn:
            return None
        *_, chunk, p = min(in_turn, key=lambda turn: turn[:2])
        return p, chunk

    def of_feed(self, feed: str) -> list[int]:
        """Return the numbers of the staged partitions of ``feed``."""
        return self._feeds[feed].partitions if feed in self._feeds else []

    def waiting(self, partitions: Iterable[int]) -> LateWaits | None:
        """Return the counts of samples that wait for late fields in some partitions; None without late fields."""
        with_late = [p for p in partitions if p in self._of and self._of[p].late]
        staged = [self._of[p] for p in with_late]
        if not staged:
            return None
        oldest = min((age for partition in staged if (age := partition.oldest()) is not None), default=None)
        seconds, fields = (0.0, []) if oldest is None else (self._now - oldest[0], oldest[1])
        refused = sum((self._refused.get(p, Counter()) for p in with_late), Counter[str]())
        return LateWaits(sum(partition.num_waiting for partition in staged), seconds, fields, dict(refused))

    def in_the_way(self, feed: str, policy: int, filled: int) -> InFlight | None:
        """Return samples of a paced feed for which the next complete sample must wait; None if there are none.

        ``policy`` and ``filled`` are those of ``Tickets.in_the_way``.
        """
        in_turn = self.next_in_turn(feed)
        if in_turn is None:
            return None
        incomplete = [sample for p in self.of_feed(feed) for sample in self._of[p].incomplete()]
        chunk = in_turn[1]
        return self.tickets[feed].in_the_way(chunk.version, incomplete, policy, filled, chunk.num_complete)

    @property
    def first_lsn(self) -> int:
        """Log sequence number of the first record that staged samples need; ``NOWHERE`` if there is none."""
        return min((staged.first_lsn for staged in self._of.values()), default=NOWHERE)

    # Messages of producers

    def stage(self, p: int, message: Samples, payload: tuple[Any, ...]) -> list[Effect]:
        """Record a good chunk, the next one of its partition, and let it wait."""
        record = chunk_as(ChunkStaged, message, without=("keys", "write", "warnings"), pass_ended=UNSET)
        lsn, staged = self._journal.next_lsn, self._of[p]
        chunk = staged.new_chunk(record, lsn, self._now)
        chunk.read(payload)
        staged.add_chunk(chunk)
        return self._journal.append(record, payload)

    def mark(self, p: int, message: Mark) -> list[Effect]:
        """Record the end of a batch."""
        record = MarkStaged(
            stream=message.stream, partition=message.partition, number=message.number, seq=message.seq,
            batch=message.batch,
        )  # fmt: skip
        self._of[p].add_mark(self._journal.next_lsn, record)
        return self._journal.append(record)

    def end(self, p: int, total: int) -> list[Effect]:
        """Record the end of a partition, if it is new."""
        staged = self._of[p]
        if staged.end is not None:
            return []
        record = EndStaged(stream=staged.stream, partition=staged.partition, total=total)
        staged.end = self._journal.next_lsn, record
        return self._journal.append(record)

    def amend(
        self, p: int, message: Amend, payload: tuple[Any, ...], producer: str, ended: bool = False
    ) -> list[Effect]:  # fmt: skip
        """Record the new values of a message, and queue the answer; no answer if a sample has not come yet.

        ``ended``: no more samples of the partition can come.
        """
        staged = self._of[p]
        try:
            parsed = parse_amend(message, payload, staged, ended)
        except Refused as refused:
            parsed, refusal = Amendments([], []), str(refused)
        else:
            if parsed is None:
                self._hold(Early(p, message, tuple(map(bytes, payload)), producer))
                return []
            wrong = contradiction(parsed.refused, parsed.other)
            refusal = wrong and f"stream {staged.stream!r} partition {staged.partition} {wrong}"
        effects = self._put(p, parsed.values) if parsed.values else []
        self._answers.append(AmendAnswer(self._journal.next_lsn, producer, message.number, p, parsed, refusal[:2000]))
        if refusal:
            text = f"refused values: {refusal}"
            effects.append(Report("warning", text, stream=message.stream, partition=message.partition))
        return effects

    def _hold(self, early: Early) -> None:
        """Keep a message that came before its samples, if there is room; its sender repeats it anyway."""
        self._early = [waiting for waiting in self._early if not early.repeats(waiting)]
        size = sum(len(frame) for waiting in (*self._early, early) for frame in waiting.payload)
        if len(self._early) < MOST_EARLY and size <= MOST_EARLY_BYTES:
            self._early.append(early)

    def amend_early(self, p: int) -> list[Effect]:
        """Handle the messages that came before samples of partition ``p`` which have come now."""
        early = [waiting for waiting in self._early if waiting.p == p]
        if not early:
            return []
        self._early = [waiting for waiting in self._early if waiting.p != p]
        return [e for waiting in early for e in self.amend(p, waiting.message, waiting.payload, waiting.producer)]

    def _put(self, p: int, values: Sequence[LateValue]) -> list[Effect]:
        """Record new values, one record for all samples that get the same fields."""
        staged = self._of[p]
        names: dict[int, list[LateValue]] = {}
        for value in values:
            names.setdefault(value.seq, []).append(value)
        effects: list[Effect] = []
        for fields in sorted({tuple(value.name for value in values) for values in names.values()}):
            seqs = [seq for seq, values in names.items() if tuple(value.name for value in values) == fields]
            columns = [[next(v for v in names[seq] if v.name == name) for seq in seqs] for name in fields]
            crcs = np.array([[value.crc for value in column] for column in columns], "<u4")
            places = [place for seq in seqs if (place := staged.find(seq)) is not None]
            lengths = np.array([place.chunk.lengths[place.at] for place in places], "<u4")
            record = SamplesAmended(
                stream=staged.stream, partition=staged.partition, seqs_u64=np.array(seqs, "<u8").tobytes(),
                names=fields, crcs_u32=crcs.tobytes(), lengths_u32=lengths.tobytes(),
            )  # fmt: skip
            payload = tuple(b"".join(value.data for value in column) for column in columns)
            effects += self._journal.append(record, payload)
        for chunk in _put(staged, values):
            staged.note(chunk)
        return effects

    def answers(self) -> list[tuple[str, Amended]]:
        """Return (producer, answer) of the answers that may be sent now: the records before them are safe."""
        answers: list[tuple[str, Amended]] = []
        while self._answers and self._answers[0].lsn <= self._journal.safe_upto:
            due = self._answers.popleft()
            answers.append((due.producer, self._answer(due)))
        return answers

    def _answer(self, due: AmendAnswer) -> Amended:
        """Return an answer, and count the samples whose values were not stored."""
        reasons, staged = dict(due.given.refused), self._of[due.p]
        reasons |= {seq: why for seq in due.given.seqs if seq not in reasons and (why := staged.drop_reason(seq))}
        if not reasons:
            return Amended(number=due.number, refusal=due.refusal)
        refused, counts = by_reason(reasons), self._refused.setdefault(due.p, Counter())
        counted = self._counted.setdefault(due.p, DroppedSamples())
        for reason, seqs in refused.items():
            counts[reason] += counted.add(seqs, [reason])
        columns = {reason: np.array(seqs, "<u8").tobytes() for reason, seqs in refused.items()}
        return Amended(number=due.number, refusal=due.refusal, refused=columns)

    # Time

    def tick(self, now: float) -> tuple[list[Effect], list[int]]:
        """Fill in or drop what has waited too long.

        Returns:
            The effects, and the partitions of which something may be admitted now.
        """
        self._now = now
        changed, self._changed = self._changed, []
        if now - self._checked < CHECK_S:
            return [], changed
        self._checked = now
        effects: list[Effect] = []
        for feed, (partitions, timeout_s) in self._feeds.items():
            for p in partitions:
                staged = self._of[p]
                for chunk, rows in staged.overdue(now - timeout_s):
                    effects += self._time_out(feed, p, chunk, rows, timeout_s)
                    staged.note(chunk)
                    changed.append(p)
        return effects, changed

    def _time_out(self, feed: str, p: int, chunk: StagedChunk, rows: list[int], timeout_s: int) -> list[Effect]:
        """Fill in the defaults of samples whose values did not come, or drop the samples."""
        staged = self._of[p]
        lacking = {at: chunk.lacking(staged.late, at) for at in rows}
        names = sorted({name for lacking_names in lacking.values() for name in lacking_names})
        defaults = {late.name: late.fill(late.default).tobytes() for late in staged.late if late.default is not None}
        where = f"stream {staged.stream!r} partition {staged.partition}"
        missing = f"{', '.join(names)} of {len(rows)} samples, from number {chunk.base_seq + rows[0]} on, did not come"
        if all(name in defaults for name in names):
            values = [
                LateValue(chunk.base_seq + at, field.name, 0, self._fill(field, int(chunk.lengths[at])))
                for at in rows for field in staged.late if field.name in lacking[at]
            ]  # fmt: skip
            text = f"{where}: {missing} within {timeout_s} s (late_timeout_s); the default is used"
            return [Report("warning", text, feed=feed, stream=staged.stream), *self._put(p, values)]
        count = time_out(chunk, rows)
        self.timed_out += count
        text = f"{where}: {missing} within {timeout_s} s (late_timeout_s); {count} samples are dropped"
        return [Report("warning", text, feed=feed, stream=staged.stream)]

    @staticmethod
    def _fill(field: Field, length: int) -> bytes:
        """Return the default of a field for a sample of ``length`` tokens."""
        assert field.default is not None
        shape = (length, *field.shape) if field.axis == "token" else field.shape
        return np.broadcast_to(field.fill(field.default), shape).tobytes()

    # Dropping

    def discard(self, feed: str, since: int) -> None:
        """Drop the waiting samples of ``feed`` that were recorded from ``since`` on, because trainers went back.

        The samples are counted at the next tick, when the feed is where the trainers want it.
        """
        self._changed += self.of_feed(feed)
        for p in self.of_feed(feed):
            self._of[p].discard(since)

    # Records of earlier brokers

    def recover(self, p: int, lsn: int, record: StagedRecord) -> None:
        """Apply a record of an earlier broker while this broker starts."""
        staged = self._of[p]
        if isinstance(record, ChunkStaged):
            chunk = staged.new_chunk(record, lsn, self._now)
            chunk.unread.add(lsn)
            staged.add_chunk(chunk)
        elif isinstance(record, MarkStaged):
            staged.add_mark(lsn, record)
        elif isinstance(record, EndStaged):
            staged.end = lsn, record
        else:
            for seq, names in _columns(record):
                if (place := staged.find(seq)) is not None:
                    place.chunk.unread.add(lsn)
                    for name, crc in names.items():
                        place.chunk.put(name, place.at, None, crc)

    def read_again(self) -> list[Effect]:
        """Return the effects that read the payload of waiting samples from the log, when a broker has started."""
        effects: list[Effect] = []
        for feed in self._feeds:
            staged = [self._of[p] for p in self.of_feed(feed)]
            unread = {lsn for partition in staged for chunk in partition.chunks for lsn in chunk.unread}
            effects += [Recall(feed, lsn) for lsn in sorted(unread)]
        return effects

    def recalled(self, p: int, event: Recalled) -> None:
        """Take the payload of a record that was read from the log."""
        staged, record = self._of[p], event.record
        if isinstance(record, SamplesAmended):
            _put(staged, _values_of(record, event.payload, staged.late))
        for chunk in [chunk for chunk in staged.chunks if event.lsn in chunk.unread]:
            if chunk.lsn == event.lsn:
                chunk.read(event.payload)
            chunk.unread.discard(event.lsn)
            staged.note(chunk)


def _put(staged: StagedPartition, values: Sequence[LateValue]) -> list[StagedChunk]:
    """Give values to the samples that wait for them; return the chunks of these samples."""
    changed: dict[int, StagedChunk] = {}
    for value in values:
        if (place := staged.find(value.seq)) is not None:
            place.chunk.put(value.name, place.at, value.data, value.crc)
            changed[place.chunk.base_seq] = place.chunk
    return list(changed.values())


def _columns(record: SamplesAmended) -> list[tuple[int, dict[str, int]]]:
    """Return (number, checksum of each field) of each sample in a record."""
    seqs = np.frombuffer(record.seqs_u64, "<u8").tolist()
    crcs = np.frombuffer(record.crcs_u32, "<u4").reshape(len(record.names), len(seqs)).T.tolist()
    return [(seq, dict(zip(record.names, column, strict=True))) for seq, column in zip(seqs, crcs, strict=True)]


def _values_of(record: SamplesAmended, payload: tuple[Any, ...], late: Sequence[Field]) -> list[LateValue]:
    """Return the values in a record."""
    fields = {late_field.name: late_field for late_field in late}
    lengths, columns, values = np.frombuffer(record.lengths_u32, "<u4").tolist(), _columns(record), list[LateValue]()
    for name, frame in zip(record.names, payload, strict=True):
        data, at, field = memoryview(frame).cast("B"), 0, fields[name]
        for (seq, crcs), length in zip(columns, lengths, strict=True):
            size = field.value_bytes * (length if field.axis == "token" else 1)
            values.append(LateValue(seq, name, crcs[name], bytes(data[at : at + size])))
            at += size
    return values
