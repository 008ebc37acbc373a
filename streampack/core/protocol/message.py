"""The envelope of every message, and the messages that concern both producers and trainers.

A message is what the state machines of both ends see. ``wire`` encodes it to frames. All control messages carry state,
not changes of state, so they may be lost, repeated or reordered. Arrays travel as little-endian bytes (``*_u32`` and so
on), and tokens as raw payload frames beside the message.

Every envelope names the run, the broker's epoch, and a *fence*: the producer's session for the partition that the
message is about, or the trainers' attempt.
"""

from __future__ import annotations

from typing import Any, ClassVar

from msgspec import Struct

from streampack.core.model.bounded import Name, Text
from streampack.core.model.snapshot import Count

WRONG_SIDE = "got an address of the broker, but not the one for this side"


class Message(Struct, frozen=True, kw_only=True):
    """The root of all messages; ``TYPE`` is its number in the header."""

    TYPE: ClassVar[int] = 0


class Bye(Message, frozen=True, kw_only=True):
    """Leaves at once: its leases or its rank are free. From the broker: it stops, and why."""

    TYPE: ClassVar[int] = 5
    reason: Text = ""


class Who(Message, frozen=True, kw_only=True):
    """The broker does not know you: say HELLO or ATTACH again."""

    TYPE: ClassVar[int] = 13


class Reject(Message, frozen=True, kw_only=True):
    """No, and why: for a person to read. Final for what was asked."""

    TYPE: ClassVar[int] = 14
    code: Name
    detail: Text


SHARED_MESSAGES: tuple[type[Message], ...] = (Bye, Who, Reject)


class Envelope(Struct, frozen=True, kw_only=True):
    """A message with its fences and payload. ``payload`` frames are opaque to the core.

    ``run`` 0 is that of a peer that has not heard from the broker yet. ``payload_crc`` is the CRC32C of the frames one
    after another, where who sends them knows it already.
    """

    run: Count
    epoch: Count
    fence: Count
    message: Message
    payload: tuple[Any, ...] = ()
    payload_crc: int | None = None
