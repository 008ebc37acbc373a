"""The producer: reads what it is leased, cuts it into chunks and sends them. A thin shell.

All decisions are ``core.producer_session``'s. One thread owns the socket and pings, whatever
happens; another reads, tokenizes and computes checksums, one chunk at a time. Sources give
records; chunks of up to ``max_chunk_bytes`` are what travels, because a hop of ZeroMQ costs by
the message.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol, runtime_checkable

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from streampack import wire
from streampack.core.events import Effect, FromBroker, Report, Send, Tick
from streampack.core.messages import OVERLONG, Lease, Offer
from streampack.core.producer_session import (
    Chunk,
    EndOfPartition,
    Failed,
    Finish,
    Forget,
    Key,
    Leave,
    ProducerSession,
    Read,
    Session,
)
from streampack.errors import Rejected, SampleError, StreampackError, Unreachable, WireError
from streampack.sources import Cursor, Record, Source
from streampack.transport import Dealer, Poller, Waker, drain

log = logging.getLogger("streampack.producer")

TICK_S = 0.2
TELL_S = 0.5
SAY_S = 5.0
"""A wait longer than this is said, and what for."""
CHUNK_SAMPLES = 4096
CHUNK_S = 0.5
"""A chunk is sent with fewer samples and bytes if it took so long to read."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive samples of a partition: ``tokens`` [sum of lengths], ``lengths`` uint32 [n].

    A length of 0 is a rejected sample, counted in ``rejected`` by reason; ``cursor`` is the place after the last.
    """

    tokens: NDArray[np.int32] | NDArray[np.uint16]
    lengths: NDArray[np.uint32]
    cursor: Cursor
    rejected: dict[str, int]
    lost_tokens: int = 0
    """Of samples cut or dropped because they were too long even to be sent."""


@runtime_checkable
class BatchSource(Protocol):
    """A source that gives whole batches: for data that needs no work by the sample."""

    digest: str

    def batches(self, lease: Lease) -> Iterator[Batch]:
        """Batches from the lease's cursor on, within its limits."""
        ...


def batches(source: Source, lease: Lease) -> Iterator[Batch]:
    """Records of a source gathered into batches that keep the lease's limits.

    Raises SampleError for what the lease's policies do not admit, naming the sample.
    """
    start = Cursor(*lease.cursor) if lease.cursor is not None else None
    skip = lease.first_seq if start is None else 0
    dtype = np.dtype(lease.dtype)
    room = lease.max_chunk_bytes // dtype.itemsize
    records = source.read(
        lease.partition, lease.partitions, seed=lease.seed, passes=lease.passes, start=start, skip=skip
    )
    tokens: list[NDArray[np.int32]] = []
    rejected: dict[str, int] = {}
    held = lost = 0
    cursor: Cursor | None = None
    began = time.monotonic()
    for record in records:
        sample, reason = _admitted(record, lease, int(np.iinfo(dtype).max))
        full = held + len(sample) > room or len(tokens) >= CHUNK_SAMPLES or time.monotonic() - began > CHUNK_S
        if tokens and full and cursor is not None:
            yield _batch(tokens, cursor, rejected, lost, dtype)
            tokens, rejected, held, lost, began = [], {}, 0, 0, time.monotonic()
        tokens.append(sample)
        held += len(sample)
        cursor = record.cursor
        if reason:
            rejected[reason] = rejected.get(reason, 0) + 1
        if record.reason is None and reason in (None, OVERLONG):
            lost += len(record.tokens) - len(sample)
    if tokens and cursor is not None:
        yield _batch(tokens, cursor, rejected, lost, dtype)


