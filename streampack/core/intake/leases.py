"""The producers' side of the broker: what they say, and what they hear of it.

A producer offers streams and is leased partitions (``rebalance``), with credits; what it sends is taken if it is the
next that its books miss. Messages of an older session or of an older broker change nothing. A producer that breaks
the protocol, or says that it must stop, loses its leases, and what it said is what the trainers then wait for.
"""

from __future__ import annotations

from streampack.core.intake.chunk_check import received
from streampack.core.intake.producers import CLAIM_S, Producer, refusal
from streampack.core.intake.rebalance import FAREWELL, Sharing
from streampack.core.journal.journal import Journal
from streampack.core.model.capacity import Capacity
from streampack.core.protocol.events import Effect, Report
from streampack.core.protocol.message import WRONG_SIDE, Bye, Envelope, Reject, Who
from streampack.core.protocol.producer_messages import Done, Eos, Hello, Mark, ProducerPing, Samples, Sent
from streampack.core.protocol.trainer_messages import Attach, Get, ReaderPing

REPEAT_S = 1.0
"""Credits are said again this often, whether or not they changed."""
SILENT_S = 15.0
"""A producer not heard of for so long has lost its leases."""


class Leases(Sharing):
    """What every producer says of its partitions; ``tick`` drops those that fell silent."""

    def __init__(self, run: int, epoch: int, capacity: Capacity, journal: Journal) -> None:
        super().__init__(run, epoch, capacity, journal)
        self._repeated = 0.0
        self.refused = 0
        """Messages that broke the protocol."""

    # What else happens

    def tick(self, now: float) -> list[Effect]:
        """Drop producers that fell silent; repeat the credits of the others."""
        self._now = now
        effects: list[Effect] = []
        for producer in self.producers:
            if now - producer.heard > SILENT_S:
                self.vanished += 1
                effects += self._leave(producer, f"silent for {SILENT_S:.0f} s")
        if now - self._repeated >= REPEAT_S:
            self._repeated = now
            open_ = [p for p, intake in enumerate(self.intakes) if not intake.ended]
            effects += [e for p in open_ for e in self.credits.flow(p, repeat=True)]
        return effects

    def safe(self, upto: int) -> list[Effect]:
        """Records below ``upto`` are safe: tell those who keep what they push until then."""
        return self.credits.safe(upto)

    # What they say

    def receive(self, peer: bytes, envelope: Envelope, now: float) -> list[Effect]:
        """A producer's message."""
        self._now = now
        message = envelope.message
        if isinstance(message, Hello):
            return self._hello(peer, message)
        if isinstance(message, Attach | Get | ReaderPing):
            return self._refuse(
                peer, "wrong_address", f"{WRONG_SIDE}: this is where producers connect, see listen.trainers"
            )
        producer = self.producers.at(peer)
        if isinstance(message, Bye):
            return self.leave(peer, message.reason or "said goodbye")
        if producer is None or envelope.epoch < self.epoch:
            return self.credits.send(peer, Who())
        producer.heard = now
        if isinstance(message, ProducerPing):
            return self._ping(producer, message)
        if isinstance(message, Samples | Eos | Sent | Mark):
            return self._of_partition(producer, envelope, message)
        return self._refuse(peer, "protocol", f"got {type(message).__name__} from a producer")

    def leave(self, peer: bytes, why: str) -> list[Effect]:
        """A peer has gone, whether or not it was known."""
        producer = self.producers.at(peer)
        return [] if producer is None else self._leave(producer, why)

    def _hello(self, peer: bytes, hello: Hello) -> list[Effect]:
        producers = self.producers
        for offer in hello.offers:
            if unfit := refusal(offer, self.books):
                return self._refuse(peer, *unfit)
        if self.credits.drained:
            return self.credits.send(peer, FAREWELL)
        if producers.is_replaced(hello.producer):
            return self._refuse(peer, "partition_taken", "got a producer whose partition another has taken since")
        if len(producers) >= self._max_producers and producers.named(hello.producer) is producers.at(peer) is None:
            return self._refuse(peer, "too_many", (
                f"got one producer more than the {self._max_producers} that there may be at a time, expected no more: "
                f"stop others, or raise limits.peers in broker.yaml"
            ))  # fmt: skip
        claim = producers.claim(hello, self._now)
        if claim.refusal:
            return self._refuse(peer, "partition_taken", claim.refusal)
        if claim.waits:
            return []
        effects: list[Effect] = []
        for silent in claim.silent:
            self.vanished += 1
            effects += self._leave(silent, f"silent for {CLAIM_S:.0f} s, and another came")
        for offer in hello.offers:
            effects += self.books.accept(offer.stream, offer.source_digest)
        other = producers.at(peer)
        if other is not None and other.name != hello.producer:
            effects += self._leave(other, "its peer took another name")
        return effects + self._join(peer, hello) + (self.credits.send(peer, Done()) if self._done else [])

    def _ping(self, producer: Producer, message: ProducerPing) -> list[Effect]:
        mine = self.producers.held_by(producer.name)
        producer.sizes = {name: size for name, size in message.sizes.items() if name in producer.offers}
        if message.failure:
            self._failed |= dict.fromkeys([p for p in mine if not self.intakes[p].ended], message.failure)
            text = f"producer {producer.where}: {message.failure}"
            return [
                Report("error", text, producer=producer.where, host=producer.host),
                *self._leave(producer, "it failed"),
            ]
        if self._done:
            return self.credits.send(producer.peer, Done())
        if self.credits.drained:
            return self.credits.send(producer.peer, FAREWELL)
        return [e for p in mine for e in self.credits.flow(p, repeat=True)]

    # Samples

    def _of_partition(
        self, producer: Producer, envelope: Envelope, message: Samples | Eos | Sent | Mark
    ) -> list[Effect]:  # fmt: skip
        """What a producer says of a partition: only in the session in which it holds it."""
        p = self.books.partition(message.stream, message.partition)
        if p is None or self.producers.holder[p] != producer.name or envelope.fence != self.intakes[p].session:
            return self.credits.revoke(producer, envelope.fence, message)
        if isinstance(message, Samples):
            return self._samples(producer, p, envelope, message)
        if isinstance(message, Eos):
            return self._eos(producer, p, message)
        if isinstance(message, Mark):
            return self._mark(p, message)
        lost = message.next_seq > self.books.next_seq(p) and not self.credits.drained and not self.intakes[p].unwanted
        return self.credits.again(p) if lost else self.credits.flow(p, repeat=True)

    def _samples(self, producer: Producer, p: int, envelope: Envelope, message: Samples) -> list[Effect]:
        intake, stream = self.intakes[p], self.books.stream_of[p]
        if self.credits.drained:
            return []
        if intake.unwanted or (intake.closed and stream.terms.pushed):
            return self.credits.flow(p, repeat=True)
        chunk = received(envelope, message)
        if isinstance(chunk, str):
            return self._expel(producer, "malformed", chunk, p)
        unfit = stream.admission.refusal(stream.number, intake, chunk)
        if unfit is not None:
            return self._expel(producer, *unfit, p)
        if chunk.stop_seq <= self.books.next_seq(p):
            return self.credits.flow(p, repeat=True)
        fits = intake.fits(chunk.stop_seq, chunk.num_tokens * intake.token_bytes) and not intake.behind
        if message.base_seq > intake.expected_seq or not fits:
            return self.credits.again(p)
        if stream.terms.pushed and message.base_seq < intake.recorded_seq:
            return self.credits.again(p)  # half of it is in the log
        self._failed.pop(p, None)
        taken = self.books.take(p, chunk)
        return taken + self.credits.settle(p) + self.credits.flow(p, repeat=intake.closed)

    def _eos(self, producer: Producer, p: int, message: Eos) -> list[Effect]:
        intake = self.intakes[p]
        if intake.unwanted:
            return self.credits.flow(p, repeat=True)
        if message.total > self.books.next_seq(p):
            return self.credits.again(p)
        taken = max(self.books.next_seq(p), intake.known_seq)
        if message.total < taken or message.total != (
            message.total if intake.known_total is None else intake.known_total
        ):
            expected = f"at least the {taken} taken before" if intake.known_total is None else str(intake.known_total)
            return self._expel(
                producer, "short_stream",
                f"stream {message.stream!r} partition {message.partition}: got an end after {message.total} samples, "
                f"expected {expected}: the files have changed", p,
            )  # fmt: skip
        return self.books.end(p, message.total) + self.credits.flow(p, repeat=True)

    def _mark(self, p: int, message: Mark) -> list[Effect]:
        """A batch of a pushed partition has ended."""
        intake, stream = self.intakes[p], self.books.stream_of[p]
        if not stream.terms.pushed or message.number < intake.num_marks:
            return self.credits.flow(p, repeat=True)
        if message.number > intake.num_marks or message.seq != intake.recorded_seq:
            return self.credits.again(p)
        return self.books.mark(p, message) + self._pull(p) + self.credits.settle(p)

    def _expel(self, producer: Producer, code: str, detail: str, p: int) -> list[Effect]:
        """Refuse what a producer sent, and send it away: its leases go to others."""
        stream = self.books.stream_of[p]
        about = Report(
            "error", f"refused a producer: {detail}", feed=stream.feed, stream=stream.terms.name,
            partition=p - stream.first, producer=producer.where, host=producer.host,
        )  # fmt: skip
        effects = self._refuse(producer.peer, code, detail, about)
        self._failed[p] = detail
        return effects + self._leave(producer, code)

    def _refuse(self, peer: bytes, code: str, detail: str, report: Report | None = None) -> list[Effect]:
        self.refused += 1
        effects: list[Effect] = [report or Report("warning", f"refused a producer: {detail}")]
        return effects + self.credits.send(peer, Reject(code=code, detail=detail[:2000]))
