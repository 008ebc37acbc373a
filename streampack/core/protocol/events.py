"""Events and effects that the state machines of both ends share: the roots, time, and one connection."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from streampack.core.protocol.message import Envelope


class Event(Struct, frozen=True):
    """The root of what a state machine is told."""


class Effect(Struct, frozen=True):
    """The root of what a state machine asks its shell to do."""


class Tick(Event, frozen=True):
    """Time, in seconds of a clock that never goes back."""

    now: float


class FromBroker(Event, frozen=True):
    """A message of the broker, to a producer or a client."""

    envelope: Envelope


class Send(Effect, frozen=True):
    """A message for the broker."""

    envelope: Envelope


class Unsent(Event, frozen=True):
    """A message for the broker never left this process: there is no connection, or its queue is full."""

    envelope: Envelope


class Report(Effect, frozen=True):
    """A line for the log: ``text`` for people, the others what it is about, for those who search.

    Warning: somebody should look. Error: something is lost, or stops. Said when something has happened that is rare:
    never once a pack, a step or a chunk.
    """

    level: Literal["info", "warning", "error"]
    text: str
    feed: str | None = None
    stream: str | None = None
    partition: int | None = None
    step: int | None = None
    attempt: int | None = None
    rank: str | None = None
    """As ``Mesh.rank``."""
    producer: str | None = None
    """host:pid, as the others where a process is named."""
    host: str | None = None

    @property
    def about(self) -> dict[str, str | int]:
        """What is known of what it is about."""
        found = ((name, getattr(self, name)) for name in self.__struct_fields__[2:])
        return {name: value for name, value in found if value is not None}
