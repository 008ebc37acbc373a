"""A producer's side of the protocol, as a pure state machine: ``handle(event) -> effects``.

The broker leases partitions, and a lease gives the sample to begin with. The session asks its shell to read from that
sample on (``Read``). It holds at most one chunk of a partition until credit allows it, and sends the chunk once. It
never sends a chunk again. If one is lost, the broker begins a new session at the gap, and the shell reads the samples
again. A gap shows when the next chunk arrives; if none follows, the session tells the broker how far it has sent
(``Sent``).

Each lease is in a ``LeasePhase``; ``LEASE_PHASES`` has the phases that may follow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from streampack.core.columns.chunk_body import chunk_as
from streampack.core.model.phases import Phases
from streampack.core.protocol.events import Effect, Event, Report
from streampack.core.protocol.handlers import Handlers
from streampack.core.protocol.message import Bye
from streampack.core.protocol.producer_messages import Done, Eos, Flow, Lease, Offer, Revoke, Samples, Sent
from streampack.core.sessions.producer_base import (
    SILENT_TEXT,
    Chunk,
    PartitionKey,
    Sender,
    SendWindow,
    Session,
)


class EndOfPartition(Event, frozen=True):
    """The answer to ``Read`` at the end of the partition: there is no further chunk."""

    key: PartitionKey
    session: Session


class Read(Effect, frozen=True):
    """Read the next chunk of a lease, from sample ``seq`` on; answer with ``Chunk`` or ``EndOfPartition``."""

    lease: Lease
    session: Session
    seq: int


class ReadFirst(Effect, frozen=True):
    """Read the next chunk of a lease before those of other leases, because the broker's merge waits for it."""

    key: PartitionKey
    session: Session


class Forget(Effect, frozen=True):
    """Close the reader of a lease, which is over."""

    key: PartitionKey
    session: Session


class LeasePhase(Enum):
    """The phases of a lease. In phases that are ``ended``, nothing is read any more, and only the end is sent."""

    READING = ("the producer is reading the next chunk", False)
    HOLDING = ("the next chunk waits for credit", False)
    ENDED = ("all samples are sent, but the broker has not confirmed the end", True)
    SETTLED = ("the broker wants no more samples of the partition", True)
    OVER = ("the broker began another session or gave the lease to another producer", True)

    def __init__(self, text: str, ended: bool) -> None:
        self.text, self.ended = text, ended


_CLOSED = frozenset({LeasePhase.SETTLED, LeasePhase.OVER})
LEASE_PHASES = {
    LeasePhase.READING: _CLOSED | {LeasePhase.HOLDING, LeasePhase.ENDED},
    LeasePhase.HOLDING: _CLOSED | {LeasePhase.READING},
    LeasePhase.ENDED: _CLOSED,
    LeasePhase.SETTLED: frozenset({LeasePhase.OVER}),
    LeasePhase.OVER: frozenset[LeasePhase](),
}
"""The phases that may follow each. A lease passes through ``HOLDING`` even if credit allows the chunk at once."""


@dataclass(slots=True)
class HeldLease:
    """A leased partition, and the progress of reading and sending its samples.

    Attributes:
        lease: The broker's terms.
        session: The session that the lease has begun.
        next_seq: Number of the next sample to send.
        window: Credit of the session.
        chunk: The chunk that waits for credit.
        phases: The phase of the lease, and those before.
    """

    lease: Lease
    session: Session
    next_seq: int
    window: SendWindow
    chunk: Chunk | None = None
    phases: Phases[LeasePhase] = field(init=False)

    def __post_init__(self) -> None:
        who = f"the lease of stream {self.lease.stream!r} partition {self.lease.partition}"
        self.phases = Phases(who, LEASE_PHASES, LeasePhase.READING)

    @property
    def ended(self) -> bool:
        """True if nothing is read any more, and only the end is sent."""
        return self.phases.now.ended

    def close(self, to: LeasePhase) -> None:
        """Drop the chunk that waits, and enter the phase ``to``."""
        self.chunk = None
        self.phases.go(to)


