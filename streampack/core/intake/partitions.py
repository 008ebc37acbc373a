"""The partitions of every stream: their numbers, and what the log has of each.

A partition is known by its number (``p``), numbered through over all feeds, its samples by sequence number. What is
noted here is what the log says or will: chunks and ends of batches in the order in which they came, ends, rejected
samples, the digests of sources. An earlier broker's records come through ``recover`` before anything else happens.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from msgspec import UNSET

from streampack.core.intake.admission import Admission
from streampack.core.intake.intake import Intake
from streampack.core.intake.lease_terms import StreamTerms, terms_of
from streampack.core.journal.history import ChunkPlace, History
from streampack.core.journal.journal import Journal
from streampack.core.journal.log_records import (
    BatchMarked,
    ChunkAdmitted,
    PartitionEnded,
    SamplesRejected,
    SourceAccepted,
    StreamFacts,
)
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64, index_of
from streampack.core.protocol.events import Effect

DISCARDED = "discarded"
"""Why samples are rejected that were pushed before trainers went back."""


class Granted(NamedTuple):
    """Of a stream: tokens that may wait for the merge, and that do; samples that may be sent and have not come."""

    granted_tokens: int
    used_tokens: int
    missing_samples: int


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream of ``feed``: ``number`` among the feed's; its first partition is ``first`` of all, ``local`` of the
    feed's."""

    feed: str
    terms: StreamTerms
    admission: Admission
    rules: Rules
    history: History
    number: int
    first: int
    local: int

    @property
    def in_order(self) -> bool:
        """Is the order in which its chunks came recorded?"""
        return self.rules.merge == "arrival"

    def mine(self, p: int) -> int:
        """The feed's number of partition ``p``."""
        return self.local + p - self.first


