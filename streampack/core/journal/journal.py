"""The journal: numbers records when they are appended, and tracks which records are *safe* in the log.

The broker sends nothing that depends on an unsafe record (R1, R2). Without a log every record is safe at once, so the
rest of the core needs no special case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streampack.core.journal.log_effects import Append
from streampack.core.journal.log_records import Record
from streampack.core.protocol.events import Effect


class Journal:
    """Numbers records, and tracks which records are safe.

    Attributes:
        keeps: True if there is a log.
        next_lsn: Log sequence number of the next record.
    """

    def __init__(self, keeps: bool = False, next_lsn: int = 0) -> None:
        self.keeps = keeps
        self.next_lsn = next_lsn
        self.safe_upto = next_lsn
        """Records below this log sequence number are safe."""
        self.stalled = ""
        """Reason that records wait to become safe; empty if they do not."""
        self.full = ""
        """Reason that no samples that need a record should be taken; empty if they may."""

    def append(self, record: Record, payload: Sequence[Any] = ()) -> list[Effect]:
        """Number a record, and return the effect that writes it with its payload; no effect without a log."""
        if not self.keeps:
            return self.pass_over()
        self.next_lsn += 1
        return [Append(record, tuple(payload))]

    def pass_over(self) -> list[Effect]:
        """Use up the number of a record that is not built, because there is no log."""
        self.next_lsn += 1
        self.safe_upto = self.next_lsn
        return []

    def safe(self, upto: int, stalled: str = "", full: str = "") -> None:
        """Record that log records before ``upto`` are safe, and why the log is ``stalled`` or ``full``, if so."""
        self.safe_upto, self.stalled, self.full = max(self.safe_upto, upto), stalled, full
