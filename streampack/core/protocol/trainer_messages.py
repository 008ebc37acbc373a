"""Messages between trainers and the broker. The file is a catalog: each message, and its answer, in one place."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
import numpy as np
from msgspec import Meta

from streampack.core.model.bounded import Digest, Host, Name, PingS, Small, Text
from streampack.core.model.fields import MAX_FIELDS
from streampack.core.model.mesh import Mesh, ReadBy
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64
from streampack.core.model.shapes import check_widths
from streampack.core.model.snapshot import Count, Snapshot
from streampack.core.protocol.message import Message
from streampack.core.stats.data_wait import Starvation

# Trainer -> broker


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
    every part before part ``part`` of step ``have_upto``.
    """

    TYPE: ClassVar[int] = 22
    feed: Name
    reader: Name
    done_upto: Count
    have_upto: Count
    part: Small = 0
    stats: Annotated[dict[Name, float], Meta(max_length=32)] = msgspec.field(default_factory=dict)
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
        Raises ValueError for rows that cannot be.
        """
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
    the Get of this ``resend``.
    """

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
    is step 0. The same for every rank.
    """

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


TRAINER_MESSAGES: tuple[type[Message], ...] = (
    Attach, Get, ReaderPing, AskState, Commit, Brought, Attached, StepPart, Wait, End, State, Committed, Fenced, Probe,
    AskSnapshot,
)  # fmt: skip
