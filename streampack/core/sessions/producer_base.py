"""What every producer does alike, whether it reads its samples (``producer_session``) or they are pushed to it
(``push_session``): make itself known to the broker, and send no further than it was allowed.

It says hello until it has a lease, pings from its main loop whatever it does, and follows the newest broker of its
run: what an older one said is dropped, and what a new one does not know is said again. How far it may send is a
``SendWindow``, of one session of one partition. What a chunk holds is the shell's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct, UnsetType

from streampack.core.model.samples import Keep
from streampack.core.model.snapshot import Cursor
from streampack.core.protocol.events import Effect, Event, FromBroker, Report, Send, Tick, Unsent
from streampack.core.protocol.message import Bye, Envelope, Message
from streampack.core.protocol.producer_messages import Flow, Hello, Lease, Offer, ProducerPing, SourceSize
from streampack.core.sessions.backoff import Backoff

PING_S = 1.0
HELLO_S = 1.0
MOST_HELLO_S = 4.0
"""A Hello without a lease is repeated after ``HELLO_S``, then later each time, up to this."""
BROKER_SILENT_S = 5.0
"""Seconds without a message of the broker after which a producer reports that it waits for the broker."""
PartitionKey = tuple[str, int]
"""(stream, partition)."""
Session = tuple[int, int]
"""(broker's epoch, session): every broker counts its sessions from 1."""


class Chunk(Event, frozen=True):
    """Samples to be sent as one: ``payload`` is the tokens and every field; ``num_bytes`` of those by token. With
    ``keep`` they are a group. ``policy_version`` is that of all of them.
    """

    key: PartitionKey
    session: Session
    lengths_u32: bytes
    crcs_u32: bytes
    loss_tokens_u32: bytes
    num_samples: int
    num_bytes: int
    cursor: Cursor
    rejected: dict[str, int]
    payload: tuple[object, ...]
    lost_tokens: int = 0
    pass_ended: bool = False
    keep: Keep | UnsetType = msgspec.UNSET
    policy_version: int | UnsetType = msgspec.UNSET
    payload_crc: int | None = None
    """CRC32C of the payload's frames one after another, where it is known."""


class Failed(Event, frozen=True):
    """The shell cannot go on; the broker and, through it, the trainers are told why."""

    text: str


class Leave(Event, frozen=True):
    """The shell was asked to stop."""


class Finish(Effect, frozen=True):
    """Nothing is left to do, or the broker refused: ``error`` says so. Code ``done``: the broker wants no more of
    anybody; ``stopped``: it is stopping.
    """

    error: str
    code: str = ""


class SendWindow(Struct):
    """How far one session may send (R6: what is granted is absolute), and what the broker has of it."""

    known_seq: int
    """The broker has every sample below."""
    still_seq: int = 0
    """What was sent at the last ping."""
    grant_seq: int = 0
    grant_bytes: int = 0
    sent_bytes: int = 0

    def widen(self, flow: Flow) -> None:
        """What the broker says of it; a message that was overtaken takes nothing back."""
        self.grant_seq = max(self.grant_seq, flow.grant_seq)
        self.grant_bytes = max(self.grant_bytes, flow.grant_bytes)
        self.known_seq = max(self.known_seq, flow.expected_seq)

    def allows(self, stop_seq: int, num_bytes: int) -> bool:
        """May a chunk be sent that ends before ``stop_seq``?"""
        return stop_seq <= self.grant_seq and self.sent_bytes + num_bytes <= self.grant_bytes

    def seems_lost(self, sent_seq: int) -> bool:
        """Was all below ``sent_seq`` sent a ping ago, and the broker still lacks some of it?"""
        still, self.still_seq = self.still_seq == sent_seq, sent_seq
        return still and sent_seq > self.known_seq


@dataclass(slots=True, kw_only=True)
class Sender(ABC):
    """One process that sends samples, to whichever broker its run has."""

    run: int
    producer: str
    host: str
    pid: int
    epoch: int = 0
    sizes: dict[str, SourceSize] = field(default_factory=dict)
    """What is known of its streams' sources, for the pings."""
    _now: float = 0.0
    _last_ping: float = -PING_S
    _last_hello: float = -HELLO_S
    _hello_next: Backoff = field(init=False)
    _last_heard: float | None = None
    _finished: bool = False

    def __post_init__(self) -> None:
        self._hello_next = Backoff(self.producer, HELLO_S, MOST_HELLO_S)

    def handle(self, event: Event) -> list[Effect]:
        """What to do about an event; never performs it."""
        if self._finished:
            return []
        if isinstance(event, Unsent):
            if isinstance(event.envelope.message, Hello):
                self._hello_next.unsent(self._now)
            return []
        if isinstance(event, Tick):
            return self._tick(event.now)
        if isinstance(event, FromBroker):
            return self._receive(event.envelope)
        if isinstance(event, Failed):
            return [self._send(ProducerPing(producer=self.producer, failure=event.text[:2000]))]
        if isinstance(event, Leave):
            self._finished = True
            return [self._send(Bye(reason="goodbye")), Finish("")]
        return self._given(event)

    @property
    def silent_s(self) -> float:
        """Seconds since the broker was last heard, by the ticks."""
        return self._now - (self._last_heard if self._last_heard is not None else 0.0)

    @property
    def reached(self) -> bool:
        """The broker has answered at least once."""
        return self._last_heard is not None

    # What each kind adds

    @property
    @abstractmethod
    def _offered(self) -> list[Offer]:
        """What it says hello with."""

    @property
    @abstractmethod
    def _has_lease(self) -> bool:
        """Is there a session to send in?"""

    @abstractmethod
    def _given(self, event: Event) -> list[Effect]:
        """An event of its own shell."""

    @abstractmethod
    def _heard(self, message: Message, fence: int) -> list[Effect]:
        """A message of the broker that it follows."""

    @abstractmethod
    def _forget_sessions(self) -> list[Effect]:
        """They were another broker's."""

    @abstractmethod
    def _remind_all(self) -> list[Effect]:
        """Say again what the broker seems not to know."""

    # What all do

    def _tick(self, now: float) -> list[Effect]:
        self._now = now
        effects: list[Effect] = []
        if not self._has_lease and self._hello_next.due(now):
            effects.append(self._hello())
        if now - self._last_ping >= PING_S:
            self._last_ping = now
            effects += [self._send(ProducerPing(producer=self.producer, sizes=self.sizes)), *self._remind_all()]
        return effects

    def _receive(self, envelope: Envelope) -> list[Effect]:
        self.run = self.run or envelope.run
        if envelope.run != self.run or envelope.epoch < self.epoch:
            return []
        self._last_heard = self._now
        if isinstance(envelope.message, Lease):
            self._hello_next.reset()
        effects: list[Effect] = []
        if envelope.epoch > self.epoch:
            effects += self._forget_sessions()
            known, self.epoch = self.epoch, envelope.epoch
            if known:
                effects += [Report("info", "the broker was restarted"), self._hello()]
        return effects + self._heard(envelope.message, envelope.fence)

    def _hello(self) -> Effect:
        self._last_hello = self._now
        self._hello_next.said(self._now)
        return self._send(Hello(producer=self.producer, host=self.host, pid=self.pid, offers=self._offered))

    def _hello_again(self) -> list[Effect]:
        """The broker does not know it, or has leased it something that it has not heard of."""
        return [self._hello()] if self._now - self._last_hello >= HELLO_S / 2 else []

    def _send(self, message: Message, session: Session = (0, 0), chunk: Chunk | None = None) -> Send:
        """A message, with the payload of a chunk."""
        payload, crc = ((), None) if chunk is None else (chunk.payload, chunk.payload_crc)
        return Send(
            Envelope(
                run=self.run, epoch=self.epoch, fence=session[1], message=message, payload=payload, payload_crc=crc
            )
        )  # fmt: skip
