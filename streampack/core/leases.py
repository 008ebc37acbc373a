"""The producers' side of the broker: who sends which partition, from where on, and how much.

Partitions of a stream are shared out among the producers that offer it, and move when one comes
or goes, so that any number of producer processes gives the same stream. Every move begins a new
session at the next sample that is missing; messages of an older session or of an older broker
change nothing. A producer that breaks the protocol, or says that it must stop, loses its leases,
and what it said is what the trainers then wait for. When a feed goes back to its first sample, so
do its partitions, each in a new session: chunks still on their way are of an old one. Knows
partitions by number (``p``), numbered through over all feeds; what was taken of each is in their ``books``.
"""

from __future__ import annotations

from dataclasses import dataclass

from streampack.core.admission import Admission, lengths_of
from streampack.core.books import Books
from streampack.core.effects import Recalled, SendProducer
from streampack.core.events import Effect, Report
from streampack.core.history import History
from streampack.core.intake import MAX_UNMERGED, Intake
from streampack.core.journal import Journal
from streampack.core.messages import (
    WRONG_SIDE,
    Attach,
    Bye,
    Done,
    Envelope,
    Eos,
    Flow,
    Get,
    Hello,
    Lease,
    Mark,
    Message,
    Offer,
    ProducerPing,
    ReaderPing,
    Reject,
    Revoke,
    Samples,
    Sent,
    Who,
)
from streampack.core.rules import Rules
from streampack.core.samples import I64
from streampack.core.snapshot import Floor

REPEAT_S = 1.0
"""Credits are said again this often, whether or not they changed."""
SILENT_S = 15.0
"""A producer not heard of for so long has lost its leases."""
CLAIM_S = 3.0
"""One that pushes has lost its partition to another that names it after so long."""

_FAREWELL = Bye(reason="the broker is stopping")


@dataclass(slots=True)
class _Producer:
    name: str
    peer: bytes
    where: str
    offers: dict[str, int | None]
    """By stream; the partition of one that is pushed."""
    heard: float


