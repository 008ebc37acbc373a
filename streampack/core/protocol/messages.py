"""Every message between producers, broker and clients, typed.

Names are those of the design's wire section. A message is what both ends' state machines see;
how it becomes frames is ``wire``'s. All control messages carry state, not changes of state, so
they may be lost, repeated or reordered. The file is long because it is a catalogue: who looks for a
message finds it, and what answers it, in one place. Arrays travel as little-endian bytes (``*_u32`` and so
on), tokens as raw payload frames beside the message.

Every envelope names the run, the broker's epoch, and a *fence*: the producer's session for the
partition it speaks of, or the trainers' attempt.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta, Struct, UnsetType

from streampack.core.model.fields import MAX_FIELDS, Field
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64, Keep
from streampack.core.model.shapes import check_widths
from streampack.core.model.snapshot import Count, Cursor, Snapshot
from streampack.core.stats.data_wait import Starvation

Name = Annotated[str, Meta(min_length=1, max_length=200)]
Text = Annotated[str, Meta(max_length=2000)]
Host = Annotated[str, Meta(max_length=255)]
"""As long as a name of one may be: many are remembered."""
Small = Annotated[int, Meta(ge=0, lt=2**20)]
Digest = Annotated[bytes, Meta(max_length=16)]
PingS = Annotated[float, Meta(ge=0.1, le=60.0)]
OVERLONG = "overlong"
"""Why a producer rejects what is too long even to be sent: counted with the over-long."""
WRONG_SIDE = "got an address of the broker, but not the one for this side"
MAX_STREAMS = 1024
MAX_CHUNK_SAMPLES = 16_384
"""Samples in one chunk: credits always allow as many to a partition of which none wait."""


class Message(Struct, frozen=True, kw_only=True):
    """The root of all messages; ``TYPE`` is its number in the header."""

    TYPE: ClassVar[int] = 0


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
    rejected: Annotated[dict[Name, Count], Meta(max_length=64)] = {}
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
    with what came before. ``number`` counts the partition's marks from 0."""

    TYPE: ClassVar[int] = 7
    stream: Name
    partition: Small
    number: Count
    seq: Count
    batch: Count


class SourceSize(Struct, frozen=True, kw_only=True):
    """What is known of how much a source has: its ``shards``, those that were ``opened``, how many ``samples`` these
    have, and the sum of the ``squares`` of each one's."""

    shards: Count
    opened: Annotated[int, Meta(ge=1, lt=2**62)]
    samples: Count
    squares: Annotated[float, Meta(ge=0.0, le=1e36)]


class ProducerPing(Message, frozen=True, kw_only=True):
    """Alive, from the main loop; ``failure`` is why this producer must stop, where it must. ``sizes`` of the streams
    that it reads."""

    TYPE: ClassVar[int] = 4
    producer: Name
    failure: Text = ""
    sizes: Annotated[dict[Name, SourceSize], Meta(max_length=MAX_STREAMS)] = {}


class Bye(Message, frozen=True, kw_only=True):
    """Leaves at once: its leases or its rank are free. From the broker: it stops, and why."""

    TYPE: ClassVar[int] = 5
    reason: Text = ""


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
    nothing will be asked again: they are safe in the log (R1; 0 where the stream is read again, not kept)."""

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


class Who(Message, frozen=True, kw_only=True):
    """The broker does not know you: say HELLO or ATTACH again."""

    TYPE: ClassVar[int] = 13


class Reject(Message, frozen=True, kw_only=True):
    """No, and why: for a person to read. Final for what was asked."""

    TYPE: ClassVar[int] = 14
    code: Name
    detail: Text


class Done(Message, frozen=True, kw_only=True):
    """Every step was read and every reader has left: producers may go."""

    TYPE: ClassVar[int] = 15


# Trainer -> broker


class Mesh(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes and ranks of the trainers' mesh, as one rank sees it.

    Raises ValueError for a rank outside its size.
    """

    dp: Annotated[int, Meta(ge=1, le=65_536)] = 1
    cp: Annotated[int, Meta(ge=1, le=4096)] = 1
    tp: Annotated[int, Meta(ge=1, le=4096)] = 1
    pp: Annotated[int, Meta(ge=1, le=4096)] = 1
    dp_rank: Small = 0
    cp_rank: Small = 0
    tp_rank: Small = 0
    pp_rank: Small = 0

    def __post_init__(self) -> None:
        for size, rank, name in zip(self.sizes, self.ranks, ("dp", "cp", "tp", "pp"), strict=True):
            if rank >= size:
                raise ValueError(f"got {name}_rank={rank} with {name}={size}, expected {name}_rank < {name}")

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.dp, self.cp, self.tp, self.pp

    @property
    def ranks(self) -> tuple[int, int, int, int]:
        return self.dp_rank, self.cp_rank, self.tp_rank, self.pp_rank

    @property
    def rank(self) -> str:
        """``dp=3 cp=1``: of the dimensions that this mesh has, dp always."""
        names = zip(("dp", "cp", "tp", "pp"), self.ranks, self.sizes, strict=True)
        return " ".join(f"{name}={rank}" for name, rank, size in names if size > 1 or name == "dp")

    def __str__(self) -> str:
        names = ("dp", "cp", "tp", "pp")
        return " ".join(f"{n}={r}/{s}" for n, r, s in zip(names, self.ranks, self.sizes, strict=True))


