"""Messages of peers: decoded to events for the core in fair turns, and the core's answers with shards of the arena."""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from streampack.core.broker import Broker
from streampack.core.layout.step_frames import INPUT_IDS
from streampack.core.protocol.effects import FromProducer, FromTrainer, NotSent, SendProducer, SendShard, SendTrainer
from streampack.core.protocol.events import Event
from streampack.core.protocol.message import Envelope, Reject
from streampack.core.protocol.relay_messages import relay_of, relayed
from streampack.core.protocol.result_messages import AskResults
from streampack.core.protocol.trainer_messages import AskMixture, AskState
from streampack.errors import WireError
from streampack.transport.sockets import drain
from streampack.transport.unread import ANSWERS_WAIT, MESSAGES_WAIT
from streampack.version import __version__
from streampack.wire import bundles
from streampack.wire import frames as wire
from streampack_services.broker.arena import Arena
from streampack_services.broker.report_limit import ReportLimit
from streampack_services.broker.reporter import Counters
from streampack_services.broker.serving.allowed_keys import Allowed
from streampack_services.broker.serving.peer_reports import PeerReports
from streampack_services.broker.serving.peer_sockets import PeerSide, PeerSockets
from streampack_services.broker.turns import Turns

log = logging.getLogger("streampack.broker")

SAY_S = 5.0
"""Time between two log lines about messages that cannot be decoded, in seconds."""
DRAIN_AT_MOST = 4096
"""Most messages that are read from one socket in a turn."""
WAITING_BYTES = 8 << 20
"""Most bytes of a key's messages that wait to be handled, beside the credit of producers and a snapshot."""
ALL_WAITING_BYTES = 32 << 20
"""Bytes of messages that wait, of all keys, beyond which each key has an equal share of them, beside these credits."""
READ_S = HANDLE_S = 0.02
"""Seconds in a turn for which messages are handled as they come, lined up from each socket, and handled in order."""


class MessageReader:
    """Reads the messages of all peers; where more come than the broker handles at once, they line up in ``turns``."""

    def __init__(
        self, sockets: PeerSockets, turns: Turns, core: Broker, allowed: Allowed | None, reports: PeerReports,
        counters: Counters,
    ) -> None:  # fmt: skip
        self._sockets, self._turns, self._core = sockets, turns, core
        self._allowed, self._reports, self._counters = allowed, reports, counters
        self._say_damaged_at = 0.0
        self._version_answers = ReportLimit()

    def events(self) -> Iterator[FromProducer | FromTrainer]:
        """Yield messages that have come. The time that the caller takes for each is counted for its connection.

        For ``HANDLE_S`` the messages come in the order of the sockets, and later ones line up. Then the messages in
        line come in the order of ``Turns``, for ``HANDLE_S``.
        """
        began = now = time.perf_counter()
        for side in (self._sockets.trainers, self._sockets.producers):
            until = max(now, began + HANDLE_S) + READ_S
            for frames in drain(side.router, DRAIN_AT_MOST):
                if self._turns.waiting or now > began + HANDLE_S:
                    self._line_up(side, frames)
                else:
                    yield from self._decoded(side, frames)
                if (now := time.perf_counter()) > until:
                    break
            for cut in side.router.take_cuts():
                self._turns.drop(cut.peer)
                self._reports.on_cut(cut)
        began = now = time.perf_counter()
        while self._turns.waiting and now - began < HANDLE_S:
            if (message := self._turns.take()) is not None:
                yield from self._decoded(*message)
            before, now = now, time.perf_counter()
            self._turns.give(now - before)

    def _line_up(self, side: PeerSide, frames: list[Any]) -> None:
        """Put a message into the line of its connection, unless too much of its key waits."""
        peer, num_bytes = frames[0].bytes, sum([memoryview(frame).nbytes for frame in frames])
        message = side, frames
        if self._turns.put(peer, message, num_bytes, WAITING_BYTES, ALL_WAITING_BYTES):
            return
        credit = side.credit(peer)
        if not credit or not self._turns.put(peer, message, num_bytes, WAITING_BYTES + credit):
            side.router.note_dropped(peer, bundles.num_messages(frames[1:]), MESSAGES_WAIT)

    def _decoded(self, side: PeerSide, frames: list[Any]) -> Iterator[FromProducer | FromTrainer]:
        """Yield a message as an event, a bundle as several; count a message that cannot be decoded."""
        peer = frames[0].bytes
        try:
            if side.event is FromTrainer and bundles.is_bundle(frames[1:]):
                received = [(relayed(peer, name), envelope) for name, envelope in bundles.decode_bundle(frames[1:])]
            else:
                received = [(peer, wire.decode(frames[1:]))]
        except WireError as error:
            self._on_damaged(side, peer, error)
            return
        rights = self._allowed.rights(peer) if self._allowed is not None else None
        self._reports.speaking = peer
        for address, envelope in received:
            if isinstance(envelope.message, AskResults | AskState | AskMixture) and not side.router.takes_answers(peer):
                side.router.note_dropped(peer, 1, ANSWERS_WAIT)  # the answer takes long to make, and would be dropped
            else:
                yield side.event(address, envelope, rights)
        self._reports.speaking = b""

    def _on_damaged(self, side: PeerSide, peer: bytes, error: WireError) -> None:
        """Count and log a message that cannot be decoded; reject a peer of another protocol version."""
        self._counters.damaged += 1
        side.router.note_damaged(peer)
        now = time.monotonic()
        if now >= self._say_damaged_at:  # anyone who reaches the port may send many
            self._say_damaged_at = now + SAY_S
            key_text = "" if self._allowed is None else f" of key {self._allowed.name(peer)!r}"
            log.warning(
                "dropped a message%s that cannot be decoded (%d so far): %s", key_text, self._counters.damaged, error
            )
        if isinstance(error, wire.OtherVersion) and self._version_answers.allows(now):
            detail = (
                f"this process uses protocol version {error.version}, but the broker (streampack {__version__}) uses "
                f"version {wire.VERSION}. Install the same version of streampack everywhere"
            )
            reject = Reject(code="version", detail=detail)
            answer = Envelope(run=self._core.run, epoch=self._core.epoch, fence=0, message=reject)
            self._counters.unsent += not side.router.send(peer, wire.encode(answer, error.version))


