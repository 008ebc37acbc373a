"""The state that all parts of a relay's session share: the newest broker, the readers of the host, and their feeds."""

from __future__ import annotations

from dataclasses import dataclass, field

from streampack.core.layout.step_frames import frames_for
from streampack.core.protocol.events import Send
from streampack.core.protocol.message import Envelope, Message
from streampack.core.protocol.relay_messages import Elsewhere
from streampack.core.protocol.trainer_messages import Attached
from streampack.core.sessions.relaying.local_readers import LocalReader, LocalReaders
from streampack.core.sessions.relaying.node_feed import NodeFeed, Share
from streampack.core.sessions.relaying.relay_events import SendReader

BROKER_SILENT_S = 5.0
"""Seconds without a message of the broker after which the relay reports this to its readers."""


@dataclass(slots=True, eq=False)
class RelayState:
    """State of one relay.

    Attributes:
        name: Name of the relay, which spreads its retries.
        memory_bytes: Most bytes of parts that the relay keeps. A step for its host must fit.
        run, epoch: The run and the newest broker, as the broker's messages name them; 0 before the first.
        readers: The local readers, by name.
        feeds: The feeds that they read, by name.
        given_up: Reasons for which the relay cannot serve a feed, by the feed's name.
        now: Time of the last tick, in seconds.
        silent_s: Seconds since the broker's last message.
    """

    name: str
    memory_bytes: int
    run: int = 0
    epoch: int = 0
    readers: LocalReaders = field(default_factory=LocalReaders)
    feeds: dict[str, NodeFeed] = field(default_factory=dict)
    given_up: dict[str, str] = field(default_factory=dict)
    now: float = 0.0
    silent_s: float = 0.0

    @property
    def is_connected(self) -> bool:
        """True if the broker has sent a message lately."""
        return self.run > 0 and self.silent_s <= BROKER_SILENT_S

    @property
    def room(self) -> int:
        """Bytes that the memory has left for parts; negative if more are kept."""
        return self.memory_bytes - sum(feed.num_bytes for feed in self.feeds.values())

    def feed_of(self, reader: LocalReader) -> NodeFeed:
        """Return the steps of the feed that a reader reads."""
        if reader.feed not in self.feeds:
            self.feeds[reader.feed] = NodeFeed(reader.feed, self.name)
        return self.feeds[reader.feed]

    def adopt(self, epoch: int) -> None:
        """Follow a newer broker: leave every attempt."""
        self.epoch = epoch
        for feed in self.feeds.values():
            feed.leave()
        for reader in self.readers.values():
            self.readers.leave_attempt(reader)

    def enter(self, reader: LocalReader, envelope: Envelope, message: Attached) -> None:
        """Record that a reader takes part in an attempt. Its next request tells the step that it needs."""
        feed = self.feed_of(reader)
        if envelope.fence < max(feed.fence, 1) or (envelope.epoch, envelope.fence) == (reader.epoch, reader.fence):
            return
        for other in self.readers.of_feed(reader.feed):
            same_rank = other is not reader and other.mesh.ranks == reader.mesh.ranks  # this process replaces it
            if envelope.fence > feed.fence or same_rank:
                other.fence = 0
        feed.begin(envelope.fence, message)
        reader.epoch, reader.fence = envelope.epoch, envelope.fence
        frames = frames_for(message.rules.all_fields, reader.mesh, message.layout)
        reader.share = Share((reader.mesh.dp_rank, reader.mesh.cp_rank), tuple(frames))
        feed.joins(reader.name)
        self.readers.flows.begin(reader.flow, reader.done_upto)

    def to_broker(self, message: Message, fence: int = 0) -> Send:
        """Return the effect that sends a message of the relay itself to the broker."""
        return Send(Envelope(run=self.run, epoch=self.epoch, fence=fence, message=message))

    def to_reader(
        self, reader: LocalReader, message: Message, payload: tuple[memoryview, ...] = (), group: bytes = b""
    ) -> SendReader:
        """Return the effect that sends a message of its attempt to a reader; see ``SendReader`` for ``group``."""
        envelope = Envelope(run=self.run, epoch=self.epoch, fence=reader.fence, message=message, payload=payload)
        return SendReader(reader.peer, envelope, group)

    def to_stranger(self, peer: bytes, message: Message) -> SendReader:
        """Return the effect that sends a message of no attempt to ``peer``."""
        return SendReader(peer, Envelope(run=self.run, epoch=self.epoch, fence=0, message=message))

    def elsewhere(self, peer: bytes, why: str) -> SendReader:
        """Return the effect that tells the reader at ``peer`` to go on with the broker itself."""
        return self.to_stranger(peer, Elsewhere(detail=why[:2000]))
