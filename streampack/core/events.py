"""Events and effects that the state machines of both ends share: the roots, time, and one connection."""

from __future__ import annotations

from msgspec import Struct

from streampack.core.messages import Envelope


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


class Report(Effect, frozen=True):
    """A line for the log, ``level`` as in logging's names."""

    level: str
    text: str
