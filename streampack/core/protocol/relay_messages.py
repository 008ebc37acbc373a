"""Messages between a relay and the broker: a catalog of each message and its answer.

A relay speaks for the readers of one host. It passes messages of a reader on unchanged, under the reader's address
(``relayed``), if they are ``RELAYED``. For steps and pings, the relay sends one ``NodeGet`` and one ``NodePing`` for
all its readers. The broker answers a ``NodeGet`` with ``NodePart`` messages, in which each sample of the host's ranks
occurs once.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta, Struct

from streampack.core.model.bounded import Name, Small, Text
from streampack.core.model.snapshot import Count
from streampack.core.protocol.message import FeedMessage, Message
from streampack.core.protocol.rights import Rights
from streampack.core.protocol.step_part import StepPart
from streampack.core.stats.data_wait import Starvation

MAX_READERS = 1024
"""Most readers of one relay that a message may name."""


SEPARATOR = b"\0relay\0"


def relayed(relay: bytes, reader: str) -> bytes:
    """Return the address of a reader that is reached through the relay at the address ``relay``."""
    return relay + SEPARATOR + reader.encode()


def relay_of(peer: bytes) -> tuple[bytes, str] | None:
    """Return (address of the relay, name of the reader) if a peer is reached through a relay; else None.

    >>> relay_of(relayed(b"node1", "rank 0")), relay_of(b"node1")
    ((b'node1', 'rank 0'), None)
    """
    relay, separator, reader = peer.rpartition(SEPARATOR)
    return (relay, reader.decode(errors="replace")) if separator else None


class RelayMessage(FeedMessage, frozen=True, kw_only=True):
    """A message of a relay for all its readers of a feed."""

    def forbidden_by(self, rights: Rights) -> str:
        """Return an error text if a key may not be used by a relay, or may not read the feed."""
        return rights.refuse_relay() or rights.refuse_feed(self.feed)


class NodeGet(RelayMessage, frozen=True, kw_only=True):
    """Request the steps before ``stop`` for all readers of a relay that take part in the attempt.

    Parts, confirmations and ``request`` are as in ``Get``, but number the relay's ``NodePart`` messages. The broker
    chooses the ranks of the parts when ``request`` rises, so a relay raises it whenever a reader has joined.

    Attributes:
        done: (name, ``done_upto``) of readers whose trainers are done with further steps.
    """

    TYPE: ClassVar[int] = 40
    lineage: Count
    start: Count
    stop: Count
    request: Count = msgspec.field(name="resend")
    part: Small = 0
    done: Annotated[tuple[tuple[Name, Count], ...], Meta(max_length=MAX_READERS)] = ()


class ReaderReport(Struct, frozen=True, kw_only=True):
    """The state of one reader of a relay, as ``ReaderPing`` reports it; ``fence`` is the attempt that it knows.

    ``silent_s`` is the time since the relay's last message from the reader, in seconds.
    """

    reader: Name
    fence: Count
    done_upto: Count
    have_upto: Count
    silent_s: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0
    stats: Annotated[dict[Name, float], Meta(max_length=32)] = msgspec.field(default_factory=dict)
    starvation: Starvation | None = None


class NodePing(RelayMessage, frozen=True, kw_only=True):
    """A relay is alive, has every part before part ``part`` of step ``have_upto``, and reports its readers.

    A relay without readers sends it when readers ask whether it works. The broker answers with a ``NodePing`` without
    readers, unless it has something else to say. So the relay knows that the broker is alive.
    """

    TYPE: ClassVar[int] = 41
    have_upto: Count
    part: Small = 0
    ranks: Annotated[tuple[ReaderReport, ...], Meta(max_length=MAX_READERS)] = ()


class NodePart(StepPart, frozen=True, kw_only=True):
    """Some micro-batches of a step for several ranks of one host.

    ``part`` and ``parts`` number the messages of the step for this relay. The packs are those of the first rank of
    ``dp_ranks``, micro-batches ``first`` to ``first`` + k, then those of the next rank, and so on. All dp ranks have
    the same number k of packs in the message.

    A frame that context parallelism cuts has the shard of every pack for the first of ``cp_ranks``, then for the next.
    ``edges`` likewise. A field that is replicated over cp, or of axis ``sample``, occurs once. With the layout
    ``whole``, every frame occurs once.

    With dynamic context parallelism, every dp x cp rank has packs of its own. So ``dp_ranks`` are dp x cp ranks, and
    ``cp_ranks`` is (cp,), which relays of version 0.1.0 reject. Columns and frames have the packs and the shards of one
    rank after another. Ranks of a group repeat the columns of its pack, its replicated fields, and its fields of axis
    ``sample``.

    Attributes:
        dp_ranks: Data-parallel ranks, ascending.
        cp_ranks: Context-parallel ranks, ascending.
        cp: Number of context-parallel ranks of the mesh.
        rank_part, rank_parts: ``part`` and ``parts`` of the ``StepPart`` messages that each rank would get directly.
    """

    TYPE: ClassVar[int] = 42
    dp_ranks: Annotated[tuple[Small, ...], Meta(max_length=MAX_READERS)] = ()
    cp_ranks: Annotated[tuple[Small, ...], Meta(max_length=MAX_READERS)] = ()
    cp: Small = 1
    rank_part: Small = 0
    rank_parts: Small = 1


class Elsewhere(Message, frozen=True, kw_only=True):
    """A relay stops: the reader continues with the broker at once. Only relays send it, to their readers."""

    TYPE: ClassVar[int] = 43
    detail: Text = ""


RELAY_MESSAGES: tuple[type[Message], ...] = (NodeGet, NodePing, NodePart, Elsewhere)