def _admitted(record: Record, lease: Lease, largest: int) -> tuple[NDArray[np.int32], str | None]:
    """The record's tokens, empty with a reason where the policies drop it."""
    tokens, reason = record.tokens, record.reason
    if reason is None and largest < 2**31 - 1 and int(tokens.max()) > largest:
        reason = "range"
    if reason is not None:
        if lease.poison == "error":
            raise SampleError(
                f"{record.where}: got a sample that cannot be used ({reason}), expected a 1-D array of ids within "
                f"{lease.dtype}: mend it, or set rules.poison: drop to count it and go on"
            )
        return tokens[:0], reason
    if len(tokens) <= lease.max_sample_tokens:
        return tokens, None
    if lease.overlong == "truncate":
        return tokens[: lease.max_sample_tokens], None
    if lease.overlong == "drop":
        return tokens[:0], OVERLONG
    advice = (
        "set rules.overlong to truncate, split or drop, or raise rules.budget"
        if lease.overlong == "error"
        else "raise limits.sample_tokens"
    )
    raise SampleError(
        f"{record.where}: got a sample of {len(tokens)} tokens, expected at most {lease.max_sample_tokens}: {advice}"
    )


def _batch(
    tokens: list[NDArray[np.int32]], cursor: Cursor, rejected: dict[str, int], lost: int, dtype: np.dtype[np.int32]
) -> Batch:
    lengths = np.array([len(sample) for sample in tokens], np.uint32)
    return Batch(np.concatenate(tokens).astype(dtype, copy=False), lengths, cursor, rejected, lost)


def chunk_of(batch: Batch, key: Key, session: Session) -> Chunk:
    """A batch with the checksum of every sample, ready to be sent."""
    lengths = batch.lengths.tolist()
    data = np.ascontiguousarray(batch.tokens).view(np.uint8).data
    size = batch.tokens.itemsize
    crcs, at = [], 0
    for length in lengths:
        end = at + length * size
        crcs.append(crc32c(data[at:end]))
        at = end
    loss = np.maximum(batch.lengths.astype(np.int64) - 1, 0).astype("<u4")
    return Chunk(
        key=key, session=session, lengths_u32=batch.lengths.astype("<u4").tobytes(),
        crcs_u32=np.array(crcs, "<u4").tobytes(), loss_tokens_u32=loss.tobytes(), num_samples=len(lengths),
        num_bytes=len(data), cursor=(batch.cursor.pass_, batch.cursor.shard, batch.cursor.sample),
        rejected=batch.rejected, lost_tokens=batch.lost_tokens, payload=(data,),
    )  # fmt: skip


@dataclass(slots=True)
class Progress:
    """What one producer has read to send, by stream: (samples, tokens); and what it waits for, if anything."""

    sent: dict[str, tuple[int, int]]
    waiting: str = ""


