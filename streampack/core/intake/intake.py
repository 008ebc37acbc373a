"""Intake: one partition's samples, in order, once each, and never more than was granted.

The broker owns the position: it tells a producer where to begin (a *session*), and takes samples
from there on, by sequence number. What came before is a repeat and is dropped; what comes later
means that messages were lost, and is answered with a new session that begins at the gap
(go-back-N). Credits are absolute within a session: a producer may send samples below
``grant_seq`` and bytes below ``grant_bytes``, so a lost or repeated credit message harms nothing
(RFC 9000, section 4.1, has the same rule for the same reason).

After a restart, or when trainers go back, a partition is read again from a *floor*: samples below
``known_seq`` have been merged before. Those that the window still holds are ``awaited``, for their payload;
the others are passed over.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field

from streampack.core.journal.history import ChunkPlace
from streampack.core.model.bounded import MAX_CHUNK_SAMPLES
from streampack.core.model.snapshot import Cursor, Floor

MAX_UNMERGED = MAX_CHUNK_SAMPLES
"""Samples of one partition that may wait for the merge: bounds what short samples cost beside their tokens. A partition
with larger batches may have more (``Intake.max_unmerged``)."""
ROW_BYTES = 150
"""Memory that a sample takes beside its tokens: rows of the table and of the arena, queues and windows, each with room
to grow into."""


@dataclass(slots=True)
class Intake:
    """What was taken of one partition.

    Attributes:
        expected_seq: Number of the next sample.
        cursor: Where the source goes on at that sample.
        total: Number of samples, once the end is taken.
        known_total: Number of samples, as this broker or an earlier one has learned it.
        closed: The feed has ended and takes no more, but for the samples in ``awaited``.
        session_bytes: Bytes taken in this session.
        kept_tokens, merged_tokens: Their difference waits for the merge; it stays below ``quota_bytes``.
        recorded_seq: Number of the next sample that is not in the log.
        places: The partition's chunks in the log; the chunks before ``place`` have been taken.
        unsafe: Records that are appended and not safe yet.
        recalling: The chunk at ``place`` is being read from the log.
    """

    quota_bytes: int
    token_bytes: int
    expected_seq: int = 0
    cursor: Cursor | None = None
    total: int | None = None
    known_total: int | None = None
    closed: bool = False
    session: int = 0
    session_bytes: int = 0
    kept_tokens: int = 0
    merged_tokens: int = 0
    merged_seq: int = 0
    known_seq: int = 0
    rejected_seq: int = 0
    """Rejected samples below are recorded."""
    awaited: dict[int, list[int]] = field(default_factory=dict)
    """Handles of samples whose payload is to come again, by sequence number: the pieces of it."""
    recorded_seq: int = 0
    num_marks: int = 0
    durable_seq: int = 0
    durable_marks: int = 0
    largest_batch: int = 0
    """Samples of the largest batch that has ended."""
    batch_seq: int = 0
    """The first sample after the last batch that has ended."""
    end_lsn: int = -1
    """The record of its end."""
    unsafe: deque[tuple[int, int, int]] = field(default_factory=deque)
    """(record, samples, marks) that are durable once the record is safe."""
    places: list[ChunkPlace] = field(default_factory=list)
    place: int = 0
    recalling: bool = False
    _floors: list[Floor] = field(default_factory=list)

    def go_to(self, floor: Floor, known_seq: int, merged_tokens: int) -> None:
        """Begin to read again at ``floor``; the samples below ``known_seq``, of ``merged_tokens``, are merged."""
        self.expected_seq, self.cursor = floor
        self._floors = [floor]
        self.known_seq = self.merged_seq = known_seq
        self.kept_tokens = self.merged_tokens = merged_tokens
        self.total, self.closed, self.recalling = None, False, False
        self.awaited.clear()
        self.place = 0

    def floor(self, seq: int) -> Floor:
        """Where to read again from so that sample ``seq`` comes; those before are forgotten."""
        at = bisect_right(self._floors, seq, key=lambda floor: floor[0]) - 1
        if at < 0:
            return 0, None
        del self._floors[:at]
        return self._floors[0]

    def begin(self, session: int) -> None:
        """A new session: byte credits start again from nothing."""
        self.session = session
        self.session_bytes = 0

    def end_batch(self, number: int, seq: int) -> None:
        """Batch ``number`` ends before sample ``seq``."""
        self.num_marks = number + 1
        self.largest_batch = max(self.largest_batch, seq - self.batch_seq)
        self.batch_seq = seq

    @property
    def max_unmerged(self) -> int:
        """Samples that may wait for the merge.

        A whole batch may wait until other partitions end the batch before it: a program may push to several
        partitions in turn, and would wait for ever in between. Their rows stay below ``quota_bytes``, too.
        """
        return max(MAX_UNMERGED, min(2 * self.largest_batch, self.quota_bytes // ROW_BYTES))

    @property
    def grant_seq(self) -> int:
        """The sample number that must not be reached."""
        return self.merged_seq + self.max_unmerged

    @property
    def grant_bytes(self) -> int:
        """The bytes of this session that must not be passed."""
        waiting = (self.kept_tokens - self.merged_tokens) * self.token_bytes
        return self.session_bytes + self.quota_bytes - waiting

    def fits(self, stop_seq: int, num_bytes: int) -> bool:
        """Is a chunk that ends before ``stop_seq`` within the credits?"""
        return stop_seq <= self.grant_seq and self.session_bytes + num_bytes <= self.grant_bytes

    def accept(self, stop_seq: int, num_bytes: int, kept_tokens: int, cursor: Cursor | None) -> None:
        """Count a chunk that begins at ``expected_seq``."""
        self.expected_seq = stop_seq
        self.cursor = cursor
        self._floors.append((stop_seq, cursor))
        self.session_bytes += num_bytes
        self.kept_tokens += kept_tokens

    @property
    def behind(self) -> bool:
        """The log has samples of the partition that have not been taken again yet."""
        return self.place < len(self.places)

    def safe(self, upto: int) -> bool:
        """Records below ``upto`` are safe; has anything become durable?"""
        before = (self.durable_seq, self.durable_marks)
        while self.unsafe and self.unsafe[0][0] < upto:
            _, self.durable_seq, self.durable_marks = self.unsafe.popleft()
        return before != (self.durable_seq, self.durable_marks)

    @property
    def unwanted(self) -> bool:
        """No more of it is taken: it is closed, and no sample that is held lacks its payload."""
        return self.closed and not self.awaited

    @property
    def ended(self) -> bool:
        """All of it has been taken, or all that will be."""
        return self.unwanted or (self.total is not None and self.expected_seq >= self.total)
