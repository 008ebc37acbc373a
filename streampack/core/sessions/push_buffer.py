"""What a pushing producer keeps: samples and ends of batches, in their order, until the broker has them safe.

Chunks are numbered when they are put in. Each is in one of two queues: those that the broker has been sent in this
session, or had when it began, and those that wait. A new session moves the border between them. Ends of batches
stand between samples, and the samples behind the first that is not safe do not go out: no lost message can let them
into the batch before it. Knows nothing of credits, messages or time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from streampack.core.sessions.producer_base import Chunk

CHUNK_BYTES = 1024
"""What a chunk costs beside its payload, so that tiny ones count too."""


class Kept(Struct, frozen=True):
    """A chunk and the number of its first sample."""

    base_seq: int
    chunk: Chunk
    size: int

    @property
    def stop_seq(self) -> int:
        return self.base_seq + self.chunk.num_samples


class KeptMark(Struct, frozen=True):
    """The end of batch ``batch``, before sample ``seq``."""

    number: int
    seq: int
    batch: int


def size_of(chunk: Chunk) -> int:
    """Bytes of the buffer that a chunk takes."""
    columns = len(chunk.lengths_u32) + len(chunk.crcs_u32) + len(chunk.loss_tokens_u32)
    payload: tuple[Any, ...] = chunk.payload
    return sum(memoryview(frame).nbytes for frame in payload) + columns + CHUNK_BYTES


@dataclass(slots=True)
class PushBuffer:
    """At most ``capacity`` bytes, or one chunk that is larger.

    ``next_seq`` and ``next_mark`` number what comes next, samples below ``durable_seq`` are safe and not kept any more,
    those below ``sent_seq`` the broker was sent in this session, those below ``ever_sent_seq`` in any.
    """

    capacity: int
    num_bytes: int = 0
    next_seq: int = 0
    next_mark: int = 0
    durable_seq: int = 0
    sent_seq: int = 0
    ever_sent_seq: int = 0
    marks: deque[KeptMark] = field(default_factory=deque)
    """Those that are not known to be safe."""
    _sent: deque[Kept] = field(default_factory=deque)
    _waiting: deque[Kept] = field(default_factory=deque)

    @property
    def empty(self) -> bool:
        """Everything is safe."""
        return not (self._sent or self._waiting or self.marks)

    @property
    def all_sent(self) -> bool:
        return not self._waiting

    def number_from(self, seq: int, mark: int) -> None:
        """What is put in is numbered from here on; all before is safe."""
        self.next_seq = self.durable_seq = self.sent_seq = self.ever_sent_seq = seq
        self.next_mark = mark

    def room(self, size: int) -> bool:
        """May so many bytes be put in? An empty one takes whatever a message may hold."""
        return not self.num_bytes or self.num_bytes + size <= self.capacity

    def put(self, chunk: Chunk) -> None:
        """Samples, from ``next_seq`` on."""
        kept = Kept(self.next_seq, chunk, size_of(chunk))
        self._waiting.append(kept)
        self.next_seq = kept.stop_seq
        self.num_bytes += kept.size

    def end_batch(self, batch: int) -> None:
        """A batch ends here."""
        self.marks.append(KeptMark(self.next_mark, self.next_seq, batch))
        self.next_mark += 1

    def next(self) -> Kept | None:
        """The chunk to be sent next, if no end of a batch stands before it."""
        if not self._waiting or (self.marks and self.marks[0].seq <= self._waiting[0].base_seq):
            return None
        return self._waiting[0]

    def sent(self) -> None:
        """``next`` was sent."""
        kept = self._waiting.popleft()
        self._sent.append(kept)
        self.sent_seq = kept.stop_seq
        self.ever_sent_seq = max(self.ever_sent_seq, kept.stop_seq)

    def go_to(self, seq: int) -> None:
        """A session begins: what is not below ``seq`` waits to be sent again."""
        kept = [*self._sent, *self._waiting]
        self._sent = deque(each for each in kept if each.stop_seq <= seq)
        self._waiting = deque(kept[len(self._sent) :])
        self.sent_seq = seq

    def forget(self, durable_seq: int) -> None:
        """Samples below ``durable_seq`` are safe."""
        self.durable_seq = max(self.durable_seq, durable_seq)
        while self._sent and self._sent[0].stop_seq <= self.durable_seq:
            self.num_bytes -= self._sent.popleft().size
