"""A relay's side of the protocol, as a pure state machine: ``handle(event) -> effects``.

A relay is one reader to the broker and a broker to the readers of its host. Towards the broker it behaves as a client
(``client_session``), for all its readers at once. It sends one request and one ping, and asks for parts again only if
it can prove a loss. Towards readers it behaves as the broker's step sender: it sends the parts that they request, and
bounds the bytes on their way (``deal.part_flow``).

It decides nothing about ranks, attempts or checkpoints. Messages about these pass unchanged between the reader and the
broker, under the reader's name. ``done_upto`` of a reader is always what the reader returned, never what the relay has.
"""

from __future__ import annotations

import msgspec

from streampack.core.protocol.events import Effect, Event, FromBroker, Report, Tick, Unsent
from streampack.core.protocol.handlers import Handlers
from streampack.core.protocol.message import Bye, Envelope, FeedMessage, Message, Reject, Who
from streampack.core.protocol.relay_messages import Elsewhere, NodeGet, NodePing
from streampack.core.protocol.step_part import StepPart
from streampack.core.protocol.trainer_messages import (
    AskState,
    Attach,
    Attached,
    Fenced,
    Get,
    Probe,
    ReaderPing,
    State,
    Wait,
)
from streampack.core.sessions.relaying.local_readers import LocalReader
from streampack.core.sessions.relaying.node_feed import RETRY_S
from streampack.core.sessions.relaying.relay_deliveries import RelayDeliveries
from streampack.core.sessions.relaying.relay_events import (
    ForReaders,
    FromReader,
    Moved,
    NotDelivered,
    SendFor,
    SendReader,
    Stop,
)
from streampack.core.sessions.relaying.relay_requests import LOCAL_PING_S, RelayRequests
from streampack.core.sessions.relaying.relay_state import RelayState

SILENT_S = 15.0
"""Seconds without a message after which a relay does not speak for a reader any more."""
_TICK_S = 1.0
"""Most seconds that one tick adds to the broker's silence: more means that the process was stopped."""