class Partitions:
    """Every feed's; ``open`` adds a feed's streams, or more of them. ``quota_tokens`` of each partition may wait."""

    def __init__(self, quota_tokens: int, journal: Journal) -> None:
        self._quota_tokens, self._journal = quota_tokens, journal
        self.streams: dict[str, Stream] = {}
        self.stream_of: list[Stream] = []
        self.intakes: list[Intake] = []
        self._of_feed: dict[str, list[int]] = {}
        self.digests: dict[str, str] = {}
        """Of the streams' sources, as accepted."""

    def open(self, feed: str, rules: Rules, admission: Admission, history: History) -> None:
        """Add the streams of ``feed`` that are not there yet, whose samples ``admission`` takes."""
        local = len(self.of_feed(feed))
        for number, terms in enumerate(terms_of(rules)):
            if terms.name in self.streams:
                continue
            stream = Stream(feed, terms, admission, rules, history, number, len(self.intakes), local)
            self.streams[terms.name] = stream
            self.stream_of += [stream] * terms.partitions
            quota, size = self._quota_tokens * rules.token_bytes, rules.token_bytes
            self.intakes += [Intake(quota, size) for _ in range(terms.partitions)]
            self.of_feed(feed).extend(range(stream.first, len(self.intakes)))
            local += terms.partitions

    def of_feed(self, feed: str) -> list[int]:
        """The partitions of ``feed``, in the feed's own order."""
        return self._of_feed.setdefault(feed, [])

    def name_of(self, p: int) -> str:
        """The stream of a partition."""
        return self.stream_of[p].terms.name

    def partitions(self, stream: str) -> range:
        """Those of a stream."""
        first = self.streams[stream].first
        return range(first, first + self.streams[stream].terms.partitions)

    def credits_of(self, stream: str) -> Granted:
        """What the open partitions of a stream may send, and what of it waits for the merge."""
        open_ = [each for p in self.partitions(stream) if not (each := self.intakes[p]).ended]
        return Granted(
            self._quota_tokens * len(open_),
            sum(each.kept_tokens - each.merged_tokens for each in open_),
            sum(max(each.grant_seq - each.expected_seq, 0) for each in open_),
        )  # fmt: skip

    def partition(self, stream: str, partition: int) -> int | None:
        """The number of a partition, if there is one."""
        known = self.streams.get(stream)
        if known is None or not 0 <= partition < known.terms.partitions:
            return None
        return known.first + partition

    def _streams_of(self, feed: str) -> list[Stream]:
        return [stream for stream in self.streams.values() if stream.feed == feed]

    def next_seq(self, p: int) -> int:
        """The sample that the holder of a partition is to send next."""
        intake = self.intakes[p]
        return intake.recorded_seq if self.stream_of[p].terms.pushed else intake.expected_seq

    def is_ended(self, p: int) -> bool:
        """Need its holder send nothing any more? What was pushed is at its end once the log says so for sure."""
        intake = self.intakes[p]
        if not self.stream_of[p].terms.pushed:
            return intake.ended
        return intake.closed or (intake.known_total is not None and intake.end_lsn < self._journal.safe_upto)

    # What the log has

    def accept(self, stream: str, source_digest: str) -> list[Effect]:
        """A stream is what a source of this digest gives."""
        if self.digests.get(stream) == source_digest:
            return []
        self.digests[stream] = source_digest
        return self._journal.append(SourceAccepted(stream=stream, source_digest=source_digest))

    def discard(self, feed: str) -> list[Effect]:
        """Count the samples that were pushed to ``feed`` and are lost, those that are not counted yet."""
        effects: list[Effect] = []
        mine = self.of_feed(feed)
        for place in self.stream_of[mine[0]].history.order if mine else ():
            p = mine[place.partition]
            if place.lost and place.count and not place.counted and self.stream_of[p].terms.pushed:
                place.counted = True
                seqs = np.arange(place.base_seq, place.stop_seq)
                effects += self._journal.append(self._rejection(p, seqs, {DISCARDED: place.count}))
        return effects

    def _rejection(self, p: int, seqs: I64, reasons: dict[str, int]) -> SamplesRejected:
        stream = self.stream_of[p]
        indices = np.asarray(index_of(seqs, p - stream.first, stream.terms.partitions), "<u8")
        return SamplesRejected(stream=stream.terms.name, indices_u64=indices.tobytes(), reasons=reasons)

    def _note_chunk(self, p: int, lsn: int, record: ChunkAdmitted) -> None:
        """A chunk is in the log's order."""
        intake, stream = self.intakes[p], self.stream_of[p]
        lengths = np.frombuffer(record.lengths_u32, "<u4")
        version = -1 if record.policy_version is UNSET else record.policy_version
        place = ChunkPlace(
            stream.mine(p), record.base_seq, len(lengths), lsn, int(lengths.sum()), version=version
        )  # fmt: skip
        if record.base_seq > intake.recorded_seq:
            stream.history.is_cut = True
        intake.recorded_seq = place.stop_seq
        if stream.terms.pushed:
            intake.places.append(place)
        stream.history.came(place)

    def _note_mark(self, p: int, number: int, seq: int, lsn: int) -> None:
        intake, stream = self.intakes[p], self.stream_of[p]
        place = ChunkPlace(stream.mine(p), seq, 0, lsn, 0, mark=number)
        intake.end_batch(number, seq)
        intake.places.append(place)
        stream.history.came(place)

    def facts(self) -> dict[str, StreamFacts]:
        """What must survive when records of the log go."""
        return {
            name: StreamFacts(
                source_digest=self.digests.get(name, ""),
                totals=[self.intakes[p].known_total for p in self.partitions(name)],
                recorded=[self.intakes[p].recorded_seq for p in self.partitions(name)],
                marks=[self.intakes[p].num_marks for p in self.partitions(name)],
            )
            for name in self.streams
        }

    def learn(self, stream: str, facts: StreamFacts) -> None:
        """What an earlier broker has found out of a stream."""
        if facts.source_digest:
            self.digests[stream] = facts.source_digest
        for p, total in zip(self.partitions(stream), facts.totals, strict=False):
            self.intakes[p].known_total = total
        for p, recorded, marks in zip(self.partitions(stream), facts.recorded, facts.marks, strict=False):
            intake = self.intakes[p]
            intake.recorded_seq = intake.durable_seq = max(intake.recorded_seq, recorded)
            intake.batch_seq = intake.recorded_seq
            intake.num_marks = intake.durable_marks = max(intake.num_marks, marks)

    def recover(
        self, lsn: int, record: SourceAccepted | ChunkAdmitted | SamplesRejected | BatchMarked | PartitionEnded
    ) -> None:
        """A record of the log, before anything else happens."""
        name = record.stream
        if isinstance(record, SourceAccepted):
            self.digests[name] = record.source_digest
            return
        if isinstance(record, SamplesRejected):
            self._recover_rejection(record)
            return
        p = self.streams[name].first + record.partition
        intake = self.intakes[p]
        if isinstance(record, PartitionEnded):
            intake.known_total = record.total
            return
        if isinstance(record, ChunkAdmitted):
            self._note_chunk(p, lsn, record)
        else:
            self._note_mark(p, record.number, record.seq, lsn)
        intake.durable_seq, intake.durable_marks = intake.recorded_seq, intake.num_marks

    def _recover_rejection(self, record: SamplesRejected) -> None:
        stream = self.streams[record.stream]
        for index in np.frombuffer(record.indices_u64, "<u8").tolist():
            intake, seq = self.intakes[stream.first + index % stream.terms.partitions], index // stream.terms.partitions
            intake.rejected_seq = max(intake.rejected_seq, seq + 1)
            at = bisect_right(intake.places, seq, key=lambda place: place.stop_seq)
            if DISCARDED in record.reasons and at < len(intake.places) and intake.places[at].base_seq <= seq:
                intake.places[at].counted = True

    def forget_below(self, lsn: int) -> None:
        """Records below ``lsn`` are gone from the log."""
        for intake in self.intakes:
            gone = sum(place.lsn < lsn for place in intake.places)
            del intake.places[:gone]
            intake.place = max(intake.place - gone, 0)
