"""The connected producers: which streams each offers, and which partitions each holds.

A producer is a process with a name that no other process has. A stream that is read is shared out among the producers
that offer it (``rebalance``). A partition of a pushed stream belongs to the producer that names it. If another producer
holds that partition, the new one *claims* it. A holder that sends a message after the claim is alive, and the claim is
rejected. A holder that is silent for ``CLAIM_S`` loses the partition for good. The module does not know samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from msgspec import UNSET

from streampack.core.intake.partitions import Partitions
from streampack.core.protocol.producer_messages import Hello, Offer, SourceSize

HOSTS_SHOWN = 32
"""Most hosts of a stream's producers in a report."""
MOST_CLAIMS = 4096
"""Most claims, and most replaced producers, that are remembered, since peers can invent any number of names."""
SILENT_AFTER_S = 5.0
"""Seconds without a message after which a producer is called silent."""
CLAIM_S = 3.0
"""Seconds of silence after which a producer that pushes loses its partition to another that claims it."""


class ProducerDeparture(Enum):
    """Reason that a producer was removed; ``text`` is for the log.

    If ``vanished``, the producer did not say goodbye, and may be dead.
    """

    GOODBYE = ("it said goodbye", False)
    SILENT = ("it was silent for {} s", True)
    TAKEN_OVER = ("it was silent for {} s, and another producer took over its partition", True)
    OTHER_NAME = ("its peer took another name", False)
    FAILED = ("it failed", False)
    EXPELLED = ("it was refused ({})", False)
    KEY_CHANGED = ("its key was changed, or does not allow its messages", False)

    def __init__(self, text: str, vanished: bool) -> None:
        self.text, self.vanished = text, vanished


@dataclass(slots=True)
class ConnectedProducer:
    """A process that sends samples.

    Attributes:
        name: Name that the process chose; no other process has it.
        peer: Name of the connection.
        where: Host and process id, as host:pid.
        offers: For each offered stream, the partition to which the process pushes; None if the stream is read. Streams
            that the process only amends are not among them.
        heard: Time of its last message, in seconds.
        sizes: Sizes of the streams' sources, counting the files that this process has opened, by stream.
        waiting: The cause for which a read of its files waits; empty if none waits.
    """

    name: str
    peer: bytes
    where: str
    offers: dict[str, int | None]
    heard: float
    sizes: dict[str, SourceSize] = field(default_factory=dict)
    waiting: str = ""

    @property
    def host(self) -> str:
        """Name of the producer's host."""
        return self.where.rpartition(":")[0]


class Claim(NamedTuple):
    """The decision on a claim: rejected for a reason, waiting, or granted because the ``silent`` holders lose."""

    refusal: str = ""
    waits: bool = False
    silent: tuple[ConnectedProducer, ...] = ()


class Seen(NamedTuple):
    """The producers that offer a stream.

    Attributes:
        producers: Number of producers that offer the stream.
        hosts: Hosts of these producers, sorted; only the first ``HOSTS_SHOWN``.
        last_s: Seconds since the last message of any of these producers; None if there was no message.
    """

    producers: int
    hosts: list[str]
    last_s: float | None


