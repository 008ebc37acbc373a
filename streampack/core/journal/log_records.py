"""The records of the log: every decision of a broker that does not follow from the data and the rules alone.

The log is the only truth of a run: its records tell which step holds which samples, and a broker can go on from them. A
record states a fact, and is never changed; later records only add facts. Records name streams and feeds instead of
numbering them, so that each record can be read without earlier records. Arrays are little-endian bytes, as in messages.
``wire`` encodes records.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
from msgspec import Struct, UnsetType

from streampack.core.columns.chunk_body import ChunkBody
from streampack.core.model.rule_changes import Schedule, Scheduled
from streampack.core.model.rules import Rules, RulesChange
from streampack.core.model.samples import ExtraColumns
from streampack.core.model.snapshot import Count, Cursor, Snapshot


class Record(Struct, frozen=True, kw_only=True):
    """Base class of all records; ``TYPE`` is the number of the record's kind in the log, from 1 on."""

    TYPE: ClassVar[int] = 0


class StreamFacts(Struct, frozen=True, kw_only=True):
    """Facts of a stream, with one value for each partition in each list.

    Attributes:
        source_digest: Digest of the stream's source.
        begin: Cursor of the source's first sample; absent in runs that read shards one after the other.
        totals: Samples of the partition; None if its end is unknown.
        recorded: Recorded samples of the partition.
        marks: Recorded marks of the partition.
        write: Number of the stream's current write; absent before the first write was committed.
        staged: Recorded samples and marks of the partition that came to wait for late fields; absent without late
            fields.
        dropped: Dropped samples of the partition, in ranges: (first, first after them, reason). Absent without late
            fields, or if there are none.
    """

    source_digest: str = ""
    totals: list[int | None] = []
    recorded: list[int] = []
    marks: list[int] = []
    write: Count | UnsetType = msgspec.UNSET
    staged: list[tuple[int, int]] | UnsetType = msgspec.UNSET
    dropped: list[list[tuple[int, int, str]]] | UnsetType = msgspec.UNSET
    begin: Cursor | UnsetType = msgspec.UNSET


class PolicyPublished(Record, frozen=True, kw_only=True):
    """Trainers published policy ``version``, which trains ``step`` next."""

    TYPE: ClassVar[int] = 23
    feed: str
    version: int
    step: int
    attempt: tuple[int, int]


class FeedFacts(Struct, frozen=True, kw_only=True):
    """All facts of a feed except its steps.

    Attributes:
        rules: The rules with which the feed began.
        lineage, lineage_step: Number of the lineage, and its first step.
        changes: Changes of the rules.
        skips: Skipped steps, as (first, last).
        commits: Steps of the checkpoints that are kept.
        newest_version: Newest version of the policies that made samples; absent if unknown.
        published: The newest policy that trainers have published; absent without one.
        trained: (number of steps counted, (samples, tokens) of each stream in them): see ``TrainedSamples``. Absent in
            older logs.
        schedule: Changes that were asked for and are not in ``changes``; absent without any.
        dealt_by: Settings of dynamic context parallelism (``DynamicCp.layout``) that deal steps from this record on;
            absent without them.
    """

    rules: Rules
    lineage: int = 0
    lineage_step: int = 0
    changes: list[RulesChange] = []
    skips: list[tuple[int, int]] = []
    commits: list[int] = []
    newest_version: Count | UnsetType = msgspec.UNSET
    published: PolicyPublished | UnsetType = msgspec.UNSET
    trained: tuple[Count, list[tuple[Count, Count]]] | UnsetType = msgspec.UNSET
    schedule: Schedule | UnsetType = msgspec.UNSET
    dealt_by: str | UnsetType = msgspec.UNSET


class Base(Record, frozen=True, kw_only=True):
    """All facts of the run except its steps, repeated so that earlier records can be deleted.

    ``released`` has a step for each feed: every rank has returned the steps before it.
    """

    TYPE: ClassVar[int] = 1
    run: int
    run_name: str
    epoch: int
    feeds: dict[str, FeedFacts]
    streams: dict[str, StreamFacts]
    released: dict[str, int] = {}


