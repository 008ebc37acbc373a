"""Messages between producers and the broker: a catalog of each message and its answer."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta, Struct, UnsetType

from streampack.core.columns.chunk_body import SentChunk
from streampack.core.model.bounded import MAX_STREAMS, Host, Name, Small, Text
from streampack.core.model.fields import MAX_FIELDS, Field
from streampack.core.model.samples import Share
from streampack.core.model.snapshot import Count, Cursor
from streampack.core.protocol.message import Message, PartitionMessage
from streampack.core.protocol.rights import Rights

OVERLONG = "overlong"
"""Reason of a rejected sample that is too long even to be sent; it counts as an overlong sample."""


ANY_PROCESS = 0
"""Process in ``Amend`` from a process that does not know which earlier process sent the samples."""


class ProducerMessage(PartitionMessage, frozen=True, kw_only=True):
    """A message of a producer about one partition."""

    def forbidden_by(self, rights: Rights) -> str:
        """Return an error text if a key may not send samples of the stream."""
        return rights.refuse_streams((self.stream,))


class SessionMessage(ProducerMessage, frozen=True, kw_only=True):
    """A message of the holder of a partition; the envelope's fence is the session of its lease."""


# Producer -> broker


class Offer(Struct, frozen=True, kw_only=True):
    """A stream that a producer can read; producers of the same data have the same ``source_digest``.

    A producer whose samples are pushed names the one ``partition`` to which it pushes. One that only ``amends`` samples
    names none, and gets ``LateFields`` instead of a lease. ``begin`` is the cursor of the first sample of each
    partition, and tells the order of the samples. It is absent if samples are pushed.
    """

    stream: Name
    source_digest: Name
    partition: Small | None = None
    amends: bool | UnsetType = msgspec.UNSET
    begin: Cursor | UnsetType = msgspec.UNSET


class Hello(Message, frozen=True, kw_only=True):
    """A producer introduces itself and the streams that it offers; repeated until the producer gets a lease."""

    TYPE: ClassVar[int] = 1
    producer: Name
    host: Host
    pid: Count
    offers: Annotated[list[Offer], Meta(max_length=MAX_STREAMS)]

    def forbidden_by(self, rights: Rights) -> str:
        """Return an error text if a key may not send samples of all offered streams."""
        return rights.refuse_streams(offer.stream for offer in self.offers)


class Samples(SentChunk, SessionMessage, frozen=True, kw_only=True):
    """A chunk of n consecutive samples of one partition.

    Payload: the tokens, [tokens], then a frame for each field of the lease, [tokens, ...], or [n, ...] for axis
    ``sample``. Labels are not shifted. In a tree (``shared_u32``), the tokens and the fields with ``align: token``
    leave out the tokens that a sample shares. Fields with ``align: target`` have a value for each token of each sample.
    Late fields have no frame: their values come with ``Amend``. If the lease has fields for media, two frames follow.
    The first is uint32 [n, 2], the items of each sample and the bytes of their media. The second has these bytes.
    """

    TYPE: ClassVar[int] = 2


class Eos(SessionMessage, frozen=True, kw_only=True):
    """The partition has ended; it has ``total`` samples over all its passes."""

    TYPE: ClassVar[int] = 3
    total: Count


class Sent(SessionMessage, frozen=True, kw_only=True):
    """All samples below ``next_seq`` were sent a while ago; a sample that the broker still lacks was lost."""

    TYPE: ClassVar[int] = 6
    next_seq: Count


class Mark(SessionMessage, frozen=True, kw_only=True):
    """The end of batch ``batch`` of a pushed partition, before sample ``seq``.

    Samples before and after the mark share no step. ``number`` counts the partition's marks from 0.
    """

    TYPE: ClassVar[int] = 7
    number: Count
    seq: Count
    batch: Count


class CommitWrite(SessionMessage, frozen=True, kw_only=True):
    """Every sample of write ``write`` is durable, and no sample of it will be pushed again: its keys may be forgotten.

    The holder of any partition of the stream may commit; it repeats the message until ``Flow.write`` is greater.
    """

    TYPE: ClassVar[int] = 8
    write: Count


