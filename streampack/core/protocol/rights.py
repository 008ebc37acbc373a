"""Rights: the messages that the key of a peer may send.

The shell knows the key of each message's sender, and passes its rights with the message. This module decides whether
the key may send that message. Without keys, everything is allowed. The name of a peer is its key (``KEY_DIGITS``
hexadecimal digits), then its connection. So a process cannot send messages in the name of a process with another key.
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
    """Rights of the key ``name``: to send samples (``producer``), to read steps (``trainer``), or both (``any``).

    The rights cover only the named ``streams``, ``feeds`` and ``ranks``; an empty list covers all.
    """

    name: str
    role: Side | Literal["any", "none"]
    streams: tuple[Name, ...] = ()
    feeds: tuple[Name, ...] = ()
    ranks: dict[Literal["dp", "cp", "tp", "pp"], Annotated[int, Small]] = {}


NO_RIGHTS = Rights("", "none")
"""The rights of a key that is not allowed, or not any more."""


def forbidden(rights: Rights, message: Message, side: Side) -> str:
    """Return an error text if a key may not send ``message`` to the address of ``side``; empty if it may."""
    if rights.role == "none":
        return "got a key that is no longer allowed, expected a key in the broker's allowed.yaml"
    if rights.role not in (side, "any"):
        return f"got key {rights.name!r} of role {rights.role}, expected a key of role {side} at this address"
    if isinstance(message, Attach):
        return _not_its_rank(rights, message)
    named = [offer.stream for offer in message.offers] if isinstance(message, Hello) else _stream_of(message)
    wrong = [stream for stream in named if rights.streams and stream not in rights.streams]
    if wrong:
        return f"got stream {wrong[0]!r} from key {rights.name!r}, expected one of: {', '.join(rights.streams)}"
    return ""


def _stream_of(message: Message) -> list[str]:
    """Return the stream of a message about a partition, as a list; empty for other messages."""
    return [message.stream] if isinstance(message, Samples | Eos | Sent | Mark) else []


def _not_its_rank(rights: Rights, message: Attach) -> str:
    """Return an error text if a key may not attach to a feed as the given rank; empty if it may."""
    if rights.feeds and message.feed not in rights.feeds:
        return f"got feed {message.feed!r} for key {rights.name!r}, expected one of: {', '.join(rights.feeds)}"
    own = dict(zip(("dp", "cp", "tp", "pp"), message.mesh.ranks, strict=True))
    for axis, rank in rights.ranks.items():
        if own[axis] != rank:
            return f"got {axis}_rank={own[axis]} for key {rights.name!r}, expected {axis}_rank={rank}"
    return ""


def key_of(peer: bytes) -> bytes:
    """Return the key in the name of a peer that has one."""
    return peer[:KEY_DIGITS]
