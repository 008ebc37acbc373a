"""The part that both kinds of producer share: hello, pings, and the limits of credit.

One kind reads its samples (``producer_session``), the other gets them from a program (``push_session``). A producer
repeats its hello until it has a lease, and pings all the time. It follows the newest broker of its run: it drops
messages of older ones, and says hello to a new one. A ``SendWindow`` limits what it sends in a session of a partition.
Producers do not look into a chunk's payload; only the shell does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from msgspec import Struct

from streampack.core.columns.chunk_body import SentChunk
from streampack.core.protocol.events import Effect, Event, FromBroker, Report, Send, Tick, Unsent
from streampack.core.protocol.handlers import Handlers
from streampack.core.protocol.message import Bye, Envelope, Message, Reject, Who
from streampack.core.protocol.producer_messages import Flow, Hello, Lease, Offer, ProducerPing, SourceSize
from streampack.core.sessions.backoff import Backoff
from streampack.core.sessions.patience import VAIN_S

PING_S = 1.0
"""Seconds between pings."""
HELLO_S = 1.0
MOST_HELLO_S = 4.0
"""A producer without a lease repeats its hello after ``HELLO_S`` seconds, then later each time, up to this."""
BROKER_SILENT_S = 5.0
"""Seconds without a message of the broker after which a producer reports that it waits for the broker."""
SILENT, SILENT_TEXT = "silent", "an answer of the broker"
"""Short name and text of that wait."""
PartitionKey = tuple[str, int]
"""(stream, partition)."""
Session = tuple[int, int]
"""(epoch of the broker, number of the session): every broker counts its sessions from 1."""


class Chunk(SentChunk, Event, frozen=True, kw_only=True):
    """Samples that are sent in one message; the session numbers them when it sends them.

    Attributes:
        session: The session of the lease for which the shell read the samples.
        num_bytes: Bytes of the tokens and of the fields that have a value for each token; credit counts these. The
            payload of a chunk with shared tokens is smaller.
        payload: The tokens and each field, concatenated over the samples.
        payload_crc: CRC32C of the payload's concatenated frames, if known.
    """

    base_seq: int = 0
    session: Session
    num_bytes: int
    payload: tuple[object, ...]
    payload_crc: int | None = None

    @property
    def key(self) -> PartitionKey:
        """The partition."""
        return self.stream, self.partition


class Failed(Event, frozen=True):
    """The shell cannot go on. The session tells the broker why (``text``), and the broker tells the trainers."""

    text: str


class Leave(Event, frozen=True):
    """The shell stops, and the session says goodbye to the broker."""


class Finish(Effect, frozen=True):
    """The session is over; the shell may end.

    Attributes:
        error: The text of the error; empty after a normal end.
        code: Kind of the error; ``done`` if the broker needs no more samples, ``stopped`` if it stops.
    """

    error: str
    code: str = ""


class SendWindow(Struct):
    """Credit of one session of a partition: absolute limits (R6), and the samples and bytes sent and received."""

    known_seq: int
    """The broker has received every sample below this number."""
    pinged_seq: int = 0
    """At the last ping, every sample below this number was sent."""
    grant_seq: int = 0
    """Only samples below this number may be sent."""
    grant_bytes: int = 0
    """Bytes that may be sent in the session, in all."""
    sent_bytes: int = 0
    keys_full: bool = False
    """The broker's index of keys is full."""

    def widen(self, flow: Flow) -> None:
        """Raise the limits to those of a ``Flow`` message; an older message never lowers a limit."""
        self.grant_seq = max(self.grant_seq, flow.grant_seq)
        self.grant_bytes = max(self.grant_bytes, flow.grant_bytes)
        self.known_seq = max(self.known_seq, flow.expected_seq)
        self.keys_full = flow.keys_full

    def allows(self, stop_seq: int, num_bytes: int) -> bool:
        """Return whether credit allows a chunk of ``num_bytes`` that ends before sample ``stop_seq``."""
        return stop_seq <= self.grant_seq and self.sent_bytes + num_bytes <= self.grant_bytes

    def seems_lost(self, sent_seq: int) -> bool:
        """Return whether samples seem lost: all below ``sent_seq`` were sent a ping ago, and the broker lacks some.

        Call this once at each ping.
        """
        still, self.pinged_seq = self.pinged_seq == sent_seq, sent_seq
        return still and sent_seq > self.known_seq