class Amend(ProducerMessage, frozen=True, kw_only=True):
    """Values of late fields for n samples of one partition; repeated until ``Amended`` comes with the same number.

    Payload: a frame for each of the ``names``, with the values of all samples in the order of ``seqs_u64``.

    Attributes:
        number: Number of the message; a producer uses each number once.
        process: The process that pushed the samples: the first number of their cursor; 0 for any process. A process
            knows that the samples before its own are safe, and need not know who sent them.
        seqs_u64: [n], number of each sample in its partition.
        names: Names of the late fields, at most once each.
        lengths_u32: [n], tokens of each sample; absent if every field has axis ``sample``.
        crcs_u32: [names, n], CRC32C of each sample's values.
    """

    TYPE: ClassVar[int] = 18
    number: Count
    process: Count = msgspec.field(name="incarnation")
    seqs_u64: bytes
    names: Annotated[tuple[Name, ...], Meta(max_length=MAX_FIELDS)]
    crcs_u32: bytes
    lengths_u32: bytes | UnsetType = msgspec.UNSET


class Start(ProducerMessage, frozen=True, kw_only=True):
    """Counts of the tickets of a program, which asks before it generates samples: see ``core.staging.tickets``.

    The program repeats its counts. They only grow while it holds the partition, except for ``open``.

    Attributes:
        asked: Number of tickets that it wants in all.
        granted: Number of tickets that it knows that it was given.
        used: Number of tickets that it has used: their samples are safe, or were given back.
        open: (version of the policy, number) of the samples that it generates now, or may begin with a ticket that it
            has. Version 0 stands for an unknown policy.
        together: Number of tickets without a begun sample that the program must have before it begins more samples.
            Absent if it uses tickets one by one.
        number: Number of the message in its session. A message that comes after a later one is out of date.
    """

    TYPE: ClassVar[int] = 19
    asked: Count
    granted: Count
    used: Count
    open: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=4096)] = ()
    together: Count | UnsetType = msgspec.UNSET
    number: Count = 0


class SourceSize(Struct, frozen=True, kw_only=True):
    """The size of a source, as far as it is known.

    Attributes:
        shards: Number of its files.
        opened: Number of files that were opened.
        samples: Samples of the opened files.
        squares: Sum over the opened files of the square of each file's samples.
    """

    shards: Count
    opened: Annotated[int, Meta(ge=1, lt=2**62)]
    samples: Count
    squares: Annotated[float, Meta(ge=0.0, le=1e36)]


class ProducerPing(Message, frozen=True, kw_only=True):
    """A producer is alive, or stops with an error (``failure``).

    Attributes:
        producer: Name of the producer.
        failure: Text of the error; empty if there is none.
        sizes: Source sizes of its streams.
        waiting: The cause for which a read of its files waits, such as a busy store; empty if none waits.
    """

    TYPE: ClassVar[int] = 4
    producer: Name
    failure: Text = ""
    sizes: Annotated[dict[Name, SourceSize], Meta(max_length=MAX_STREAMS)] = msgspec.field(default_factory=dict)
    waiting: Text = ""


# Broker -> producer