class RelaySession:
    """The session of one relay.

    Args:
        name: Name of the relay, which spreads its retries.
        memory_bytes: Most bytes of parts that the relay keeps. A step for its host must fit.

    Attributes:
        relay: The newest broker, the readers of the host, and their feeds.
    """

    def __init__(self, name: str, memory_bytes: int = 1 << 30) -> None:
        self.relay = RelayState(name, memory_bytes)
        self.readers, self.feeds = self.relay.readers, self.relay.feeds
        self.stopped = False
        self._requests = RelayRequests(self.relay)
        self._deliveries = RelayDeliveries(self.relay, self._requests)
        self._not_allowed: set[bytes] = set()
        """Connections of readers for which the relay's key does not allow it to read."""
        self._states: dict[tuple[str, int], tuple[float, set[str]]] = {}
        """(time of the last request, names of the readers that wait) of each requested state, by feed and step."""
        self._ask_at = 0.0

    @property
    def epoch(self) -> int:
        """Epoch of the newest broker; 0 before the first."""
        return self.relay.epoch

    def handle(self, event: Event) -> list[Effect]:
        """Return the effects of an event, for the shell to perform in order."""
        return [] if self.stopped else self._events[type(event)](self, event)

    _events = Handlers[[], list[Effect]]()

    @_events.of(NotDelivered)
    def _on_not_delivered(self, event: NotDelivered) -> list[Effect]:
        """Note that a part did not reach its reader."""
        reader, part = self.readers.at(event.peer), event.envelope.message
        if reader is not None and isinstance(part, StepPart) and event.envelope.fence == reader.fence:
            self.readers.flows.not_sent(reader.flow, (part.step, part.part), part.request)
        return []

    @_events.of(Unsent)
    def _on_unsent(self, event: Unsent) -> list[Effect]:
        """Schedule an early retry of a request that never left this process."""
        message = event.envelope.message
        if isinstance(message, NodeGet) and (feed := self.feeds.get(message.feed)):
            feed.again.unsent(self.relay.now)
        return []

    @_events.of(Moved)
    def _on_moved(self, event: Moved) -> list[Effect]:
        """Report the readers to the broker at the other address."""
        return [effect for feed in self.feeds.values() for effect in self._requests.ping(feed)]

    @_events.of(Stop)
    def _on_stop(self, event: Stop) -> list[Effect]:
        """Send the readers to the broker, and say goodbye."""
        self.stopped = True
        effects = [self.relay.elsewhere(reader.peer, "the relay stops") for reader in self.readers.values()]
        return [*effects, self.relay.to_broker(Bye(reason="the relay stops"))]

    # Messages of readers

    @_events.of(FromReader)
    def _from_reader(self, event: FromReader) -> list[Effect]:
        """Handle a message of a local reader."""
        envelope = event.envelope
        if self.relay.run and envelope.run not in (0, self.relay.run):
            why = "the relay reads another run. Start a relay for this run's broker"
            elsewhere = Envelope(run=envelope.run, epoch=0, fence=0, message=Elsewhere(detail=why))
            return [SendReader(event.peer, elsewhere)]
        message = envelope.message
        return self._from_anyone[type(message)](self, message, event.peer, envelope)

    _from_anyone = Handlers[[bytes, Envelope], list[Effect]]()
    _from_readers = Handlers[[LocalReader, Envelope], list[Effect]]()
    _from_readers.ignore(Message)

    @_from_anyone.of(Message)
    def _on_message(self, message: Message, peer: bytes, envelope: Envelope) -> list[Effect]:
        """Handle a message of a reader that has attached."""
        reader = self.readers.at(peer)
        if reader is None:
            return self._answer_stranger(peer, message)
        self._note_heard(reader, envelope)
        return self._from_readers[type(message)](self, message, reader, envelope)

    @_from_readers.of(FeedMessage)
    def _pass_on(self, message: FeedMessage, reader: LocalReader, envelope: Envelope) -> list[Effect]:
        """Pass a message on that the relay does not treat itself; the broker checks the rights of the relay's key."""
        return [SendFor(reader.name, envelope)] if message.RELAYED else []

    @_from_readers.of(Bye)
    def _on_bye(self, message: Bye, reader: LocalReader, envelope: Envelope) -> list[Effect]:
        """Forget a reader that leaves."""
        self.readers.forget(reader)
        return [SendFor(reader.name, envelope)]

    def _note_heard(self, reader: LocalReader, envelope: Envelope) -> None:
        """Record that a reader has sent a message, and the attempt of the present broker that it knows."""
        reader.heard = self.relay.now
        reader.said_fence = envelope.fence if envelope.epoch == self.relay.epoch else 0

    def _answer_stranger(self, peer: bytes, message: Message) -> list[Effect]:
        """Tell an unknown reader to attach. It also learns that this relay works, so say nothing if it does not.

        A relay without readers asks the broker from time to time whether it answers.
        """
        given_up = getattr(message, "feed", "") in self.relay.given_up
        if isinstance(message, Bye) or peer in self._not_allowed or given_up:
            return []
        effects: list[Effect] = []
        if isinstance(message, ReaderPing) and not self.readers and self.relay.now >= self._ask_at:
            self._ask_at = self.relay.now + LOCAL_PING_S
            effects.append(self.relay.to_broker(NodePing(feed=message.feed, have_upto=0)))
        return [*effects, self.relay.to_stranger(peer, Who())] if self.relay.is_connected else effects

    @_from_anyone.of(Attach)
    def _on_attach(self, message: Attach, peer: bytes, envelope: Envelope) -> list[Effect]:
        """Pass a reader's ``Attach`` on; until the broker answers, the reader gets no steps."""
        if (why := self.relay.given_up.get(message.feed)) is not None:
            return [self.relay.elsewhere(peer, why)]
        reader = self.readers.attach(message, peer)
        self._note_heard(reader, envelope)
        return [SendFor(reader.name, envelope)]

    @_from_readers.of(AskState)
    def _on_ask_state(self, message: AskState, reader: LocalReader, envelope: Envelope) -> list[Effect]:
        """Ask the broker for a checkpoint's state once for all readers; their trainers repeat the question."""
        key = message.feed, message.step
        asked_at, waiting = self._states.get(key, (-RETRY_S, set()))
        waiting.add(reader.name)
        if self.relay.now < asked_at + 0.5 * RETRY_S:
            return []
        self._states[key] = self.relay.now, waiting
        return [SendFor(reader.name, envelope)]

    @_from_readers.of(Get)
    def _on_get(self, message: Get, reader: LocalReader, envelope: Envelope) -> list[Effect]:
        """Send the parts that a reader requests, and request further steps of the broker."""
        if not self._takes_part(reader, envelope):
            return self._answer_probe(reader)
        flow, flows, now = reader.flow, self.readers.flows, self.relay.now
        flows.request(flow, message.start, message.stop, message.part)
        if flow.may_resend(message.request, now):
            flows.send_again(flow, (message.start, message.part), message.request, now)
        effects = self._deliveries.note_progress(reader, message.start, message.done_upto)
        return self._answer_probe(reader) + effects

    @_from_readers.of(ReaderPing)
    def _on_ping(self, message: ReaderPing, reader: LocalReader, envelope: Envelope) -> list[Effect]:
        """Record a reader's progress, and answer its ping."""
        reader.stats, reader.starvation = message.stats, message.starvation or reader.starvation
        if not self._takes_part(reader, envelope):
            return self._answer_probe(reader)
        self.readers.flows.confirm(reader.flow, message.have_upto, message.part)
        effects = self._deliveries.note_progress(reader, message.have_upto, message.done_upto)
        return self._answer_probe(reader) + effects

    @staticmethod
    def _takes_part(reader: LocalReader, envelope: Envelope) -> bool:
        """Return whether a message is of the attempt in which its reader takes part."""
        return reader.fence > 0 and (envelope.epoch, envelope.fence) == (reader.epoch, reader.fence)

    def _answer_probe(self, reader: LocalReader) -> list[Effect]:
        """Report to the broker at once that a reader is alive, if the broker has asked."""
        if not reader.probed:
            return []
        reader.probed = False
        feed = self.feeds.get(reader.feed)
        return [] if feed is None else self._requests.ping(feed)

    # Messages of the broker

    def _is_current(self, envelope: Envelope) -> bool:
        """Return whether a message is of the newest broker of the run; adopt a newer broker."""
        relay = self.relay
        if envelope.is_foreign(relay.run, relay.epoch):
            return False
        relay.run = envelope.run
        if envelope.epoch > relay.epoch:
            relay.adopt(envelope.epoch)
            self._states.clear()
        relay.silent_s = 0.0
        return True

    @_events.of(ForReaders)
    def _on_bundle(self, event: ForReaders) -> list[Effect]:
        """Pass messages on to their readers."""
        effects: list[Effect] = []
        for name, envelope in event.items:
            if self._is_current(envelope):
                effects += self._for_anyone[type(envelope.message)](self, envelope.message, name, envelope)
        return effects

    _for_anyone = Handlers[[str, Envelope], list[Effect]]()
    _for_readers = Handlers[[LocalReader, Envelope], list[Effect]]()

    @_for_anyone.of(Message)
    def _for_reader(self, message: Message, name: str, envelope: Envelope) -> list[Effect]:
        """Handle a message for one reader, unless it has left."""
        reader = self.readers.get(name)
        return [] if reader is None else self._for_readers[type(message)](self, message, reader, envelope)

    @_for_readers.of(Message)
    def _deliver(self, message: Message, reader: LocalReader, envelope: Envelope) -> list[Effect]:
        """Pass a message on to its reader."""
        return [SendReader(reader.peer, envelope)]

    @_for_readers.of(Attached)
    def _on_attached(self, message: Attached, reader: LocalReader, envelope: Envelope) -> list[Effect]:
        """Let a reader take part, and pass the message on."""
        self.relay.enter(reader, envelope, message)
        return [SendReader(reader.peer, _with_local_pings(envelope, message))]

    @_for_readers.of(Wait)
    def _on_wait_of_reader(self, message: Wait, reader: LocalReader, envelope: Envelope) -> list[Effect]:
        """Pass the cause of a wait on."""
        return [SendReader(reader.peer, _with_local_pings(envelope, message))]

    @_for_readers.of(Probe)
    def _on_probe(self, message: Probe, reader: LocalReader, envelope: Envelope) -> list[Effect]:
        """Pass a probe on, and tell the broker when the reader answers."""
        reader.probed = True
        return [SendReader(reader.peer, envelope)]

    @_for_readers.of(Reject, Fenced)
    def _on_reject(self, message: Reject | Fenced, reader: LocalReader, envelope: Envelope) -> list[Effect]:
        """Pass a rejection on; a reader that the relay's key does not cover continues with the broker."""
        if isinstance(message, Reject) and message.code == "forbidden":
            return self._not_allow(reader, message.detail)
        self.readers.forget(reader)
        return [SendReader(reader.peer, envelope)]

    def _not_allow(self, reader: LocalReader, why: str) -> list[Effect]:
        """Send a reader to the broker: the key of this relay does not allow it to read for the reader."""
        self._not_allowed.add(reader.peer)
        text = f"cannot read for rank {reader.mesh}, which continues with the broker: {why}"
        self.readers.forget(reader)
        report = Report("error", text, feed=reader.feed, rank=reader.mesh.rank)
        return [report, self.relay.elsewhere(reader.peer, why)]

    @_for_anyone.of(State)
    def _on_state(self, message: State, name: str, envelope: Envelope) -> list[Effect]:
        """Give a checkpoint's state to every reader that asked for it."""
        _, waiting = self._states.pop((message.feed, message.step), (0.0, {name}))
        readers = [self.readers[reader] for reader in sorted(waiting) if reader in self.readers]
        return [SendReader(reader.peer, envelope) for reader in readers]

    @_events.of(FromBroker)
    def _from_broker(self, event: FromBroker) -> list[Effect]:
        """Handle a message of the broker for the relay itself: parts of steps, or the cause of a wait."""
        envelope = event.envelope
        if not self._is_current(envelope):
            return []
        message = envelope.message
        if not isinstance(message, FeedMessage) or (feed := self.feeds.get(message.feed)) is None:
            return []
        if not feed.fence or envelope.fence != feed.fence:
            return []
        return self._deliveries.receive(message, feed, envelope)

    # Time

    @_events.of(Tick)
    def _tick(self, event: Tick) -> list[Effect]:
        """Forget silent readers, and send the pings and requests that are due."""
        relay, now = self.relay, event.now
        relay.silent_s += min(now - relay.now, _TICK_S)
        relay.now = now
        for reader in [reader for reader in self.readers.values() if now - reader.heard > SILENT_S]:
            self.readers.forget(reader)
        effects: list[Effect] = []
        for feed in {relay.feed_of(reader): None for reader in self.readers.values()}:
            if relay.run and feed.pings.due(now):
                effects += self._requests.ping(feed)
            wanting = any(map(self._deliveries.is_starving, self.readers.taking_part(feed.name)))
            if wanting and feed.again.due(now):
                effects += self._requests.send_get(feed, repeated=True)
        return effects


def _with_local_pings(envelope: Envelope, message: Attached | Wait) -> Envelope:
    """Return a message with the interval of pings to the relay, which are more frequent than those to the broker."""
    message = msgspec.structs.replace(message, ping_s=min(message.ping_s, LOCAL_PING_S))
    return Envelope(run=envelope.run, epoch=envelope.epoch, fence=envelope.fence, message=message)
