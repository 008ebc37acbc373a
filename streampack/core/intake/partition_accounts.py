"""The books of every partition: what of it was taken, what waits, where it is read again from.

They know samples by sequence number and ``partitions`` by number (``p``); of producers they know nothing: who holds a
partition, and what may be sent, is ``rebalance``'s matter. A chunk that was found good is recorded where its arrival
decides the order (with its payload where nobody can send it again), and admitted. When a feed goes to another place its
partitions are read again from their floors: by a producer, or, where samples were pushed, out of the log.
"""

from __future__ import annotations

import numpy as np
from msgspec import UNSET

from streampack.core.intake.admission import POLICY_LAG
from streampack.core.intake.chunk_check import Received, received
from streampack.core.intake.partitions import Partitions
from streampack.core.journal.journal import Journal
from streampack.core.journal.log_effects import Recall, Recalled
from streampack.core.journal.log_records import BatchMarked, ChunkAdmitted, PartitionEnded
from streampack.core.merge.arrival import Arrival
from streampack.core.model.samples import I64
from streampack.core.model.snapshot import Floor
from streampack.core.protocol.effects import Store
from streampack.core.protocol.events import Effect
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.producer_messages import OVERLONG, Mark, Samples


class Books(Partitions):
    """The partitions, and what is taken of them."""

    def __init__(self, run: int, quota_tokens: int, journal: Journal) -> None:
        super().__init__(quota_tokens, journal)
        self._run = run
        self.absent: dict[int, tuple[int, int]] = {}
        """Handles of samples that are known and whose payload is to come again: (partition, sequence number)."""

    # Taking samples

    def take(self, p: int, chunk: Received) -> list[Effect]:
        """Record and admit a chunk that was found good."""
        version = chunk.message.policy_version
        stale = version is not UNSET and self.stream_of[p].history.is_stale(version)
        return self._record(p, chunk, stale) + self._admit(p, chunk, stale)

    def _admit(self, p: int, chunk: Received, stale: bool) -> list[Effect]:
        intake, stream = self.intakes[p], self.stream_of[p]
        effects, rejected = stream.admission.admit(stream.number, stream.mine(p), intake, chunk, stale)
        if self.absent:
            for effect in effects:
                for handle in effect.handles.tolist() if isinstance(effect, Store) else ():
                    self.absent.pop(handle, None)
        rejected = rejected[rejected >= intake.rejected_seq] if len(rejected) else rejected
        if len(rejected):
            intake.rejected_seq = int(rejected[-1]) + 1
            reasons = dict(chunk.message.rejected)
            more = len(rejected) - sum(reasons.values())
            if more > 0:
                why = POLICY_LAG if stale else OVERLONG
                reasons[why] = reasons.get(why, 0) + more
            effects += self._journal.append(self._rejection(p, rejected, reasons))
        return effects

    def _record(self, p: int, chunk: Received, stale: bool) -> list[Effect]:
        """Write down when a chunk came, where that decides the order; with its payload where it cannot come again."""
        intake, stream, message = self.intakes[p], self.stream_of[p], chunk.message
        stop, first = chunk.stop_seq, max(message.base_seq, intake.recorded_seq)
        if not stream.in_order or first >= stop or intake.closed:
            return []
        skip = first - message.base_seq
        record = ChunkAdmitted(
            stream=message.stream, partition=message.partition, base_seq=first,
            lengths_u32=message.lengths_u32[4 * skip :], crcs_u32=message.crcs_u32[4 * skip :],
            loss_tokens_u32=message.loss_tokens_u32[4 * skip :], cursor=message.cursor,
            rejected=message.rejected if not skip else {}, lost_tokens=message.lost_tokens if not skip else 0,
            pass_ended=message.pass_ended, keep=message.keep, policy_version=message.policy_version,
            stale=stale or UNSET,
        )  # fmt: skip
        effects = self._journal.append(record, chunk.envelope.payload if stream.terms.pushed else ())
        lsn = self._journal.next_lsn - 1
        self._note_chunk(p, lsn, record)
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
            rejected=record.rejected, lost_tokens=record.lost_tokens, pass_ended=record.pass_ended, keep=record.keep,
        )  # fmt: skip
        envelope = Envelope(run=self._run, epoch=0, fence=0, message=message, payload=event.payload)
        chunk = received(envelope, message)
        assert isinstance(chunk, Received)  # it was found good before it was recorded
        intake.place += 1
        return p, self._admit(p, chunk, bool(record.stale))

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
