"""The client's thread, and what it and the trainer's share. A thin shell around ``core.client_session``.

The thread owns the socket, keeps a few steps ready and turns them into packs; the trainer's
thread only takes them. Nothing waits silently: a wait of more than 5 s is logged with what it
waits for, and an error of the session is raised where the trainer asks for its next pack.

The rank is taken at once, steps are asked for when the trainer begins to iterate: where it begins may be said until
then, by a state. An iteration is known by its round, which only rises; loading a state ends the one that is on.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import operator
import os
import socket
import threading
import time
import uuid
from collections import deque
from typing import Any

import msgspec
import numpy as np

from streampack import checkpoint, wire
from streampack.core.client_session import (
    Again,
    Answered,
    Ask,
    Begin,
    Broken,
    ClientSession,
    Deliver,
    Detach,
    Ended,
    Returned,
    Waiting,
)
from streampack.core.events import Effect, Event, FromBroker, Send, Tick
from streampack.core.messages import AskState, Attached, Commit, Committed, Mesh, ReadBy, State
from streampack.core.patience import Patience
from streampack.core.rules import Rules
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
from streampack.formats import Views, real_tokens
from streampack.packs import Step, build_step
from streampack.slabs import Slabs
from streampack.transport import Dealer, Poller, Waker, drain

log = logging.getLogger("streampack.client")

TICK_S = 0.2
SAY_S = 5.0
MAX_MESSAGE_BYTES = 1 << 30
STATS_S = 1.0
_WAITS_KEPT = 4096
TWICE = (
    "would read everything again, expected the trainer's own process: connect there and take "
    "DataLoader(loader, batch_size=None, num_workers=0); the client prefetches by itself"
)


class Reading:
    """A rank's place at a broker, from the attachment to ``close``: what has come, and where the trainer is.

    One thread of the trainer uses it, in the process that made it, beside its own. Raises what ``connect`` does.
    """

    def __init__(
        self, endpoint: str, feed: str, mesh: Mesh, readers: ReadBy, prefetch: int, patience: Patience, views: Views
    ) -> None:
        self._endpoint, self._timeout_s, self._mesh, self._views = endpoint, patience.answer_s, mesh, views
        self._session = ClientSession(
            run=0, feed=feed, reader=uuid.uuid4().hex, host=socket.gethostname(), pid=os.getpid(), mesh=mesh,
            readers=readers, prefetch=prefetch, ready=False, patience=patience,
        )  # fmt: skip
        self._pid = os.getpid()
        self._ready: deque[Step] = deque()
        self._told: deque[Event] = deque()
        self.round = 0
        """The iteration that is on, or that begins next."""
        self._last_round = -1  # the last that was begun
        self._place = Begin()  # where the iteration begins
        self._loaded: dict[str, Any] | None = None  # the state that says so
        self._upto: int | None = None  # steps before it were handed out whole in this iteration; None: not one
        self._delivered = False
        self._changed = threading.Condition()
        self._error: StreampackError | None = None
        self._ended = False
        self._attached: Attached | None = None
        self._answers: deque[State | Committed] = deque()
        self._closing = False
        self._waits: deque[float] = deque(maxlen=_WAITS_KEPT)
        self._counts = {"steps": 0, "packs": 0, "tokens": 0, "wait_s": 0.0, "starved_s": 0.0}
        self._started = self._steady = time.monotonic()
        self._slabs = Slabs()
        self._in_use: int | None = None
        self._packs: deque[Any] = deque()  # what is left of step ``_packs_of``, where packs are asked for
        self._packs_of = 0
        dealer = Dealer(endpoint, MAX_MESSAGE_BYTES, linger_ms=500)
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, args=(dealer,), name="streampack-client", daemon=True)
        self._thread.start()
        try:
            self._wait_for(lambda: self._attached is not None)
        except BaseException:  # Ctrl-C too: an orphan would hold the rank
            self.close()
            raise

    # What a trainer uses

    def begin(self) -> None:
        """Begin to iterate; or the next iteration of a finite feed, if the trainer has had anything of this one."""
        self._check_usable()
        if self._last_round != self.round:
            self._last_round = self.round
            self._tell(self._place)
        elif self.rules.finite and (self._delivered or self._ended):
            self._turn_to(Begin(round=self.round + 1))
            self._last_round = self.round
            self._tell(Again())

    def next_step(self) -> Step | None:
        """The next step, or None after the last; the one before it has been returned, whoever asks."""
        step = self._take_step()
        if step is not None:
            self._upto = step.index + 1
        return step

    def next_pack(self) -> Any:
        """The rank's next pack. Raises StopIteration at the end, on the same step on every rank."""
        self._check_usable()
        if not self._packs:
            step = self._take_step()
            if step is None:
                raise StopIteration
            self._packs.extend(step)
            self._packs_of = step.index
        pack = self._packs.popleft()
        if not self._packs:
            self._upto = max(self._upto or 0, self._packs_of + 1)
        return pack

    def _take_step(self) -> Step | None:
        self._check_usable()
        if self._last_round != self.round:
            self.begin()
        if self._in_use is not None:
            self._tell(Returned(self._in_use + 1))
            self._in_use = None
        began = time.perf_counter()
        self._wait_for(lambda: bool(self._ready) or self._ended)
        self._note_wait(time.perf_counter() - began)
        if not self._ready:
            return None
        step = self._views.arrive(self._ready.popleft())
        self._delivered = True
        self._in_use = step.index
        self._counts["steps"] += 1
        self._counts["packs"] += len(step)
        self._counts["tokens"] += sum(real_tokens(pack) for pack in step)
        return step

    # Checkpoints

    def state(self, step: int | None) -> dict[str, Any]:
        """The state after ``step``, by default the last that was handed out whole. Changes nothing."""
        self._check_usable()
        begins = self._place.next_step
        upto = begins if self._upto is None else self._upto
        next_step = upto if step is None else _step(step, begins - 1, upto) + 1
        origin = self._origin
        if next_step > begins:
            found = self._ask(AskState(feed=origin.feed, step=next_step))
            assert isinstance(found, State)
            return checkpoint.save(origin, self.round, found, self._session.epoch)
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        assert self._attached is not None
        start = State(feed=origin.feed, lineage=self._attached.lineage, step=0, chain=b"", snapshot=None)
        return checkpoint.save(origin, self.round, start, self._session.epoch)

    def load(self, state: Any) -> None:
        """The next iteration begins where ``state`` says; the one that is on has ended. Raises StateError."""
        self._check_usable()
        place = checkpoint.load(state, self._origin)
        self._turn_to(msgspec.structs.replace(place, round=max(place.round, self._last_round + 1)))
        self._loaded = copy.deepcopy(state)

    def commit(self, step: int) -> None:
        """Returns when the broker has in its log that a checkpoint made after ``step`` is durable."""
        self._check_usable()
        upto = self._place.next_step if self._upto is None else self._upto
        self._ask(Commit(feed=self._origin.feed, step=_step(step, 0, upto)))

    def _turn_to(self, place: Begin) -> None:
        """Have nothing any more, and be about to begin at ``place``."""
        with self._changed:
            self.round, self._place, self._loaded, self._upto = place.round, place, None, None
            self._delivered = self._ended = False
            self._ready.clear()
        self._in_use = None
        self._packs.clear()

    @property
    def _origin(self) -> checkpoint.Origin:
        return checkpoint.Origin(self._session.run, self._session.feed, self.rules)

    def _ask(self, question: AskState | Commit) -> State | Committed:
        self._answers.clear()
        self._tell(Ask(question))
        self._wait_for(lambda: bool(self._answers))
        return self._answers.popleft()

    def stats(self) -> dict[str, float]:
        """Counts and times so far: ``steps``, ``packs``, ``tokens`` (real ones of this rank's packs), ``wait_s``,
        ``next_p50_ms``, ``next_p99_ms``, ``next_p999_ms`` of a step's wait, ``starved_fraction``: the share of
        the time since the third step was asked for that was spent waiting, and ``skipped_steps``."""
        waits = np.array(self._waits) * 1000 if self._waits else np.zeros(1)
        p50, p99, p999 = np.percentile(waits, [50, 99, 99.9]).tolist()
        steady = max(time.monotonic() - self._steady, 1e-9)
        figures = {"next_p50_ms": p50, "next_p99_ms": p99, "next_p999_ms": p999}
        counts = {key: value for key, value in self._counts.items() if key != "starved_s"}
        starved = min(1.0, self._counts["starved_s"] / steady)
        return {**counts, **figures, "starved_fraction": starved, "skipped_steps": self._session.num_skipped}

    def close(self) -> None:
        """Give the rank up and end the thread; idempotent."""
        if os.getpid() != self._pid:
            return
        with self._changed:  # another thread may wait for a step
            self._closing = True
            self._changed.notify_all()
        self._waker.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=10)

    @property
    def rules(self) -> Rules:
        assert self._attached is not None  # __init__ has waited for it
        return self._attached.rules

    # Waiting

    def _check_usable(self) -> None:
        """Nothing is handed out in a forked child, or once closed, not even what is ready."""
        if os.getpid() != self._pid:
            raise PeerError(f"got a client of the parent process after the fork; a process of its own {TWICE}")
        if self._closing:
            raise UserError("the client is closed: connect again")

    def _wait_for(self, condition: Any) -> None:
        """Until ``condition()``; raises the session's error; says every 5 s what it waits for."""
        if condition():
            return
        self._tell(Waiting(True))
        try:
            with self._changed:
                while not condition():
                    if self._error is not None:
                        raise self._error
                    self._check_usable()
                    if not self._changed.wait(timeout=SAY_S) and not condition():
                        log.warning("%s: waiting for %s", self._mesh, self._session.waiting_for())
        finally:
            self._tell(Waiting(False))

    def _tell(self, event: Event) -> None:
        self._told.append(event)
        self._waker.wake()

    def _note_wait(self, seconds: float) -> None:
        self._counts["wait_s"] += seconds
        if self._counts["steps"] <= 2:
            self._steady = time.monotonic()
            return
        self._waits.append(seconds)
        self._counts["starved_s"] += seconds

    # The thread

    def _run(self, dealer: Dealer) -> None:
        poller = Poller([dealer], self._waker)
        ticked = counted = 0.0
        try:
            while not self._closing:
                poller.wait(TICK_S)
                for frames in drain(dealer, 64):
                    self._perform(dealer, self._receive(frames))
                self._pass_on(dealer)
                now = time.monotonic()
                if now - counted >= STATS_S:
                    counted = now
                    self._session.stats = self.stats()
                if now - ticked >= TICK_S:
                    ticked = now
                    self._perform(dealer, self._session.handle(Tick(now)))
                    self._check_reached(now)
            self._pass_on(dealer)
            self._perform(dealer, self._session.handle(Detach()))
        except StreampackError as error:
            self.fail(error)
        except Exception as error:  # a bug of ours must not leave the trainer waiting for a thread that is gone
            log.exception("the client's thread failed")
            self.fail(InternalError(f"the client's thread failed: {error!r}"))
        finally:
            dealer.close()
            self._waker.close()

    def _pass_on(self, dealer: Dealer) -> None:
        while self._told:
            self._perform(dealer, self._session.handle(self._told.popleft()))

    def _receive(self, frames: list[Any]) -> list[Effect]:
        try:
            return self._session.handle(FromBroker(wire.decode(frames)))
        except WireError as error:
            log.warning("dropped a message of the broker: %s", error)
            return []

    def _perform(self, dealer: Dealer, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                dealer.send(wire.encode(effect.envelope))
            elif isinstance(effect, Deliver):
                step = build_step(effect.parts, effect.attached, self._mesh, self._slabs)
                step = self._views.make(step, effect.attached.rules)
                with self._changed:
                    if self._session.round == self.round:  # the trainer may have begun another by now
                        self._ready.append(step)
                    self._changed.notify_all()
            elif isinstance(effect, Ended):
                with self._changed:
                    self._ended = self._session.round == self.round
                    self._changed.notify_all()
            elif isinstance(effect, Answered):
                with self._changed:
                    self._answers.append(effect.message)
                    self._changed.notify_all()
            elif isinstance(effect, Broken):
                self.fail(_error(effect, self._endpoint))
        if self._session.attached is not None and self._attached is None:
            with self._changed:
                self._attached = self._session.attached
                self._changed.notify_all()

    def _check_reached(self, now: float) -> None:
        if not self._session.reached and now - self._started > self._timeout_s:
            raise Unreachable(
                f"{self._endpoint}: got no answer in {self._timeout_s:g} s, expected a broker: "
                f"is 'streampack broker' running, and listening for trainers there?"
            )

    def fail(self, error: StreampackError) -> None:
        """Raise ``error`` where the next step is asked for, once what is ready is taken. Any thread may."""
        with self._changed:
            self._error = error
            self._changed.notify_all()


def _error(broken: Broken, endpoint: str) -> StreampackError:
    if broken.code in ("mesh", "rank_taken"):
        return MeshError(broken.detail)
    if broken.code == "stopped":
        return PeerError(broken.detail)
    if broken.code == "stall":
        return DataStall(f"{endpoint}: {broken.detail}")
    return Rejected(broken.code, broken.detail)


def _step(given: Any, least: int, upto: int) -> int:
    """A step that was handed out. Raises UserError for another, or for what is none."""
    with contextlib.suppress(TypeError):
        if least <= operator.index(given) < upto:
            return operator.index(given)
    had = f"{least} to {upto - 1}" if least < upto else "none was yet"
    raise UserError(f"got step={given!r}, expected one that was handed out: {had}")
