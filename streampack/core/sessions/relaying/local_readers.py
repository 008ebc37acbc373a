"""The readers of a relay's host, and the bytes on their way to them."""

from __future__ import annotations

from dataclasses import dataclass, field

from streampack.core.deal.part_flow import PartFlow, PartFlows
from streampack.core.model.mesh import Mesh
from streampack.core.protocol.trainer_messages import Attach
from streampack.core.sessions.relaying.node_feed import NOTHING, Share
from streampack.core.stats.data_wait import Starvation


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


class LocalReaders(dict[str, LocalReader]):
    """The readers by name; ``flows`` counts the bytes on their way to them."""

    def __init__(self) -> None:
        super().__init__()
        self.flows = PartFlows(leaving_bytes=1 << 62)
        self._peers: dict[bytes, LocalReader] = {}

    def at(self, peer: bytes) -> LocalReader | None:
        """Return the reader of the connection ``peer``; None if there is none."""
        return self._peers.get(peer)

    def of_feed(self, feed: str) -> list[LocalReader]:
        """Return the readers of a feed."""
        return [reader for reader in self.values() if reader.feed == feed]

    def taking_part(self, feed: str) -> list[LocalReader]:
        """Return the readers that take part in the attempt of a feed."""
        return [reader for reader in self.values() if reader.feed == feed and reader.fence]

    def attach(self, message: Attach, peer: bytes) -> LocalReader:
        """Return the reader that attaches over the connection ``peer``; it gets no steps until the broker answers."""
        reader = self.get(message.reader)
        if reader is None or (reader.feed, reader.mesh) != (message.feed, message.mesh):
            if reader is not None:
                self.forget(reader)
            reader = self[message.reader] = LocalReader(message.reader, peer, message.feed, message.mesh)
        self._peers.pop(reader.peer, None)
        before = self._peers.get(peer)
        if before is not None and before is not reader:
            self.forget(before)
        reader.peer, self._peers[peer] = peer, reader
        reader.done_upto = reader.have_upto = message.next_step
        self.leave_attempt(reader)
        return reader

    def leave_attempt(self, reader: LocalReader) -> None:
        """Send a reader no more parts until the broker lets it take part again."""
        reader.fence = 0
        self.flows.forget_queue(reader.flow)

    def forget(self, reader: LocalReader) -> None:
        """Forget a reader that has left, or that has another connection."""
        self.flows.forget_queue(reader.flow)
        if self.get(reader.name) is reader:
            del self[reader.name]
        if self._peers.get(reader.peer) is reader:
            del self._peers[reader.peer]
