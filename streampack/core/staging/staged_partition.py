"""The staged samples of one partition: numbers, marks and the end, and what may be admitted next.

Samples behind a mark are admitted after the samples before it, so a batch keeps its samples however late their values
come. The end comes last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from streampack.core.journal.log_records import ChunkStaged, EndStaged, MarkStaged
from streampack.core.merge.queues import NOWHERE
from streampack.core.model.fields import Field
from streampack.core.model.snapshot import Cursor
from streampack.core.staging.dropped_samples import ENDED, DroppedSamples
from streampack.core.staging.staged_chunk import DROP_REASONS, Complete, SampleState, StagedChunk
from streampack.core.staging.tickets import InFlight

MOST_KNOWN = 1 << 16
"""Samples of a partition whose values are remembered after they were admitted, to tell a repeat from another value."""
MOST_SENDERS = 1 << 10
"""Processes of a partition that are remembered."""


class StagedSample(NamedTuple):
    """A staged sample: its chunk, and its place in the chunk."""

    chunk: StagedChunk
    at: int


@dataclass(slots=True)
class StagedPartition:
    """The staged samples of one partition.

    Attributes:
        stream, partition: Name of the stream, and number of the partition in it.
        fields: All fields of the feed.
        next_seq: Number of the next sample that the producer sends.
        num_marks: Number of the marks that came.
        cursor: Cursor of the last chunk.
        chunks: Chunks with samples that were not admitted, in order.
        marks: Marks with samples before them that were not admitted, with their log sequence numbers.
        end: The end of the partition with its log sequence number, if it came.
        ended: True once the end was admitted.
        paced: True if complete samples wait until a step needs them, and the oldest come first.
        has_extra: True if the feed has fields of axis item or patch.
        drops: Samples that were dropped, also by earlier brokers.
    """

    stream: str
    partition: int
    fields: tuple[Field, ...]
    next_seq: int = 0
    num_marks: int = 0
    cursor: Cursor | None = None
    chunks: list[StagedChunk] = field(default_factory=list)
    marks: deque[tuple[int, MarkStaged]] = field(default_factory=deque)
    end: tuple[int, EndStaged] | None = None
    ended: bool = False
    paced: bool = False
    has_extra: bool = False
    drops: DroppedSamples = field(default_factory=DroppedSamples)
    late: tuple[Field, ...] = field(init=False)
    by_sample: tuple[bool, ...] = field(init=False)
    """For each field that is not late, whether it has one value for each sample."""
    _complete: list[StagedChunk] = field(default_factory=list)
    """Chunks that may have samples to admit."""
    _known: dict[int, dict[str, int]] = field(default_factory=dict)
    """Checksums of the values of admitted samples, by number; the oldest first."""
    _senders: list[tuple[int, int]] = field(default_factory=list)
    """(number of the first sample, process) of each process that sent samples; the oldest first."""

    def __post_init__(self) -> None:
        self.late = tuple(field for field in self.fields if field.late)
        self.by_sample = tuple(field.axis == "sample" for field in self.fields if not field.late)

    @property
    def num_left(self) -> int:
        """Number of samples that were not admitted."""
        return sum(chunk.num_left for chunk in self.chunks)

    @property
    def tokens_left(self) -> int:
        """Tokens of these samples."""
        return sum(chunk.tokens_left for chunk in self.chunks)

    @property
    def extra_left(self) -> int:
        """Bytes of their media."""
        return sum(chunk.extra_left for chunk in self.chunks)

    @property
    def num_waiting(self) -> int:
        """Number of samples that wait for values."""
        return sum(len(chunk.waiting) for chunk in self.chunks)

    @property
    def first_lsn(self) -> int:
        """Log sequence number of the first record that is needed; ``NOWHERE`` if there is none."""
        lsns = [chunk.lsn for chunk in self.chunks[:1]] + [lsn for lsn, _ in [*self.marks][:1]]
        return min([*lsns, *([self.end[0]] if self.end is not None and not self.ended else [])], default=NOWHERE)

    def incomplete(self) -> list[InFlight]:
        """Return the samples that wait for values, by chunk."""
        return [InFlight(chunk.version, len(chunk.waiting), "") for chunk in self.chunks if len(chunk.waiting)]

    def oldest(self) -> tuple[float, list[str]] | None:
        """Return since when the oldest sample waits, and the fields that it lacks; None if no sample waits."""
        for chunk in self.chunks:
            for at in chunk.waiting.tolist():
                if lacking := chunk.lacking(self.late, at):
                    return chunk.since, lacking
        return None

    # Arrivals

    def new_chunk(self, record: ChunkStaged, lsn: int, now: float) -> StagedChunk:
        """Return a chunk of the partition, whose payload is not there yet."""
        return StagedChunk(record, lsn, now, self.num_marks, self.by_sample, self.has_extra)

    def add_chunk(self, chunk: StagedChunk) -> None:
        """Add the partition's next chunk."""
        self.chunks.append(chunk)
        self.next_seq, self.cursor = chunk.stop_seq, chunk.record.cursor
        if not self._senders or self._senders[-1][1] != chunk.process:
            self._senders = [*self._senders[1 - MOST_SENDERS :], (chunk.base_seq, chunk.process)]
        rejected = chunk.base_seq + np.flatnonzero(chunk.lengths == 0)
        self.drops.add(rejected.tolist(), chunk.record.rejected)
        self.note(chunk)

    def add_mark(self, lsn: int, mark: MarkStaged) -> None:
        """Add the end of a batch."""
        self.marks.append((lsn, mark))
        self.num_marks = mark.number + 1

    def find(self, seq: int) -> StagedSample | None:
        """Return the place of a sample that was not admitted; None for any other."""
        at = bisect_right(self.chunks, seq, key=lambda chunk: chunk.base_seq) - 1
        if at < 0 or seq >= self.chunks[at].stop_seq:
            return None
        chunk = self.chunks[at]
        admitted = chunk.state[seq - chunk.base_seq] == SampleState.ADMITTED
        return None if admitted else StagedSample(chunk, seq - chunk.base_seq)

    def crc(self, seq: int, name: str) -> int | None:
        """Return the checksum of a value that came for sample ``seq``; None if none came or it is not known any more.

        A sample whose values are forgotten, or that was dropped, has no checksum.
        """
        place = self.find(seq)
        if place is not None:
            return place.chunk.crcs[name][place.at] if name in place.chunk.crcs else None
        return self._known.get(seq, {}).get(name)

    def sender(self, seq: int) -> int | None:
        """Return the process that sent sample ``seq``; None if that is not known."""
        at = bisect_right(self._senders, seq, key=lambda one: one[0]) - 1
        return self._senders[at][1] if at >= 0 and seq < self.next_seq else None

    def waits(self, seq: int) -> bool:
        """Return whether sample ``seq`` may still get values."""
        return self.find(seq) is not None and not self.drop_reason(seq)

    def drop_reason(self, seq: int) -> str:
        """Return the reason that sample ``seq`` is in no step; empty if it may be in one."""
        place = self.find(seq)
        state = SampleState.ADMITTED if place is None else SampleState(place.chunk.state[place.at])
        return DROP_REASONS.get(state) or self.drops.reason(seq)

    def note(self, chunk: StagedChunk) -> None:
        """Look for complete samples in a chunk that has changed."""
        if chunk.update(self.late) and chunk not in self._complete:
            self._complete.append(chunk)

    # Admission

    def take(self, base_seq: int, chosen: StagedChunk | None = None) -> Complete | MarkStaged | EndStaged | None:
        """Return the next chunk, mark or end to admit, and count it as admitted; None if there is none.

        Args:
            base_seq: Number of the next sample that is admitted.
            chosen: Chunk that ``next_in_turn`` returned. If paced, other chunks wait.
        """
        number = self.marks[0][1].number if self.marks else self.num_marks
        for chunk in self._complete if chosen is None else [chosen]:
            if chunk.batch <= number and (chunk is chosen or not self.paced or chunk.is_dropped):
                return self._take_from(chunk, base_seq)
        if self.marks and not (self.chunks and self.chunks[0].batch <= number):
            return self.marks.popleft()[1]
        if self.end is None or self.ended or self.chunks or self.marks:
            return None
        self.ended = True
        return self.end[1]

    def next_in_turn(self) -> tuple[int, int, StagedChunk] | None:
        """Return the complete chunk of the oldest policy, as (version, LSN, chunk); None if there is none."""
        number = self.marks[0][1].number if self.marks else self.num_marks
        complete = [
            (chunk.version, chunk.lsn, chunk)
            for chunk in self._complete if chunk.batch <= number and not chunk.is_dropped
        ]  # fmt: skip
        return min(complete, key=lambda entry: entry[:2], default=None)

    def _take_from(self, chunk: StagedChunk, base_seq: int) -> Complete:
        """Take samples of a chunk, and forget the chunk once all of its samples are admitted."""
        complete = chunk.take(self.fields, base_seq)
        self._remember(chunk, (complete.sent - chunk.base_seq).tolist())
        self._forget_if_done(chunk)
        return complete

    def _forget_if_done(self, chunk: StagedChunk) -> None:
        """Forget a chunk from which samples were admitted, if none or none that is complete is left."""
        if chunk in self._complete and not chunk.update(self.late):
            self._complete.remove(chunk)
        if chunk.empty:
            self.chunks.remove(chunk)

    def admitted(self, seqs: Sequence[int]) -> None:
        """Mark samples as admitted, because an earlier broker has admitted them; forget a chunk without other samples.

        ``seqs``: numbers with which the samples came.
        """
        for seq in seqs:
            place = self.find(seq)
            if place is None:
                continue
            place.chunk.admit(np.array([place.at]))
            self._remember(place.chunk, [place.at])
            self._forget_if_done(place.chunk)

    def mark_admitted(self, number: int) -> None:
        """Forget the mark ``number``, which an earlier broker has admitted, and marks before it."""
        while self.marks and self.marks[0][1].number <= number:
            self.marks.popleft()

    def _remember(self, chunk: StagedChunk, rows: Sequence[int]) -> None:
        """Remember the checksums of the values of admitted samples."""
        for at in rows:
            crcs = {name: crc for name, column in chunk.crcs.items() if (crc := column[at]) is not None}
            if crcs:
                self._known[chunk.base_seq + at] = crcs
        while len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]

    # Dropping

    def discard(self, since: int) -> None:
        """Drop the samples of records from ``since`` on, because trainers went back."""
        for chunk in self.chunks:
            if chunk.lsn >= since:
                chunk.state[chunk.state != SampleState.ADMITTED] = SampleState.DISCARDED
                chunk.unread.clear()
                self.note(chunk)

    def clear(self) -> None:
        """Forget everything that waits: the feed takes no more samples of the partition."""
        for chunk in self.chunks:
            left = np.flatnonzero(chunk.state != SampleState.ADMITTED)
            self.drops.add((chunk.base_seq + left).tolist(), [ENDED])
        self.chunks.clear()
        self._complete.clear()
        self.marks.clear()
        self.ended = self.end is not None

    def overdue(self, before: float) -> Iterator[tuple[StagedChunk, list[int]]]:
        """Yield the chunks that came before a time and still wait, with the places of their incomplete samples."""
        for chunk in list(self.chunks):
            if chunk.since > before:
                return
            if chunk.unread:
                continue
            rows = [at for at in chunk.waiting.tolist() if chunk.lacking(self.late, at)]
            if rows:
                yield chunk, rows


def time_out(chunk: StagedChunk, rows: Sequence[int]) -> int:
    """Drop samples whose values did not come; a group is dropped whole. Return the number of dropped samples."""
    dropped = np.flatnonzero(chunk.state != SampleState.ADMITTED) if chunk.is_group else np.array(rows)
    chunk.state[dropped] = SampleState.TIMED_OUT
    return len(dropped)