class ProducerLoop:
    """One producer process: ``run`` until everything is delivered, or ``stop`` is called.

    ``sources`` by stream name; ``on_progress`` is called twice a second. Raises Unreachable if no
    broker answers within ``timeout_s``, Rejected if it refuses, and what sources raise.
    """

    def __init__(
        self, endpoint: str, sources: Mapping[str, Source | BatchSource], *, timeout_s: float = 60.0,
        on_progress: Callable[[Progress], None] | None = None, pause_s: float = 0.0,
    ) -> None:  # fmt: skip
        self._sources = dict(sources)
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._pause_s = pause_s
        offers = [Offer(stream=name, source_digest=source.digest) for name, source in self._sources.items()]
        self._session = ProducerSession(
            run=0, producer=uuid.uuid4().hex, host=socket.gethostname(), pid=os.getpid(), offers=offers
        )
        self._waker = Waker()
        self._dealer = Dealer(endpoint, max_message_bytes=1 << 20, linger_ms=500)
        self._endpoint = endpoint
        self._reads: deque[Read] = deque()
        self._readers: dict[tuple[Key, Session], Iterator[Batch]] = {}
        self._asked: SimpleQueue[tuple[Read, Iterator[Batch]] | None] = SimpleQueue()
        self._answers: deque[tuple[Read, Batch | None, Chunk | None] | BaseException] = deque()
        self._reading = False
        self._finish: Finish | None = None
        self._stopping = False
        self._started = self._told_at = self._idle_since = self._said_at = time.monotonic()
        self.progress = Progress(dict.fromkeys(self._sources, (0, 0)))

    def stop(self) -> None:
        """Ask ``run`` to return soon; any thread or signal handler may."""
        self._stopping = True
        self._waker.wake()

    @property
    def broker_stopped(self) -> bool:
        """``run`` has returned because the broker is stopping, perhaps before everything was delivered."""
        return self._finish is not None and self._finish.code == "stopped"

    def run(self) -> None:
        """Produce until done; closes the socket in any case."""
        poller = Poller([self._dealer], self._waker)
        threading.Thread(target=self._read_all, name="streampack-read", daemon=True).start()
        try:
            while self._finish is None:
                poller.wait(TICK_S)
                self._turn()
        except StreampackError as error:
            self._perform(self._session.handle(Failed(str(error))))
            raise
        finally:
            self._asked.put(None)
            self._dealer.close()
            self._waker.close()
        if self._finish.error:
            raise Rejected(self._finish.code, self._finish.error)

    def _turn(self) -> None:
        for frames in drain(self._dealer, 64):
            try:
                envelope = wire.decode(frames)
            except WireError as error:
                log.warning("dropped a message of the broker: %s", error)
                continue
            self._perform(self._session.handle(FromBroker(envelope)))
        self._perform(self._session.handle(Tick(time.monotonic())))
        if self._stopping:
            self._perform(self._session.handle(Leave()))
        while self._answers:
            self._take(self._answers.popleft())
        while self._reads and not self._reading:
            self._ask(self._reads.popleft())
        self._say()

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._dealer.send(wire.encode(effect.envelope))
            elif isinstance(effect, Read):
                self._reads.append(effect)
            elif isinstance(effect, Forget):
                self._readers.pop((effect.key, effect.session), None)
            elif isinstance(effect, Report):
                log.log(logging.getLevelName(effect.level.upper()), effect.text)
            elif isinstance(effect, Finish):
                self._finish = effect

    def _ask(self, read: Read) -> None:
        """Have the thread read the next chunk of a lease that is still held."""
        lease = read.lease
        key = (lease.stream, lease.partition)
        held = self._session.held.get(key)
        if held is None or held.session != read.session:
            return
        reader = self._readers.get((key, read.session))
        if reader is None:
            source = self._sources[lease.stream]
            reader = source.batches(lease) if isinstance(source, BatchSource) else batches(source, lease)
            self._readers[key, read.session] = reader
        self._reading = True
        self._asked.put((read, reader))

    def _read_all(self) -> None:
        """The reading thread: one chunk at a time, however long that takes, while the loop goes on pinging."""
        while (asked := self._asked.get()) is not None:
            read, reader = asked
            try:
                batch = next(reader, None)
                key = (read.lease.stream, read.lease.partition)
                chunk = chunk_of(batch, key, read.session) if batch is not None else None
                if self._pause_s:
                    time.sleep(self._pause_s)
                self._answers.append((read, batch, chunk))
            except BaseException as error:
                self._answers.append(error)
            self._waker.wake()

    def _take(self, answer: tuple[Read, Batch | None, Chunk | None] | BaseException) -> None:
        self._reading = False
        if isinstance(answer, BaseException):
            raise answer
        read, batch, chunk = answer
        stream = read.lease.stream
        if batch is None or chunk is None:
            self._perform(self._session.handle(EndOfPartition((stream, read.lease.partition), read.session)))
            return
        samples, tokens = self.progress.sent[stream]
        self.progress.sent[stream] = (samples + len(batch.lengths), tokens + len(batch.tokens))
        self._perform(self._session.handle(chunk))

    def _say(self) -> None:
        """Tell the progress, say what a long wait is for, give up on a broker that never answered."""
        now = time.monotonic()
        if not self._session.reached and now - self._started > self._timeout_s:
            raise Unreachable(
                f"{self._endpoint}: got no answer in {self._timeout_s:g} s, expected a broker: "
                f"is 'streampack broker' running, and listening for producers there?"
            )
        self.progress.waiting = "" if self._reading else self._session.waiting_for()
        if not self.progress.waiting:
            self._idle_since = now
        elif min(now - self._idle_since, now - self._said_at) > SAY_S:
            self._said_at = now
            log.info("waiting for %s", self.progress.waiting)
        if self._on_progress is not None and now - self._told_at > TELL_S:
            self._told_at = now
            self._on_progress(self.progress)
