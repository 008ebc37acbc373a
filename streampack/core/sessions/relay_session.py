"""A relay's side of the protocol, as a pure state machine: ``handle(event) -> effects``.

A relay is one reader to the broker and a broker to the readers of its host. Towards the broker it behaves as a client
(``client_session``), for all its readers at once. It sends one request and one ping, and asks for parts again only if
it can prove a loss. Towards readers it behaves as the broker's step server: it sends the parts that they request, and
bounds the bytes on their way (``deal.part_flow``).

It decides nothing about ranks, attempts or checkpoints. Messages about these pass unchanged between the reader and the
broker, under the reader's name. ``done_upto`` of a reader is always what the reader returned, never what the relay has.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from streampack.core.deal.node_parts import for_frames
from streampack.core.deal.part_flow import PartFlow, PartFlows
from streampack.core.layout.step_frames import frames_for
from streampack.core.model.mesh import Mesh
from streampack.core.protocol.events import Effect, Event, FromBroker, Report, Send, Tick, Unsent
from streampack.core.protocol.handlers import Handlers
from streampack.core.protocol.message import Bye, Envelope, FeedMessage, Message, Reject, Who
from streampack.core.protocol.relay_messages import Elsewhere, NodeGet, NodePart, NodePing, ReaderReport
from streampack.core.protocol.trainer_messages import (
    AskState,
    Attach,
    Attached,
    End,
    Fenced,
    Get,
    Probe,
    ReaderPing,
    State,
    StepPart,
    Wait,
)
from streampack.core.sessions.backoff import spread
from streampack.core.sessions.node_feed import NOTHING, RETRY_S, NodeFeed, Share
from streampack.core.sessions.relay_events import (
    ForReaders,
    FromReader,
    Moved,
    NotDelivered,
    SendFor,
    SendReader,
    Stop,
)
from streampack.core.stats.data_wait import Starvation

LOCAL_PING_S = 1.0
"""Longest time between two pings of a local reader, in seconds: they cost the broker nothing."""
SILENT_S = 15.0
"""Seconds without a message after which a relay does not speak for a reader any more."""
BROKER_SILENT_S = 5.0
"""Seconds without a message of the broker after which the relay reports this to its readers."""
MOST_QUEUED = 32 << 20
"""Most bytes on their way to one local reader."""
_TICK_S = 1.0
"""Most seconds that one tick adds to the broker's silence: more means that the process was stopped."""


@dataclass(slots=True, eq=False)
class LocalReader:
    """A reader of this host.

    Attributes:
        name, peer: Name of the reader, and of its connection to the relay.
        feed, mesh: The feed that it reads, and its rank.
        epoch, fence: The broker and the attempt in which it takes part; ``fence`` is 0 if it does not.
        said_fence: The attempt that its own last message named.
        flow: The parts that were sent to it.
        share: Its part of each step, once it takes part.
        done_upto, have_upto: The steps before these are returned, and received.
        heard: Time of its last message, in seconds.
        probed: True if the broker waits for a sign of life of the reader.
    """

    name: str
    peer: bytes
    feed: str
    mesh: Mesh
    epoch: int = 0
    fence: int = 0
    said_fence: int = 0
    flow: PartFlow = field(default_factory=PartFlow)
    share: Share = NOTHING
    done_upto: int = 0
    have_upto: int = 0
    heard: float = 0.0
    probed: bool = False
    stats: dict[str, float] = field(default_factory=dict)
    starvation: Starvation | None = None


