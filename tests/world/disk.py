"""A disk with one log on it, which loses what was not synced, and refuses what was cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from streampack.core.journal.log_records import Record
from streampack.wire import record_frames


class Disk:
    """A log's records as bytes, those below ``safe_upto`` synced; a crash loses some of the others."""

    def __init__(self, sync_s: float = 0.0) -> None:
        self.records: list[tuple[int, bytes]] = []
        """Every record that survived; those below ``first_lsn`` are kept for the checks alone."""
        self.safe_upto = self.first_lsn = 0
        self.sync_s = sync_s
        """Mean time of a sync; 0: what is written is safe, as from a kill of the process."""

    def copy(self) -> Disk:
        """A disk with the same log, which goes on by itself."""
        other = Disk(self.sync_s)
        other.records, other.safe_upto, other.first_lsn = list(self.records), self.safe_upto, self.first_lsn
        return other

    def append(self, record: Record, payload: Sequence[Any] = ()) -> None:
        """A record and its payload, as bytes: what becomes of the payload afterwards is no matter."""
        frames = [memoryview(part).tobytes() for part in record_frames.encode_record(record, payload)]
        self.records.append((record.TYPE, b"".join(frames)))

    def read(self, lsn: int) -> tuple[Record, tuple[memoryview, ...]]:
        """A record and its payload. One that was cut is gone (R7)."""
        assert lsn >= self.first_lsn, f"R7: record {lsn} is read, and the log was cut at {self.first_lsn}"
        return self.decode(lsn)

    def decode(self, lsn: int) -> tuple[Record, tuple[memoryview, ...]]:
        """A record, be it cut or not."""
        record, frames = record_frames.decode_record(*self.records[lsn])
        return record, tuple(memoryview(frame) for frame in frames)

    def cut(self, lsn: int) -> None:
        """Forget records below ``lsn``."""
        assert lsn <= self.safe_upto, "R7: the log is cut where it is not safe yet"
        self.first_lsn = max(self.first_lsn, lsn)

    def crash(self, rng: random.Random) -> None:
        """Lose what was not synced, or the end of it."""
        del self.records[rng.randint(self.safe_upto, len(self.records)) :]
        self.safe_upto = len(self.records)