class ReadBy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which tensor and pipeline ranks read, equal on all ranks: negative ones count from the last; None: every one."""

    tp: Annotated[tuple[int, ...], Meta(min_length=1, max_length=4096)] | None = None
    pp: Annotated[tuple[int, ...], Meta(min_length=1, max_length=4096)] | None = None

    def ranks(self, mesh: Mesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tp and pp ranks of a mesh that read, in order. Raises ValueError for one that it does not have."""
        return _named_ranks("tp", self.tp, mesh.tp), _named_ranks("pp", self.pp, mesh.pp)

    def __str__(self) -> str:
        said = [f"{name}={list(ranks)}" for name, ranks in (("tp", self.tp), ("pp", self.pp)) if ranks is not None]
        return " ".join(said) or "all"


def _named_ranks(name: str, ranks: tuple[int, ...] | None, size: int) -> tuple[int, ...]:
    for rank in ranks or ():
        if not -size <= rank < size:
            raise ValueError(f"got readers {name}={list(ranks or ())}, expected ranks of a mesh with {name}={size}")
    return tuple(range(size)) if ranks is None else tuple(sorted({rank % size for rank in ranks}))


class Attach(Message, frozen=True, kw_only=True):
    """A reader and the rank it claims; ``next_step`` is the first it has not wholly returned.

    ``round`` counts the iterations of a finite feed, ``readers`` says which ranks of the mesh read at
    all. ``chain`` is the digest of all steps before it, where it knows one; repeated until answered. One that is
    not ``ready`` takes its rank and says later where it begins. From a checkpoint: its ``lineage``, and the
    ``snapshot_digest`` of its snapshot, empty where there is none: a broker that needs the snapshot asks one reader of
    all for it (``AskSnapshot``). ``going_on`` is the lineage in which it was let in since it said so: it goes on
    with another broker, and has not gone back; -1 if it never was. ``variable_lengths``: a pipeline's stages take
    micro-batches of any shape. ``starvation``: what it has waited for before, at another broker or this one.
    """

    TYPE: ClassVar[int] = 20
    feed: Name
    reader: Name
    host: Host
    pid: Count
    mesh: Mesh
    next_step: Count
    chain: bytes = b""
    round: Count = 0
    readers: ReadBy = ReadBy()
    ready: bool = True
    lineage: Count = 0
    snapshot_digest: Digest = b""
    going_on: Annotated[int, Meta(ge=-1, lt=2**62)] = -1
    variable_lengths: bool = False
    starvation: Starvation | None = None


class Get(Message, frozen=True, kw_only=True):
    """Request steps up to ``stop`` (exclusive); steps before ``done_upto`` are returned.

    The reader has every part before part ``part`` of step ``start``: the broker may send as many more. A ``resend``
    higher than before is proof of loss: what was sent from there on has not arrived, and never will. Otherwise a
    repeated Get changes nothing.
    """

    TYPE: ClassVar[int] = 21
    feed: Name
    lineage: Count
    start: Count
    stop: Count
    done_upto: Count
    resend: Count
    part: Small = 0


