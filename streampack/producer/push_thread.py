"""The thread of a pushing producer, and the state that it shares with the program.

This is a thin shell around ``push_session``. The thread owns the socket, pings at all times, and sends chunks again
that a broker lost. The program's threads put chunks into the buffer and wait for room. A wait longer than 5 s is logged
with its cause.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from streampack.core.protocol.events import Effect, Event, FromBroker, Report, Send, Tick, Unsent
from streampack.core.protocol.producer_messages import Lease
from streampack.core.sessions.producer_base import Chunk, Failed, Finish, Leave
from streampack.core.sessions.push_buffer import PushBuffer, size_of
from streampack.core.sessions.push_session import EndBatch, EndPartition, Push, PushSession
from streampack.errors import (
    DataStall,
    InternalError,
    PeerError,
    Rejected,
    StreampackError,
    Unreachable,
    UserError,
    WireError,
)
from streampack.transport.keys import Key
from streampack.transport.sockets import Dealer, Poller, drain
from streampack.transport.waker import Waker
from streampack.wire import frames as wire

log = logging.getLogger("streampack.producer")

TICK_S = 0.2
SAY_S = 5.0
LEAVE_S = 5.0
"""Seconds to wait for samples to be durable when a producer is dropped or left by an exception."""


class Pushing:
    """The sending thread and its session, shared with the program's threads under one lock.

    The constructor claims the partition. Raises Unreachable, Rejected, or DataStall after ``claim_timeout_s`` seconds.
    """

    def __init__(
        self, endpoint: str, stream: str, partition: int, buffer_bytes: int, timeout_s: float, key: Key | None = None,
        claim_timeout_s: float = 60.0,
    ) -> None:  # fmt: skip
        self._endpoint, self._timeout_s, self._pid = endpoint, timeout_s, os.getpid()
        name = uuid.uuid4()
        self._session = PushSession(
            run=0, producer=name.hex, incarnation=name.int >> 68, host=socket.gethostname(), pid=self._pid,
            stream=stream, partition=partition, buffer=PushBuffer(buffer_bytes),
        )  # fmt: skip
        self._name = f"stream {stream!r} partition {partition}"
        self._changed = threading.Condition()
        self._outbox: deque[Send] = deque()
        self._error: StreampackError | None = None
        self._closed = self._leaving = False
        self._counts = {"samples": 0, "tokens": 0, "rejected": 0, "batches": 0, "wait_s": 0.0}
        self._waker = Waker()
        try:
            self._dealer = Dealer(endpoint, max_message_bytes=1 << 20, linger_ms=500, key=key)
        except BaseException:
            self._waker.close()
            raise
        self._thread = threading.Thread(target=self._run, args=(self._dealer,), name="streampack-push", daemon=True)
        self._waker.wake()  # greets the broker at once
        self._thread.start()
        try:
            self._wait_for(lambda: self._session.begun and self._error is None, claim_timeout_s, "the partition")
        except BaseException:  # also Ctrl-C
            self._leave()
            raise

    # Called by the program's threads

    @property
    def next_seq(self) -> int:
        """Sequence number of the next sample in the partition."""
        return self._session.buffer.next_seq

    @property
    def endpoint(self) -> str:
        """Address of the broker for producers."""
        return self._endpoint

    @property
    def write(self) -> int:
        """Number of the stream's current write, as far as the broker has said."""
        return self._session.write

    def lease(self) -> Lease:
        """Return the current lease, with the limits and fields of samples. Raises the session's error."""
        self._check_usable()
        lease = self._session.lease
        assert lease is not None  # __init__ has waited for it
        return lease

    def push(self, chunks: Sequence[Chunk]) -> int:
        """Put chunks into the buffer, waiting for room, and return the sequence number of the first sample."""
        first = self._session.buffer.next_seq
        for chunk in chunks:
            began = time.perf_counter()
            self._wait_for_room(size_of(chunk), self._session.buffer.next_seq - first)
            self.tell(Push(chunk))
            self._counts["wait_s"] += time.perf_counter() - began
            self._counts["samples"] += chunk.num_samples
            self._counts["tokens"] += int(np.frombuffer(chunk.lengths_u32, "<u4").sum())
            self._counts["rejected"] += sum(chunk.rejected.values())
        return first

    def tell(self, event: Event) -> None:
        """Let the session handle an event of the program, and wake the thread. Raises the session's error."""
        self._check_usable()
        self._handle(event)
        self._counts["batches"] += isinstance(event, EndBatch)
        self._waker.wake()

    def flush(self, timeout_s: float | None) -> None:
        """Wait until all samples are durable. Raises DataStall after ``timeout_s`` seconds."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        self._wait_for(lambda: self._session.flushed, timeout_s, "its samples to be durable")

    def close(self, end: bool, flush: bool) -> None:
        """End the thread, with ``flush`` once all samples are durable; see ``Producer.close``."""
        if os.getpid() != self._pid or self._closed:
            return
        try:
            if end and self._error is None:
                self.tell(EndPartition())
            if flush:
                self.flush(None)
        finally:
            self._leave()

    def abandon(self, why: str = "") -> None:
        """End the thread after at most ``LEAVE_S`` seconds, and log a warning if samples are not durable.

        ``why``: error of the program, sent to the broker for those who wait for the samples.
        """
        if os.getpid() != self._pid or self._closed:
            return
        if self._thread is not threading.current_thread():
            with self._changed:
                self._changed.wait_for(lambda: self._session.flushed or self._error is not None, LEAVE_S)
        if not self._session.flushed:
            log.warning(
                "%s: closed before all samples were durable, while waiting for %s",
                self._name,
                self._waiting_for(),
            )
        if why:
            self._handle(Failed(why))
        self._leave()

    def stats(self) -> dict[str, float]:
        """Return counts by name; see ``Producer.stats``."""
        buffer = self._session.buffer
        now = {
            "next_seq": buffer.next_seq,
            "durable_seq": buffer.durable_seq,
            "buffered_bytes": buffer.num_bytes,
        }
        return {**self._counts, **now}

    def _leave(self) -> None:
        """End the thread."""
        self._closed = True
        with self._changed:
            self._leaving = True
            self._changed.notify_all()
        self._waker.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=10)

    def _check_usable(self) -> None:
        """Raise in a forked child, after ``close``, and after an error of the session."""
        if os.getpid() != self._pid:
            raise PeerError(
                "got a producer that the parent process made before the fork, expected a producer of this process. "
                "Create a producer after the fork"
            )
        if self._closed:
            raise UserError("the producer is closed: make another")
        if self._error is not None:
            raise self._error

    def _wait_for_room(self, size: int, taken: int) -> None:
        """Wait for ``size`` bytes of room in the buffer; ``taken``: samples of this call that are in the buffer."""
        what = f"room for {size} bytes in its buffer of {self._session.buffer.capacity} bytes"
        what += f" ({taken} samples of this call are already in the buffer)" if taken else ""
        self._wait_for(lambda: self._session.room(size), self._timeout_s, what)

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait until ``condition()`` holds; log the cause every 5 s. Raises the session's error, or DataStall.

        ``what``: name of what the caller waits for, for the error after ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not condition():
                self._check_usable()
                left = deadline - time.monotonic()
                if left <= 0:
                    self._raise_timeout(timeout_s, what)
                if not self._changed.wait(timeout=min(left, SAY_S)) and not condition() and left > SAY_S:
                    log.warning("%s: waiting for %s", self._name, self._waiting_for())

    def _waiting_for(self) -> str:
        """Return a text that names the cause of the wait; empty if there is none."""
        text = self._session.waiting_for()
        return text and text + self._dealer.seeks

    def _raise_timeout(self, timeout_s: float, what: str) -> None:
        """Raise Unreachable if no broker ever answered, else DataStall."""
        if not self._session.reached:
            raise Unreachable(
                f"{self._endpoint}: got no answer in {timeout_s:g} s, expected an answer from a broker. Check that "
                "'streampack broker' is running and listens for producers at this address"
            )
        raise DataStall(
            f"{self._name}: waited {timeout_s:g} s for {what}. The producer still waits for "
            f"{self._waiting_for() or 'its turn'}"
        )

    # The thread

    def _run(self, dealer: Dealer) -> None:
        """Body of the thread: pass messages between ``dealer`` and the session until the end or an error."""
        poller = Poller([dealer], self._waker)
        try:
            while not self._leaving and self._error is None:
                poller.wait(TICK_S)
                for frames in drain(dealer, 64):
                    self._receive(dealer, frames)
                dealer.check(self._session.waits_in_vain)
                self._handle(Tick(time.monotonic()))
                self._send_queued(dealer)
            self._handle(Leave())
            self._send_queued(dealer)
        except StreampackError as error:
            self._fail(error)
        except Exception as error:  # a bug must not leave the program waiting for a thread that has ended
            log.exception("the producer's thread failed")
            self._fail(InternalError(f"the producer's thread failed: {error!r}"))
        finally:
            dealer.close()
            self._waker.close()

    def _receive(self, dealer: Dealer, frames: list[Any]) -> None:
        """Decode a message of the broker for the session; leave a broker that is not the newest."""
        try:
            envelope = wire.decode(frames)
        except WireError as error:
            log.warning("dropped a message of the broker: %s", error)
            return
        if envelope.is_foreign(self._session.run, self._session.epoch):
            dealer.leave()
        self._handle(FromBroker(envelope))

    def _send_queued(self, dealer: Dealer) -> None:
        """Send the queued messages; tell the session about those that could not be sent."""
        while self._outbox:
            envelope = self._outbox.popleft().envelope
            if not dealer.send(wire.encode(envelope)):
                self._handle(Unsent(envelope))

    def _handle(self, event: Event) -> None:
        """Let the session handle an event, and queue its messages in the order of the events."""
        with self._changed:
            for effect in self._session.handle(event):
                self._perform(effect)
            self._changed.notify_all()

    def _perform(self, effect: Effect) -> None:
        """Carry out an effect of the session: queue a message, log a report, or note the broker's rejection."""
        if isinstance(effect, Send):
            self._outbox.append(effect)
        elif isinstance(effect, Report):
            log.log(logging.getLevelName(effect.level.upper()), effect.text, extra={"about": effect.about})
        elif isinstance(effect, Finish) and effect.error:
            self._fail(Rejected(effect.code, effect.error))

    def _fail(self, error: StreampackError) -> None:
        """Store ``error``, to be raised in the program's threads, and wake those that wait."""
        with self._changed:
            self._error = error
            self._changed.notify_all()
