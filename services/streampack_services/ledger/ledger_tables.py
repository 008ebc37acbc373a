"""The ledger's SQLite tables, with a checksum for every row, so that a damaged row is never used.

Every row has a crc32c, because a flipped bit in a SQLite file mostly reads back as another value (290 of 400 in a
trial). The number of rows of each table and the sum of their checksums are stored, too. So a row that was lost with a
damaged page is noticed. No table has a separate index, which could be damaged on its own. ``ledger`` knows what
the rows mean.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from streampack.errors import LedgerDamaged, UserError
from streampack.wire.checksums import crc32c

VERSION = 2
_SINCE_2 = ("staged", "completed", "reported")
"""Tables that a file of version 1 lacks; it gets them when it is opened."""
TABLES = {
    "records": ("lsn", "kind", "body"),
    "steps": ("feed", "step", "lineage", "lsn", "body"),
    "spans": ("stream", "lo", "hi", "step", "lineage", "lsn"),
    "rejected": ("lsn", "stream", "lo", "hi", "indices", "reasons"),
    "admitted": ("stream", "partition", "upto", "lsn"),
    "staged": ("stream", "partition", "upto", "lsn"),
    "completed": ("stream", "partition", "base", "lsn", "stop", "lo", "hi", "sent"),
    "reported": ("feed", "step", "lineage", "lsn", "body"),
}  # fmt: skip
_TYPES = {"feed": "TEXT", "stream": "TEXT", "reasons": "TEXT", "body": "BLOB", "indices": "BLOB", "sent": "BLOB"}
"""Types of columns; all others are integers."""
_PRIMARY = {"records": 1, "steps": 3, "spans": 5, "admitted": 2, "staged": 2, "completed": 4, "reported": 4}
"""Tables that are ordered by a primary key, and how many of their first columns it has."""
KEYS = {"records": 1, "steps": 3, "rejected": 4, "completed": 4, "reported": 4}
"""Tables of which only the ledger may have some rows, and how many of their first columns name a row."""
_UNUSABLE = (
    sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
)  # fmt: skip


@dataclass(slots=True)
class LedgerState:
    """The records that a ledger was made from: ``first_lsn`` to ``next_lsn - 1``; the last has checksum ``last_crc``.

    ``rows``: for each table the number of rows and the sum of their checksums. ``run``: name of the run.
    """

    rows: dict[str, list[int]]
    run: str = ""
    first_lsn: int = 0
    next_lsn: int = 0
    last_crc: int = 0
    version: int = VERSION


class Tables:
    """The tables in file ``path``, which is made if it is missing, and their ``state``.

    With ``in_memory``, the tables are a copy in memory, and the file is only read.

    The constructor and all methods raise UserError if the file cannot be used, LedgerDamaged if it is damaged.
    """

    def __init__(self, path: Path, *, in_memory: bool = False) -> None:
        self._path = path
        with self._sqlite():
            where = ":memory:" if in_memory else path
            self._db = sqlite3.connect(where, timeout=30.0, isolation_level=None)
            if in_memory and path.exists():
                mode = "rw" if os.access(path, os.W_OK) else "ro"  # rw undoes what a killed writer has left
                with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True)) as file:
                    file.backup(self._db)
            if not self._db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
                with self.transaction():
                    self._make()
        self.state = self._read_state()
        if self.state.version == 1:
            with self.transaction():
                self._upgrade()
        self.load_state()

    def _make(self) -> None:
        """Create the tables and save an empty state."""
        self._db.execute("CREATE TABLE state (id INTEGER PRIMARY KEY, body BLOB, crc INTEGER)")
        for table in TABLES:
            self._db.execute(_creation(table))
        self.state = LedgerState({table: [0, 0] for table in TABLES})
        self.save_state()

    def _upgrade(self) -> None:
        """Add the tables that a file of version 1 lacks, unless another process has done so."""
        self.state = self._read_state()
        if self.state.version == 1:
            for table in _SINCE_2:
                self._db.execute(_creation(table))
            self.state.rows = {table: [0, 0] for table in TABLES} | self.state.rows
            self.state.version = VERSION
            self.save_state()

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the block as one transaction; after an error, nothing is written and ``state`` is outdated."""
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
        """Read ``state`` from the file, which another process may have changed."""
        self.state = self._read_state()
        if self.state.version != VERSION:
            raise self.damaged(f"got version {self.state.version}, expected {VERSION}")

    def _read_state(self) -> LedgerState:
        """Return the state in the file, of any version."""
        with self._sqlite():
            row = self._db.execute("SELECT body, crc FROM state").fetchone()
        if row is None or not isinstance(row[0], bytes) or crc32c(row[0]) != row[1]:
            raise self.damaged("the row of table state does not match its checksum")
        return msgspec.json.decode(row[0], type=LedgerState)

    def save_state(self) -> None:
        """Write ``state`` to the file, with a checksum."""
        body = msgspec.json.encode(self.state)
        self._db.execute("INSERT OR REPLACE INTO state VALUES (0, ?, ?)", (body, crc32c(body)))

    def insert(self, table: str, values: tuple[Any, ...]) -> None:
        """Insert a row with its checksum, and count it in ``state``."""
        crc = _crc(table, values)
        self._db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * (len(values) + 1))})", (*values, crc))
        self.state.rows[table][0] += 1
        self.state.rows[table][1] += crc

    def delete(self, table: str, where: str, key: tuple[Any, ...]) -> None:
        """Delete the rows that ``where`` with the parameters ``key`` chooses, and update ``state``."""
        count, crcs = self._sum(table, where, key)
        self._db.execute(f"DELETE FROM {table} WHERE {where}", key)
        self.state.rows[table][0] -= count
        self.state.rows[table][1] -= crcs

    def delete_since(self, lsn: int) -> None:
        """Delete the rows from record ``lsn`` and later ones in all tables, and count the other rows again."""
        for table in TABLES:
            self._db.execute(f"DELETE FROM {table} WHERE lsn >= ?", (lsn,))
            self.state.rows[table] = list(self._sum(table))

    def rows(self, table: str, where: str, key: tuple[Any, ...] = ()) -> Iterator[list[Any]]:
        """Yield the columns of each row that ``where`` chooses. Raises LedgerDamaged at a damaged row."""
        for error_text, row in self.checked(table, where, key):
            if row is None:
                raise self.damaged(f"{table}: {error_text}")
            yield row

    def checked(self, table: str, where: str, key: tuple[Any, ...] = ()) -> Iterator[tuple[str, list[Any] | None]]:
        """Yield (error text, columns) of each row that ``where`` chooses; the columns of a damaged row are None."""
        names = ", ".join(TABLES[table])
        with self._sqlite():
            for *values, crc in self._db.execute(f"SELECT {names}, crc FROM {table} WHERE {where}", key):
                named = zip(TABLES[table], values, strict=True)
                key_text = ", ".join(f"{name} {value!r}" for name, value in named if not isinstance(value, bytes))
                is_intact = crc == _crc(table, values)
                yield f"the row with {key_text} does not match its checksum", values if is_intact else None

    def first(self, expression: str, table: str, where: str, key: tuple[Any, ...]) -> Any:
        """Return an SQL expression, such as a column or ``max(step)``, of the first row that ``where`` chooses.

        Returns None without a row. The row's checksum is not compared.
        """
        with self._sqlite():
            row = self._db.execute(f"SELECT {expression} FROM {table} WHERE {where}", key).fetchone()
        return None if row is None else row[0]

    def check(self, tables: Iterable[str] = TABLES) -> list[str]:
        """Read every row of the tables; return a line of text for each damaged one."""
        wrong = []
        for table in tables:
            try:
                damaged = [f"{table}: {error_text}" for error_text, row in self.checked(table, "1") if row is None]
                count, crcs = self.state.rows[table]
                if not damaged and (read := self._sum(table)) != (count, crcs):
                    damaged = [f"{table}: got {read[0]} rows that differ from the {count} rows written"]
                wrong += damaged
            except LedgerDamaged as error:
                wrong.append(f"{table}: {error}")
        return wrong

    def fingerprints(self) -> dict[tuple[Any, ...], int | None]:
        """Return the checksums of the rows in ``KEYS``, by key; None for a damaged row."""
        by_key: dict[tuple[Any, ...], int | None] = {}
        for table, width in KEYS.items():
            names = ", ".join(TABLES[table])
            for *values, crc in self._db.execute(f"SELECT {names}, crc FROM {table}"):
                by_key[(table, *values[:width])] = crc if crc == _crc(table, values) else None
        return by_key

    def _sum(self, table: str, where: str = "1", key: tuple[Any, ...] = ()) -> tuple[int, int]:
        """Return the number of rows that ``where`` chooses, and the sum of their checksums."""
        with self._sqlite():
            query = f"SELECT count(*), coalesce(sum(crc), 0) FROM {table} WHERE {where}"
            count, crcs = self._db.execute(query, key).fetchone()
        return int(count), int(crcs)

    @contextmanager
    def _sqlite(self) -> Iterator[None]:
        """Raise UserError for an error of SQLite if the file cannot be used, else LedgerDamaged."""
        try:
            yield
        except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _UNUSABLE:
                is_full = error.sqlite_errorcode == sqlite3.SQLITE_FULL  # type: ignore[union-attr]
                do = "Make space on its disk" if is_full else "Choose a folder that you can write to"
                raise UserError(f"The ledger {self._path} cannot be used: {error}. {do}.") from None
            raise self.damaged(f"SQLite cannot read the file: {error}") from None

    def damaged(self, noun: str) -> LedgerDamaged:
        """Return the error for damage ``noun`` of this ledger, to be raised by the caller."""
        return LedgerDamaged(f"The ledger {self._path} is damaged: {noun}. Run 'streampack ledger rebuild'.")


def _creation(table: str) -> str:
    """Return the SQL statement that creates a table, with a column for the checksums of its rows."""
    columns = ", ".join(f"{name} {_TYPES.get(name, 'INTEGER')}" for name in (*TABLES[table], "crc"))
    if table not in _PRIMARY:
        return f"CREATE TABLE {table} ({columns})"
    key, order = ", ".join(TABLES[table][: _PRIMARY[table]]), "" if table == "records" else " WITHOUT ROWID"
    return f"CREATE TABLE {table} ({columns}, PRIMARY KEY ({key})){order}"


def _crc(table: str, values: Iterable[Any]) -> int:
    """Return the crc32c of a row: of its table's name and its values."""
    crc = crc32c(table.encode())
    for value in values:
        kind = "b" if isinstance(value, bytes) else type(value).__name__
        crc = crc32c(value if isinstance(value, bytes) else f"{kind} {value}\0".encode(), crc)
    return int(crc)
