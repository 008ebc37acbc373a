"""Open a ``state_dir``, the folder of a broker's log and its ledger; update or rebuild the ledger from the log.

This works while the broker runs and afterwards: the log is only read, and its new records are added to the ledger. On a
full disk, or without rights to write, ``read_ledger`` answers from a copy in memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
log = logging.getLogger("streampack.ledger")


def state_folder(state_dir: Path | None, config: Path | None) -> Path:
    """Return the state_dir that the user names, directly or by a broker.yaml. Raises UserError if it has no log."""
    if (state_dir is None) == (config is None):
        options = "neither --state-dir nor --config" if config is None else "both --state-dir and --config"
        raise UserError(f"Got {options}. Pass exactly one of them to name the log.")
    if config is not None:
        named = read_broker(config).state_dir
        if named is None:
            raise UserError(f"{config} has no state_dir, so its broker keeps no log. Set state_dir for the next run.")
        state_dir = Path(named)
    assert state_dir is not None
    if not state_dir.is_dir() or not segment_files(state_dir):
        raise UserError(f"{state_dir} has no log. Pass the state_dir of a broker that has started.")
    return state_dir


@contextmanager
def open_ledger(state_dir: Path) -> Iterator[Ledger]:
    """Open the ledger of a ``state_dir`` and update it from the log. Raises UserError, LedgerDamaged, LogDamaged."""
    with Ledger(state_dir / LEDGER) as ledger:
        ledger.update(_unread(state_dir, ledger))
        yield ledger


@contextmanager
def read_ledger(state_dir: Path) -> Iterator[Ledger]:
    """Open the ledger as ``open_ledger`` does; if it cannot be written, open an updated copy of it in memory."""
    with ExitStack() as stack:
        try:
            ledger = stack.enter_context(open_ledger(state_dir))
        except UserError as error:
            log.warning("cannot update the ledger: %s The command reads the log into memory instead", error)
            ledger = stack.enter_context(Ledger(state_dir / LEDGER, in_memory=True))
            ledger.update(_unread(state_dir, ledger))
        yield ledger


def update_ledger(state_dir: Path) -> int:
    """Update the ledger from the log, and return ``indexed_upto``. Raises UserError, LedgerDamaged, LogDamaged."""
    with open_ledger(state_dir) as ledger:
        return ledger.state.next_lsn


def indexed_upto(state_dir: Path) -> int:
    """Return the number of the first record that the ledger lacks; 0 without one. Raises UserError, LedgerDamaged."""
    if not (state_dir / LEDGER).exists():
        return 0
    with Ledger(state_dir / LEDGER) as ledger:
        return ledger.state.next_lsn


def _unread(state_dir: Path, ledger: Ledger) -> Iterator[LogEntry]:
    """Yield the log's records, beginning with the last record that the ledger has.

    A log that was cut may begin with any record, and only a later ``Base`` has the rules to read it by. For an empty
    ledger, this ``Base`` is yielded first.
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
    """Rebuild the ledger from the log; return a comparison with the old ledger, as a tree for JSON.

    Intact rows of the old ledger from before the log's first record are kept, because nothing else has them.
    """
    path, fresh = state_dir / LEDGER, state_dir / (LEDGER + ".new")
    fresh.unlink(missing_ok=True)
    begin = segment_files(state_dir)[0][0]
    try:
        with Ledger(fresh) as ledger:
            before, damage = _salvage(path, ledger, begin)
            ledger.update(_unread(state_dir, ledger))
            after, records = ledger.fingerprints(), [ledger.state.first_lsn, ledger.state.next_lsn]
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
    changed = [row for row, crc in before.items() if row in after and after[row] != crc]
    removed = [row for row in before if row not in after]
    return {
        "file": str(path),
        "records": records,
        "log_begins": begin,
        "rows": len(after),
        "kept": sum(before.get(row) == crc for row, crc in after.items()),
        "new": sum(row not in before for row in after),
        "repaired": [_row_name(row) for row in changed],
        "gone": [_row_name(row) for row in removed],
        "damage": damage,
    }


def _salvage(path: Path, into: Ledger, begin: int) -> tuple[dict[tuple[Any, ...], int | None], list[str]]:
    """Copy the rows of records below ``begin`` from the ledger at ``path`` into the new ledger ``into``.

    Return the checksums of all rows of the old ledger, by key, and a line of text for each damaged one.
    """
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
    """Return the key of a row as text: ``step 3 of train, lineage 0``."""
    match row:
        case "steps", feed, step, lineage:
            return f"step {step} of {feed}, lineage {lineage}"
        case "rejected", lsn, stream, lo, hi:
            return f"rejected samples {stream}:{lo} to {stream}:{hi} in record {lsn}"
        case "completed", stream, partition, base, lsn:
            return f"sent numbers of samples from {base} on in partition {partition} of {stream}, record {lsn}"
        case "reported", feed, step, lineage, lsn:
            return f"reported values of step {step} of {feed}, lineage {lineage}, record {lsn}"
    return f"record {row[1]}"
