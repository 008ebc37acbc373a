"""The ledger's tables: rows of SQLite that are believed only while they agree with their checksums.

Every row has a crc32c, since a flipped bit in SQLite mostly reads back as another value (290 of 400 in a trial), and
for each table the number and the sum of its rows' checksums are kept, so that a row that a damaged page hides is
missed. No table has an index beside it, which would be damaged on its own. What the rows mean is the ``ledger``'s.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from streampack.errors import LedgerDamaged, UserError
from streampack.wire.checksums import crc32c

VERSION = 1
TABLES = {
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
class LedgerState:
    """How far a ledger is: it has what there was of records ``first_lsn`` to ``next_lsn - 1``, the last of which has
    checksum ``last_crc``. ``rows`` by table: how many, and the sum of their checksums.
    """

    rows: dict[str, list[int]]
    run: str = ""
    first_lsn: int = 0
    next_lsn: int = 0
    last_crc: int = 0
    version: int = VERSION


class Tables:
    """The tables in file ``path``, made where it is missing, and ``state``, as it was read or is about to be saved.

    Raises UserError where the file cannot be used, LedgerDamaged for what is not as it was written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._sqlite():
            self._db = sqlite3.connect(path, timeout=30.0, isolation_level=None)
            if not self._db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
                with self.transaction():
                    self._make()
        self.load_state()

    def _make(self) -> None:
        for statement in _SCHEMA.split(";"):
            self._db.execute(statement)
        self.state = LedgerState({table: [0, 0] for table in TABLES})
        self.save_state()

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is written in it, or nothing; ``state`` is to be loaded again where it was nothing."""
        with self._sqlite():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def load_state(self) -> None:
        """As it is in the file: another process may have been there."""
        with self._sqlite():
            row = self._db.execute("SELECT body, crc FROM state").fetchone()
        if row is None or not isinstance(row[0], bytes) or crc32c(row[0]) != row[1]:
            raise self.damaged("state: got a row that is not what was written")
        self.state = msgspec.json.decode(row[0], type=LedgerState)
        if self.state.version != VERSION:
            raise self.damaged(f"got version {self.state.version}, expected {VERSION}")

    def save_state(self) -> None:
        body = msgspec.json.encode(self.state)
        self._db.execute("INSERT OR REPLACE INTO state VALUES (0, ?, ?)", (body, crc32c(body)))

    def insert(self, table: str, values: tuple[Any, ...]) -> None:
        crc = _crc(table, values)
        self._db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * (len(values) + 1))})", (*values, crc))
        self.state.rows[table][0] += 1
        self.state.rows[table][1] += crc

    def delete(self, table: str, where: str, key: tuple[Any, ...]) -> None:
        count, crcs = self._sum(table, where, key)
        self._db.execute(f"DELETE FROM {table} WHERE {where}", key)
        self.state.rows[table][0] -= count
        self.state.rows[table][1] -= crcs

    def delete_since(self, lsn: int) -> None:
        """What records from ``lsn`` on said, in all tables; what is left is counted again."""
        for table in TABLES:
            self._db.execute(f"DELETE FROM {table} WHERE lsn >= ?", (lsn,))
            self.state.rows[table] = list(self._sum(table))

    def rows(self, table: str, where: str, key: tuple[Any, ...] = ()) -> Iterator[list[Any]]:
        """The columns of each row that ``where`` chooses. Raises LedgerDamaged at one that is not as it was written."""
        for said, row in self.checked(table, where, key):
            if row is None:
                raise self.damaged(f"{table}: {said}")
            yield row

    def checked(self, table: str, where: str, key: tuple[Any, ...] = ()) -> Iterator[tuple[str, list[Any] | None]]:
        """(what it is, its columns) of each row; None for columns that do not agree with their checksum."""
        names = ", ".join(TABLES[table])
        with self._sqlite():
            for *values, crc in self._db.execute(f"SELECT {names}, crc FROM {table} WHERE {where}", key):
                said = ", ".join(
                    f"{name} {value!r}" for name, value in zip(TABLES[table], values, strict=True)
                    if not isinstance(value, bytes)
                )  # fmt: skip
                yield f"got a row that is not what was written: {said}", values if crc == _crc(table, values) else None

    def first(self, what: str, table: str, where: str, key: tuple[Any, ...]) -> Any:
        """Column or aggregate ``what`` of the first row, None if there is none; no checksum is looked at."""
        with self._sqlite():
            found = self._db.execute(f"SELECT {what} FROM {table} WHERE {where}", key).fetchone()
        return None if found is None else found[0]

    def check(self, tables: Iterable[str] = TABLES) -> list[str]:
        """What of these tables is damaged, a line each; reads every row."""
        wrong = []
        for table in tables:
            try:
                damaged = [f"{table}: {said}" for said, row in self.checked(table, "1") if row is None]
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
            names = ", ".join(TABLES[table])
            for *values, crc in self._db.execute(f"SELECT {names}, crc FROM {table}"):
                found[(table, *values[:width])] = crc if crc == _crc(table, values) else None
        return found

    def _sum(self, table: str, where: str = "1", key: tuple[Any, ...] = ()) -> tuple[int, int]:
        with self._sqlite():
            query = f"SELECT count(*), coalesce(sum(crc), 0) FROM {table} WHERE {where}"
            count, crcs = self._db.execute(query, key).fetchone()
        return int(count), int(crcs)

    @contextmanager
    def _sqlite(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _UNUSABLE:
                raise UserError(
                    f"ledger {self._path}: cannot be used: {error}: choose a folder that can be written"
                ) from None
            raise self.damaged(f"got a file that SQLite cannot read: {error}") from None

    def damaged(self, what: str) -> LedgerDamaged:
        return LedgerDamaged(f"ledger {self._path}: {what}: make it again with 'streampack ledger rebuild'")


def _crc(table: str, values: Iterable[Any]) -> int:
    """Of a row: of its table, its numbers and texts, and its bytes."""
    crc = crc32c(table.encode())
    for value in values:
        kind = "b" if isinstance(value, bytes) else type(value).__name__
        crc = crc32c(value if isinstance(value, bytes) else f"{kind} {value}\0".encode(), crc)
    return int(crc)
