"""The thread of a producer that pushes, and what it and the program share. A thin shell around ``push_session``.

The thread owns the socket, pings whatever happens, and sends again what a broker lost; the program's threads put
chunks into the buffer and wait for room. Nothing waits silently: a wait of 5 s is logged with what it waits for.
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
"""What is left to a broker to make samples safe when a producer is dropped, or left by an exception."""


class Pushing:
    """The thread, its session, and what they share with the program under one lock."""

    def __init__(
        self, endpoint: str, stream: str, partition: int, buffer_bytes: int, timeout_s: float, key: Key | None = None
    ) -> None:
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
            dealer = Dealer(endpoint, max_message_bytes=1 << 20, linger_ms=500, key=key)
        except BaseException:
            self._waker.close()
            raise
        self._thread = threading.Thread(target=self._run, args=(dealer,), name="streampack-push", daemon=True)
        self._waker.wake()  # says hello at once
        self._thread.start()
        try:
            self._wait_for(lambda: self._session.begun and self._error is None, timeout_s, "the partition")
        except BaseException:  # Ctrl-C too
            self._leave()
            raise

    # What the program uses

    @property
    def next_seq(self) -> int:
        return self._session.buffer.next_seq

    def lease(self) -> Lease:
        """What the broker asks of samples now."""
        self._check_usable()
        lease = self._session.lease
        assert lease is not None  # __init__ has waited for it
        return lease

    def push(self, chunks: Sequence[Chunk]) -> int:
        """Put chunks into the buffer, each once there is room; the number of the first sample."""
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
        """Something of the program's for the session."""
        self._check_usable()
        self._handle(event)
        self._counts["batches"] += isinstance(event, EndBatch)
        self._waker.wake()

    def flush(self, timeout_s: float | None) -> None:
        """Until everything is safe."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        self._wait_for(lambda: self._session.flushed, timeout_s, "its samples to be safe")

    def close(self, end: bool, flush: bool) -> None:
        """See ``Producer.close``."""
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
        """Leave soon, and say what is lost by it; ``why`` is told to those who wait for the samples."""
        if os.getpid() != self._pid or self._closed:
            return
        if self._thread is not threading.current_thread():
            with self._changed:
                self._changed.wait_for(lambda: self._session.flushed or self._error is not None, LEAVE_S)
        if not self._session.flushed:
            log.warning("%s: left with samples that are not safe: %s", self._name, self._session.waiting_for())
        if why:
            self._handle(Failed(why))
        self._leave()

    def stats(self) -> dict[str, float]:
        """See ``Producer.stats``."""
        buffer = self._session.buffer
        now = {
            "next_seq": buffer.next_seq,
            "durable_seq": buffer.durable_seq,
            "buffered_bytes": buffer.num_bytes,
        }
        return {**self._counts, **now}

    def _leave(self) -> None:
        self._closed = True
        with self._changed:
            self._leaving = True
            self._changed.notify_all()
        self._waker.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=10)

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise PeerError("got a producer of the parent process after the fork, expected its own: make one there")
        if self._closed:
            raise UserError("the producer is closed: make another")
        if self._error is not None:
            raise self._error

    def _wait_for_room(self, size: int, taken: int) -> None:
        what = f"room in its buffer of {self._session.buffer.capacity} bytes for {size}"
        what += f" ({taken} samples of this call are taken)" if taken else ""
        self._wait_for(lambda: self._session.room(size), self._timeout_s, what)

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Until ``condition()``; says every 5 s what it waits for. Raises the session's error, or DataStall."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not condition():
                self._check_usable()
                left = deadline - time.monotonic()
                if left <= 0:
                    self._stalled(timeout_s, what)
                if not self._changed.wait(timeout=min(left, SAY_S)) and not condition() and left > SAY_S:
                    log.warning("%s: waiting for %s", self._name, self._session.waiting_for())

    def _stalled(self, timeout_s: float, what: str) -> None:
        if not self._session.reached:
            raise Unreachable(
                f"{self._endpoint}: got no answer in {timeout_s:g} s, expected a broker: "
                f"is 'streampack broker' running, and listening for producers there?"
            )
        raise DataStall(
            f"{self._name}: waited {timeout_s:g} s for {what}: it waits for {self._session.waiting_for() or 'its turn'}"
        )

    # The thread

    def _run(self, dealer: Dealer) -> None:
        poller = Poller([dealer], self._waker)
        try:
            while not self._leaving and self._error is None:
                poller.wait(TICK_S)
                for frames in drain(dealer, 64):
                    try:
                        self._handle(FromBroker(wire.decode(frames)))
                    except WireError as error:
                        log.warning("dropped a message of the broker: %s", error)
                dealer.check()
                self._handle(Tick(time.monotonic()))
                self._empty(dealer)
            self._handle(Leave())
            self._empty(dealer)
        except StreampackError as error:
            self._fail(error)
        except Exception as error:  # a bug of ours must not leave the program waiting for a thread that is gone
            log.exception("the producer's thread failed")
            self._fail(InternalError(f"the producer's thread failed: {error!r}"))
        finally:
            dealer.close()
            self._waker.close()

    def _empty(self, dealer: Dealer) -> None:
        while self._outbox:
            envelope = self._outbox.popleft().envelope
            if not dealer.send(wire.encode(envelope)):
                self._handle(Unsent(envelope))

    def _handle(self, event: Event) -> None:
        """Tell the session something, and have its messages sent in the order of the events."""
        with self._changed:
            for effect in self._session.handle(event):
                self._note(effect)
            self._changed.notify_all()

    def _note(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            self._outbox.append(effect)
        elif isinstance(effect, Report):
            log.log(logging.getLevelName(effect.level.upper()), effect.text, extra={"about": effect.about})
        elif isinstance(effect, Finish) and effect.error:
            self._fail(Rejected(effect.code, effect.error))

    def _fail(self, error: StreampackError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()