class SourceAccepted(Record, frozen=True, kw_only=True):
    """A stream's source has this digest; producers of other data are rejected.

    ``begin`` is the cursor of its first sample; absent in runs that read shards one after the other.
    """

    TYPE: ClassVar[int] = 2
    stream: str
    source_digest: str
    begin: Cursor | UnsetType = msgspec.UNSET


class ChunkKeys(Struct, frozen=True, kw_only=True):
    """Keys of a pushed chunk of n samples.

    Attributes:
        write: Number of the write to which the keys belong.
        digests: [n], key of each sample, 16 bytes.
        repeated: uint8 [n], 1 for a sample that was dropped because of its key; absent if there is none.
    """

    write: int
    digests: bytes
    repeated: bytes | UnsetType = msgspec.UNSET


class ChunkAdmitted(ChunkBody, Record, frozen=True, kw_only=True):
    """A chunk was admitted as the next chunk in its feed's order of arrival; the columns are those of ``Samples``.

    The payload of a pushed chunk is in the record as it came: a tree has its shared tokens once. If ``stale``, its
    ``policy_version`` was too old when it came, and none of its samples is in a step.
    """

    TYPE: ClassVar[int] = 3
    stale: bool | UnsetType = msgspec.UNSET
    keyed: ChunkKeys | UnsetType = msgspec.UNSET


class SamplesRejected(Record, frozen=True, kw_only=True):
    """Samples were rejected, and are in no step: their indices in the stream, and the count of each reason.

    Samples that are read again may be recorded again; only the set of samples counts.
    """

    TYPE: ClassVar[int] = 4
    stream: str
    indices_u64: bytes
    reasons: dict[str, int]


class BatchMarked(Record, frozen=True, kw_only=True):
    """Batch ``batch`` of a pushed partition ends before sample ``seq``; ``number`` counts its marks from 0."""

    TYPE: ClassVar[int] = 5
    stream: str
    partition: int
    number: int
    seq: int
    batch: int


class PartitionEnded(Record, frozen=True, kw_only=True):
    """A partition has ended after ``total`` samples."""

    TYPE: ClassVar[int] = 6
    stream: str
    partition: int
    total: int


class StepFormed(ExtraColumns, Record, frozen=True):  # not kw_only: so ExtraColumns come last
    """A step was formed, with these samples.

    Attributes:
        digest: Digest of the step.
        chain: Digest of all steps up to this one.
        num_loss_tokens, num_samples: Totals of the step.
        counts_u32: Samples of each pack.
        rows: The samples, as ``samples.ROW``; stream numbers are those of the rules at this step.
        released: Every rank has returned the steps before this one.
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


class SnapshotTaken(Record, frozen=True, kw_only=True):
    """A snapshot was taken; it decides all steps from ``snapshot.form.next_step`` on."""

    TYPE: ClassVar[int] = 8
    feed: str
    lineage: int
    snapshot: Snapshot


class FeedEnded(Record, frozen=True, kw_only=True):
    """The feed has ended after ``num_steps`` steps; recorded once (R8)."""

    TYPE: ClassVar[int] = 9
    feed: str
    lineage: int
    num_steps: int
    chain: bytes


class RulesChanged(Record, frozen=True, kw_only=True):
    """The rules of a feed change, from ``change.step`` on."""

    TYPE: ClassVar[int] = 10
    feed: str
    change: RulesChange


class ChangeAsked(Record, frozen=True, kw_only=True):
    """A person asked for a change of a feed's rules; ``RulesChanged`` follows when it takes effect."""

    TYPE: ClassVar[int] = 24
    feed: str
    change: Scheduled


class ChangeCanceled(Record, frozen=True, kw_only=True):
    """The change with number ``id`` does not take effect. ``note`` is a person's reason; absent without one."""

    TYPE: ClassVar[int] = 25
    feed: str
    id: int
    note: str | UnsetType = msgspec.UNSET


