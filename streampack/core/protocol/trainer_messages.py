"""Messages between the readers of ranks and the broker: a catalog of each message and its answer."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from streampack.core.model.bounded import Digest, Host, Name, PingS, Small, Text
from streampack.core.model.mesh import Mesh, ReadBy
from streampack.core.model.rules import Rules
from streampack.core.model.snapshot import Count, Snapshot
from streampack.core.protocol.message import FeedMessage, Message
from streampack.core.protocol.rights import Rights
from streampack.core.protocol.step_part import StepPart
from streampack.core.stats.data_wait import Starvation

# Trainer -> broker


class ReaderMessage(FeedMessage, frozen=True, kw_only=True):
    """A message of a reader, which holds or claims a rank of the feed.

    A relay passes it on unless it treats the kind itself. ``Attach`` needs the rights of a reader. The broker drops
    other messages of readers that have not attached, so they need no rights.
    """

    RELAYED: ClassVar[bool] = True


class Question(ReaderMessage, frozen=True, kw_only=True):
    """A question of a reader's trainer; repeated until its ``ReaderAnswer`` comes, whose payload must be empty."""


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
        dealt_by: Layout by which the steps of this attempt were dealt so far; absent for a reader that was not attached
            before. The broker refuses to go on by another layout.
        knows_stages: True if the client builds each step by the rules of the step (``StepPart.stage``). Versions before
            0.2 do not know the field; a relay of such a version drops it.
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
    knows_stages: bool | UnsetType = UNSET
    dealt_by: Name | UnsetType = UNSET

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


class AskMixture(Question, frozen=True, kw_only=True):
    """Ask for the mixture of the feed's streams; repeated until ``Mixture`` comes."""

    TYPE: ClassVar[int] = 44


class Brought(ReaderMessage, frozen=True, kw_only=True):
    """A reader sends the snapshot of ``digest`` for which the broker has asked; a large window takes megabytes."""

    TYPE: ClassVar[int] = 25
    digest: Digest
    snapshot: Snapshot


# Broker -> trainer


class ReaderAnswer(FeedMessage, frozen=True, kw_only=True):
    """The answer to a ``Question``."""

    def answers(self, question: Question) -> bool:
        """Return whether this is the answer to a question of this client."""
        raise NotImplementedError


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


class EndForMesh(End, frozen=True, kw_only=True):
    """The reader's mesh gets no step from ``num_steps`` on, since it does not fit the rules of that step.

    ``name`` is the name of the step's stage, or its number, and ``detail`` says which mesh would fit.
    """

    TYPE: ClassVar[int] = 46
    name: Text
    detail: Text


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


class MixedStream(Struct, frozen=True, kw_only=True):
    """One stream of a mixture.

    Attributes:
        stream: Name of the stream.
        weight: Its latest weight, also before a requested change takes effect; 0 after its removal.
        share: Share of the next merged tokens that it gets, or of samples with ``weight_unit: samples``. Weights of
            streams that have ended, or are at the end of a pass, go to the others. None where samples are merged in the
            order of arrival.
        ended: True if no more sample of it will be merged.
        passes: Whole passes over its data that producers have sent; None for a pushed stream.
        trained_samples, trained_tokens: Samples and tokens in the recorded steps that every rank has returned:
            see ``stats.trained_samples``.
        trained_share: Its share of the trained tokens of all streams of the feed; None before the first.
        rejected: Samples that could not be used and were dropped since the broker started, by reason.
    """

    stream: Name
    weight: float
    share: float | None
    ended: bool
    passes: int | None
    trained_samples: int
    trained_tokens: int
    trained_share: float | None
    rejected: dict[str, int]


class Mixture(ReaderAnswer, frozen=True, kw_only=True):
    """The streams of a feed, in the order of their numbers."""

    TYPE: ClassVar[int] = 45
    streams: list[MixedStream]

    def answers(self, question: Question) -> bool:
        """Return whether this message answers ``question``, as it does for ``AskMixture``."""
        return isinstance(question, AskMixture)


class Fenced(FeedMessage, frozen=True, kw_only=True):
    """This reader has lost its rank to another process for good; ``detail`` names that process."""

    TYPE: ClassVar[int] = 36
    detail: Text


TRAINER_MESSAGES: tuple[type[Message], ...] = (
    Attach, Get, ReaderPing, AskState, Commit, Brought, AskMixture, Attached, StepPart, Wait, End, EndForMesh, State,
    Committed, Mixture, Fenced, Probe, AskSnapshot,
)  # fmt: skip
FROM_READERS = tuple(kind for kind in TRAINER_MESSAGES if issubclass(kind, ReaderMessage))
TO_READERS = tuple(kind for kind in TRAINER_MESSAGES if not issubclass(kind, ReaderMessage))
