"""Events that a relay's shell gives its session, and effects that the session asks the shell to perform."""

from __future__ import annotations

from streampack.core.protocol.events import Effect, Event
from streampack.core.protocol.message import Envelope


class FromReader(Event, frozen=True):
    """A message of a local reader has come; answers go to ``peer``."""

    peer: bytes
    envelope: Envelope


class ForReaders(Event, frozen=True):
    """Messages of the broker for readers have come together: (name of the reader, message) each."""

    items: tuple[tuple[str, Envelope], ...]


class NotDelivered(Event, frozen=True):
    """A message for the local reader at ``peer`` was dropped: the reader is gone, or its queue is full."""

    peer: bytes
    envelope: Envelope


class Moved(Event, frozen=True):
    """There is a connection to another address of the broker: whoever answers there may not know the readers."""


class Stop(Event, frozen=True):
    """The relay stops: its readers continue with the broker."""


class SendFor(Effect, frozen=True):
    """Send a message to the broker in the name of a reader."""

    reader: str
    envelope: Envelope


class SendReader(Effect, frozen=True):
    """Send a message to the local reader at ``peer``.

    Readers with the same ``group`` get the same payload, so one copy in shared memory is enough for all of them.
    """

    peer: bytes
    envelope: Envelope
    group: bytes = b""