class ReaderPing(Message, frozen=True, kw_only=True):
    """Alive, whether or not anything is wanted; ``stats`` are figures of the client for the metrics. The reader has
    every part before part ``part`` of step ``have_upto``."""

    TYPE: ClassVar[int] = 22
    feed: Name
    reader: Name
    done_upto: Count
    have_upto: Count
    part: Small = 0
    stats: Annotated[dict[Name, float], Meta(max_length=32)] = {}
    starvation: Starvation | None = None


class AskState(Message, frozen=True, kw_only=True):
    """What does a checkpoint hold that begins at ``step``? Repeated until answered with ``State``."""

    TYPE: ClassVar[int] = 23
    feed: Name
    step: Count


class Commit(Message, frozen=True, kw_only=True):
    """A checkpoint that begins at ``step`` is durable; repeated until answered with ``Committed``."""

    TYPE: ClassVar[int] = 24
    feed: Name
    step: Count


class Brought(Message, frozen=True, kw_only=True):
    """The snapshot of ``digest`` that the broker has asked for: megabytes perhaps, where windows are large."""

    TYPE: ClassVar[int] = 25
    feed: Name
    digest: Digest
    snapshot: Snapshot


# Broker -> trainer


class Attached(Message, frozen=True, kw_only=True):
    """The rank is yours in iteration ``round``; the fence is the attempt. What a client must know to rebuild packs.

    The reader pings every ``ping_s`` seconds, and says how far it has received whenever ``ack_bytes`` of payload have
    come.
    """

    TYPE: ClassVar[int] = 30
    feed: Name
    reader: Name
    lineage: Count
    next_step: Count
    rules: Rules
    layout: Name
    round: Count = 0
    ping_s: PingS = 1.0
    ack_bytes: Count = 1 << 20


class StepPart(Message, frozen=True, kw_only=True):
    """A step's plan for one rank, and the payload of some of its micro-batches.

    Part ``part`` of ``parts`` holds micro-batches ``first`` and up, one pack each: ``packs_u32``
    [p] their numbers in the step, ``counts_u32`` [p] their samples, ``loss_tokens_u32`` [p];
    ``lengths_u32``, ``streams_u32``, ``indices_u64`` and ``parts_u32`` [sum of counts] describe
    the samples. Payload: one frame for each name of ``frames``: ``input_ids`` [p, T / cp]; where the
    layout cuts samples, ``edges`` int32 [slices], the token after each; fields of axis ``token``
    [p, T / cp, ...] (or T where replicated), those of axis ``sample`` [sum of counts, ...]. ``widths_u32`` [p]: T of
    each pack; empty where the rules' shape is ``fixed``: all are the budget. ``rows_u32`` [p], where rules are
    ``padded``: tokens of a row of each; a sample has one, and behind them is one of padding at most.
    ``num_loss_tokens`` and ``num_samples`` are those of the whole step. ``resend`` is that of the Get which it answers:
    parts of one ``resend`` come in order, so one that comes before its turn shows that others are lost.
    """

    TYPE: ClassVar[int] = 31
    feed: Name
    lineage: Count
    step: Count
    part: Small
    parts: Small
    first: Small
    micro_batches: Small
    digest: bytes
    chain: bytes
    num_loss_tokens: Count
    num_samples: Count
    frames: Annotated[list[Name], Meta(max_length=MAX_FIELDS + 2)]
    packs_u32: bytes
    counts_u32: bytes
    loss_tokens_u32: bytes
    lengths_u32: bytes
    streams_u32: bytes
    indices_u64: bytes
    parts_u32: bytes
    widths_u32: bytes = b""
    rows_u32: bytes = b""
    resend: Count = 0

    def widths(self, rules: Rules) -> I64:
        """T of each pack, int64 [p]. Raises ValueError for what no pack of these rules can be."""
        count = len(self.counts_u32) // 4
        if rules.shape == "fixed" and not self.widths_u32:
            return np.full(count, rules.budget, np.int64)
        if len(self.widths_u32) != 4 * count:
            raise ValueError(f"got {len(self.widths_u32)} bytes of widths, expected {4 * count}")
        widths = np.frombuffer(self.widths_u32, "<u4").astype(np.int64)
        check_widths(widths, rules.shape, rules.budget, rules.align.pack)
        return widths

    def aligns(self, rules: Rules) -> I64:
        """What samples are padded to a multiple of, in each pack, int64 [p]: in padded ones the length of their rows.
        Raises ValueError for rows that cannot be."""
        counts = np.frombuffer(self.counts_u32, "<u4").astype(np.int64)
        if not rules.padded:
            return np.full(len(counts), rules.align.sample, np.int64)
        if len(self.rows_u32) != len(self.counts_u32):
            raise ValueError(f"got {len(self.rows_u32)} bytes of rows, expected {len(self.counts_u32)}")
        rows, widths = np.frombuffer(self.rows_u32, "<u4").astype(np.int64), self.widths(rules)
        lengths = np.frombuffer(self.lengths_u32, "<u4")
        wrong = (rows < 1) | (rows % rules.align.pack != 0)
        spare = widths - counts * rows
        wrong |= (spare != 0) & (spare != rows)
        if wrong.any() or len(lengths) != counts.sum() or (lengths > np.repeat(rows, counts)).any():
            raise ValueError(
                f"got padded micro-batches of {widths.tolist()[:8]} tokens with {counts.tolist()[:8]} samples and rows "
                f"of {rows.tolist()[:8]}, expected a row a sample, and one more at most"
            )
        return rows


