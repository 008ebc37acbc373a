"""The producers' side of the broker: who sends which partition, from where on, and how much.

Partitions of a stream are shared out among the ``producers`` that offer it, and move when one comes
or goes, so that any number of producer processes gives the same stream. Every move begins a new
session at the next sample that is missing (``credits``); messages of an older session or of an older broker
change nothing. A producer that breaks the protocol, or says that it must stop, loses its leases,
and what it said is what the trainers then wait for. When a feed goes back to its first sample, so
do its partitions, each in a new session: chunks still on their way are of an old one. Knows
partitions by number (``p``), numbered through over all feeds; what was taken of each is in their ``books``.
"""

from __future__ import annotations

from streampack.core.admission import Admission, lengths_of
from streampack.core.books import Books
from streampack.core.credits import Credits
from streampack.core.effects import Recalled
from streampack.core.events import Effect, Report
from streampack.core.history import History
from streampack.core.intake import Intake
from streampack.core.journal import Journal
from streampack.core.messages import (
    WRONG_SIDE,
    Attach,
    Bye,
    Done,
    Envelope,
    Eos,
    Get,
    Hello,
    Mark,
    ProducerPing,
    ReaderPing,
    Reject,
    Samples,
    Sent,
    Who,
)
from streampack.core.plan import Capacity
from streampack.core.producers import CLAIM_S, Producer, Producers, refusal
from streampack.core.rules import Rules
from streampack.core.samples import I64
from streampack.core.snapshot import Floor

REPEAT_S = 1.0
"""Credits are said again this often, whether or not they changed."""
SILENT_S = 15.0
"""A producer not heard of for so long has lost its leases."""

_FAREWELL = Bye(reason="the broker is stopping")


