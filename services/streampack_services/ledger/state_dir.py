"""A ``state_dir``: the folder of a broker's log, and beside it the ledger, brought up to date or made again.

Anybody may look, while its broker runs or afterwards: the log is only read, and the ledger takes what it has not got.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from streampack.config.config_files import read_broker
from streampack.core.journal.log_records import Base
from streampack.errors import LedgerDamaged, UserError
from streampack_services.ledger.ledger import Ledger
from streampack_services.log.log import LogEntry, read_entries
from streampack_services.log.segments import segment_files

LEDGER = "ledger.sqlite"
"""The ledger's file in a ``state_dir``."""
Tree = dict[str, Any]


def state_folder(state_dir: Path | None, config: Path | None) -> Path:
    """The folder that the user means: given, or that of a broker.yaml. Raises UserError."""
    if (state_dir is None) == (config is None):
        got = "nothing" if config is None else "--state-dir and --config"
        raise UserError(f"got {got} to say where the log is, expected --state-dir or --config")
    if config is not None:
        named = read_broker(config).state_dir
        if named is None:
            raise UserError(f"{config}: got no state_dir, expected one: without it a broker keeps no log")
        state_dir = Path(named)
    assert state_dir is not None
    if not state_dir.is_dir() or not segment_files(state_dir):
        raise UserError(f"{state_dir}: got no log, expected the state_dir of a broker that has begun: name that one")
    return state_dir


@contextmanager
def open_ledger(state_dir: Path) -> Iterator[Ledger]:
    """The ledger of a ``state_dir``, brought up to date. Raises UserError, LedgerDamaged, LogDamaged."""
    with Ledger(state_dir / LEDGER) as ledger:
        ledger.update(_unread(state_dir, ledger))
        yield ledger


def _unread(state_dir: Path, ledger: Ledger) -> Iterator[LogEntry]:
    """The log's records from the last that a ledger has on.

    A log that was cut begins anywhere: what its records mean is said by a ``Base`` further on, which is then read
    first, too, as if it stood before them.
    """
    entries = read_entries(state_dir, max(ledger.state.next_lsn - 1, 0))
    first = next(entries, None)
    if first is None:
        return
    if not ledger.history.feeds and first.kind != Base.TYPE:
        base = next((entry for entry in read_entries(state_dir) if entry.kind == Base.TYPE), None)
        if base is not None:
            yield LogEntry(first.lsn - 1, base.kind, base.body)
    yield first
    yield from entries


def rebuild(state_dir: Path) -> Tree:
    """Make the ledger again from the log, and compare it with what was there.

    Of what lies before the log's first record the ledger is all there is: these rows are kept, as far as they are good.
    """
    path, fresh = state_dir / LEDGER, state_dir / (LEDGER + ".new")
    fresh.unlink(missing_ok=True)
    begin = segment_files(state_dir)[0][0]
    with Ledger(fresh) as ledger:
        before, damage = _salvage(path, ledger, begin)
        ledger.update(_unread(state_dir, ledger))
        after, records = ledger.fingerprints(), [ledger.state.first_lsn, ledger.state.next_lsn]
    os.replace(fresh, path)
    changed = [row for row, crc in before.items() if row in after and after[row] != crc]
    gone = [row for row in before if row not in after]
    return {
        "file": str(path),
        "records": records,
        "log_begins": begin,
        "rows": len(after),
        "kept": sum(before.get(row) == crc for row, crc in after.items()),
        "new": sum(row not in before for row in after),
        "repaired": [_row_name(row) for row in changed],
        "gone": [_row_name(row) for row in gone],
        "damage": damage,
    }


def _salvage(path: Path, into: Ledger, begin: int) -> tuple[dict[tuple[Any, ...], int | None], list[str]]:
    """Copy what the log does not say any more; checksums of all rows that were there, and what was damaged."""
    if not path.exists():
        return {}, []
    try:
        with Ledger(path) as old:
            damage = old.check()
            before = old.fingerprints()
            into.keep(old, begin)
            return before, damage
    except LedgerDamaged as error:
        return {}, [str(error)]


def _row_name(row: tuple[Any, ...]) -> str:
    match row:
        case "steps", feed, step, lineage:
            return f"step {step} of {feed}, lineage {lineage}"
        case "rejected", lsn, stream, lo, hi:
            return f"rejected samples {stream}:{lo} to {hi} of record {lsn}"
    return f"record {row[1]}"
