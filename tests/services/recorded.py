"""Runs as a log records them: made by the real merge and FORM, with rejected and split samples and lineages."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from streampack_services.ledger.ledger import Ledger
from streampack_services.log.log import LogEntry

from streampack.core.feed.resume import restore, snapshot
from streampack.core.form.former import Former
from streampack.core.intake.overlong import apply_overlong
from streampack.core.journal.log_records import (
    Base,
    CheckpointCommitted,
    FeedEnded,
    FeedFacts,
    LineageBegan,
    PartitionEnded,
    Record,
    SamplesRejected,
    SnapshotTaken,
    StepFormed,
    StreamFacts,
    TailDropped,
    ValuesReported,
)
from streampack.core.merge.schedule import merge_of
from streampack.core.model.rules import Align, Rules, StreamRules
from streampack.core.model.samples import ROW, SampleTable, index_of
from streampack.core.model.steps import FIRST_CHAIN, PlannedStep, chain_digest, pack_digests, step_digest
from streampack.wire.record_frames import encode_record

FEED = "train"
TWO_STREAMS = Rules(
    budget=256, window=32, packs=8, align=Align(sample=2, pack=4),
    streams=(StreamRules("web", 0.7, 3, overlong="split"), StreamRules("code", 0.3, 1, overlong="split")),
)  # fmt: skip


def entries(records: list[Record], start: int = 0) -> list[LogEntry]:
    """The log that holds these records from number ``start`` on."""
    return [
        LogEntry(lsn, record.TYPE, memoryview(b"".join(map(bytes, encode_record(record)))))
        for lsn, record in enumerate(records) if lsn >= start
    ]  # fmt: skip


@dataclass
class Run:
    """A feed over ``lengths`` by partition (0: rejected), a piece at a time; ``records`` are what its log holds."""

    rules: Rules
    lengths: list[list[int]]
    records: list[Record] = field(default_factory=list)
    snapshots: list[SnapshotTaken] = field(default_factory=list)
    lineage: int = 0

    def __post_init__(self) -> None:
        streams = self.rules.streams
        self.partition_of = [(s, p) for s, stream in enumerate(streams) for p in range(stream.partitions)]
        facts = {stream.name: StreamFacts(totals=[None] * stream.partitions) for stream in streams}
        feeds = {FEED: FeedFacts(rules=self.rules)}
        self.records.append(Base(run=1, run_name="recorded", epoch=1, feeds=feeds, streams=facts))
        self._start()

    def _start(self) -> None:
        self.table, self.merge = SampleTable(64), merge_of(self.rules)
        self.former = Former(self.rules, self.table)
        self.pushed = [0] * len(self.lengths)
        self.ended = False

    def feed(self, p: int, count: int) -> None:
        """Take in the next ``count`` samples of partition ``p``, or its end; form what can be formed."""
        lengths = np.array(self.lengths[p][self.pushed[p] : self.pushed[p] + count], np.int64)
        stream, partition = self.partition_of[p]
        of = self.rules.streams[stream]
        seqs = np.arange(self.pushed[p], self.pushed[p] + len(lengths))
        rejected = seqs[lengths == 0] * of.partitions + partition
        if len(rejected):
            reasons = {"empty": len(rejected)}
            self.records.append(
                SamplesRejected(stream=of.name, indices_u64=rejected.astype("<u8").tobytes(), reasons=reasons)
            )
        pieces = apply_overlong(lengths, self.rules.budget, "split")
        kept = pieces.length > 0
        rows = np.zeros(int(kept.sum()), ROW)
        rows["stream"], rows["length"], rows["part"] = stream, pieces.length[kept], pieces.part[kept]
        rows["loss_tokens"] = rows["length"] - 1
        rows["index"] = index_of(self.pushed[p] + pieces.source[kept], partition, of.partitions)
        rows["crc"] = (rows["index"] * 7919 + stream) % 2**32
        handles = np.full(len(kept), -1, np.int64)
        handles[kept] = self.table.enter(rows)
        self.merge.push(p, handles, pieces.length, pieces.part)
        self.pushed[p] += len(lengths)
        if self.pushed[p] == len(self.lengths[p]):
            self.merge.end(p)
            self.records.append(PartitionEnded(stream=of.name, partition=partition, total=self.pushed[p]))
        self._form()

    def _form(self) -> None:
        taken = self.merge.take(1 << 40)
        self.former.admit(taken.handles, taken.lengths)
        self.former.closed = self.merge.closed
        while (request := self.former.request()) is not None:
            self._write(self.former.apply(request.choose()))
        self._write(self.former.cut())
        if self.former.finished and not self.ended:
            self.ended = True
            step, chain = self.former.next_step, self.former.chain
            if len(self.former.dropped):
                rows = self.table.rows(self.former.dropped).tobytes()
                self.records.append(TailDropped(feed=FEED, lineage=self.lineage, step=step, rows=rows))
            self.records.append(FeedEnded(feed=FEED, lineage=self.lineage, num_steps=step, chain=chain))

    def _write(self, steps: list[PlannedStep]) -> None:
        for step in steps:
            counts, rows = step.packs.counts.astype("<u4"), self.table.rows(step.packs.handles)
            self.records.append(
                StepFormed(
                    feed=FEED, lineage=self.lineage, step=step.number, digest=step.digest, chain=step.chain,
                    num_loss_tokens=step.num_loss_tokens, num_samples=step.num_samples, counts_u32=counts.tobytes(),
                    rows=rows.tobytes(), released=0,
                )
            )  # fmt: skip

    def take_snapshot(self) -> None:
        if not self.ended:
            taken = snapshot(self.rules, self.merge, self.former)
            self.snapshots.append(SnapshotTaken(feed=FEED, lineage=self.lineage, snapshot=taken))
            self.records.append(self.snapshots[-1])

    def begin_lineage(self, which: int, reject_every: int) -> None:
        """Go back to a snapshot, or to the start, and on from there in another lineage, that does without some."""
        taken = self.snapshots[which % len(self.snapshots)].snapshot if self.snapshots else None
        step = taken.step if taken else 0
        self.snapshots = [each for each in self.snapshots if each.snapshot.step <= step]
        self.lineage += 1
        self.records.append(CheckpointCommitted(feed=FEED, step=step))
        self.records.append(LineageBegan(feed=FEED, lineage=self.lineage, step=step, why="on_rewind: discard"))
        self._start()
        if taken:
            restore(taken, self.rules, self.merge, self.former)
            self.pushed = self.merge.merged_samples.tolist()
        for p, lengths in enumerate(self.lengths):
            for seq in range(self.pushed[p] + reject_every - 1, len(lengths), reject_every):
                lengths[seq] = 0
        self._form()

    def finish(self) -> None:
        for p, lengths in enumerate(self.lengths):
            self.feed(p, len(lengths))
            self.feed(p, 0)


def two_lineages() -> Run:
    """Two streams, rejected and split samples, and a second lineage."""
    rng = np.random.default_rng(4)
    run = Run(TWO_STREAMS, [rng.integers(0, 300, 90).tolist() for _ in range(4)])
    for p in (0, 1, 2, 3) * 6:
        run.feed(p, 10)
    run.take_snapshot()
    for p in range(4):
        run.feed(p, 10)
    run.begin_lineage(0, 7)
    run.finish()
    return run


def rows_in(step: StepFormed) -> NDArray[np.void]:
    return np.frombuffer(step.rows, ROW)


def with_rows(step: StepFormed, rows: NDArray[np.void], counts: Any) -> StepFormed:
    """A step with other rows, and the digest that it had."""
    return replace(step, rows=rows.tobytes(), counts_u32=np.array(counts, "<u4").tobytes())


def without(step: StepFormed, row: int) -> StepFormed:
    """A step that has lost a sample."""
    counts = np.frombuffer(step.counts_u32, "<u4").astype(np.int64)
    counts[np.searchsorted(np.cumsum(counts), row, side="right")] -= 1
    return with_rows(step, np.delete(rows_in(step), row), counts)


def doubling(step: StepFormed, rows: NDArray[np.void]) -> StepFormed:
    """A step whose first pack holds ``rows``, too."""
    counts = np.frombuffer(step.counts_u32, "<u4").astype(np.int64)
    counts[0] += len(rows)
    return with_rows(step, np.concatenate([rows, rows_in(step)]), counts)


def with_values(records: list[Record], values: dict[str, float]) -> list[Record]:
    """The records of a run whose only rank reports these values for each sample of each step, times its index."""
    reported = list[Record]()
    for record in records:
        reported.append(record)
        if isinstance(record, StepFormed):
            rows = rows_in(record)
            columns = {name: rows[key].astype(kind).tobytes() for name, key, kind in (
                ("streams_u32", "stream", "<u4"), ("indices_u64", "index", "<u8"), ("parts_u32", "part", "<u4"),
            )}  # fmt: skip
            reported.append(ValuesReported(
                feed=FEED, lineage=record.lineage, step=record.step, attempt=(1, 1), part=0, parts=1,
                names=tuple(values), **columns,
                values=[(rows["index"] * each).astype("<f8").tobytes() for each in values.values()],
            ))  # fmt: skip
    return reported


def resealed(records: list[Record]) -> list[Record]:
    """The records that a broker would have written that formed these steps: digests, chains and sums of all of them."""
    chains: dict[int, bytes] = {-1: FIRST_CHAIN}
    found: list[Record] = []
    for record in records:
        if isinstance(record, StepFormed):
            rows, counts = rows_in(record), np.frombuffer(record.counts_u32, "<u4")
            loss, bounds = int(rows["loss_tokens"].sum()), np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
            digest = step_digest(record.step, loss, len(rows), pack_digests(rows, bounds))
            chains[record.step] = chain_digest(chains[record.step - 1], digest)
            record = replace(
                record, digest=digest, chain=chains[record.step], num_loss_tokens=loss, num_samples=len(rows)
            )
        elif isinstance(record, FeedEnded):
            record = replace(record, chain=chains[record.num_steps - 1])
        found.append(record)
    return found


def ledger_of(records: list[Record], path: Path | str = ":memory:") -> Ledger:
    ledger = Ledger(Path(path))
    ledger.update(entries(records))
    return ledger