class Leases:
    """Every partition's holder, beside its ``books``."""

    def __init__(
        self, run: int, epoch: int, quota_tokens: int, max_sample_tokens: int, max_chunk_bytes: int, journal: Journal
    ) -> None:  # fmt: skip
        self._run, self.epoch, self._journal = run, epoch, journal
        self.quota_tokens = quota_tokens
        self._max_sample_tokens, self._max_chunk_bytes = max_sample_tokens, max_chunk_bytes
        self.books = Books(run, quota_tokens, journal)
        self._holder: list[str | None] = []
        self._granted: list[tuple[int, int]] = []  # samples and bytes, as last said
        self._producers: dict[str, _Producer] = {}
        self._by_peer: dict[bytes, str] = {}
        self._sessions = 0
        self._now = 0.0
        self._repeated = 0.0
        self._drained = False
        self._done = False
        self._held_back: set[int] = set()  # partitions that are leased once all that was pushed to them is safe
        self._replaced: set[str] = set()  # producers that lost a partition to another
        self._claims: dict[str, float] = {}  # when producers first named a partition that another holds
        self._failed: dict[int, str] = {}  # why the last holder of a partition stopped, until samples come again
        self.refused = 0
        """Messages that broke the protocol."""
        self.vanished = 0
        """Producers that were gone without a goodbye: silent, or followed by another process of their name."""

    def open(self, feed: str, rules: Rules, admission: Admission, history: History) -> None:
        """Add the streams of ``feed`` that are not there yet, whose samples ``admission`` takes."""
        self.books.open(feed, rules, admission, history)
        more = len(self.books.intakes) - len(self._holder)
        self._holder += [None] * more
        self._granted += [(0, 0)] * more

    # What comes in

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
        name = self._by_peer.get(peer)
        if isinstance(message, Bye):
            return self._leave(name, message.reason or "said goodbye") if name is not None else []
        if name is None or envelope.epoch < self.epoch:
            return self._send(peer, Who())
        self._producers[name].heard = now
        if isinstance(message, Samples):
            return self._samples(name, envelope, message)
        if isinstance(message, Eos):
            return self._eos(name, envelope.fence, message)
        if isinstance(message, Sent):
            return self._sent(name, envelope.fence, message)
        if isinstance(message, Mark):
            return self._mark(name, envelope.fence, message)
        if isinstance(message, ProducerPing):
            return self._ping(name, message)
        return self._refuse(peer, "protocol", f"got {type(message).__name__} from a producer")

    def tick(self, now: float) -> list[Effect]:
        """Drop producers that fell silent; repeat the credits of the others."""
        self._now = now
        effects: list[Effect] = []
        for name, producer in list(self._producers.items()):
            if now - producer.heard > SILENT_S:
                self.vanished += 1
                effects += self._leave(name, f"silent for {SILENT_S:.0f} s")
        if now - self._repeated >= REPEAT_S:
            self._repeated = now
            open_ = [p for p, intake in enumerate(self.intakes) if not intake.ended]
            effects += [e for p in open_ for e in self._flow(p, repeat=True)]
        return effects

    def drain(self) -> list[Effect]:
        """Give no further credit, lease nothing, and send every producer away."""
        self._drained = True
        peers = [producer.peer for producer in self._producers.values()]
        return [e for peer in peers for e in self._send(peer, _FAREWELL)]

    def merged(self, feed: str, moved: I64) -> list[Effect]:
        """The merge of ``feed`` has taken samples of its partitions ``moved``: widen their credits."""
        effects: list[Effect] = []
        every = self.books.of_feed(feed)
        for mine in moved.tolist():
            p = every[mine]
            intake, merge = self.intakes[p], self.books.stream_of[p].admission.merge
            intake.merged_seq = int(merge.merged_samples[mine])
            intake.merged_tokens = int(merge.merged_tokens[mine])
            effects += self._flow(p) + self._pull(p)
        return effects

    def close(self, feed: str) -> list[Effect]:
        """``feed`` has ended before its streams: take no more of any."""
        return [e for p in self.books.of_feed(feed) for e in self._close(p)]

    def join(self, feed: str, known: int) -> list[Effect]:
        """The merge of ``feed`` has more partitions now than the ``known``: lease them, from their beginning."""
        more = self.books.join(feed, known)
        if not more:
            return []
        for p in more:
            self._begin(p)
        moved, effects = self._share_out()
        effects += [e for p in sorted({*more, *moved}) for e in self._lease(p)]
        return effects + [e for p in more for e in self._pull(p)]

    def remove(self, feed: str, rules: Rules) -> list[Effect]:
        """Streams of weight 0 are wanted no more; what waited of them is dropped."""
        gone = [stream.name for stream in rules.streams if not stream.weight]
        return [e for name in gone for p in self.books.partitions(name) for e in self._close(p)]

    def _close(self, p: int) -> list[Effect]:
        intake = self.intakes[p]
        intake.merged_tokens = intake.kept_tokens  # what waited is dropped
        if intake.ended:
            return []
        intake.closed = True
        return self._flow(p, repeat=True)

    def go_to(self, feed: str, floors: list[Floor], held: I64) -> list[Effect]:
        """``feed`` has gone to another place (``Books.go_to``): its partitions are read from there, in new sessions."""
        self.books.go_to(feed, floors, held)
        mine = self.books.of_feed(feed)
        for p in mine:
            self._failed.pop(p, None)
            self._begin(p)
        moved, effects = self._share_out()
        effects += [e for p in sorted({*mine, *moved}) for e in self._lease(p)]
        return effects + [e for p in mine for e in self._pull(p)]

    def safe(self, upto: int) -> list[Effect]:
        """Records below ``upto`` are safe: tell those who keep what they push until then."""
        moved = [p for p, intake in enumerate(self.intakes) if intake.unsafe and intake.safe(upto)]
        effects = [e for p in moved for e in self._flow(p, repeat=True)]
        ready = [p for p in self._held_back if not self.intakes[p].unsafe]
        self._held_back.difference_update(ready)
        return effects + [e for p in ready for e in self._lease(p)]

    def recalled(self, event: Recalled) -> list[Effect]:
        """A chunk of a pushed partition, out of the log."""
        p, effects = self.books.recalled(event)
        return effects if p is None else effects + self._pull(p) + self._flow(p, repeat=not self.intakes[p].behind)

    def _pull(self, p: int) -> list[Effect]:
        """Read on in the log, where it has more of a partition; it may end with that."""
        ended = self.intakes[p].ended
        effects = self.books.pull(p)
        return effects + (self._flow(p, repeat=True) if self.intakes[p].ended and not ended else [])

    def _settle(self, p: int) -> list[Effect]:
        """What was appended may be safe already: without a log, or in one that is only to survive a kill."""
        return self._flow(p, repeat=True) if self.intakes[p].safe(self._journal.safe_upto) else []

    def dismiss(self, done: bool) -> list[Effect]:
        """Whether nobody will ask for samples again, so that producers may go."""
        tell, self._done = done and not self._done, done
        peers = [producer.peer for producer in self._producers.values()] if tell else []
        return [e for peer in peers for e in self._send(peer, Done())]

    @property
    def intakes(self) -> list[Intake]:
        """Every partition's, as in the books."""
        return self.books.intakes

    @property
    def ended(self) -> bool:
        """Every partition has been taken whole, or closed."""
        return all(intake.ended for intake in self.intakes)

    @property
    def num_producers(self) -> int:
        return len(self._producers)

    def describe(self, p: int) -> str:
        """Partition ``p`` and who should send it, for a person."""
        stream, holder = self.books.stream_of[p], self._holder[p]
        text = f"stream {stream.terms.name!r} partition {p - stream.first} of {stream.terms.partitions}"
        if p in self._failed:
            return f"{text}: {self._failed[p]}"
        if holder is None:
            how = "a streampack.Producer of it" if stream.terms.pushed else "one with 'streampack produce'"
            return f"{text}: no producer offers it, start {how}"
        return f"{text}: held by the producer at {self._producers[holder].where}"

    # Producers come and go

    def _hello(self, peer: bytes, hello: Hello) -> list[Effect]:
        for offer in hello.offers:
            if offer.stream not in self.books.streams:
                known = ", ".join(self.books.streams)
                return self._refuse(peer, "unknown_stream", f"got stream {offer.stream!r}, expected one of: {known}")
            wrong = self._misplaced(offer)
            if wrong:
                return self._refuse(peer, "partition", wrong)
            digest = self.books.digests.get(offer.stream, offer.source_digest)
            if digest != offer.source_digest:
                return self._refuse(
                    peer, "source_digest",
                    f"stream {offer.stream!r}: got other data than its first producer reads (source digest "
                    f"{offer.source_digest[:16]}, expected {digest[:16]}): give both the same files and tokenizer, or "
                    f"begin a new run",
                )  # fmt: skip
        if self._drained:
            return self._send(peer, _FAREWELL)
        if hello.producer in self._replaced:
            return self._refuse(peer, "partition_taken", "got a producer whose partition another has taken since")
        claimed = self._claimed(peer, hello)
        if claimed is not None:
            return claimed
        effects: list[Effect] = []
        for offer in hello.offers:
            effects += self.books.accept(offer.stream, offer.source_digest)
        if self._by_peer.get(peer, hello.producer) != hello.producer:
            effects += self._leave(self._by_peer[peer], "its peer took another name")
        known_producer = self._producers.get(hello.producer)
        if known_producer is not None:
            self._by_peer.pop(known_producer.peer, None)
        offers = {offer.stream: offer.partition for offer in hello.offers}
        where = f"{hello.host}:{hello.pid}"
        self._producers[hello.producer] = _Producer(hello.producer, peer, where, offers, self._now)
        self._by_peer[peer] = hello.producer
        restarted = known_producer is not None and known_producer.where != where
        if known_producer is None:
            effects.append(Report("info", f"producer {where} joined, offering {', '.join(sorted(offers))}"))
        elif restarted:
            self.vanished += 1
            effects.append(Report("warning", f"producer {where} took over from {known_producer.where}, which is gone"))
        moved, last_words = self._share_out()
        effects += last_words
        held = [p for p, holder in enumerate(self._holder) if holder == hello.producer and p not in moved]
        for p in held if restarted else ():  # another process: it knows nothing of what was sent
            self._begin(p)
        effects += [e for p in held for e in self._lease(p)]
        effects += [e for p in moved for e in self._lease(p)]
        return effects + (self._send(peer, Done()) if self._done else [])

    def _misplaced(self, offer: Offer) -> str:
        """Why a stream cannot be offered so: only one that pushes names its partition."""
        terms = self.books.streams[offer.stream].terms
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

    def _claimed(self, peer: bytes, hello: Hello) -> list[Effect] | None:
        """What to say of partitions that another producer holds; None once they are free.

        The other keeps them while it is heard; killed, it is silent, and cannot say goodbye.
        """
        wanted = {self.books.streams[offer.stream].first + (offer.partition or 0): offer for offer in hello.offers}
        others = {self._holder[p]: offer for p, offer in wanted.items() if offer.partition is not None}
        others = {name: offer for name, offer in others.items() if name not in (None, hello.producer)}
        if not others:
            self._claims.pop(hello.producer, None)
            return None
        since = self._claims.setdefault(hello.producer, self._now)
        for name, offer in others.items():
            assert name is not None
            holder = self._producers[name]
            if holder.heard > since:
                self._claims.pop(hello.producer)
                return self._refuse(
                    peer, "partition_taken",
                    f"got partition {offer.partition} of stream {offer.stream!r} from {hello.host}:{hello.pid}, which "
                    f"the producer at {holder.where} holds: give each producer a partition of its own",
                )  # fmt: skip
        silent = [name for name in others if name is not None and self._now - self._producers[name].heard > CLAIM_S]
        if len(silent) < len(others):
            return []
        self._claims.pop(hello.producer)
        self._replaced.update(silent)
        self.vanished += len(silent)
        return [e for name in silent for e in self._leave(name, f"silent for {CLAIM_S:.0f} s, and another came")] + (
            self._hello(peer, hello)
        )

    def _leave(self, name: str, why: str) -> list[Effect]:
        producer = self._producers.pop(name)
        self._by_peer.pop(producer.peer, None)
        for p, holder in enumerate(self._holder):
            if holder == name:
                self._holder[p] = None
        for offer in producer.offers:  # nothing of it was ever taken: the next producer may read other data
            offered, stream = (
                any(offer in other.offers for other in self._producers.values()),
                self.books.streams[offer],
            )
            if not offered and not self._journal.keeps and not stream.admission.counts[stream.number].samples:
                self.books.digests.pop(offer, None)
        level = "info" if self.ended or "goodbye" in why else "warning"
        effects: list[Effect] = [Report(level, f"producer {producer.where} left: {why}")]
        moved, last_words = self._share_out()
        return effects + last_words + [e for p in moved for e in self._lease(p)]

    def _share_out(self) -> tuple[list[int], list[Effect]]:
        """Give every open partition to a producer that offers its stream, evenly.

        Returns those that moved, and what is said to those who lost them: how much of theirs was taken.
        """
        moved: list[int] = []
        effects: list[Effect] = []
        for stream in self.books.streams:
            able = [name for name, producer in self._producers.items() if stream in producer.offers]
            mine = self.books.partitions(stream)
            if self.books.streams[stream].terms.pushed:
                moved += self._share_pushed(mine, {self._producers[name].offers[stream]: name for name in able})
                continue
            open_ = [p for p in mine if not self.intakes[p].ended]
            if not able:
                for p in mine:
                    self._holder[p] = None
                continue
            load = {name: [p for p in open_ if self._holder[p] == name] for name in able}
            orphans = [p for p in open_ if self._holder[p] not in load]
            while True:
                least = min(able, key=lambda name: len(load[name]))
                most = max(able, key=lambda name: len(load[name]))
                if orphans:
                    p = orphans.pop(0)
                elif len(load[most]) - len(load[least]) > 1:
                    p = load[most].pop()
                    effects += self._flow(p, repeat=True)
                else:
                    break
                load[least].append(p)
                moved.append(p)
                self._holder[p] = least
        for p in moved:
            self._begin(p)
        return sorted(moved), effects

    def _share_pushed(self, mine: range, named: dict[int | None, str]) -> list[int]:
        """Give each partition of a pushed stream to the producer that names it; those that moved."""
        moved = []
        for p in mine:
            name = named.get(p - mine.start)
            if name != self._holder[p]:
                self._holder[p] = name
                moved += [p] if name is not None else []
        return moved

    def _begin(self, p: int) -> None:
        self._sessions += 1
        self.intakes[p].begin(self._sessions)
        self._granted[p] = (0, 0)

    # Samples

    def _samples(self, name: str, envelope: Envelope, message: Samples) -> list[Effect]:
        p = self.books.partition(message.stream, message.partition)
        if p is None or self._holder[p] != name or envelope.fence != self.intakes[p].session:
            return self._stale(name, envelope.fence, message)
        if self._drained:
            return []
        intake, stream = self.intakes[p], self.books.stream_of[p]
        if intake.unwanted or (intake.closed and stream.terms.pushed):
            return self._flow(p, repeat=True)
        refusal = stream.admission.refusal(stream.number, intake, envelope, message)
        if refusal is not None:
            return self._expel(name, *refusal, p)
        lengths = lengths_of(message)
        stop = message.base_seq + len(lengths)
        if stop <= self.books.next_seq(p):
            return self._flow(p, repeat=True)
        fits = intake.fits(stop, int(lengths.sum()) * intake.token_bytes) and not intake.behind
        if message.base_seq > intake.expected_seq or not fits:
            return self._again(p)
        if stream.terms.pushed and message.base_seq < intake.recorded_seq:
            return self._again(p)  # half of it is in the log
        self._failed.pop(p, None)
        return self.books.take(p, envelope, message) + self._settle(p) + self._flow(p, repeat=intake.closed)

    def _eos(self, name: str, session: int, message: Eos) -> list[Effect]:
        p = self.books.partition(message.stream, message.partition)
        if p is None or self._holder[p] != name or session != self.intakes[p].session:
            return self._stale(name, session, message)
        intake = self.intakes[p]
        if intake.unwanted:
            return self._flow(p, repeat=True)
        if message.total > self.books.next_seq(p):
            return self._again(p)
        taken = max(self.books.next_seq(p), intake.known_seq)
        if message.total < taken or message.total != (
            message.total if intake.known_total is None else intake.known_total
        ):
            expected = f"at least the {taken} taken before" if intake.known_total is None else str(intake.known_total)
            return self._expel(
                name, "short_stream",
                f"stream {message.stream!r} partition {message.partition}: got an end after {message.total} samples, "
                f"expected {expected}: the files have changed", p,
            )  # fmt: skip
        return self.books.end(p, message.total) + self._flow(p, repeat=True)

    def _mark(self, name: str, session: int, message: Mark) -> list[Effect]:
        """A batch of a pushed partition has ended."""
        p = self.books.partition(message.stream, message.partition)
        if p is None or self._holder[p] != name or session != self.intakes[p].session:
            return self._stale(name, session, message)
        intake, stream = self.intakes[p], self.books.stream_of[p]
        if not stream.terms.pushed or message.number < intake.num_marks:
            return self._flow(p, repeat=True)
        if message.number > intake.num_marks or message.seq != intake.recorded_seq:
            return self._again(p)
        return self.books.mark(p, message) + self._pull(p) + self._settle(p)

    def _sent(self, name: str, session: int, message: Sent) -> list[Effect]:
        p = self.books.partition(message.stream, message.partition)
        if p is None or self._holder[p] != name or session != self.intakes[p].session:
            return self._stale(name, session, message)
        intake = self.intakes[p]
        lost = message.next_seq > self.books.next_seq(p) and not self._drained and not intake.unwanted
        return self._again(p) if lost else self._flow(p, repeat=True)

    def _ping(self, name: str, message: ProducerPing) -> list[Effect]:
        peer = self._producers[name].peer
        mine = [p for p, holder in enumerate(self._holder) if holder == name]
        if message.failure:
            self._failed |= dict.fromkeys([p for p in mine if not self.intakes[p].ended], message.failure)
            report = Report("error", f"producer {self._producers[name].where}: {message.failure}")
            return [report, *self._leave(name, "it failed")]
        if self._done:
            return self._send(peer, Done())
        if self._drained:
            return self._send(peer, _FAREWELL)
        return [e for p in mine for e in self._flow(p, repeat=True)]

    # What goes out

    def _again(self, p: int) -> list[Effect]:
        """Something was lost: the holder goes back to where it is missing (go-back-N)."""
        self._begin(p)
        return self._lease(p)

    def _lease(self, p: int) -> list[Effect]:
        holder = self._holder[p]
        if holder is None or self._drained:
            return []
        stream, intake = self.books.stream_of[p], self.intakes[p]
        terms = stream.terms
        if terms.pushed and intake.unsafe:  # what is not safe may be lost yet, and its numbers given again
            self._held_back.add(p)
            return []
        lease = Lease(
            stream=terms.name, partition=p - stream.first, partitions=terms.partitions,
            first_seq=self.books.next_seq(p), cursor=intake.cursor, seed=stream.rules.seed, passes=terms.passes,
            dtype=stream.rules.tokens, fields=stream.rules.fields, overlong=terms.overlong, poison=terms.poison,
            max_sample_tokens=terms.limit if terms.overlong == "error" else self._max_sample_tokens,
            max_chunk_bytes=self._max_chunk_bytes,
        )  # fmt: skip
        peer = self._producers[holder].peer
        return self._send(peer, lease, intake.session) + self._flow(p, repeat=True)

    def _flow(self, p: int, repeat: bool = False) -> list[Effect]:
        """The partition's credits, if they grew by a quarter of what they can be, or on ``repeat``."""
        intake, holder = self.intakes[p], self._holder[p]
        if holder is None or self._drained:
            return []
        seq, size = intake.grant_seq, intake.grant_bytes
        if intake.behind or (self._journal.full and self.books.stream_of[p].in_order):  # the log goes first
            seq = min(seq, intake.recorded_seq)  # what is recorded already may come again
        said_seq, said_size = self._granted[p]
        if not repeat and seq - said_seq < MAX_UNMERGED // 4 and size - said_size < intake.quota_bytes // 4:
            return []
        self._granted[p] = (seq, size)
        stream = self.books.stream_of[p]
        flow = Flow(
            stream=stream.terms.name, partition=p - stream.first, expected_seq=self.books.next_seq(p),
            grant_seq=seq, grant_bytes=size, durable_seq=intake.durable_seq, durable_marks=intake.durable_marks,
            ended=self.books.is_ended(p),
        )  # fmt: skip
        return self._send(self._producers[holder].peer, flow, intake.session)

    def _stale(self, name: str, session: int, message: Samples | Eos | Sent | Mark) -> list[Effect]:
        """Of a session that is over: say so."""
        revoke = Revoke(stream=message.stream, partition=message.partition)
        return self._send(self._producers[name].peer, revoke, session)

    def _expel(self, name: str, code: str, detail: str, p: int) -> list[Effect]:
        """Refuse what a producer sent, and send it away: its leases go to others."""
        effects = self._refuse(self._producers[name].peer, code, detail)
        self._failed[p] = detail
        return effects + self._leave(name, code)

    def _refuse(self, peer: bytes, code: str, detail: str) -> list[Effect]:
        self.refused += 1
        effects: list[Effect] = [Report("warning", f"refused a producer: {detail}")]
        return effects + self._send(peer, Reject(code=code, detail=detail[:2000]))

    def _send(self, peer: bytes, message: Message, session: int = 0) -> list[Effect]:
        return [SendProducer(peer, Envelope(run=self._run, epoch=self.epoch, fence=session, message=message))]
