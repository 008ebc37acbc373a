"""The client's thread: it owns the socket, decodes messages and keeps a few steps ready.

This is a thin shell around ``client_session``, which makes all decisions. Steps and answers wait in ``ready`` and
``answers`` until the trainer's thread takes them; both threads hold ``_changed`` to touch them. A wait longer than 5 s
is logged with its cause. An error of the session is raised in the trainer's thread, where it waits. Steps of an
iteration that has ended are dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from streampack.client.reading_stats import ReadingFigures
from streampack.core.model.mesh import Mesh
from streampack.core.protocol.events import Effect, Event, FromBroker, Send, Tick, Unsent
from streampack.core.protocol.trainer_messages import AskState, Attached, Commit, Committed, State
from streampack.core.sessions.client_events import Answered, Ask, Broken, Damaged, Deliver, Detach, Ended, Waiting
from streampack.core.sessions.client_session import ClientSession
from streampack.errors import (
    DataStall,
    InternalError,
    MeshError,
    PeerError,
    Rejected,
    StreampackError,
    Unreachable,
    UserError,
    WireError,
)
from streampack.packs import forks
from streampack.packs.build import build_step
from streampack.packs.kernel_loader import kernels
from streampack.packs.lazy import Ahead, LazyPacks
from streampack.packs.slabs import Slabs
from streampack.packs.step import Step
from streampack.transport.keys import Key
from streampack.transport.sockets import Dealer, Poller, drain
from streampack.transport.waker import Waker
from streampack.views.formats import Views
from streampack.wire import frames as wire

log = logging.getLogger("streampack.client")

TICK_S = 0.2
SAY_S = 5.0
STATS_S = 1.0
MAX_MESSAGE_BYTES = 1 << 30
TWICE = (
    "would read all data again. Connect in the trainer's own process and use DataLoader(loader, batch_size=None, "
    "num_workers=0), because the client itself prefetches"
)


class Prefetching:
    """The client's thread, with the steps and answers that wait for the trainer's thread.

    The thread runs from the constructor to ``close``. Use the object from one other thread, in the same process.

    ``answer_s``: seconds until the thread fails with Unreachable if no broker answers. ``figures``: counters that
    the thread sends to the broker.
    """

    def __init__(
        self, endpoint: str, session: ClientSession, mesh: Mesh, views: Views, answer_s: float,
        figures: ReadingFigures, key: Key | None = None,
    ) -> None:  # fmt: skip
        self.session = session
        self.ready: deque[Step] = deque()
        self.round = 0
        """Number of the current iteration, or of the next one if none has begun."""
        self.ended = False
        self.attached: Attached | None = None
        self.answers: deque[State | Committed] = deque()
        self._endpoint, self._mesh, self._views, self._answer_s = endpoint, mesh, views, answer_s
        self._figures = figures
        self._forks = forks.passed
        self._slabs = Slabs()
        self._told: deque[Event] = deque()
        self._changed = threading.Condition()
        self._error: StreampackError | None = None
        self._closing = False
        self._started = time.monotonic()
        dealer = Dealer(endpoint, MAX_MESSAGE_BYTES, linger_ms=500, key=key)
        self._waker = Waker()
        self._ahead = Ahead(self._waker.wake)
        self._thread = threading.Thread(target=self._run, args=(dealer,), name="streampack-client", daemon=True)
        self._thread.start()

    # Called by the trainer's thread

    def tell(self, event: Event) -> None:
        """Queue ``event`` for the session and wake the thread, which handles the event."""
        self._told.append(event)
        self._waker.wake()

    def turn_to(self, round_: int) -> None:
        """Set the number of the next iteration and drop the prefetched steps of the current one."""
        with self._changed:
            self.round, self.ended = round_, False
            self.ready.clear()

    def take_step(self) -> Step | None:
        """Wait for the next step and return the step; None at the end of the iteration. Raises as ``wait_for``."""
        with self._changed:
            self.wait_for(lambda: bool(self.ready) or self.ended)
            return self.ready.popleft() if self.ready else None

    def ask(self, question: AskState | Commit) -> State | Committed:
        """Send a question to the broker, wait for the answer and return the answer. Raises as ``wait_for``."""
        with self._changed:
            self.answers.clear()
        self.tell(Ask(question))
        try:
            with self._changed:
                self.wait_for(lambda: bool(self.answers))
                return self.answers.popleft()
        finally:
            self.tell(Waiting(False))  # the session stops repeating the question

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition()`` holds; log the cause every 5 s. Raises the session's error.

        The session hears only of waits longer than a tick: an event for each wait would wake the thread twice a step.
        """
        told = False
        try:
            with self._changed:
                while not condition():
                    if self._error is not None:
                        raise self._error
                    self.check_usable()
                    if self._changed.wait(timeout=SAY_S if told else TICK_S) or condition():
                        continue
                    if told:
                        about = {"feed": self.session.feed, "rank": self._mesh.rank}
                        level = logging.INFO if self.session.waits_for_batch() else logging.WARNING
                        waiting_for = self.session.waiting_for()
                        log.log(level, "%s: waiting for %s", self._mesh, waiting_for, extra={"about": about})
                    else:
                        told = True
                        self.tell(Waiting(True))
        finally:
            if told:
                self.tell(Waiting(False))

    def check_usable(self) -> None:
        """Raise PeerError in a forked child, and UserError if the client is closed."""
        if forks.passed != self._forks:
            raise PeerError(
                "got a client that the parent process made before the fork, expected a call in the parent process. A "
                f"client of the child process {TWICE}"
            )
        if self._closing:
            raise UserError("the client is closed: connect again")

    def close(self) -> None:
        """Release the rank and end the thread; further calls have no effect."""
        if forks.passed != self._forks:
            return
        with self._changed:  # another thread may wait for a step
            self._closing = True
            self._changed.notify_all()
        self._waker.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=10)

    def fail(self, error: StreampackError) -> None:
        """Raise ``error`` at the next wait for a step, once the steps that are ready are used up. For any thread."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    # The thread

    def _run(self, dealer: Dealer) -> None:
        """Pass messages between ``dealer`` and the session until ``close`` or an error."""
        poller = Poller([dealer], self._waker)
        ticked = counted = 0.0
        try:
            while not self._closing:
                poller.wait(TICK_S)
                for frames in drain(dealer, 64):
                    self._perform(dealer, self._receive(frames))
                self._handle_told(dealer)
                self._ahead.make()
                self._figures.set_cause(*self.session.cause)
                now = time.monotonic()
                if now - counted >= STATS_S:
                    counted = now
                    self.session.stats = self._figures.counts(self.session.num_skipped)
                    self.session.starvation = self._figures.starvation()
                if now - ticked >= TICK_S:
                    ticked = now
                    dealer.check()
                    self._perform(dealer, self.session.handle(Tick(now)))
                    self._check_reached(now)
            self._handle_told(dealer)
            self._perform(dealer, self.session.handle(Detach()))
        except StreampackError as error:
            self.fail(error)
        except Exception as error:  # a bug must not leave the trainer waiting for a thread that has ended
            log.exception("the client's thread failed")
            self.fail(InternalError(f"the client's thread failed: {error!r}"))
        finally:
            self._ahead.stop()
            dealer.close()
            self._waker.close()

    def _handle_told(self, dealer: Dealer) -> None:
        """Let the session handle the events that the trainer's thread has queued."""
        while self._told:
            self._perform(dealer, self.session.handle(self._told.popleft()))

    def _receive(self, frames: list[Any]) -> list[Effect]:
        """Decode a message of the broker and return the session's effects."""
        try:
            return self.session.handle(FromBroker(wire.decode(frames)))
        except WireError as error:
            log.warning("dropped a message of the broker: %s", error)
            return self.session.handle(Damaged())

    def _perform(self, dealer: Dealer, effects: list[Effect]) -> None:
        """Carry out the session's effects: send messages, build steps, hand answers and errors to the trainer."""
        for effect in effects:
            if isinstance(effect, Send):
                if not dealer.send(wire.encode(effect.envelope)):
                    self.session.handle(Unsent(effect.envelope))
            elif isinstance(effect, Deliver):
                step = build_step(effect.parts, effect.attached, self._mesh, self._slabs)
                step = self._views.make(step, effect.attached.rules)
                if isinstance(step.packs, LazyPacks):
                    self._prepare(step.packs)
                with self._changed:
                    if self.session.round == self.round:  # the trainer may have begun another iteration by now
                        self.ready.append(step)
                    self._changed.notify_all()
            elif isinstance(effect, Ended):
                with self._changed:
                    self.ended = self.session.round == self.round
                    self._changed.notify_all()
            elif isinstance(effect, Answered):
                with self._changed:
                    self.answers.append(effect.message)
                    self._changed.notify_all()
            elif isinstance(effect, Broken):
                self.fail(_error(effect, self._endpoint))
        if self.session.attached is not None and self.attached is None:
            with self._changed:
                self.attached = self.session.attached
                self._changed.notify_all()

    def _prepare(self, packs: LazyPacks) -> None:
        """Make packs of a new step ahead of use: the first group for a slow trainer, or all packs without numba."""
        packs.ahead = self._ahead
        if kernels.derive is None:  # numpy takes ten times as long
            packs.make()
        elif self._ahead.slow:
            self._ahead.make_group(packs, 0)

    def _check_reached(self, now: float) -> None:
        """Raise Unreachable if no broker has answered within the time limit."""
        if not self.session.reached and now - self._started > self._answer_s:
            raise Unreachable(
                f"{self._endpoint}: got no answer in {self._answer_s:g} s, expected an answer from a broker. Check "
                "that 'streampack broker' is running and listens for trainers at this address"
            )


def _error(broken: Broken, endpoint: str) -> StreampackError:
    """Return the exception for a session that has ended, chosen by its error code."""
    if broken.code in ("mesh", "rank_taken"):
        return MeshError(broken.detail)
    if broken.code == "stopped":
        return PeerError(broken.detail)
    if broken.code == "stall":
        return DataStall(f"{endpoint}: {broken.detail}")
    return Rejected(broken.code, broken.detail)
