"""What a peer may do, where it is known who it is: the rights of its key.

The shell knows whose a message is, and says so with it; here is decided whether that key may say it. Without keys
nothing is asked. A peer of a key is named by the key first (``KEY_DIGITS`` hexadecimal digits), then by its connection:
so that no key speaks for a process that came with another, whatever names and connections it claims.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct

from streampack.core.model.bounded import Name, Small
from streampack.core.protocol.message import Message
from streampack.core.protocol.producer_messages import Eos, Hello, Mark, Samples, Sent
from streampack.core.protocol.trainer_messages import Attach

KEY_DIGITS = 64
Side = Literal["producer", "trainer"]


class Rights(Struct, frozen=True):
    """What the key of this ``name`` may do: send samples, or take steps, or ``any`` of both.

    Of ``streams`` and ``feeds`` only those named, all where none is; only as these ``ranks`` of the mesh.
    """

    name: str
    role: Side | Literal["any", "none"]
    streams: tuple[Name, ...] = ()
    feeds: tuple[Name, ...] = ()
    ranks: dict[Literal["dp", "cp", "tp", "pp"], Annotated[int, Small]] = {}


NO_RIGHTS = Rights("", "none")
"""Of a key that is not allowed, or not any more."""


def forbidden(rights: Rights, message: Message, side: Side) -> str:
    """Why a key may not say this where producers, or trainers, connect; empty if it may."""
    if rights.role == "none":
        return "got a key that is not allowed any more, expected one of the broker's allowed.yaml"
    if rights.role not in (side, "any"):
        return f"got key {rights.name!r}, which is a {rights.role}'s, where {side}s connect: expected a {side}'s"
    if isinstance(message, Attach):
        return _not_its_rank(rights, message)
    named = [offer.stream for offer in message.offers] if isinstance(message, Hello) else _stream_of(message)
    wrong = [stream for stream in named if rights.streams and stream not in rights.streams]
    if wrong:
        return f"got stream {wrong[0]!r} from key {rights.name!r}, expected one of: {', '.join(rights.streams)}"
    return ""


def _stream_of(message: Message) -> list[str]:
    return [message.stream] if isinstance(message, Samples | Eos | Sent | Mark) else []


def _not_its_rank(rights: Rights, message: Attach) -> str:
    if rights.feeds and message.feed not in rights.feeds:
        return f"got feed {message.feed!r} for key {rights.name!r}, expected one of: {', '.join(rights.feeds)}"
    own = dict(zip(("dp", "cp", "tp", "pp"), message.mesh.ranks, strict=True))
    for axis, rank in rights.ranks.items():
        if own[axis] != rank:
            return f"got {axis}_rank={own[axis]} for key {rights.name!r}, expected {axis}_rank={rank}, which it is for"
    return ""


def key_of(peer: bytes) -> bytes:
    """The key of a peer that has one."""
    return peer[:KEY_DIGITS]
