"""The broker's log as its shell keeps it: records in and out, what is safe, and when old ones may go.

Old segments go once the ledger has them, so that ``why`` still answers; bringing it up to date is the work
of a thread, since it may take seconds. A log that is longer than ``retain.bytes`` and cannot be cut is *full*: the
core then gives nobody credit whose samples would have to be written down.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from streampack.config.daemon_settings import BrokerConfig
from streampack.config.typed_yaml import parse_size
from streampack.core.broker import Broker
from streampack.core.journal.log_effects import Append, Recall, Recalled, Safe, WasCut
from streampack.core.journal.log_records import Record
from streampack.errors import ConfigError, LogDamaged, StreampackError, WireError
from streampack.wire import record_frames
from streampack_services.broker.status import LogStatus
from streampack_services.ledger.state_dir import open_ledger
from streampack_services.log.log import Log, LogEntry

log = logging.getLogger("streampack.broker")

TRIM_AGAIN_S = 30.0
"""After a ledger could not be brought up to date."""


class Keeper:
    """The log of ``config``'s state_dir, which is open until ``close``; ``wake`` is called when there is news for the
    broker's loop. Raises UserError where another broker has it, LogDamaged.
    """

    def __init__(self, config: BrokerConfig, wake: Callable[[], None]) -> None:
        self._where = Path(config.state_dir or "")
        self._log = Log.open(self._where, durability=config.safely, on_safe=wake)
        self.durability = config.safely
        self._retain = parse_size(config.retain.bytes, "retain.bytes")
        self._wake = wake
        self._trimming: threading.Thread | None = None
        self._wanted = self._trim_to = 0
        self._trimmed = False
        self._again_at = 0.0
        self._before = 0

    def recover(self, core: Broker) -> None:
        """Tell the core what the log holds. Raises ConfigError for a log of another run or other rules, LogDamaged."""
        for lsn, record, _ in self._records():
            try:
                core.recover(lsn, record)
            except ValueError as error:
                raise ConfigError(
                    f"{self._where}: got a log that broker.yaml is not of: {error}: put broker.yaml back, or give the "
                    f"run another state_dir"
                ) from None
        core.journal.next_lsn = core.journal.safe_upto = self._log.next_lsn

    def append(self, effect: Append) -> None:
        """Take a record; ``news`` says when it is safe."""
        self._log.append(effect.record.TYPE, record_frames.encode_record(effect.record, effect.payload))

    def recall(self, effect: Recall) -> Recalled:
        """Read a record back."""
        lsn, record, payload = self._decoded(self._log.read(effect.lsn))
        return Recalled(effect.feed, lsn, record, payload, effect.generation)

    def news(self, safe_upto: int, stalled: str, full: str) -> Iterator[Safe | WasCut]:
        """Hand over what was appended; what the core, which knows so much, has to be told."""
        self._log.flush()
        if self._trimmed:
            self._trimmed, self._trimming = False, None
            if self._log.cut(self._trim_to):
                yield WasCut(self._log.first_lsn)
        self._trim()
        now = (self._log.safe_upto, self._log.stalled, self._full())
        if now != (safe_upto, stalled, full):
            yield Safe(*now)

    def trim(self, lsn: int) -> None:
        """Let records below ``lsn`` go, soon."""
        self._wanted = max(self._wanted, lsn)
        self._trim()

    def _trim(self) -> None:
        if self._wanted > self._trim_to and self._trimming is None and time.monotonic() >= self._again_at:
            self._before, self._trim_to = self._trim_to, self._wanted
            self._trimming = threading.Thread(target=self._index, name="streampack-ledger", daemon=True)
            self._trimming.start()

    def status(self) -> LogStatus:
        """Return the log's part of the broker's snapshot."""
        log_ = self._log
        return LogStatus(
            durability=self.durability,
            bytes=log_.num_bytes,
            limit_bytes=self._retain,
            records=log_.next_lsn,
            first_record=log_.first_lsn,
            unsafe_records=log_.next_lsn - log_.safe_upto,
            syncs=log_.syncs,
            sync_seconds=log_.sync_seconds,
            stalled=log_.stalled or self._full(),
            free_bytes=log_.free_bytes,
        )

    def close(self) -> None:
        """Write what waits, and let others open the log; idempotent."""
        self._log.close()

    def _full(self) -> str:
        if self._log.num_bytes <= self._retain:
            return ""
        return (
            f"the log's retain.bytes are used up ({self._log.num_bytes >> 20} MiB): commit checkpoints, so that what "
            f"is before them may go, or raise retain.bytes"
        )

    def _index(self) -> None:
        """In a thread: bring the ledger up to date."""
        try:
            with open_ledger(self._where):
                self._trimmed = True
        except (StreampackError, sqlite3.Error, OSError) as error:
            log.warning("the log is not cut: its ledger cannot be brought up to date: %s", error)
            self._again_at = time.monotonic() + TRIM_AGAIN_S
            self._trim_to, self._trimming = self._before, None
        self._wake()

    def _records(self) -> Iterator[tuple[int, Record, tuple[memoryview, ...]]]:
        return (self._decoded(entry) for entry in self._log.entries())

    def _decoded(self, entry: LogEntry) -> tuple[int, Record, tuple[memoryview, ...]]:
        try:
            return entry.lsn, *record_frames.decode_record(entry.kind, entry.body)
        except WireError as error:
            raise LogDamaged(f"{self._where}: record {entry.lsn}: {error}") from None
