"""The steps that a relay delivers: it takes parts from the broker, and sends to each reader those that it wants.

A reader without a step learns the cause of its wait.
"""

from __future__ import annotations

from msgspec.structs import replace

from streampack.core.deal.node_parts import for_frames
from streampack.core.protocol.events import Effect, Report
from streampack.core.protocol.handlers import Handlers
from streampack.core.protocol.message import Envelope, FeedMessage, Message
from streampack.core.protocol.relay_messages import NodePart
from streampack.core.protocol.trainer_messages import End, Wait
from streampack.core.sessions.relaying.local_readers import LocalReader
from streampack.core.sessions.relaying.node_feed import NodeFeed
from streampack.core.sessions.relaying.relay_requests import RelayRequests
from streampack.core.sessions.relaying.relay_state import RelayState

MOST_QUEUED = 32 << 20
"""Most bytes on their way to one local reader."""


class RelayDeliveries:
    """Takes the broker's messages about steps, and sends parts to the readers of the host."""

    def __init__(self, relay: RelayState, requests: RelayRequests) -> None:
        self._relay, self._requests, self._flows = relay, requests, relay.readers.flows

    def note_progress(self, reader: LocalReader, have_upto: int, done_upto: int) -> list[Effect]:
        """Record the steps that a reader has received and returned, and send what it wants or the cause of its wait.

        A reader that has more than it was sent got these steps from the broker, and does not need them again.
        """
        feed, flow = self._relay.feeds[reader.feed], reader.flow
        reader.have_upto = max(reader.have_upto, have_upto)
        reader.done_upto = max(reader.done_upto, done_upto)
        flow.place = max(flow.place, (reader.have_upto, 0))
        self._forget_received(feed)
        requests = self._requests.request(feed)
        return requests + (self._serve(reader) or self._wait(reader))

    def receive(self, message: FeedMessage, feed: NodeFeed, envelope: Envelope) -> list[Effect]:
        """Handle a message of the broker about the steps of a feed."""
        return self._messages[type(message)](self, message, feed, envelope)

    _messages = Handlers[[NodeFeed, Envelope], list[Effect]]()
    _messages.ignore(Message)

    @_messages.of(Wait)
    def _on_wait(self, message: Wait, feed: NodeFeed, envelope: Envelope) -> list[Effect]:
        """Tell the readers that wait the cause."""
        feed.wait = message
        readers = self._relay.readers.taking_part(feed.name)
        starving = [reader for reader in readers if self.is_starving(reader)]
        lost = self._requests.note_sent(feed, message.request, (message.step, message.part))
        return lost + [e for reader in starving for e in self._wait(reader)]

    @_messages.of(End)
    def _on_end(self, message: End, feed: NodeFeed, envelope: Envelope) -> list[Effect]:
        """Tell the readers that the feed has ended."""
        feed.end = message
        lost = self._requests.note_sent(feed, message.request, (message.num_steps, 0))
        return lost + self._serve_all(feed)

    @_messages.of(NodePart)
    def _on_part(self, message: NodePart, feed: NodeFeed, envelope: Envelope) -> list[Effect]:
        """Keep a part, and send it to the readers that want it."""
        if message.lineage != feed.lineage:
            return []
        try:
            in_turn = feed.take(envelope, message)
        except ValueError as error:
            return self._give_up(feed, f"got a part of step {message.step} that cannot be split: {error}")
        if not in_turn:
            return self._requests.ask_again(feed)
        feed.again.answered(self._relay.now)
        effects = self._serve_all(feed)
        if feed.bytes_of(message.step) > self._relay.memory_bytes:
            why = (
                f"step {message.step} for the ranks of this host has more than {self._relay.memory_bytes >> 20} MiB, "
                f"the memory of the relay. Start the relay with more --memory"
            )
            return effects + self._give_up(feed, why)
        return effects + (self._requests.send_get(feed) if feed.unconfirmed_bytes >= feed.ack_bytes else [])

    def _give_up(self, feed: NodeFeed, why: str) -> list[Effect]:
        """Send the readers of a feed to the broker for good, because the relay cannot serve them."""
        self._relay.given_up[feed.name] = why
        effects: list[Effect] = [Report("error", f"cannot serve feed {feed.name!r}: {why}", feed=feed.name)]
        for reader in self._relay.readers.of_feed(feed.name):
            effects.append(self._relay.elsewhere(reader.peer, why))
            self._relay.readers.forget(reader)
        feed.leave()
        return effects

    def is_starving(self, reader: LocalReader) -> bool:
        """Return whether a reader wants a step that has not come to the relay."""
        feed, flow = self._relay.feeds[reader.feed], reader.flow
        if feed.end is not None and flow.sent_upto >= feed.end.num_steps:
            return False
        return flow.sent_upto < flow.want_stop and feed.part(flow.sent_upto, flow.sent_part, reader.share) is None

    def _serve_all(self, feed: NodeFeed) -> list[Effect]:
        """Send to each reader of a feed what it wants and what has come."""
        return [e for reader in self._relay.readers.taking_part(feed.name) for e in self._serve(reader)]

    def _serve(self, reader: LocalReader) -> list[Effect]:
        """Send to a reader the parts that it wants and that have come, then the end of the feed."""
        feed, flow, frames = self._relay.feeds[reader.feed], reader.flow, list(reader.share.frames)
        effects: list[Effect] = []
        group = f"{feed.name} {reader.mesh.dp_rank} {reader.mesh.cp_rank} {len(frames)}".encode()
        while flow.sent_upto < flow.want_stop and self._flows.may_send(flow, MOST_QUEUED):
            rank_part = feed.part(flow.sent_upto, flow.sent_part, reader.share)
            if rank_part is None:
                break
            part, payload = for_frames(*rank_part, frames)
            size = sum(len(frame) for frame in payload)
            self._flows.sent(flow, (part.step, part.part), part.part + 1 >= part.parts, size)
            effects.append(self._relay.to_reader(reader, replace(part, request=flow.request), payload, group))
        if feed.end is not None and flow.want_stop and flow.sent_upto >= feed.end.num_steps:
            effects.append(self._relay.to_reader(reader, replace(feed.end, request=flow.request)))
        return effects

    def _wait(self, reader: LocalReader) -> list[Effect]:
        """Tell a reader the cause of its wait. The answer also shows the reader that its relay is alive."""
        feed, flow, starves = self._relay.feeds[reader.feed], reader.flow, self.is_starving(reader)
        wait = Wait(
            feed=feed.name, step=flow.sent_upto, part=flow.sent_part, request=flow.request, reason="relay",
            detail=f"step {flow.sent_upto}: {flow.queued_bytes} bytes are on their way to this rank",
        )  # fmt: skip
        if not self._relay.is_connected and (silent_s := self._relay.silent_s):
            detail = f"the relay has had no message from the broker for {silent_s:.0f} s"
            wait = replace(wait, detail=detail, silent_s=silent_s)
        elif starves and (cause := feed.wait) is not None:
            wait = replace(wait, reason=cause.reason, detail=cause.detail, stream=cause.stream, batch=cause.batch)
        elif starves:
            detail = f"step {flow.sent_upto}: its parts are on their way to the relay"
            wait = replace(wait, reason="network", detail=detail)
        return [self._relay.to_reader(reader, wait)]

    def _forget_received(self, feed: NodeFeed) -> None:
        """Drop the parts of steps that every reader of the feed has received.

        If the memory is full, nothing is kept for readers that have not requested any step yet. Their requests make the
        relay request those steps again.
        """
        readers = self._relay.readers.taking_part(feed.name)
        feed.forget_below(min((reader.have_upto for reader in readers), default=0))
        if self._relay.room < 0:
            feed.forget_below(min((reader.have_upto for reader in readers if reader.flow.want_stop), default=0))
