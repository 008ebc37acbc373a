"""Effects that write, read and cut the log, and the events that answer.

The core returns the effects; the shell performs them. Payload is opaque.
"""

from __future__ import annotations

from typing import Any

from streampack.core.journal.log_records import Record
from streampack.core.protocol.events import Effect, Event


class Safe(Event, frozen=True):
    """Every record of the log before ``upto`` is safe.

    ``stalled`` is the reason that later records wait, if they do. ``full`` is the reason to take no more samples that
    need a record; both are empty if there is no such reason.
    """

    upto: int
    stalled: str = ""
    full: str = ""


class Recalled(Event, frozen=True):
    """The record that ``Recall`` asked for was read, with its payload."""

    feed: str
    lsn: int
    record: Record
    payload: tuple[Any, ...] = ()


class WasCut(Event, frozen=True):
    """Records below ``first_lsn`` were deleted from the log."""

    first_lsn: int


class Append(Effect, frozen=True):
    """Write a record to the log, with the next log sequence number; ``Safe`` follows once the record is safe."""

    record: Record
    payload: tuple[Any, ...] = ()


class Recall(Effect, frozen=True):
    """Read a record, and answer with ``Recalled`` before any other event."""

    feed: str
    lsn: int


class Cut(Effect, frozen=True):
    """Delete records below ``lsn`` from the log: they are not needed any more."""

    lsn: int