class Leases:
    """Every partition's holder, beside its ``books``."""

    def __init__(self, run: int, epoch: int, capacity: Capacity, journal: Journal) -> None:
        self.quota_tokens, self._journal = capacity.quota_tokens, journal
        self.books = Books(run, capacity.quota_tokens, journal)
        self.producers = Producers(self.books)
        self.credits = Credits(run, epoch, capacity, self.books, self.producers, journal)
        self._now = 0.0
        self._repeated = 0.0
        self._done = False
        self._failed: dict[int, str] = {}  # why the last holder of a partition stopped, until samples come again
        self.refused = 0
        """Messages that broke the protocol."""
        self.vanished = 0
        """Producers that were gone without a goodbye: silent, or followed by another process of their name."""

    @property
    def epoch(self) -> int:
        """The broker's."""
        return self.credits.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.credits.epoch = epoch

    def open(self, feed: str, rules: Rules, admission: Admission, history: History) -> None:
        """Add the streams of ``feed`` that are not there yet, whose samples ``admission`` takes."""
        self.books.open(feed, rules, admission, history)
        self.producers.open()
        self.credits.open()

    @property
    def intakes(self) -> list[Intake]:
        """Every partition's, as in the books."""
        return self.books.intakes

    @property
    def num_producers(self) -> int:
        """Those that are there."""
        return len(self.producers)

    @property
    def ended(self) -> bool:
        """Every partition has been taken whole, or closed."""
        return all(intake.ended for intake in self.intakes)

    def describe(self, p: int) -> str:
        """Partition ``p`` and who should send it, for a person."""
        stream, holder = self.books.stream_of[p], self.producers.holder_of(p)
        text = f"stream {stream.terms.name!r} partition {p - stream.first} of {stream.terms.partitions}"
        if p in self._failed:
            return f"{text}: {self._failed[p]}"
        if holder is None:
            how = "a streampack.Producer of it" if stream.terms.pushed else "one with 'streampack produce'"
            return f"{text}: no producer offers it, start {how}"
        return f"{text}: held by the producer at {holder.where}"

    # What a feed needs

    def merged(self, feed: str, moved: I64) -> list[Effect]:
        """The merge of ``feed`` has taken samples of its partitions ``moved``: widen their credits."""
        effects: list[Effect] = []
        every = self.books.of_feed(feed)
        for mine in moved.tolist():
            p = every[mine]
            intake, merge = self.intakes[p], self.books.stream_of[p].admission.merge
            intake.merged_seq = int(merge.merged_samples[mine])
            intake.merged_tokens = int(merge.merged_tokens[mine])
            effects += self.credits.flow(p) + self._pull(p)
        return effects

    def close(self, feed: str) -> list[Effect]:
        """``feed`` has ended before its streams: take no more of any."""
        return [e for p in self.books.of_feed(feed) for e in self._close(p)]

    def join(self, feed: str, known: int) -> list[Effect]:
        """The merge of ``feed`` has more partitions now than the ``known``: lease them, from their beginning."""
        more = self.books.join(feed, known)
        return self._read_from(more) if more else []

    def remove(self, feed: str, rules: Rules) -> list[Effect]:
        """Streams of weight 0 are wanted no more; what waited of them is dropped."""
        gone = [stream.name for stream in rules.streams if not stream.weight]
        return [e for name in gone for p in self.books.partitions(name) for e in self._close(p)]

    def go_to(self, feed: str, floors: list[Floor], held: I64) -> list[Effect]:
        """``feed`` has gone to another place (``Books.go_to``): its partitions are read from there, in new sessions."""
        self.books.go_to(feed, floors, held)
        mine = self.books.of_feed(feed)
        for p in mine:
            self._failed.pop(p, None)
        return self._read_from(mine)

    def recalled(self, event: Recalled) -> list[Effect]:
        """A chunk of a pushed partition, out of the log."""
        p, effects = self.books.recalled(event)
        if p is None:
            return effects
        return effects + self._pull(p) + self.credits.flow(p, repeat=not self.intakes[p].behind)

    def _read_from(self, mine: list[int]) -> list[Effect]:
        """Partitions are read from where their books say, in new sessions."""
        for p in mine:
            self.credits.begin(p)
        moved, effects = self._share_out()
        effects += [e for p in sorted({*mine, *moved}) for e in self.credits.lease(p)]
        return effects + [e for p in mine for e in self._pull(p)]

    def _close(self, p: int) -> list[Effect]:
        intake = self.intakes[p]
        intake.merged_tokens = intake.kept_tokens  # what waited is dropped
        if intake.ended:
            return []
        intake.closed = True
        return self.credits.flow(p, repeat=True)

    def _pull(self, p: int) -> list[Effect]:
        """Read on in the log, where it has more of a partition; it may end with that."""
        ended = self.intakes[p].ended
        effects = self.books.pull(p)
        return effects + (self.credits.flow(p, repeat=True) if self.intakes[p].ended and not ended else [])

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

    def drain(self) -> list[Effect]:
        """Give no further credit, lease nothing, and send every producer away."""
        self.credits.drained = True
        return [e for producer in self.producers for e in self.credits.send(producer.peer, _FAREWELL)]

    def dismiss(self, done: bool) -> list[Effect]:
        """Whether nobody will ask for samples again, so that producers may go."""
        tell, self._done = done and not self._done, done
        return [e for producer in self.producers for e in self.credits.send(producer.peer, Done())] if tell else []

    # Producers come and go

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
            return self._leave(producer, message.reason or "said goodbye") if producer is not None else []
        if producer is None or envelope.epoch < self.epoch:
            return self.credits.send(peer, Who())
        producer.heard = now
        if isinstance(message, ProducerPing):
            return self._ping(producer, message)
        if isinstance(message, Samples | Eos | Sent | Mark):
            return self._of_partition(producer, envelope, message)
        return self._refuse(peer, "protocol", f"got {type(message).__name__} from a producer")

    def _hello(self, peer: bytes, hello: Hello) -> list[Effect]:
        producers = self.producers
        for offer in hello.offers:
            if unfit := refusal(offer, self.books):
                return self._refuse(peer, *unfit)
        if self.credits.drained:
            return self.credits.send(peer, _FAREWELL)
        if producers.is_replaced(hello.producer):
            return self._refuse(peer, "partition_taken", "got a producer whose partition another has taken since")
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

    def _join(self, peer: bytes, hello: Hello) -> list[Effect]:
        """A producer is there, or says again that it is: lease it its share."""
        known = self.producers.named(hello.producer)
        producer = self.producers.add(hello, peer, self._now)
        effects: list[Effect] = []
        restarted = known is not None and known.where != producer.where
        if known is None:
            offers = ", ".join(sorted(producer.offers))
            effects.append(Report("info", f"producer {producer.where} joined, offering {offers}"))
        elif restarted:
            self.vanished += 1
            gone = f"producer {producer.where} took over from {known.where}, which is gone"
            effects.append(Report("warning", gone))
        moved, last_words = self._share_out()
        held = [p for p in self.producers.held_by(producer.name) if p not in moved]
        for p in held if restarted else ():  # another process: it knows nothing of what was sent
            self.credits.begin(p)
        return effects + last_words + [e for p in [*held, *moved] for e in self.credits.lease(p)]

    def _leave(self, producer: Producer, why: str) -> list[Effect]:
        self.producers.remove(producer.name)
        for offer in producer.offers:  # nothing of it was ever taken: the next producer may read other data
            stream = self.books.streams[offer]
            taken = self._journal.keeps or stream.admission.counts[stream.number].samples
            if not taken and not self.producers.offers(offer):
                self.books.digests.pop(offer, None)
        level = "info" if self.ended or "goodbye" in why else "warning"
        effects: list[Effect] = [Report(level, f"producer {producer.where} left: {why}")]
        moved, last_words = self._share_out()
        return effects + last_words + [e for p in moved for e in self.credits.lease(p)]

    def _share_out(self) -> tuple[list[int], list[Effect]]:
        """Give every open partition to a producer that offers its stream, evenly.

        Returns those that moved, and what is said to those who lost them: how much of theirs was taken.
        """
        moved: list[int] = []
        effects: list[Effect] = []
        for move in self.producers.moves():
            effects += self.credits.flow(move.p, repeat=True) if move.taken else []
            self.producers.holder[move.p] = move.to
            moved += [move.p] if move.to is not None else []
        for p in moved:
            self.credits.begin(p)
        return sorted(moved), effects

    def _ping(self, producer: Producer, message: ProducerPing) -> list[Effect]:
        mine = self.producers.held_by(producer.name)
        if message.failure:
            self._failed |= dict.fromkeys([p for p in mine if not self.intakes[p].ended], message.failure)
            report = Report("error", f"producer {producer.where}: {message.failure}")
            return [report, *self._leave(producer, "it failed")]
        if self._done:
            return self.credits.send(producer.peer, Done())
        if self.credits.drained:
            return self.credits.send(producer.peer, _FAREWELL)
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
        unfit = stream.admission.refusal(stream.number, intake, envelope, message)
        if unfit is not None:
            return self._expel(producer, *unfit, p)
        lengths = lengths_of(message)
        stop = message.base_seq + len(lengths)
        if stop <= self.books.next_seq(p):
            return self.credits.flow(p, repeat=True)
        fits = intake.fits(stop, int(lengths.sum()) * intake.token_bytes) and not intake.behind
        if message.base_seq > intake.expected_seq or not fits:
            return self.credits.again(p)
        if stream.terms.pushed and message.base_seq < intake.recorded_seq:
            return self.credits.again(p)  # half of it is in the log
        self._failed.pop(p, None)
        taken = self.books.take(p, envelope, message)
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
        effects = self._refuse(producer.peer, code, detail)
        self._failed[p] = detail
        return effects + self._leave(producer, code)

    def _refuse(self, peer: bytes, code: str, detail: str) -> list[Effect]:
        self.refused += 1
        effects: list[Effect] = [Report("warning", f"refused a producer: {detail}")]
        return effects + self.credits.send(peer, Reject(code=code, detail=detail[:2000]))
