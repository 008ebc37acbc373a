"""The envelope of every message, the bases of messages, and the messages of both producers and trainers.

State machines exchange messages as structs; ``wire`` encodes them to frames. All control messages carry state, not
changes of state, so they may be lost, repeated or reordered. Arrays are little-endian bytes (``*_u32`` and so on), and
tokens are raw payload frames beside the message.

Every envelope has the run, the broker's epoch, and a *fence*. The fence is the producer's session for a partition, or
the trainers' attempt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from msgspec import Struct

from streampack.core.columns.chunk_body import OfPartition
from streampack.core.columns.step_columns import OfFeed
from streampack.core.model.bounded import Name, Text
from streampack.core.model.snapshot import Count
from streampack.core.protocol.rights import Rights, Side

WRONG_SIDE = "got a connection to the wrong address of the broker"


class Message(Struct, frozen=True, kw_only=True):
    """Base class of all messages.

    Attributes:
        TYPE: Number of the message's kind in the header.
        RELAYED: True if a relay passes the message of a reader on to the broker. The answer must have no payload, so
            that it fits into a bundle (``wire.bundles``).
    """

    TYPE: ClassVar[int] = 0
    RELAYED: ClassVar[bool] = False

    def forbidden_by(self, rights: Rights) -> str:
        """Return an error text if a key may not send this message to the broker; empty if it may."""
        return ""


class PartitionMessage(OfPartition, Message, frozen=True, kw_only=True):
    """A message about one partition of a stream."""


class FeedMessage(OfFeed, Message, frozen=True, kw_only=True):
    """A message about one feed."""


def forbidden(rights: Rights, message: Message, side: Side, for_rank: bool = False) -> str:
    """Return an error text if a key may not send ``message`` to the address of ``side``; empty if it may.

    ``for_rank``: a relay sends the message for a rank of its host.
    """
    return rights.refuse_side(side) or (rights.refuse_relay() if for_rank else "") or message.forbidden_by(rights)


class Bye(Message, frozen=True, kw_only=True):
    """Goodbye, for a ``reason``: a peer leaves and gives up its leases or its rank, or the broker stops."""

    TYPE: ClassVar[int] = 5
    RELAYED: ClassVar[bool] = True
    reason: Text = ""


class Who(Message, frozen=True, kw_only=True):
    """The broker does not know this peer, which must send ``Hello`` or ``Attach`` again."""

    TYPE: ClassVar[int] = 13


class Reject(Message, frozen=True, kw_only=True):
    """The broker rejects a request for good: ``code`` is the kind of the error, ``detail`` its text."""

    TYPE: ClassVar[int] = 14
    code: Name
    detail: Text


SHARED_MESSAGES: tuple[type[Message], ...] = (Bye, Who, Reject)


class Envelope(Struct, frozen=True, kw_only=True):
    """A message with its fences and its payload, whose frames are opaque to the core.

    Attributes:
        run: Number of the run; 0 from a peer that has had no message of the broker yet.
        epoch: The broker's epoch, which rises at each start.
        fence: The producer's session for a partition, or the trainers' attempt.
        payload_crc: CRC32C of the payload's concatenated frames, if the sender knows it.
    """

    run: Count
    epoch: Count
    fence: Count
    message: Message
    payload: tuple[Any, ...] = ()
    payload_crc: int | None = None

    def is_foreign(self, run: int, epoch: int) -> bool:
        """Return whether another run's broker or one older than ``epoch`` sent this; ``run`` is 0 if not known yet."""
        return run not in (0, self.run) or self.epoch < epoch


@dataclass(slots=True, eq=False)
class Identity:
    """The run and the epoch of one broker.

    All parts of the broker share one object. So the epoch is the same everywhere when it rises.
    """

    run: int
    epoch: int

    def envelope(self, message: Message, fence: int = 0, payload: tuple[Any, ...] = ()) -> Envelope:
        """Return the envelope of a message of this broker."""
        return Envelope(run=self.run, epoch=self.epoch, fence=fence, message=message, payload=payload)
