"""Messages between producers and the broker. The file is a catalog: each message, and its answer, in one place."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta, Struct, UnsetType

from streampack.core.model.bounded import MAX_STREAMS, Host, Name, Small, Text
from streampack.core.model.fields import MAX_FIELDS, Field
from streampack.core.model.samples import Keep
from streampack.core.model.snapshot import Count, Cursor
from streampack.core.protocol.message import Message

OVERLONG = "overlong"
"""Why a producer rejects what is too long even to be sent: counted with the over-long."""


# Producer -> broker


class Offer(Struct, frozen=True, kw_only=True):
    """A stream that a producer can read; ``source_digest`` tells whether two mean the same data.

    One that pushes samples, and can send none again once they are safe, names the ``partition`` that is its own.
    """

    stream: Name
    source_digest: Name
    partition: Small | None = None


class Hello(Message, frozen=True, kw_only=True):
    """A producer and what it can read; repeated until leases come, and whenever the broker asks."""

    TYPE: ClassVar[int] = 1
    producer: Name
    host: Host
    pid: Count
    offers: Annotated[list[Offer], Meta(max_length=MAX_STREAMS)]


class Samples(Message, frozen=True, kw_only=True):
    """A chunk: consecutive samples of one partition, from ``base_seq``.

    Payload: the tokens, then a frame for each field of the lease: [tokens, ...], or [samples, ...] for
    those of axis ``sample``, rejected ones too. Nothing is shifted. ``lengths_u32``, ``crcs_u32`` and
    ``loss_tokens_u32`` [n]: tokens (0: rejected where it was read, counted in ``rejected`` by
    reason), crc32c of the sample's bytes in all frames, labels that count.
    """

    TYPE: ClassVar[int] = 2
    stream: Name
    partition: Small
    base_seq: Count
    lengths_u32: bytes
    crcs_u32: bytes
    loss_tokens_u32: bytes
    cursor: Cursor
    rejected: Annotated[dict[Name, Count], Meta(max_length=64)] = msgspec.field(default_factory=dict)
    lost_tokens: Count = 0
    """Of over-long samples, cut or dropped before they were sent."""
    pass_ended: bool = False
    """The last sample is the last of its pass over the partition."""
    keep: Keep | UnsetType = msgspec.UNSET
    """The chunk is one group, which no pack, or step, is to split; only of what is pushed."""
    policy_version: Count | UnsetType = msgspec.UNSET
    """Of the policy that made its samples, all of them; only of what is pushed."""


class Eos(Message, frozen=True, kw_only=True):
    """The partition has ``total`` samples, over all its passes."""

    TYPE: ClassVar[int] = 3
    stream: Name
    partition: Small
    total: Count


class Sent(Message, frozen=True, kw_only=True):
    """All samples below ``next_seq`` were sent a while ago: what the broker lacks of them was lost."""

    TYPE: ClassVar[int] = 6
    stream: Name
    partition: Small
    next_seq: Count


class Mark(Message, frozen=True, kw_only=True):
    """A pushing producer has ended its batch ``batch`` after sample ``seq - 1``: nothing that follows shares a step
    with what came before. ``number`` counts the partition's marks from 0.
    """

    TYPE: ClassVar[int] = 7
    stream: Name
    partition: Small
    number: Count
    seq: Count
    batch: Count


class SourceSize(Struct, frozen=True, kw_only=True):
    """What is known of how much a source has: its ``shards``, those that were ``opened``, how many ``samples`` these
    have, and the sum of the ``squares`` of each one's.
    """

    shards: Count
    opened: Annotated[int, Meta(ge=1, lt=2**62)]
    samples: Count
    squares: Annotated[float, Meta(ge=0.0, le=1e36)]


class ProducerPing(Message, frozen=True, kw_only=True):
    """Alive, from the main loop; ``failure`` is why this producer must stop, where it must. ``sizes`` of the streams
    that it reads.
    """

    TYPE: ClassVar[int] = 4
    producer: Name
    failure: Text = ""
    sizes: Annotated[dict[Name, SourceSize], Meta(max_length=MAX_STREAMS)] = msgspec.field(default_factory=dict)


# Broker -> producer


class Lease(Message, frozen=True, kw_only=True):
    """Partition ``partition`` of ``partitions`` is yours from ``first_seq`` on; the fence is the session.

    ``dtype`` of tokens and the ``fields`` that go with them; a sample of more than ``max_sample_tokens``
    is the over-long policy's before it is sent; a chunk's payload stays below ``max_chunk_bytes``.
    """

    TYPE: ClassVar[int] = 10
    stream: Name
    partition: Small
    partitions: Small
    first_seq: Count
    cursor: Cursor | None
    seed: Count
    passes: Count | None
    dtype: Name
    fields: Annotated[tuple[Field, ...], Meta(max_length=MAX_FIELDS)] = ()
    overlong: Name
    poison: Name
    max_sample_tokens: Count
    max_chunk_bytes: Count
    batches: bool | UnsetType = msgspec.UNSET
    """Steps are batches, which hold groups together; absent where they are cut from a stream."""


class Flow(Message, frozen=True, kw_only=True):
    """What the broker has and what it allows, of one session: send samples below ``grant_seq``
    and no more than ``grant_bytes`` in all. ``durable_seq`` and ``durable_marks``: of samples and marks below
    nothing will be asked again: they are safe in the log (R1; 0 where the stream is read again, not kept).
    """

    TYPE: ClassVar[int] = 11
    stream: Name
    partition: Small
    expected_seq: Count
    grant_seq: Count
    grant_bytes: Count
    durable_seq: Count
    durable_marks: Count = 0
    ended: bool = False


class Revoke(Message, frozen=True, kw_only=True):
    """The session is over: another holds the partition, or nobody."""

    TYPE: ClassVar[int] = 12
    stream: Name
    partition: Small


class Done(Message, frozen=True, kw_only=True):
    """Every step was read and every reader has left: producers may go."""

    TYPE: ClassVar[int] = 15


PRODUCER_MESSAGES: tuple[type[Message], ...] = (
    Hello, Samples, Eos, Sent, Mark, ProducerPing, Lease, Flow, Revoke, Done,
)  # fmt: skip
