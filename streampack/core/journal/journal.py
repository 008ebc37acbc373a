"""The log as the core sees it: records get numbers when they are appended, and are *safe* some time later.

What may be said to others depends on it (R1, R2): nothing goes out that a record not yet safe decides.
Without a log every record is safe at once, so that nothing else differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streampack.core.journal.log_effects import Append
from streampack.core.journal.log_records import Record
from streampack.core.protocol.events import Effect


class Journal:
    """Numbers records; ``keeps`` is whether there is a log at all, ``next_lsn`` where it goes on."""

    def __init__(self, keeps: bool = False, next_lsn: int = 0) -> None:
        self.keeps = keeps
        self.next_lsn = next_lsn
        self.safe_upto = next_lsn
        """Records below are as safe as was asked for."""
        self.stalled = ""
        """Why records wait, if they do."""
        self.full = ""
        """Why nothing should be taken in that has to be written down."""

    def append(self, record: Record, payload: Sequence[Any] = ()) -> list[Effect]:
        """Write ``record``, of number ``next_lsn``; without a log nothing is done."""
        if not self.keeps:
            return self.pass_over()
        self.next_lsn += 1
        return [Append(record, tuple(payload))]

    def pass_over(self) -> list[Effect]:
        """Number a record that need not be made, since there is no log."""
        self.next_lsn += 1
        self.safe_upto = self.next_lsn
        return []

    def safe(self, upto: int, stalled: str = "", full: str = "") -> None:
        """Records below ``upto`` are safe."""
        self.safe_upto, self.stalled, self.full = max(self.safe_upto, upto), stalled, full
