"""The entries of the arbiter, and who may write the next one.

The arbiter is a place outside both hosts that keeps numbered entries, and lets each number be written once. The newest
entry decides which broker is active.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from streampack.core.model.bounded import Name, Text
from streampack.core.model.snapshot import Count
from streampack.core.protocol.events import Effect, Event


class Entry(Struct, frozen=True, kw_only=True):
    """One entry of the arbiter.

    Attributes:
        number: Number of the entry, from 1 on.
        epoch: Epoch of the active broker. It rises with each start of a broker.
        active: Name of the active broker's host.
        process: Identifies the active broker's process.
        log_id: Identifies the active broker's log.
        members: Names of the brokers that have every safe record. Only these may write the next entry.
        alone: True if the active broker serves new steps without a standby.
        address: Address at which the active broker ships its log.
    """

    number: Annotated[int, Meta(ge=1, lt=2**62)]
    epoch: Count
    active: Name
    process: Name
    log_id: Name
    members: tuple[Name, ...]
    alone: bool = False
    address: Text = ""


class CreateEntry(Effect, frozen=True):
    """Write an entry, unless one of this number exists; answer with ``EntryWritten``."""

    entry: Entry


class EntryWritten(Event, frozen=True):
    """The answer to ``CreateEntry`` of ``entry``.

    ``present`` is the entry that has this number now, be it ``entry`` or another's. It is None if the arbiter cannot be
    reached, for the reason ``why``; the entry may have been written then or not.
    """

    entry: Entry
    present: Entry | None
    why: str = ""

    @property
    def won(self) -> bool:
        """True if the entry was written."""
        return self.present == self.entry


class ReadNewest(Effect, frozen=True):
    """Read the newest entry; answer with ``Newest``."""


class Newest(Event, frozen=True):
    """The answer to ``ReadNewest``: the newest entry, or None if there is none.

    ``why`` is the reason why the arbiter cannot be reached; empty if it can.
    """

    entry: Entry | None
    why: str = ""


def may_start(newest: Entry | None, name: str, log_epoch: int, log_id: str) -> bool:
    """Return whether a broker may write the entry after ``newest``.

    It must be a member of the newest entry, and have the log that made it one. A broker that was killed before it knew
    that its entry was written is found by its log.

    Args:
        newest: The newest entry; None if there is none.
        name: The broker's name.
        log_epoch: Epoch of the active broker that wrote the broker's log, or whose log it copies; 0 if there is no log.
        log_id: Identifies the broker's log.
    """
    if newest is None:
        return True
    return name in newest.members and (log_epoch == newest.epoch or (name, log_id) == (newest.active, newest.log_id))


def first_entry(
    newest: Entry | None,
    *,
    name: str,
    process: str,
    log_id: str,
    address: str,
    epoch: int,
    goes_on: bool,
    takes_over: bool = False,
) -> Entry:
    """Return the entry with which a broker starts, as its only member.

    Args:
        newest: The newest entry; None if there is none. The broker must be one of its members.
        name: The broker's name.
        process: Identifies the broker's process.
        log_id: Identifies the broker's log.
        address: Address at which the broker ships its log.
        epoch: Least epoch of the broker.
        goes_on: True if the broker may serve new steps without a standby.
        takes_over: True if the broker was the standby, and takes over.
    """
    was_alone = newest is not None and newest.members == (name,) and newest.alone
    return Entry(
        number=1 if newest is None else newest.number + 1,
        epoch=epoch if newest is None else max(epoch, newest.epoch + 1),
        active=name, process=process, log_id=log_id, members=(name,),
        alone=goes_on or takes_over or was_alone, address=address,
    )  # fmt: skip
