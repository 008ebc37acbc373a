"""The producer process: reads its leased partitions, cuts chunks and sends them to the broker.

This is a thin shell around ``producer_session``, which makes all decisions. One thread owns the socket and pings at all
times. Another thread reads, tokenizes and computes checksums, one chunk at a time (``chunks``).
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
from dataclasses import dataclass, field
from queue import SimpleQueue

from msgspec import UNSET

from streampack.core.protocol.events import Effect, FromBroker, Report, Send, Tick, Unsent
from streampack.core.protocol.producer_messages import Flow, Lease, Offer, SourceSize
from streampack.core.sessions.producer_base import Chunk, Failed, Finish, Leave, PartitionKey, Session
from streampack.core.sessions.producer_session import EndOfPartition, Forget, ProducerSession, Read, ReadFirst
from streampack.core.stats.sample_warnings import advice
from streampack.errors import Rejected, StreampackError, Unreachable, WireError
from streampack.kernels import background
from streampack.producer.chunk import BatchSource, TokenChunk
from streampack.producer.chunks import batches, chunk_of
from streampack.sources.files import retries
from streampack.sources.records import DAMAGED, Source
from streampack.sources.walk import ShardedSource
from streampack.transport.keys import Key as PeerKey
from streampack.transport.sockets import Dealer, Poller, drain
from streampack.transport.waker import Waker
from streampack.wire import frames as wire
from streampack.wire.checksums import CrcsOf
from streampack.wire.sample_checksums import compiled, plain

log = logging.getLogger("streampack.producer")

TICK_S = 0.2
TELL_S = 0.5
FEW_LEASES = 32
"""Leases of a producer that begin with whole chunks. A producer reads a chunk of each lease in turn, and a step needs
samples of all streams. So with more leases, the first chunks are smaller."""
SLOW_S = 2.0
"""Seconds after which reading a chunk counts as slow; normally a chunk takes CHUNK_S and the time for one sample."""
COMPILED_AFTER = 16
"""Number of chunks read at ``FAST_BYTES_S`` or more after which the compiled checksum kernel is imported."""
FAST_BYTES_S = 40e6
"""Bytes per second. A producer that tokenizes is slower and does not need the compiled kernel."""
SAY_S = 5.0
"""Seconds after which a wait is logged with its cause."""


@dataclass(slots=True)
class StreamProgress:
    """Counts of one stream that one producer has delivered to the broker."""

    samples: int = 0
    """Samples that the broker has confirmed."""
    tokens: int = 0
    """Tokens that the broker has confirmed."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Number of rejected samples by reason."""
    done: dict[int, int] = field(default_factory=dict)
    """Samples confirmed by partition, over all passes so far, in this process and in earlier ones."""
    passes: int | None = None
    """Number of passes of the stream; None if endless, or not known yet."""
    examples: dict[str, str] = field(default_factory=dict)
    """A line for the first rejected sample by reason, the first by warning, and for every damaged file by error."""
    warnings: dict[str, int] = field(default_factory=dict)
    """Number of delivered samples by warning, a word of ``core.stats.sample_warnings``."""
    opened_shards: int = 0
    """Number of shards that this process has opened."""
    opened_samples: int = 0
    """Number of samples in those shards."""


@dataclass(slots=True)
class ProducerProgress:
    """Counts of one producer by stream, and the cause of its current wait; empty if the producer is not waiting."""

    streams: dict[str, StreamProgress]
    waiting: str = ""


@dataclass(frozen=True, slots=True)
class _Sent:
    """Counts of a chunk that was sent and is not confirmed yet; ``stop_seq``: number after its last sample."""

    stop_seq: int
    lease: Lease
    samples: int
    tokens: int
    rejected: dict[str, int]
    warnings: Mapping[str, int]


