"""Events and effects of both sides of a standby, beside those of ``entries``."""

from __future__ import annotations

from typing import Any

from streampack.core.protocol.events import Effect, Event
from streampack.core.protocol.message import Envelope
from streampack.core.standby.arbiter_entries import Entry


class FromPeer(Event, frozen=True):
    """A message has come from the other side; ``peer`` is its connection, which the active broker answers to."""

    envelope: Envelope
    peer: bytes = b""


class LogState(Event, frozen=True):
    """The own log as it is now: its oldest record, its next record, and the record before which all are on the disk."""

    first_lsn: int
    next_lsn: int
    safe_upto: int


class Shipped(Event, frozen=True):
    """Records up to ``upto`` were sent, in answer to ``Ship``."""

    upto: int


class SendPeer(Effect, frozen=True):
    """Send a message to the other side; ``peer`` is empty for the active broker."""

    envelope: Envelope
    peer: bytes = b""


class Ship(Effect, frozen=True):
    """Send records of the log from number ``first`` on to the standby, in one message; answer with ``Shipped``."""

    peer: bytes
    first: int


class Discard(Effect, frozen=True):
    """Delete the own log, and begin the log ``log_id``, a copy of the log of the broker of ``epoch``.

    Its first record will have number ``first``.
    """

    first: int
    epoch: int
    log_id: str


class WriteRecords(Effect, frozen=True):
    """Append records to the own log, whose next record is ``first``.

    ``kinds`` has the kind of each record, ``sizes`` its bytes, and ``bodies`` all bodies, one after another.
    """

    first: int
    kinds: bytes
    sizes: tuple[int, ...]
    bodies: Any


class CutBelow(Effect, frozen=True):
    """Delete records below ``lsn`` from the own log, because the active broker has deleted them."""

    lsn: int


class TakeOver(Effect, frozen=True):
    """Become the active broker, with ``entry``, which is written."""

    entry: Entry


class Over(Effect, frozen=True):
    """End this broker, for the reason ``why``: another broker is active, or the run has ended."""

    why: str
