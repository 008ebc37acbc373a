"""A client's side of the protocol, as a pure state machine: ``handle(event) -> effects``.

The session attaches to the broker and requests the step in use and ``prefetch`` steps after it. It puts the parts of
each step together, and delivers whole steps in order. Every message states what holds ("send steps 7 to 9, I am done
with 6"). It is repeated until it is answered, later each time, so that a lost message does no harm. After the first
answer the session pings all the time. So a rank that has every step notices a new broker, and the broker knows that a
rank which waits for the others is alive.

Time alone never makes the session request a part again; it needs proof that the part was lost. Connections keep the
order of messages. So a part that comes before its turn is such a proof. A ``Wait`` or ``End`` is one if it says that
the broker has sent more than has arrived. After a new connection, the session attaches anew and begins at the first
missing part. It confirms parts as they arrive, because the broker limits the bytes that are sent and not confirmed.

A session may take its rank first, and get its first step later (``Begin``), from a checkpoint. Until then it gets
no steps, and the other ranks do not wait for it. Both ``Begin`` and ``Again`` also begin the next iteration over the
feed. The session attaches anew, and waits until every rank of the mesh has asked for that iteration.
It ignores messages of earlier iterations.

A question (``Ask``) is repeated until it is answered, also while the session attaches anew.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field

from msgspec import UNSET, UnsetType

from streampack.core.model.mesh import Mesh, ReadBy
from streampack.core.model.phases import Phases
from streampack.core.model.snapshot import Snapshot
from streampack.core.protocol.events import Effect, Event, FromBroker, Send, Tick, Unsent
from streampack.core.protocol.handlers import Handlers
from streampack.core.protocol.message import Bye, Envelope, Message, Reject, Who
from streampack.core.protocol.step_part import StepPart
from streampack.core.protocol.trainer_messages import (
    TO_READERS,
    AskSnapshot,
    Attach,
    Attached,
    Brought,
    End,
    EndForMesh,
    Fenced,
    Get,
    Probe,
    Question,
    ReaderAnswer,
    ReaderPing,
    State,
    Wait,
)
from streampack.core.sessions.backoff import Backoff, PingTimes
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
    Rerouted,
    Returned,
    Waiting,
)
from streampack.core.sessions.client_phases import ANSWERED, CLIENT_PHASES, UNKNOWN, ClientPhase
from streampack.core.sessions.patience import Patience
from streampack.core.sessions.step_arrivals import StepArrivals
from streampack.core.stats.data_wait import Starvation, cause_of

RETRY_S = 2.0
"""Seconds after which a message without an answer is repeated; each further delay is longer."""
MOST_RETRY_S = 8.0
"""Longest of these delays, in seconds."""
MOST_AHEAD = 64
"""Most steps beyond the returned ones that a broker sends (``steps_ahead``); parts of later steps are ignored."""
GONE_PINGS = 5.0
"""Intervals between pings without a message, after which the broker is reported as silent."""
WAIT_PINGS = 2.5
"""Intervals between pings for which a ``Wait`` holds; the broker repeats it in each interval."""


@dataclass(slots=True)
class ClientSession:
    """State of the reader of one rank.

    Attributes:
        next_step, chain: The first step to read, and the digest of all steps before it.
        iteration: Number of the iteration over the feed.
        ready: False if the first step is not known yet, and comes with ``Begin``.
        lineage, snapshot: Lineage and snapshot of the checkpoint at which the session begins.
        attached: The broker's answer, with the rules to read steps; None before the answer.
        knows_stages: True if the shell builds each step by the step's own rules; UNSET in versions before 0.2.
        wait: Cause of the wait for the next step, as the broker reports it.
        reached: True if the broker has answered at least once.
        route_changes: Times that the client has changed between its relay and the broker, or moved to another address.
    """

    run: int
    feed: str
    reader: str
    host: str
    pid: int
    mesh: Mesh
    readers: ReadBy = field(default_factory=ReadBy)
    variable_lengths: bool = False
    knows_stages: bool | UnsetType = True
    prefetch: int = 2
    next_step: InitVar[int] = 0
    chain: InitVar[bytes] = b""
    iteration: int = 0
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
    reached: bool = False
    route_changes: int = 0
    _last_attempt: tuple[int, int] = (0, 0)
    _now: float = 0.0
    _pings: PingTimes = field(init=False)
    _attached_at: float = -RETRY_S
    _digest: bytes = b""
    _attach_again: Backoff = field(init=False)
    _get_again: Backoff = field(init=False)
    _ask_again: Backoff = field(init=False)
    _going_on: int = -1
    """Lineage of the last ``Attached`` message since this reader began to read; -1 before that message."""
    _dealt_by: str | UnsetType = UNSET
    """Layout of the last ``Attached`` message."""
    _question: Question | None = None
    _end: End | None = None
    phases: Phases[ClientPhase] = field(init=False)
    arrivals: StepArrivals = field(init=False)

    def __post_init__(self, next_step: int, chain: bytes, ready: bool) -> None:
        first = ClientPhase.ATTACHING if ready else ClientPhase.CLAIMING
        self.phases = Phases(f"client {self.reader} of rank {self.mesh}", CLIENT_PHASES, first)
        self._digest = b"" if self.snapshot is None else self.snapshot.digest
        self._pings = PingTimes(self.reader)
        self._attach_again = Backoff(f"{self.reader} attach", RETRY_S, MOST_RETRY_S)
        self._get_again = Backoff(f"{self.reader} get", RETRY_S, MOST_RETRY_S)
        self._ask_again = Backoff(f"{self.reader} ask", RETRY_S, MOST_RETRY_S)
        self.arrivals = StepArrivals(next_step, chain)

    def handle(self, event: Event) -> list[Effect]:
        """Return the effects of an event, for the shell to perform."""
        if self.phase is ClientPhase.OVER and not isinstance(event, Detach):
            return []
        return self._events[type(event)](self, event)

    _events = Handlers[[], list[Effect]]()

    @_events.of(Returned)
    def _on_returned(self, event: Returned) -> list[Effect]:
        """Request further steps."""
        self.arrivals.note_returned(event.step)
        return self._request_steps()

    @_events.of(Again)
    def _on_again(self, event: Again) -> list[Effect]:
        """Begin the next iteration at the first step."""
        return self._begin_iteration(Begin(iteration=self.iteration + 1))

    @_events.of(Waiting)
    def _on_waiting(self, event: Waiting) -> list[Effect]:
        """Count how long the trainer waits; it asks its question only while it waits."""
        self.patience.trainer_waits(event.on)
        self._question = self._question if event.on else None
        return []

    @_events.of(Rerouted)
    def _on_rerouted(self, event: Rerouted) -> list[Effect]:
        """Attach again over another way."""
        self.route_changes += 1
        self._ask_again.reset()
        return self._reattach()

    @_events.of(Damaged)
    def _on_damaged(self, event: Damaged) -> list[Effect]:
        """Ping, since the answer shows which message is missing."""
        return self._ping() if self.reached else []

    @_events.of(Ask)
    def _on_ask(self, event: Ask) -> list[Effect]:
        """Send the trainer's question."""
        self._question = event.message
        self._ask_again.reset()
        self.patience.question_asked()
        return self._send_question()

    @_events.of(Detach)
    def _on_detach(self, event: Detach) -> list[Effect]:
        """Say goodbye."""
        self.phases.go(ClientPhase.OVER)
        return [self._send(Bye(reason="goodbye"))]

    @property
    def phase(self) -> ClientPhase:
        """The session's phase now."""
        return self.phases.now

    @property
    def num_skipped(self) -> int:
        """Steps that the run's record marks as skipped, and that were not delivered."""
        return self.arrivals.num_skipped

    @property
    def last_attempt(self) -> tuple[int, int]:
        """Epoch and number of the attempt in which this reader takes part, or took part last.

        After a restart of the broker, the trainer may be done with a step before the next attempt begins. The step
        belongs to the attempt that served it. The number is 0 before this reader's first attempt.
        """
        return self._last_attempt if self._last_attempt[1] else (self.epoch, 0)

    @property
    def _begun(self) -> bool:
        """True if the trainer has set its first step."""
        return self.phase not in (ClientPhase.CLAIMING, ClientPhase.HOLDING)

    def waiting_for(self) -> str:
        """Return a text that names the cause of the wait for the next step."""
        if not self.reached:
            return "an answer of the broker"
        if self.patience.silent_s > GONE_PINGS * self._pings.every_s:
            return f"the broker, silent for {self.patience.silent_s:.0f} s"
        if self.wait is None:
            return f"step {self.arrivals.have_upto}"
        return self.wait.detail if self.wait.batch else f"{self.wait.reason}: {self.wait.detail}"

    def waits_for_batch(self) -> bool:
        """Return whether the next step waits only for a pushing program to end its batch."""
        heard = self.reached and self.patience.silent_s <= GONE_PINGS * self._pings.every_s
        return heard and self.wait is not None and self.wait.batch

    @property
    def cause(self) -> tuple[str, str | None]:
        """Cause of the wait, one of ``data_wait.CAUSES``, and the missing stream or None.

        The broker's last report gives the cause; the cause is ``network`` if part of the step has come since, or the
        broker is silent.
        """
        if self.wait is None or self.patience.silent_s > WAIT_PINGS * self._pings.every_s:
            return "network", None
        return cause_of(self.wait.reason), self.wait.stream if self.wait.reason == "stream" else None

    # Events

    @_events.of(Tick)
    def _tick(self, event: Tick) -> list[Effect]:
        """Repeat the messages that are due, and fail if the trainer has waited too long."""
        now = self._now = event.now
        self.patience.tick(now)
        if self.reached and (why := self.patience.reason_to_stop()):
            return self._fail("stall", why)
        effects: list[Effect] = []
        if not self.phase.attached and self._attach_again.due(now):
            effects.append(self._attach())
        if self._question is not None and self._ask_again.due(now):
            effects += self._send_question()
        return effects + self._ping_and_request(now)

    def _ping_and_request(self, now: float) -> list[Effect]:
        """Send a ping and repeat the request for steps, if either is due."""
        effects: list[Effect] = []
        if self.reached and self._pings.due(now):
            effects += self._ping()
        if self.phase.attached and self._wants_steps() and self._get_again.due(now):
            effects += self._request_steps(repeated=True)
        return effects

    def _ping(self) -> list[Effect]:
        """Send a ping, which reports this reader's progress, and set the time of the next ping."""
        self._pings.sent(self._now)
        return [Send(self.ping_envelope())]

    def ping_envelope(self) -> Envelope:
        """Return a ping, which reports this reader's progress."""
        step, part = self.arrivals.place
        ping = ReaderPing(
            feed=self.feed, reader=self.reader, done_upto=self.arrivals.done_upto, have_upto=step, part=part,
            stats=self.stats, starvation=self.starvation,
        )  # fmt: skip
        return self._send(ping).envelope

    @property
    def has_all_requested(self) -> bool:
        """True if no requested step is in flight to this client."""
        asks = self._wants_steps() or self.arrivals.num_incomplete or self._question is not None
        return self.phase.attached and not asks

    @_events.of(Unsent)
    def _on_unsent(self, event: Unsent) -> list[Effect]:
        """Schedule an early retry of a message that never left this process."""
        kinds = ((Attach, self._attach_again), (Get, self._get_again), (Question, self._ask_again))
        for kind, retry in kinds:
            if isinstance(event.envelope.message, kind):
                retry.unsent(self._now)
        return []

    # Messages of the broker

    @_events.of(FromBroker)
    def _receive(self, event: FromBroker) -> list[Effect]:
        """Handle a message, unless an older broker or another run sent it; adopt a newer broker."""
        envelope = event.envelope
        if envelope.is_foreign(self.run, self.epoch):
            return []
        message = envelope.message
        self.run = envelope.run
        self.reached = True
        self.patience.broker_heard(message.silent_s if isinstance(message, Wait) else 0.0)
        if envelope.epoch > self.epoch:
            restarted, self.epoch = self.epoch > 0, envelope.epoch
            self.attempt = 0
            if restarted:
                return self._reattach()
        return self._messages[type(message)](self, message, envelope)

    _messages = Handlers[[Envelope], list[Effect]]()
    _messages.ignore(Message)

    @_messages.of(Reject)
    def _on_reject(self, message: Reject, envelope: Envelope) -> list[Effect]:
        """Fail, because the broker rejects this client."""
        return self._fail(message.code, message.detail)

    @_messages.of(Who)
    def _on_who(self, message: Who, envelope: Envelope) -> list[Effect]:
        """Attach again to a broker that does not know this client."""
        return self._reattach() if self._now - self._attached_at >= RETRY_S / 4 else []

    @_messages.of(Bye)
    def _on_bye(self, message: Bye, envelope: Envelope) -> list[Effect]:
        """Fail, because the broker stops."""
        return self._fail("stopped", message.reason)

    @_messages.of(Fenced)
    def _on_fenced(self, message: Fenced, envelope: Envelope) -> list[Effect]:
        """Fail, because another process has the rank."""
        return self._fail("fenced", message.detail)

    @_messages.of(Probe)
    def _on_probe(self, message: Probe, envelope: Envelope) -> list[Effect]:
        """Show that this client is alive."""
        return self._ping()

    @_messages.of(Wait)
    def _on_wait(self, message: Wait, envelope: Envelope) -> list[Effect]:
        """Take the cause of the wait."""
        if self._is_outdated(envelope):
            return []
        self.wait = message
        self.patience.broker_waits(message.reason == "join", message.detail)
        if message.reason == "join":
            self._pings.every_s = message.ping_s
            return []
        return self._on_sent_upto(message.request, message.step, message.part)

    def _is_outdated(self, envelope: Envelope) -> bool:
        """Return whether a message is of another attempt than the one in which this client takes part."""
        return envelope.fence != self.attempt and self.phase.attached

    def _reads(self, envelope: Envelope) -> bool:
        """Return whether a message about steps is of the attempt in which this client takes part."""
        return self.phase.attached and self._begun and envelope.fence == self.attempt

    @_messages.of(Attached)
    def _on_attached(self, message: Attached, envelope: Envelope) -> list[Effect]:
        """Handle the broker's answer to ``Attach``: this reader has its rank in an attempt."""
        attempt = envelope.fence
        if message.reader != self.reader or message.iteration != self.iteration:
            return []
        if self._begun and not attempt:  # late: the answer to a claim that was not ready
            return []
        if self.phase.attached and attempt <= self.attempt:
            return []
        if self.phase.attached:
            self.phases.go(UNKNOWN[self.phase])
        self.attempt, self.attached = attempt, message
        if attempt:
            self._last_attempt = self.epoch, attempt
        self.phases.go(ANSWERED[self.phase])
        self._going_on = message.lineage if self._begun else -1
        self._dealt_by = message.layout
        self._pings.every_s = message.ping_s
        self._pings.hurry(self._now)
        return self._request_missing()

    def _request_missing(self) -> list[Effect]:
        """Ask the broker to send every part again from the first missing one on."""
        self.arrivals.ask_again()
        return self._request_steps()

    def _on_sent_upto(self, request: int, step: int, part: int = 0) -> list[Effect]:
        """Request lost parts again: the broker reports that it has sent all before ``part`` of ``step``.

        The report counts only if it is about the newest ``request``.
        """
        if not self.phase.attached or not self._begun or request != self.arrivals.request:
            return []
        self._get_again.answered(self._now)
        return self._request_missing() if self.arrivals.lacks_before((step, part)) else []

    @_messages.of(StepPart)
    def _on_part(self, message: StepPart, envelope: Envelope) -> list[Effect]:
        """Handle a part of a step, and deliver the steps that this part completes."""
        arrivals, attached = self.arrivals, self.attached
        if attached is None or not self._reads(envelope):
            return []
        if message.step >= arrivals.done_upto + MOST_AHEAD or message.part >= max(message.parts, 1):
            return []  # no broker sends this
        in_turn = arrivals.is_in_turn(message)
        if message.step < arrivals.have_upto:
            return []
        self.wait = None
        self.patience.broker_waits(joining=False)
        self._get_again.answered(self._now)
        done_upto = arrivals.done_upto
        effects: list[Effect] = [Deliver(parts, attached) for parts in arrivals.add(message, envelope)]
        if not in_turn:
            effects += self._request_missing()
        elif arrivals.done_upto > done_upto or arrivals.unconfirmed_bytes >= attached.ack_bytes:
            effects += self._request_steps()
        return effects + self._end_iteration_if_complete()

    @_messages.of(ReaderAnswer)
    def _on_answer(self, message: ReaderAnswer, envelope: Envelope) -> list[Effect]:
        """Give the trainer the answer to its question; drop any other answer."""
        if self._question is None or not message.answers(self._question):
            return []
        if isinstance(message, State) and self.arrivals.chain_of(message.step) not in (b"", message.chain):
            return self._fail(
                "diverged", f"the broker's steps before step {message.step} differ from the steps that this client read"
            )
        self._question = None
        return [Answered(message)]

    @_messages.of(End)
    def _on_end(self, message: End, envelope: Envelope) -> list[Effect]:
        """Record the number of the feed's steps, or of those for this mesh; end the iteration if all have arrived."""
        if not self._reads(envelope):
            return []
        self._end = message
        return self._end_iteration_if_complete() + self._on_sent_upto(message.request, message.num_steps)

    def _end_iteration_if_complete(self) -> list[Effect]:
        """Tell the trainer that the feed has ended, once all of its steps have arrived."""
        end = self._end
        if end is None or self.arrivals.have_upto < end.num_steps:
            return []
        if self.phase is ClientPhase.ENDED:
            return []
        self.phases.go(ClientPhase.ENDED)
        return [Ended(end.num_steps, self.arrivals.chain, end if isinstance(end, EndForMesh) else None)]

    @_events.of(Begin)
    def _begin_iteration(self, place: Begin) -> list[Effect]:
        """Begin the iteration and step that the trainer sets by ``Begin``, and attach to the broker again."""
        self.iteration = place.iteration
        self.phases.go(ClientPhase.ATTACHING)
        self.lineage, self.snapshot = place.lineage, place.snapshot
        self._digest = b"" if self.snapshot is None else self.snapshot.digest
        self.arrivals.begin(place.next_step, place.chain)
        self._going_on = -1
        self._end = None
        return self._reattach()

    # Messages to the broker

    def _wants_steps(self) -> bool:
        """Return whether fewer steps have arrived than ``prefetch`` asks for."""
        stop = self.arrivals.done_upto + self.prefetch + 1
        return self.phase is ClientPhase.READING and self.arrivals.have_upto < stop

    def _attach(self) -> Effect:
        """Return the effect that asks the broker for this reader's rank."""
        self._attached_at = self._now
        self._attach_again.sent(self._now)
        done_upto = self.arrivals.done_upto
        attach = Attach(
            feed=self.feed, reader=self.reader, host=self.host, pid=self.pid, mesh=self.mesh,
            next_step=done_upto, chain=self.arrivals.chain_of(done_upto), iteration=self.iteration,
            readers=self.readers, ready=self._begun, lineage=self.lineage, snapshot_digest=self._digest,
            going_on=self._going_on, variable_lengths=self.variable_lengths, starvation=self.starvation,
            route_changes=self.route_changes, knows_stages=self.knows_stages,
            dealt_by=self._dealt_by if self._going_on >= 0 else UNSET,
        )  # fmt: skip
        return self._send(attach)

    @_messages.of(AskSnapshot)
    def _send_snapshot(self, question: AskSnapshot, envelope: Envelope) -> list[Effect]:
        """Send the snapshot of this reader's checkpoint, if the broker asks for this snapshot."""
        if self.snapshot is None or question.digest != self._digest:
            return []
        return [self._send(Brought(feed=self.feed, digest=self._digest, snapshot=self.snapshot))]

    def _reattach(self) -> list[Effect]:
        """Attach to the broker again, and drop the parts of incomplete steps."""
        self.attached = self.wait = None
        self.phases.go(UNKNOWN[self.phase])
        self.arrivals.forget_incomplete()
        self._attach_again.reset()
        return [self._attach()]

    def _request_steps(self, repeated: bool = False) -> list[Effect]:
        """Request up to ``prefetch`` steps after the step in use, and confirm the parts that have arrived."""
        if self.attached is None or not self._begun:
            return []
        (self._get_again.sent if repeated else self._get_again.answered)(self._now)
        arrivals, done_upto = self.arrivals, self.arrivals.done_upto
        arrivals.unconfirmed_bytes = 0
        step, part = arrivals.place
        get = Get(
            feed=self.feed, lineage=self.attached.lineage, start=step, part=part, stop=done_upto + self.prefetch + 1,
            done_upto=done_upto, request=arrivals.request,
        )  # fmt: skip
        return [self._send(get)]

    def _send_question(self) -> list[Effect]:
        """Send the trainer's question to the broker, again or for the first time."""
        assert self._question is not None
        self._ask_again.sent(self._now)
        return [self._send(self._question)]

    def _fail(self, code: str, detail: str) -> list[Effect]:
        """End the session with an error in the trainer."""
        self.phases.go(ClientPhase.OVER)
        return [Broken(code, detail)]

    def _send(self, message: Message) -> Send:
        """Return the effect that sends a message to the broker."""
        return Send(Envelope(run=self.run, epoch=self.epoch, fence=self.attempt, message=message))

    _messages.require(TO_READERS, unless=Message)
