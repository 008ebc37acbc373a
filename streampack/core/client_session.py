"""A client's side of the protocol, as a pure state machine: ``handle(event) -> effects``.

It attaches, asks for ``prefetch`` steps beyond the one in use, puts the parts of each together,
and delivers whole steps in order. Everything it says is a state ("steps 7 to 9, I have returned
7") and is said again until it holds, so nothing depends on a message arriving. It pings from the
moment it is answered, whatever it wants: a rank that has everything must still notice a new broker,
and one that waits for the others must not be taken for dead.

It may take its rank first, and ``Begin`` later, at the step that a checkpoint names: until then it is not ready,
holds nobody up and is sent no steps. ``Begin`` and ``Again`` also begin the next *round*, over a finite feed or where
an iteration is broken off: it attaches anew and waits until every rank of the mesh has asked for that round. What
comes of an earlier one is not taken.

A question (``Ask``) is repeated until it is answered, whatever becomes of the attachment meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from streampack.core.client_events import Again, Answered, Ask, Begin, Broken, Deliver, Detach, Ended, Returned, Waiting
from streampack.core.events import Effect, Event, FromBroker, Send, Tick
from streampack.core.messages import (
    AskState,
    Attach,
    Attached,
    Bye,
    Commit,
    Committed,
    End,
    Envelope,
    Fenced,
    Get,
    Mesh,
    Message,
    ReadBy,
    ReaderPing,
    Reject,
    State,
    StepPart,
    Wait,
    Who,
)
from streampack.core.patience import Patience
from streampack.core.snapshot import Snapshot
from streampack.core.starvation import Starvation, cause_of

PING_S = 1.0
RETRY_S = 2.0
"""After so long without progress, what is missing is asked for again."""
MOST_AHEAD = 64
"""Steps that a broker has ready at most, beyond those returned (``steps_ahead``): others are not kept."""
GONE_S = 5.0
"""A broker that does not answer for so long is said to be silent."""
SAID_S = 2.5
"""What it says is so for so long: it repeats it every second."""


class _Assembly(Struct):
    parts: dict[int, Envelope]


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
    ready: bool = True
    lineage: int = 0
    snapshot: Snapshot | None = None
    patience: Patience = field(default_factory=Patience)
    epoch: int = 0
    attempt: int = 0
    attached: Attached | None = None
    stats: dict[str, float] = field(default_factory=dict)
    starvation: Starvation | None = None
    wait: Wait | None = None
    """What the broker says that the next step waits for."""
    reached: bool = False
    """The broker has answered at least once."""
    num_skipped: int = 0
    """Steps that were passed over, as the run's record says."""
    _now: float = 0.0
    _moved: float = 0.0
    _pinged: float = -PING_S
    _attaching: float = -RETRY_S
    _have_upto: int = 0
    _done_upto: int = 0
    _going_on: int = -1
    _resend: int = 0
    _assembling: dict[int, _Assembly] = field(default_factory=dict)
    _chains: dict[int, bytes] = field(default_factory=dict)
    _skipped: set[int] = field(default_factory=set)
    _asked: AskState | Commit | None = None
    _asked_at: float = 0.0
    _num_steps: int | None = None
    _ended: bool = False
    _over: bool = False

    def __post_init__(self) -> None:
        self._have_upto = self._done_upto = self.next_step
        self._chains[self.next_step] = self.chain

    def handle(self, event: Event) -> list[Effect]:
        """What to do about an event; never performs it."""
        if self._over and not isinstance(event, Detach):
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
        if isinstance(event, Ask):
            self._asked = event.message
            self.patience.asks()
            return self._ask()
        if isinstance(event, Detach):
            self._over = True
            return [self._send(Bye(reason="goodbye"))]
        return []

    def waiting_for(self) -> str:
        """What the next step waits for, for a person."""
        if not self.reached:
            return "an answer of the broker"
        if self.patience.silent_s > GONE_S:
            return f"the broker, silent for {self.patience.silent_s:.0f} s"
        return f"{self.wait.reason}: {self.wait.detail}" if self.wait is not None else f"step {self._have_upto}"

    @property
    def cause(self) -> tuple[str, str | None]:
        """The same as one of ``starvation.CAUSES``, and the stream that is missing: what the broker said last, unless
        it has sent some of the step since, or is not heard."""
        if self.wait is None or self.patience.silent_s > SAID_S:
            return "network", None
        return cause_of(self.wait.reason), self.wait.stream if self.wait.reason == "stream" else None

    # Events

    def _tick(self, now: float) -> list[Effect]:
        self._now = now
        self.patience.tick(now)
        if self.reached and (why := self.patience.over()):
            return self._break("stall", why)
        effects: list[Effect] = []
        if self.attached is None and now - self._attaching >= RETRY_S:
            effects.append(self._attach())
        if self._asked is not None and now - self._asked_at >= RETRY_S:
            effects += self._ask()
        return effects + self._keep_up(now)

    def _keep_up(self, now: float) -> list[Effect]:
        """Say that it is alive, and what it still wants."""
        effects: list[Effect] = []
        if self.reached and now - self._pinged >= PING_S:
            self._pinged = now
            ping = ReaderPing(
                feed=self.feed, reader=self.reader, done_upto=self._done_upto, have_upto=self._have_upto,
                stats=self.stats, starvation=self.starvation,
            )  # fmt: skip
            effects.append(self._send(ping))
        if self.attached is not None and self._wants() and now - self._moved >= RETRY_S:
            self._moved = now
            self._resend += 1
            effects += self._get()
        return effects

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
            return self._reattach() if self._now - self._attaching >= RETRY_S / 4 else []
        if isinstance(message, Bye):
            return self._break("stopped", message.reason)
        if isinstance(message, Fenced):
            return self._break("fenced", message.detail)
        if isinstance(message, State | Committed):
            return self._answer(message)
        if envelope.fence != self.attempt and self.attached is not None:
            return []
        if isinstance(message, Wait):
            self.wait = message
            self.patience.told(message.reason == "join", message.detail)
        elif self.attached is None or not self.ready:
            return []
        elif isinstance(message, StepPart):
            return self._part(envelope, message)
        elif isinstance(message, End):
            return self._end(message)
        return []

    def _on_attached(self, attempt: int, message: Attached) -> list[Effect]:
        if message.reader != self.reader or message.round != self.round:
            return []
        if self.ready and not attempt:  # late: the answer to a claim that was not ready
            return []
        if self.attached is not None and attempt <= self.attempt:
            return []
        self.attempt, self.attached = attempt, message
        self._going_on = message.lineage if self.ready else -1
        self._moved = self._now
        self._resend += 1
        return self._get()

    def _part(self, envelope: Envelope, message: StepPart) -> list[Effect]:
        wanted = self._have_upto <= message.step < self._done_upto + MOST_AHEAD
        if not wanted or message.part >= max(message.parts, 1):  # had already; or what no broker sends
            return []
        self.wait = None
        self.patience.told(joining=False)
        self._moved = self._now
        assembly = self._assembling.setdefault(message.step, _Assembly({}))
        assembly.parts[message.part] = envelope
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
        return effects + (self._get() if self._done_upto > done_upto else []) + self._finished()

    def _returned(self, upto: int) -> None:
        """Steps before ``upto`` are done with, and those skipped after them."""
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
        return self._finished()

    def _finished(self) -> list[Effect]:
        if self._num_steps is None or self._have_upto < self._num_steps:
            return []
        if self._ended:
            return []
        self._ended = True
        return [Ended(self._num_steps, self.chain)]

    def _begin(self, place: Begin) -> list[Effect]:
        self.ready, self.round = True, place.round
        self.lineage, self.snapshot = place.lineage, place.snapshot
        self.chain, self._chains = place.chain, {place.next_step: place.chain}
        self._have_upto = self._done_upto = place.next_step
        self._going_on = -1
        self._skipped.clear()
        self._num_steps, self._ended = None, False
        return self._reattach()

    # What goes out

    def _wants(self) -> bool:
        return self.ready and not self._ended and self._have_upto < self._done_upto + self.prefetch + 1

    def _attach(self) -> Effect:
        self._attaching = self._now
        attach = Attach(
            feed=self.feed, reader=self.reader, host=self.host, pid=self.pid, mesh=self.mesh,
            next_step=self._done_upto, chain=self._chains[self._done_upto], round=self.round, readers=self.readers,
            ready=self.ready, lineage=self.lineage, snapshot=self.snapshot, going_on=self._going_on,
            variable_lengths=self.variable_lengths, starvation=self.starvation,
        )  # fmt: skip
        return self._send(attach)

    def _reattach(self) -> list[Effect]:
        self.attached = self.wait = None
        self._assembling.clear()
        return [self._attach()]

    def _get(self) -> list[Effect]:
        if self.attached is None or not self.ready:
            return []
        get = Get(
            feed=self.feed, lineage=self.attached.lineage, start=self._have_upto,
            stop=self._done_upto + self.prefetch + 1, done_upto=self._done_upto, resend=self._resend,
        )  # fmt: skip
        return [self._send(get)]

    def _ask(self) -> list[Effect]:
        assert self._asked is not None
        self._asked_at = self._now
        return [self._send(self._asked)]

    def _break(self, code: str, detail: str) -> list[Effect]:
        self._over = True
        return [Broken(code, detail)]

    def _send(self, message: Message) -> Send:
        return Send(Envelope(run=self.run, epoch=self.epoch, fence=self.attempt, message=message))
