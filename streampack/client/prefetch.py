"""The client's thread: it owns the socket, decodes messages and keeps a few steps ready.

This is a thin shell around ``routed_client``, which makes all decisions. Steps and answers wait in ``ready`` and
``answers`` until the trainer's thread takes them; both threads hold ``_changed`` to touch them. A wait longer than 5 s
is logged with its cause. An error of the session is raised in the trainer's thread, where it waits. Steps of an
iteration that has ended are dropped.

With a relay on this host, the thread has a connection to the relay. It has one to the broker only while the relay does
not work.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from streampack.client.reading_stats import ReadingFigures
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Rules
from streampack.core.protocol.events import Effect, Event, FromBroker, Send, Tick, Unsent
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.trainer_messages import Attached, Question, ReaderAnswer
from streampack.core.sessions.client_events import (
    Answered,
    Ask,
    Broken,
    Damaged,
    Deliver,
    Detach,
    Ended,
    Rerouted,
    Waiting,
)
from streampack.core.sessions.client_session import ClientSession
from streampack.core.sessions.route import RelayLost, Reroute, Route
from streampack.core.sessions.routed_client import FromRelay, RoutedClient, SendProbe
from streampack.errors import (
    DataStall,
    InternalError,
    MeshError,
    PeerError,
    Rejected,
    StageEnds,
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
from streampack.transport import relay_socket
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
    the thread sends to the broker. ``relay``: address of this host's relay; None if there is none. ``insists``: wait
    for the relay as long as for a step, because the user has named it.
    """

    def __init__(
        self, endpoint: str, session: ClientSession, mesh: Mesh, views: Views, answer_s: float,
        figures: ReadingFigures, key: Key | None = None, relay: str | None = None, insists: bool = False,
    ) -> None:  # fmt: skip
        self.session = session
        self._relay_address, self._key = relay, key
        route = Route(session.reader, insists=insists) if relay is not None else None
        self._client = RoutedClient(session, route)
        self.ready: deque[Step] = deque()
        self.iteration = 0
        """Number of the current iteration, or of the next one if none has begun."""
        self.ended = False
        self.stage_ends: tuple[int, str, str] | None = None
        """Arguments of the error with which the iteration ends; None if it ends with the feed."""
        self.attached: Attached | None = None
        self.answers: deque[ReaderAnswer] = deque()
        self._endpoint, self._mesh, self._views, self._answer_s = endpoint, mesh, views, answer_s
        self._figures = figures
        self.received_bytes = 0
        """Bytes of payload of the delivered steps."""
        self._forks = forks.passed
        self._slabs = Slabs()
        self._stage_rules = (Rules(), Rules())
        """The last rules of a step that came with it, and the same with streams."""
        self._events: deque[Event] = deque()
        self._moved_to = ""
        """The broker's new address, until the thread has connected there."""
        self._changed = threading.Condition()
        self._error: StreampackError | None = None
        self.is_closing = False
        """True once the thread was told to end."""
        self._started = time.monotonic()
        self._broker: Dealer | None = None
        """The connection to the broker; None while messages go through the relay."""
        self._relay: Dealer | None = None
        if relay is None:
            self._broker = self._connect(endpoint)
        else:
            self._relay = Dealer(relay, MAX_MESSAGE_BYTES, linger_ms=500)
        self._waker = Waker()
        self._ahead = Ahead(self._waker.wake)
        self._thread = threading.Thread(target=self._run, name="streampack-client", daemon=True)
        self._thread.start()

    # Called by the trainer's thread

    def tell(self, event: Event) -> None:
        """Queue ``event`` for the session and wake the thread, which handles the event."""
        self._events.append(event)
        self._waker.wake()

    def turn_to(self, iteration: int) -> None:
        """Set the number of the next iteration and drop the prefetched steps of the current one."""
        with self._changed:
            self.iteration, self.ended, self.stage_ends = iteration, False, None
            self.ready.clear()

    def take_step(self) -> Step | None:
        """Wait for the next step and return the step; None at the end of the iteration.

        Raises StageEnds if the feed goes on, but not for this trainer, and as ``wait_for``.
        """
        with self._changed:
            self.wait_for(lambda: bool(self.ready) or self.ended)
            if self.ready:
                return self.ready.popleft()
        if self.stage_ends is not None:
            raise StageEnds(*self.stage_ends)
        return None

    def ask(self, question: Question) -> ReaderAnswer:
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
        is_logged = False
        try:
            with self._changed:
                while not condition():
                    if self._error is not None:
                        raise self._error
                    self.check_usable()
                    if self._changed.wait(timeout=SAY_S if is_logged else TICK_S) or condition():
                        continue
                    if is_logged:
                        about = {"feed": self.session.feed, "rank": self._mesh.rank}
                        level = logging.INFO if self.session.waits_for_batch() else logging.WARNING
                        log.log(level, "%s: waiting for %s", self._mesh, self.waiting_for(), extra={"about": about})
                    else:
                        is_logged = True
                        self.tell(Waiting(True))
        finally:
            if is_logged:
                self.tell(Waiting(False))

    def waiting_for(self) -> str:
        """Return a text that names the cause of the wait for the next step."""
        if self._client.awaits_relay:
            return f"an answer of the relay at {self._relay_address}"
        broker = self._broker
        if broker is not None and not self.session.reached:
            at = broker.seeks or f" at {broker.endpoint}"
            return f"an answer of the broker{at}{_unused_address(broker.endpoint)}"
        return self.session.waiting_for() + (broker.seeks if broker is not None else "")

    @property
    def by_relay(self) -> bool:
        """True while messages go through this host's relay."""
        return self._client.by_relay

    def check_usable(self) -> None:
        """Raise PeerError in a forked child, and UserError if the client is closed."""
        if forks.passed != self._forks:
            raise PeerError(
                "got a client that the parent process made before the fork, expected a call in the parent process. A "
                f"client of the child process {TWICE}"
            )
        if self.is_closing:
            raise UserError("the client is closed: connect again")

    def close(self) -> None:
        """Release the rank and end the thread; further calls have no effect."""
        if forks.passed != self._forks:
            return
        with self._changed:  # another thread may wait for a step
            self.is_closing = True
            self._changed.notify_all()
        self._waker.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=10)

    def fail(self, error: StreampackError) -> None:
        """Raise ``error`` at the next wait for a step, once the steps that are ready are used up. For any thread."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def move_to(self, endpoint: str) -> None:
        """Connect to the broker at another address, where it listens now. For any thread."""
        self._moved_to = endpoint
        self._waker.wake()

    # The thread

    def _connect(self, endpoint: str) -> Dealer:
        """Return a connection to the broker."""
        return Dealer(endpoint, MAX_MESSAGE_BYTES, linger_ms=500, key=self._key)

    def _poll(self) -> Poller:
        """Return a poller of the connections that are open."""
        return Poller([dealer for dealer in (self._relay, self._broker) if dealer is not None], self._waker)

    def _run(self) -> None:
        """Pass messages between the connections and the session until ``close`` or an error."""
        self._poller = self._poll()
        ticked = counted = 0.0
        try:
            while not self.is_closing:
                self._poller.wait(TICK_S)
                if self._moved_to:
                    self._move()
                for frames in drain(self._relay, 64) if self._relay is not None else ():
                    self._perform(self._receive(frames, FromRelay))
                for frames in drain(self._broker, 64) if self._broker is not None else ():
                    self._perform(self._receive(frames, FromBroker))
                    if self._broker is None:  # the route leads through the relay again
                        break
                self._handle_told()
                self._ahead.make()
                self._figures.set_cause(*self.session.cause)
                now = time.monotonic()
                if now - counted >= STATS_S:
                    counted = now
                    self.session.stats = self._figures.counts(self.session.num_skipped) | self._views.media_stats()
                    self.session.starvation = self._figures.starvation()
                if now - ticked >= TICK_S:
                    ticked = now
                    self._check_connections()
                    self._perform(self._client.handle(Tick(now)))
                    self._check_reached(now)
            self._handle_told()
            self._perform(self._client.handle(Detach()))
        except StreampackError as error:
            self.fail(error)
        except Exception as error:  # a bug must not leave the trainer waiting for a thread that has ended
            log.exception("the client's thread failed")
            self.fail(InternalError(f"the client's thread failed: {error!r}"))
        finally:
            self._ahead.stop()
            for dealer in (self._relay, self._broker):
                if dealer is not None:
                    dealer.close()
            self._waker.close()

    def _check_connections(self) -> None:
        """Notice a relay that is gone, or another broker. Raises Rejected if the broker does not admit this process."""
        if self._broker is not None and self._broker.check(self.session.patience.waits_in_vain):
            self._perform(self._client.handle(Rerouted()))
        if self._relay is not None:
            self._relay.check()
            if self._relay.disconnects > self._lost:
                self._lost = self._relay.disconnects
                self._perform(self._client.handle(RelayLost()))

    def _move(self) -> None:
        """Replace the connection to the broker by one to its new address."""
        self._endpoint, self._moved_to = self._moved_to, ""
        log.warning("%s: the broker listens at %s now", self._mesh, self._endpoint)
        if self._broker is not None:
            self._broker.close()
            self._broker = self._connect(self._endpoint)
            self._poller = self._poll()

    _lost = 0
    """Number of connections to the relay that have ended."""

    def _follow(self, route: Reroute) -> None:
        """Open or close the connection to the broker, as the route leads there or through the relay."""
        about = {"feed": self.session.feed, "rank": self._mesh.rank}
        if route.by_relay:
            log.info("%s: reads through the relay again: %s", self._mesh, route.why, extra={"about": about})
            if self._broker is not None:
                self._broker.close()
                self._broker = None
        else:
            log.warning("%s: reads from the broker itself: %s", self._mesh, route.why, extra={"about": about})
            self._broker = self._broker or self._connect(self._endpoint)
        self._poller = self._poll()

    def _send(self, dealer: Dealer | None, envelope: Envelope) -> None:
        """Send a message of the session over a connection; tell the session if it did not leave."""
        if dealer is None or not dealer.send(wire.encode(envelope)):
            self.session.handle(Unsent(envelope))

    def _handle_told(self) -> None:
        """Let the session handle the events that the trainer's thread has queued."""
        while self._events:
            self._perform(self._client.handle(self._events.popleft()))

    def _receive(self, frames: list[Any], kind: type[FromBroker] | type[FromRelay]) -> list[Effect]:
        """Decode a message of the broker and return the session's effects."""
        try:
            envelope = wire.decode(frames)
        except WireError as error:
            log.warning("dropped a message of the broker: %s", error)
            return self._client.handle(Damaged())
        if (
            kind is FromBroker
            and self._broker is not None
            and envelope.is_foreign(self.session.run, self.session.epoch)
        ):
            self._broker.leave()
        return self._client.handle(kind(envelope))

    def _perform(self, effects: list[Effect]) -> None:
        """Carry out the session's effects: send messages, build steps, hand answers and errors to the trainer."""
        for effect in effects:
            if isinstance(effect, Send):
                self._send(self._relay if self._client.by_relay else self._broker, effect.envelope)
            elif isinstance(effect, SendProbe):
                if self._relay is not None:
                    self._relay.send(wire.encode(effect.envelope))
            elif isinstance(effect, Reroute):
                self._follow(effect)
            elif isinstance(effect, Deliver):
                self.received_bytes += sum(len(frame) for part in effect.parts for frame in part.payload)
                self._deliver(effect)
            elif isinstance(effect, Ended):
                end = effect.for_mesh
                self._end(None if end is None else (end.num_steps, end.name, end.detail))
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

    def _deliver(self, effect: Deliver) -> None:
        """Build a step and hand it to the trainer; end the iteration if the format does not suit its rules."""
        step = build_step(effect.parts, effect.attached, self._mesh, self._slabs, self._views.media)
        try:
            rules = self._rules_of(step, effect.attached)
        except UserError as error:
            self._end((step.index, step.stage, str(error)))
            return
        step = self._views.make(replace(step, rules=rules), rules)
        if isinstance(step.packs, LazyPacks):
            self._prepare(step.packs)
        with self._changed:
            if self.session.iteration == self.iteration and not self.ended:  # the trainer may have begun another one
                self.ready.append(step)
            self._changed.notify_all()

    def _rules_of(self, step: Step, attached: Attached) -> Rules:
        """Return the rules of a step, with the streams of the run's first rules: one object for each stage.

        Raises UserError if the format does not suit rules that the step before did not have.
        """
        rules, first = step.rules, attached.rules
        assert rules is not None, "as build_step has made it"
        if rules is first:
            return first
        if rules != self._stage_rules[0]:
            with_streams = msgspec.structs.replace(rules, streams=first.streams)
            self._views.fit(with_streams, attached.layout)
            self._stage_rules = rules, with_streams
        return self._stage_rules[1]

    def _end(self, stage_ends: tuple[int, str, str] | None) -> None:
        """End the iteration that the session reads."""
        with self._changed:
            if self.session.iteration == self.iteration and not self.ended:
                self.ended, self.stage_ends = True, stage_ends
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
        stall_s = self.session.patience.stall_s
        limit = stall_s if self._client.awaits_relay else min(self._answer_s, stall_s)
        if self._client.awaits_relay and now - self._started > limit:
            raise Unreachable(
                f"{self._relay_address}: got no answer in {limit:g} s, expected an answer from a relay. Start one on "
                f"this host with 'streampack relay --broker {self._endpoint} --listen {self._relay_address}', or set "
                f"{relay_socket.ENVIRONMENT}={relay_socket.OFF}"
            )
        if not self.session.reached and now - self._started > limit:
            raise Unreachable(
                f"{self._endpoint}: got no answer in {limit:g} s, expected an answer from a broker. Check "
                "that 'streampack broker' is running and listens for trainers at this address"
                f"{_unused_address(self._endpoint)}"
            )


def _unused_address(endpoint: str) -> str:
    """Return a hint if the environment names another broker than ``endpoint``, as under ``streampack run``."""
    other = os.environ.get("STREAMPACK_ENDPOINT", endpoint)
    return "" if other == endpoint else f"; STREAMPACK_ENDPOINT names {other}, which is not used"


def _error(broken: Broken, endpoint: str) -> StreampackError:
    """Return the exception for a session that has ended, chosen by its error code."""
    if broken.code in ("mesh", "rank_taken"):
        return MeshError(broken.detail)
    if broken.code == "stopped":
        return PeerError(broken.detail)
    if broken.code == "stall":
        return DataStall(f"{endpoint}: {broken.detail}")
    return Rejected(broken.code, broken.detail)
