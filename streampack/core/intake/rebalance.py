"""Rebalancing: move leases when producers come and go.

The partitions of a stream that is read are divided evenly among the producers that offer it. So any number of processes
can produce the same stream. A partition of a pushed stream goes to the producer that names it. Every move begins a new
session at the next missing sample (``credits``).
"""

from __future__ import annotations

from typing import NamedTuple

from streampack.core.intake.credits import Credits
from streampack.core.intake.partition_records import PartitionRecords
from streampack.core.intake.partitions import Partitions
from streampack.core.intake.producers import ConnectedProducer, ProducerDeparture, Producers
from streampack.core.protocol.events import Effect, Report
from streampack.core.protocol.producer_messages import Hello

MOST_NAMED = 16
"""Streams that a text names."""


class Move(NamedTuple):
    """A move of partition ``p`` to the producer named ``to``, or to none; ``taken`` if its old holder still sends."""

    p: int
    to: str | None
    taken: bool = False


class Rebalancer:
    """Decides which producer holds which partition.

    Args:
        partitions: The partitions of all feeds.
        records: Forgets the digest of a source when its last producer leaves.
        producers: The connected producers.
        credits: Sends leases to them.
    """

    def __init__(
        self, partitions: Partitions, records: PartitionRecords, producers: Producers, credits: Credits
    ) -> None:  # fmt: skip
        self._partitions, self._records, self._producers, self._credits = partitions, records, producers, credits
        self.vanished = 0
        """Number of producers that left without a goodbye: silent, or replaced by another process of their name."""

    def join(self, peer: bytes, hello: Hello, now: float) -> list[Effect]:
        """Add the producer of a hello, new or known, and lease partitions to it."""
        same_name = self._producers.named(hello.producer)
        producer = self._producers.add(hello, peer, now)
        effects: list[Effect] = []
        restarted = same_name is not None and same_name.where != producer.where
        if same_name is None:
            amends = sorted(offer.stream for offer in hello.offers if offer.amends is True)
            does = "amending" if amends else "offering"
            streams = amends or sorted(producer.offers)
            more = f" and {len(streams) - MOST_NAMED} more streams" * (len(streams) > MOST_NAMED)
            text = f"producer {producer.where} joined, {does} {', '.join(streams[:MOST_NAMED])}{more}"
            effects.append(Report("info", text, producer=producer.where, host=producer.host))
        elif restarted:
            self.vanished += 1
            reason = f"producer {producer.where} took over from producer {same_name.where}, which is gone"
            effects.append(Report("warning", reason, producer=producer.where, host=producer.host))
        moved, last_words = self._share_out()
        kept = [p for p in self._producers.held_by(producer.name) if p not in moved]
        for p in kept if restarted else ():  # another process does not know how far the last one sent
            self._credits.begin(p)
        return effects + last_words + self._lease([*kept, *moved])

    def leave(self, producer: ConnectedProducer, why: ProducerDeparture, detail: object = "") -> list[Effect]:
        """Remove a producer, and lease its partitions to others; ``detail`` completes the text of ``why``."""
        self.vanished += why.vanished
        self._producers.remove(producer.name)
        for stream in producer.offers:
            if not self._producers.offering(stream):
                self._records.forget_source(stream)
        fine = self._partitions.ended or why is ProducerDeparture.GOODBYE
        text = f"producer {producer.where} left: {why.text.format(detail)}"
        left = Report("info" if fine else "warning", text, producer=producer.where, host=producer.host)
        moved, last_words = self._share_out()
        return [left, *last_words, *self._lease(moved)]

    def begin(self, partitions: list[int]) -> list[Effect]:
        """Begin new sessions of ``partitions``, divide all partitions among producers, and send the leases."""
        for p in partitions:
            self._credits.begin(p)
        moved, last_words = self._share_out()
        return last_words + self._lease(sorted({*partitions, *moved}))

    def _lease(self, partitions: list[int]) -> list[Effect]:
        """Send the leases of partitions to their holders: the first partition of each stream, then the second."""
        begins = [self._partitions.stream_of[p].first for p in partitions]
        ordered = sorted(zip(partitions, begins, strict=True), key=lambda place: place[0] - place[1])
        return [effect for p, _ in ordered for effect in self._credits.lease(p)]

    def _share_out(self) -> tuple[list[int], list[Effect]]:
        """Give every open partition to a producer that offers its stream.

        Returns:
            The partitions that moved, and the messages that tell the old holders how far the broker has received.
        """
        moved: list[int] = []
        effects: list[Effect] = []
        for move in self._moves():
            effects += self._credits.flow(move.p, repeat=True) if move.taken else []
            self._producers.holder[move.p] = move.to
            moved += [move.p] if move.to is not None else []
        for p in moved:
            self._credits.begin(p)
        return sorted(moved), effects

    def _moves(self) -> list[Move]:
        """Return the moves that divide the open partitions of each stream evenly among its producers."""
        moves: list[Move] = []
        for name, stream in self._partitions.streams.items():
            able, partitions = self._producers.offering(name), self._partitions.of_stream(name)
            if stream.terms.pushed:
                moves += self._move_pushed(partitions, {producer.offers[name]: producer.name for producer in able})
            elif able:
                open_ = [p for p in partitions if not self._partitions.intakes[p].ended]
                moves += self._even_out([producer.name for producer in able], open_)
            else:
                moves += [Move(p, None) for p in partitions]
        return moves

    def _even_out(self, able: list[str], open_: list[int]) -> list[Move]:
        """Return the moves after which the numbers of open partitions of the producers ``able`` differ by at most 1."""
        moves: list[Move] = []
        load: dict[str | None, list[int]] = {name: [] for name in able}
        orphans = list[int]()
        for p in open_:
            load.get(self._producers.holder[p], orphans).append(p)
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

    def _move_pushed(self, partitions: range, named: dict[int | None, str]) -> list[Move]:
        """Return the moves that give each partition of a pushed stream to the producer that names it.

        Args:
            partitions: Numbers of the stream's partitions.
            named: Producer that names each partition, by its number in the stream.
        """
        holders = {p: named.get(p - partitions.start) for p in partitions}
        return [Move(p, name) for p, name in holders.items() if name != self._producers.holder[p]]
