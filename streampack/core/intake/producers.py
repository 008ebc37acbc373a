"""Who offers which streams, and who holds which partition.

A producer is a process: its name is its own for as long as it lives. Partitions of a stream that is read are shared
out evenly among the producers that offer it; one that is pushed is its who names it. Where another holds that one, it
*claims* it: a holder that is heard after the claim came is alive, and the claim is refused; one that was silent for
``CLAIM_S`` has lost it for good. Knows nothing of samples but whether a partition has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from streampack.core.intake.partition_accounts import Books
from streampack.core.protocol.producer_messages import Hello, Offer, SourceSize

HOSTS_SHOWN = 32
MOST_CLAIMS = 4096
"""That are remembered, and producers that lost theirs: names cost whoever invents them nothing."""
CLAIM_S = 3.0
"""One that pushes has lost its partition to another that names it after so long."""


@dataclass(slots=True)
class Producer:
    """A process that sends samples, and when it was last heard."""

    name: str
    peer: bytes
    where: str
    offers: dict[str, int | None]
    """By stream; the partition of one that is pushed."""
    heard: float
    sizes: dict[str, SourceSize] = field(default_factory=dict)
    """What it knows of the streams' sources, in the shards that it has opened."""

    @property
    def host(self) -> str:
        return self.where.rpartition(":")[0]


class Move(NamedTuple):
    """Partition ``p`` goes ``to`` another producer, or to none; ``taken``: its holder still sends it."""

    p: int
    to: str | None
    taken: bool = False


class Claim(NamedTuple):
    """What becomes of a claim: it is refused, or waits, or these holders were ``silent`` for too long."""

    refusal: str = ""
    waits: bool = False
    silent: tuple[Producer, ...] = ()


class Seen(NamedTuple):
    """Of a stream: the producers that offer it, the first hosts of them by name, and seconds since one was heard, None
    where none ever was."""

    producers: int
    hosts: list[str]
    last_s: float | None


