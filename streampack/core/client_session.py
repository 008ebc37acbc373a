"""A client's side of the protocol, as a pure state machine: ``handle(event) -> effects``.

It attaches, asks for ``prefetch`` steps beyond the one in use, puts the parts of each together,
and delivers whole steps in order. Everything it says is a state ("steps 7 to 9, I have returned
7") and is said again until it holds, so nothing depends on a message arriving. It pings from the
moment it attaches, wanted or not: a rank that has all it wants must still notice a new broker.

``Again`` begins the next *round* over a finite feed: it attaches anew, at step 0, and waits there
until every rank of the mesh has asked for that round. What comes of an earlier one is not taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from streampack.core.events import Effect, Event, FromBroker, Send, Tick
from streampack.core.messages import (
    Attach,
    Attached,
    Bye,
    End,
    Envelope,
    Get,
    Mesh,
    Message,
    ReadBy,
    ReaderPing,
    Reject,
    StepPart,
    Wait,
    Who,
)

PING_S = 1.0
RETRY_S = 2.0
"""After so long without progress, what is missing is asked for again."""
GONE_S = 5.0
"""A broker that does not answer for so long is said to be silent."""


class Returned(Event, frozen=True):
    """The trainer has returned every step before ``step``."""

    step: int


class Again(Event, frozen=True):
    """Begin the feed again, at its first step."""


class Detach(Event, frozen=True):
    """The client is closed."""


class Deliver(Effect, frozen=True):
    """A whole step: its parts in order, each with its payload; ``attached`` says how to read them."""

    parts: tuple[Envelope, ...]
    attached: Attached


class Ended(Effect, frozen=True):
    """No step follows; ``chain`` is the digest of all."""

    num_steps: int
    chain: bytes


class Broken(Effect, frozen=True):
    """The session cannot go on: ``code`` for the kind, ``detail`` for a person."""

    code: str
    detail: str


class _Assembly(Struct):
    parts: dict[int, Envelope]


@dataclass(slots=True)
class ClientSession:
    """State of one reader; ``next_step`` is where it begins."""

    run: int
    feed: str
    reader: str
    host: str
    pid: int
    mesh: Mesh
    readers: ReadBy = field(default_factory=ReadBy)
    prefetch: int = 2
    next_step: int = 0
    chain: bytes = b""
    round: int = 0
    epoch: int = 0
    attempt: int = 0
    attached: Attached | None = None
    stats: dict[str, float] = field(default_factory=dict)
    waiting: str = ""
    _now: float = 0.0
    _heard: float | None = None
    _moved: float = 0.0
    _pinged: float = -PING_S
    _attaching: float = -RETRY_S
    _have_upto: int = 0
    _done_upto: int = 0
    _resend: int = 0
    _assembling: dict[int, _Assembly] = field(default_factory=dict)
    _chains: dict[int, bytes] = field(default_factory=dict)
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
            for step in range(self._done_upto, event.step):
                self._chains.pop(step, None)
            self._done_upto = max(self._done_upto, event.step)
            return self._get()
        if isinstance(event, Again):
            return self._again()
        if isinstance(event, Detach):
            self._over = True
            return [self._send(Bye(reason="goodbye"))]
        return []

    @property
    def silent_s(self) -> float:
        """Seconds since the broker was last heard, or since the start."""
        return self._now - (self._heard or 0.0)

    @property
    def reached(self) -> bool:
        """The broker has answered at least once."""
        return self._heard is not None

    def waiting_for(self) -> str:
        """What the next step waits for, for a person."""
        if self._heard is None:
            return "an answer of the broker"
        if self.silent_s > GONE_S:
            return f"the broker, silent for {self.silent_s:.0f} s"
        return self.waiting or f"step {self._have_upto}"

    # Events

    def _tick(self, now: float) -> list[Effect]:
        self._now = now
        effects: list[Effect] = []
        if self.attached is None:
            if now - self._attaching >= RETRY_S:
                effects.append(self._attach())
            return effects
        if now - self._pinged >= PING_S:
            self._pinged = now
            ping = ReaderPing(
                feed=self.feed, reader=self.reader, done_upto=self._done_upto, have_upto=self._have_upto,
                stats=self.stats,
            )  # fmt: skip
            effects.append(self._send(ping))
        if self._wants() and now - self._moved >= RETRY_S:
            self._moved = now
            self._resend += 1
            effects += self._get()
        return effects

    def _receive(self, envelope: Envelope) -> list[Effect]:
        self.run = self.run or envelope.run
        if envelope.run != self.run or envelope.epoch < self.epoch:
            return []
        self._heard = self._now
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
        if envelope.fence != self.attempt and self.attached is not None:
            return []
        if isinstance(message, Wait):
            self.waiting = f"{message.reason}: {message.detail}"
        elif self.attached is None:
            return []
        elif isinstance(message, StepPart):
            return self._part(envelope, message)
        elif isinstance(message, End):
            return self._end(message)
        return []

    def _on_attached(self, attempt: int, message: Attached) -> list[Effect]:
        if message.reader != self.reader or message.round != self.round:
            return []
        if self.attached is not None and attempt <= self.attempt:
            return []
        self.attempt, self.attached = attempt, message
        self._moved = self._now
        self._resend += 1
        return self._get()

    def _part(self, envelope: Envelope, message: StepPart) -> list[Effect]:
        if message.step < self._have_upto:
            return []
        self.waiting = ""
        self._moved = self._now
        assembly = self._assembling.setdefault(message.step, _Assembly({}))
        assembly.parts[message.part] = envelope
        effects: list[Effect] = []
        while (ready := self._assembling.get(self._have_upto)) is not None:
            first = next(iter(ready.parts.values())).message
            if not isinstance(first, StepPart) or len(ready.parts) < first.parts:
                break
            del self._assembling[self._have_upto]
            self._have_upto += 1
            parts = tuple(ready.parts[n] for n in sorted(ready.parts))
            self.chain = self._chains[self._have_upto] = first.chain
            assert self.attached is not None
            effects.append(Deliver(parts, self.attached))
        return effects + (self._finished() if effects else [])

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

    def _again(self) -> list[Effect]:
        self.round += 1
        self.chain, self._chains = b"", {0: b""}
        self._have_upto = self._done_upto = 0
        self._num_steps, self._ended = None, False
        return self._reattach()

    # What goes out

    def _wants(self) -> bool:
        return not self._ended and self._have_upto < self._done_upto + self.prefetch + 1

    def _attach(self) -> Effect:
        self._attaching = self._now
        attach = Attach(
            feed=self.feed, reader=self.reader, host=self.host, pid=self.pid, mesh=self.mesh,
            next_step=self._done_upto, chain=self._chains[self._done_upto], round=self.round, readers=self.readers,
        )  # fmt: skip
        return self._send(attach)

    def _reattach(self) -> list[Effect]:
        self.attached = None
        self._assembling.clear()
        return [self._attach()]

    def _get(self) -> list[Effect]:
        if self.attached is None:
            return []
        get = Get(
            feed=self.feed, lineage=self.attached.lineage, start=self._have_upto,
            stop=self._done_upto + self.prefetch + 1, done_upto=self._done_upto, resend=self._resend,
        )  # fmt: skip
        return [self._send(get)]

    def _break(self, code: str, detail: str) -> list[Effect]:
        self._over = True
        return [Broken(code, detail)]

    def _send(self, message: Message) -> Send:
        return Send(Envelope(run=self.run, epoch=self.epoch, fence=self.attempt, message=message))
