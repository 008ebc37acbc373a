"""Records and admits the chunks of every partition, and reads partitions again.

A valid chunk is first recorded, if the order of steps depends on its arrival, and then admitted. When a feed goes back
or forward, a producer reads each of its partitions again from a floor. Pushed samples are read again from the log. The
module does not know producers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from streampack.core.columns.chunk_body import chunk_as
from streampack.core.intake.chunk_check import ReceivedChunk, parse_chunk
from streampack.core.intake.partition_records import PartitionRecords, repeated_of
from streampack.core.intake.partitions import Partitions
from streampack.core.journal.key_index import REPEATED
from streampack.core.journal.log_effects import Recall, Recalled
from streampack.core.journal.log_records import ChunkAdmitted
from streampack.core.merge.arrival import Arrival
from streampack.core.model.samples import I32, I64, SampleTable
from streampack.core.model.snapshot import Floor
from streampack.core.protocol.effects import Store
from streampack.core.protocol.events import Effect
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.producer_messages import OVERLONG, Samples
from streampack.core.staging.dropped_samples import POLICY_LAG


class PartitionAccounts:
    """Takes the samples of all partitions; a partition is named by its number ``p``.

    Args:
        run: The run's number.
        partitions: The partitions of all feeds.
        records: Writes their records to the log.
        table: The metadata of all samples.
        max_chunk_bytes: Most bytes of a chunk.
    """

    def __init__(
        self, run: int, partitions: Partitions, records: PartitionRecords, table: SampleTable, max_chunk_bytes: int
    ) -> None:  # fmt: skip
        self._run, self._partitions, self._records, self._table = run, partitions, records, table
        self._max_chunk_bytes = max_chunk_bytes
        self.absent: dict[int, tuple[int, int]] = {}
        """(partition, sequence number) of each sample whose payload is to come again, by handle."""

    # Taking samples

    def take(self, p: int, chunk: ReceivedChunk, sent: I64 | None = None) -> list[Effect]:
        """Record a good chunk in the log, and admit its samples.

        ``sent`` int64 [n]: numbers with which the samples came, if they waited for late fields. They may be complete
        while the partition is read from the log again, or just after, when its samples take all the memory. Then they
        are read from the log later.
        """
        intake = self._partitions.intakes[p]
        behind = intake.behind or (sent is not None and not intake.may_keep(chunk.num_tokens, chunk.extra_bytes))
        version = chunk.message.policy_version
        stale = version is not UNSET and self._partitions.stream_of[p].history.is_stale(version)
        effects, repeated = self._records.append_chunk(p, chunk, stale, sent, behind)
        if not behind:
            return effects + self._admit(p, chunk, stale, repeated)
        stream = self._partitions.stream_of[p]
        merge = stream.merge.current
        assert isinstance(merge, Arrival)  # only pushed partitions are behind
        merge.script(stream.number_in_feed(p), chunk.message.base_seq, len(chunk.lengths))
        return effects

    def _admit(
        self, p: int, chunk: ReceivedChunk, stale: bool, repeated: NDArray[np.bool_] | None = None
    ) -> list[Effect]:
        """Admit the samples of a chunk, and record the dropped ones: ``repeated`` samples, or all if ``stale``."""
        intake, stream = self._partitions.intakes[p], self._partitions.stream_of[p]
        effects, rejected = stream.admission.admit(
            stream.number, stream.number_in_feed(p), intake, chunk, stale, repeated
        )
        if self.absent:
            for effect in effects:
                for handle in effect.handles.tolist() if isinstance(effect, Store) else ():
                    self.absent.pop(handle, None)
        rejected = rejected[rejected >= intake.recorded.rejected_seq] if len(rejected) else rejected
        if len(rejected):
            intake.recorded.rejected_seq = int(rejected[-1]) + 1
            reasons = dict(chunk.message.rejected)
            if repeated is not None and not stale:
                reasons[REPEATED] = int((repeated & (chunk.lengths > 0)).sum())
            more = len(rejected) - sum(reasons.values())
            if more > 0:
                why = POLICY_LAG if stale else OVERLONG
                reasons[why] = reasons.get(why, 0) + more
            effects += self._records.append_rejection(p, rejected, reasons)
        return effects

    def end(self, p: int, total: int) -> list[Effect]:
        """Record that a partition has ended after ``total`` samples."""
        effects = self._records.append_end(p, total)
        if not self._partitions.intakes[p].behind:
            self._end_merge(p)
        return effects

    def _end_merge(self, p: int) -> None:
        """Tell the merge that a partition has no more samples."""
        stream, intake = self._partitions.stream_of[p], self._partitions.intakes[p]
        intake.total = intake.recorded.known_total
        stream.merge.current.end(stream.number_in_feed(p))

    def note_merged(self, feed: str, moved: I64) -> list[int]:
        """Update the merged samples and tokens of the partitions whose samples the merge of ``feed`` has taken.

        Args:
            feed: Name of the feed.
            moved: int64 [n], the feed's own numbers of the partitions.

        Returns:
            The numbers of these partitions over all feeds.
        """
        partitions, moved_partitions = self._partitions.of_feed(feed), list[int]()
        for number in moved.tolist():
            p = partitions[number]
            intake, merge = self._partitions.intakes[p], self._partitions.stream_of[p].merge.current
            intake.merged_seq = int(merge.merged_samples[number])
            intake.merged_tokens = int(merge.merged_tokens[number])
            moved_partitions.append(p)
        return moved_partitions

    def note_extra_bytes(self, feed: str, streams: I32, indices: I64, num_bytes: I64) -> None:
        """Count the media of samples that the merge of ``feed`` has taken as merged.

        Args:
            feed: Name of the feed.
            streams: [n], number of each sample's stream in the feed.
            indices: int64 [n], index of each sample in its stream.
            num_bytes: int64 [n], bytes of its media.
        """
        for stream in self._partitions.streams.values():
            in_stream = streams == stream.number
            if stream.feed != feed or not in_stream.any():
                continue
            count = stream.terms.partitions
            merged = np.bincount(indices[in_stream] % count, num_bytes[in_stream], count).astype(np.int64)
            for partition in np.flatnonzero(merged).tolist():
                self._partitions.intakes[stream.first + partition].waiting_extra -= int(merged[partition])

    # Reading the log

    def pull(self, p: int) -> list[Effect]:
        """Ask the log for a pushed partition's next chunk (``Recall``), if the log has one and there is room for it."""
        intake, stream = self._partitions.intakes[p], self._partitions.stream_of[p]
        merge, number, recorded = stream.merge.current, stream.number_in_feed(p), intake.recorded
        while recorded.behind and not recorded.recalling and not intake.unwanted:
            place = recorded.places[recorded.place]
            if place.mark >= 0:
                if isinstance(merge, Arrival) and place.mark >= merge.num_barriers_pushed[number]:
                    merge.end_pass(number)
            elif place.lost and place.stop_seq > max(intake.expected_seq, intake.known_seq):
                begin = max(place.base_seq, intake.known_seq)
                none = np.zeros(place.stop_seq - begin, np.int64)
                merge.push(number, none - 1, none, none)
                intake.expected_seq = place.stop_seq
            elif place.stop_seq > intake.expected_seq:
                # Records do not count media, so the chunk may have as many bytes of them as any chunk.
                most = self._max_chunk_bytes if stream.rules.has_extra_bytes else 0
                media = max(most - place.tokens * intake.token_bytes, 0)
                if not intake.may_keep(place.tokens, media) or place.stop_seq > intake.grant_seq:
                    return []
                intake.expected_seq = place.base_seq
                recorded.recalling = True
                return [Recall(stream.feed, place.lsn)]
            recorded.place += 1
        if stream.terms.pushed and not recorded.behind and intake.total is None and recorded.known_total is not None:
            self._end_merge(p)
        return []

    def recalled(self, event: Recalled) -> tuple[int | None, list[Effect]]:
        """Admit a chunk of a pushed partition that was read from the log.

        Returns:
            The partition (None if it does not wait for the chunk), and the effects.
        """
        record = event.record
        assert isinstance(record, ChunkAdmitted)
        p = self._partitions.find(record.stream, record.partition)
        if p is None or not self._partitions.intakes[p].recorded.recalling:
            return None, []
        intake = self._partitions.intakes[p]
        intake.recorded.recalling = False
        if self._partitions.stream_of[p].merge.awaits_state:  # it is read again from there
            return None, []
        message = chunk_as(Samples, record)
        envelope = Envelope(run=self._run, epoch=0, fence=0, message=message, payload=event.payload)
        chunk = parse_chunk(envelope, message, self._partitions.stream_of[p].terms)
        assert isinstance(chunk, ReceivedChunk)  # the chunk was checked before it was recorded
        intake.recorded.place += 1
        return p, self._admit(p, chunk, bool(record.stale), repeated_of(record))

    # Reading again

    def cut_anew(self, feed: str, merged: Sequence[int]) -> None:
        """Record rejected samples again that are not among the first ``merged`` of each partition of ``feed``.

        They are cut in another way now, so others of them may be rejected.
        """
        for p, seq in zip(self._partitions.of_feed(feed), merged, strict=False):
            recorded = self._partitions.intakes[p].recorded
            recorded.rejected_seq = min(recorded.rejected_seq, seq)

    def go_to(self, feed: str, floors: list[Floor], awaited: I64) -> None:
        """Read the partitions of ``feed`` again from their floors, after its merge went back or forward.

        Args:
            feed: Name of the feed.
            floors: Place to read each partition from, for every partition that the merge knows.
            awaited: Handles of samples whose payload is to come again, int64 [n].
        """
        partitions = self._partitions.of_feed(feed)
        of_feed = set(partitions)
        self.absent = {handle: at for handle, at in self.absent.items() if at[0] not in of_feed}
        for p, floor in zip(partitions, floors, strict=False):
            stream, intake = self._partitions.stream_of[p], self._partitions.intakes[p]
            merge, number = stream.merge.current, stream.number_in_feed(p)
            intake.go_to(floor, int(merge.merged_samples[number]), int(merge.merged_tokens[number]))
            total = intake.recorded.known_total
            whole = total is not None and intake.expected_seq >= total
            if whole and not intake.behind:
                self._end_merge(p)
        for p in partitions[len(floors) :]:  # partitions of streams that join later
            self._partitions.intakes[p].closed = True
            self._partitions.intakes[p].awaited.clear()
        self._await(feed, awaited)

    def absent_of(self, feed: str) -> I64:
        """Return the handles of samples of ``feed`` whose payload is to come again, int64 [n]."""
        of_feed = set(self._partitions.of_feed(feed))
        return np.array([handle for handle, at in self.absent.items() if at[0] in of_feed], np.int64)

    def join(self, feed: str, first_new: int) -> list[int]:
        """Read the new partitions of ``feed``, those from number ``first_new`` on, from their first sample.

        Returns:
            The numbers of these partitions.
        """
        partitions = self._partitions.of_feed(feed)
        more = partitions[first_new : len(self._partitions.stream_of[partitions[0]].merge.current.merged_samples)]
        for p in more:
            self._partitions.intakes[p].go_to((0, None), 0, 0)
        return more

    def floors(self, feed: str, needed: I64) -> list[Floor]:
        """Return the place to read each partition of ``feed`` from, to get samples again.

        Args:
            feed: Name of the feed.
            needed: Handles of samples that are needed again, int64 [n], beside all samples that are not merged.
        """
        partitions, streams = self._partitions.of_feed(feed), self._partitions.streams_of(feed)
        lowest = np.array(streams[0].merge.current.merged_samples)
        firsts = np.array([stream.first_in_feed for stream in streams])
        counts = np.array([stream.terms.partitions for stream in streams])
        number, index = self._table.stream[needed].astype(np.int64), self._table.index[needed]
        seq, place = np.divmod(index, counts[number])
        np.minimum.at(lowest, firsts[number] + place, seq)
        return [self._floor(p, seq) for p, seq in zip(partitions, lowest.tolist(), strict=False)]

    def _floor(self, p: int, seq: int) -> Floor:
        """Return the place to read partition ``p`` from, to get sample ``seq``."""
        first, cursor = self._partitions.intakes[p].floor(seq)
        return first, self._partitions.begins.get(self._partitions.name_of(p)) if cursor is None else cursor

    def _await(self, feed: str, awaited: I64) -> None:
        """Note that the payload of samples is to come again; ``awaited`` int64 [n], their handles."""
        streams, table = self._partitions.streams_of(feed), self._table
        rows = zip(awaited.tolist(), table.stream[awaited].tolist(), table.index[awaited].tolist(), strict=True)
        for handle, number, index in rows:
            stream = streams[number]
            p, seq = stream.first + index % stream.terms.partitions, index // stream.terms.partitions
            self._partitions.intakes[p].awaited.setdefault(seq, []).append(handle)
            self.absent[handle] = (p, seq)

    def forget(self, handles: I64) -> None:
        """Stop waiting for the payload of released samples; ``handles`` int64 [n]."""
        for handle in handles.tolist() if self.absent else ():
            p, seq = self.absent.pop(handle, (-1, 0))
            awaited = self._partitions.intakes[p].awaited if p >= 0 else {}
            if seq in awaited:
                awaited[seq].remove(handle)
                if not awaited[seq]:
                    del awaited[seq]