class Producers:
    """The producers, and the ``holder`` of every partition in ``books``."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self.holder: list[str | None] = []
        self._named: dict[str, Producer] = {}
        self._names: dict[bytes, str] = {}  # by peer
        self._claims: dict[str, float] = {}  # when producers first named a partition that another holds
        self._left: dict[str, float] = {}  # when one that has gone was last heard, by stream
        self._replaced: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._named)

    def __iter__(self) -> Iterator[Producer]:
        return iter(list(self._named.values()))

    def open(self) -> None:
        """The books have more partitions: nobody holds them."""
        self.holder += [None] * (len(self._books.intakes) - len(self.holder))

    def named(self, name: str) -> Producer | None:
        return self._named.get(name)

    def at(self, peer: bytes) -> Producer | None:
        name = self._names.get(peer)
        return None if name is None else self._named[name]

    def holder_of(self, p: int) -> Producer | None:
        name = self.holder[p]
        return None if name is None else self._named[name]

    def held_by(self, name: str) -> list[int]:
        """The partitions of a producer."""
        return [p for p, holder in enumerate(self.holder) if holder == name]

    def is_replaced(self, name: str) -> bool:
        """Has another taken its partition since?"""
        return name in self._replaced

    def offers(self, stream: str) -> bool:
        """Does anybody offer it?"""
        return any(stream in producer.offers for producer in self._named.values())

    def seen(self, stream: str, now: float) -> Seen:
        """Who offers a stream, and when one was heard."""
        there = [producer for producer in self._named.values() if stream in producer.offers]
        heard = [*(producer.heard for producer in there), *([self._left[stream]] if stream in self._left else [])]
        hosts = sorted({producer.host for producer in there})[:HOSTS_SHOWN]
        return Seen(len(there), hosts, max(now - max(heard), 0.0) if heard else None)

    def size(self, stream: str) -> SourceSize | None:
        """How much a stream has, as far as those that are there know: each reads other shards."""
        sizes = [each.sizes[stream] for each in self._named.values() if stream in each.sizes]
        if not sizes:
            return None
        return SourceSize(
            shards=sizes[0].shards, opened=sum(size.opened for size in sizes),
            samples=sum(size.samples for size in sizes), squares=sum(size.squares for size in sizes),
        )  # fmt: skip

    def add(self, hello: Hello, peer: bytes, now: float) -> Producer:
        """A producer says what it offers, for the first time or again."""
        known = self._named.get(hello.producer)
        if known is not None:
            self._names.pop(known.peer, None)
        offers = {offer.stream: offer.partition for offer in hello.offers}
        sizes = known.sizes if known is not None else {}
        producer = Producer(hello.producer, peer, f"{hello.host}:{hello.pid}", offers, now, sizes)
        self._named[producer.name], self._names[peer] = producer, producer.name
        return producer

    def remove(self, name: str) -> Producer:
        """It is gone; nobody holds its partitions."""
        producer = self._named.pop(name)
        self._names.pop(producer.peer, None)
        self._left |= {stream: max(producer.heard, self._left.get(stream, 0.0)) for stream in producer.offers}
        for p in self.held_by(name):
            self.holder[p] = None
        return producer

    # Claims

    def claim(self, hello: Hello, now: float) -> Claim:
        """What becomes of a producer that names partitions which others hold; an empty ``Claim`` where none does.

        The other keeps them while it is heard; killed, it is silent, and cannot say goodbye.
        """
        wanted = {self._books.streams[offer.stream].first + (offer.partition or 0): offer for offer in hello.offers}
        others = {self.holder[p]: offer for p, offer in wanted.items() if offer.partition is not None}
        held = [(self._named[name], offer) for name, offer in others.items() if name not in (None, hello.producer)]
        if not held:
            self._claims.pop(hello.producer, None)
            return Claim()
        since = self._claims.setdefault(hello.producer, now)
        _forget_oldest(self._claims)
        for holder, offer in held:
            if holder.heard > since:
                self._claims.pop(hello.producer)
                return Claim(
                    refusal=f"got partition {offer.partition} of stream {offer.stream!r} from "
                    f"{hello.host}:{hello.pid}, which the producer at {holder.where} holds: give each producer a "
                    f"partition of its own"
                )
        silent = tuple(holder for holder, _ in held if now - holder.heard > CLAIM_S)
        if len(silent) < len(held):
            return Claim(waits=True)
        self._claims.pop(hello.producer)
        self._replaced |= dict.fromkeys(holder.name for holder in silent)
        _forget_oldest(self._replaced)
        return Claim(silent=silent)

    # Sharing out

    def moves(self) -> list[Move]:
        """What must move so that every open partition is with a producer that offers its stream, evenly."""
        moves: list[Move] = []
        for stream in self._books.streams:
            able = [name for name, producer in self._named.items() if stream in producer.offers]
            mine = self._books.partitions(stream)
            if self._books.streams[stream].terms.pushed:
                moves += self._move_pushed(mine, {self._named[name].offers[stream]: name for name in able})
            elif able:
                moves += self._even_out(able, [p for p in mine if not self._books.intakes[p].ended])
            else:
                moves += [Move(p, None) for p in mine]
        return moves

    def _even_out(self, able: list[str], open_: list[int]) -> list[Move]:
        moves: list[Move] = []
        load: dict[str | None, list[int]] = {name: [] for name in able}
        orphans = list[int]()
        for p in open_:
            load.get(self.holder[p], orphans).append(p)
        while True:
            least = min(able, key=lambda name: len(load[name]))
            most = max(able, key=lambda name: len(load[name]))
            if orphans:
                move = Move(orphans.pop(0), least)
            elif len(load[most]) - len(load[least]) > 1:
                move = Move(load[most].pop(), least, taken=True)
            else:
                return moves
            load[least].append(move.p)
            moves.append(move)

    def _move_pushed(self, mine: range, named: dict[int | None, str]) -> list[Move]:
        """Each partition of a pushed stream is the producer's that names it."""
        to = {p: named.get(p - mine.start) for p in mine}
        return [Move(p, name) for p, name in to.items() if name != self.holder[p]]


def _forget_oldest(names: dict[str, Any]) -> None:
    while len(names) > MOST_CLAIMS:
        del names[next(iter(names))]


def refusal(offer: Offer, books: Books) -> tuple[str, str] | None:
    """Why a stream cannot be offered so: (code, detail), or None."""
    if offer.stream not in books.streams:
        return "unknown_stream", f"got stream {offer.stream!r}, expected one of: {', '.join(books.streams)}"
    wrong = _misplaced(offer, books)
    if wrong:
        return "partition", wrong
    digest = books.digests.get(offer.stream, offer.source_digest)
    if digest == offer.source_digest:
        return None
    return "source_digest", (
        f"stream {offer.stream!r}: got other data than its first producer reads (source digest "
        f"{offer.source_digest[:16]}, expected {digest[:16]}): give both the same files and tokenizer, or "
        f"begin a new run"
    )


def _misplaced(offer: Offer, books: Books) -> str:
    """Only one that pushes names its partition."""
    terms = books.streams[offer.stream].terms
    if terms.pushed and offer.partition is None:
        return (
            f"got an offer to read stream {offer.stream!r}, expected none: it is pushed, by streampack.Producer: "
            f"take it out of producer.yaml, or set its pushed: false"
        )
    if not terms.pushed and offer.partition is not None:
        return f"got samples for stream {offer.stream!r}, expected none: it is read: set its pushed: true"
    if offer.partition is not None and offer.partition >= terms.partitions:
        return (
            f"got partition {offer.partition} of stream {offer.stream!r}, expected one below {terms.partitions}: "
            f"set the stream's partitions to the number of its producers"
        )
    return ""