class MessageSender:
    """Sends messages; counts those that could not be sent, and appends events about them to ``events``."""

    def __init__(self, sockets: PeerSockets, arena: Arena, counters: Counters, events: deque[Event]) -> None:
        self._producers, self._trainers = sockets.producers.router, sockets.trainers.router
        self._arena, self._counters, self._events = arena, counters, events
        self._bundled: dict[bytes, list[tuple[str, Envelope]]] = {}
        """Messages for the readers of each relay, which are sent together at the end of a turn."""

    def send_to_producer(self, effect: SendProducer) -> None:
        """Send a message to a producer."""
        self._counters.unsent += not self._producers.send(effect.peer, wire.encode(effect.envelope))

    def send_shard(self, effect: SendShard) -> None:
        """Copy the shards of a message out of the arena and send them."""
        room = functools.partial(self._trainers.room, effect.peer)
        payload = self._arena.gather(effect.contents, effect.frames, effect.cp, effect.cp_ranks, effect.layout, room)
        if INPUT_IDS in effect.frames:
            self._counters.sent_tokens += payload[0].size
        self._send(effect.peer, msgspec.structs.replace(effect.envelope, payload=payload))

    def send_to_trainer(self, effect: SendTrainer) -> None:
        """Send a message to a trainer."""
        self._send(effect.peer, effect.envelope)

    def _send(self, peer: bytes, envelope: Envelope) -> None:
        """Send a message to a trainer; tell the core if it cannot be sent. Readers of a relay get theirs together."""
        if (at := relay_of(peer)) is not None:
            self._bundled.setdefault(at[0], []).append((at[1], envelope))
            return
        if peer in self._bundled:  # connections keep the order of messages
            self._send_bundles_to(peer)
        if not self._trainers.send(peer, wire.encode(envelope)):
            self._counters.unsent += 1
            self._events.append(NotSent(peer, msgspec.structs.replace(envelope, payload=())))

    def send_bundles(self) -> None:
        """Send the messages that wait for the readers of relays."""
        for relay in list(self._bundled):
            self._send_bundles_to(relay)

    def _send_bundles_to(self, relay: bytes) -> None:
        """Send the messages that wait for the readers of a relay. A lost one does no harm: peers repeat themselves."""
        for frames in bundles.encode_bundles(self._bundled.pop(relay)):
            self._counters.unsent += not self._trainers.send(relay, frames)
