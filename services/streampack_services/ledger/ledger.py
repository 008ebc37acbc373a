"""The ledger: the log's index for people, from each sample to its step, lineage, pack and offset.

The ledger is a SQLite file beside the log, made from the log's records alone. Recovery never reads it, and ``forget``
and ``update`` can make it again. But the log is cut and the ledger is not, so only the ledger has the old steps.
Therefore a row that does not agree with its checksum (``ledger_tables``) is reported and never used. The tables:

    records    the rare records, as the log has them (``run_history``)
    steps      one row per step (``step_rows``)
    spans      where to look for a sample: (stream, lo, hi, step, lineage), from lo to hi without gaps above ``GAP``;
               mostly one per step and stream, because samples come nearly in order
    rejected   (stream, lo, hi, indices, reasons) of each record that rejects new samples
    admitted   samples admitted so far of each partition, if the log records them (``merge: arrival``)
    staged     samples sent so far of each partition whose samples wait before they are admitted
    completed  (stream, partition, base, stop, lo, hi, sent): samples base to stop - 1 waited, and were sent as ``sent``
    reported   values that a rank reported for samples of a step, as the log has them, compressed
    state      version, run, and the records that were read

A batch of records is one transaction, so after a crash the ledger continues where it was. The checksum of the last
record shows whether the log is still the one that the ledger was made from.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from streampack.core.intake.overlong import apply_terms
from streampack.core.intake.partition_records import repeated_of
from streampack.core.journal.key_index import REPEATED
from streampack.core.journal.log_records import (
    ChunkAdmitted,
    ChunkCompleted,
    ChunkStaged,
    Record,
    RulesChanged,
    SamplesRejected,
    SnapshotTaken,
    StepFormed,
    ValuesReported,
)
from streampack.core.model.lease_terms import terms_of
from streampack.core.model.samples import I64
from streampack.core.model.snapshot import Snapshot
from streampack.core.protocol.producer_messages import OVERLONG
from streampack.core.staging.dropped_samples import POLICY_LAG
from streampack.wire import record_frames
from streampack.wire.checksums import crc32c
from streampack_services.ledger import step_rows
from streampack_services.ledger.columns import pack_column, unpack_column
from streampack_services.ledger.ledger_tables import TABLES, LedgerState, Tables
from streampack_services.ledger.reported_values import ReportedValues, values_of
from streampack_services.ledger.run_history import LATEST, FeedHistory, RunHistory
from streampack_services.ledger.step_rows import StepRows
from streampack_services.log.log import LogEntry

GAP = 4096
"""Indices of a stream that are further apart are in different spans."""
BATCH_BYTES = 16 << 20
"""Bytes of records to write in one transaction."""
_COVERS = "stream = ? AND lo <= ? AND hi >= ?"
"""SQL condition for the rows of a stream that may hold an index from the third parameter to the second."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of a sample, or of one part of a split sample: row ``row`` of ``step``, in pack number ``pack``."""

    step: StepRows
    row: int
    pack: int

    @property
    def part(self) -> int:
        """Index of the part within its split sample; 0 for a whole sample."""
        return int(self.step.rows["part"][self.row])


@dataclass(frozen=True, slots=True)
class Completion:
    """A sample that waited: sent with number ``sent``, and admitted by record ``lsn`` with number ``seq``."""

    sent: int
    seq: int
    lsn: int


@dataclass(frozen=True, slots=True)
class Gap:
    """Steps ``first`` to ``last`` that are not recorded here: the log lost them, or another log has them.

    Trainers resumed after these steps from a checkpoint with ``snapshot``, which record ``lsn`` holds.
    """

    first: int
    last: int
    lsn: int
    snapshot: Snapshot

    def __str__(self) -> str:
        return f"one of steps {self.first} to {self.last}, which are not recorded here"


