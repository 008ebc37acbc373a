"""A relay's messages to the broker: its requests for steps, for all its readers at once, and its pings."""

from __future__ import annotations

from streampack.core.deal.part_flow import Place
from streampack.core.protocol.events import Effect
from streampack.core.protocol.relay_messages import NodeGet, NodePing, ReaderReport
from streampack.core.sessions.relaying.node_feed import NodeFeed
from streampack.core.sessions.relaying.relay_state import RelayState

LOCAL_PING_S = 1.0
"""Longest time between two pings of a local reader, in seconds: they cost the broker nothing."""


class RelayRequests:
    """Requests the steps that the readers of each feed need, and asks again only if it can prove a loss."""

    def __init__(self, relay: RelayState) -> None:
        self._relay = relay

    def request(self, feed: NodeFeed) -> list[Effect]:
        """Request steps of the broker, if the readers need or have returned something that it does not know."""
        readers = self._relay.readers.taking_part(feed.name)
        if not readers:
            return []
        needs = self._needs(feed)
        covered = all(feed.covers(reader.share) for reader in readers)
        if needs and (not covered or min(needs) < feed.next[0]):
            return self.ask_again(feed)
        done_upto = min(reader.done_upto for reader in readers)
        short = any(feed.stop <= reader.have_upto <= reader.done_upto + 1 for reader in readers)
        if done_upto > feed.told_done or (short and self._stop(feed) > feed.stop):
            return self.send_get(feed)
        return []

    def _stop(self, feed: NodeFeed) -> int:
        """Return the step before which steps are requested: readers want them, and the memory has room for them.

        The next step of the reader that is furthest behind is requested even if there is no room. A reader that is
        ahead of others waits for room, which the others make when they receive the steps that are here.
        """
        readers = [reader for reader in self._relay.readers.taking_part(feed.name) if reader.flow.want_stop]
        if not readers:
            return feed.stop
        wanted = max(reader.flow.want_stop for reader in readers)
        allowed = feed.next[0] + self._relay.room // feed.largest_step if feed.largest_step else wanted
        last = min(readers, key=lambda reader: reader.have_upto)
        if not feed.has_all(last.have_upto, last.share):
            allowed = max(allowed, last.have_upto + 1)
        return max(feed.stop, min(wanted, allowed))

    def _needs(self, feed: NodeFeed) -> list[int]:
        """Return the first step that each reader needs and that is not here, of readers that have requested steps."""
        readers = [reader for reader in self._relay.readers.taking_part(feed.name) if reader.flow.want_stop]
        return [feed.first_missing(reader.flow.sent_upto, reader.share) for reader in readers]

    def ask_again(self, feed: NodeFeed) -> list[Effect]:
        """Request every part again, from the first step on that a reader lacks."""
        needs = self._needs(feed)
        if not needs:
            return []
        readers = self._relay.readers.taking_part(feed.name)
        feed.ask_again(min(needs), {reader.name: reader.share for reader in readers})
        return self.send_get(feed)

    def note_sent(self, feed: NodeFeed, request: int, place: Place) -> list[Effect]:
        """Request lost parts again: the broker reports that it has sent every part before ``place``."""
        if request != feed.request:
            return []
        feed.again.answered(self._relay.now)
        return self.ask_again(feed) if place > feed.next else []

    def send_get(self, feed: NodeFeed, repeated: bool = False) -> list[Effect]:
        """Send the relay's request for steps, which confirms the parts that have come."""
        readers = self._relay.readers.taking_part(feed.name)
        feed.stop = self._stop(feed)
        feed.told_done = min((reader.done_upto for reader in readers), default=0)
        feed.unconfirmed_bytes = 0
        (feed.again.sent if repeated else feed.again.answered)(self._relay.now)
        step, part = feed.next
        get = NodeGet(
            feed=feed.name, lineage=feed.lineage, start=step, part=part, stop=feed.stop, request=feed.request,
            done=tuple((reader.name, reader.done_upto) for reader in readers),
        )  # fmt: skip
        return [self._relay.to_broker(get, feed.fence)]

    def ping(self, feed: NodeFeed) -> list[Effect]:
        """Send a ping that reports every reader of a feed, and set the time of the next ping."""
        now = self._relay.now
        feed.pings.sent(now)
        step, part = feed.next
        reports = tuple(
            ReaderReport(
                reader=reader.name, fence=reader.said_fence, done_upto=reader.done_upto, have_upto=reader.have_upto,
                silent_s=max(now - reader.heard, 0.0), stats=reader.stats, starvation=reader.starvation,
            )
            for reader in self._relay.readers.of_feed(feed.name)
        )  # fmt: skip
        ping = NodePing(feed=feed.name, have_upto=step, part=part, ranks=reports)
        return [self._relay.to_broker(ping, feed.fence)] if reports else []
