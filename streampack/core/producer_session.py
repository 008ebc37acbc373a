"""A producer's side of the protocol, as a pure state machine: ``handle(event) -> effects``.

The broker leases partitions and says where each begins; the session asks its shell to read there,
holds at most one chunk a partition until the credits allow it, and sends it once. It never sends
again what it sent: if something was lost the broker begins a new session at the gap, and the
source, which can seek, reads it again. Where nothing follows that would show the gap, the session
says how far it has sent. What a chunk holds is the shell's business.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from streampack.core.events import Effect, Event, FromBroker, Report, Send, Tick
from streampack.core.messages import (
    Bye,
    Done,
    Envelope,
    Eos,
    Flow,
    Hello,
    Lease,
    Message,
    Offer,
    ProducerPing,
    Reject,
    Revoke,
    Samples,
    Sent,
    Who,
)
from streampack.core.snapshot import Cursor

PING_S = 1.0
HELLO_S = 1.0
Key = tuple[str, int]
"""(stream, partition)."""
Session = tuple[int, int]
"""(broker's epoch, session): every broker counts its sessions from 1."""


class Chunk(Event, frozen=True):
    """What the shell read for ``Read``: ``payload`` is the tokens and every field; ``num_bytes`` of those by token."""

    key: Key
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


class EndOfPartition(Event, frozen=True):
    """The source has no more for ``Read``."""

    key: Key
    session: Session


class Failed(Event, frozen=True):
    """The shell cannot go on; the broker and, through it, the trainers are told why."""

    text: str


class Leave(Event, frozen=True):
    """The shell was asked to stop."""


class Read(Effect, frozen=True):
    """Read the next chunk of a lease: answer with ``Chunk`` or ``EndOfPartition``."""

    lease: Lease
    session: Session
    seq: int


class Forget(Effect, frozen=True):
    """The lease is over: close its reader."""

    key: Key
    session: Session


class Finish(Effect, frozen=True):
    """Nothing is left to do, or the broker refused: ``error`` says so. Code ``done``: the broker wants no more of
    anybody; ``stopped``: it is stopping."""

    error: str
    code: str = ""


class _Held(Struct):
    lease: Lease
    session: Session
    next_seq: int
    grant_seq: int = 0
    grant_bytes: int = 0
    sent_bytes: int = 0
    known_seq: int = 0
    """The broker has every sample below."""
    still_seq: int = 0
    """``next_seq`` at the last ping."""
    reading: bool = False
    chunk: Chunk | None = None
    ended: bool = False
    ended_known: bool = False


@dataclass(slots=True)
class ProducerSession:
    """State of one producer process; ``offers`` are the streams it can read."""

    run: int
    producer: str
    host: str
    pid: int
    offers: list[Offer]
    epoch: int = 0
    held: dict[Key, _Held] = field(default_factory=dict)
    _last_session: dict[Key, Session] = field(default_factory=dict)
    _now: float = 0.0
    _last_ping: float = -PING_S
    _last_hello: float = -HELLO_S
    _last_heard: float | None = None
    _finished: bool = False

    def handle(self, event: Event) -> list[Effect]:
        """What to do about an event; never performs it."""
        if self._finished:
            return []
        if isinstance(event, Tick):
            return self._tick(event.now)
        if isinstance(event, FromBroker):
            return self._receive(event.envelope)
        if isinstance(event, Chunk):
            return self._chunk(event)
        if isinstance(event, EndOfPartition):
            return self._end(event)
        if isinstance(event, Failed):
            return [self._send(ProducerPing(producer=self.producer, failure=event.text[:2000]))]
        if isinstance(event, Leave):
            self._finished = True
            return [self._send(Bye(reason="goodbye")), Finish("")]
        return []

    @property
    def silent_s(self) -> float:
        """Seconds since the broker was last heard, by the ticks."""
        return self._now - (self._last_heard if self._last_heard is not None else 0.0)

    @property
    def reached(self) -> bool:
        """The broker has answered at least once."""
        return self._last_heard is not None

    def waiting_for(self) -> str:
        """What keeps the producer from sending, for a person; empty if nothing does."""
        if self._last_heard is None or self.silent_s > 5:
            return "an answer of the broker"
        if not self.held:
            return "a lease: other producers hold every partition, or all have ended"
        if all(held.ended_known for held in self.held.values()):
            return "the trainers to read it: everything is delivered, and would be sent again if they begin again"
        if all(held.ended for held in self.held.values()):
            return "the other producers: everything leased here is sent"
        if all(held.chunk is not None or held.ended for held in self.held.values()):
            return (
                "credit: the broker holds all it may until trainers, other streams or its log move on: see its status"
            )
        return ""

    # Events

    def _tick(self, now: float) -> list[Effect]:
        self._now = now
        effects: list[Effect] = []
        if not self.held and now - self._last_hello >= HELLO_S:
            effects.append(self._hello())
        if now - self._last_ping >= PING_S:
            self._last_ping = now
            effects.append(self._send(ProducerPing(producer=self.producer)))
            effects += [e for held in self.held.values() for e in self._remind(held)]
        return effects

    def _receive(self, envelope: Envelope) -> list[Effect]:
        self.run = self.run or envelope.run
        if envelope.run != self.run or envelope.epoch < self.epoch:
            return []
        self._last_heard = self._now
        effects: list[Effect] = []
        if envelope.epoch > self.epoch:
            effects += [Forget(key, held.session) for key, held in self.held.items()]
            known, self.epoch = self.epoch, envelope.epoch
            self.held.clear()
            if known:
                effects += [Report("info", "the broker was restarted"), self._hello()]
        message, fence = envelope.message, envelope.fence
        if isinstance(message, Lease):
            effects += self._lease(message, fence)
        elif isinstance(message, Flow):
            effects += self._flow(message, fence)
        elif isinstance(message, Revoke):
            effects += self._revoke((message.stream, message.partition), fence)
        elif isinstance(message, Who):
            effects += [self._hello()] if self._now - self._last_hello >= HELLO_S / 2 else []
        elif isinstance(message, (Reject, Done, Bye)):
            effects += self._over(message)
        return effects

    def _lease(self, lease: Lease, number: int) -> list[Effect]:
        key = (lease.stream, lease.partition)
        known, session = self.held.get(key), (self.epoch, number)
        if self._last_session.get(key, (0, 0)) >= session:
            return []
        self._last_session[key] = session
        effects: list[Effect] = [Forget(key, known.session)] if known is not None else []
        held = self.held[key] = _Held(lease, session, lease.first_seq, known_seq=lease.first_seq)
        return effects + self._move(held)

    def _flow(self, flow: Flow, number: int) -> list[Effect]:
        held, session = self.held.get((flow.stream, flow.partition)), (self.epoch, number)
        if held is None or held.session != session:
            newer = held is None or held.session < session
            return [self._hello()] if newer and self._now - self._last_hello >= HELLO_S / 2 else []
        held.grant_seq = max(held.grant_seq, flow.grant_seq)
        held.grant_bytes = max(held.grant_bytes, flow.grant_bytes)
        held.known_seq = max(held.known_seq, flow.expected_seq)
        held.ended_known = held.ended_known or flow.ended
        if flow.ended and not held.ended:  # the feed ends before the stream does
            held.ended, held.chunk = True, None
            return [Forget((flow.stream, flow.partition), session)]
        return self._move(held)

    def _revoke(self, key: Key, number: int) -> list[Effect]:
        held, session = self.held.get(key), (self.epoch, number)
        if held is None or held.session != session:
            return []
        del self.held[key]
        return [Forget(key, session)]

    def _over(self, message: Reject | Done | Bye) -> list[Effect]:
        self._finished = True
        if isinstance(message, Reject):
            return [Finish(message.detail, message.code)]
        goodbye = self._send(Bye(reason="goodbye"))  # the broker waits for it
        if isinstance(message, Bye):
            return [Report("info", message.reason), goodbye, Finish("", "stopped")]
        return [goodbye, Finish("", "done")]

    def _chunk(self, chunk: Chunk) -> list[Effect]:
        held = self.held.get(chunk.key)
        if held is None or held.session != chunk.session or held.ended:
            return []
        held.reading = False
        held.chunk = chunk
        return self._move(held)

    def _end(self, event: EndOfPartition) -> list[Effect]:
        held = self.held.get(event.key)
        if held is None or held.session != event.session or held.ended:
            return []
        held.reading = False
        held.ended = True
        return [self._eos(held)]

    # Moving on

    def _move(self, held: _Held) -> list[Effect]:
        """Send the chunk held if the credits allow it, and read the next."""
        effects: list[Effect] = []
        chunk = held.chunk
        if chunk is not None:
            stop = held.next_seq + chunk.num_samples
            if stop > held.grant_seq or held.sent_bytes + chunk.num_bytes > held.grant_bytes:
                return []
            samples = Samples(
                stream=chunk.key[0], partition=chunk.key[1], base_seq=held.next_seq, lengths_u32=chunk.lengths_u32,
                crcs_u32=chunk.crcs_u32, loss_tokens_u32=chunk.loss_tokens_u32, cursor=chunk.cursor,
                rejected=chunk.rejected, lost_tokens=chunk.lost_tokens, pass_ended=chunk.pass_ended,
            )  # fmt: skip
            effects.append(self._send(samples, held.session, chunk.payload))
            held.next_seq = stop
            held.sent_bytes += chunk.num_bytes
            held.chunk = None
        if not held.reading and not held.ended:
            held.reading = True
            effects.append(Read(held.lease, held.session, held.next_seq))
        return effects

    def _remind(self, held: _Held) -> list[Effect]:
        """Say again what the broker seems not to know: the end, or that all of this was sent."""
        if held.ended:
            return [] if held.ended_known else [self._eos(held)]
        still, held.still_seq = held.still_seq == held.next_seq, held.next_seq
        if not still or held.next_seq <= held.known_seq:
            return []
        stream, partition = held.lease.stream, held.lease.partition
        return [self._send(Sent(stream=stream, partition=partition, next_seq=held.next_seq), held.session)]

    def _eos(self, held: _Held) -> Effect:
        eos = Eos(stream=held.lease.stream, partition=held.lease.partition, total=held.next_seq)
        return self._send(eos, held.session)

    def _hello(self) -> Effect:
        self._last_hello = self._now
        return self._send(Hello(producer=self.producer, host=self.host, pid=self.pid, offers=self.offers))

    def _send(self, message: Message, session: Session = (0, 0), payload: tuple[object, ...] = ()) -> Send:
        envelope = Envelope(run=self.run, epoch=self.epoch, fence=session[1], message=message, payload=payload)
        return Send(envelope)
