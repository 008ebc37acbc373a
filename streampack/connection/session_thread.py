"""The thread of a producer or subscriber that a program uses, and the state that it shares with the program.

This is a thin shell around a session (``core.sessions``). The thread owns the socket, pings at all times, and repeats
what the session wants. The program's threads give events to the session, and wait for what it knows. A wait longer than
5 s is logged with its cause.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from streampack.core.protocol.events import Effect, Event, FromBroker, Report, Send, Tick, Unsent
from streampack.core.sessions.producer_base import Finish, Leave
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

TICK_S = 0.2
SAY_S = 5.0


class ThreadSession(Protocol):
    """The session that a thread serves."""

    run: int
    epoch: int

    def handle(self, event: Event) -> list[Effect]:
        """Return the effects of an event."""
        ...

    def waiting_for(self) -> str:
        """Return a text that names the cause of the wait; empty if there is none."""
        ...

    @property
    def stall_code(self) -> str:
        """Short name of the cause of the wait; empty for causes without a name."""
        ...

    @property
    def reached(self) -> bool:
        """True if the broker has answered at least once."""
        ...

    @property
    def waits_in_vain(self) -> bool:
        """True if the broker has long not answered."""
        ...


class SessionThread:
    """The thread and its session, shared with the program's threads under one lock.

    ``name`` names the stream and the partition, or the feed, for logs and errors.
    """

    role = "producer"
    """Name of this side of the connection, for logs and errors."""
    side = "producers"
    """Which of the addresses in ``listen`` of broker.yaml the connection uses."""

    def __init__(
        self, endpoint: str, session: ThreadSession, name: str, timeout_s: float, key: Key | None,
        max_frame_bytes: int = 1 << 20,
    ) -> None:  # fmt: skip
        self._endpoint, self._timeout_s, self._pid = endpoint, timeout_s, os.getpid()
        self._shared, self._name = session, name
        self._log = logging.getLogger(f"streampack.{self.role}")
        self._changed = threading.Condition()
        self._outbox: deque[Send] = deque()
        self._error: StreampackError | None = None
        self._closed = self._leaving = False
        self._waker = Waker()
        try:
            self._dealer = Dealer(endpoint, max_message_bytes=max_frame_bytes, linger_ms=500, key=key)
        except BaseException:
            self._waker.close()
            raise
        self._thread = threading.Thread(target=self._run, args=(self._dealer,), name="streampack-push", daemon=True)
        self._waker.wake()  # greets the broker at once
        self._thread.start()

    # Called by the program's threads

    @property
    def endpoint(self) -> str:
        """Address of the broker for producers."""
        return self._endpoint

    def tell(self, event: Event) -> None:
        """Let the session handle an event of the program, and wake the thread. Raises the session's error."""
        self._check_usable()
        self._handle(event)
        self._waker.wake()

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
                f"got a {self.role} that the parent process made before the fork, expected a {self.role} of this "
                f"process. Create a {self.role} after the fork"
            )
        if self._closed:
            raise UserError(f"the {self.role} is closed: make another")
        if self._error is not None:
            raise self._error

    def _wait_for(
        self, condition: Callable[[], bool], timeout_s: float, awaited: str, level: int = logging.WARNING
    ) -> None:  # fmt: skip
        """Wait until ``condition()`` holds; log the cause every 5 s. Raises the session's error, or DataStall.

        Args:
            condition: Function that returns whether the wait is over.
            timeout_s: Seconds to wait.
            awaited: Name of what the caller waits for, for the error after ``timeout_s`` seconds.
            level: Level of the log lines. A wait that is part of a run that works, such as for a policy, has INFO.
        """
        began = time.monotonic()
        deadline, say_at = began + timeout_s, began + SAY_S
        with self._changed:
            while not condition():
                self._check_usable()
                now = time.monotonic()
                if now >= deadline:
                    self._raise_timeout(timeout_s, awaited)
                self._changed.wait(timeout=min(deadline, say_at) - now)  # the thread wakes it at each tick, too
                if time.monotonic() >= say_at and not condition():
                    say_at = time.monotonic() + SAY_S
                    self._log.log(level, "%s: waiting for %s", self._name, self._waiting_for() or awaited)

    def _waiting_for(self) -> str:
        """Return a text that names the cause of the wait; empty if there is none."""
        text = self._shared.waiting_for()
        return text and text + self._dealer.seeks

    def _raise_timeout(self, timeout_s: float, awaited: str) -> None:
        """Raise Unreachable if no broker ever answered, else DataStall."""
        if not self._shared.reached:
            raise Unreachable(
                f"{self._endpoint}: got no answer in {timeout_s:g} s, expected an answer from a broker. Check that "
                f"'streampack broker' is running and listens for {self.side} at this address"
            )
        raise DataStall(
            f"{self._name}: waited {timeout_s:g} s for {awaited}. The {self.role} still waits for "
            f"{self._waiting_for() or 'its turn'}",
            self._shared.stall_code,
        )

    def close(self) -> None:
        """End the thread, without a wait for answers."""
        if os.getpid() == self._pid and not self._closed:
            self._leave()

    # The thread

    def _run(self, dealer: Dealer) -> None:
        """Body of the thread: pass messages between ``dealer`` and the session until the end or an error."""
        poller = Poller([dealer], self._waker)
        try:
            while not self._leaving and self._error is None:
                poller.wait(TICK_S)
                for frames in drain(dealer, 64):
                    self._receive(dealer, frames)
                dealer.check(self._shared.waits_in_vain)
                self._handle(Tick(time.monotonic()))
                self._send_queued(dealer)
            self._handle(Leave())
            self._send_queued(dealer)
        except StreampackError as error:
            self._fail(error)
        except Exception as error:  # a bug must not leave the program waiting for a thread that has ended
            self._log.exception("the %s's thread failed", self.role)
            self._fail(InternalError(f"the {self.role}'s thread failed: {error!r}"))
        finally:
            dealer.close()
            self._waker.close()

    def _receive(self, dealer: Dealer, frames: list[Any]) -> None:
        """Decode a message of the broker for the session; leave a broker that is not the newest."""
        try:
            envelope = wire.decode(frames)
        except WireError as error:
            self._log.warning("dropped a message of the broker: %s", error)
            return
        if envelope.is_foreign(self._shared.run, self._shared.epoch):
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
            for effect in self._shared.handle(event):
                self._perform(effect)
            self._changed.notify_all()

    def _perform(self, effect: Effect) -> None:
        """Carry out an effect of the session: queue a message, log a report, or note the broker's rejection."""
        if isinstance(effect, Send):
            self._outbox.append(effect)
        elif isinstance(effect, Report):
            self._log.log(logging.getLevelName(effect.level.upper()), effect.text, extra={"about": effect.about})
        elif isinstance(effect, Finish) and effect.error:
            self._fail(Rejected(effect.code, effect.error))

    def _fail(self, error: StreampackError) -> None:
        """Store ``error``, to be raised in the program's threads, and wake those that wait."""
        with self._changed:
            self._error = error
            self._changed.notify_all()