class Producers:
    """The connected producers, and the holder of every partition."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions
        self.holder: list[str | None] = []
        """Name of the producer that holds each partition."""
        self.failures: dict[int, str] = {}
        """Reason why a partition's last holder stopped, by partition; removed when samples come again."""
        self.claims: dict[str, float] = {}
        """Time at which each producer first claimed a partition that another holds, by name."""
        self.replaced: dict[str, None] = {}
        """Names of producers that lost their partition to a claim, the oldest first."""
        self._named: dict[str, ConnectedProducer] = {}
        self._names: dict[bytes, str] = {}
        """Name of the producer of each peer."""
        self._left: dict[str, ConnectedProducer] = {}
        """The producer that was heard last of those that have left, by stream."""
        self.now = 0.0
        """The time, in seconds."""

    def __len__(self) -> int:
        return len(self._named)

    def __iter__(self) -> Iterator[ConnectedProducer]:
        return iter(list(self._named.values()))

    def open(self) -> None:
        """Add the partitions that were opened, without a holder at first."""
        self.holder += [None] * (len(self._partitions) - len(self.holder))

    def named(self, name: str) -> ConnectedProducer | None:
        """Return the producer of this name; None if it is not connected."""
        return self._named.get(name)

    def at(self, peer: bytes) -> ConnectedProducer | None:
        """Return the producer of the connection ``peer``; None if there is none."""
        name = self._names.get(peer)
        return None if name is None else self._named[name]

    def holder_of(self, p: int) -> ConnectedProducer | None:
        """Return the producer that holds partition ``p``; None if there is none."""
        name = self.holder[p]
        return None if name is None else self._named[name]

    def held_by(self, name: str) -> list[int]:
        """Return the numbers of the partitions that the producer ``name`` holds."""
        return [p for p, holder in enumerate(self.holder) if holder == name]

    def is_replaced(self, name: str) -> bool:
        """Return whether the producer ``name`` has lost its partition to a claim."""
        return name in self.replaced

    def offering(self, stream: str) -> list[ConnectedProducer]:
        """Return the producers that offer a stream, in the order in which they came."""
        return [producer for producer in self._named.values() if stream in producer.offers]

    def seen(self, stream: str) -> Seen:
        """Return the producers that offer a stream, and the seconds since their last message."""
        there = self.offering(stream)
        heard = [producer.heard for producer in (*there, *([self._left[stream]] if stream in self._left else []))]
        hosts = sorted({producer.host for producer in there})[:HOSTS_SHOWN]
        return Seen(len(there), hosts, max(self.now - max(heard), 0.0) if heard else None)

    def size(self, stream: str) -> SourceSize | None:
        """Return the size of a stream's source, summed over producers, which open different files; None if unknown."""
        sizes = [producer.sizes[stream] for producer in self._named.values() if stream in producer.sizes]
        if not sizes:
            return None
        return SourceSize(
            shards=sizes[0].shards, opened=sum(size.opened for size in sizes),
            samples=sum(size.samples for size in sizes), squares=sum(size.squares for size in sizes),
        )  # fmt: skip

    def describe(self, p: int) -> str:
        """Return a text that names partition ``p`` and its producer, or the reason that no producer sends it."""
        stream, holder = self._partitions.stream_of[p], self.holder_of(p)
        text = f"stream {stream.terms.name!r} partition {p - stream.first} of {stream.terms.partitions}"
        if p in self.failures:
            return f"{text}: {self.failures[p]}"
        if holder is None:
            how = (
                "a streampack.Producer for it"
                if stream.terms.pushed
                else "one with 'streampack produce -c producer.yaml'"
            )
            last = self._left.get(stream.terms.name)
            last_seen = "" if last is None else f"the producer at {last.where} was heard {self._ago(last)} s ago; "
            return f"{text} ({last_seen}no producer offers it; start {how})"
        silent = f", silent for {self._ago(holder)} s" if self._ago(holder) else ""
        waits = f", whose store does not serve {holder.waiting}" if holder.waiting else ""
        return f"{text} (held by the producer at {holder.where}{silent}{waits})"

    def _ago(self, producer: ConnectedProducer) -> int:
        """Return the seconds since the last message of a producer, in steps of ``SILENT_AFTER_S``."""
        return int((self.now - producer.heard) // SILENT_AFTER_S * SILENT_AFTER_S)

    def is_lost(self, p: int) -> bool:
        """Return whether the holder of partition ``p`` is silent, or no producer that is heard offers the partition."""
        stream, holder = self._partitions.stream_of[p], self.holder_of(p)
        name, number = stream.terms.name, p - stream.first
        offering = [producer for producer in self.offering(name) if producer.offers[name] in (None, number)]
        return all(self.now - peer.heard >= SILENT_AFTER_S for peer in ([holder] if holder is not None else offering))

    def pushed_from(self, p: int) -> str | None:
        """Return host:pid of the producer that pushes to partition ``p``; None if there is none or it has failed."""
        holder = self.holder_of(p)
        return None if holder is None or p in self.failures else holder.where

    def add(self, hello: Hello, peer: bytes, now: float) -> ConnectedProducer:
        """Add the producer of a hello, or update its connection and its offers; return the producer."""
        named = self._named.get(hello.producer)
        if named is not None:
            self._names.pop(named.peer, None)
        offers = {offer.stream: offer.partition for offer in hello.offers if offer.amends is not True}
        sizes = named.sizes if named is not None else {}
        producer = ConnectedProducer(hello.producer, peer, f"{hello.host}:{hello.pid}", offers, now, sizes)
        self._named[producer.name], self._names[peer] = producer, producer.name
        return producer

    def remove(self, name: str) -> ConnectedProducer:
        """Remove a producer that has left, and return it; its partitions then have no holder."""
        producer = self._named.pop(name)
        self._names.pop(producer.peer, None)
        for stream in producer.offers:
            self._left[stream] = max(producer, self._left.get(stream, producer), key=lambda producer: producer.heard)
        for p in self.held_by(name):
            self.holder[p] = None
        return producer

    # Claims

    def claim(self, hello: Hello, now: float) -> Claim:
        """Decide about a producer's claim to partitions that others hold; return an empty ``Claim`` if none is held.

        A holder that still sends messages keeps its partitions; a silent holder, such as a killed process, loses them.
        """
        streams = self._partitions.streams
        named = [offer for offer in hello.offers if offer.partition is not None and offer.amends is not True]
        others = {self.holder[streams[offer.stream].first + (offer.partition or 0)]: offer for offer in named}
        taken = [(self._named[name], offer) for name, offer in others.items() if name not in (None, hello.producer)]
        if not taken:
            self.claims.pop(hello.producer, None)
            return Claim()
        since = self.claims.setdefault(hello.producer, now)
        _forget_oldest(self.claims)
        for holder, offer in taken:
            if holder.heard > since:
                self.claims.pop(hello.producer)
                return Claim(
                    refusal=f"got partition {offer.partition} of stream {offer.stream!r} from "
                    f"{hello.host}:{hello.pid}, but the producer at {holder.where} holds this partition. Give each "
                    f"producer a partition of its own"
                )
        silent = tuple(holder for holder, _ in taken if now - holder.heard > CLAIM_S)
        if len(silent) < len(taken):
            return Claim(waits=True)
        self.claims.pop(hello.producer)
        self.replaced |= dict.fromkeys(holder.name for holder in silent)
        _forget_oldest(self.replaced)
        return Claim(silent=silent)


def _forget_oldest(names: dict[str, Any]) -> None:
    """Remove the oldest names beyond ``MOST_CLAIMS``."""
    while len(names) > MOST_CLAIMS:
        del names[next(iter(names))]


def refusal(offer: Offer, partitions: Partitions, digests: dict[str, str]) -> tuple[str, str] | None:
    """Return the reason that an offer is rejected, (code of the error, its text); None if it is accepted.

    Args:
        offer: A stream that a producer offers.
        partitions: The partitions of all feeds.
        digests: Accepted digest of each stream's source, by stream.
    """
    if offer.stream not in partitions.streams:
        return "unknown_stream", f"got stream {offer.stream!r}, expected one of: {', '.join(partitions.streams)}"
    wrong = _misplaced(offer, partitions)
    if wrong:
        return "partition", wrong
    digest = digests.get(offer.stream, offer.source_digest)
    if digest == offer.source_digest and offer.stream in partitions.begins and offer.begin is UNSET:
        return "source_digest", (
            f"stream {offer.stream!r}: got a producer of an earlier version, expected one that reads several shards at "
            f"a time, as this run does. Install the broker's version for this producer"
        )
    if digest == offer.source_digest:
        return None
    return "source_digest", (
        f"stream {offer.stream!r}: got source digest {offer.source_digest[:16]}, expected {digest[:16]}, the digest "
        f"from the stream's first producer. Give both producers the same files and tokenizer, or start a new run."
    )


def _misplaced(offer: Offer, partitions: Partitions) -> str:
    """Return an error text if an offer names a partition wrongly; empty if not. Only pushed streams name one."""
    terms = partitions.streams[offer.stream].terms
    if offer.amends is True and not terms.late:
        return (
            f"got a producer that amends stream {offer.stream!r}, expected a stream with late fields. Set "
            f"`late: true` for a field, or give the producer a partition"
        )
    if offer.amends is True and offer.partition is not None:
        return (
            f"got partition {offer.partition} of stream {offer.stream!r} from a producer that amends, expected no "
            f"partition, because it amends samples of all partitions"
        )
    if offer.amends is True:
        return ""
    if terms.pushed and offer.partition is None:
        return (
            f"got an offer to read stream {offer.stream!r}, expected no such offer, because programs push this stream "
            f"with streampack.Producer. Remove the stream from producer.yaml, or set `pushed: false` for the stream"
        )
    if not terms.pushed and offer.partition is not None:
        return (
            f"got an offer to push stream {offer.stream!r}, expected no such offer, because the stream is not pushed. "
            f"Set `pushed: true` for the stream"
        )
    if offer.partition is not None and offer.partition >= terms.partitions:
        return (
            f"got partition {offer.partition} of stream {offer.stream!r}, expected a number below "
            f"{terms.partitions}. Set the stream's `partitions` to the number of its producers"
        )
    return ""
