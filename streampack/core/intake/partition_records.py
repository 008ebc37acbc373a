"""Writes records of partitions to the log, and reads those of earlier brokers.

The records hold the digest of each stream's source, the ends of partitions, and the rejected samples. Other records
hold the order in which chunks and ends of batches came. Each record also updates the partition's ``Intake`` and the
feed's ``History``. When a broker starts, ``recover`` applies the records of earlier brokers, and ``learn`` the facts
that replace deleted records.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from streampack.core.columns.chunk_body import chunk_as
from streampack.core.intake.chunk_check import ReceivedChunk
from streampack.core.intake.intake import Intake
from streampack.core.intake.partitions import Partitions
from streampack.core.journal.history import ChunkPlace
from streampack.core.journal.journal import Journal
from streampack.core.journal.log_records import (
    BatchMarked,
    ChunkAdmitted,
    ChunkCompleted,
    ChunkKeys,
    KeysKept,
    PartitionEnded,
    SamplesRejected,
    SourceAccepted,
    StreamFacts,
    WriteCommitted,
)
from streampack.core.model.samples import I64, index_of
from streampack.core.model.snapshot import MIXED, Cursor, Floor
from streampack.core.protocol.events import Effect
from streampack.core.protocol.producer_messages import Mark, Offer
from streampack.core.staging.dropped_samples import POLICY_LAG, DroppedRange
from streampack.core.staging.staged_chunk import DISCARDED
from streampack.core.staging.staging import StagedRecord, Staging

KEPT_BYTES = 1 << 18
"""Most bytes of keys in one record."""


class PartitionRecords:
    """Appends records of partitions to ``journal``, and applies the records of earlier brokers."""

    def __init__(self, partitions: Partitions, journal: Journal, staging: Staging) -> None:
        self._partitions, self._journal, self._staging = partitions, journal, staging
        self.digests: dict[str, str] = {}
        """Accepted digest of each stream's source, by stream."""

    # Appending

    def accept_source(self, offer: Offer) -> list[Effect]:
        """Record the digest of a stream's source and the cursor of its first sample, if the digest is new."""
        if self.digests.get(offer.stream) == offer.source_digest:
            return []
        begin = UNSET if offer.stream in self._partitions.old_order else offer.begin
        self._note_source(offer.stream, offer.source_digest, begin)
        return self._journal.append(SourceAccepted(stream=offer.stream, source_digest=offer.source_digest, begin=begin))

    def keep_order(self, feed: str, floors: list[Floor]) -> list[Effect]:
        """Read the streams of a snapshot of an earlier version in the order of that version.

        Such a snapshot has cursors without the mark ``MIXED``, or merged samples without a cursor.
        """
        partitions, effects = self._partitions, list[Effect]()
        merged = partitions.streams_of(feed)[0].merge.current.merged_samples.tolist()
        for p, (_, cursor), count in zip(partitions.of_feed(feed), floors, merged, strict=False):
            name = partitions.name_of(p)
            if name in partitions.old_order or (count == 0 if cursor is None else cursor[0] >= MIXED):
                continue
            partitions.old_order.add(name)
            if partitions.begins.pop(name, None) is not None:
                effects += self._journal.append(SourceAccepted(stream=name, source_digest=self.digests[name]))
        return effects

    def _note_source(self, stream: str, digest: str, begin: Cursor | UnsetType) -> None:
        """Note the digest of a stream's source, and the cursor of its first sample."""
        self.digests[stream] = digest
        if begin:
            self._partitions.begins[stream] = begin
        else:
            self._partitions.begins.pop(stream, None)

    def forget_source(self, stream: str) -> None:
        """Let the next producer offer other data, if there is no log and no sample of the stream was admitted."""
        opened = self._partitions.streams[stream]
        if not self._journal.keeps and not opened.admission.counts[opened.number].samples:
            self.digests.pop(stream, None)
            self._partitions.begins.pop(stream, None)

    def append_chunk(
        self, p: int, chunk: ReceivedChunk, stale: bool, sent: I64 | None = None, behind: bool = False
    ) -> tuple[list[Effect], NDArray[np.bool_] | None]:
        """Record a chunk if samples are merged in the order of arrival; record a pushed chunk with its payload.

        ``sent`` int64 [n]: numbers with which the samples came, if they have waited for late fields. With ``behind``,
        they are read from the log later.

        Returns:
            The effects, and the samples to drop because of their keys, bool [n]; None if there are none.
        """
        intake, stream, message = self._partitions.intakes[p], self._partitions.stream_of[p], chunk.message
        stop, first = chunk.stop_seq, max(message.base_seq, intake.recorded.next_seq)
        if not stream.in_order or first >= stop or intake.closed:
            return [], None
        repeated: NDArray[np.bool_] | None = None
        keyed: ChunkKeys | UnsetType = UNSET
        if message.keys is not UNSET and message.write is not UNSET:  # such a chunk is recorded whole
            is_repeated = stream.keys.add(message.keys, message.write, self._journal.next_lsn)
            repeated = is_repeated if is_repeated.any() else None
            flags = UNSET if repeated is None else repeated.astype(np.uint8).tobytes()
            keyed = ChunkKeys(write=message.write, digests=message.keys, repeated=flags)
        facts: dict[str, Any] = {"stale": stale or UNSET, "keyed": keyed}
        if sent is not None:
            facts["sent_u64"] = sent.astype("<u8").tobytes()
        kind = ChunkAdmitted if sent is None else ChunkCompleted
        record = chunk_as(kind, message, first - message.base_seq, ("keys", "write", "warnings"), **facts)
        effects = self._journal.append(record, chunk.envelope.payload if stream.terms.pushed else ())
        lsn = self._journal.next_lsn - 1
        self._note_chunk(p, lsn, record)
        if stream.terms.pushed:
            if not behind:
                intake.recorded.place = len(intake.recorded.places)
            self._wait_until_safe(intake, lsn)
        return effects, repeated

    def append_mark(self, p: int, message: Mark) -> list[Effect]:
        """Record that a batch of a pushed partition has ended."""
        intake = self._partitions.intakes[p]
        record = BatchMarked(
            stream=message.stream, partition=message.partition, number=message.number, seq=message.seq,
            batch=message.batch,
        )  # fmt: skip
        effects = self._journal.append(record)
        lsn = self._journal.next_lsn - 1
        self._note_mark(p, message.number, message.seq, lsn)
        self._wait_until_safe(intake, lsn)
        return effects

    @staticmethod
    def _wait_until_safe(intake: Intake, lsn: int) -> None:
        """Remember that what the producer has sent so far is safe once record ``lsn`` is.

        Samples that waited for late fields are safe already.
        """
        if intake.staged is None:
            intake.note_sent(lsn)

    def commit_write(self, p: int) -> list[Effect]:
        """Record that the current write of partition ``p``'s stream is complete, and forget its keys."""
        intake, stream = self._partitions.intakes[p], self._partitions.stream_of[p]
        lsn = self._journal.next_lsn
        effects = self._journal.append(WriteCommitted(stream=stream.terms.name, write=stream.keys.write))
        stream.keys.commit(lsn)
        self._wait_until_safe(intake, lsn)
        return effects

    def keep_keys(self, lsn: int) -> list[Effect]:
        """Record the keys of all records below ``lsn`` again, because these records will be deleted."""
        effects: list[Effect] = []
        for name, stream in self._partitions.streams.items():
            keys = b"".join(stream.keys.take_below(lsn))
            for at in range(0, len(keys), KEPT_BYTES):
                part = keys[at : at + KEPT_BYTES]
                stream.keys.keep(part, self._journal.next_lsn)
                effects += self._journal.append(KeysKept(stream=name, write=stream.keys.write, keys=part))
        return effects

    def append_end(self, p: int, total: int) -> list[Effect]:
        """Record that a partition has ended after ``total`` samples, unless that is recorded already."""
        intake, stream = self._partitions.intakes[p], self._partitions.stream_of[p]
        if intake.recorded.known_total is not None:
            return []
        lsn = self._journal.next_lsn
        intake.recorded.add_end(total, lsn)
        ended = PartitionEnded(stream=stream.terms.name, partition=p - stream.first, total=total)
        effects = self._journal.append(ended)
        if stream.terms.pushed:
            self._wait_until_safe(intake, lsn)
        return effects

    def append_rejection(self, p: int, seqs: I64, reasons: dict[str, int]) -> list[Effect]:
        """Record rejected samples: their sequence numbers, int64 [n], and the count of each reason."""
        stream = self._partitions.stream_of[p]
        indices = np.asarray(index_of(seqs, p - stream.first, stream.terms.partitions), "<u8")
        record = SamplesRejected(stream=stream.terms.name, indices_u64=indices.tobytes(), reasons=reasons)
        for seq in seqs.tolist():
            _note_dropped(self._partitions.intakes[p], seq, reasons)
        return self._journal.append(record)

    def discard(self, feed: str) -> list[Effect]:
        """Record the pushed samples of ``feed`` that are lost because trainers went back, if not recorded yet."""
        effects: list[Effect] = []
        partitions = self._partitions.of_feed(feed)
        for place in self._partitions.stream_of[partitions[0]].history.order if partitions else ():
            p = partitions[place.partition]
            pushed = self._partitions.stream_of[p].terms.pushed
            if place.lost and place.count and not place.counted and pushed:
                place.counted = True
                seqs = np.arange(place.base_seq, place.stop_seq)
                effects += self.append_rejection(p, seqs, {DISCARDED: place.count})
        return effects

    def _note_chunk(self, p: int, lsn: int, record: ChunkAdmitted) -> None:
        """Add a chunk at log sequence number ``lsn`` to the partition's intake and the feed's history."""
        intake, stream = self._partitions.intakes[p], self._partitions.stream_of[p]
        lengths = np.frombuffer(record.lengths_u32, "<u4")
        version = -1 if record.policy_version is UNSET else record.policy_version
        place = ChunkPlace(
            stream.number_in_feed(p), record.base_seq, len(lengths), lsn, int(lengths.sum()), version=version
        )
        if isinstance(record, ChunkCompleted):
            place.sent = np.frombuffer(record.sent_u64, "<u8").astype(np.int64)
            if intake.staged is not None and (record.stale or not lengths.any()):
                intake.staged.drops.add(place.sent.tolist(), [POLICY_LAG] if record.stale else record.rejected)
        if record.base_seq > intake.recorded.next_seq:
            stream.history.is_cut = True
        intake.recorded.add_chunk(place, stream.terms.pushed)
        stream.history.add_chunk(place)

    def _note_mark(self, p: int, number: int, seq: int, lsn: int) -> None:
        """Add the end of batch ``number`` at log sequence number ``lsn`` to the intake and the feed's history."""
        intake, stream = self._partitions.intakes[p], self._partitions.stream_of[p]
        place = ChunkPlace(stream.number_in_feed(p), seq, 0, lsn, 0, mark=number)
        intake.recorded.add_mark(place)
        stream.history.add_chunk(place)

    # Records of earlier brokers

    def facts(self) -> dict[str, StreamFacts]:
        """Return the facts of each stream that must survive when records of the log are deleted, by stream."""
        intakes = {
            name: [self._partitions.intakes[p] for p in self._partitions.of_stream(name)]
            for name in self._partitions.streams
        }
        return {
            name: StreamFacts(
                source_digest=self.digests.get(name, ""),
                begin=self._partitions.begins.get(name, UNSET),
                totals=[intake.recorded.known_total for intake in of_stream],
                recorded=[intake.recorded.next_seq for intake in of_stream],
                marks=[intake.recorded.num_marks for intake in of_stream],
                write=self._partitions.streams[name].keys.write or UNSET,
                staged=[(intake.sent_seq, intake.sent_marks) for intake in of_stream] if of_stream[0].staged else UNSET,
                dropped=_dropped(of_stream),
            )
            for name, of_stream in intakes.items()
        }

    def learn(self, stream: str, facts: StreamFacts) -> None:
        """Apply the facts of a stream that an earlier broker recorded."""
        if facts.source_digest:
            self._note_source(stream, facts.source_digest, facts.begin)
        self._partitions.streams[stream].keys.begin(facts.write or 0)
        intakes = [self._partitions.intakes[p] for p in self._partitions.of_stream(stream)]
        for intake, total in zip(intakes, facts.totals, strict=False):
            intake.recorded.known_total = total
        for intake, recorded, marks in zip(intakes, facts.recorded, facts.marks, strict=False):
            intake.recorded.take_over(recorded, marks)
        for intake, (seq, marks) in zip(intakes, facts.staged or (), strict=False):
            if intake.staged is not None:
                intake.staged.next_seq = max(intake.staged.next_seq, seq)
                intake.staged.num_marks = max(intake.staged.num_marks, marks)
                intake.note_all_safe()
        for intake, ranges in zip(intakes, facts.dropped or (), strict=False):
            if intake.staged is not None:
                intake.staged.drops.ranges = list(ranges)

    def recover(
        self,
        lsn: int,
        record: SourceAccepted
        | ChunkAdmitted
        | SamplesRejected
        | BatchMarked
        | PartitionEnded
        | WriteCommitted
        | KeysKept
        | StagedRecord,
    ) -> None:
        """Apply a record of an earlier broker while this broker starts."""
        if isinstance(record, SourceAccepted):
            self._note_source(record.stream, record.source_digest, record.begin)
            return
        if isinstance(record, SamplesRejected):
            self._recover_rejection(record)
            return
        keys = self._partitions.streams[record.stream].keys
        if isinstance(record, WriteCommitted):
            keys.begin(record.write + 1)
            return
        if isinstance(record, KeysKept):
            keys.recover(record.keys, record.write, lsn)
            return
        p = self._partitions.streams[record.stream].first + record.partition
        intake = self._partitions.intakes[p]
        if isinstance(record, PartitionEnded):
            intake.recorded.known_total = record.total
            if intake.staged is not None:
                intake.staged.clear()
            return
        if isinstance(record, StagedRecord):
            self._staging.recover(p, lsn, record)
        elif isinstance(record, ChunkAdmitted):
            self._note_chunk(p, lsn, record)
            if intake.staged is not None and isinstance(record, ChunkCompleted):
                intake.staged.admitted(np.frombuffer(record.sent_u64, "<u8").tolist())
            if record.keyed is not UNSET:
                keys.recover(record.keyed.digests, record.keyed.write, lsn)
        else:
            self._note_mark(p, record.number, record.seq, lsn)
            if intake.staged is not None:
                intake.staged.mark_admitted(record.number)
        intake.note_all_safe()

    def _recover_rejection(self, record: SamplesRejected) -> None:
        """Apply a record of rejected samples, so that these samples are not recorded again."""
        stream = self._partitions.streams[record.stream]
        count = stream.terms.partitions
        for index in np.frombuffer(record.indices_u64, "<u8").tolist():
            intake, seq = self._partitions.intakes[stream.first + index % count], index // count
            intake.recorded.rejected_seq = max(intake.recorded.rejected_seq, seq + 1)
            place = _note_dropped(intake, seq, record.reasons)
            if DISCARDED in record.reasons and place is not None:
                place.counted = True

    def forget_below(self, lsn: int) -> None:
        """Forget chunks below log sequence number ``lsn``: their records were deleted from the log."""
        for intake in self._partitions.intakes:
            intake.recorded.forget_below(lsn)


def _note_dropped(intake: Intake, seq: int, reasons: Iterable[str]) -> ChunkPlace | None:
    """Let programs that give late values know that sample ``seq`` was dropped; return its place, if it is known."""
    place = intake.recorded.place_of(seq)
    if place is not None and place.sent is not None and intake.staged is not None:
        intake.staged.drops.add([int(place.sent[seq - place.base_seq])], reasons)
    return place


def _dropped(intakes: list[Intake]) -> list[list[DroppedRange]] | UnsetType:
    """Return the dropped samples of a stream's partitions; ``UNSET`` if there are none."""
    dropped = [[] if intake.staged is None else list(intake.staged.drops.ranges) for intake in intakes]
    return dropped if any(dropped) else UNSET


def repeated_of(record: ChunkAdmitted) -> NDArray[np.bool_] | None:
    """Return the samples of a recorded chunk that were dropped because of their keys, bool [n]; None for none."""
    if record.keyed is UNSET or record.keyed.repeated is UNSET:
        return None
    return np.frombuffer(record.keyed.repeated, np.uint8).astype(np.bool_)