class RelaySession:
    """State of one relay.

    Args:
        name: Name of the relay, which spreads its retries.
        memory_bytes: Most bytes of parts that the relay keeps. A step for its host must fit.

    Attributes:
        run, epoch: The run and the newest broker, as the broker's messages name them; 0 before the first.
        readers: The local readers, by name.
        feeds: The feeds that they read, by name.
        silent_s: Seconds since the broker's last message.
    """

    def __init__(self, name: str, memory_bytes: int = 1 << 30) -> None:
        self.name, self.memory_bytes = name, memory_bytes
        self.run = self.epoch = 0
        self.readers: dict[str, LocalReader] = {}
        self.feeds: dict[str, NodeFeed] = {}
        self.silent_s = 0.0
        self.flows = PartFlows(leaving_bytes=1 << 62)
        self.stopped = False
        self._peers: dict[bytes, LocalReader] = {}
        self._not_allowed: set[bytes] = set()
        """Connections of readers for which the relay's key does not allow it to read."""
        self._states: dict[tuple[str, int], tuple[float, set[str]]] = {}
        """(time of the last request, names of the readers that wait) of each requested state, by feed and step."""
        self._given_up: dict[str, str] = {}
        """Reasons for which the relay cannot serve a feed, by the feed's name."""
        self._now = self._ask_at = 0.0

    def handle(self, event: Event) -> list[Effect]:
        """Return the effects of an event, for the shell to perform in order."""
        return [] if self.stopped else self._events[type(event)](self, event)

    _events = Handlers[[], list[Effect]]()

    @_events.of(NotDelivered)
    def _on_not_delivered(self, event: NotDelivered) -> list[Effect]:
        """Note that a part did not reach its reader."""
        reader, part = self._peers.get(event.peer), event.envelope.message
        if reader is not None and isinstance(part, StepPart) and event.envelope.fence == reader.fence:
            self.flows.not_sent(reader.flow, (part.step, part.part), part.request)
        return []

    @_events.of(Unsent)
    def _on_unsent(self, event: Unsent) -> list[Effect]:
        """Schedule an early retry of a request that never left this process."""
        message = event.envelope.message
        if isinstance(message, NodeGet) and (feed := self.feeds.get(message.feed)):
            feed.again.unsent(self._now)
        return []

    @_events.of(Moved)
    def _on_moved(self, event: Moved) -> list[Effect]:
        """Report the readers to the broker at the other address."""
        return [effect for feed in self.feeds.values() for effect in self._ping(feed)]

    @_events.of(Stop)
    def _on_stop(self, event: Stop) -> list[Effect]:
        """Send the readers to the broker, and say goodbye."""
        self.stopped = True
        effects = [self._elsewhere(reader.peer, "the relay stops") for reader in self.readers.values()]
        return [*effects, self._send(Bye(reason="the relay stops"), 0)]

    @property
    def is_connected(self) -> bool:
        """True if the broker has sent a message lately."""
        return self.run > 0 and self.silent_s <= BROKER_SILENT_S

    # Messages of readers

    @_events.of(FromReader)
    def _from_reader(self, event: FromReader) -> list[Effect]:
        """Handle a message of a local reader."""
        envelope = event.envelope
        if self.run and envelope.run not in (0, self.run):
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
        reader = self._peers.get(peer)
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
        self._forget(reader)
        return [SendFor(reader.name, envelope)]

    def _note_heard(self, reader: LocalReader, envelope: Envelope) -> None:
        """Record that a reader has sent a message, and the attempt of the present broker that it knows."""
        reader.heard = self._now
        reader.said_fence = envelope.fence if envelope.epoch == self.epoch else 0

    def _answer_stranger(self, peer: bytes, message: Message) -> list[Effect]:
        """Tell an unknown reader to attach. It also learns that this relay works, so say nothing if it does not.

        A relay without readers asks the broker from time to time whether it answers.
        """
        given_up = getattr(message, "feed", "") in self._given_up
        if isinstance(message, Bye) or peer in self._not_allowed or given_up:
            return []
        effects: list[Effect] = []
        if isinstance(message, ReaderPing) and not self.readers and self._now >= self._ask_at:
            self._ask_at = self._now + LOCAL_PING_S
            effects.append(self._send(NodePing(feed=message.feed, have_upto=0), 0))
        if self.is_connected:
            who = Envelope(run=self.run, epoch=self.epoch, fence=0, message=Who())
            effects.append(SendReader(peer, who))
        return effects

    @_from_anyone.of(Attach)
    def _on_attach(self, message: Attach, peer: bytes, envelope: Envelope) -> list[Effect]:
        """Pass a reader's ``Attach`` on; until the broker answers, the reader gets no steps."""
        if (why := self._given_up.get(message.feed)) is not None:
            return [self._elsewhere(peer, why)]
        reader = self.readers.get(message.reader)
        if reader is None or (reader.feed, reader.mesh) != (message.feed, message.mesh):
            if reader is not None:
                self._forget(reader)
            reader = self.readers[message.reader] = LocalReader(message.reader, peer, message.feed, message.mesh)
        self._peers.pop(reader.peer, None)
        before = self._peers.get(peer)
        if before is not None and before is not reader:
            self._forget(before)
        reader.peer, self._peers[peer] = peer, reader
        self._note_heard(reader, envelope)
        reader.fence = 0
        reader.done_upto = reader.have_upto = message.next_step
        self.flows.forget_queue(reader.flow)
        return [SendFor(reader.name, envelope)]

    @_from_readers.of(AskState)
    def _on_ask_state(self, message: AskState, reader: LocalReader, envelope: Envelope) -> list[Effect]:
        """Ask the broker for a checkpoint's state once for all readers; their trainers repeat the question."""
        key = message.feed, message.step
        asked_at, waiting = self._states.get(key, (-RETRY_S, set()))
        waiting.add(reader.name)
        if self._now < asked_at + 0.5 * RETRY_S:
            return []
        self._states[key] = self._now, waiting
        return [SendFor(reader.name, envelope)]

    @_from_readers.of(Get)
    def _on_get(self, message: Get, reader: LocalReader, envelope: Envelope) -> list[Effect]:
        """Send the parts that a reader requests, and request further steps of the broker."""
        if not self._takes_part(reader, envelope):
            return self._answer_probe(reader)
        flow = reader.flow
        self.flows.request(flow, message.start, message.stop, message.part)
        if flow.may_resend(message.request, self._now):
            self.flows.send_again(flow, (message.start, message.part), message.request, self._now)
        effects = self._note_progress(reader, message.start, message.done_upto)
        return self._answer_probe(reader) + effects

    @_from_readers.of(ReaderPing)
    def _on_ping(self, message: ReaderPing, reader: LocalReader, envelope: Envelope) -> list[Effect]:
        """Record a reader's progress, and answer its ping."""
        reader.stats, reader.starvation = message.stats, message.starvation or reader.starvation
        if not self._takes_part(reader, envelope):
            return self._answer_probe(reader)
        self.flows.confirm(reader.flow, message.have_upto, message.part)
        effects = self._note_progress(reader, message.have_upto, message.done_upto)
        return self._answer_probe(reader) + effects

    @staticmethod
    def _takes_part(reader: LocalReader, envelope: Envelope) -> bool:
        """Return whether a message is of the attempt in which its reader takes part."""
        return reader.fence > 0 and (envelope.epoch, envelope.fence) == (reader.epoch, reader.fence)

    def _note_progress(self, reader: LocalReader, have_upto: int, done_upto: int) -> list[Effect]:
        """Record the steps that a reader has received and returned, and send what it wants or the cause of its wait.

        A reader that has more than it was sent got these steps from the broker, and does not need them again.
        """
        feed, flow = self.feeds[reader.feed], reader.flow
        reader.have_upto = max(reader.have_upto, have_upto)
        reader.done_upto = max(reader.done_upto, done_upto)
        flow.place = max(flow.place, (reader.have_upto, 0))
        self._forget_received(feed)
        return self._request(feed) + (self._serve(reader) or self._wait(reader))

    def _answer_probe(self, reader: LocalReader) -> list[Effect]:
        """Report to the broker at once that a reader is alive, if the broker has asked."""
        if not reader.probed:
            return []
        reader.probed = False
        feed = self.feeds.get(reader.feed)
        return [] if feed is None else self._ping(feed)

    # Messages of the broker

    def _is_current(self, envelope: Envelope) -> bool:
        """Return whether a message is of the newest broker of the run; adopt a newer broker."""
        if envelope.is_foreign(self.run, self.epoch):
            return False
        self.run = envelope.run
        if envelope.epoch > self.epoch:
            self.epoch = envelope.epoch
            self._states.clear()
            for feed in self.feeds.values():
                feed.leave()
            for reader in self.readers.values():
                reader.fence = 0
                self.flows.forget_queue(reader.flow)
        self.silent_s = 0.0
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
        self._enter(reader, envelope, message)
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
        self._forget(reader)
        return [SendReader(reader.peer, envelope)]

    def _not_allow(self, reader: LocalReader, why: str) -> list[Effect]:
        """Send a reader to the broker: the key of this relay does not allow it to read for the reader."""
        self._not_allowed.add(reader.peer)
        text = f"cannot read for rank {reader.mesh}, which continues with the broker: {why}"
        effects = [Report("error", text, feed=reader.feed, rank=reader.mesh.rank), self._elsewhere(reader.peer, why)]
        self._forget(reader)
        return effects

    @_for_anyone.of(State)
    def _on_state(self, message: State, name: str, envelope: Envelope) -> list[Effect]:
        """Give a checkpoint's state to every reader that asked for it."""
        _, waiting = self._states.pop((message.feed, message.step), (0.0, {name}))
        readers = [self.readers[each] for each in sorted(waiting) if each in self.readers]
        return [SendReader(reader.peer, envelope) for reader in readers]

    def _enter(self, reader: LocalReader, envelope: Envelope, message: Attached) -> None:
        """Record that a reader takes part in an attempt. Its next request tells the step that it needs."""
        feed = self._feed_of(reader)
        if envelope.fence < max(feed.fence, 1) or (envelope.epoch, envelope.fence) == (reader.epoch, reader.fence):
            return
        for other in self.readers.values():
            same_rank = other is not reader and other.mesh.ranks == reader.mesh.ranks  # this process replaces it
            if other.feed == reader.feed and (envelope.fence > feed.fence or same_rank):
                other.fence = 0
        feed.begin(envelope.fence, message)
        reader.epoch, reader.fence = envelope.epoch, envelope.fence
        frames = frames_for(message.rules.all_fields, reader.mesh, message.layout)
        reader.share = Share((reader.mesh.dp_rank, reader.mesh.cp_rank), tuple(frames))
        feed.joins(reader.name)
        self.flows.begin(reader.flow, reader.done_upto)

    def _feed_of(self, reader: LocalReader) -> NodeFeed:
        """Return the steps of the feed that a reader reads."""
        if reader.feed not in self.feeds:
            self.feeds[reader.feed] = NodeFeed(reader.feed, self.name)
        return self.feeds[reader.feed]

    @_events.of(FromBroker)
    def _from_broker(self, event: FromBroker) -> list[Effect]:
        """Handle a message of the broker for the relay itself: parts of steps, or the cause of a wait."""
        envelope = event.envelope
        if not self._is_current(envelope):
            return []
        message = envelope.message
        feed = self.feeds.get(message.feed) if isinstance(message, FeedMessage) else None
        if feed is None or not feed.fence or envelope.fence != feed.fence:
            return []
        return self._for_relay[type(message)](self, message, feed, envelope)

    _for_relay = Handlers[[NodeFeed, Envelope], list[Effect]]()
    _for_relay.ignore(Message)

    @_for_relay.of(Wait)
    def _on_wait(self, message: Wait, feed: NodeFeed, envelope: Envelope) -> list[Effect]:
        """Tell the readers that wait the cause."""
        feed.wait = message
        starving = [reader for reader in self._of(feed) if self._is_starving(reader)]
        lost = self._note_sent(feed, message.request, (message.step, message.part))
        return lost + [e for reader in starving for e in self._wait(reader)]

    @_for_relay.of(End)
    def _on_end(self, message: End, feed: NodeFeed, envelope: Envelope) -> list[Effect]:
        """Tell the readers that the feed has ended."""
        feed.end = message
        lost = self._note_sent(feed, message.request, (message.num_steps, 0))
        return lost + [e for reader in self._of(feed) for e in self._serve(reader)]

    @_for_relay.of(NodePart)
    def _on_part(self, message: NodePart, feed: NodeFeed, envelope: Envelope) -> list[Effect]:
        """Keep a part, and send it to the readers that want it."""
        if message.lineage != feed.lineage:
            return []
        try:
            in_turn = feed.take(envelope, message)
        except ValueError as error:
            return self._give_up(feed, f"got a part of step {message.step} that cannot be split: {error}")
        if not in_turn:
            return self._ask_again(feed)
        feed.again.answered(self._now)
        effects = [e for reader in self._of(feed) for e in self._serve(reader)]
        if feed.bytes_of(message.step) > self.memory_bytes:
            why = (
                f"step {message.step} for the ranks of this host has more than {self.memory_bytes >> 20} MiB, the "
                f"memory of the relay. Start the relay with more --memory"
            )
            return effects + self._give_up(feed, why)
        return effects + (self._send_get(feed) if feed.unconfirmed_bytes >= feed.ack_bytes else [])

    def _note_sent(self, feed: NodeFeed, request: int, place: tuple[int, int]) -> list[Effect]:
        """Request lost parts again: the broker reports that it has sent every part before ``place``."""
        if request != feed.request:
            return []
        feed.again.answered(self._now)
        return self._ask_again(feed) if place > feed.next else []

    def _give_up(self, feed: NodeFeed, why: str) -> list[Effect]:
        """Send the readers of a feed to the broker for good, because the relay cannot serve them."""
        self._given_up[feed.name] = why
        effects: list[Effect] = [Report("error", f"cannot serve feed {feed.name!r}: {why}", feed=feed.name)]
        for reader in [reader for reader in self.readers.values() if reader.feed == feed.name]:
            effects.append(self._elsewhere(reader.peer, why))
            self._forget(reader)
        feed.leave()
        return effects

    # Steps

    def _of(self, feed: NodeFeed) -> list[LocalReader]:
        """Return the readers that take part in the attempt of a feed."""
        return [reader for reader in self.readers.values() if reader.feed == feed.name and reader.fence]

    def _is_starving(self, reader: LocalReader) -> bool:
        """Return whether a reader wants a step that has not come to the relay."""
        feed, flow = self.feeds[reader.feed], reader.flow
        if feed.end is not None and flow.sent_upto >= feed.end.num_steps:
            return False
        return flow.sent_upto < flow.want_stop and feed.part(flow.sent_upto, flow.sent_part, reader.share) is None

    def _serve(self, reader: LocalReader) -> list[Effect]:
        """Send to a reader the parts that it wants and that have come, then the end of the feed."""
        feed, flow = self.feeds[reader.feed], reader.flow
        effects: list[Effect] = []
        group = f"{feed.name} {reader.mesh.dp_rank} {reader.mesh.cp_rank} {len(reader.share.frames)}".encode()
        while flow.sent_upto < flow.want_stop and self.flows.may_send(flow, MOST_QUEUED):
            found = feed.part(flow.sent_upto, flow.sent_part, reader.share)
            if found is None:
                break
            part, payload = for_frames(*found, list(reader.share.frames))
            part = msgspec.structs.replace(part, request=flow.request)
            size = sum(len(frame) for frame in payload)
            self.flows.sent(flow, (part.step, part.part), part.part + 1 >= part.parts, size)
            envelope = Envelope(run=self.run, epoch=self.epoch, fence=reader.fence, message=part, payload=payload)
            effects.append(SendReader(reader.peer, envelope, group))
        if feed.end is not None and flow.want_stop and flow.sent_upto >= feed.end.num_steps:
            end = msgspec.structs.replace(feed.end, request=flow.request)
            effects.append(SendReader(reader.peer, self._to(reader, end)))
        return effects

    def _wait(self, reader: LocalReader) -> list[Effect]:
        """Tell a reader the cause of its wait. The answer also shows the reader that its relay is alive."""
        feed, flow = self.feeds[reader.feed], reader.flow
        silent_s = 0.0 if self.is_connected else self.silent_s
        said = feed.wait if self._is_starving(reader) else None
        if silent_s:
            reason, detail = "relay", f"the relay has had no message from the broker for {silent_s:.0f} s"
        elif said is not None:
            reason, detail = said.reason, said.detail
        elif self._is_starving(reader):
            reason, detail = "network", f"step {flow.sent_upto}: its parts are on their way to the relay"
        else:
            reason, detail = "relay", f"step {flow.sent_upto}: {flow.queued_bytes} bytes are on their way to this rank"
        stream, batch = (said.stream, said.batch) if said is not None and not silent_s else (None, False)
        wait = Wait(
            feed=feed.name, step=flow.sent_upto, part=flow.sent_part, request=flow.request, reason=reason, detail=detail,
            stream=stream, batch=batch, silent_s=silent_s,
        )  # fmt: skip
        return [SendReader(reader.peer, self._to(reader, wait))]

    def _forget_received(self, feed: NodeFeed) -> None:
        """Drop the parts of steps that every reader of the feed has received.

        If the memory is full, nothing is kept for readers that have not requested any step yet. Their requests make the
        relay request those steps again.
        """
        readers = self._of(feed)
        feed.forget_below(min((reader.have_upto for reader in readers), default=0))
        if self._room < 0:
            feed.forget_below(min((reader.have_upto for reader in readers if reader.flow.want_stop), default=0))

    @property
    def _room(self) -> int:
        """Bytes that the memory has left for parts; negative if more are kept."""
        return self.memory_bytes - sum(feed.num_bytes for feed in self.feeds.values())

    # Requests

    def _request(self, feed: NodeFeed) -> list[Effect]:
        """Request steps of the broker, if the readers need or have returned something that it does not know."""
        readers = self._of(feed)
        if not readers:
            return []
        needs = self._needs(feed)
        covered = all(feed.covers(reader.share) for reader in readers)
        if needs and (not covered or min(needs) < feed.next[0]):
            return self._ask_again(feed)
        done_upto = min(reader.done_upto for reader in readers)
        short = any(feed.stop <= reader.have_upto <= reader.done_upto + 1 for reader in readers)
        if done_upto > feed.told_done or (short and self._stop(feed) > feed.stop):
            return self._send_get(feed)
        return []

    def _stop(self, feed: NodeFeed) -> int:
        """Return the step before which steps are requested: readers want them, and the memory has room for them.

        The next step of the reader that is furthest behind is requested even if there is no room. A reader that is
        ahead of others waits for room, which the others make when they receive the steps that are here.
        """
        readers = [reader for reader in self._of(feed) if reader.flow.want_stop]
        if not readers:
            return feed.stop
        wanted = max(reader.flow.want_stop for reader in readers)
        allowed = feed.next[0] + self._room // feed.largest_step if feed.largest_step else wanted
        last = min(readers, key=lambda reader: reader.have_upto)
        if not feed.has_all(last.have_upto, last.share):
            allowed = max(allowed, last.have_upto + 1)
        return max(feed.stop, min(wanted, allowed))

    def _needs(self, feed: NodeFeed) -> list[int]:
        """Return the first step that each reader needs and that is not here, of readers that have requested steps."""
        readers = [reader for reader in self._of(feed) if reader.flow.want_stop]
        return [feed.first_missing(reader.flow.sent_upto, reader.share) for reader in readers]

    def _ask_again(self, feed: NodeFeed) -> list[Effect]:
        """Request every part again, from the first step on that a reader lacks."""
        needs = self._needs(feed)
        if not needs:
            return []
        feed.ask_again(min(needs), {reader.name: reader.share for reader in self._of(feed)})
        return self._send_get(feed)

    def _send_get(self, feed: NodeFeed, repeated: bool = False) -> list[Effect]:
        """Send the relay's request for steps, which confirms the parts that have come."""
        readers = self._of(feed)
        feed.stop = self._stop(feed)
        feed.told_done = min((reader.done_upto for reader in readers), default=0)
        feed.unconfirmed_bytes = 0
        (feed.again.sent if repeated else feed.again.answered)(self._now)
        step, part = feed.next
        get = NodeGet(
            feed=feed.name, lineage=feed.lineage, start=step, part=part, stop=feed.stop, request=feed.request,
            done=tuple((reader.name, reader.done_upto) for reader in readers),
        )  # fmt: skip
        return [self._send(get, feed.fence)]

    def _ping(self, feed: NodeFeed) -> list[Effect]:
        """Send a ping that reports every reader of a feed, and set the time of the next ping."""
        feed.num_pings += 1
        early = 0.2 * spread(self.name, feed.num_pings) if feed.ping_s > LOCAL_PING_S else 0.0
        feed.ping_at = self._now + feed.ping_s * (1.0 - early)
        step, part = feed.next
        reports = tuple(
            ReaderReport(
                reader=reader.name, fence=reader.said_fence, done_upto=reader.done_upto, have_upto=reader.have_upto,
                silent_s=max(self._now - reader.heard, 0.0), stats=reader.stats, starvation=reader.starvation,
            )
            for reader in self.readers.values()
            if reader.feed == feed.name
        )  # fmt: skip
        ping = NodePing(feed=feed.name, have_upto=step, part=part, ranks=reports)
        return [self._send(ping, feed.fence)] if reports else []

    # Time

    @_events.of(Tick)
    def _tick(self, event: Tick) -> list[Effect]:
        """Forget silent readers, and send the pings and requests that are due."""
        now = event.now
        self.silent_s += min(now - self._now, _TICK_S)
        self._now = now
        for reader in [reader for reader in self.readers.values() if now - reader.heard > SILENT_S]:
            self._forget(reader)
        effects: list[Effect] = []
        for feed in {self._feed_of(reader): None for reader in self.readers.values()}:
            if self.run and now >= feed.ping_at:
                effects += self._ping(feed)
            wanting = any(self._is_starving(reader) for reader in self._of(feed))
            if wanting and feed.again.due(now):
                effects += self._send_get(feed, repeated=True)
        return effects

    def _forget(self, reader: LocalReader) -> None:
        """Forget a reader that has left, or that has another connection."""
        self.flows.forget_queue(reader.flow)
        if self.readers.get(reader.name) is reader:
            del self.readers[reader.name]
        if self._peers.get(reader.peer) is reader:
            del self._peers[reader.peer]

    # Messages

    def _send(self, message: Message, fence: int) -> Send:
        """Return the effect that sends a message of the relay itself to the broker."""
        return Send(Envelope(run=self.run, epoch=self.epoch, fence=fence, message=message))

    def _to(self, reader: LocalReader, message: Message) -> Envelope:
        """Return a message for a reader in its attempt."""
        return Envelope(run=self.run, epoch=self.epoch, fence=reader.fence, message=message)

    def _elsewhere(self, peer: bytes, why: str) -> SendReader:
        """Return the effect that tells the reader at ``peer`` to go on with the broker itself."""
        elsewhere = Envelope(run=self.run, epoch=self.epoch, fence=0, message=Elsewhere(detail=why[:2000]))
        return SendReader(peer, elsewhere)


def _with_local_pings(envelope: Envelope, message: Attached | Wait) -> Envelope:
    """Return a message with the interval of pings to the relay, which are more frequent than those to the broker."""
    message = msgspec.structs.replace(message, ping_s=min(message.ping_s, LOCAL_PING_S))
    return Envelope(run=envelope.run, epoch=envelope.epoch, fence=envelope.fence, message=message)
