"""Wraps messages to readers as effects, with the run, the broker's epoch and the feed."""

from __future__ import annotations

from streampack.core.protocol.effects import SendTrainer
from streampack.core.protocol.events import Effect, Report
from streampack.core.protocol.message import Envelope, Identity, Message, Reject
from streampack.core.serve.rank_reader import Reader, Receiver


class ReaderLink:
    """The sender of messages to the readers of one feed."""

    def __init__(self, identity: Identity, feed: str) -> None:
        self.feed, self._identity = feed, identity
        self.refused = 0
        """Number of clients that were rejected."""

    def envelope(self, message: Message, fence: int) -> Envelope:
        """Return an envelope for a message of attempt ``fence``."""
        return self._identity.envelope(message, fence)

    def send(self, reader: Reader, message: Message) -> list[Effect]:
        """Send a message to a reader, with the last attempt that the reader knows as the fence."""
        return [SendTrainer(reader.peer, self.envelope(message, reader.fence))]

    def send_to(self, receiver: Receiver, message: Message) -> list[Effect]:
        """Send a message about parts of steps to a reader or a relay."""
        return [SendTrainer(receiver.peer, self.envelope(message, receiver.fence))]

    def reject(
        self, peer: bytes, code: str, detail: str, attempt: int, rank: str | None = None, host: str | None = None
    ) -> list[Effect]:
        """Send a client a rejection with its reason, and log it; ``rank`` and ``host`` name the client, if known."""
        self.refused += 1
        reject = SendTrainer(peer, self.envelope(Reject(code=code, detail=detail[:2000]), attempt))
        return [Report("warning", f"refused a client: {detail}", feed=self.feed, rank=rank, host=host), reject]
