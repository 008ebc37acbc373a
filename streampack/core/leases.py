"""The producers' side of the broker: who sends which partition, from where on, and how much.

Partitions of a stream are shared out among the producers that offer it, and move when one comes
or goes, so that any number of producer processes gives the same stream. Every move begins a new
session at the next sample that is missing; messages of an older session or of an older broker
change nothing. A producer that breaks the protocol, or says that it must stop, loses its leases,
and what it said is what the trainers then wait for. When a feed goes back to its first sample, so
do its partitions, each in a new session: chunks still on their way are of an old one. Knows
partitions by number (``p``), numbered through over all feeds; knows nothing of packs.
"""

from __future__ import annotations

from dataclasses import dataclass

from streampack.core.admission import Admission, StreamTerms, lengths_of, terms_of
from streampack.core.effects import SendProducer
from streampack.core.events import Effect, Report
from streampack.core.intake import MAX_UNMERGED, Intake
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
    Message,
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

REPEAT_S = 1.0
"""Credits are said again this often, whether or not they changed."""
SILENT_S = 15.0
"""A producer not heard of for so long has lost its leases."""


_FAREWELL = Bye(reason="the broker is stopping")


@dataclass(slots=True)
class _Producer:
    name: str
    peer: bytes
    where: str
    offers: frozenset[str]
    heard: float


@dataclass(frozen=True, slots=True)
class _Stream:
    """A stream of a feed: ``number`` among the feed's, ``first`` its first partition, ``origin`` its feed's."""

    terms: StreamTerms
    admission: Admission
    rules: Rules
    number: int
    first: int
    origin: int


