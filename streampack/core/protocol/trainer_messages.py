"""Messages between trainers and the broker: a catalog of each message and its answer."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
import numpy as np
from msgspec import Meta, UnsetType

from streampack.core.media.media_counts import MediaColumns
from streampack.core.model.bounded import MAX_STREAMS, Digest, Host, Name, PingS, Small, Text
from streampack.core.model.fields import MAX_FIELDS
from streampack.core.model.mesh import Mesh, ReadBy
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64
from streampack.core.model.shapes import check_widths
from streampack.core.model.snapshot import Count, Snapshot
from streampack.core.protocol.message import FeedMessage, Message
from streampack.core.protocol.rights import Rights
from streampack.core.stats.data_wait import Starvation
from streampack.core.trees.shared_prefixes import check_shared

# Trainer -> broker


class ReaderMessage(FeedMessage, frozen=True, kw_only=True):
    """A message of a reader, which holds or claims a rank of the feed.

    A relay passes it on unless it treats the kind itself. ``Attach`` needs the rights of a reader. The broker drops
    other messages of readers that have not attached, so they need no rights.
    """

    RELAYED: ClassVar[bool] = True


class Question(ReaderMessage, frozen=True, kw_only=True):
    """A question of a reader's trainer; repeated until its ``ReaderAnswer`` comes, whose payload must be empty."""


class NumberedMessage(FeedMessage, frozen=True, kw_only=True):
    """A message of a process without a rank, on a connection of its own.

    ``number`` names it to its sender, and its answer has the same number. It is repeated until the answer comes.
    """

    number: Count

    def forbidden_by(self, rights: Rights) -> str:
        """Return an error text if a key may not read the feed."""
        return rights.refuse_feed(self.feed)


class Attach(ReaderMessage, frozen=True, kw_only=True):
    """A reader claims a rank of a feed; repeated until ``Attached`` comes.

    Attributes:
        reader: Name of the reader's client.
        mesh: Sizes of the mesh, and the rank that the reader claims.
        next_step: First step that the trainer is not done with.
        chain: Digest of all steps before ``next_step``; empty if unknown.
        iteration: Number of the iteration over a finite feed.
        readers: The ranks of the mesh that read.
        ready: False if the reader takes its rank now, and reports later where it begins.
        lineage: Lineage of the checkpoint from which the reader begins.
        snapshot_digest: Digest of the checkpoint's snapshot; empty if there is none. A broker that needs the
            snapshot asks one of the readers for it (``AskSnapshot``).
        going_on: Lineage to which the reader was attached, and in which it continues; -1 if it was not attached before.
        variable_lengths: True if a pipeline's stages accept micro-batches of any shape.
        starvation: The reader's data wait so far, by cause.
        route_changes: Times that the reader has changed between its relay and the broker itself, or to another
            address. The broker ignores an ``Attach`` with a lower number than before.
    """

    TYPE: ClassVar[int] = 20
    reader: Name
    host: Host
    pid: Count
    mesh: Mesh
    next_step: Count
    chain: bytes = b""
    iteration: Count = msgspec.field(default=0, name="round")
    readers: ReadBy = ReadBy()
    ready: bool = True
    lineage: Count = 0
    snapshot_digest: Digest = b""
    going_on: Annotated[int, Meta(ge=-1, lt=2**62)] = -1
    variable_lengths: bool = False
    starvation: Starvation | None = None
    route_changes: Count = msgspec.field(default=0, name="path")

    def forbidden_by(self, rights: Rights) -> str:
        """Return an error text if a key may not read the feed as this rank."""
        return rights.refuse_reader(self.feed, self.mesh, self.host)


class Get(ReaderMessage, frozen=True, kw_only=True):
    """Request the steps before ``stop``; the trainer is done with the steps before ``done_upto``.

    The reader confirms every part before part ``part`` of step ``start``, so that the broker may send as many bytes
    more. A higher ``request`` than before asks the broker to send again from that part on, because later parts were
    lost. Otherwise a repeated Get changes nothing.
    """

    TYPE: ClassVar[int] = 21
    RELAYED: ClassVar[bool] = False
    lineage: Count
    start: Count
    stop: Count
    done_upto: Count
    request: Count = msgspec.field(name="resend")
    part: Small = 0


class ReaderPing(ReaderMessage, frozen=True, kw_only=True):
    """A reader is alive, and has every part before part ``part`` of step ``have_upto``.

    The trainer is done with the steps before ``done_upto``. ``stats`` are the client's metrics, ``starvation`` its data
    wait by cause.
    """

    TYPE: ClassVar[int] = 22
    RELAYED: ClassVar[bool] = False
    reader: Name
    done_upto: Count
    have_upto: Count
    part: Small = 0
    stats: Annotated[dict[Name, float], Meta(max_length=32)] = msgspec.field(default_factory=dict)
    starvation: Starvation | None = None


