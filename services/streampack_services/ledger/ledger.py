"""The ledger: the log's index for people. Which sample went into which step, of which lineage, where in which pack.

A SQLite file beside the log, made from its records alone; nobody reads it to recover, and ``forget`` and ``update``
make it again. Still, the log is cut and the ledger is not: of old steps it is all there is. So a row that does not
agree with its checksum (``ledger_tables``) is named, never believed.

    records    records that are rare, as the log has them (``run_history``)
    steps      a row a step (``step_rows``)
    spans      where to look for a sample: (stream, lo, hi, step, lineage), one for every stretch of a step's indices of
               a stream, cut where ``GAP`` others lie between; a stream's samples mostly come in order, so mostly one
    rejected   (stream, lo, hi, indices, reasons) of each record that said new ones
    admitted   samples taken so far of each partition, where the log says so (``merge: arrival``)
    state      what it is and how far it has come

A batch of records is one transaction: after a crash it goes on where it was. The last record taken is known by its
checksum too: a log that is not the one the ledger has read from (a tail was lost with the power) is noticed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from streampack.core.intake.admission import POLICY_LAG
from streampack.core.intake.lease_terms import terms_of
from streampack.core.intake.overlong import apply_terms
from streampack.core.journal.log_records import ChunkAdmitted, Record, SamplesRejected, SnapshotTaken, StepFormed
from streampack.core.model.samples import I64
from streampack.core.model.snapshot import Snapshot
from streampack.core.protocol.producer_messages import OVERLONG
from streampack.wire import record_frames
from streampack.wire.checksums import crc32c
from streampack_services.ledger import step_rows
from streampack_services.ledger.ledger_tables import TABLES, LedgerState, Tables
from streampack_services.ledger.run_history import LATEST, RunHistory
from streampack_services.ledger.step_rows import StepRows
from streampack_services.log.log import LogEntry

GAP = 4096
BATCH_BYTES = 16 << 20
"""Of records, in one transaction."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A piece of a sample in a step: sample ``row`` of it, in pack ``pack``."""

    step: StepRows
    row: int
    pack: int

    @property
    def part(self) -> int:
        return int(self.step.rows["part"][self.row])


@dataclass(frozen=True, slots=True)
class Gap:
    """Steps ``first`` to ``last`` are not recorded here: the log lost them, or another log has them. Trainers resumed
    after them, from a checkpoint with ``snapshot``, which record ``lsn`` holds.
    """

    first: int
    last: int
    lsn: int
    snapshot: Snapshot

    def __str__(self) -> str:
        return f"not recorded here: steps {self.first} to {self.last}"


