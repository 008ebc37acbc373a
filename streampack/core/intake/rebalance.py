"""Who sends which partition, and what a feed needs of those who do.

Partitions of a stream are shared out among the ``producers`` that offer it, and move when one comes
or goes, so that any number of producer processes gives the same stream. Every move begins a new
session at the next sample that is missing (``credits``). When a feed goes back to its first sample, so
do its partitions, each in a new session: chunks still on their way are of an old one. Knows
partitions by number (``p``), numbered through over all feeds; what was taken of each is in their ``books``.
"""

from __future__ import annotations

from streampack.core.intake.admission import Admission
from streampack.core.intake.credits import Credits
from streampack.core.intake.intake import Intake
from streampack.core.intake.partition_accounts import Books
from streampack.core.intake.producers import Producer, Producers, Seen
from streampack.core.journal.history import History
from streampack.core.journal.journal import Journal
from streampack.core.journal.log_effects import Recalled
from streampack.core.model.capacity import Capacity
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64
from streampack.core.model.snapshot import Floor
from streampack.core.protocol.events import Effect, Report
from streampack.core.protocol.message import Bye
from streampack.core.protocol.producer_messages import Done, Hello

FAREWELL = Bye(reason="the broker is stopping")


class Sharing:
    """Every partition's holder, beside its ``books``."""

    def __init__(self, run: int, epoch: int, capacity: Capacity, journal: Journal) -> None:
        self.quota_tokens, self._journal = capacity.quota_tokens, journal
        self._max_producers = capacity.max_peers
        self.books = Books(run, capacity.quota_tokens, journal)
        self.producers = Producers(self.books)
        self.credits = Credits(run, epoch, capacity, self.books, self.producers, journal)
        self._now = 0.0
        self._done = False
        self._failed: dict[int, str] = {}  # why the last holder of a partition stopped, until samples come again
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

    def seen(self, stream: str) -> Seen:
        """Who offers a stream, and when one was heard."""
        return self.producers.seen(stream, self._now)

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

    def pushed_from(self, p: int) -> str | None:
        """The address of the producer that pushes to partition ``p``; None without one, or if it has failed."""
        holder = self.producers.holder_of(p)
        return None if holder is None or p in self._failed else holder.where

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

    # Who holds what

    def dismiss(self, done: bool) -> list[Effect]:
        """Whether nobody will ask for samples again, so that producers may go."""
        tell, self._done = done and not self._done, done
        return [e for producer in self.producers for e in self.credits.send(producer.peer, Done())] if tell else []

    def drain(self) -> list[Effect]:
        """Give no further credit, lease nothing, and send every producer away."""
        self.credits.drained = True
        return [e for producer in self.producers for e in self.credits.send(producer.peer, FAREWELL)]

    def _join(self, peer: bytes, hello: Hello) -> list[Effect]:
        """A producer is there, or says again that it is: lease it its share."""
        known = self.producers.named(hello.producer)
        producer = self.producers.add(hello, peer, self._now)
        effects: list[Effect] = []
        restarted = known is not None and known.where != producer.where
        if known is None:
            offers = ", ".join(sorted(producer.offers))
            text = f"producer {producer.where} joined, offering {offers}"
            effects.append(Report("info", text, producer=producer.where, host=producer.host))
        elif restarted:
            self.vanished += 1
            gone = f"producer {producer.where} took over from {known.where}, which is gone"
            effects.append(Report("warning", gone, producer=producer.where, host=producer.host))
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
        text = f"producer {producer.where} left: {why}"
        fine = self.ended or "goodbye" in why
        left = Report("info" if fine else "warning", text, producer=producer.where, host=producer.host)
        effects: list[Effect] = [left]
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
