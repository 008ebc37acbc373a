"""The ledger: the log's index for people. Which sample went into which step, of which lineage, where in which pack.

A SQLite file beside the log, made from its records alone; nobody reads it to recover, and ``forget`` and ``update``
make it again. Still, the log is cut and the ledger is not: of old steps it is all there is. Every row therefore has a
crc32c, since a flipped bit in SQLite mostly reads back as another value (290 of 400 in a trial), and for each table the
number and the sum of its rows' checksums are kept, so that a row that a damaged page hides is missed. What does not
agree is named, never believed.

    records    records that are rare, as the log has them (``run_history``)
    steps      a row a step (``step_rows``)
    spans      where to look for a sample: (stream, lo, hi, step, lineage), one for every stretch of a step's indices of
               a stream, cut where ``GAP`` others lie between; a stream's samples mostly come in order, so mostly one
    rejected   (stream, lo, hi, indices, reasons) of each record that said new ones
    admitted   samples taken so far of each partition, where the log says so (``merge: arrival``)
    state      what it is and how far it has come

A batch of records is one transaction: after a crash it goes on where it was. The last record taken is known by its
checksum too: a log that is not the one the ledger has read from (a tail was lost with the power) is noticed. No table
has an index beside it, which would be damaged on its own.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from crc32c import crc32c

from streampack import wire
from streampack.core.messages import OVERLONG
from streampack.core.records import ChunkAdmitted, Record, SamplesRejected, StepFormed
from streampack.core.samples import I64
from streampack.errors import LedgerDamaged, UserError
from streampack_services import step_rows
from streampack_services.log import Entry
from streampack_services.run_history import LATEST, History
from streampack_services.step_rows import StepRows

VERSION = 1
GAP = 4096
BATCH_BYTES = 16 << 20
"""Of records, in one transaction."""
_TABLES = {
    "records": ("lsn", "kind", "body"),
    "steps": ("feed", "step", "lineage", "lsn", "body"),
    "spans": ("stream", "lo", "hi", "step", "lineage", "lsn"),
    "rejected": ("lsn", "stream", "lo", "hi", "indices", "reasons"),
    "admitted": ("stream", "partition", "upto", "lsn"),
}  # fmt: skip
_UNUSABLE = (
    sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
)  # fmt: skip
_SCHEMA = """
CREATE TABLE records (lsn INTEGER PRIMARY KEY, kind INTEGER, body BLOB, crc INTEGER);
CREATE TABLE steps (
    feed TEXT, step INTEGER, lineage INTEGER, lsn INTEGER, body BLOB, crc INTEGER, PRIMARY KEY (feed, step, lineage)
) WITHOUT ROWID;
CREATE TABLE spans (
    stream TEXT, lo INTEGER, hi INTEGER, step INTEGER, lineage INTEGER, lsn INTEGER, crc INTEGER,
    PRIMARY KEY (stream, lo, hi, step, lineage)
) WITHOUT ROWID;
CREATE TABLE rejected (lsn INTEGER, stream TEXT, lo INTEGER, hi INTEGER, indices BLOB, reasons TEXT, crc INTEGER);
CREATE TABLE admitted (
    stream TEXT, partition INTEGER, upto INTEGER, lsn INTEGER, crc INTEGER, PRIMARY KEY (stream, partition)
) WITHOUT ROWID;
CREATE TABLE state (id INTEGER PRIMARY KEY, body BLOB, crc INTEGER);
"""


@dataclass(slots=True)
class State:
    """How far a ledger is: it has what there was of records ``first_lsn`` to ``next_lsn - 1``, the last of which has
    checksum ``last_crc``. ``rows`` by table: how many, and the sum of their checksums."""

    rows: dict[str, list[int]]
    run: str = ""
    first_lsn: int = 0
    next_lsn: int = 0
    last_crc: int = 0
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Place:
    """A piece of a sample in a step: sample ``row`` of it, in pack ``pack``."""

    step: StepRows
    row: int
    pack: int

    @property
    def part(self) -> int:
        return int(self.step.rows["part"][self.row])


class Ledger:
    """The ledger in file ``path``, made where it is missing.

    Raises UserError where the file cannot be used, LedgerDamaged for one that is not as it was written, here and in
    every question.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._sqlite():
            self._db = sqlite3.connect(path, timeout=30.0, isolation_level=None)
            if not self._db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
                with self._transaction():
                    self._make()
            self.state, self.history = self._load()

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What the log says

    def update(self, entries: Iterable[Entry]) -> int:
        """Take the records that are not here yet, and return how many there were.

        ``entries`` may begin anywhere at or before ``state.next_lsn``. Raises LedgerDamaged if they begin later, or if
        the last record that is here is another one there: they are of another log.
        """
        taken, batch, size = 0, list[Entry](), 0
        for entry in entries:
            batch.append(entry)
            size += len(entry.body)
            if size >= BATCH_BYTES:
                taken += self._take(batch)
                batch, size = [], 0
        return taken + self._take(batch)

    def forget(self, lsn: int) -> None:
        """Drop all that record ``lsn`` and those after it have said, for ``update`` to take them again."""
        with self._sqlite(), self._transaction():
            for table in _TABLES:
                self._db.execute(f"DELETE FROM {table} WHERE lsn >= ?", (lsn,))
                self.state.rows[table] = list(self._sum(table))
            if not self.state.rows["records"][0]:
                self.state.first_lsn = 0
            self.state.next_lsn, self.state.last_crc = lsn, 0
            self._save()
        with self._sqlite():
            self.state, self.history = self._load()

    def keep(self, old: Ledger, begin: int) -> None:
        """Take over from an ``old`` one, as far as it is good, what records below ``begin`` said; into an empty one."""
        with self._sqlite(), self._transaction():
            for table in _TABLES:
                for _, row in old._checked(table, "lsn < ?", (begin,)):
                    if row is not None:
                        self._insert(table, tuple(row))
            if self.state.rows["records"][0]:
                self.state.first_lsn, self.state.next_lsn = old.state.first_lsn, begin
                self._save()
        self.state, self.history = self._load()

    def _take(self, batch: list[Entry]) -> int:
        with self._sqlite(), self._transaction():
            self.state, self.history = self._load()  # another process may have been here
            batch = self._new(batch)
            for entry in batch:
                record, _ = wire.decode_record(entry.kind, entry.body)
                self._add(entry.lsn, entry.kind, entry.body, record)
            if batch:
                self.state.run = self.history.run_name
                self.state.next_lsn = batch[-1].lsn + 1
                self.state.last_crc = crc32c(batch[-1].body)
                self._save()
        return len(batch)

    def _new(self, batch: list[Entry]) -> list[Entry]:
        """Those of ``batch`` that are not here; they must follow what is."""
        state = self.state
        for entry in batch:
            if entry.lsn == state.next_lsn - 1 and state.last_crc and crc32c(entry.body) != state.last_crc:
                raise self._damaged(f"got a log with another record {entry.lsn}, expected the one that was read")
        new = [entry for entry in batch if entry.lsn >= state.next_lsn]
        if new and not state.rows["records"][0]:
            state.first_lsn = state.next_lsn = new[0].lsn
        if new and new[0].lsn > state.next_lsn:
            gap = f"records {state.next_lsn} to {new[0].lsn - 1}"
            raise self._damaged(f"got a log that begins with record {new[0].lsn}, expected {gap} too")
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
        if self.history.add(lsn, record):
            self._insert("records", (lsn, kind, bytes(body)))
        for old in self.history.obsolete:
            self._delete("records", "lsn = ?", (old,))
        self.history.obsolete.clear()

    def _add_step(self, step: StepRows) -> bool:
        """Enter a step; whether it contradicts one that is here. The same again changes nothing."""
        found = self._db.execute(
            "SELECT body FROM steps WHERE feed = ? AND step = ? AND lineage = ?", (step.feed, step.step, step.lineage)
        ).fetchone()
        body = step_rows.encode(step)
        if found:
            return bool(found[0] != body)
        self._insert("steps", (step.feed, step.step, step.lineage, step.lsn, body))
        feed, numbers = self.history.feeds.get(step.feed), step.rows["stream"]
        if feed is None:
            raise self._damaged(f"got a step of feed {step.feed!r} in record {step.lsn}, expected its rules before it")
        for number in np.unique(numbers).tolist():
            name = feed.stream_name(number, step.step, step.lsn)
            for lo, hi in _stretches(step.rows["index"][numbers == number]):
                self._insert("spans", (name, lo, hi, step.step, step.lineage, step.lsn))
        return False

    def _add_rejected(self, lsn: int, stream: str, indices: I64, reasons: dict[str, int]) -> None:
        """Enter those that were not said before."""
        if not len(indices):
            return
        indices = np.unique(indices)
        query = "stream = ? AND lo <= ? AND hi >= ?"
        for row in self._rows("rejected", query, (stream, int(indices[-1]), int(indices[0]))):
            indices = np.setdiff1d(indices, np.frombuffer(row[4], "<i8"), assume_unique=True)
        if len(indices):
            said = json.dumps(reasons, sort_keys=True)
            lo, hi = int(indices[0]), int(indices[-1])
            self._insert("rejected", (lsn, stream, lo, hi, indices.astype("<i8").tobytes(), said))

    def _add_chunk(self, lsn: int, chunk: ChunkAdmitted) -> None:
        """How far a partition was taken in, and what of it is in no step."""
        lengths = np.frombuffer(chunk.lengths_u32, "<u4").astype(np.int64)
        feed = self.history.feed_of(chunk.stream)
        if feed is None:
            raise self._damaged(f"got a chunk of stream {chunk.stream!r} in record {lsn}, expected its rules before it")
        stream = feed.streams[chunk.stream]
        seqs = chunk.base_seq + np.arange(len(lengths), dtype=np.int64)
        indices = seqs * stream.partitions + chunk.partition
        self._add_rejected(lsn, chunk.stream, indices[lengths == 0], chunk.rejected)
        if stream.overlong == "drop":
            over = lengths > feed.rules_at(LATEST).budget
            self._add_rejected(lsn, chunk.stream, indices[over], {OVERLONG: int(over.sum())})
        where, key = "stream = ? AND partition = ?", (chunk.stream, chunk.partition)
        upto = chunk.base_seq + len(lengths)
        if next((row[2] for row in self._rows("admitted", where, key)), 0) < upto:
            self._delete("admitted", where, key)
            self._insert("admitted", (*key, upto, lsn))

    # Questions

    def step(self, feed: str, step: int, lineage: int) -> StepRows | None:
        """A step as it was recorded."""
        return next(self._steps("feed = ? AND step = ? AND lineage = ?", (feed, step, lineage)), None)

    def steps(self, feed: str) -> Iterator[StepRows]:
        """Every step of a feed, by number, of all lineages; damaged ones are passed over (``check`` names them)."""
        for _, row in self._checked("steps", "feed = ? ORDER BY step, lineage", (feed,)):
            if row is not None:
                yield _decoded(row)

    def lineages_of(self, feed: str, step: int) -> list[int]:
        """The lineages that have this step."""
        return [found.lineage for found in self._steps("feed = ? AND step = ?", (feed, step))]

    def last_step(self, feed: str, lineage: int) -> int | None:
        """The highest step of a lineage."""
        query = "SELECT max(step) FROM steps WHERE feed = ? AND lineage = ?"
        with self._sqlite():
            found: int | None = self._db.execute(query, (feed, lineage)).fetchone()[0]
        return found

    def find(self, stream: str, index: int) -> list[Place]:
        """Where a sample is: all its pieces in all lineages, in the order in which they were recorded."""
        feed, places = self.history.feed_of(stream), list[Place]()
        spans = self._rows("spans", "stream = ? AND lo <= ? AND hi >= ?", (stream, index, index))
        for *_, number, lineage, _ in sorted(spans, key=lambda row: int(row[5])):
            step = None if feed is None else self.step(feed.name, number, lineage)
            if feed is None or step is None:
                raise self._damaged(f"steps: got no row of step {number} of lineage {lineage}, expected one")
            hits = np.flatnonzero(step.rows["index"] == index).tolist()
            numbers = [int(step.rows["stream"][row]) for row in hits]
            places += [
                Place(step, row, int(step.packs[row])) for row, number in zip(hits, numbers, strict=True)
                if feed.stream_name(number, step.step, step.lsn) == stream
            ]  # fmt: skip
        return places

    def rejections(self, stream: str) -> Iterator[tuple[int, I64, dict[str, int]]]:
        """(lsn, indices int64 [n], reasons) of each record that rejected samples of a stream; none is in two."""
        for lsn, _, _, _, indices, reasons in self._rows("rejected", "stream = ?", (stream,)):
            yield lsn, np.frombuffer(indices, "<i8"), json.loads(reasons)

    def rejection(self, stream: str, index: int) -> tuple[int, dict[str, int]] | None:
        """(lsn, reasons) of the record that rejected a sample, if one did; of several reasons one is this sample's."""
        query = "stream = ? AND lo <= ? AND hi >= ?"
        for lsn, _, _, _, indices, reasons in self._rows("rejected", query, (stream, index, index)):
            if index in np.frombuffer(indices, "<i8"):
                return lsn, json.loads(reasons)
        return None

    def admitted(self, stream: str) -> dict[int, int]:
        """Samples taken in of each partition, as far as the log says so."""
        return {row[1]: row[2] for row in self._rows("admitted", "stream = ?", (stream,))}

    def furthest(self, stream: str) -> int:
        """The highest index of a stream's samples in steps, of all lineages; -1 if there is none."""
        with self._sqlite():
            found = self._db.execute("SELECT max(hi) FROM spans WHERE stream = ?", (stream,)).fetchone()[0]
        return -1 if found is None else int(found)

    def check(self, tables: Iterable[str] = _TABLES) -> list[str]:
        """What of these tables is damaged, a line each; reads every row."""
        wrong = []
        for table in tables:
            try:
                damaged = [f"{table}: {said}" for said, row in self._checked(table, "1", ()) if row is None]
                count, crcs = self.state.rows[table]
                if not damaged and (found := self._sum(table)) != (count, crcs):
                    damaged = [f"{table}: got {found[0]} rows that are not the {count} written"]
                wrong += damaged
            except LedgerDamaged as error:
                wrong.append(f"{table}: {error}")
        return wrong

    def fingerprints(self) -> dict[tuple[Any, ...], int | None]:
        """Checksums of all rows of steps, records and rejected samples by what they are; None for a damaged row."""
        found: dict[tuple[Any, ...], int | None] = {}
        for table, width in (("records", 1), ("steps", 3), ("rejected", 4)):
            names = ", ".join(_TABLES[table])
            for *values, crc in self._db.execute(f"SELECT {names}, crc FROM {table}"):
                found[(table, *values[:width])] = crc if crc == _crc(table, values) else None
        return found

    # SQLite

    def _make(self) -> None:
        for statement in _SCHEMA.split(";"):
            self._db.execute(statement)
        self.state = State({table: [0, 0] for table in _TABLES})
        self._save()

    def _load(self) -> tuple[State, History]:
        row = self._db.execute("SELECT body, crc FROM state").fetchone()
        if row is None or not isinstance(row[0], bytes) or crc32c(row[0]) != row[1]:
            raise self._damaged("state: got a row that is not what was written")
        state = msgspec.json.decode(row[0], type=State)
        if state.version != VERSION:
            raise self._damaged(f"got version {state.version}, expected {VERSION}")
        history = History()
        for lsn, kind, body in self._rows("records", "1 ORDER BY lsn", ()):
            history.add(lsn, wire.decode_record(kind, body)[0])
        history.obsolete.clear()
        return state, history

    def _save(self) -> None:
        body = msgspec.json.encode(self.state)
        self._db.execute("INSERT OR REPLACE INTO state VALUES (0, ?, ?)", (body, crc32c(body)))

    def _insert(self, table: str, values: tuple[Any, ...]) -> None:
        crc = _crc(table, values)
        self._db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * (len(values) + 1))})", (*values, crc))
        self.state.rows[table][0] += 1
        self.state.rows[table][1] += crc

    def _delete(self, table: str, where: str, key: tuple[Any, ...]) -> None:
        count, crcs = self._sum(table, where, key)
        self._db.execute(f"DELETE FROM {table} WHERE {where}", key)
        self.state.rows[table][0] -= count
        self.state.rows[table][1] -= crcs

    def _sum(self, table: str, where: str = "1", key: tuple[Any, ...] = ()) -> tuple[int, int]:
        with self._sqlite():
            query = f"SELECT count(*), coalesce(sum(crc), 0) FROM {table} WHERE {where}"
            count, crcs = self._db.execute(query, key).fetchone()
        return int(count), int(crcs)

    def _rows(self, table: str, where: str, key: tuple[Any, ...]) -> Iterator[list[Any]]:
        for said, row in self._checked(table, where, key):
            if row is None:
                raise self._damaged(f"{table}: {said}")
            yield row

    def _steps(self, where: str, key: tuple[Any, ...]) -> Iterator[StepRows]:
        return map(_decoded, self._rows("steps", where, key))

    def _checked(self, table: str, where: str, key: tuple[Any, ...]) -> Iterator[tuple[str, list[Any] | None]]:
        """(what it is, its columns) of each row; None for columns that do not agree with their checksum."""
        names = ", ".join(_TABLES[table])
        with self._sqlite():
            for *values, crc in self._db.execute(f"SELECT {names}, crc FROM {table} WHERE {where}", key):
                said = ", ".join(
                    f"{name} {value!r}" for name, value in zip(_TABLES[table], values, strict=True)
                    if not isinstance(value, bytes)
                )  # fmt: skip
                yield f"got a row that is not what was written: {said}", values if crc == _crc(table, values) else None

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def _sqlite(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _UNUSABLE:
                raise UserError(
                    f"ledger {self._path}: cannot be used: {error}: choose a folder that can be written"
                ) from None
            raise self._damaged(f"got a file that SQLite cannot read: {error}") from None

    def _damaged(self, what: str) -> LedgerDamaged:
        return LedgerDamaged(f"ledger {self._path}: {what}: make it again with 'streampack ledger rebuild'")


def _decoded(row: list[Any]) -> StepRows:
    feed, step, lineage, lsn, body = row
    return step_rows.decode(feed, lineage, step, lsn, body)


def _crc(table: str, values: Iterable[Any]) -> int:
    """Of a row: of its table, its numbers and texts, and its bytes."""
    crc = crc32c(table.encode())
    for value in values:
        kind = "b" if isinstance(value, bytes) else type(value).__name__
        crc = crc32c(value if isinstance(value, bytes) else f"{kind} {value}\0".encode(), crc)
    return int(crc)


def _stretches(indices: Any) -> Iterator[tuple[int, int]]:
    """First and last of indices that lie near each other."""
    least, most = int(indices.min()), int(indices.max())
    if most - least <= GAP:
        yield least, most
        return
    found = np.sort(indices)
    cuts = np.flatnonzero(np.diff(found) > GAP)
    yield from zip(found[[0, *(cuts + 1)]].tolist(), found[[*cuts, -1]].tolist(), strict=True)
