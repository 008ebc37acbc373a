"""A client's side of the protocol, as a pure state machine: ``handle(event) -> effects``.

It attaches, asks for ``prefetch`` steps beyond the one in use, puts the parts of each together,
and delivers whole steps in order. Everything it says is a state ("steps 7 to 9, I have returned
7") and is repeated until it holds, later each time, so nothing depends on a message arriving. It pings from the
moment it is answered, whatever it wants: a rank that has everything must still notice a new broker,
and one that waits for the others must not be taken for dead.

The session asks for a part again only when the part is proven lost, never because time has passed: connections keep
the order of messages, so a part before its turn proves it, and so does a Wait or End that says what was sent before.
A new connection is a new Attach, which begins again at the first part that is missing. The session confirms parts as
they arrive, because the broker sends only so many bytes ahead.

It may take its rank first, and ``Begin`` later, at the step that a checkpoint names: until then it is not ready,
holds nobody up and is sent no steps. ``Begin`` and ``Again`` also begin the next *round*, over a finite feed or where
an iteration is broken off: it attaches anew and waits until every rank of the mesh has asked for that round. What
comes of an earlier one is not taken.

A question (``Ask``) is repeated until it is answered, whatever becomes of the attachment meanwhile.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from enum import Enum

from msgspec import Struct

from streampack.core.model.mesh import Mesh, ReadBy
from streampack.core.model.phases import Phases
from streampack.core.model.snapshot import Snapshot
from streampack.core.protocol.events import Effect, Event, FromBroker, Send, Tick, Unsent
from streampack.core.protocol.message import Bye, Envelope, Message, Reject, Who
from streampack.core.protocol.trainer_messages import (
    AskSnapshot,
    AskState,
    Attach,
    Attached,
    Brought,
    Commit,
    Committed,
    End,
    Fenced,
    Get,
    Probe,
    ReaderPing,
    State,
    StepPart,
    Wait,
)
from streampack.core.sessions.backoff import Backoff, spread
from streampack.core.sessions.client_events import (
    Again,
    Answered,
    Ask,
    Begin,
    Broken,
    Damaged,
    Deliver,
    Detach,
    Ended,
    Returned,
    Waiting,
)
from streampack.core.sessions.patience import Patience
from streampack.core.stats.data_wait import Starvation, cause_of

PING_S = 1.0
"""Between pings, until the broker says another interval."""
RETRY_S = 2.0
"""A message without an answer is repeated after so long, then later each time."""
MOST_RETRY_S = 8.0
MOST_AHEAD = 64
"""Steps that a broker has ready at most, beyond those returned (``steps_ahead``): others are not kept."""
GONE_S = 5.0
"""A broker that does not answer for so long is reported as silent; intervals between pings at least."""
SAID_S = 2.5
"""Intervals between pings for which a Wait holds: the broker repeats it in each."""


class ClientPhase(Enum):
    """Phases of a rank's session with its broker. ``attached``: the broker has answered its last ``Attach``."""

    CLAIMING = ("asks for its rank, before the trainer says where it begins", False)
    HOLDING = ("has its rank, before the trainer says where it begins", True)
    ATTACHING = ("asks to take part from its next step on", False)
    READING = ("takes part, or waits for the other ranks", True)
    ENDED = ("has had every step of the round", True)
    ENDED_ATTACHING = ("has had every step, and asks a new broker for its rank", False)
    OVER = ("is closed, or cannot go on", False)

    def __init__(self, text: str, attached: bool) -> None:
        self.text, self.attached = text, attached


_BEGUN = frozenset({ClientPhase.ATTACHING, ClientPhase.OVER})
CLIENT_PHASES = {
    ClientPhase.CLAIMING: _BEGUN | {ClientPhase.CLAIMING, ClientPhase.HOLDING},
    ClientPhase.HOLDING: _BEGUN | {ClientPhase.CLAIMING},
    ClientPhase.ATTACHING: _BEGUN | {ClientPhase.READING},
    ClientPhase.READING: _BEGUN | {ClientPhase.ENDED},
    ClientPhase.ENDED: _BEGUN | {ClientPhase.ENDED_ATTACHING},
    ClientPhase.ENDED_ATTACHING: _BEGUN | {ClientPhase.ENDED, ClientPhase.ENDED_ATTACHING},
    ClientPhase.OVER: frozenset({ClientPhase.OVER}),
}
"""The phases that may follow each."""

