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

from streampack.core.protocol.events import Effect, Event, Report
from streampack.core.protocol.message import Bye, Message, Reject, Who
from streampack.core.protocol.producer_messages import Done, Eos, Flow, Lease, Offer, Revoke, Samples, Sent
from streampack.core.sessions.producer_base import Chunk, Finish, Key, Sender, Session, Window


class EndOfPartition(Event, frozen=True):
    """The source has no more for ``Read``."""

    key: Key
    session: Session


class Read(Effect, frozen=True):
    """Read the next chunk of a lease: answer with ``Chunk`` or ``EndOfPartition``."""

    lease: Lease
    session: Session
    seq: int


class Forget(Effect, frozen=True):
    """The lease is over: close its reader."""

    key: Key
    session: Session


class _Held(Struct):
    lease: Lease
    session: Session
    next_seq: int
    window: Window
    reading: bool = False
    chunk: Chunk | None = None
    ended: bool = False
    ended_known: bool = False


@dataclass(slots=True, kw_only=True)
class ProducerSession(Sender):
    """State of one producer process; ``offers`` are the streams it can read."""

    offers: list[Offer]
    held: dict[Key, _Held] = field(default_factory=dict)
    _last_session: dict[Key, Session] = field(default_factory=dict)

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

    @property
    def _offered(self) -> list[Offer]:
        return self.offers

    @property
    def _has_lease(self) -> bool:
        return bool(self.held)

    def _given(self, event: Event) -> list[Effect]:
        if isinstance(event, Chunk):
            return self._chunk(event)
        return self._end(event) if isinstance(event, EndOfPartition) else []

    def _forget_sessions(self) -> list[Effect]:
        forgotten: list[Effect] = [Forget(key, held.session) for key, held in self.held.items()]
        self.held.clear()
        return forgotten

    def _remind_all(self) -> list[Effect]:
        return [e for held in self.held.values() for e in self._remind(held)]

    def _heard(self, message: Message, fence: int) -> list[Effect]:
        if isinstance(message, Lease):
            return self._lease(message, fence)
        if isinstance(message, Flow):
            return self._flow(message, fence)
        if isinstance(message, Revoke):
            return self._revoke((message.stream, message.partition), fence)
        if isinstance(message, Who):
            return self._hello_again()
        return self._over(message) if isinstance(message, Reject | Done | Bye) else []

    def _lease(self, lease: Lease, number: int) -> list[Effect]:
        key = (lease.stream, lease.partition)
        known, session = self.held.get(key), (self.epoch, number)
        if self._last_session.get(key, (0, 0)) >= session:
            return []
        self._last_session[key] = session
        effects: list[Effect] = [Forget(key, known.session)] if known is not None else []
        held = self.held[key] = _Held(lease, session, lease.first_seq, Window(lease.first_seq))
        return effects + self._move(held)

    def _flow(self, flow: Flow, number: int) -> list[Effect]:
        held, session = self.held.get((flow.stream, flow.partition)), (self.epoch, number)
        if held is None or held.session != session:
            return self._hello_again() if held is None or held.session < session else []
        held.window.widen(flow)
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
            if not held.window.allows(stop, chunk.num_bytes):
                return []
            samples = Samples(
                stream=chunk.key[0], partition=chunk.key[1], base_seq=held.next_seq, lengths_u32=chunk.lengths_u32,
                crcs_u32=chunk.crcs_u32, loss_tokens_u32=chunk.loss_tokens_u32, cursor=chunk.cursor,
                rejected=chunk.rejected, lost_tokens=chunk.lost_tokens, pass_ended=chunk.pass_ended,
            )  # fmt: skip
            effects.append(self._send(samples, held.session, chunk))
            held.next_seq = stop
            held.window.sent_bytes += chunk.num_bytes
            held.chunk = None
        if not held.reading and not held.ended:
            held.reading = True
            effects.append(Read(held.lease, held.session, held.next_seq))
        return effects

    def _remind(self, held: _Held) -> list[Effect]:
        """Say again what the broker seems not to know: the end, or that all of this was sent."""
        if held.ended:
            return [] if held.ended_known else [self._eos(held)]
        if not held.window.seems_lost(held.next_seq):
            return []
        stream, partition = held.lease.stream, held.lease.partition
        return [self._send(Sent(stream=stream, partition=partition, next_seq=held.next_seq), held.session)]

    def _eos(self, held: _Held) -> Effect:
        eos = Eos(stream=held.lease.stream, partition=held.lease.partition, total=held.next_seq)
        return self._send(eos, held.session)
