"""Rights: what the key of a peer allows.

The shell knows the key of each message's sender, and passes its rights with the message. Each kind of message says
which rights it needs (``Message.forbidden_by``). Without keys, everything is allowed. The name of a peer is its key
(``KEY_DIGITS`` hexadecimal digits), then its connection. So a process cannot send messages in the name of a process
with another key. Only a relay sends messages for ranks: its key has the role ``relay``, and stands in the addresses of
these ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from msgspec import Struct

from streampack.core.model.bounded import Name, Small
from streampack.core.model.mesh import Mesh

KEY_DIGITS = 64
Side = Literal["producer", "trainer"]
Role = Literal["producer", "trainer", "relay", "standby"]
REVOKED = "got a key that is no longer allowed, expected a key in the broker's allowed.yaml"


class Rights(Struct, frozen=True):
    """Rights of the key ``name``.

    The role ``producer`` sends samples. ``trainer`` reads steps, ``relay`` also for the ranks of its host.
    ``standby`` copies the log. ``any`` does all of this.

    The rights cover only the named ``streams``, ``feeds``, ``ranks`` and ``hosts``; an empty list covers all. A rank
    names its host itself, so ``hosts`` guards against mistakes.

    Each method returns an error text if the key does not allow something, and an empty text if it does.
    """

    name: str
    role: Role | Literal["any", "none"]
    streams: tuple[Name, ...] = ()
    feeds: tuple[Name, ...] = ()
    ranks: dict[Literal["dp", "cp", "tp", "pp"], Annotated[int, Small]] = {}
    hosts: tuple[Name, ...] = ()

    def refuse_side(self, side: Side) -> str:
        """Check that the key may send messages to the address of ``side``."""
        if self.role == "none":
            return REVOKED
        roles = {"producer": ("producer",), "trainer": ("trainer", "relay")}[side]
        if self.role in (*roles, "any"):
            return ""
        expected = " or ".join(roles)
        return f"got key {self.name!r} of role {self.role}, expected a key of role {expected} at this address"

    def refuse_relay(self) -> str:
        """Check that the key is for a relay."""
        if self.role in ("relay", "any"):
            return ""
        return (
            f"got key {self.name!r} of role {self.role} from a relay, expected a key of role relay. Create one "
            f"with 'streampack keys new KEYS NAME --role relay', and start the relay with it"
        )

    def refuse_streams(self, streams: Iterable[str]) -> str:
        """Check that the key may send samples of all of these streams."""
        wrong = [stream for stream in streams if self.streams and stream not in self.streams]
        if not wrong:
            return ""
        return f"got stream {wrong[0]!r} from key {self.name!r}, expected one of: {', '.join(self.streams)}"

    def refuse_feed(self, feed: str) -> str:
        """Check that the key may read a feed."""
        if self.feeds and feed not in self.feeds:
            return f"got feed {feed!r} for key {self.name!r}, expected one of: {', '.join(self.feeds)}"
        return ""

    def refuse_rank(self, ranks: tuple[int, ...]) -> str:
        """Check that the key is for this rank of the mesh, whatever the feed and the host."""
        own = dict(zip(("dp", "cp", "tp", "pp"), ranks, strict=True))
        for axis, rank in self.ranks.items():
            if own[axis] != rank:
                return f"got {axis}_rank={own[axis]} for key {self.name!r}, expected {axis}_rank={rank}"
        return ""

    def refuse_reader(self, feed: str, mesh: Mesh, host: str) -> str:
        """Check that the key may read a feed as a rank on ``host``."""
        if why := self.refuse_feed(feed):
            return why
        if self.hosts and host not in self.hosts:
            return f"got a rank on host {host!r} for key {self.name!r}, expected host {' or '.join(self.hosts)}"
        return self.refuse_rank(mesh.ranks)

    def refuse_publishing(self) -> str:
        """Check that the key may publish policies for all ranks."""
        if not any(self.ranks.values()):
            return ""
        return (
            f"got a published policy from key {self.name!r}, which is for other ranks. Expected a key that may read "
            f"rank 0 of every axis, because one rank publishes for all"
        )


NO_RIGHTS = Rights("", "none")
"""The rights of a key that is not allowed, or not any more."""


def key_of(peer: bytes) -> bytes:
    """Return the key in the name of a peer that has one."""
    return peer[:KEY_DIGITS]