class AskState(Question, frozen=True, kw_only=True):
    """Ask for the contents of a checkpoint that begins at ``step``; repeated until ``State`` comes."""

    TYPE: ClassVar[int] = 23
    step: Count


class Commit(Question, frozen=True, kw_only=True):
    """A checkpoint that begins at ``step`` is durable; repeated until ``Committed`` comes."""

    TYPE: ClassVar[int] = 24
    step: Count


class Brought(ReaderMessage, frozen=True, kw_only=True):
    """A reader sends the snapshot of ``digest`` for which the broker has asked; a large window takes megabytes."""

    TYPE: ClassVar[int] = 25
    digest: Digest
    snapshot: Snapshot


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


# Broker -> trainer


class ReaderAnswer(FeedMessage, frozen=True, kw_only=True):
    """The answer to a ``Question``."""

    def answers(self, question: Question) -> bool:
        """Return whether this is the answer to a question of this client."""
        raise NotImplementedError


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


class Attached(FeedMessage, frozen=True, kw_only=True):
    """The reader has its rank in an iteration; the envelope's fence is the attempt.

    The ``rules`` and the ``layout`` tell the client how to rebuild packs. The reader pings every ``ping_s`` seconds,
    and confirms parts whenever ``ack_bytes`` of payload have come.
    """

    TYPE: ClassVar[int] = 30
    reader: Name
    lineage: Count
    next_step: Count
    rules: Rules
    layout: Name
    iteration: Count = msgspec.field(default=0, name="round")
    ping_s: PingS = 1.0
    ack_bytes: Count = 1 << 20


class StepPart(FeedMessage, frozen=True, kw_only=True):
    """A step's plan for one rank, and the payload of some of its micro-batches.

    The part holds p packs, one for each micro-batch, with n samples in all. A pack has T tokens, over all cp ranks.
    Payload: a frame for each name in ``frames``.

    - ``input_ids``: [p, T / cp].
    - ``edges``: int32 [slices], the token after each slice, if the layout cuts samples.
    - fields of axis ``token``: [p, T / cp, ...], or [p, T, ...] if replicated.
    - fields of axis ``sample``: [n, ...].
    - fields with ``align: target``, if the feed may have trees: [tokens of all samples, ...], without padding.
    - ``media``: the media bytes of each sample, one sample after another (``media_format``).

    Attributes:
        part, parts: Number of the part, and of all parts of the step.
        first: Number of the first micro-batch in the part.
        micro_batches: Micro-batches of the step; 0 if the step is skipped.
        digest: Digest of the step.
        chain: Digest of all steps up to this one.
        num_loss_tokens, num_samples: Totals of the whole step.
        packs_u32: [p], number of each pack in the step.
        counts_u32: [p], samples of each pack.
        loss_tokens_u32: [p], labels of each pack that count in the loss.
        lengths_u32, streams_u32, indices_u64, parts_u32: [n], tokens, stream, index and piece of each sample.
        widths_u32: [p], T of each pack; empty if the rules' shape is ``fixed``, and T is the budget.
        rows_u32: [p], tokens of a row of each pack, if the rules are ``padded``: a row for each sample, and at most
            one more of padding.
        shared_u32: [n], tokens that each sample shares with the sample before it; absent without trees.
        media: Columns of the samples' media; absent if the run has no fields for them.
        request: Number of the Get that this part answers. Parts of one request come in order, so a part before its
            turn shows that others are lost.
    """

    TYPE: ClassVar[int] = 31
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
    frames: Annotated[list[Name], Meta(max_length=MAX_FIELDS + 3)]
    packs_u32: bytes = b""
    counts_u32: bytes = b""
    loss_tokens_u32: bytes = b""
    lengths_u32: bytes = b""
    streams_u32: bytes = b""
    indices_u64: bytes = b""
    parts_u32: bytes = b""
    widths_u32: bytes = b""
    rows_u32: bytes = b""
    request: Count = msgspec.field(default=0, name="resend")
    shared_u32: bytes | UnsetType = msgspec.UNSET
    media: MediaColumns | UnsetType = msgspec.UNSET

    def shared(self) -> I64:
        """Return the tokens that each sample shares with the sample before it, int64 [n].

        Raise ValueError for a column that makes no tree.
        """
        lengths = np.frombuffer(self.lengths_u32, "<u4").astype(np.int64)
        if self.shared_u32 is msgspec.UNSET:
            return np.zeros(len(lengths), np.int64)
        if len(self.shared_u32) != len(self.lengths_u32):
            raise ValueError(f"got {len(self.shared_u32)} bytes of shared tokens, expected {len(self.lengths_u32)}")
        shared = np.frombuffer(self.shared_u32, "<u4").astype(np.int64)
        counts = np.frombuffer(self.counts_u32, "<u4").astype(np.int64)
        check_shared(shared, lengths, (np.cumsum(counts) - counts)[counts > 0])
        return shared

    def widths(self, rules: Rules) -> I64:
        """Return T of each pack, int64 [p]; raise ValueError for a width that the rules do not allow."""
        count = len(self.counts_u32) // 4
        if rules.shape == "fixed" and not self.widths_u32:
            return np.full(count, rules.budget, np.int64)
        if len(self.widths_u32) != 4 * count:
            raise ValueError(f"got {len(self.widths_u32)} bytes of widths, expected {4 * count}")
        widths = np.frombuffer(self.widths_u32, "<u4").astype(np.int64)
        check_widths(widths, rules.shape, rules.budget, rules.align.pack)
        return widths

    def aligns(self, rules: Rules) -> I64:
        """Return the multiple of tokens to which the samples of each pack are padded, int64 [p].

        For padded packs, this multiple is the length of their rows. Raise ValueError for rows that the rules do not
        allow.
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
                f"of {rows.tolist()[:8]} tokens, expected one row per sample and at most one extra row"
            )
        return rows


class Wait(FeedMessage, frozen=True, kw_only=True):
    """Step ``step`` is not ready; sent at once to a reader without a step, and then every ``ping_s`` seconds.

    In answer to the Get of number ``request``, the broker has sent every part before part ``part`` of ``step``. A part
    that the reader lacks is lost.

    Attributes:
        reason: Kind of the cause. It is "network" if the reader has not confirmed parts that were sent, and "join" if
            ranks have not joined. It is "relay" if the relay of the reader's host has not delivered the step.
        detail: The cause as a text.
        stream: The stream whose samples are missing, if that is the cause.
        batch: True if the wait is for a program that pushes samples, as is normal in reinforcement learning.
        ping_s: With "join", seconds between the reader's pings.
        silent_s: From a relay, seconds since the broker's last message if there was none lately; else 0.
    """

    TYPE: ClassVar[int] = 32
    step: Count
    reason: Name
    detail: Text
    stream: Name | None = None
    batch: bool = False
    part: Small = 0
    request: Count = msgspec.field(default=0, name="resend")
    ping_s: PingS = 1.0
    silent_s: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0


class End(FeedMessage, frozen=True, kw_only=True):
    """The feed ends after ``num_steps`` steps; ``chain`` is the digest of all of them.

    In answer to the Get of number ``request``, the broker has sent every step.
    """

    TYPE: ClassVar[int] = 33
    lineage: Count
    num_steps: Count
    chain: bytes
    request: Count = msgspec.field(default=0, name="resend")


class Probe(FeedMessage, frozen=True, kw_only=True):
    """Another process claims this reader's rank. A reader that is alive answers with a ping at once."""

    TYPE: ClassVar[int] = 37


