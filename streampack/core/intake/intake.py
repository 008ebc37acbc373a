"""The intake of one partition: its samples in order, once each, and never more than credit allows.

The broker owns the position in a partition. A *session* tells the producer where to begin, and the broker takes samples
from there on, by sequence number. An earlier number is a repeat, and is dropped. A later number means that messages
were lost; the broker begins a new session at the gap (go-back-N). Credit is absolute within a session: a producer may
send samples below ``grant_seq`` and bytes below ``grant_bytes``. So a lost or repeated credit message does no harm (RFC
9000, section 4.1, has the same rule).

After a restart, or when trainers go back, a partition is read again from a *floor*. Samples below ``known_seq`` have
been merged before. If the window still holds such a sample, its payload is ``awaited``; the other samples are ignored.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from streampack.core.journal.history import ChunkPlace
from streampack.core.model.bounded import MAX_CHUNK_SAMPLES
from streampack.core.model.snapshot import Cursor, Floor
from streampack.core.staging.staged_partition import StagedPartition

MAX_UNMERGED = MAX_CHUNK_SAMPLES
"""Samples of one partition that may wait for the merge, so that short samples do not fill the memory beside their
tokens. A partition with larger batches may have more (``Intake.max_unmerged``)."""
ROW_BYTES = 150
"""Bytes of memory that a sample takes beside its tokens: rows of the table and of the arena, queues and windows."""


@dataclass(slots=True)
class Recorded:
    """The records of one partition in the log.

    Attributes:
        next_seq: Number of the next sample that is not in the log.
        num_marks: Number of the batches that have ended.
        known_total: Number of samples in the partition, if this broker or an earlier broker has reached its end.
        rejected_seq: Rejected samples below this number are recorded.
        durable_seq: Samples below this number are safe in the log. With late fields, these are numbers of samples that
            came, as in ``StagedPartition``.
        durable_marks: Ends of batches below this number are safe in the log.
        largest_batch: Samples of the largest batch that has ended.
        places: The partition's chunks in the log; the chunks before ``place`` have been taken.
        recalling: True while the chunk at ``place`` is being read from the log.
    """

    next_seq: int = 0
    num_marks: int = 0
    known_total: int | None = None
    rejected_seq: int = 0
    durable_seq: int = 0
    durable_marks: int = 0
    largest_batch: int = 0
    places: list[ChunkPlace] = field(default_factory=list)
    place: int = 0
    recalling: bool = False
    _batch_seq: int = 0
    """Number of the first sample after the last batch that has ended."""
    _end_lsn: int = -1
    """Log sequence number of the record of the partition's end; -1 if there is none."""
    _unsafe: deque[tuple[int, int, int]] = field(default_factory=deque)
    """Records that are appended and not safe yet: (log sequence number, and what is durable once it is safe)."""

    @property
    def behind(self) -> bool:
        """True if the log has chunks of the partition that this broker still has to read again."""
        return self.place < len(self.places)

    @property
    def waits(self) -> bool:
        """True if records of the partition are not safe yet."""
        return bool(self._unsafe)

    def add_chunk(self, place: ChunkPlace, pushed: bool) -> None:
        """Note a recorded chunk; only chunks of ``pushed`` partitions are read from the log again."""
        self.next_seq = place.stop_seq
        if pushed:
            self.places.append(place)

    def add_mark(self, place: ChunkPlace) -> None:
        """Note that batch ``place.mark`` ends before sample ``place.base_seq``."""
        self.num_marks = place.mark + 1
        self.largest_batch = max(self.largest_batch, place.base_seq - self._batch_seq)
        self._batch_seq = place.base_seq
        self.places.append(place)

    def add_end(self, total: int, lsn: int) -> None:
        """Note the record of the partition's end."""
        self.known_total, self._end_lsn = total, lsn

    def is_end_safe(self, upto: int) -> bool:
        """Return whether the end is known, and its record is among those before ``upto``."""
        return self.known_total is not None and self._end_lsn < upto

    def wait_until_safe(self, lsn: int, seq: int, marks: int) -> None:
        """Remember that samples below ``seq`` and ``marks`` ends of batches are safe once record ``lsn`` is."""
        self._unsafe.append((lsn, seq, marks))

    def note_safe(self, upto: int) -> bool:
        """Record that log records before ``upto`` are safe; return whether a record of the partition is safe now."""
        before = len(self._unsafe)
        while self._unsafe and self._unsafe[0][0] < upto:
            _, self.durable_seq, self.durable_marks = self._unsafe.popleft()
        return len(self._unsafe) < before

    def take_over(self, seq: int, marks: int) -> None:
        """Note what an earlier broker had recorded: samples below ``seq``, and ``marks`` ends of batches."""
        self.next_seq = self._batch_seq = max(self.next_seq, seq)
        self.num_marks = max(self.num_marks, marks)
        self.set_durable(self.next_seq, self.num_marks)

    def set_durable(self, seq: int, marks: int) -> None:
        """Note that samples below ``seq`` and ``marks`` ends of batches are safe."""
        self.durable_seq, self.durable_marks = seq, marks

    def place_of(self, seq: int) -> ChunkPlace | None:
        """Return the chunk that has sample ``seq``; None if the log has none, or it was deleted."""
        at = bisect_right(self.places, seq, key=lambda place: place.stop_seq)
        return self.places[at] if at < len(self.places) and self.places[at].base_seq <= seq else None

    def begin_again(self) -> None:
        """Read all chunks again, from the first one on."""
        self.place, self.recalling = 0, False

    def forget_below(self, lsn: int) -> None:
        """Forget chunks whose records were deleted: those below log sequence number ``lsn``."""
        num_deleted = sum(place.lsn < lsn for place in self.places)
        del self.places[:num_deleted]
        self.place = max(self.place - num_deleted, 0)