class Ledger:
    """The ledger in file ``path``, which is made if it is missing.

    With ``in_memory``, the ledger is a copy in memory, and the file is only read.

    The constructor and all methods raise UserError if the file cannot be used, LedgerDamaged if it is damaged.
    """

    def __init__(self, path: Path, *, in_memory: bool = False) -> None:
        self._tables = Tables(path, in_memory=in_memory)
        self.history = self._read_history()

    @property
    def state(self) -> LedgerState:
        """The run's name and the range of records that were read."""
        return self._tables.state

    def close(self) -> None:
        self._tables.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Updates from the log

    def update(self, entries: Iterable[LogEntry]) -> int:
        """Add the records that are not in the ledger yet; return their number.

        ``entries`` may begin at or before record ``state.next_lsn``. Raises LedgerDamaged if they begin later, or if
        they are of another log than the one that the ledger was made from.
        """
        taken, batch, size = 0, list[LogEntry](), 0
        for entry in entries:
            batch.append(entry)
            size += len(entry.body)
            if size >= BATCH_BYTES:
                taken += self._take(batch)
                batch, size = [], 0
        return taken + self._take(batch)

    def forget(self, lsn: int) -> None:
        """Delete all rows from record ``lsn`` and later records, so that ``update`` can add these records again."""
        with self._tables.transaction():
            self._tables.delete_since(lsn)
            if not self.state.rows["records"][0]:
                self.state.first_lsn = 0
            self.state.next_lsn, self.state.last_crc = lsn, 0
            self._tables.save_state()
        self._load()

    def keep(self, old: Ledger, begin: int) -> None:
        """Copy the intact rows of an ``old`` ledger from records below ``begin``; this ledger must be empty."""
        with self._tables.transaction():
            for table in TABLES:
                for _, row in old._tables.checked(table, "lsn < ?", (begin,)):
                    if row is not None:
                        self._tables.insert(table, tuple(row))
            if self.state.rows["records"][0]:
                self.state.first_lsn, self.state.next_lsn = old.state.first_lsn, begin
                self._tables.save_state()
        self._load()

    def _take(self, batch: list[LogEntry]) -> int:
        """Add the new records of a batch in one transaction; return their number."""
        with self._tables.transaction():
            self._load()  # another process may have updated the ledger
            batch = self._new(batch)
            for entry in batch:
                record, _ = record_frames.decode_record(entry.kind, entry.body)
                self._add(entry.lsn, entry.kind, entry.body, record)
            if batch:
                self.state.run = self.history.run_name
                self.state.next_lsn = batch[-1].lsn + 1
                self.state.last_crc = crc32c(batch[-1].body)
                self._tables.save_state()
        return len(batch)

    def _new(self, batch: list[LogEntry]) -> list[LogEntry]:
        """Return those records of ``batch`` that are not in the ledger. Raises LedgerDamaged as ``update`` does."""
        state = self.state
        for entry in batch:
            if entry.lsn == state.next_lsn - 1 and state.last_crc and crc32c(entry.body) != state.last_crc:
                raise self._tables.damaged(
                    f"record {entry.lsn} of the log differs from the record that the ledger read before"
                )
        new = [entry for entry in batch if entry.lsn >= state.next_lsn]
        if new and not state.rows["records"][0]:
            state.first_lsn = state.next_lsn = new[0].lsn
        if new and new[0].lsn > state.next_lsn:
            gap = f"records {state.next_lsn} to {new[0].lsn - 1}"
            raise self._tables.damaged(f"the log begins with record {new[0].lsn}, but {gap} are not in the ledger")
        return new

    def _add(self, lsn: int, kind: int, body: Any, record: Record) -> None:
        """Add the rows of one record; store a rare record only if it adds a fact."""
        match record:
            case StepFormed():
                if not self._add_step(step_rows.rows_of(record, lsn)):
                    return
            case SamplesRejected():
                indices = np.frombuffer(record.indices_u64, "<u8").astype(np.int64)
                self._add_rejected(lsn, record.stream, indices, record.reasons)
                return
            case ChunkAdmitted():
                self._add_chunk(lsn, record)
                if isinstance(record, ChunkCompleted):
                    self._add_completed(lsn, record)
                return
            case ChunkStaged():
                self._count("staged", record.stream, record.partition, _stop_of(record), lsn)
                return
            case ValuesReported():
                row = record.feed, record.step, record.lineage, lsn, zlib.compress(bytes(body), 1)
                self._tables.insert("reported", row)
                return
        if self.history.add(lsn, record, self._is_brought(self.history, lsn, record)):
            self._tables.insert("records", (lsn, kind, bytes(body)))
            if isinstance(record, RulesChanged):
                self._forget_rejections(self.history.feeds[record.feed])
        for old in self.history.obsolete:
            self._tables.delete("records", "lsn = ?", (old,))
        self.history.obsolete.clear()

    def _is_brought(self, history: RunHistory, lsn: int, record: Record) -> bool:
        """Return whether a record is a snapshot from a trainer's checkpoint, whose previous step is not recorded."""
        if not isinstance(record, SnapshotTaken) or not record.snapshot.step:
            return False
        feed, before = history.feeds.get(record.feed), record.snapshot.step - 1
        key = record.feed, before, 0 if feed is None else feed.effective(before), lsn
        return self._tables.first("lsn", "steps", "feed = ? AND step = ? AND lineage = ? AND lsn < ?", key) is None

    def _add_step(self, step: StepRows) -> bool:
        """Add a step and its spans; return whether another step with the same number is already there.

        Adding the same step again changes nothing.
        """
        key = (step.feed, step.step, step.lineage)
        recorded = self._tables.first("body", "steps", "feed = ? AND step = ? AND lineage = ?", key)
        body = step_rows.encode(step)
        if recorded is not None:
            return bool(recorded != body)
        self._tables.insert("steps", (*key, step.lsn, body))
        feed = self.history.feeds.get(step.feed)
        if feed is None:
            got = f"record {step.lsn} is a step of feed {step.feed!r}"
            raise self._tables.damaged(f"{got}, but no earlier record has the feed's rules")
        for name, rows in feed.by_stream(step.rows, step.step, step.lsn).items():
            for lo, hi in _stretches(rows["index"]):
                self._tables.insert("spans", (name, lo, hi, step.step, step.lineage, step.lsn))
        return False

    def _add_rejected(self, lsn: int, stream: str, indices: I64, reasons: dict[str, int]) -> None:
        """Add the rejected samples that are not in the ledger yet; ``indices``: int64 [n]."""
        if not len(indices):
            return
        indices = np.unique(indices)
        for row in self._tables.rows("rejected", _COVERS, (stream, int(indices[-1]), int(indices[0]))):
            indices = np.setdiff1d(indices, np.frombuffer(row[4], "<i8"), assume_unique=True)
        if len(indices):
            text = json.dumps(reasons, sort_keys=True)
            lo, hi = int(indices[0]), int(indices[-1])
            self._tables.insert("rejected", (lsn, stream, lo, hi, indices.astype("<i8").tobytes(), text))

    def _forget_rejections(self, feed: FeedHistory) -> None:
        """Delete the rejections of samples that the broker reads again, and cuts in another way, after a change.

        The broker records which of them it rejects then.
        """
        for stream in feed.streams:
            rows = list(self._tables.rows("rejected", "stream = ?", (stream,)))
            indices = [np.frombuffer(row[4], "<i8").astype(np.int64) for row in rows]
            anew = feed.cut_anew(stream, np.concatenate([np.zeros(0, np.int64), *indices]), last=True)
            bounds = np.cumsum([len(index) for index in indices])
            for row, index, is_anew in zip(rows, indices, np.split(anew, bounds[:-1]), strict=False):
                lsn, _, lo, hi, _, reasons = row
                if not is_anew.any():
                    continue
                self._tables.delete("rejected", "lsn = ? AND stream = ? AND lo = ? AND hi = ?", (lsn, stream, lo, hi))
                if len(kept := index[~is_anew]):
                    numbers = kept.astype("<i8").tobytes()
                    self._tables.insert("rejected", (lsn, stream, int(kept[0]), int(kept[-1]), numbers, reasons))

    def _add_chunk(self, lsn: int, chunk: ChunkAdmitted) -> None:
        """Add the partition's number of admitted samples, and the chunk's samples that were rejected or dropped."""
        lengths = np.frombuffer(chunk.lengths_u32, "<u4").astype(np.int64)
        feed = self.history.feed_of(chunk.stream)
        if feed is None:
            got = f"record {lsn} is a chunk of stream {chunk.stream!r}"
            raise self._tables.damaged(f"{got}, but no earlier record has the stream's rules")
        stream = feed.streams[chunk.stream]
        seqs = chunk.base_seq + np.arange(len(lengths), dtype=np.int64)
        indices = seqs * stream.partitions + chunk.partition
        self._add_rejected(lsn, chunk.stream, indices[lengths == 0], chunk.rejected)
        if chunk.stale:
            self._add_rejected(lsn, chunk.stream, indices, {POLICY_LAG: int((lengths > 0).sum())})
        elif (repeated := repeated_of(chunk)) is not None:
            repeated &= lengths > 0
            self._add_rejected(lsn, chunk.stream, indices[repeated], {REPEATED: int(repeated.sum())})
        if not chunk.stale and stream.overlong == "drop":
            (terms,) = terms_of(replace(feed.rules_at(LATEST), streams=(stream,)))
            over = (lengths > 0) & (apply_terms(terms, lengths, chunk.keep).length == 0)
            self._add_rejected(lsn, chunk.stream, indices[over], {OVERLONG: int(over.sum())})
        self._count("admitted", chunk.stream, chunk.partition, _stop_of(chunk), lsn)

    def _add_completed(self, lsn: int, chunk: ChunkCompleted) -> None:
        """Add, for samples that waited for late fields, the numbers that they were sent with."""
        sent = np.frombuffer(chunk.sent_u64, "<u8").astype(np.int64)
        if len(sent):
            row = chunk.stream, chunk.partition, chunk.base_seq, lsn, _stop_of(chunk), int(sent.min()), int(sent.max())
            self._tables.insert("completed", (*row, pack_column(sent - np.arange(len(sent)))))

    def _count(self, table: str, stream: str, partition: int, upto: int, lsn: int) -> None:
        """Set the number of samples of a partition in ``table`` to ``upto``, unless it is higher already."""
        where, key = "stream = ? AND partition = ?", (stream, partition)
        if next((row[2] for row in self._tables.rows(table, where, key)), 0) < upto:
            self._tables.delete(table, where, key)
            self._tables.insert(table, (*key, upto, lsn))

    # Questions

    def step(self, feed: str, step: int, lineage: int) -> StepRows | None:
        """Return the recorded step of a lineage; None for an unrecorded step."""
        return next(self._steps("feed = ? AND step = ? AND lineage = ?", (feed, step, lineage)), None)

    def steps(self, feed: str) -> Iterator[StepRows]:
        """Yield every step of a feed in all lineages, by number, without damaged ones (``check`` names them)."""
        for _, row in self._tables.checked("steps", "feed = ? ORDER BY step, lineage", (feed,)):
            if row is not None:
                yield _decoded(row)

    def records_of(self, feed: str, step: int) -> list[StepRows]:
        """Return the records of this step in all lineages."""
        return list(self._steps("feed = ? AND step = ?", (feed, step)))

    def last_step(self, feed: str, lineage: int) -> int | None:
        """Return the highest recorded step of a lineage; None if there is none."""
        last: int | None = self._tables.first("max(step)", "steps", "feed = ? AND lineage = ?", (feed, lineage))
        return last

    def last_before(self, feed: str, step: int) -> int:
        """Return the highest recorded step below ``step`` in the history that counts; -1 if there is none."""
        stop = step
        for branch in reversed(self.history.feeds[feed].branches):
            where = "feed = ? AND lineage = ? AND step >= ? AND step < ?"
            key = feed, branch.number, branch.step, stop
            if (last := self._tables.first("max(step)", "steps", where, key)) is not None:
                return int(last)
            stop = min(stop, branch.step)
        return -1

    def last_with(self, stream: str, below: int, first: int) -> int:
        """Return the last step from ``first`` on that may have samples of a stream with an index ``below``; or -1."""
        last = self._tables.first("max(step)", "spans", "stream = ? AND lo < ? AND step >= ?", (stream, below, first))
        return -1 if last is None else int(last)

    def gaps(self, feed: str) -> list[Gap]:
        """Return the ranges of steps that are not recorded here, after which trainers resumed from a checkpoint."""
        history, unrecorded = self.history.feeds[feed], list[Gap]()
        for lsn, snapshot in history.brought:
            replaced = any(branch.lsn > lsn and branch.step < snapshot.step for branch in history.branches)
            first = self.last_before(feed, snapshot.step) + 1
            if not replaced and first < snapshot.step:
                unrecorded.append(Gap(first, snapshot.step - 1, lsn, snapshot))
        return unrecorded

    def find(self, stream: str, index: int) -> list[Placement]:
        """Return all places of a sample and its parts, in all lineages, in the order of their records."""
        feed, places = self.history.feed_of(stream), list[Placement]()
        spans = self._tables.rows("spans", _COVERS, (stream, index, index))
        for *_, number, lineage, _ in sorted(spans, key=lambda row: int(row[5])):
            step = None if feed is None else self.step(feed.name, number, lineage)
            if feed is None or step is None:
                raise self._tables.damaged(f"table steps has no row for step {number} of lineage {lineage}")
            hits = np.flatnonzero(step.rows["index"] == index).tolist()
            places += [
                Placement(step, row, int(step.packs[row])) for row in hits
                if feed.stream_name(int(step.rows["stream"][row]), step.step, step.lsn) == stream
            ]  # fmt: skip
        return places

    def rejections(self, stream: str) -> Iterator[I64]:
        """Yield the indices, int64 [n], of each record that rejected samples of a stream; no index comes twice."""
        for *_, indices, _ in self._tables.rows("rejected", "stream = ?", (stream,)):
            yield np.frombuffer(indices, "<i8")

    def rejection(self, stream: str, index: int) -> dict[str, int] | None:
        """Return the reasons and counts of the record that rejected a sample; None if no record did."""
        for *_, indices, reasons in self._tables.rows("rejected", _COVERS, (stream, index, index)):
            if index in np.frombuffer(indices, "<i8"):
                return dict(json.loads(reasons))
        return None

    def admitted(self, stream: str) -> dict[int, int]:
        """Return the number of admitted samples of each partition, if the log records them."""
        return {row[1]: row[2] for row in self._tables.rows("admitted", "stream = ?", (stream,))}

    def staged(self, stream: str) -> dict[int, int]:
        """Return the number of samples that came of each partition whose samples wait before they are admitted."""
        return {row[1]: row[2] for row in self._tables.rows("staged", "stream = ?", (stream,))}

    def completion(self, stream: str, partition: int, seq: int) -> Completion | None:
        """Return how a sample was sent that was admitted with number ``seq``; None if it did not wait."""
        where = "stream = ? AND partition = ? AND base <= ? AND stop > ? ORDER BY base DESC, lsn DESC"
        waited = self._completions(where, (stream, partition, seq, seq))
        return next((sample for sample in waited if sample.seq == seq), None)

    def completion_of(self, stream: str, partition: int, sent: int) -> Completion | None:
        """Return how a sample was admitted that was sent with number ``sent``; None if it was not, or did not wait."""
        where = "stream = ? AND partition = ? AND lo <= ? AND hi >= ?"
        waited = self._completions(where, (stream, partition, sent, sent))
        return next((sample for sample in waited if sample.sent == sent), None)

    def sent_twice(self, stream: str, partition: int) -> list[int]:
        """Return the numbers with which samples were sent that were admitted more than once."""
        rows = self._tables.checked("completed", "stream = ? AND partition = ?", (stream, partition))
        sent = [_sent_numbers(row) for _, row in rows if row is not None]
        numbers, counts = np.unique(np.concatenate([np.zeros(0, np.int64), *sent]), return_counts=True)
        repeated: list[int] = numbers[counts > 1].tolist()
        return repeated

    def _completions(self, where: str, key: tuple[Any, ...]) -> Iterator[Completion]:
        """Yield the samples of the rows that the SQL condition ``where`` with parameters ``key`` chooses."""
        for row in self._tables.rows("completed", where, key):
            _, _, base, lsn, *_ = row
            yield from (Completion(sent, base + at, lsn) for at, sent in enumerate(_sent_numbers(row).tolist()))

    def reported(self, feed: str, step: int, lineage: int) -> list[ReportedValues]:
        """Return the values that ranks reported for the samples of a step, by the names reported together."""
        parts = list[ValuesReported]()
        where, key = "feed = ? AND step = ? AND lineage = ? ORDER BY lsn", (feed, step, lineage)
        for *_, body in self._tables.rows("reported", where, key):
            record, _ = record_frames.decode_record(ValuesReported.TYPE, zlib.decompress(body))
            assert isinstance(record, ValuesReported)
            parts.append(record)
        return values_of(parts)

    def furthest(self, stream: str) -> int:
        """Return the highest index of a stream's samples in steps of any lineage; -1 if there is none."""
        highest = self._tables.first("max(hi)", "spans", "stream = ?", (stream,))
        return -1 if highest is None else int(highest)

    def check(self, tables: Iterable[str] = TABLES) -> list[str]:
        """Read every row of the tables; return a line of text for each damaged one."""
        return self._tables.check(tables)

    def fingerprints(self) -> dict[tuple[Any, ...], int | None]:
        """Return the checksums of the rows that only the ledger may have, by key; None for a damaged row."""
        return self._tables.fingerprints()

    def _steps(self, where: str, key: tuple[Any, ...]) -> Iterator[StepRows]:
        """Return the steps whose rows the SQL condition ``where`` with parameters ``key`` chooses."""
        return map(_decoded, self._tables.rows("steps", where, key))

    def _load(self) -> None:
        """Read state and history from the file."""
        self._tables.load_state()
        self.history = self._read_history()

    def _read_history(self) -> RunHistory:
        """Put the history together from the rare records in the ledger."""
        history = RunHistory()
        for lsn, kind, body in self._tables.rows("records", "1 ORDER BY lsn"):
            record, _ = record_frames.decode_record(kind, body)
            history.add(lsn, record, self._is_brought(history, lsn, record))
        history.obsolete.clear()
        return history


def _stop_of(chunk: ChunkAdmitted | ChunkStaged) -> int:
    """Return the number of the first sample after a chunk."""
    return chunk.base_seq + len(chunk.lengths_u32) // 4


def _sent_numbers(row: list[Any]) -> I64:
    """Return the numbers with which the samples of a row of the table ``completed`` were sent, int64 [n]."""
    _, _, base, _, stop, _, _, body = row
    numbers: I64 = unpack_column(body, 0, stop - base)[0] + np.arange(stop - base)
    return numbers


def _decoded(row: list[Any]) -> StepRows:
    """Return the step of a row of the table ``steps``."""
    feed, step, lineage, lsn, body = row
    return step_rows.decode(feed, lineage, step, lsn, body)


def _stretches(indices: Any) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of each group of indices without gaps above GAP."""
    least, most = int(indices.min()), int(indices.max())
    if most - least <= GAP:
        yield least, most
        return
    rising = np.sort(indices)
    cuts = np.flatnonzero(np.diff(rising) > GAP)
    yield from zip(rising[[0, *(cuts + 1)]].tolist(), rising[[*cuts, -1]].tolist(), strict=True)