class Ledger:
    """The ledger in file ``path``, made where it is missing.

    Raises UserError where the file cannot be used, LedgerDamaged for one that is not as it was written, here and in
    every question.
    """

    def __init__(self, path: Path) -> None:
        self._tables = Tables(path)
        self.history = self._read_history()

    @property
    def state(self) -> LedgerState:
        """How far it is."""
        return self._tables.state

    def close(self) -> None:
        self._tables.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What the log says

    def update(self, entries: Iterable[LogEntry]) -> int:
        """Take the records that are not here yet, and return how many there were.

        ``entries`` may begin anywhere at or before ``state.next_lsn``. Raises LedgerDamaged if they begin later, or if
        the last record that is here is another one there: they are of another log.
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
        """Drop all that record ``lsn`` and those after it have said, for ``update`` to take them again."""
        with self._tables.transaction():
            self._tables.delete_since(lsn)
            if not self.state.rows["records"][0]:
                self.state.first_lsn = 0
            self.state.next_lsn, self.state.last_crc = lsn, 0
            self._tables.save_state()
        self._load()

    def keep(self, old: Ledger, begin: int) -> None:
        """Take over from an ``old`` one, as far as it is good, what records below ``begin`` said; into an empty one."""
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
        with self._tables.transaction():
            self._load()  # another process may have been here
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
        """Those of ``batch`` that are not here; they must follow what is."""
        state = self.state
        for entry in batch:
            if entry.lsn == state.next_lsn - 1 and state.last_crc and crc32c(entry.body) != state.last_crc:
                raise self._tables.damaged(f"got a log with another record {entry.lsn}, expected the one that was read")
        new = [entry for entry in batch if entry.lsn >= state.next_lsn]
        if new and not state.rows["records"][0]:
            state.first_lsn = state.next_lsn = new[0].lsn
        if new and new[0].lsn > state.next_lsn:
            gap = f"records {state.next_lsn} to {new[0].lsn - 1}"
            raise self._tables.damaged(f"got a log that begins with record {new[0].lsn}, expected {gap} too")
        return new

    def _add(self, lsn: int, kind: int, body: Any, record: Record) -> None:
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
                return
        if self.history.add(lsn, record, self._is_brought(self.history, lsn, record)):
            self._tables.insert("records", (lsn, kind, bytes(body)))
        for old in self.history.obsolete:
            self._tables.delete("records", "lsn = ?", (old,))
        self.history.obsolete.clear()

    def _is_brought(self, history: RunHistory, lsn: int, record: Record) -> bool:
        """Is this a snapshot of a step whose predecessor was not recorded before it, brought by a checkpoint?"""
        if not isinstance(record, SnapshotTaken) or not record.snapshot.step:
            return False
        feed, before = history.feeds.get(record.feed), record.snapshot.step - 1
        key = record.feed, before, 0 if feed is None else feed.effective(before), lsn
        return self._tables.first("lsn", "steps", "feed = ? AND step = ? AND lineage = ? AND lsn < ?", key) is None

    def _add_step(self, step: StepRows) -> bool:
        """Enter a step; whether it contradicts one that is here. The same again changes nothing."""
        key = (step.feed, step.step, step.lineage)
        found = self._tables.first("body", "steps", "feed = ? AND step = ? AND lineage = ?", key)
        body = step_rows.encode(step)
        if found is not None:
            return bool(found != body)
        self._tables.insert("steps", (*key, step.lsn, body))
        feed, numbers = self.history.feeds.get(step.feed), step.rows["stream"]
        if feed is None:
            got = f"got a step of feed {step.feed!r} in record {step.lsn}"
            raise self._tables.damaged(f"{got}, expected its rules before it")
        for number in np.unique(numbers).tolist():
            name = feed.stream_name(number, step.step, step.lsn)
            for lo, hi in _stretches(step.rows["index"][numbers == number]):
                self._tables.insert("spans", (name, lo, hi, step.step, step.lineage, step.lsn))
        return False

    def _add_rejected(self, lsn: int, stream: str, indices: I64, reasons: dict[str, int]) -> None:
        """Enter those that were not said before."""
        if not len(indices):
            return
        indices = np.unique(indices)
        query = "stream = ? AND lo <= ? AND hi >= ?"
        for row in self._tables.rows("rejected", query, (stream, int(indices[-1]), int(indices[0]))):
            indices = np.setdiff1d(indices, np.frombuffer(row[4], "<i8"), assume_unique=True)
        if len(indices):
            said = json.dumps(reasons, sort_keys=True)
            lo, hi = int(indices[0]), int(indices[-1])
            self._tables.insert("rejected", (lsn, stream, lo, hi, indices.astype("<i8").tobytes(), said))

    def _add_chunk(self, lsn: int, chunk: ChunkAdmitted) -> None:
        """How far a partition was taken in, and what of it is in no step."""
        lengths = np.frombuffer(chunk.lengths_u32, "<u4").astype(np.int64)
        feed = self.history.feed_of(chunk.stream)
        if feed is None:
            got = f"got a chunk of stream {chunk.stream!r} in record {lsn}"
            raise self._tables.damaged(f"{got}, expected its rules before it")
        stream = feed.streams[chunk.stream]
        seqs = chunk.base_seq + np.arange(len(lengths), dtype=np.int64)
        indices = seqs * stream.partitions + chunk.partition
        self._add_rejected(lsn, chunk.stream, indices[lengths == 0], chunk.rejected)
        if chunk.stale:
            self._add_rejected(lsn, chunk.stream, indices, {POLICY_LAG: int((lengths > 0).sum())})
        elif stream.overlong == "drop":
            (terms,) = terms_of(replace(feed.rules_at(LATEST), streams=(stream,)))
            over = (lengths > 0) & (apply_terms(terms, lengths, chunk.keep).length == 0)
            self._add_rejected(lsn, chunk.stream, indices[over], {OVERLONG: int(over.sum())})
        where, key = "stream = ? AND partition = ?", (chunk.stream, chunk.partition)
        upto = chunk.base_seq + len(lengths)
        if next((row[2] for row in self._tables.rows("admitted", where, key)), 0) < upto:
            self._tables.delete("admitted", where, key)
            self._tables.insert("admitted", (*key, upto, lsn))

    # Questions

    def step(self, feed: str, step: int, lineage: int) -> StepRows | None:
        """A step as it was recorded."""
        return next(self._steps("feed = ? AND step = ? AND lineage = ?", (feed, step, lineage)), None)

    def steps(self, feed: str) -> Iterator[StepRows]:
        """Every step of a feed, by number, of all lineages; damaged ones are passed over (``check`` names them)."""
        for _, row in self._tables.checked("steps", "feed = ? ORDER BY step, lineage", (feed,)):
            if row is not None:
                yield _decoded(row)

    def lineages_of(self, feed: str, step: int) -> list[int]:
        """The lineages that have this step."""
        return [found.lineage for found in self._steps("feed = ? AND step = ?", (feed, step))]

    def last_step(self, feed: str, lineage: int) -> int | None:
        """The highest step of a lineage."""
        found: int | None = self._tables.first("max(step)", "steps", "feed = ? AND lineage = ?", (feed, lineage))
        return found

    def last_before(self, feed: str, step: int) -> int:
        """The highest recorded step below ``step`` in the history that counts; -1 if there is none."""
        stop = step
        for branch in reversed(self.history.feeds[feed].branches):
            where = "feed = ? AND lineage = ? AND step >= ? AND step < ?"
            key = feed, branch.number, branch.step, stop
            if (found := self._tables.first("max(step)", "steps", where, key)) is not None:
                return int(found)
            stop = min(stop, branch.step)
        return -1

    def gaps(self, feed: str) -> list[Gap]:
        """Steps that are not recorded here, though trainers had them: they resumed after them from a checkpoint."""
        of, found = self.history.feeds[feed], list[Gap]()
        for lsn, snapshot in of.brought:
            replaced = any(each.lsn > lsn and each.step < snapshot.step for each in of.branches)
            first = self.last_before(feed, snapshot.step) + 1
            if not replaced and first < snapshot.step:
                found.append(Gap(first, snapshot.step - 1, lsn, snapshot))
        return found

    def find(self, stream: str, index: int) -> list[Placement]:
        """Where a sample is: all its pieces in all lineages, in the order in which they were recorded."""
        feed, places = self.history.feed_of(stream), list[Placement]()
        spans = self._tables.rows("spans", "stream = ? AND lo <= ? AND hi >= ?", (stream, index, index))
        for *_, number, lineage, _ in sorted(spans, key=lambda row: int(row[5])):
            step = None if feed is None else self.step(feed.name, number, lineage)
            if feed is None or step is None:
                raise self._tables.damaged(f"steps: got no row of step {number} of lineage {lineage}, expected one")
            hits = np.flatnonzero(step.rows["index"] == index).tolist()
            numbers = [int(step.rows["stream"][row]) for row in hits]
            places += [
                Placement(step, row, int(step.packs[row])) for row, number in zip(hits, numbers, strict=True)
                if feed.stream_name(number, step.step, step.lsn) == stream
            ]  # fmt: skip
        return places

    def rejections(self, stream: str) -> Iterator[tuple[int, I64, dict[str, int]]]:
        """(lsn, indices int64 [n], reasons) of each record that rejected samples of a stream; none is in two."""
        for lsn, _, _, _, indices, reasons in self._tables.rows("rejected", "stream = ?", (stream,)):
            yield lsn, np.frombuffer(indices, "<i8"), json.loads(reasons)

    def rejection(self, stream: str, index: int) -> tuple[int, dict[str, int]] | None:
        """(lsn, reasons) of the record that rejected a sample, if one did; of several reasons one is this sample's."""
        query = "stream = ? AND lo <= ? AND hi >= ?"
        for lsn, _, _, _, indices, reasons in self._tables.rows("rejected", query, (stream, index, index)):
            if index in np.frombuffer(indices, "<i8"):
                return lsn, json.loads(reasons)
        return None

    def admitted(self, stream: str) -> dict[int, int]:
        """Samples taken in of each partition, as far as the log says so."""
        return {row[1]: row[2] for row in self._tables.rows("admitted", "stream = ?", (stream,))}

    def furthest(self, stream: str) -> int:
        """The highest index of a stream's samples in steps, of all lineages; -1 if there is none."""
        found = self._tables.first("max(hi)", "spans", "stream = ?", (stream,))
        return -1 if found is None else int(found)

    def check(self, tables: Iterable[str] = TABLES) -> list[str]:
        """What of these tables is damaged, a line each; reads every row."""
        return self._tables.check(tables)

    def fingerprints(self) -> dict[tuple[Any, ...], int | None]:
        """Checksums of all rows of steps, records and rejected samples by what they are; None for a damaged row."""
        return self._tables.fingerprints()

    def _steps(self, where: str, key: tuple[Any, ...]) -> Iterator[StepRows]:
        return map(_decoded, self._tables.rows("steps", where, key))

    def _load(self) -> None:
        """As it is in the file."""
        self._tables.load_state()
        self.history = self._read_history()

    def _read_history(self) -> RunHistory:
        history = RunHistory()
        for lsn, kind, body in self._tables.rows("records", "1 ORDER BY lsn"):
            record, _ = record_frames.decode_record(kind, body)
            history.add(lsn, record, self._is_brought(history, lsn, record))
        history.obsolete.clear()
        return history


def _decoded(row: list[Any]) -> StepRows:
    feed, step, lineage, lsn, body = row
    return step_rows.decode(feed, lineage, step, lsn, body)


def _stretches(indices: Any) -> Iterator[tuple[int, int]]:
    """First and last of indices that lie near each other."""
    least, most = int(indices.min()), int(indices.max())
    if most - least <= GAP:
        yield least, most
        return
    found = np.sort(indices)
    cuts = np.flatnonzero(np.diff(found) > GAP)
    yield from zip(found[[0, *(cuts + 1)]].tolist(), found[[*cuts, -1]].tolist(), strict=True)
