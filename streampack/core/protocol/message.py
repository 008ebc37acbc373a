"""The envelope of every message, and the messages of both producers and trainers.

State machines exchange messages as structs; ``wire`` encodes them to frames. All control messages carry state, not
changes of state, so they may be lost, repeated or reordered. Arrays are little-endian bytes (``*_u32`` and so on), and
tokens are raw payload frames beside the message.

Every envelope has the run, the broker's epoch, and a *fence*. The fence is the producer's session for a partition, or
the trainers' attempt.
"""

from __future__ import annotations

from typing import Any, ClassVar

from msgspec import Struct

from streampack.core.model.bounded import Name, Text
from streampack.core.model.snapshot import Count

WRONG_SIDE = "got a connection to the wrong address of the broker"


class Message(Struct, frozen=True, kw_only=True):
    """Base class of all messages; ``TYPE`` is the number of the message's kind in the header."""

    TYPE: ClassVar[int] = 0


class Bye(Message, frozen=True, kw_only=True):
    """Goodbye, for a ``reason``: a peer leaves and gives up its leases or its rank, or the broker stops."""

    TYPE: ClassVar[int] = 5
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
