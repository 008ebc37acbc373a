"""The connections of one feed that receive parts of steps, and the bytes on their way.

A reader is its own receiver, or its relay is one for all readers of its host. ``deal.part_flow`` bounds the bytes on
their way.
"""

from __future__ import annotations

from typing import NamedTuple

from streampack.core.deal.part_flow import RESEND_S, PartFlows
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.relay_messages import relay_of
from streampack.core.protocol.step_part import StepPart
from streampack.core.serve.rank_reader import Reader, Receiver
from streampack.core.serve.rank_registry import RankRegistry

MOST_QUEUED = 8 << 20
"""Most bytes in flight to one reader: later messages wait behind them, for 8 s on a link of 1 MB/s."""
LOST_S = 3600.0
"""Seconds for which a relay that has gone without a goodbye is remembered."""


class RelayProgress(NamedTuple):
    """A relay: the host of its ranks, their number in the attempt, and the bytes in flight to it.

    ``lost`` is True if the relay has gone without a goodbye.
    """

    host: str
    ranks: int
    queued_bytes: int
    lost: bool


class Receivers:
    """The connections that receive parts.

    Attributes:
        flows: The limits of the bytes on their way.
        relays: The relays, by the name of their connection.
        starving: Receivers that have reported that a reader has no step to read.
        held_back: Receivers that get no part until others confirm theirs, the oldest first.
    """

    def __init__(self, registry: RankRegistry, leaving_bytes: int) -> None:
        self._registry = registry
        self.flows = PartFlows(leaving_bytes)
        self.relays: dict[bytes, Receiver] = {}
        self.starving: dict[Receiver, None] = {}
        self.held_back: dict[Receiver, None] = {}
        self._lost_relays: dict[str, float] = {}
        """Hosts whose relay has gone without a goodbye, and when, in seconds."""

    @property
    def entered(self) -> list[Receiver]:
        """The connections that receive the parts of the attempt, each once."""
        return list({reader.receiver: None for reader in self._registry if reader.entered})

    def most_queued(self, receiver: Receiver) -> int:
        """Return the most bytes that may be in flight to one reader, or to one relay."""
        share = self.flows.leaving_bytes // max(self._registry.num_ranks, 1)
        return min(MOST_QUEUED, share * max(len(receiver.readers), 1))

    def receiver_of(self, peer: bytes, host: str) -> Receiver:
        """Return the receiver of a reader on ``host`` whose connection is ``peer``: a new one, or its relay."""
        at = relay_of(peer)
        if at is None:
            return Receiver(peer)
        relay = self.relays.setdefault(at[0], Receiver(at[0], is_relay=True, heard=self._registry.now))
        relay.host = relay.host or host
        self._lost_relays.pop(relay.host, None)
        return relay

    def enter(self, reader: Reader, step: int) -> None:
        """Send the steps from ``step`` on to the receiver of a reader that takes part in the attempt.

        A relay that had readers in this attempt asks for the parts of a further reader by itself, where it lacks some.
        """
        receiver = reader.receiver
        if receiver.is_relay and receiver.fence == reader.fence:
            receiver.flow.resent_at = -RESEND_S
        else:
            self.flows.begin(receiver.flow, step)
            receiver.readers.clear()
            receiver.node = None
        receiver.fence = reader.fence
        receiver.readers[reader.name] = reader
        self._lost_relays.pop(receiver.host, None)

    def move(self, reader: Reader, step: int, host: str) -> None:
        """Send to a reader over its new connection; the parts in flight to the old one are lost.

        ``step`` is the first step that the reader's trainer is not done with.
        """
        before, at = reader.receiver, relay_of(reader.peer)
        if at is None and not before.is_relay:
            before.peer = reader.peer
            self.flows.forget_queue(before.flow)
            before.flow.resent_at = -RESEND_S
            return
        self.leave(reader)
        self.note_lost(before)
        reader.receiver = self.receiver_of(reader.peer, host)
        if reader.entered:
            self.enter(reader, step)

    def leave(self, reader: Reader) -> None:
        """Send no more parts to a reader's connection, unless it is a relay with other readers."""
        receiver = reader.receiver
        receiver.readers.pop(reader.name, None)
        if not receiver.readers:
            self._stop_sending(receiver)

    def _stop_sending(self, receiver: Receiver) -> None:
        """Forget what a receiver waits for, and the parts that are on their way to it."""
        self.starving.pop(receiver, None)
        self.held_back.pop(receiver, None)
        self.flows.forget_queue(receiver.flow)

    def not_sent(self, peer: bytes, envelope: Envelope) -> None:
        """Record that a message for ``peer`` was dropped before it left; the part is sent again at the next message."""
        reader, message = self._registry.at(peer), envelope.message
        receiver = reader.receiver if reader is not None else self.relays.get(peer)
        if receiver is not None and isinstance(message, StepPart) and envelope.fence == receiver.fence:
            self.flows.not_sent(receiver.flow, (message.step, message.part), message.request)

    # Relays

    def note_lost(self, receiver: Receiver) -> None:
        """Record that a relay has lost its last reader, which has moved or fallen silent, without a goodbye."""
        if receiver.is_relay and receiver.peer in self.relays and not receiver.readers:
            self._lost_relays.setdefault(receiver.host, self._registry.now)

    def leave_relay(self, peer: bytes) -> None:
        """Handle the goodbye of a relay: send no more parts to it. Its readers attach again by themselves."""
        if (relay := self.relays.pop(peer, None)) is not None:
            self._lost_relays.pop(relay.host, None)
            relay.node = None
            self._stop_sending(relay)

    def forget_relays(self, silent_s: float) -> None:
        """Forget the relays that were silent for ``silent_s`` seconds and for which no reader is registered."""
        used = {reader.receiver for reader in self._registry}
        now = self._registry.now
        self.relays = {
            peer: relay for peer, relay in self.relays.items() if relay in used or now - relay.heard <= silent_s
        }
        self._lost_relays = {host: since for host, since in self._lost_relays.items() if now - since < LOST_S}

    def relay_stats(self) -> list[RelayProgress]:
        """Return the relays that are connected, and those that were lost in the last hour."""
        lost = self._lost_relays
        connected = [
            RelayProgress(relay.host, len(relay.readers), relay.flow.queued_bytes, False)
            for relay in self.relays.values()
            if relay.host not in lost
        ]
        return connected + [RelayProgress(host, 0, 0, True) for host in lost]
