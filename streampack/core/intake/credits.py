"""What the holder of each partition is told: where it begins, how much it may send, what is safe.

A lease begins a *session*, at the next sample that is missing; a new one begins wherever that moves, so that chunks
still on their way are of an old one. Credits are absolute within a session (``intake``), said when they have grown
enough to matter, and said again and again: a lost message harms nothing. Decides nothing about what is sent.
"""

from __future__ import annotations

import msgspec

from streampack.core.intake.intake import MAX_UNMERGED
from streampack.core.intake.partition_accounts import Books
from streampack.core.intake.producers import Producer, Producers
from streampack.core.journal.journal import Journal
from streampack.core.model.capacity import Capacity
from streampack.core.protocol.effects import SendProducer
from streampack.core.protocol.events import Effect
from streampack.core.protocol.message import Envelope, Message
from streampack.core.protocol.producer_messages import Eos, Flow, Lease, Mark, Revoke, Samples, Sent


class Credits:
    """What is said of each partition in ``books`` to its holder among the ``producers``."""

    def __init__(
        self, run: int, epoch: int, capacity: Capacity, books: Books, producers: Producers, journal: Journal
    ) -> None:  # fmt: skip
        self._run, self.epoch, self._capacity = run, epoch, capacity
        self._books, self._producers, self._journal = books, producers, journal
        self._sessions = 0
        self._granted: list[tuple[int, int]] = []  # samples and bytes, as last said
        self._held_back: set[int] = set()  # partitions that are leased once all that was pushed to them is safe
        self.drained = False
        """Nothing more is leased, nor credited."""

    def open(self) -> None:
        """The books have more partitions."""
        self._granted += [(0, 0)] * (len(self._books.intakes) - len(self._granted))

    def begin(self, p: int) -> None:
        """A new session: what was said of the one before is void."""
        self._sessions += 1
        self._books.intakes[p].begin(self._sessions)
        self._granted[p] = (0, 0)

    def again(self, p: int) -> list[Effect]:
        """Something was lost: the holder goes back to where it is missing (go-back-N)."""
        self.begin(p)
        return self.lease(p)

    def lease(self, p: int) -> list[Effect]:
        """Tell the holder, if there is one, of the session that has begun."""
        holder = self._producers.holder_of(p)
        if holder is None or self.drained:
            return []
        stream, intake = self._books.stream_of[p], self._books.intakes[p]
        terms = stream.terms
        if terms.pushed and intake.unsafe:  # what is not safe may be lost yet, and its numbers given again
            self._held_back.add(p)
            return []
        lease = Lease(
            stream=terms.name, partition=p - stream.first, partitions=terms.partitions,
            first_seq=self._books.next_seq(p), cursor=intake.cursor, seed=stream.rules.seed, passes=terms.passes,
            dtype=stream.rules.tokens, fields=stream.rules.fields, overlong=terms.overlong, poison=terms.poison,
            max_sample_tokens=terms.limit if terms.overlong == "error" else self._capacity.max_sample_tokens,
            max_chunk_bytes=self._capacity.max_chunk_bytes, batches=terms.batches or msgspec.UNSET,
        )  # fmt: skip
        return self.send(holder.peer, lease, intake.session) + self.flow(p, repeat=True)

    def flow(self, p: int, repeat: bool = False) -> list[Effect]:
        """The partition's credits, if they grew by a quarter of what they can be, or on ``repeat``."""
        intake, holder = self._books.intakes[p], self._producers.holder_of(p)
        if holder is None or self.drained:
            return []
        seq, size = intake.grant_seq, intake.grant_bytes
        if intake.behind or (self._journal.full and self._books.stream_of[p].in_order):  # the log goes first
            seq = min(seq, intake.recorded_seq)  # what is recorded already may come again
        said_seq, said_size = self._granted[p]
        if not repeat and seq - said_seq < MAX_UNMERGED // 4 and size - said_size < intake.quota_bytes // 4:
            return []
        self._granted[p] = (seq, size)
        stream = self._books.stream_of[p]
        flow = Flow(
            stream=stream.terms.name, partition=p - stream.first, expected_seq=self._books.next_seq(p),
            grant_seq=seq, grant_bytes=size, durable_seq=intake.durable_seq, durable_marks=intake.durable_marks,
            ended=self._books.is_ended(p),
        )  # fmt: skip
        return self.send(holder.peer, flow, intake.session)

    def safe(self, upto: int) -> list[Effect]:
        """Records below ``upto`` are safe: tell those who keep what they push until then."""
        moved = [p for p, intake in enumerate(self._books.intakes) if intake.unsafe and intake.safe(upto)]
        effects = [e for p in moved for e in self.flow(p, repeat=True)]
        ready = [p for p in self._held_back if not self._books.intakes[p].unsafe]
        self._held_back.difference_update(ready)
        return effects + [e for p in ready for e in self.lease(p)]

    def settle(self, p: int) -> list[Effect]:
        """What was appended may be safe already: without a log, or in one that is only to survive a kill."""
        return self.flow(p, repeat=True) if self._books.intakes[p].safe(self._journal.safe_upto) else []

    def revoke(self, producer: Producer, session: int, message: Samples | Eos | Sent | Mark) -> list[Effect]:
        """It speaks in a session that is over: say so."""
        revoke = Revoke(stream=message.stream, partition=message.partition)
        return self.send(producer.peer, revoke, session)

    def send(self, peer: bytes, message: Message, session: int = 0) -> list[Effect]:
        """Say something to a producer."""
        return [SendProducer(peer, Envelope(run=self._run, epoch=self.epoch, fence=session, message=message))]