@dataclass(slots=True, kw_only=True)
class Sender(ABC):
    """State that both kinds of producer share: one process that sends samples to the newest broker of its run."""

    run: int
    producer: str
    host: str
    pid: int
    epoch: int = 0
    sizes: dict[str, SourceSize] = field(default_factory=dict)
    """Size of each stream's source, as far as it is known; pings carry it."""
    store_wait: str = ""
    """The cause for which a read of the producer's files waits; empty if none waits. Pings carry it."""
    _now: float = 0.0
    _last_ping: float = -PING_S
    _last_hello: float = -HELLO_S
    _hello_next: Backoff = field(init=False)
    _last_heard: float | None = None
    _finished: bool = False

    def __post_init__(self) -> None:
        self._hello_next = Backoff(self.producer, HELLO_S, MOST_HELLO_S)

    def handle(self, event: Event) -> list[Effect]:
        """Return the effects of an event, for the shell to perform."""
        return [] if self._finished else self._events[type(event)](self, event)

    _events = Handlers[[], list[Effect]]()
    """Handlers of events; each kind of producer adds its own, such as that of a chunk or an end."""

    @_events.of(Unsent)
    def _on_unsent(self, event: Unsent) -> list[Effect]:
        """Say hello again soon if a hello did not leave this process."""
        if isinstance(event.envelope.message, Hello):
            self._hello_next.unsent(self._now)
        return []

    @_events.of(Failed)
    def _on_failure(self, event: Failed) -> list[Effect]:
        """Tell the broker why the shell cannot go on."""
        return [self._send(ProducerPing(producer=self.producer, failure=event.text[:2000]))]

    @_events.of(Leave)
    def _on_leave(self, event: Leave) -> list[Effect]:
        """Say goodbye to the broker."""
        return [self._send(Bye(reason="goodbye")), *self._end_session("", "")]

    @property
    def silent_s(self) -> float:
        """Seconds since the last message of the broker, as of the last tick."""
        return self._now - (self._last_heard if self._last_heard is not None else 0.0)

    @property
    def waits_in_vain(self) -> bool:
        """True if the broker has long not answered the pings of this producer, which holds a lease."""
        return self._has_lease and self.silent_s > VAIN_S

    @property
    def reached(self) -> bool:
        """True if the broker has answered at least once."""
        return self._last_heard is not None

    @property
    def is_silent(self) -> bool:
        """True if the broker has never answered, or not for ``BROKER_SILENT_S`` seconds."""
        return not self.reached or self.silent_s > BROKER_SILENT_S

    @property
    def stall_code(self) -> str:
        """Short name of the cause of a wait, for programs: ``SILENT``; empty for causes without a name."""
        return SILENT if self.is_silent else ""

    # Each kind of producer has its own

    @property
    @abstractmethod
    def _offered(self) -> list[Offer]:
        """Streams that the hello offers."""

    @property
    @abstractmethod
    def _has_lease(self) -> bool:
        """True if the producer holds a lease."""

    @abstractmethod
    def _forget_sessions(self) -> list[Effect]:
        """Drop the leases of the previous broker."""

    @abstractmethod
    def _repeat_unconfirmed(self) -> list[Effect]:
        """Repeat messages that the broker may have missed."""

    # All producers share

    @_events.of(Tick)
    def _tick(self, event: Tick) -> list[Effect]:
        """Send a hello and a ping when they are due."""
        now = self._now = event.now
        effects: list[Effect] = []
        if not self._has_lease and self._hello_next.due(now):
            effects.append(self._hello())
        if now - self._last_ping >= PING_S:
            self._last_ping = now
            ping = ProducerPing(producer=self.producer, sizes=self.sizes, waiting=self.store_wait[:500])
            effects += [self._send(ping), *self._repeat_unconfirmed()]
        return effects

    @_events.of(FromBroker)
    def _receive(self, event: FromBroker) -> list[Effect]:
        """Handle a message, unless an older broker or another run sent it; adopt a newer broker."""
        envelope = event.envelope
        if envelope.is_foreign(self.run, self.epoch):
            return []
        self.run = envelope.run
        self._last_heard = self._now
        if isinstance(envelope.message, Lease):
            self._hello_next.reset()
        effects: list[Effect] = []
        if envelope.epoch > self.epoch:
            effects += self._forget_sessions()
            last_epoch, self.epoch = self.epoch, envelope.epoch
            if last_epoch:
                effects += [Report("info", "the broker was restarted"), self._hello()]
        message = envelope.message
        return effects + self._messages[type(message)](self, message, envelope.fence)

    _messages = Handlers[[int], list[Effect]]()
    """Handlers of messages of the current broker, with the number of the session; each kind of producer adds its own.

    Other messages are dropped.
    """
    _messages.ignore(Message)

    @_messages.of(Who)
    def _on_who(self, message: Who, fence: int) -> list[Effect]:
        """Say hello, because the broker does not know this producer."""
        return self._hello_if_due()

    @_messages.of(Reject)
    def _on_reject(self, message: Reject, fence: int) -> list[Effect]:
        """End the session, because the broker rejects this producer."""
        return self._end_session(message.detail, message.code)

    def _end_session(self, error: str, code: str) -> list[Effect]:
        """End the session with an error text and its code; both may be empty after a normal end."""
        self._finished = True
        return [Finish(error, code)]

    def _hello(self) -> Effect:
        """Return the effect that sends a hello."""
        self._last_hello = self._now
        self._hello_next.sent(self._now)
        return self._send(Hello(producer=self.producer, host=self.host, pid=self.pid, offers=self._offered))

    def _hello_if_due(self) -> list[Effect]:
        """Send a hello, unless this producer sent one just now. Call this if the broker does not know the producer."""
        return [self._hello()] if self._now - self._last_hello >= HELLO_S / 2 else []

    def _send(self, message: Message, session: Session = (0, 0), chunk: Chunk | None = None) -> Send:
        """Return the effect that sends a message in a session, with a chunk's payload if there is one."""
        payload, crc = ((), None) if chunk is None else (chunk.payload, chunk.payload_crc)
        return Send(
            Envelope(
                run=self.run, epoch=self.epoch, fence=session[1], message=message, payload=payload, payload_crc=crc
            )
        )  # fmt: skip