@dataclass(slots=True, kw_only=True)
class ProducerSession(Sender):
    """State of one process that reads samples; ``offers`` are the streams that it can read."""

    offers: list[Offer]
    held: dict[PartitionKey, HeldLease] = field(default_factory=dict)
    _last_session: dict[PartitionKey, Session] = field(default_factory=dict)
    """The newest session of each partition so far."""

    def waiting_for(self) -> str:
        """Return a text that names the cause of the producer's wait; empty if the producer sends."""
        if not self.reached or (self.held and self.is_silent):
            return SILENT_TEXT
        if not self.held:
            silent = ", or the broker does not answer" if self.is_silent else ""  # it answers no ping without a lease
            return f"a lease, because other producers hold every partition or all partitions have ended{silent}"
        phases = {held_lease.phases.now for held_lease in self.held.values()}
        if phases == {LeasePhase.SETTLED}:
            return "the trainers, which may still need samples again although all samples are delivered"
        if all(phase.ended for phase in phases):
            return "the other producers, because this producer has sent all its samples"
        if LeasePhase.READING not in phases:
            return (
                "credit, because the broker is full until the trainers, other streams or its log progress. The "
                "broker's status shows the cause"
            )
        return ""

    # Events

    @property
    def _offered(self) -> list[Offer]:
        """Streams that the hello offers."""
        return self.offers

    @property
    def _has_lease(self) -> bool:
        """True if the producer holds a lease."""
        return bool(self.held)

    _events = Handlers(Sender._events)

    def _forget_sessions(self) -> list[Effect]:
        """Drop the leases of the previous broker, and close their readers."""
        effects = [self._close_lease(key, held_lease) for key, held_lease in self.held.items()]
        self.held.clear()
        return effects

    def _close_lease(self, key: PartitionKey, held_lease: HeldLease) -> Effect:
        """End a lease, and return the effect that closes its reader."""
        held_lease.close(LeasePhase.OVER)
        return Forget(key, held_lease.session)

    def _repeat_unconfirmed(self) -> list[Effect]:
        """Repeat messages about each lease that the broker may have missed."""
        return [e for held_lease in self.held.values() for e in self._repeat_end_or_sent(held_lease)]

    _messages = Handlers(Sender._messages)

    @_messages.of(Lease)
    def _on_lease(self, lease: Lease, number: int) -> list[Effect]:
        """Begin session ``number`` of a partition, and read its first chunk."""
        key = (lease.stream, lease.partition)
        session = (self.epoch, number)
        if self._last_session.get(key, (0, 0)) >= session:
            return []
        self._last_session[key] = session
        old_lease = self.held.get(key)
        effects = [self._close_lease(key, old_lease)] if old_lease is not None else []
        self.held[key] = HeldLease(lease, session, lease.first_seq, SendWindow(lease.first_seq))
        return [*effects, Read(lease, session, lease.first_seq)]

    @_messages.of(Flow)
    def _on_flow(self, flow: Flow, number: int) -> list[Effect]:
        """Take the credit of session ``number``, and send the chunk that waits; settle the lease if all is received."""
        held_lease, session = self.held.get((flow.stream, flow.partition)), (self.epoch, number)
        if held_lease is None or held_lease.session != session:
            return self._hello_if_due() if held_lease is None or held_lease.session < session else []
        held_lease.window.widen(flow)
        if not flow.ended:
            sent = self._send_held(held_lease)
            return [ReadFirst((flow.stream, flow.partition), session)] if flow.wanted is True and not sent else sent
        early = not held_lease.ended  # the feed ends before the stream does
        if held_lease.phases.now is not LeasePhase.SETTLED:
            held_lease.close(LeasePhase.SETTLED)
        return [Forget((flow.stream, flow.partition), session)] if early else []

    @_messages.of(Revoke)
    def _on_revoke(self, message: Revoke, number: int) -> list[Effect]:
        """Give up a lease, if ``number`` is the number of its session."""
        key = message.stream, message.partition
        held_lease, session = self.held.get(key), (self.epoch, number)
        if held_lease is None or held_lease.session != session:
            return []
        del self.held[key]
        return [self._close_lease(key, held_lease)]

    @_messages.of(Bye)
    def _on_bye(self, message: Bye, number: int) -> list[Effect]:
        """End the session, because the broker stops; it waits for the answer."""
        goodbye = self._send(Bye(reason="goodbye"))
        return [Report("info", message.reason), goodbye, *self._end_session("", "stopped")]

    @_messages.of(Done)
    def _on_done(self, message: Done, number: int) -> list[Effect]:
        """End the session, because the broker needs no more samples; it waits for the answer."""
        return [self._send(Bye(reason="goodbye")), *self._end_session("", "done")]

    @_events.of(Chunk)
    def _hold_chunk(self, chunk: Chunk) -> list[Effect]:
        """Take a chunk that was read for a lease, and send it if credit allows."""
        held_lease = self.held.get(chunk.key)
        if held_lease is None or held_lease.session != chunk.session or held_lease.ended:
            return []
        held_lease.phases.go(LeasePhase.HOLDING)
        held_lease.chunk = chunk
        return self._send_held(held_lease)

    @_events.of(EndOfPartition)
    def _end_partition(self, event: EndOfPartition) -> list[Effect]:
        """Tell the broker that a leased partition has ended."""
        held_lease = self.held.get(event.key)
        if held_lease is None or held_lease.session != event.session or held_lease.ended:
            return []
        held_lease.phases.go(LeasePhase.ENDED)
        return [self._end_message(held_lease)]

    # Sending

    def _send_held(self, held_lease: HeldLease) -> list[Effect]:
        """Send the chunk that waits, if credit allows it, and read the next."""
        chunk = held_lease.chunk
        if chunk is None:
            return []
        stop = held_lease.next_seq + chunk.num_samples
        if not held_lease.window.allows(stop, chunk.num_bytes):
            return []
        samples = chunk_as(Samples, chunk, base_seq=held_lease.next_seq)
        held_lease.next_seq = stop
        held_lease.window.sent_bytes += chunk.num_bytes
        held_lease.chunk = None
        held_lease.phases.go(LeasePhase.READING)
        return [self._send(samples, held_lease.session, chunk), Read(held_lease.lease, held_lease.session, stop)]

    def _repeat_end_or_sent(self, held_lease: HeldLease) -> list[Effect]:
        """Repeat the end of a lease until it is confirmed, or report how far samples were sent if some seem lost."""
        if held_lease.ended:
            return [self._end_message(held_lease)] if held_lease.phases.now is LeasePhase.ENDED else []
        if not held_lease.window.seems_lost(held_lease.next_seq):
            return []
        stream, partition = held_lease.lease.stream, held_lease.lease.partition
        return [self._send(Sent(stream=stream, partition=partition, next_seq=held_lease.next_seq), held_lease.session)]

    def _end_message(self, held_lease: HeldLease) -> Effect:
        """Return the effect that tells the broker the end of a leased partition."""
        eos = Eos(stream=held_lease.lease.stream, partition=held_lease.lease.partition, total=held_lease.next_seq)
        return self._send(eos, held_lease.session)