_ANSWERED = {
    ClientPhase.CLAIMING: ClientPhase.HOLDING,
    ClientPhase.ATTACHING: ClientPhase.READING,
    ClientPhase.ENDED_ATTACHING: ClientPhase.ENDED,
}
"""The phase that follows an ``Attached``."""
_LOST = {
    ClientPhase.CLAIMING: ClientPhase.CLAIMING,
    ClientPhase.HOLDING: ClientPhase.CLAIMING,
    ClientPhase.ATTACHING: ClientPhase.ATTACHING,
    ClientPhase.READING: ClientPhase.ATTACHING,
    ClientPhase.ENDED: ClientPhase.ENDED_ATTACHING,
    ClientPhase.ENDED_ATTACHING: ClientPhase.ENDED_ATTACHING,
}
"""The phase that follows where the broker does not know this client any more."""


class _Assembly(Struct):
    parts: dict[int, Envelope]
    upto: int = 0
    """Every part before is there."""

    def add(self, part: int, envelope: Envelope) -> None:
        self.parts[part] = envelope
        while self.upto in self.parts:
            self.upto += 1


@dataclass(slots=True)
class ClientSession:
    """State of one reader; ``next_step`` is where it begins, unless it is not ``ready`` before it is told to."""

    run: int
    feed: str
    reader: str
    host: str
    pid: int
    mesh: Mesh
    readers: ReadBy = field(default_factory=ReadBy)
    variable_lengths: bool = False
    prefetch: int = 2
    next_step: int = 0
    chain: bytes = b""
    round: int = 0
    ready: InitVar[bool] = True
    lineage: int = 0
    snapshot: Snapshot | None = None
    patience: Patience = field(default_factory=Patience)
    epoch: int = 0
    attempt: int = 0
    attached: Attached | None = None
    stats: dict[str, float] = field(default_factory=dict)
    starvation: Starvation | None = None
    wait: Wait | None = None
    """Cause of the wait for the next step, as the broker reports it."""
    reached: bool = False
    """The broker has answered at least once."""
    num_skipped: int = 0
    """Steps that were passed over, as the run's record says."""
    _now: float = 0.0
    _ping_at: float = 0.0
    _num_pings: int = 0
    _ping_s: float = PING_S
    _attached_at: float = -RETRY_S
    _digest: bytes = b""
    _attach_again: Backoff = field(init=False)
    _get_again: Backoff = field(init=False)
    _ask_again: Backoff = field(init=False)
    _have_upto: int = 0
    _done_upto: int = 0
    _going_on: int = -1
    _resend: int = 0
    _next: tuple[int, int] = (0, 0)
    """(step, part) that comes next of those that are sent for this ``_resend``."""
    _unconfirmed_bytes: int = 0
    _assembling: dict[int, _Assembly] = field(default_factory=dict)
    _chains: dict[int, bytes] = field(default_factory=dict)
    _skipped: set[int] = field(default_factory=set)
    _asked: AskState | Commit | None = None
    _num_steps: int | None = None
    phases: Phases[ClientPhase] = field(init=False)

    def __post_init__(self, ready: bool) -> None:
        first = ClientPhase.ATTACHING if ready else ClientPhase.CLAIMING
        self.phases = Phases(f"client {self.reader} of rank {self.mesh}", CLIENT_PHASES, first)
        self._digest = b"" if self.snapshot is None else self.snapshot.digest
        self._attach_again = Backoff(f"{self.reader} attach", RETRY_S, MOST_RETRY_S)
        self._get_again = Backoff(f"{self.reader} get", RETRY_S, MOST_RETRY_S)
        self._ask_again = Backoff(f"{self.reader} ask", RETRY_S, MOST_RETRY_S)
        self._have_upto = self._done_upto = self.next_step
        self._chains[self.next_step] = self.chain

    def handle(self, event: Event) -> list[Effect]:
        """Return what to do about an event."""
        if self.phase is ClientPhase.OVER and not isinstance(event, Detach):
            return []
        if isinstance(event, Tick):
            return self._tick(event.now)
        if isinstance(event, FromBroker):
            return self._receive(event.envelope)
        if isinstance(event, Returned):
            self._returned(event.step)
            return self._get()
        if isinstance(event, Begin):
            return self._begin(event)
        if isinstance(event, Again):
            return self._begin(Begin(round=self.round + 1))
        if isinstance(event, Waiting):
            self.patience.wants(event.on)
            self._asked = self._asked if event.on else None
            return []
        if isinstance(event, Unsent):
            self._unsent(event.envelope.message)
            return []
        if isinstance(event, Damaged):
            return self._ping() if self.reached else []  # the answer shows what is missing
        if isinstance(event, Ask):
            self._asked = event.message
            self._ask_again.reset()
            self.patience.asks()
            return self._ask()
        if isinstance(event, Detach):
            self.phases.go(ClientPhase.OVER)
            return [self._send(Bye(reason="goodbye"))]
        return []

    @property
    def phase(self) -> ClientPhase:
        """Phase of the session."""
        return self.phases.now

    @property
    def _begun(self) -> bool:
        """Whether the trainer has set its first step."""
        return self.phase not in (ClientPhase.CLAIMING, ClientPhase.HOLDING)

    def waiting_for(self) -> str:
        """Return a text that names what the next step waits for."""
        if not self.reached:
            return "an answer of the broker"
        if self.patience.silent_s > GONE_S * self._ping_s:
            return f"the broker, silent for {self.patience.silent_s:.0f} s"
        if self.wait is None:
            return f"step {self._have_upto}"
        return self.wait.detail if self.wait.batch else f"{self.wait.reason}: {self.wait.detail}"

    def waits_for_batch(self) -> bool:
        """Return whether the next step waits only for a pushing program to end its batch."""
        heard = self.reached and self.patience.silent_s <= GONE_S * self._ping_s
        return heard and self.wait is not None and self.wait.batch

    @property
    def cause(self) -> tuple[str, str | None]:
        """Cause of the wait, one of ``starvation.CAUSES``, and the missing stream or None.

        The cause is the broker's last report; it is ``network`` if part of the step has come since, or the broker is
        silent.
        """
        if self.wait is None or self.patience.silent_s > SAID_S * self._ping_s:
            return "network", None
        return cause_of(self.wait.reason), self.wait.stream if self.wait.reason == "stream" else None

    # Events

    def _tick(self, now: float) -> list[Effect]:
        self._now = now
        self.patience.tick(now)
        if self.reached and (why := self.patience.over()):
            return self._break("stall", why)
        effects: list[Effect] = []
        if not self.phase.attached and self._attach_again.due(now):
            effects.append(self._attach())
        if self._asked is not None and self._ask_again.due(now):
            effects += self._ask()
        return effects + self._keep_up(now)

    def _keep_up(self, now: float) -> list[Effect]:
        """Say that it is alive, and what it still wants."""
        effects: list[Effect] = []
        if self.reached and now >= self._ping_at:
            effects += self._ping()
        if self.phase.attached and self._wants() and self._get_again.due(now):
            effects += self._get(repeated=True)
        return effects

    def _ping(self) -> list[Effect]:
        self._num_pings += 1
        early = 0.2 * spread(self.reader, self._num_pings) if self._ping_s > PING_S else 0.0  # not all at once
        self._ping_at = self._now + self._ping_s * (1.0 - early)
        step, part = self._have
        ping = ReaderPing(
            feed=self.feed, reader=self.reader, done_upto=self._done_upto, have_upto=step, part=part,
            stats=self.stats, starvation=self.starvation,
        )  # fmt: skip
        return [self._send(ping)]

    def _unsent(self, message: Message) -> None:
        """Retry soon a message that never left this process."""
        kinds = ((Attach, self._attach_again), (Get, self._get_again), (AskState | Commit, self._ask_again))
        for kind, again in kinds:
            if isinstance(message, kind):
                again.unsent(self._now)

    def _receive(self, envelope: Envelope) -> list[Effect]:
        self.run = self.run or envelope.run
        if envelope.run != self.run or envelope.epoch < self.epoch:
            return []
        self.reached = True
        self.patience.heard()
        if envelope.epoch > self.epoch:
            restarted, self.epoch = self.epoch > 0, envelope.epoch
            self.attempt = 0
            if restarted:
                return self._reattach()
        message = envelope.message
        if isinstance(message, Attached):
            return self._on_attached(envelope.fence, message)
        if isinstance(message, Reject):
            return self._break(message.code, message.detail)
        if isinstance(message, Who):
            return self._reattach() if self._now - self._attached_at >= RETRY_S / 4 else []
        if isinstance(message, Bye):
            return self._break("stopped", message.reason)
        if isinstance(message, Fenced):
            return self._break("fenced", message.detail)
        if isinstance(message, Probe):
            return self._ping()
        if isinstance(message, AskSnapshot):
            return self._bring(message)
        if isinstance(message, State | Committed):
            return self._answer(message)
        if envelope.fence != self.attempt and self.phase.attached:
            return []
        if isinstance(message, Wait):
            self.wait = message
            self.patience.told(message.reason == "join", message.detail)
            if message.reason == "join":
                self._ping_s = message.ping_s
                return []
            return self._lost(message.resend, message.step, message.part)
        if not self.phase.attached or not self._begun:
            return []
        if isinstance(message, StepPart):
            return self._part(envelope, message)
        return self._end(message) if isinstance(message, End) else []

    def _on_attached(self, attempt: int, message: Attached) -> list[Effect]:
        if message.reader != self.reader or message.round != self.round:
            return []
        if self._begun and not attempt:  # late: the answer to a claim that was not ready
            return []
        if self.phase.attached and attempt <= self.attempt:
            return []
        if self.phase.attached:
            self.phases.go(_LOST[self.phase])
        self.attempt, self.attached = attempt, message
        self.phases.go(_ANSWERED[self.phase])
        self._going_on = message.lineage if self._begun else -1
        self._ping_s = message.ping_s
        self._ping_at = min(self._ping_at, self._now + self._ping_s)
        return self._from_missing()

    def _from_missing(self) -> list[Effect]:
        """Request all parts again from the first missing one."""
        self._resend += 1
        self._next = self._have
        return self._get()

    def _lost(self, resend: int, step: int, part: int = 0) -> list[Effect]:
        """Request lost parts again. The broker had sent all before ``part`` of ``step`` for the Get of ``resend``."""
        if not self.phase.attached or not self._begun or resend != self._resend:
            return []
        self._get_again.answered(self._now)
        return self._from_missing() if (step, part) > max(self._next, self._have) else []

    @property
    def _have(self) -> tuple[int, int]:
        """(step, part) of the first part that is missing."""
        assembly = self._assembling.get(self._have_upto)
        return self._have_upto, assembly.upto if assembly is not None else 0

    def _part(self, envelope: Envelope, message: StepPart) -> list[Effect]:
        if message.step >= self._done_upto + MOST_AHEAD or message.part >= max(message.parts, 1):
            return []  # what no broker sends
        in_turn = self._in_turn(message)
        if message.step < self._have_upto:
            return []
        self.wait = None
        self.patience.told(joining=False)
        self._get_again.answered(self._now)
        self._unconfirmed_bytes += sum(len(frame) for frame in envelope.payload)
        assembly = self._assembling.setdefault(message.step, _Assembly({}))
        assembly.add(message.part, envelope)
        effects: list[Effect] = []
        done_upto = self._done_upto
        while (ready := self._assembling.get(self._have_upto)) is not None:
            first = next(iter(ready.parts.values())).message
            if not isinstance(first, StepPart) or len(ready.parts) < first.parts:
                break
            del self._assembling[self._have_upto]
            self._have_upto += 1
            self.chain = self._chains[self._have_upto] = first.chain
            assert self.attached is not None
            if first.micro_batches:
                parts = tuple(ready.parts[n] for n in sorted(ready.parts))
                effects.append(Deliver(parts, self.attached))
            else:
                self._skipped.add(first.step)
                self.num_skipped += 1
        self._returned(done_upto)
        assert self.attached is not None
        if not in_turn:
            effects += self._from_missing()
        elif self._done_upto > done_upto or self._unconfirmed_bytes >= self.attached.ack_bytes:
            effects += self._get()
        return effects + self._finished()

    def _in_turn(self, message: StepPart) -> bool:
        """Return whether all parts that were sent before this one have arrived."""
        place = message.step, message.part
        if message.resend != self._resend or place < self._next:
            return True
        found, last = place <= max(self._next, self._have), message.part + 1 >= message.parts
        self._next = (message.step + 1, 0) if last else (message.step, message.part + 1)
        return found

    def _returned(self, upto: int) -> None:
        """Count steps before ``upto`` as returned, and the skipped steps that follow."""
        before, self._done_upto = self._done_upto, max(self._done_upto, upto)
        while self._done_upto in self._skipped:
            self._skipped.remove(self._done_upto)
            self._done_upto += 1
        for step in range(before, self._done_upto):
            self._chains.pop(step, None)

    def _answer(self, message: State | Committed) -> list[Effect]:
        asked = self._asked
        if asked is None or asked.step != message.step or isinstance(asked, Commit) != isinstance(message, Committed):
            return []
        if isinstance(message, State) and self._chains.get(message.step, b"") not in (b"", message.chain):
            return self._break("diverged", f"the broker has other steps before {message.step} than were read here")
        self._asked = None
        return [Answered(message)]

    def _end(self, message: End) -> list[Effect]:
        self._num_steps = message.num_steps
        return self._finished() + self._lost(message.resend, message.num_steps)

    def _finished(self) -> list[Effect]:
        if self._num_steps is None or self._have_upto < self._num_steps:
            return []
        if self.phase is ClientPhase.ENDED:
            return []
        self.phases.go(ClientPhase.ENDED)
        return [Ended(self._num_steps, self.chain)]

    def _begin(self, place: Begin) -> list[Effect]:
        self.round = place.round
        self.phases.go(ClientPhase.ATTACHING)
        self.lineage, self.snapshot = place.lineage, place.snapshot
        self._digest = b"" if self.snapshot is None else self.snapshot.digest
        self.chain, self._chains = place.chain, {place.next_step: place.chain}
        self._have_upto = self._done_upto = place.next_step
        self._going_on = -1
        self._skipped.clear()
        self._num_steps = None
        return self._reattach()

    # What goes out

    def _wants(self) -> bool:
        return self.phase is ClientPhase.READING and self._have_upto < self._done_upto + self.prefetch + 1

    def _attach(self) -> Effect:
        self._attached_at = self._now
        self._attach_again.said(self._now)
        attach = Attach(
            feed=self.feed, reader=self.reader, host=self.host, pid=self.pid, mesh=self.mesh,
            next_step=self._done_upto, chain=self._chains[self._done_upto], round=self.round, readers=self.readers,
            ready=self._begun, lineage=self.lineage, snapshot_digest=self._digest, going_on=self._going_on,
            variable_lengths=self.variable_lengths, starvation=self.starvation,
        )  # fmt: skip
        return self._send(attach)

    def _bring(self, asked: AskSnapshot) -> list[Effect]:
        """Send the snapshot that this reader begins with, if the broker asks for that one."""
        if self.snapshot is None or asked.digest != self._digest:
            return []
        return [self._send(Brought(feed=self.feed, digest=self._digest, snapshot=self.snapshot))]

    def _reattach(self) -> list[Effect]:
        self.attached = self.wait = None
        self.phases.go(_LOST[self.phase])
        self._assembling.clear()
        self._attach_again.reset()
        return [self._attach()]

    def _get(self, repeated: bool = False) -> list[Effect]:
        if self.attached is None or not self._begun:
            return []
        self._unconfirmed_bytes = 0
        (self._get_again.said if repeated else self._get_again.answered)(self._now)
        step, part = self._have
        get = Get(
            feed=self.feed, lineage=self.attached.lineage, start=step, part=part,
            stop=self._done_upto + self.prefetch + 1, done_upto=self._done_upto, resend=self._resend,
        )  # fmt: skip
        return [self._send(get)]

    def _ask(self) -> list[Effect]:
        assert self._asked is not None
        self._ask_again.said(self._now)
        return [self._send(self._asked)]

    def _break(self, code: str, detail: str) -> list[Effect]:
        self.phases.go(ClientPhase.OVER)
        return [Broken(code, detail)]

    def _send(self, message: Message) -> Send:
        return Send(Envelope(run=self.run, epoch=self.epoch, fence=self.attempt, message=message))
