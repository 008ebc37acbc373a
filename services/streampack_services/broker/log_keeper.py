"""The broker's log: append and read records, tell the core which are safe, and delete old segments.

A segment is deleted only after the ledger has indexed its records, so that ``streampack why`` still finds them. A
thread updates the ledger, since that may take seconds. A log that is longer than ``retain.bytes`` and cannot be cut is
*full*. The core then gives no credit for samples that would have to be recorded.

Before a segment can be deleted, two things must be written: the records up to the ``Base`` that replaces the old ones,
and the ledger. For a full disk, ``RESERVE_BYTES`` are held back for both.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from streampack.config.daemon_settings import BrokerConfig
from streampack.config.service_settings import StandbySettings
from streampack.config.typed_yaml import parse_size
from streampack.core.broker import Broker
from streampack.core.journal.log_effects import Append, Recall, Recalled, Safe, WasCut
from streampack.core.journal.log_records import Base, Record
from streampack.core.model.rules import Rules
from streampack.core.standby.arbiter_entries import Entry
from streampack.errors import ConfigError, LogDamaged, StreampackError, UserError, WireError
from streampack.transport.curve import Door
from streampack.wire import record_frames
from streampack_services.broker.serving.allowed_keys import Allowed
from streampack_services.broker.status import LogStatus, StandbyStatus
from streampack_services.figure import filled
from streampack_services.ledger.state_dir import indexed_upto, update_ledger
from streampack_services.log.log import Log, LogEntry
from streampack_services.standby.arbiter import Arbiter
from streampack_services.standby.shipping import Shipping

log = logging.getLogger("streampack.broker")

TRIM_AGAIN_S = 30.0
"""Time until the ledger is tried again after an error, in seconds."""
RESERVE_BYTES = 64 << 20
"""Bytes of the disk that are held back: as many as a segment has, since its records take no more in the ledger."""


class Keeper:
    """The open log of the configuration's ``state_dir``.

    Args:
        config: The broker's configuration, with a ``state_dir``.
        wake: Called in another thread when ``take_events`` has something to yield.

    Raises:
        UserError: Another broker has the log open.
        LogDamaged: A record cannot be read.
    """

    def __init__(self, config: BrokerConfig, wake: Callable[[], None]) -> None:
        self._where = Path(config.state_dir or "")
        self._log = Log.open(
            self._where, durability=config.safely, reserve_bytes=RESERVE_BYTES, on_safe=wake,
            indexed_upto=lambda: indexed_upto(self._where),
        )  # fmt: skip
        self.durability = config.safely
        self._retain = parse_size(config.retain.bytes, "retain.bytes")
        self._wake = wake
        self._trimming: threading.Thread | None = None
        self._wanted = self._trim_to = self._indexed = 0
        self._base_lsn = -1
        self._not_trimmed = ""
        self._again_at = 0.0
        self.shipping: Shipping | None = None
        """Ships the log to a standby; None without one."""

    def recover(self, core: Broker) -> None:
        """Give the core every record of the log.

        Raises:
            ConfigError: The log belongs to another run or to other rules.
            LogDamaged: A record cannot be read.
        """
        for lsn, record, _ in self._records():
            try:
                core.recover(lsn, record)
            except ValueError as error:
                raise ConfigError(
                    f"{self._where} has the log of another configuration: {error}. Restore the broker.yaml of that "
                    f"log, or set another state_dir"
                ) from None
        core.journal.next_lsn = core.journal.safe_upto = self._log.next_lsn

    def rules(self) -> dict[str, Rules]:
        """Return the rules of each feed as the log has them; empty for a new log."""
        for entry in self._log.entries():
            if entry.kind == Base.TYPE:
                base = self._decoded(entry)[1]
                assert isinstance(base, Base)
                return {name: facts.rules for name, facts in base.feeds.items()}
        return {}

    def append(self, effect: Append) -> None:
        """Append a record; ``take_events`` yields ``Safe`` once it is durable."""
        lsn = self._log.append(effect.record.TYPE, record_frames.encode_record(effect.record, effect.payload))
        if isinstance(effect.record, Base):
            self._base_lsn = lsn

    def recall(self, effect: Recall) -> Recalled:
        """Read the record ``effect.lsn``."""
        lsn, record, payload = self._decoded(self._log.read(effect.lsn))
        return Recalled(effect.feed, lsn, record, payload)

    def take_events(self, safe_upto: int, stalled: str, full: str) -> Iterator[Safe | WasCut]:
        """Write appended records to the file, and yield the changes of the log as events for the core.

        Args:
            safe_upto: The core knows that all records below this number are safe.
            stalled: The reason why the log cannot be written, as the core knows it; empty if it knows of none.
            full: The reason why the log accepts no more records, as the core knows it; empty if it knows of none.
        """
        self._log.flush()
        if self._log.stalled and self._base_lsn >= self._log.safe_upto:
            self._log.squeeze()
            self._base_lsn = -1
        if self._trimming is not None and not self._trimming.is_alive():
            self._trimming = None
            if self._log.cut(min(self._trim_to, self._indexed)):
                yield WasCut(self._log.first_lsn)
        self._start_trim()
        now = (self._safe_upto, self._stalled, self._full())
        if now != (safe_upto, stalled, full):
            yield Safe(*now)

    @property
    def _safe_upto(self) -> int:
        """Every record before this one is safe."""
        return self._log.safe_upto if self.shipping is None else self.shipping.safe_upto

    @property
    def _stalled(self) -> str:
        """The reason why records wait; empty if they do not."""
        return self._log.stalled or ("" if self.shipping is None else self.shipping.waits)

    def ship(
        self, settings: StandbySettings, run: int, entry: Entry, arbiter: Arbiter, config_digest: bytes,
        allowed: Allowed | None,
    ) -> Shipping:  # fmt: skip
        """Ship the log to a standby from now on; ``allowed`` are the keys that may connect. Raises UserError."""
        door = None if allowed is None else Door(allowed.key.secret, allowed.admits)
        rights = None if allowed is None else allowed.rights
        self.shipping = Shipping(settings, run, entry, self._log, arbiter, config_digest, self._wake, door, rights)
        return self.shipping

    def trim(self, lsn: int) -> None:
        """Delete the segments whose records are all below ``lsn``, once the ledger has them."""
        self._wanted = max(self._wanted, lsn)
        self._start_trim()

    def _start_trim(self) -> None:
        """Start the thread that updates the ledger if there are segments to delete."""
        lacks = self._wanted > min(self._trim_to, self._indexed)
        if lacks and self._trimming is None and time.monotonic() >= self._again_at:
            self._trim_to = self._wanted
            self._trimming = threading.Thread(target=self._update_ledger, name="streampack-ledger", daemon=True)
            self._trimming.start()

    def status(self) -> LogStatus:
        """Return the log's part of the broker's snapshot."""
        log_ = self._log
        return filled(
            LogStatus,
            log_.writer,
            durability=self.durability,
            bytes=log_.num_bytes,
            limit_bytes=self._retain,
            records=log_.next_lsn,
            first_record=log_.first_lsn,
            unsafe_records=log_.next_lsn - self._safe_upto,
            stalled=log_.stalled or self._full(),
            warning=self._warning(),
        )

    def standby_status(self) -> StandbyStatus | None:
        """Return the standby's part of the broker's snapshot; None without a standby."""
        if self.shipping is None:
            return None
        shipper = self.shipping.shipper
        return filled(
            StandbyStatus,
            shipper,
            name=shipper.standby,
            lag_records=shipper.lag,
            stalled=shipper.waits,
            entry=shipper.entry.number,
        )

    def close(self) -> None:
        """Write appended records to the file and close it; idempotent."""
        if self.shipping is not None:
            self.shipping.close()
        self._log.close()

    def _full(self) -> str:
        """Return the reason why the log accepts no more records; empty if the log accepts records."""
        if self._log.num_bytes <= self._retain:
            return ""
        return (
            f"the log has reached its retain.bytes ({self._log.num_bytes >> 20} MiB). Commit checkpoints, so that "
            f"older records can be deleted, or raise retain.bytes"
        )

    def _warning(self) -> str:
        """Return what an operator must do so that the log does not stop; empty if there is nothing to do."""
        if self._not_trimmed:
            return f"Old log segments are not deleted: {self._not_trimmed}"
        if self._log.short:
            return (
                f"The disk of {self._where} has no space for the next log segment: {self._log.short}. Make space on "
                f"it, or commit a checkpoint, so that the broker deletes old segments."
            )
        return ""

    def _update_ledger(self) -> None:
        """Update the ledger, in a thread of its own; on a full disk, in the space that is held back."""
        before = self._indexed
        try:
            try:
                self._indexed = update_ledger(self._where)
            except UserError:
                with self._log.lend():
                    self._indexed = update_ledger(self._where)
            self._not_trimmed = ""
        except Exception as error:  # a bug, too: it is logged, and tried again only later
            with contextlib.suppress(Exception):
                self._indexed = indexed_upto(self._where)  # each batch counts: its segments make space for the next
            again_s = TRIM_AGAIN_S if self._indexed == before else 1.0
            self._not_trimmed = f"cannot update the ledger: {str(error).rstrip('.')}."
            text = "did not delete old log segments: %s The broker tries again in %.0f s"
            is_bug = not isinstance(error, StreampackError | sqlite3.Error | OSError)
            log.warning(text, self._not_trimmed, again_s, exc_info=is_bug)
            self._again_at = time.monotonic() + again_s
        self._wake()

    def _records(self) -> Iterator[tuple[int, Record, tuple[memoryview, ...]]]:
        """Yield (number, record, payload) of all records, oldest first."""
        return (self._decoded(entry) for entry in self._log.entries())

    def _decoded(self, entry: LogEntry) -> tuple[int, Record, tuple[memoryview, ...]]:
        """Return (number, record, payload) of an entry; raise LogDamaged if it cannot be decoded."""
        try:
            return entry.lsn, *record_frames.decode_record(entry.kind, entry.body)
        except WireError as error:
            raise LogDamaged(f"{self._where}: record {entry.lsn}: {error}") from None
