"""The buffer of a pushing producer: samples and ends of batches, in order, until they are safe in the broker's log.

A chunk's samples get their numbers when the chunk is added. One queue holds the chunks that the broker has, or that
were sent in this session. The other holds the chunks that wait. A new session moves the border between them. A mark is
the end of a batch. Samples behind a mark are sent once the mark is safe, so that no lost message can put them into the
batch before it. The buffer does not know credit, messages or time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from streampack.core.columns.chunk_body import SAMPLE_BYTES
from streampack.core.sessions.producer_base import Chunk

CHUNK_BYTES = 1024
"""Bytes that a chunk counts beside its payload, so that many tiny chunks fill the buffer, too."""


class KeptChunk(Struct, frozen=True):
    """A chunk, the number of its first sample, and its size in bytes of the buffer."""

    base_seq: int
    chunk: Chunk
    size: int

    @property
    def stop_seq(self) -> int:
        """Number of the first sample after the chunk."""
        return self.base_seq + self.chunk.num_samples


class KeptMark(Struct, frozen=True):
    """The end of batch ``batch``, before sample ``seq``; ``number`` counts the marks of the partition."""

    number: int
    seq: int
    batch: int


def size_of(chunk: Chunk) -> int:
    """Return the bytes that a chunk takes in the buffer."""
    columns = sum(len(getattr(chunk, name) or b"") for name in SAMPLE_BYTES)
    payload: tuple[Any, ...] = chunk.payload
    return sum(memoryview(frame).nbytes for frame in payload) + columns + CHUNK_BYTES


@dataclass(slots=True)
class PushBuffer:
    """Chunks and marks that are not safe yet: at most ``capacity`` bytes, or one chunk that is larger.

    Attributes:
        next_seq: Number of the next sample that is put in.
        next_mark: Number of the next mark.
        durable_seq: Samples below this number are safe, and have left the buffer.
        sent_seq: Samples below this number were sent in this session, or the broker had them before.
        ever_sent_seq: Samples below this number were sent in some session.
        marks: Marks that are not known to be safe.
    """

    capacity: int
    num_bytes: int = 0
    next_seq: int = 0
    next_mark: int = 0
    durable_seq: int = 0
    sent_seq: int = 0
    ever_sent_seq: int = 0
    marks: deque[KeptMark] = field(default_factory=deque)
    _sent: deque[KeptChunk] = field(default_factory=deque)
    _waiting: deque[KeptChunk] = field(default_factory=deque)

    @property
    def empty(self) -> bool:
        """True if every sample and mark is safe."""
        return not (self._sent or self._waiting or self.marks)

    @property
    def all_sent(self) -> bool:
        """True if every sample was sent in this session, or the broker had it before."""
        return not self._waiting

    def number_from(self, seq: int, mark: int) -> None:
        """Number samples from ``seq`` on and marks from ``mark`` on; all earlier samples and marks are safe."""
        self.next_seq = self.durable_seq = self.sent_seq = self.ever_sent_seq = seq
        self.next_mark = mark

    def has_room(self, size: int) -> bool:
        """Return whether a chunk of ``size`` bytes may be put in; an empty buffer takes a chunk of any size."""
        return not self.num_bytes or self.num_bytes + size <= self.capacity

    def put(self, chunk: Chunk) -> None:
        """Add a chunk, and number its samples from ``next_seq`` on."""
        kept = KeptChunk(self.next_seq, chunk, size_of(chunk))
        self._waiting.append(kept)
        self.next_seq = kept.stop_seq
        self.num_bytes += kept.size

    def end_batch(self, batch: int) -> None:
        """Add a mark: the end of batch ``batch`` after the samples put in so far."""
        self.marks.append(KeptMark(self.next_mark, self.next_seq, batch))
        self.next_mark += 1

    def next_chunk(self) -> KeptChunk | None:
        """Return the next chunk to send; None if there is none or a mark stands before it."""
        if not self._waiting or (self.marks and self.marks[0].seq <= self._waiting[0].base_seq):
            return None
        return self._waiting[0]

    def next_was_sent(self) -> None:
        """Move the chunk that ``next_chunk`` returns to the sent chunks."""
        kept = self._waiting.popleft()
        self._sent.append(kept)
        self.sent_seq = kept.stop_seq
        self.ever_sent_seq = max(self.ever_sent_seq, kept.stop_seq)

    def resend_from(self, seq: int) -> None:
        """Begin a session at sample ``seq``: chunks from there on wait to be sent again."""
        kept = [*self._sent, *self._waiting]
        self._sent = deque(chunk for chunk in kept if chunk.stop_seq <= seq)
        self._waiting = deque(kept[len(self._sent) :])
        self.sent_seq = seq

    def drop_safe(self, durable_seq: int) -> None:
        """Drop the sent chunks whose samples are all below ``durable_seq``: they are safe."""
        self.durable_seq = max(self.durable_seq, durable_seq)
        while self._sent and self._sent[0].stop_seq <= self.durable_seq:
            self.num_bytes -= self._sent.popleft().size
