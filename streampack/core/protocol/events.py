"""Events and effects that all state machines share: the base classes, the time, and messages of the broker."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from streampack.core.protocol.message import Envelope


class Event(Struct, frozen=True):
    """Base class of everything that a state machine handles."""


class Effect(Struct, frozen=True):
    """Base class of everything that a state machine asks its shell to do."""


class Tick(Event, frozen=True):
    """The time is ``now``, in seconds of a clock that never goes back."""

    now: float


class FromBroker(Event, frozen=True):
    """A message of the broker has come, to a producer or a client."""

    envelope: Envelope


class Send(Effect, frozen=True):
    """Send a message to the broker."""

    envelope: Envelope


class Unsent(Event, frozen=True):
    """A message for the broker never left this process: there is no connection, or its queue is full."""

    envelope: Envelope


class Report(Effect, frozen=True):
    """Write a line to the program's log: ``text`` for people, and facts to search for in the other attributes.

    A warning needs attention. An error means that something is lost or stops. Reports are rare: never one for each
    pack, step or chunk.
    """

    level: Literal["info", "warning", "error"]
    text: str
    feed: str | None = None
    stream: str | None = None
    partition: int | None = None
    step: int | None = None
    attempt: int | None = None
    rank: str | None = None
    """Rank of the mesh, as ``Mesh.rank``."""
    producer: str | None = None
    """Process of a producer, as host:pid."""
    host: str | None = None

    @property
    def about(self) -> dict[str, str | int]:
        """The facts of the line that are known, by name, without ``level`` and ``text``."""
        facts = ((name, getattr(self, name)) for name in self.__struct_fields__[2:])
        return {name: value for name, value in facts if value is not None}
