"""The messages between the active broker and its standby, which keeps a copy of the log.

The envelope's epoch is the epoch of the active broker. Both sides repeat their messages, which carry state, so a lost
message does no harm.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from streampack.core.model.bounded import Digest, Name, Text
from streampack.core.model.snapshot import Count
from streampack.core.protocol.message import Message

MOST_RECORDS = 4096
"""Most records in one ``LogRecords`` message."""


class Follow(Message, frozen=True, kw_only=True):
    """The standby ``name`` follows the log of the active broker.

    Attributes:
        name: Name of the standby's host, as entries of the arbiter have it.
        process: Identifies the standby's process.
        log_epoch: Epoch of the broker whose log the standby copies; 0 if its log is empty or of another broker.
        have_upto: The standby has written every record of that log before this one.
        safe_upto: Every record before this one is safe on the standby's disk.
        config_digest: Digest of the settings that decide the steps, which must be those of the active broker.
        producers, trainers: Addresses at which the standby would serve.
    """

    TYPE: ClassVar[int] = 50
    name: Name
    process: Name
    log_epoch: Count = 0
    have_upto: Count = 0
    safe_upto: Count = 0
    config_digest: Digest = b""
    producers: Text = ""
    trainers: Text = ""


class Lead(Message, frozen=True, kw_only=True):
    """The active broker is alive.

    Attributes:
        process: Process of the standby to which this is the answer.
        entry: Number of the arbiter's entry that the active broker wrote last.
        is_member: True if that entry names this standby, which may then take over.
        first_lsn: The oldest record in the active broker's log. The standby may delete older ones.
        copies_from: If not negative, the standby must discard its log, and copy it from this record on.
    """

    TYPE: ClassVar[int] = 51
    process: Name
    entry: Count
    is_member: bool
    first_lsn: Count
    copies_from: Annotated[int, Meta(ge=-1, lt=2**62)] = -1


class LogRecords(Message, frozen=True, kw_only=True):
    """Records of the log from number ``first`` on, for the standby.

    The payload is one frame: the bodies of the records, one after another. ``kinds`` has a byte for each record, and
    ``sizes_u32`` the bytes of its body.
    """

    TYPE: ClassVar[int] = 52
    first: Count
    kinds: Annotated[bytes, Meta(max_length=MOST_RECORDS)]
    sizes_u32: Annotated[bytes, Meta(max_length=4 * MOST_RECORDS)]


class Replaced(Message, frozen=True, kw_only=True):
    """The active broker has another standby, ``name``, and wants no second one."""

    TYPE: ClassVar[int] = 53
    name: Name


class HandOver(Message, frozen=True, kw_only=True):
    """The active broker ends: the standby may take over at once, or ends too if the run has ``finished``."""

    TYPE: ClassVar[int] = 54
    finished: bool


STANDBY_MESSAGES: tuple[type[Message], ...] = (Follow, Lead, LogRecords, Replaced, HandOver)