class ProducerLoop:
    """One producer process: ``run`` delivers all data of its leases, until the end or ``stop``.

    - ``sources``: sources by stream name.
    - ``on_progress``: called twice a second.
    - ``pause_s``: seconds to sleep after each chunk, for demos and tests.
    - ``name``: name of this producer. With the name of an ended process, it takes over that process's leases at once.
      Default: a new name.
    - ``key``: the key to show to the broker.

    Raises Unreachable if no broker answers within ``timeout_s`` seconds, Rejected if the broker rejects this producer,
    and what sources raise.
    """

    def __init__(
        self, endpoint: str, sources: Mapping[str, Source | BatchSource], *, timeout_s: float = 60.0,
        on_progress: Callable[[ProducerProgress], None] | None = None, pause_s: float = 0.0, name: str = "",
        key: PeerKey | None = None,
    ) -> None:  # fmt: skip
        self._sources = dict(sources)
        self._by_record = {name: item for name, item in sources.items() if not isinstance(item, BatchSource)}
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._pause_s = pause_s
        offers = [
            Offer(
                stream=name,
                source_digest=source.digest,
                begin=source.begin if isinstance(source, ShardedSource) else UNSET,
            )
            for name, source in self._sources.items()
        ]
        self._session = ProducerSession(
            run=0, producer=name or uuid.uuid4().hex, host=socket.gethostname(), pid=os.getpid(), offers=offers
        )
        self._waker = Waker()
        try:
            self._dealer = Dealer(endpoint, max_message_bytes=1 << 20, linger_ms=500, key=key)
        except BaseException:
            self._waker.close()
            raise
        self._endpoint = endpoint
        self._reads: deque[Read] = deque()
        self._readers: dict[tuple[PartitionKey, Session], Iterator[TokenChunk]] = {}
        self._read_thread = threading.Thread(target=self._read_all, name="streampack-read", daemon=True)
        self._requests: SimpleQueue[tuple[Read, Iterator[TokenChunk]] | None] = SimpleQueue()
        self._answers: deque[tuple[Read, TokenChunk | None, Chunk | None] | BaseException] = deque()
        self._sent: dict[tuple[PartitionKey, Session], deque[_Sent]] = {}
        self._reading: Lease | None = None
        self._asked_at = 0.0
        self._finish: Finish | None = None
        self._stopping = False
        self._started = self._told_at = self._idle_since = self._said_at = time.monotonic()
        self.progress = ProducerProgress({name: StreamProgress() for name in self._sources})

    def stop(self) -> None:
        """Make ``run`` return soon. Any thread or signal handler may call it."""
        self._stopping = True
        self._waker.wake()

    @property
    def over(self) -> str:
        """Reason why ``run`` has returned.

        - ``done``: the broker needs no more data.
        - ``stopped``: the broker is stopping, perhaps before all data was delivered.
        - empty: ``stop`` was called, or ``run`` has not returned.
        """
        return self._finish.code if self._finish is not None else ""

    def run(self) -> None:
        """Deliver data until the broker needs no more or ``stop`` is called; close the socket in any case."""
        poller = Poller([self._dealer], self._waker)
        self._read_thread.start()
        try:
            self._turn()  # greets the broker at once
            while self._finish is None:
                poller.wait(TICK_S)
                self._turn()
        except StreampackError as error:
            self._perform(self._session.handle(Failed(str(error))))
            raise
        finally:
            self._requests.put(None)
            self._dealer.close()
            self._waker.close()
        if self._finish.error:
            raise Rejected(self._finish.code, self._finish.error)

    def _turn(self) -> None:
        """Handle the broker's messages, the clock and finished reads; request the next read and report progress."""
        for frames in drain(self._dealer, 64):
            try:
                envelope = wire.decode(frames)
            except WireError as error:
                log.warning("dropped a message of the broker: %s", error)
                continue
            if envelope.is_foreign(self._session.run, self._session.epoch):
                self._dealer.leave()
            self._perform(self._session.handle(FromBroker(envelope)))
            if isinstance(envelope.message, Flow):
                self._count((envelope.message.stream, envelope.message.partition))
        self._dealer.check(self._session.waits_in_vain)
        self._perform(self._session.handle(Tick(time.monotonic())))
        if self._stopping:
            self._perform(self._session.handle(Leave()))
        while self._answers:
            self._handle_read(self._answers.popleft())
        while self._reads and not self._reading:
            self._request_read(self._reads.popleft())
        self._report()

    def _perform(self, effects: list[Effect]) -> None:
        """Carry out the session's effects: send messages, queue reads, forget leases, log, and note the end."""
        for effect in effects:
            if isinstance(effect, Send):
                if not self._dealer.send(wire.encode(effect.envelope)):
                    self._session.handle(Unsent(effect.envelope))
            elif isinstance(effect, Read):
                self._reads.append(effect)
            elif isinstance(effect, ReadFirst):
                self._move_to_front(effect)
            elif isinstance(effect, Forget):
                self._readers.pop((effect.key, effect.session), None)
                self._sent.pop((effect.key, effect.session), None)
            elif isinstance(effect, Report):
                log.log(logging.getLevelName(effect.level.upper()), effect.text, extra={"about": effect.about})
            elif isinstance(effect, Finish):
                self._finish = effect

    def _move_to_front(self, first: ReadFirst) -> None:
        """Let the queued read of a lease come next; nothing is queued for a lease whose chunk is being read."""
        for read in self._reads:
            if read.session == first.session and (read.lease.stream, read.lease.partition) == first.key:
                self._reads.remove(read)
                self._reads.appendleft(read)
                return

    def _request_read(self, read: Read) -> None:
        """Let the reading thread read a lease's next chunk, unless the lease is no longer held."""
        lease = read.lease
        key = (lease.stream, lease.partition)
        held_lease = self._session.held.get(key)
        if held_lease is None or held_lease.session != read.session or held_lease.ended:
            return
        reader = self._readers.get((key, read.session))
        if reader is None:
            source = self._sources[lease.stream]
            share = min(1.0, FEW_LEASES / len(self._session.held))
            reader = source.batches(lease) if isinstance(source, BatchSource) else batches(source, lease, share)
            self._readers[key, read.session] = reader
        self._reading, self._asked_at = lease, time.monotonic()
        self._requests.put((read, reader))

    def _read_all(self) -> None:
        """Body of the reading thread: read one requested chunk after another, while the other thread pings."""
        crcs_of: CrcsOf = plain
        until_compiled = COMPILED_AFTER
        while (request := self._requests.get()) is not None:
            read, reader = request
            try:
                began = time.perf_counter()
                batch = next(reader, None)
                read_s = time.perf_counter() - began
                chunk = chunk_of(batch, read.lease, read.session, crcs_of) if batch is not None else None
                if until_compiled and chunk is not None and chunk.num_bytes > read_s * FAST_BYTES_S:
                    until_compiled -= 1
                    crcs_of = plain if until_compiled else background.compiler.load(compiled) or plain
                if self._pause_s:
                    time.sleep(self._pause_s)
                self._answers.append((read, batch, chunk))
            except BaseException as error:
                self._answers.append(error)
            self._waker.wake()

    def _handle_read(self, answer: tuple[Read, TokenChunk | None, Chunk | None] | BaseException) -> None:
        """Pass a chunk that was read, or the end of the partition, to the session; raise the reading thread's error."""
        self._reading = None
        if isinstance(answer, BaseException):
            raise answer
        read, batch, chunk = answer
        stream = read.lease.stream
        self._note_size(stream)
        if batch is None or chunk is None:
            self._perform(self._session.handle(EndOfPartition((stream, read.lease.partition), read.session)))
            return
        for reason, where in batch.examples:
            dropped = f"dropped {where} ({reason}); more samples with this reason are counted but not logged"
            damaged = reason == DAMAGED
            self._store_example(stream, where if damaged else reason, where if damaged else dropped)
        for word, where in batch.warned.items():
            self._store_example(stream, word, f"{where}: {advice(word)}. More such samples are counted but not logged")
        sent = self._sent.setdefault((chunk.key, chunk.session), deque())
        first = sent[-1].stop_seq if sent else read.seq
        stop, samples = first + len(batch.lengths), len(batch.lengths)
        sent.append(_Sent(stop, read.lease, samples, len(batch.tokens), batch.rejected, batch.warnings))
        self._perform(self._session.handle(chunk))

    def _note_size(self, stream: str) -> None:
        """Report the sizes of newly opened shards to the session, for estimates of the stream's size."""
        source, size = self._sources[stream], self._session.sizes.get(stream)
        if not isinstance(source, ShardedSource) or len(source.shard_samples) == (size.opened if size else 0):
            return
        counts = list(source.shard_samples.values())
        progress = self.progress.streams[stream]
        progress.opened_shards, progress.opened_samples = len(counts), sum(counts)
        self._session.sizes[stream] = SourceSize(
            shards=source.num_shards, opened=len(counts), samples=sum(counts),
            squares=float(sum(count * count for count in counts)),
        )  # fmt: skip

    def _count(self, key: PartitionKey) -> None:
        """Add the chunks that the broker has newly confirmed to the progress; unconfirmed ones may be read again."""
        held_lease = self._session.held.get(key)
        sent = self._sent.get((key, held_lease.session)) if held_lease is not None else None
        while held_lease is not None and sent and sent[0].stop_seq <= held_lease.window.known_seq:
            chunk = sent.popleft()
            lease, progress, source = chunk.lease, self.progress.streams[key[0]], self._by_record.get(key[0])
            progress.samples += chunk.samples
            progress.tokens += chunk.tokens
            for reason, count in chunk.rejected.items():
                progress.rejected[reason] = progress.rejected.get(reason, 0) + count
            for word, count in chunk.warnings.items():
                progress.warnings[word] = progress.warnings.get(word, 0) + count
            if source is not None:
                progress.done[lease.partition] = chunk.stop_seq
                progress.passes = lease.passes

    def _store_example(self, stream: str, key: str, text: str) -> None:
        """Store a line about a sample in the progress, once for each key; without ``on_progress``, log the line."""
        examples = self.progress.streams[stream].examples
        if key in examples:
            return
        examples[key] = f"stream {stream!r}: {text}"
        if self._on_progress is None:
            log.warning("%s", examples[key], extra={"about": {"stream": stream}})

    def _waiting_for(self, now: float) -> str:
        """Return a text that names what the producer waits for; empty if it is not waiting."""
        if self._reading is None:
            text = self._session.waiting_for()
            return text and text + self._dealer.seeks
        if now - self._asked_at < SLOW_S:
            return ""
        store = self._session.store_wait
        cause = f"the store does not serve {store}" if store else "reading its file or tokenizing is slow"
        return f"a sample of stream {self._reading.stream!r}, because {cause}"

    def _report(self) -> None:
        """Call ``on_progress``, log the cause of a long wait, and raise Unreachable if no broker has answered."""
        now = time.monotonic()
        if not self._session.reached and now - self._started > self._timeout_s:
            raise Unreachable(
                f"{self._endpoint}: got no answer in {self._timeout_s:g} s, expected an answer from a broker. Check "
                "that 'streampack broker' is running and listens for producers at this address"
            )
        self._session.store_wait = retries.waiting(self._read_thread.ident or 0) if self._reading is not None else ""
        self.progress.waiting = self._waiting_for(now)
        if not self.progress.waiting:
            self._idle_since = now
        elif min(now - self._idle_since, now - self._said_at) > SAY_S:
            self._said_at = now
            log.info("waiting for %s", self.progress.waiting)
        if self._on_progress is not None and now - self._told_at > TELL_S:
            self._told_at = now
            self._on_progress(self.progress)