class Leases:
    """Every partition's books and holder; ``open`` adds a feed's, before the first producer comes."""

    def __init__(self, run: int, epoch: int, quota_tokens: int, max_sample_tokens: int, max_chunk_bytes: int) -> None:
        self._run, self.epoch = run, epoch
        self._quota_tokens = quota_tokens
        self._max_sample_tokens, self._max_chunk_bytes = max_sample_tokens, max_chunk_bytes
        self._streams: dict[str, _Stream] = {}
        self._stream_of: list[_Stream] = []
        self.intakes: list[Intake] = []
        self._holder: list[str | None] = []
        self._granted: list[tuple[int, int]] = []  # samples and bytes, as last said
        self._producers: dict[str, _Producer] = {}
        self._by_peer: dict[bytes, str] = {}
        self._digests: dict[str, str] = {}
        self._sessions = 0
        self._now = 0.0
        self._repeated = 0.0
        self._drained = False
        self._done = False
        self._failed: dict[int, str] = {}  # why the last holder of a partition stopped, until samples come again
        self.refused = 0
        """Messages that broke the protocol."""
        self.vanished = 0
        """Producers that were gone without a goodbye: silent, or followed by another process of their name."""

    def open(self, rules: Rules, admission: Admission) -> int:
        """Add the streams of a feed, whose samples ``admission`` takes; the number of its first partition."""
        origin = len(self.intakes)
        for number, terms in enumerate(terms_of(rules)):
            stream = _Stream(terms, admission, rules, number, len(self.intakes), origin)
            self._streams[terms.name] = stream
            self._stream_of += [stream] * terms.partitions
            self.intakes += [self._intake(rules) for _ in range(terms.partitions)]
        self._holder += [None] * (len(self.intakes) - origin)
        self._granted += [(0, 0)] * (len(self.intakes) - origin)
        return origin

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

    def merged(self, origin: int, moved: I64) -> list[Effect]:
        """The merge of the feed at ``origin`` has taken samples of its partitions ``moved``: widen their credits."""
        effects: list[Effect] = []
        merge = self._stream_of[origin].admission.merge
        for mine in moved.tolist():
            intake = self.intakes[origin + mine]
            intake.merged_seq = int(merge.merged_samples[mine])
            intake.merged_tokens = int(merge.merged_tokens[mine])
            effects += self._flow(origin + mine)
        return effects

    def close(self, origin: int) -> list[Effect]:
        """The feed at ``origin`` has ended before its streams: take no more of any."""
        effects: list[Effect] = []
        for p in self._of_feed(origin):
            intake = self.intakes[p]
            intake.merged_tokens = intake.kept_tokens  # what waited is dropped
            if not intake.ended:
                intake.closed = True
                effects += self._flow(p, repeat=True)
        return effects

    def rewind(self, origin: int) -> list[Effect]:
        """The feed at ``origin`` wants its samples from the first one on; those it had are forgotten already."""
        mine = self._of_feed(origin)
        for p in mine:
            self.intakes[p] = self._intake(self._stream_of[p].rules)
            self._failed.pop(p, None)
            self._begin(p)
        moved, effects = self._share_out()
        return effects + [e for p in sorted({*mine, *moved}) for e in self._lease(p)]

    def dismiss(self, done: bool) -> list[Effect]:
        """Whether nobody will ask for samples again, so that producers may go."""
        tell, self._done = done and not self._done, done
        peers = [producer.peer for producer in self._producers.values()] if tell else []
        return [e for peer in peers for e in self._send(peer, Done())]

    @property
    def ended(self) -> bool:
        """Every partition has been taken whole, or closed."""
        return all(intake.ended for intake in self.intakes)

    @property
    def num_producers(self) -> int:
        return len(self._producers)

    def describe(self, p: int) -> str:
        """Partition ``p`` and who should send it, for a person."""
        stream, holder = self._stream_of[p], self._holder[p]
        text = f"stream {stream.terms.name!r} partition {p - stream.first} of {stream.terms.partitions}"
        if p in self._failed:
            return f"{text}: {self._failed[p]}"
        if holder is None:
            return f"{text}: no producer offers it, start one with 'streampack produce'"
        return f"{text}: held by the producer at {self._producers[holder].where}"

    # Producers come and go

    def _hello(self, peer: bytes, hello: Hello) -> list[Effect]:
        for offer in hello.offers:
            if offer.stream not in self._streams:
                known = ", ".join(self._streams)
                return self._refuse(peer, "unknown_stream", f"got stream {offer.stream!r}, expected one of: {known}")
            digest = self._digests.get(offer.stream, offer.source_digest)
            if digest != offer.source_digest:
                return self._refuse(
                    peer, "source_digest",
                    f"stream {offer.stream!r}: got other data than its first producer reads "
                    f"(source digest {offer.source_digest}, expected {digest}): give both the same files and tokenizer",
                )  # fmt: skip
        if self._drained:
            return self._send(peer, _FAREWELL)
        self._digests |= {offer.stream: offer.source_digest for offer in hello.offers}
        effects: list[Effect] = []
        if self._by_peer.get(peer, hello.producer) != hello.producer:
            effects += self._leave(self._by_peer[peer], "its peer took another name")
        known_producer = self._producers.get(hello.producer)
        if known_producer is not None:
            self._by_peer.pop(known_producer.peer, None)
        offers = frozenset(offer.stream for offer in hello.offers)
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

    def _leave(self, name: str, why: str) -> list[Effect]:
        producer = self._producers.pop(name)
        self._by_peer.pop(producer.peer, None)
        for p, holder in enumerate(self._holder):
            if holder == name:
                self._holder[p] = None
        for offer in producer.offers:  # nothing of it was ever taken: the next producer may read other data
            offered, stream = any(offer in other.offers for other in self._producers.values()), self._streams[offer]
            if not offered and not stream.admission.counts[stream.number].samples:
                self._digests.pop(offer, None)
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
        for stream in self._streams:
            able = [name for name, producer in self._producers.items() if stream in producer.offers]
            mine = self._partitions(stream)
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

    def _begin(self, p: int) -> None:
        self._sessions += 1
        self.intakes[p].begin(self._sessions)
        self._granted[p] = (0, 0)

    # Samples

    def _samples(self, name: str, envelope: Envelope, message: Samples) -> list[Effect]:
        p = self._partition(message.stream, message.partition)
        if p is None or self._holder[p] != name or envelope.fence != self.intakes[p].session:
            return self._stale(name, envelope.fence, message)
        if self._drained:
            return []
        intake, stream = self.intakes[p], self._stream_of[p]
        if intake.closed:
            return self._flow(p, repeat=True)
        refusal = stream.admission.refusal(stream.number, intake, envelope, message)
        if refusal is not None:
            return self._expel(name, *refusal, p)
        lengths = lengths_of(message)
        stop = message.base_seq + len(lengths)
        if stop <= intake.expected_seq:
            return self._flow(p, repeat=True)
        if message.base_seq > intake.expected_seq or not intake.fits(stop, int(lengths.sum()) * intake.token_bytes):
            return self._again(p)
        self._failed.pop(p, None)
        store = stream.admission.admit(stream.number, p - stream.origin, intake, envelope, message)
        return [store, *self._flow(p)]

    def _eos(self, name: str, session: int, message: Eos) -> list[Effect]:
        p = self._partition(message.stream, message.partition)
        if p is None or self._holder[p] != name or session != self.intakes[p].session:
            return self._stale(name, session, message)
        intake = self.intakes[p]
        if intake.closed:
            return self._flow(p, repeat=True)
        if message.total > intake.expected_seq:
            return self._again(p)
        if message.total < intake.expected_seq:
            return self._expel(
                name, "short_stream",
                f"stream {message.stream!r} partition {message.partition}: got an end after {message.total} samples, "
                f"expected at least the {intake.expected_seq} taken before: the files have changed", p,
            )  # fmt: skip
        intake.total = message.total
        stream = self._stream_of[p]
        stream.admission.merge.end(p - stream.origin)
        return self._flow(p, repeat=True)

    def _sent(self, name: str, session: int, message: Sent) -> list[Effect]:
        p = self._partition(message.stream, message.partition)
        if p is None or self._holder[p] != name or session != self.intakes[p].session:
            return self._stale(name, session, message)
        intake = self.intakes[p]
        lost = message.next_seq > intake.expected_seq and not self._drained and not intake.closed
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
        stream, intake = self._stream_of[p], self.intakes[p]
        terms = stream.terms
        lease = Lease(
            stream=terms.name, partition=p - stream.first, partitions=terms.partitions,
            first_seq=intake.expected_seq, cursor=intake.cursor, seed=stream.rules.seed, passes=terms.passes,
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
        said_seq, said_size = self._granted[p]
        if not repeat and seq - said_seq < MAX_UNMERGED // 4 and size - said_size < intake.quota_bytes // 4:
            return []
        self._granted[p] = (seq, size)
        stream = self._stream_of[p]
        flow = Flow(
            stream=stream.terms.name, partition=p - stream.first, expected_seq=intake.expected_seq,
            grant_seq=seq, grant_bytes=size, durable_seq=0, ended=intake.ended,
        )  # fmt: skip
        return self._send(self._producers[holder].peer, flow, intake.session)

    def _stale(self, name: str, session: int, message: Samples | Eos | Sent) -> list[Effect]:
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

    def _partition(self, stream: str, partition: int) -> int | None:
        known = self._streams.get(stream)
        if known is None or not 0 <= partition < known.terms.partitions:
            return None
        return known.first + partition

    def _partitions(self, stream: str) -> range:
        first = self._streams[stream].first
        return range(first, first + self._streams[stream].terms.partitions)

    def _of_feed(self, origin: int) -> list[int]:
        return [p for p, stream in enumerate(self._stream_of) if stream.origin == origin]

    def _intake(self, rules: Rules) -> Intake:
        return Intake(self._quota_tokens * rules.token_bytes, rules.token_bytes)

    def _send(self, peer: bytes, message: Message, session: int = 0) -> list[Effect]:
        return [SendProducer(peer, Envelope(run=self._run, epoch=self.epoch, fence=session, message=message))]
