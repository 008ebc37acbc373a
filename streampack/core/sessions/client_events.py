"""Events that a trainer gives its client session, and effects that the session asks its shell to perform."""

from __future__ import annotations

from streampack.core.model.snapshot import Snapshot
from streampack.core.protocol.events import Effect, Event
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.trainer_messages import Attached, EndForMesh, Question, ReaderAnswer


class Returned(Event, frozen=True):
    """The trainer is done with every step before ``step``."""

    step: int


class Begin(Event, frozen=True):
    """The trainer begins to iterate at ``next_step`` of an ``iteration``.

    ``chain`` is the digest of all steps before ``next_step``; ``lineage`` and ``snapshot`` are the checkpoint's.
    Each ``Begin`` of a client has a higher iteration than the last.
    """

    next_step: int = 0
    chain: bytes = b""
    iteration: int = 0
    lineage: int = 0
    snapshot: Snapshot | None = None


class Again(Event, frozen=True):
    """The trainer begins the next iteration, at the first step of the feed."""


class Rerouted(Event, frozen=True):
    """Messages take another way to the broker from now on: through the relay or not, or to another address."""


class Damaged(Event, frozen=True):
    """The shell has dropped a damaged message of the broker."""


class Waiting(Event, frozen=True):
    """The trainer begins to wait for a step or an answer (``on``), or its wait has ended."""

    on: bool


class Ask(Event, frozen=True):
    """The trainer asks the broker for a state or a commit; one question at a time, repeated while the trainer waits."""

    message: Question


class Detach(Event, frozen=True):
    """The trainer has closed the client."""


class Deliver(Effect, frozen=True):
    """Give the trainer a whole step: its ``parts`` in order, with payloads.

    ``attached`` has the rules for decoding, unless the parts bring others (``StepPart.rules_of``).
    """

    parts: tuple[Envelope, ...]
    attached: Attached


class Ended(Effect, frozen=True):
    """Tell the trainer that the feed has ended after ``num_steps`` steps; ``chain`` is their digest.

    ``for_mesh`` is the broker's message if the feed goes on, but not for this mesh.
    """

    num_steps: int
    chain: bytes
    for_mesh: EndForMesh | None = None


class Answered(Effect, frozen=True):
    """Give the trainer the broker's answer to its question."""

    message: ReaderAnswer


class Broken(Effect, frozen=True):
    """Raise an error in the trainer: ``code`` is its kind, ``detail`` its text. The session is over."""

    code: str
    detail: str