@dataclass(slots=True)
class Intake:
    """The position in one partition, and the samples of it that were taken. Sequence numbers count from 0.

    Attributes:
        quota_bytes: Bytes that may wait for the merge.
        token_bytes: Bytes of a token, with the fields that have a value for each token.
        expected_seq: Number of the next sample to take.
        cursor: Place of that sample in the source.
        total: Number of samples in the partition, once its end is reached.
        closed: True if the feed takes no more samples of the partition, except for those in ``awaited``.
        session: Number of the session.
        session_bytes: Bytes taken in this session.
        kept_tokens: Tokens that were admitted.
        merged_tokens: Tokens that were merged; the other tokens of ``kept_tokens`` wait for the merge.
        waiting_extra: Bytes of the media of samples that wait for the merge.
        merged_seq: Samples below this number are merged.
        known_seq: Samples below this number were merged before the partition was read again.
        recorded: The partition in the log.
        awaited: Handles of the samples whose payload is read again: by sequence number, one handle for each piece.
        staged: Samples that came and wait for their late fields; None if the feed has none. They have numbers of their
            own.
        limits: The limits by which earlier samples were cut, as (first sample after them, limit), in order.
        pushed: True for a partition of a pushed stream.
        more_bytes: Bytes that may wait beyond ``quota_bytes``; only in a paced feed, where tickets bound the samples.
    """

    quota_bytes: int
    token_bytes: int
    expected_seq: int = 0
    cursor: Cursor | None = None
    total: int | None = None
    closed: bool = False
    session: int = 0
    session_bytes: int = 0
    kept_tokens: int = 0
    merged_tokens: int = 0
    waiting_extra: int = 0
    merged_seq: int = 0
    known_seq: int = 0
    awaited: dict[int, list[int]] = field(default_factory=dict)
    recorded: Recorded = field(default_factory=Recorded)
    staged: StagedPartition | None = None
    more_bytes: int = 0
    limits: list[tuple[int, int]] = field(default_factory=list)
    pushed: bool = False
    _floors: list[Floor] = field(default_factory=list)

    def go_to(self, floor: Floor, known_seq: int, merged_tokens: int) -> None:
        """Read the partition again from ``floor``; samples below ``known_seq``, with ``merged_tokens``, are merged."""
        self.expected_seq, self.cursor = floor
        self._floors = [floor]
        self.known_seq = self.merged_seq = known_seq
        self.kept_tokens = self.merged_tokens = merged_tokens
        self.waiting_extra = 0
        self.total, self.closed = None, False
        self.awaited.clear()
        self.recorded.begin_again()

    def limit_of(self, seq: int, latest: int) -> int:
        """Return the limit that cut sample ``seq``; ``latest`` is the limit for new samples."""
        return next((limit for stop, limit in self.limits if seq < stop), latest)

    def floor(self, seq: int) -> Floor:
        """Return the place from which to read the partition again to get sample ``seq``; forget earlier places."""
        at = bisect_right(self._floors, seq, key=lambda floor: floor[0]) - 1
        if at < 0:
            return 0, None
        del self._floors[:at]
        return self._floors[0]

    def begin(self, session: int) -> None:
        """Begin a new session: bytes count from 0 again."""
        self.session = session
        self.session_bytes = 0

    @property
    def max_unmerged(self) -> int:
        """The number of samples that may wait for the merge.

        Two batches may wait, because a program may push to several partitions in turn. Less credit would block the
        program before the other partitions have the batch. The rows of the samples stay below ``quota_bytes``, too.
        """
        return max(MAX_UNMERGED, min(2 * self.recorded.largest_batch, self.quota_bytes // ROW_BYTES))

    def awaited_pieces(self, begin: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield (sequence number, handle) of the samples ``begin <= seq < stop`` whose payload is awaited."""
        for seq in range(begin, stop):
            for handle in self.awaited.get(seq, ()):
                yield seq, handle

    @property
    def next_seq(self) -> int:
        """Number of the sample that the holder of the partition is to send next."""
        return self.sent_seq if self.pushed else self.expected_seq

    @property
    def sent_seq(self) -> int:
        """Number of the next sample that the producer of a pushed partition sends."""
        return self.recorded.next_seq if self.staged is None else self.staged.next_seq

    @property
    def sent_marks(self) -> int:
        """Number of the batches that the producer of a pushed partition has ended."""
        return self.recorded.num_marks if self.staged is None else self.staged.num_marks

    @property
    def last_cursor(self) -> Cursor | None:
        """Place in the source after the last sample that came."""
        return self.cursor if self.staged is None else self.staged.cursor

    @property
    def num_waiting(self) -> int:
        """Recorded samples that wait for the merge, or for late fields before."""
        return max(self.recorded.next_seq - self.merged_seq, 0) + (0 if self.staged is None else self.staged.num_left)

    @property
    def waiting_tokens(self) -> int:
        """Tokens that wait for the merge, or for late fields before."""
        return self.kept_tokens - self.merged_tokens + (0 if self.staged is None else self.staged.tokens_left)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of these tokens, and of the media of their samples."""
        staged = 0 if self.staged is None else self.staged.extra_left
        return self.waiting_tokens * self.token_bytes + self.waiting_extra + staged

    @property
    def grant_seq(self) -> int:
        """The producer may send samples below this number."""
        if self.staged is None:
            return self.merged_seq + self.max_unmerged
        return self.staged.next_seq + max(self.max_unmerged - self.num_waiting, 0)

    @property
    def grant_bytes(self) -> int:
        """The total bytes that the producer may send in this session."""
        room = self.quota_bytes + self.more_bytes - self.waiting_bytes
        return self.session_bytes + max(room, 0)  # chunks of the log, with what waits for late fields, may be more

    def may_keep(self, tokens: int, extra_bytes: int = 0) -> bool:
        """Return whether the memory has room for so many tokens and bytes of media more that wait for the merge."""
        waiting = self.kept_tokens - self.merged_tokens + tokens
        return waiting * self.token_bytes + self.waiting_extra + extra_bytes <= self.quota_bytes

    def make_room(self, num_bytes: int) -> bool:
        """Give credit for at least so many bytes more; return whether that is new."""
        lacking = num_bytes - (self.grant_bytes - self.session_bytes)
        if lacking <= 0:
            return False
        self.more_bytes = max(self.waiting_bytes + num_bytes - self.quota_bytes, self.more_bytes)
        return True

    def fits(self, stop_seq: int, num_bytes: int) -> bool:
        """Return whether credit allows a chunk of ``num_bytes`` that ends before sample ``stop_seq``."""
        return stop_seq <= self.grant_seq and self.session_bytes + num_bytes <= self.grant_bytes

    def accept(
        self, stop_seq: int, num_bytes: int, kept_tokens: int, cursor: Cursor | None, kept_extra: int = 0
    ) -> None:  # fmt: skip
        """Advance ``expected_seq`` to the end of an accepted chunk; count its bytes, and its admitted tokens."""
        self.expected_seq = stop_seq
        self.cursor = cursor
        self._floors.append((stop_seq, cursor))
        if self.staged is None:  # else the bytes counted when they came
            self.session_bytes += num_bytes
        self.kept_tokens += kept_tokens
        self.waiting_extra += kept_extra

    @property
    def behind(self) -> bool:
        """True if the log has chunks of the partition that this broker still has to read again."""
        return self.recorded.behind

    @property
    def unwanted(self) -> bool:
        """True if no more samples are wanted: the intake is closed, and awaits no payload."""
        return self.closed and not self.awaited

    @property
    def ended(self) -> bool:
        """True if every sample that is wanted has been taken."""
        return self.unwanted or (self.total is not None and self.expected_seq >= self.total)

    def drop_waiting(self) -> None:
        """Drop the samples that wait for the merge, or for their late fields."""
        self.merged_tokens, self.waiting_extra = self.kept_tokens, 0
        if self.staged is not None:
            self.staged.clear()

    def note_sent(self, lsn: int) -> None:
        """Remember that all samples and marks so far are safe once record ``lsn`` is safe."""
        self.recorded.wait_until_safe(lsn, self.sent_seq, self.sent_marks)

    def note_all_safe(self) -> None:
        """Note that all samples and marks so far are safe: an earlier broker has recorded them."""
        self.recorded.set_durable(self.sent_seq, self.sent_marks)
