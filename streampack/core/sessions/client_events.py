"""What a client session hears of its trainer, and what it asks its shell to do beside sending."""

from __future__ import annotations

from streampack.core.model.snapshot import Snapshot
from streampack.core.protocol.events import Effect, Event
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.trainer_messages import AskState, Attached, Commit, Committed, State


class Returned(Event, frozen=True):
    """The trainer has returned every step before ``step``."""

    step: int


class Begin(Event, frozen=True):
    """The trainer begins to iterate: at ``next_step`` of a ``round``, with what its checkpoint says of it.

    A later one of the same client is of a higher round.
    """

    next_step: int = 0
    chain: bytes = b""
    round: int = 0
    lineage: int = 0
    snapshot: Snapshot | None = None


class Again(Event, frozen=True):
    """Begin the feed again, at its first step."""


class Damaged(Event, frozen=True):
    """A message of the broker came damaged, and was dropped."""


class Waiting(Event, frozen=True):
    """The trainer begins to wait, for a step or an answer, or has what it waited for."""

    on: bool


class Ask(Event, frozen=True):
    """Ask the broker, one question at a time, for as long as the trainer waits."""

    message: AskState | Commit


class Detach(Event, frozen=True):
    """The client is closed."""


class Deliver(Effect, frozen=True):
    """A whole step: its parts in order, each with its payload; ``attached`` says how to read them."""

    parts: tuple[Envelope, ...]
    attached: Attached


class Ended(Effect, frozen=True):
    """No step follows; ``chain`` is the digest of all."""

    num_steps: int
    chain: bytes


class Answered(Effect, frozen=True):
    """What the broker says to what was asked."""

    message: State | Committed


class Broken(Effect, frozen=True):
    """The session cannot go on: ``code`` for the kind, ``detail`` for a person."""

    code: str
    detail: str