class StepsSkipped(Record, frozen=True, kw_only=True):
    """Steps ``first`` to ``last`` are skipped by every rank; later steps stay the same.

    ``note`` is a person's reason; absent without one.
    """

    TYPE: ClassVar[int] = 11
    feed: str
    first: int
    last: int
    note: str | UnsetType = msgspec.UNSET


class LineageBegan(Record, frozen=True, kw_only=True):
    """A new lineage begins at ``step`` for the reason ``why``; earlier records of this and later steps are void.

    If ``since`` is given, pushed samples of records from this LSN on are dropped.
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
    """``tail: drop`` left out samples (``samples.ROW``) before ``step``, at the end of the feed or of a pass."""

    TYPE: ClassVar[int] = 14
    feed: str
    lineage: int
    step: int
    rows: bytes


class WriteCommitted(Record, frozen=True, kw_only=True):
    """Write ``write`` of a pushed stream is complete, and its keys are forgotten; the next write begins."""

    TYPE: ClassVar[int] = 15
    stream: str
    write: int


class KeysKept(Record, frozen=True, kw_only=True):
    """Keys of a stream's current write, 16 bytes each, repeated so that the records of their chunks can be deleted."""

    TYPE: ClassVar[int] = 16
    stream: str
    write: int
    keys: bytes


class ChunkStaged(ChunkBody, Record, frozen=True, kw_only=True):
    """A pushed chunk came that waits for its late fields; the columns are those of ``Samples``, as is the payload.

    Its samples are admitted later, in the order in which they are complete, by records ``ChunkCompleted``.
    """

    TYPE: ClassVar[int] = 17
    pass_ended: bool | UnsetType = msgspec.UNSET


class ChunkCompleted(ChunkAdmitted, frozen=True, kw_only=True):
    """Samples that waited for late fields have them all, and were admitted; they were sent as numbers ``sent_u64``."""

    TYPE: ClassVar[int] = 21
    sent_u64: bytes


class SamplesAmended(Record, frozen=True, kw_only=True):
    """Values of late fields came, or were filled in after a timeout; columns and payload are those of ``Amend``."""

    TYPE: ClassVar[int] = 18
    stream: str
    partition: int
    seqs_u64: bytes
    names: tuple[str, ...]
    crcs_u32: bytes
    lengths_u32: bytes


class MarkStaged(Record, frozen=True, kw_only=True):
    """A mark came behind samples that wait for late fields; ``BatchMarked`` follows once they are admitted."""

    TYPE: ClassVar[int] = 19
    stream: str
    partition: int
    number: int
    seq: int
    batch: int


class EndStaged(Record, frozen=True, kw_only=True):
    """A partition has ended after ``total`` samples; some of them still wait, and ``PartitionEnded`` follows."""

    TYPE: ClassVar[int] = 20
    stream: str
    partition: int
    total: int


class ValuesReported(Record, frozen=True, kw_only=True):
    """A rank reported values of samples of a step; the columns are those of ``ReportValues``.

    ``values`` has float64 [n] for each of the ``names``. Values are no part of a step, and no step depends on them.
    """

    TYPE: ClassVar[int] = 22
    feed: str
    lineage: int
    step: int
    attempt: tuple[int, int]
    part: int
    parts: int
    names: tuple[str, ...]
    streams_u32: bytes
    indices_u64: bytes
    parts_u32: bytes
    values: list[bytes]


ALL_RECORDS: tuple[type[Record], ...] = (
    Base, SourceAccepted, ChunkAdmitted, SamplesRejected, BatchMarked, PartitionEnded, StepFormed, SnapshotTaken,
    FeedEnded, RulesChanged, StepsSkipped, LineageBegan, CheckpointCommitted,
    TailDropped, WriteCommitted, KeysKept, ChunkStaged, SamplesAmended, MarkStaged, EndStaged,
    ChunkCompleted, ValuesReported, PolicyPublished, ChangeAsked, ChangeCanceled,
)  # fmt: skip
