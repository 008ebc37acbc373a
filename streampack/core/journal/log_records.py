"""What a broker writes into its log: every decision that is not a function of the data and the rules alone.

The log is the only truth of a run: whoever reads it from its first record on knows which step holds
which samples, and can go on. A record states a fact and is never changed; what it says of a step, a
partition or a feed, a later one may only add to. Names of streams and feeds, not numbers, so that a
record can be read without the one before it; arrays as little-endian bytes, as in messages.
How a record becomes bytes is ``wire``'s, where they lie the log's.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
from msgspec import Struct, UnsetType

from streampack.core.model.rules import Rules, RulesChange
from streampack.core.model.samples import Keep
from streampack.core.model.snapshot import Count, Cursor, Snapshot


class Record(Struct, frozen=True, kw_only=True):
    """The root of all records; ``TYPE`` is its number in the log, from 1 on."""

    TYPE: ClassVar[int] = 0


class StreamFacts(Struct, frozen=True, kw_only=True):
    """What has been found out of a stream: the digest of its source, and by partition its samples where the end is
    known (else None), samples and marks that are recorded.
    """

    source_digest: str = ""
    totals: list[int | None] = []
    recorded: list[int] = []
    marks: list[int] = []


class FeedFacts(Struct, frozen=True, kw_only=True):
    """What must be known of a feed beside its steps: the rules it began with, how they changed, the step at which its
    ``lineage`` begins, steps that are passed over (first, last), checkpoints that are kept, and the newest policy's
    version that samples came with, where any did.
    """

    rules: Rules
    lineage: int = 0
    lineage_step: int = 0
    changes: list[RulesChange] = []
    skips: list[tuple[int, int]] = []
    commits: list[int] = []
    newest_version: Count | UnsetType = msgspec.UNSET


class Base(Record, frozen=True, kw_only=True):
    """All that is known and is not a step's: said again before the records that said it first may go.

    ``released`` by feed: steps below are returned by every rank.
    """

    TYPE: ClassVar[int] = 1
    run: int
    run_name: str
    epoch: int
    feeds: dict[str, FeedFacts]
    streams: dict[str, StreamFacts]
    released: dict[str, int] = {}


class SourceAccepted(Record, frozen=True, kw_only=True):
    """A stream is what a source of this digest gives."""

    TYPE: ClassVar[int] = 2
    stream: str
    source_digest: str


class ChunkAdmitted(Record, frozen=True, kw_only=True):
    """Samples taken in, in this order among all chunks of the feed (``merge: arrival``); columns as in ``Samples``.

    Payload: that of the message, where the producer cannot send it again. ``stale``: when it came its
    ``policy_version`` was too old, so that none of it is in any step.
    """

    TYPE: ClassVar[int] = 3
    stream: str
    partition: int
    base_seq: int
    lengths_u32: bytes
    crcs_u32: bytes
    loss_tokens_u32: bytes
    cursor: Cursor
    rejected: dict[str, int] = {}
    lost_tokens: int = 0
    pass_ended: bool = False
    keep: Keep | UnsetType = msgspec.UNSET
    policy_version: Count | UnsetType = msgspec.UNSET
    stale: bool | UnsetType = msgspec.UNSET


class SamplesRejected(Record, frozen=True, kw_only=True):
    """Quarantine: samples that are in no step, by their index in the stream, and how many for which reason.

    Said again where they are read again: what counts is the set.
    """

    TYPE: ClassVar[int] = 4
    stream: str
    indices_u64: bytes
    reasons: dict[str, int]


class BatchMarked(Record, frozen=True, kw_only=True):
    """A partition has ended batch ``batch`` after its sample ``seq - 1``; ``number`` counts its marks from 0."""

    TYPE: ClassVar[int] = 5
    stream: str
    partition: int
    number: int
    seq: int
    batch: int


class PartitionEnded(Record, frozen=True, kw_only=True):
    """The partition has ``total`` samples."""

    TYPE: ClassVar[int] = 6
    stream: str
    partition: int
    total: int


class StepFormed(Record, frozen=True, kw_only=True):
    """A step and all that is in it: ``counts_u32`` samples of each pack, ``rows`` the samples (``samples.ROW``, the
    stream by its number in the rules then). ``released``: steps below are returned by every rank. ``keeps``, uint8:
    what each sample says of the next, as in snapshots.
    """

    TYPE: ClassVar[int] = 7
    feed: str
    lineage: int
    step: int
    digest: bytes
    chain: bytes
    num_loss_tokens: int
    num_samples: int
    counts_u32: bytes
    rows: bytes
    released: int
    keeps: bytes | UnsetType = msgspec.UNSET


class SnapshotTaken(Record, frozen=True, kw_only=True):
    """What decides all steps from ``snapshot.form.next_step`` on."""

    TYPE: ClassVar[int] = 8
    feed: str
    lineage: int
    snapshot: Snapshot


class FeedEnded(Record, frozen=True, kw_only=True):
    """No step follows; said once (R8)."""

    TYPE: ClassVar[int] = 9
    feed: str
    lineage: int
    num_steps: int
    chain: bytes


class RulesChanged(Record, frozen=True, kw_only=True):
    """From ``change.step`` on."""

    TYPE: ClassVar[int] = 10
    feed: str
    change: RulesChange


class StepsSkipped(Record, frozen=True, kw_only=True):
    """Steps ``first`` to ``last`` are passed over by every rank; what follows stays as it is."""

    TYPE: ClassVar[int] = 11
    feed: str
    first: int
    last: int


class LineageBegan(Record, frozen=True, kw_only=True):
    """What was recorded of steps from ``step`` on is of another lineage than what follows, and ``why``; pushed samples
    of records from ``since`` on are dropped, if it is given.
    """

    TYPE: ClassVar[int] = 12
    feed: str
    lineage: int
    step: int
    why: str
    since: int | None = None


class CheckpointCommitted(Record, frozen=True, kw_only=True):
    """A trainer's checkpoint that begins at ``step`` is durable."""

    TYPE: ClassVar[int] = 13
    feed: str
    step: int


class TailDropped(Record, frozen=True, kw_only=True):
    """What ``tail: drop`` left over at the end of the feed, or of a pass, before step ``step`` (``samples.ROW``)."""

    TYPE: ClassVar[int] = 14
    feed: str
    lineage: int
    step: int
    rows: bytes


ALL_RECORDS: tuple[type[Record], ...] = (
    Base, SourceAccepted, ChunkAdmitted, SamplesRejected, BatchMarked, PartitionEnded, StepFormed, SnapshotTaken,
    FeedEnded, RulesChanged, StepsSkipped, LineageBegan, CheckpointCommitted,
    TailDropped,
)  # fmt: skip
