"""Messages of processes without a rank, which publish policies, report values or read them: a catalog."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta, UnsetType

from streampack.core.model.bounded import MAX_STREAMS, Name, Small, Text
from streampack.core.model.fields import MAX_FIELDS
from streampack.core.model.snapshot import Count
from streampack.core.protocol.message import FeedMessage, Message
from streampack.core.protocol.rights import Rights

# Trainer or subscriber -> broker


class NumberedMessage(FeedMessage, frozen=True, kw_only=True):
    """A message of a process without a rank, on a connection of its own.

    ``number`` names it to its sender, and its answer has the same number. It is repeated until the answer comes.
    """

    number: Count

    def forbidden_by(self, rights: Rights) -> str:
        """Return an error text if a key may not read the feed."""
        return rights.refuse_feed(self.feed)


class Publish(NumberedMessage, frozen=True, kw_only=True):
    """The trainer has published policy ``version``; it trains step ``step`` next. Repeated until ``Noted`` comes.

    ``number`` names the message to its sender. ``attempt`` is (the broker's epoch, the trainers' attempt).
    """

    TYPE: ClassVar[int] = 26
    version: Count
    step: Count
    attempt: tuple[Count, Count]

    def forbidden_by(self, rights: Rights) -> str:
        """Return an error text if a key may not publish for all ranks, or may not read the feed."""
        return rights.refuse_publishing() or super().forbidden_by(rights)


class ReportValues(NumberedMessage, frozen=True, kw_only=True):
    """Values of n samples of a step, by a rank that has them; repeated until ``Noted`` comes.

    Payload: a frame of float64 [n] for each of the ``names``. Values that several parts have for a sample are summed.

    Attributes:
        number: Number of the message, which names it to its sender.
        attempt: (the broker's epoch, the trainers' attempt); the values of the highest attempt count.
        part: Number of this part, below ``parts``.
        parts: Number of parts that all ranks send.
        names: Names of the values, at most once each.
        streams_u32, indices_u64, parts_u32: [n], id of each sample: stream number, index and part.
    """

    TYPE: ClassVar[int] = 27
    lineage: Count
    step: Count
    attempt: tuple[Count, Count]
    part: Small
    parts: Small
    names: Annotated[tuple[Name, ...], Meta(max_length=MAX_FIELDS)]
    streams_u32: bytes
    indices_u64: bytes
    parts_u32: bytes


class AskResults(NumberedMessage, frozen=True, kw_only=True):
    """Ask for the first reported step from ``cursor`` on; repeated until ``Results`` comes. 0 asks for the oldest step.

    Without a cursor, ``Results`` has the cursor of the next step that will be reported, and no step.
    """

    TYPE: ClassVar[int] = 28
    cursor: Count | UnsetType = msgspec.UNSET


# Broker -> trainer or subscriber


class Noted(Message, frozen=True, kw_only=True):
    """The content of message ``number`` is safe in the log, or was refused for the reason ``refusal``."""

    TYPE: ClassVar[int] = 39
    number: Count
    refusal: Text = ""


class Results(FeedMessage, frozen=True, kw_only=True):
    """The values that were reported for a step; the answer to ``AskResults`` of the same ``number``.

    Payload: a frame of float64 [n] for each of the ``names``. A message without ``streams`` has no step.

    Attributes:
        cursor: Cursor of the step after this one.
        streams: Names of the feed's streams.
        streams_u32, indices_u64, parts_u32: [n], id of each sample.
        partitions_u32, seqs_u64: [n], partition of each sample, and the number with which it was sent.
    """

    TYPE: ClassVar[int] = 29
    number: Count
    cursor: Count
    lineage: Count = 0
    step: Count = 0
    names: Annotated[tuple[Name, ...], Meta(max_length=MAX_FIELDS)] = ()
    streams: Annotated[list[Name], Meta(max_length=MAX_STREAMS)] = msgspec.field(default_factory=list)
    streams_u32: bytes = b""
    indices_u64: bytes = b""
    parts_u32: bytes = b""
    partitions_u32: bytes = b""
    seqs_u64: bytes = b""


ABOUT_RESULTS: tuple[type[NumberedMessage], ...] = (Publish, ReportValues, AskResults)
RESULT_MESSAGES: tuple[type[Message], ...] = (*ABOUT_RESULTS, Noted, Results)
