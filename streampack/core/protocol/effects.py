"""The events that the broker's state machine handles, and the effects that it asks its shell to perform.

All events and effects are small frozen structs; ``events`` defines those that every state machine shares. Payload is
opaque: the core passes frames by reference to the effect that stores them.
"""

from __future__ import annotations

from typing import Any, Protocol

from streampack.core.layout.boundaries import Contents
from streampack.core.model.rule_changes import Ask
from streampack.core.model.samples import I64
from streampack.core.protocol.events import Effect, Event
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.rights import Rights


class FromProducer(Event, frozen=True):
    """A producer's message has come; answers go to ``peer``. ``rights`` are the key's rights; None without keys."""

    peer: bytes
    envelope: Envelope
    rights: Rights | None = None


class FromTrainer(Event, frozen=True):
    """A client's message has come; answers go to ``peer``. ``rights`` are the key's rights; None without keys."""

    peer: bytes
    envelope: Envelope
    rights: Rights | None = None


class NotSent(Event, frozen=True):
    """The router dropped a message for a trainer: the peer is gone, or its queue is full."""

    peer: bytes
    envelope: Envelope


class Withdrawn(Event, frozen=True):
    """Rights of a key were withdrawn: peers that use this key must say hello or attach again.

    If the key is ``revoked``, they are rejected instead, and the shell ends their connections.
    """

    key: bytes
    revoked: bool = False


class Choosing(Protocol):
    """A request to the thread that plans: a ``Request`` for packs, or a ``GroupRequest`` for groups of ranks."""

    def choose(self) -> Any:
        """Return the choice, which follows from the request alone."""


class Formed(Event, frozen=True):
    """The answer to the ``Form`` of this feed with the same ``request``: the packs or groups that were chosen."""

    feed: str
    choice: Any
    request: Choosing


class Drain(Event, frozen=True):
    """A request to stop the broker: it takes no new samples, and serves the steps that are already formed."""


class Change(Event, frozen=True):
    """A person asks to change a feed's rules or to skip steps; an ``Answer`` of the same ``token`` follows.

    Attributes:
        feed: Name of the feed; empty if there is only one.
        ask: The change.
        at_step: First step with the change; None for the first that is not formed yet.
        note: Text to record with the change.
    """

    token: int
    feed: str
    ask: Ask
    at_step: int | None = None
    note: str = ""


class SendProducer(Effect, frozen=True):
    """Send a message to the producer ``peer``."""

    peer: bytes
    envelope: Envelope


class SendTrainer(Effect, frozen=True):
    """Send a message to the trainer's client ``peer``."""

    peer: bytes
    envelope: Envelope


class Answer(Effect, frozen=True):
    """Answer a ``Change``: it takes effect at ``step`` of ``feed``, or it is rejected with the text ``refusal``.

    ``step`` is None for a change after so many tokens. ``id`` is the number by which the change can be canceled; None
    for a change that cannot.
    """

    token: int
    feed: str = ""
    step: int | None = 0
    refusal: str = ""
    id: int | None = None


class Store(Effect, frozen=True):
    """Copy n samples of a chunk into the arena.

    Attributes:
        handles: int64 [n], handles of the samples.
        offsets: int64 [n], tokens of the chunk before each sample.
        lengths: int64 [n], tokens of each sample.
        rows: int64 [n], position of each sample in the chunk, for fields with one value per sample.
        payload: The chunk's frames, without that of the media.
        media: The frame with the samples' media; None if the run has none.
        media_bounds: int64 [2, n], where each sample's media begin and end in this frame.
    """

    handles: I64
    offsets: I64
    lengths: I64
    rows: I64
    payload: tuple[Any, ...]
    media: Any = None
    media_bounds: I64 | None = None


class Release(Effect, frozen=True):
    """Free the memory of samples in the arena, by ``handles``, int64 [n]."""

    handles: I64


class Form(Effect, frozen=True):
    """Plan, by ``request.choose()``, in any thread, and answer with ``Formed`` of the same ``request``."""

    feed: str
    request: Choosing


class SendShard(Effect, frozen=True):
    """Copy some ranks' shards of each pack (``contents``) out of the arena, and send them to ``peer``.

    The message is a ``StepPart`` for one rank, or a ``NodePart``. Its payload is the arrays named by ``frames``, cut
    for the ranks ``cp_ranks`` of ``cp``.
    """

    peer: bytes
    envelope: Envelope
    contents: Contents
    frames: list[str]
    layout: str
    cp: int
    cp_ranks: tuple[int, ...]
