"""The books of every partition: what of it was taken, what the log has of it, where it is read again from.

They know samples by sequence number and partitions by number (``p``), numbered through over all feeds; of
producers they know nothing: who holds a partition, and what may be sent, is ``leases``' matter. A
chunk that was found good is recorded where its arrival decides the order (with its payload where nobody can
send it again), and admitted. When a feed goes to another place its partitions are read again from
their floors: by a producer, or, where samples were pushed, out of the log.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from streampack.core.admission import Admission, StreamTerms, lengths_of, terms_of
from streampack.core.arrival import Arrival
from streampack.core.effects import Recall, Recalled, Store
from streampack.core.events import Effect
from streampack.core.history import ChunkPlace, History
from streampack.core.intake import Intake
from streampack.core.journal import Journal
from streampack.core.messages import OVERLONG, Envelope, Mark, Samples
from streampack.core.records import (
    BatchMarked,
    ChunkAdmitted,
    PartitionEnded,
    SamplesRejected,
    SourceAccepted,
    StreamFacts,
)
from streampack.core.rules import Rules
from streampack.core.samples import I64, index_of
from streampack.core.snapshot import Floor

DISCARDED = "discarded"
"""Why samples are rejected that were pushed before trainers went back."""


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


class Books:
    """The books; ``open`` adds a feed's streams, or more of them. ``quota_tokens`` of each partition may wait."""

    def __init__(self, run: int, quota_tokens: int, journal: Journal) -> None:
        self._run, self._quota_tokens, self._journal = run, quota_tokens, journal
        self.streams: dict[str, Stream] = {}
        self.stream_of: list[Stream] = []
        self.intakes: list[Intake] = []
        self._of_feed: dict[str, list[int]] = {}
        self.digests: dict[str, str] = {}
        """Of the streams' sources, as accepted."""
        self.absent: dict[int, tuple[int, int]] = {}
        """Handles of samples that are known and whose payload is to come again: (partition, sequence number)."""

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

    def partitions(self, stream: str) -> range:
        """Those of a stream."""
        first = self.streams[stream].first
        return range(first, first + self.streams[stream].terms.partitions)

    def partition(self, stream: str, partition: int) -> int | None:
        """The number of a partition, if there is one."""
        known = self.streams.get(stream)
        if known is None or not 0 <= partition < known.terms.partitions:
            return None
        return known.first + partition

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

    # Taking samples

    def take(self, p: int, envelope: Envelope, message: Samples) -> list[Effect]:
        """Record and admit a chunk that was found good."""
        return self._record(p, envelope, message) + self._admit(p, envelope, message)

    def _admit(self, p: int, envelope: Envelope, message: Samples) -> list[Effect]:
        intake, stream = self.intakes[p], self.stream_of[p]
        effects, rejected = stream.admission.admit(stream.number, stream.mine(p), intake, envelope, message)
        if self.absent:
            for effect in effects:
                for handle in effect.handles.tolist() if isinstance(effect, Store) else ():
                    self.absent.pop(handle, None)
        rejected = rejected[rejected >= intake.rejected_seq]
        if len(rejected):
            intake.rejected_seq = int(rejected[-1]) + 1
            reasons = dict(message.rejected)
            more = len(rejected) - sum(reasons.values())
            if more > 0:
                reasons[OVERLONG] = reasons.get(OVERLONG, 0) + more
            effects += self._journal.append(self._rejection(p, rejected, reasons))
        return effects

    def _record(self, p: int, envelope: Envelope, message: Samples) -> list[Effect]:
        """Write down when a chunk came, where that decides the order; with its payload where it cannot come again."""
        intake, stream = self.intakes[p], self.stream_of[p]
        lengths = lengths_of(message)
        stop, first = message.base_seq + len(lengths), max(message.base_seq, intake.recorded_seq)
        if not stream.in_order or first >= stop or intake.closed:
            return []
        skip = first - message.base_seq
        record = ChunkAdmitted(
            stream=message.stream, partition=message.partition, base_seq=first,
            lengths_u32=message.lengths_u32[4 * skip :], crcs_u32=message.crcs_u32[4 * skip :],
            loss_tokens_u32=message.loss_tokens_u32[4 * skip :], cursor=message.cursor,
            rejected=message.rejected if not skip else {}, lost_tokens=message.lost_tokens if not skip else 0,
            pass_ended=message.pass_ended,
        )  # fmt: skip
        effects = self._journal.append(record, envelope.payload if stream.terms.pushed else ())
        lsn = self._journal.next_lsn - 1
        self._note_chunk(p, first, stop - first, int(lengths[skip:].sum()), lsn)
        if stream.terms.pushed:
            intake.place = len(intake.places)
            intake.unsafe.append((lsn, stop, intake.num_marks))
        return effects

    def mark(self, p: int, message: Mark) -> list[Effect]:
        """A batch of a pushed partition has ended."""
        intake = self.intakes[p]
        record = BatchMarked(
            stream=message.stream, partition=message.partition, number=message.number, seq=message.seq,
            batch=message.batch,
        )  # fmt: skip
        effects = self._journal.append(record)
        lsn = self._journal.next_lsn - 1
        self._note_mark(p, message.number, message.seq, lsn)
        intake.unsafe.append((lsn, intake.recorded_seq, intake.num_marks))
        return effects

    def end(self, p: int, total: int) -> list[Effect]:
        """A partition has ``total`` samples; it is done once all of them are taken."""
        intake = self.intakes[p]
        effects: list[Effect] = []
        if intake.known_total is None:
            intake.known_total = total
            stream = self.stream_of[p]
            ended = PartitionEnded(stream=stream.terms.name, partition=p - stream.first, total=total)
            intake.end_lsn = self._journal.next_lsn
            effects = self._journal.append(ended)
            if stream.terms.pushed:
                intake.unsafe.append((intake.end_lsn, intake.recorded_seq, intake.num_marks))
        if not intake.behind:
            self._end(p)
        return effects

    def _end(self, p: int) -> None:
        stream = self.stream_of[p]
        self.intakes[p].total = self.intakes[p].known_total
        stream.admission.merge.end(stream.mine(p))

    def _note_chunk(self, p: int, base_seq: int, count: int, tokens: int, lsn: int) -> None:
        """A chunk is in the log's order."""
        intake, stream = self.intakes[p], self.stream_of[p]
        place = ChunkPlace(stream.mine(p), base_seq, count, lsn, tokens)
        if base_seq > intake.recorded_seq:
            stream.history.is_cut = True
        intake.recorded_seq = base_seq + count
        if stream.terms.pushed:
            intake.places.append(place)
        stream.history.order.append(place)

    def _note_mark(self, p: int, number: int, seq: int, lsn: int) -> None:
        intake, stream = self.intakes[p], self.stream_of[p]
        place = ChunkPlace(stream.mine(p), seq, 0, lsn, 0, mark=number)
        intake.num_marks = number + 1
        intake.places.append(place)
        stream.history.order.append(place)

    # Reading the log

    def pull(self, p: int) -> list[Effect]:
        """Take a pushed partition's next samples out of the log, where there is room for them."""
        intake, stream = self.intakes[p], self.stream_of[p]
        merge, mine = stream.admission.merge, stream.mine(p)
        while intake.behind and not intake.recalling and not intake.unwanted:
            place = intake.places[intake.place]
            if place.mark >= 0:
                if isinstance(merge, Arrival) and place.mark >= merge.marks[mine]:
                    merge.end_pass(mine)
            elif place.lost and place.stop_seq > max(intake.expected_seq, intake.known_seq):
                begin = max(place.base_seq, intake.known_seq)
                none = np.zeros(place.stop_seq - begin, np.int64)
                merge.push(mine, none - 1, none, none)
                intake.expected_seq = place.stop_seq
            elif place.stop_seq > intake.expected_seq:
                waiting = intake.kept_tokens - intake.merged_tokens + place.tokens
                if waiting * intake.token_bytes > intake.quota_bytes or place.stop_seq > intake.grant_seq:
                    return []
                intake.expected_seq = place.base_seq
                intake.recalling = True
                return [Recall(stream.feed, place.lsn)]
            intake.place += 1
        if stream.terms.pushed and not intake.behind and intake.total is None and intake.known_total is not None:
            self._end(p)
        return []

    def recalled(self, event: Recalled) -> tuple[int | None, list[Effect]]:
        """A chunk of a pushed partition, out of the log; which partition, or None if nobody waits for it."""
        record = event.record
        assert isinstance(record, ChunkAdmitted)
        p = self.partition(record.stream, record.partition)
        if p is None or not self.intakes[p].recalling:
            return None, []
        intake = self.intakes[p]
        intake.recalling = False
        message = Samples(
            stream=record.stream, partition=record.partition, base_seq=record.base_seq, lengths_u32=record.lengths_u32,
            crcs_u32=record.crcs_u32, loss_tokens_u32=record.loss_tokens_u32, cursor=record.cursor,
            rejected=record.rejected, lost_tokens=record.lost_tokens, pass_ended=record.pass_ended,
        )  # fmt: skip
        envelope = Envelope(run=self._run, epoch=0, fence=0, message=message, payload=event.payload)
        intake.place += 1
        return p, self._admit(p, envelope, message)

    # Going elsewhere

    def go_to(self, feed: str, floors: list[Floor], held: I64) -> None:
        """``feed`` has gone to another place: its merge says how far, ``held`` are the handles of samples, int64 [n],
        whose payload is wanted again, from ``floors`` on, one a partition."""
        self._forget_all(feed)
        for p, floor in zip(self.of_feed(feed), floors, strict=False):
            stream, intake = self.stream_of[p], self.intakes[p]
            merge, mine = stream.admission.merge, stream.mine(p)
            intake.go_to(floor, int(merge.merged_samples[mine]), int(merge.merged_tokens[mine]))
            whole = intake.known_total is not None and intake.expected_seq >= intake.known_total
            if whole and not intake.behind:
                self._end(p)
        for p in self.of_feed(feed)[len(floors) :]:  # of streams that join later
            self.intakes[p].closed = True
            self.intakes[p].awaited.clear()
        self._await(feed, held)

    def join(self, feed: str, known: int) -> list[int]:
        """The merge of ``feed`` has more partitions now than the ``known``: these, from their beginning."""
        of_feed = self.of_feed(feed)
        more = of_feed[known : len(self.stream_of[of_feed[0]].admission.merge.merged_samples)]
        for p in more:
            self.intakes[p].go_to((0, None), 0, 0)
        return more

    def floors(self, feed: str, held: I64) -> list[Floor]:
        """Where each partition of ``feed`` is read again from, so that the samples ``held`` (handles, int64 [n]) and
        all that are not merged come."""
        mine = self.of_feed(feed)
        admission = self.stream_of[mine[0]].admission
        table, lowest = admission.table, np.array(admission.merge.merged_samples)
        streams = self._streams_of(feed)
        locals_ = np.array([stream.local for stream in streams])
        counts = np.array([stream.terms.partitions for stream in streams])
        number, index = table.stream[held].astype(np.int64), table.index[held]
        np.minimum.at(lowest, locals_[number] + index % counts[number], index // counts[number])
        return [self.intakes[p].floor(seq) for p, seq in zip(mine, lowest.tolist(), strict=False)]

    def _await(self, feed: str, held: I64) -> None:
        """Note which samples' payload is to come again."""
        streams = self._streams_of(feed)
        table = streams[0].admission.table
        rows = zip(held.tolist(), table.stream[held].tolist(), table.index[held].tolist(), strict=True)
        for handle, number, index in rows:
            stream = streams[number]
            p, seq = stream.first + index % stream.terms.partitions, index // stream.terms.partitions
            self.intakes[p].awaited.setdefault(seq, []).append(handle)
            self.absent[handle] = (p, seq)

    def forget(self, handles: I64) -> None:
        """Samples that are released need no payload any more."""
        for handle in handles.tolist() if self.absent else ():
            p, seq = self.absent.pop(handle, (-1, 0))
            awaited = self.intakes[p].awaited if p >= 0 else {}
            if seq in awaited:
                awaited[seq].remove(handle)
                if not awaited[seq]:
                    del awaited[seq]

    def _forget_all(self, feed: str) -> None:
        mine = set(self.of_feed(feed))
        self.absent = {handle: at for handle, at in self.absent.items() if at[0] not in mine}

    def _streams_of(self, feed: str) -> list[Stream]:
        return [stream for stream in self.streams.values() if stream.feed == feed]

    # Quarantine

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

    # The log

    def accept(self, stream: str, source_digest: str) -> list[Effect]:
        """A stream is what a source of this digest gives."""
        if self.digests.get(stream) == source_digest:
            return []
        self.digests[stream] = source_digest
        return self._journal.append(SourceAccepted(stream=stream, source_digest=source_digest))

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
            lengths = np.frombuffer(record.lengths_u32, "<u4")
            self._note_chunk(p, record.base_seq, len(lengths), int(lengths.sum()), lsn)
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