class Lease(PartitionMessage, frozen=True, kw_only=True):
    """The producer may send ``partition`` of ``partitions``; the envelope's fence is the session.

    Attributes:
        first_seq: Number of the first sample to send.
        cursor: Place of that sample in the source. None is the first sample of a run in which shards are read one
            after the other.
        seed: Seed of the order in which the source is read.
        passes: Passes over the source; None for no limit.
        dtype: Type of the tokens.
        fields: Fields of each sample beside the tokens, except for late ones.
        overlong: Policy for overlong samples.
        poison: Policy for samples that cannot be read.
        max_sample_tokens: The producer applies ``overlong`` to samples with more tokens, before it sends them.
        max_chunk_bytes: Limit of a chunk's payload.
        batches: True if each step is one batch, and can keep groups together; absent if steps follow each other in a
            stream.
        share: Kind of sharing that groups may have; absent for none.
        paced: True if the program asks before it generates samples (``Start``); absent if it need not.
        late_fields: Fields whose values come later, with ``Amend``; absent for none. Credit counts their bytes, too.
        media_fields: Fields of axis ``item`` or ``patch``; absent for none. Credit counts the bytes of media, too.
        no_loss_tokens: Policy for samples without a loss token, ``drop`` or ``error``; absent if they are trained on.
        budget: Tokens of a pack, to which ``overlong`` cuts; only with ``no_loss_tokens``, which counts after the cut.
    """

    TYPE: ClassVar[int] = 10
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
    share: Share | UnsetType = msgspec.UNSET
    paced: bool | UnsetType = msgspec.UNSET
    late_fields: Annotated[tuple[Field, ...], Meta(max_length=MAX_FIELDS)] | UnsetType = msgspec.UNSET
    media_fields: Annotated[tuple[Field, ...], Meta(max_length=MAX_FIELDS)] | UnsetType = msgspec.UNSET
    no_loss_tokens: Name | UnsetType = msgspec.UNSET
    budget: Count | UnsetType = msgspec.UNSET

    @property
    def sent_fields(self) -> tuple[Field, ...]:
        """Fields whose values come with a sample: those of tokens and samples, then those of media."""
        return (*self.fields, *(self.media_fields or ()))

    @property
    def has_extra_bytes(self) -> bool:
        """True if samples may have bytes that their tokens do not count: media."""
        return bool(self.media_fields)


class Flow(PartitionMessage, frozen=True, kw_only=True):
    """Credit of a session, and the number of samples that the broker has received.

    Attributes:
        expected_seq: The broker has every sample below this number.
        grant_seq: The producer may send samples below this number.
        grant_bytes: Total bytes that the producer may send in the session.
        durable_seq: Samples below this number are safe in the log (R1); 0 for a stream that can be read again.
        durable_marks: Marks below this number are safe in the log.
        ended: True if the broker takes no more samples of the partition.
        write: Number of the stream's current write; all writes before are committed, safely in the log.
        keys_full: True if there is less credit because the index of the stream's keys is full, or nearly full.
        policy_version: Version of the newest policy that trainers have published; absent if they have published none.
        granted: Number of tickets that the program was given (``Start``); absent if it has not asked.
        policy_number: Number of that policy, in the order in which this broker has told policies. A message with a
            lower number than before is out of date.
        wanted: True if the merge waits for the next sample of the partition; absent otherwise.
    """

    TYPE: ClassVar[int] = 11
    expected_seq: Count
    grant_seq: Count
    grant_bytes: Count
    durable_seq: Count
    durable_marks: Count = 0
    ended: bool = False
    write: Count = 0
    keys_full: bool = False
    policy_version: Count | UnsetType = msgspec.UNSET
    granted: Count | UnsetType = msgspec.UNSET
    policy_number: Count = 0
    wanted: bool | UnsetType = msgspec.UNSET


class Revoke(PartitionMessage, frozen=True, kw_only=True):
    """The session is over: the producer does not hold the partition any more."""

    TYPE: ClassVar[int] = 12


class LateFields(Message, frozen=True, kw_only=True):
    """The answer to a producer that amends samples of ``stream``: its partitions and its late fields."""

    TYPE: ClassVar[int] = 16
    stream: Name
    partitions: Small
    fields: Annotated[tuple[Field, ...], Meta(max_length=MAX_FIELDS)]
    max_chunk_bytes: Count


class Amended(Message, frozen=True, kw_only=True):
    """The values of ``Amend`` number ``number`` are safe in the log, or were not stored.

    Attributes:
        refusal: Reason that values contradict the message, the samples or earlier values; empty if none do.
        refused: Numbers of the samples whose values were not stored, uint64 each, by reason
            (``core.staging.dropped_samples``). Absent if all values or none were stored.
    """

    TYPE: ClassVar[int] = 17
    number: Count
    refusal: Text = ""
    refused: Annotated[dict[Name, bytes], Meta(max_length=64)] | UnsetType = msgspec.UNSET


class Done(Message, frozen=True, kw_only=True):
    """Every step was read and every reader has left: producers may stop."""

    TYPE: ClassVar[int] = 15


PRODUCER_MESSAGES: tuple[type[Message], ...] = (
    Hello, Samples, Eos, Sent, Mark, CommitWrite, Amend, Start, ProducerPing, Lease, Flow, Revoke, LateFields, Amended,
    Done,
)  # fmt: skip
