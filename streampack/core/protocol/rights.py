"""Rights: the messages that the key of a peer may send.

The shell knows the key of each message's sender, and passes its rights with the message. This module decides whether
the key may send that message. Without keys, everything is allowed. The name of a peer is its key (``KEY_DIGITS``
hexadecimal digits), then its connection. So a process cannot send messages in the name of a process with another key.
Only a relay sends messages for ranks: its key has the role ``relay``, and stands in the addresses of these ranks.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct

from streampack.core.model.bounded import Name, Small
from streampack.core.model.mesh import Mesh
from streampack.core.protocol.message import Message
from streampack.core.protocol.producer_messages import Amend, CommitWrite, Eos, Hello, Mark, Samples, Sent, Start
from streampack.core.protocol.relay_messages import NodeGet, NodePing
from streampack.core.protocol.trainer_messages import AskResults, Attach, Publish, ReportValues

KEY_DIGITS = 64
Side = Literal["producer", "trainer"]
Role = Literal["producer", "trainer", "relay", "standby"]


class Rights(Struct, frozen=True):
    """Rights of the key ``name``.

    The role ``producer`` sends samples. ``trainer`` reads steps, ``relay`` also for the ranks of its host.
    ``standby`` copies the log. ``any`` does all of this.

    The rights cover only the named ``streams``, ``feeds``, ``ranks`` and ``hosts``; an empty list covers all. A rank
    names its host itself, so ``hosts`` guards against mistakes.
    """

    name: str
    role: Role | Literal["any", "none"]
    streams: tuple[Name, ...] = ()
    feeds: tuple[Name, ...] = ()
    ranks: dict[Literal["dp", "cp", "tp", "pp"], Annotated[int, Small]] = {}
    hosts: tuple[Name, ...] = ()


REVOKED = "got a key that is no longer allowed, expected a key in the broker's allowed.yaml"
NO_RIGHTS = Rights("", "none")
"""The rights of a key that is not allowed, or not any more."""


def forbidden(rights: Rights, message: Message, side: Side, for_rank: bool = False) -> str:
    """Return an error text if a key may not send ``message`` to the address of ``side``; empty if it may.

    ``for_rank``: a relay sends the message for a rank of its host.
    """
    if rights.role == "none":
        return REVOKED
    roles = {"producer": ("producer",), "trainer": ("trainer", "relay")}[side]
    if rights.role not in (*roles, "any"):
        expected = " or ".join(roles)
        return f"got key {rights.name!r} of role {rights.role}, expected a key of role {expected} at this address"
    if (for_rank or isinstance(message, NodeGet | NodePing)) and rights.role not in ("relay", "any"):
        return (
            f"got key {rights.name!r} of role {rights.role} from a relay, expected a key of role relay. Create one "
            f"with 'streampack keys new KEYS NAME --role relay', and start the relay with it"
        )
    if isinstance(message, Publish) and any(rights.ranks.values()):
        return (
            f"got a published policy from key {rights.name!r}, which is for other ranks. Expected a key that may read "
            f"rank 0 of every axis, because one rank publishes for all"
        )
    if isinstance(message, NodeGet | NodePing | Publish | ReportValues | AskResults):
        return _not_its_feed(rights, message.feed)
    if isinstance(message, Attach):
        return not_its_rank(rights, message.feed, message.mesh, message.host)
    named = [offer.stream for offer in message.offers] if isinstance(message, Hello) else _stream_of(message)
    wrong = [stream for stream in named if rights.streams and stream not in rights.streams]
    if wrong:
        return f"got stream {wrong[0]!r} from key {rights.name!r}, expected one of: {', '.join(rights.streams)}"
    return ""


def _stream_of(message: Message) -> list[str]:
    """Return the stream of a message about a partition, as a list; empty for other messages."""
    return [message.stream] if isinstance(message, Samples | Eos | Sent | Mark | CommitWrite | Amend | Start) else []


def not_its_rank(rights: Rights, feed: str, mesh: Mesh, host: str) -> str:
    """Return an error text if a key may not read a feed as a rank on ``host``; empty if it may."""
    if why := _not_its_feed(rights, feed):
        return why
    if rights.hosts and host not in rights.hosts:
        return f"got a rank on host {host!r} for key {rights.name!r}, expected host {' or '.join(rights.hosts)}"
    return other_rank(rights, mesh.ranks)


def other_rank(rights: Rights, ranks: tuple[int, ...]) -> str:
    """Return an error text if a key is for other ranks; empty if it may be used for this one."""
    own = dict(zip(("dp", "cp", "tp", "pp"), ranks, strict=True))
    for axis, rank in rights.ranks.items():
        if own[axis] != rank:
            return f"got {axis}_rank={own[axis]} for key {rights.name!r}, expected {axis}_rank={rank}"
    return ""


def _not_its_feed(rights: Rights, feed: str) -> str:
    """Return an error text if a key may not read a feed; empty if it may."""
    if rights.feeds and feed not in rights.feeds:
        return f"got feed {feed!r} for key {rights.name!r}, expected one of: {', '.join(rights.feeds)}"
    return ""


def key_of(peer: bytes) -> bytes:
    """Return the key in the name of a peer that has one."""
    return peer[:KEY_DIGITS]