class AskSnapshot(FeedMessage, frozen=True, kw_only=True):
    """Ask one of the readers for the snapshot of ``digest``, with which they attach; the answer is ``Brought``."""

    TYPE: ClassVar[int] = 38
    digest: Digest


class State(ReaderAnswer, frozen=True, kw_only=True):
    """The contents of a checkpoint that begins at ``step``: everything that decides the steps from there on.

    The ``snapshot`` is that of the nearest step at or before ``step`` that has a snapshot; None if that is step 0.
    Every rank gets the same snapshot.
    """

    TYPE: ClassVar[int] = 34
    lineage: Count
    step: Count
    chain: bytes
    snapshot: Snapshot | None

    def answers(self, question: Question) -> bool:
        """Return whether the question asks for the state of this step."""
        return isinstance(question, AskState) and question.step == self.step


class Committed(ReaderAnswer, frozen=True, kw_only=True):
    """The commit of ``step`` is in the log."""

    TYPE: ClassVar[int] = 35
    step: Count

    def answers(self, question: Question) -> bool:
        """Return whether the question is the commit of this step."""
        return isinstance(question, Commit) and question.step == self.step


class Fenced(FeedMessage, frozen=True, kw_only=True):
    """This reader has lost its rank to another process for good; ``detail`` names that process."""

    TYPE: ClassVar[int] = 36
    detail: Text


TRAINER_MESSAGES: tuple[type[Message], ...] = (
    Attach, Get, ReaderPing, AskState, Commit, Brought, Attached, StepPart, Wait, End, State, Committed, Fenced, Probe,
    AskSnapshot, Publish, ReportValues, AskResults, Noted, Results,
)  # fmt: skip
FROM_READERS = tuple(kind for kind in TRAINER_MESSAGES if issubclass(kind, ReaderMessage))
TO_READERS = tuple(
    kind
    for kind in TRAINER_MESSAGES
    if issubclass(kind, FeedMessage) and not issubclass(kind, ReaderMessage | NumberedMessage | Results)
)
ABOUT_RESULTS = tuple(kind for kind in TRAINER_MESSAGES if issubclass(kind, NumberedMessage))
