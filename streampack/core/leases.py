"""The producers' side of the broker: who sends which partition, from where on, and how much.

Partitions of a stream are shared out among the producers that offer it, and move when one comes
or goes, so that any number of producer processes gives the same stream. Every move begins a new
session at the next sample that is missing; messages of an older session or of an older broker
change nothing. A producer that breaks the protocol, or says that it must stop, loses its leases,
and what it said is what the trainers then wait for. Knows partitions by number (``p``), streams in
the order of the rules; knows nothing of packs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streampack.core.admission import Admission, StreamTerms, lengths_of
from streampack.core.effects import SendProducer
from streampack.core.events import Effect, Report
from streampack.core.fields import Field
from streampack.core.intake import MAX_UNMERGED, Intake
from streampack.core.merge import Merge
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
from streampack.core.samples import I64, SampleTable

REPEAT_S = 1.0
"""Credits are said again this often, whether or not they changed."""
SILENT_S = 15.0
"""A producer not heard of for so long has lost its leases."""


@dataclass(slots=True)
class _Producer:
    name: str
    peer: bytes
    where: str
    offers: frozenset[str]
    heard: float


class Leases:
    """Every partition's books and holder; ``merge`` and ``table`` are the broker's, and filled from here."""

    def __init__(
        self, run: int, epoch: int, seed: int, tokens: str, fields: tuple[Field, ...], streams: list[StreamTerms],
        quota_tokens: int, max_sample_tokens: int, max_chunk_bytes: int, table: SampleTable, merge: Merge,
    ) -> None:  # fmt: skip
        self._run, self.epoch, self._seed, self._tokens, self._fields = run, epoch, seed, tokens, fields
        self._max_sample_tokens, self._max_chunk_bytes = max_sample_tokens, max_chunk_bytes
        self._merge = merge
        self._admission = Admission(streams, tokens, fields, max_sample_tokens, table, merge)
        self._token_bytes = token_bytes = self._admission.token_bytes
        self._streams = {terms.name: (number, terms) for number, terms in enumerate(streams)}
        self._terms = streams
        self._stream_of = [s for s, terms in enumerate(streams) for _ in range(terms.partitions)]
        self._first = np.concatenate([[0], np.cumsum([terms.partitions for terms in streams])]).tolist()
        self.intakes = [Intake(quota_tokens * token_bytes, token_bytes) for _ in self._stream_of]
        self._holder: list[str | None] = [None] * len(self._stream_of)
        self._granted = [(0, 0)] * len(self._stream_of)  # samples and bytes, as last said
        self._producers: dict[str, _Producer] = {}
        self._by_peer: dict[bytes, str] = {}
        self._digests: dict[str, str] = {}
        self._sessions = 0
        self._now = 0.0
        self._repeated = 0.0
        self._drained = False
        self.counts = self._admission.counts
        self._failed: dict[int, str] = {}  # why the last holder of a partition stopped, until samples come again
        self.refused = 0
        """Messages that broke the protocol."""
        self.vanished = 0
        """Producers that were gone without a goodbye: silent, or followed by another process of their name."""

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
        return [e for peer in peers for e in self._send(peer, Bye(reason="the broker is stopping"))]

    def merged(self, moved: I64) -> list[Effect]:
        """The merge has taken samples of the partitions ``moved``: widen the credits that this frees."""
        effects: list[Effect] = []
        for p in moved.tolist():
            intake = self.intakes[p]
            intake.merged_seq = int(self._merge.merged_samples[p])
            intake.merged_tokens = int(self._merge.merged_tokens[p])
            effects += self._flow(p)
        return effects

    def close(self) -> list[Effect]:
        """The feed has ended before its streams: take no more of any, and let their producers go."""
        effects: list[Effect] = []
        for p, intake in enumerate(self.intakes):
            intake.merged_tokens = intake.kept_tokens  # what waited is dropped
            if not intake.ended:
                intake.closed = True
                effects += self._flow(p, repeat=True)
        return effects + [e for producer in self._producers.values() for e in self._send(producer.peer, Done())]

    @property
    def ended(self) -> bool:
        """Every partition has been taken whole, or closed."""
        return all(intake.ended for intake in self.intakes)

    @property
    def num_producers(self) -> int:
        return len(self._producers)

    def describe(self, p: int) -> str:
        """Partition ``p`` and who should send it, for a person."""
        number = self._stream_of[p]
        terms, holder = self._terms[number], self._holder[p]
        text = f"stream {terms.name!r} partition {p - self._first[number]} of {terms.partitions}"
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
            return self._send(peer, Bye(reason="the broker is stopping"))
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
        moved = self._share_out()
        held = [p for p, holder in enumerate(self._holder) if holder == hello.producer and p not in moved]
        for p in held if restarted else ():  # another process: it knows nothing of what was sent
            self._begin(p)
        effects += [e for p in held for e in self._lease(p)]
        effects += [e for p in moved for e in self._lease(p)]
        return effects + (self._send(peer, Done()) if self.ended else [])

    def _leave(self, name: str, why: str) -> list[Effect]:
        producer = self._producers.pop(name)
        self._by_peer.pop(producer.peer, None)
        for p, holder in enumerate(self._holder):
            if holder == name:
                self._holder[p] = None
        for stream in producer.offers:  # nothing of it was taken: the next producer may read other data
            first, last = self._first[self._streams[stream][0] :][:2]
            offered = any(stream in other.offers for other in self._producers.values())
            if not offered and not any(intake.expected_seq for intake in self.intakes[first:last]):
                self._digests.pop(stream, None)
        level = "info" if self.ended or "goodbye" in why else "warning"
        effects: list[Effect] = [Report(level, f"producer {producer.where} left: {why}")]
        return effects + [e for p in self._share_out() for e in self._lease(p)]

    def _share_out(self) -> list[int]:
        """Give every open partition to a producer that offers its stream, evenly; those that moved."""
        moved = []
        for number, terms in enumerate(self._terms):
            able = [name for name, producer in self._producers.items() if terms.name in producer.offers]
            mine = range(self._first[number], self._first[number + 1])
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
                else:
                    break
                load[least].append(p)
                moved.append(p)
                self._holder[p] = least
        for p in moved:
            self._begin(p)
        return sorted(moved)

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
        refusal = self._admission.refusal(stream, intake, envelope, message)
        if refusal is not None:
            return self._expel(name, *refusal, p)
        lengths = lengths_of(message)
        stop = message.base_seq + len(lengths)
        if stop <= intake.expected_seq:
            return self._flow(p, repeat=True)
        if message.base_seq > intake.expected_seq or not intake.fits(stop, int(lengths.sum()) * self._token_bytes):
            return self._again(p)
        self._failed.pop(p, None)
        return [self._admission.admit(stream, p, intake, envelope, message), *self._flow(p)]

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
        self._merge.end(p)
        effects = self._flow(p, repeat=True)
        if self.ended:
            for producer in self._producers.values():
                effects += self._send(producer.peer, Done())
        return effects

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
        if self.ended:
            return self._send(peer, Done())
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
        number, intake = self._stream_of[p], self.intakes[p]
        terms = self._terms[number]
        lease = Lease(
            stream=terms.name, partition=p - self._first[number], partitions=terms.partitions,
            first_seq=intake.expected_seq, cursor=intake.cursor, seed=self._seed, passes=terms.passes,
            dtype=self._tokens, fields=self._fields, overlong=terms.overlong, poison=terms.poison,
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
        number = self._stream_of[p]
        flow = Flow(
            stream=self._terms[number].name, partition=p - self._first[number], expected_seq=intake.expected_seq,
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
        if known is None or not 0 <= partition < known[1].partitions:
            return None
        return int(self._first[known[0]]) + partition

    def _send(self, peer: bytes, message: Message, session: int = 0) -> list[Effect]:
        return [SendProducer(peer, Envelope(run=self._run, epoch=self.epoch, fence=session, message=message))]