class Wait(Message, frozen=True, kw_only=True):
    """Step ``step`` is not there yet, and what it waits for: the cause, in words, and the stream that is missing where
    that is it. Said at once to who has nothing left, and then every ``ping_s``.

    Every part before part ``part`` of ``step`` was sent before, for the Get of this ``resend``: what the reader lacks
    of them is lost. ``reason`` is "network" where parts are sent that the reader has not confirmed. ``ping_s``, of
    "join", is that of ``Attached``.
    """

    TYPE: ClassVar[int] = 32
    feed: Name
    step: Count
    reason: Name
    detail: Text
    stream: Name | None = None
    batch: bool = False
    """The wait is for a program that pushes to end its batch."""
    part: Small = 0
    resend: Count = 0
    ping_s: PingS = 1.0


class End(Message, frozen=True, kw_only=True):
    """There is no step from ``num_steps`` on; ``chain`` is the digest of the whole run. Every step was sent before, for
    the Get of this ``resend``."""

    TYPE: ClassVar[int] = 33
    feed: Name
    lineage: Count
    num_steps: Count
    chain: bytes
    resend: Count = 0


class Probe(Message, frozen=True, kw_only=True):
    """Another process asks for this reader's rank: a reader that is alive pings at once."""

    TYPE: ClassVar[int] = 37
    feed: Name


class AskSnapshot(Message, frozen=True, kw_only=True):
    """Send the snapshot of ``digest``, with which readers attach: asked of one of them. Answered with ``Brought``."""

    TYPE: ClassVar[int] = 38
    feed: Name
    digest: Digest


class State(Message, frozen=True, kw_only=True):
    """What decides all steps from ``step`` on: ``snapshot`` is that of the nearest step not after it, None where that
    is step 0. The same for every rank."""

    TYPE: ClassVar[int] = 34
    feed: Name
    lineage: Count
    step: Count
    chain: bytes
    snapshot: Snapshot | None


class Committed(Message, frozen=True, kw_only=True):
    """The commit of ``step`` is in the log."""

    TYPE: ClassVar[int] = 35
    feed: Name
    step: Count


class Fenced(Message, frozen=True, kw_only=True):
    """This reader is of an attempt that is over, and why. Final."""

    TYPE: ClassVar[int] = 36
    feed: Name
    detail: Text


ALL: tuple[type[Message], ...] = (
    Hello, Samples, Eos, Sent, Mark, ProducerPing, Bye, Lease, Flow, Revoke, Who, Reject, Done,
    Attach, Get, ReaderPing, AskState, Commit, Attached, StepPart, Wait, End, State, Committed, Fenced,
    Probe, AskSnapshot, Brought,
)  # fmt: skip


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
