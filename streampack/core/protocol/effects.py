"""What the broker's state machine hears and what it asks its shell to do: events in, effects out.

All are small frozen structs; ``events`` has those that every machine knows. Payload is opaque: the
core passes frames on, by reference, to the effect that stores them.
"""

from __future__ import annotations

from typing import Any

from streampack.core.form.former import Request
from streampack.core.layout.boundaries import Contents
from streampack.core.model.rule_changes import Ask
from streampack.core.model.samples import I64
from streampack.core.packers.packer import Choice
from streampack.core.protocol.events import Effect, Event
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.rights import Rights


class FromProducer(Event, frozen=True):
    """A message of a producer; ``peer`` is what an answer is addressed to; ``rights``: those of its key, None where
    there are no keys.
    """

    peer: bytes
    envelope: Envelope
    rights: Rights | None = None


class FromTrainer(Event, frozen=True):
    """A message of a client."""

    peer: bytes
    envelope: Envelope
    rights: Rights | None = None


class NotSent(Event, frozen=True):
    """The router dropped a message for a trainer: the peer is gone, or its queue is full."""

    peer: bytes
    envelope: Envelope


class Withdrawn(Event, frozen=True):
    """A key may not do all that it could: whoever came with it must ask again."""

    key: bytes


class Formed(Event, frozen=True):
    """A packer's choice for the ``Form`` of a feed that had this ``generation``."""

    feed: str
    choice: Choice
    generation: int = 0


class Drain(Event, frozen=True):
    """Take nothing new; serve what is formed."""


class Change(Event, frozen=True):
    """Somebody asks for a change of ``feed`` (empty: the only one) that holds from step ``at_step`` on, or from the
    first that is not formed yet. ``note`` is what to record of it. Answered by an ``Answer`` of the same ``token``.
    """

    token: int
    feed: str
    ask: Ask
    at_step: int | None = None
    note: str = ""


class SendProducer(Effect, frozen=True):
    peer: bytes
    envelope: Envelope


class SendTrainer(Effect, frozen=True):
    peer: bytes
    envelope: Envelope


class Answer(Effect, frozen=True):
    """To a ``Change``: ``step`` of ``feed`` from which it holds, and is recorded; or why it is refused."""

    token: int
    feed: str = ""
    step: int = 0
    refusal: str = ""


class Store(Effect, frozen=True):
    """Copy samples into the arena: ``lengths`` int64 [n] tokens from ``offsets`` of a chunk's ``payload``.

    ``rows`` int64 [n]: each one's number in the chunk, for fields with one value a sample.
    """

    handles: I64
    offsets: I64
    lengths: I64
    rows: I64
    payload: tuple[Any, ...]


class Release(Effect, frozen=True):
    """The arena may forget these samples."""

    handles: I64


class Form(Effect, frozen=True):
    """Run ``request.choose()`` somewhere and say ``Formed``, of the same ``generation``."""

    feed: str
    request: Request
    generation: int = 0


class SendShard(Effect, frozen=True):
    """Cut a rank's shard of each pack (its ``contents``) out of the arena and send it with its plan.

    The plan, a ``StepPart``, names the arrays that its payload must hold.
    """

    peer: bytes
    envelope: Envelope
    contents: Contents
    frames: list[str]
    layout: str
    cp: int
    cp_rank: int
