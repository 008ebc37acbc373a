"""What the log is asked to do, and what is heard of it.

The journal asks; the shell writes, reads and cuts the log. Payload is opaque here.
"""

from __future__ import annotations

from typing import Any

from streampack.core.journal.log_records import Record
from streampack.core.protocol.events import Effect, Event


class Safe(Event, frozen=True):
    """The log has every record below ``upto``, as safely as was asked for; ``stalled`` is why the rest waits,
    ``full`` why nothing should be taken in that has to be written down.
    """

    upto: int
    stalled: str = ""
    full: str = ""


class Recalled(Event, frozen=True):
    """The record that ``Recall`` asked for, with its payload."""

    feed: str
    lsn: int
    record: Record
    payload: tuple[Any, ...] = ()
    generation: int = 0


class WasCut(Event, frozen=True):
    """The log begins with record ``first_lsn``."""

    first_lsn: int


class Append(Effect, frozen=True):
    """Write a record into the log; its number is the one after the last's. ``Safe`` says when it is there."""

    record: Record
    payload: tuple[Any, ...] = ()


class Recall(Effect, frozen=True):
    """Read a record back and say ``Recalled``, of the same ``generation``, before any other event."""

    feed: str
    lsn: int
    generation: int = 0


class Cut(Effect, frozen=True):
    """Records below ``lsn`` are wanted no more."""

    lsn: int
