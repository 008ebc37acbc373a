"""Samples that wait for late fields, or for their turn in a paced feed: takes them, and admits those that are complete.

``staging`` holds the samples that wait, and ``partition_accounts`` admits them as ordinary chunks.
"""

from __future__ import annotations

from collections.abc import Callable

from streampack.core.intake.chunk_check import ReceivedChunk, parse_chunk
from streampack.core.intake.credits import Credits
from streampack.core.intake.partition_accounts import PartitionAccounts
from streampack.core.intake.partition_records import PartitionRecords
from streampack.core.intake.partitions import Partitions
from streampack.core.intake.producers import ConnectedProducer, Producers
from streampack.core.journal.log_effects import Recalled
from streampack.core.journal.log_records import ChunkStaged, EndStaged, MarkStaged, SamplesAmended
from streampack.core.protocol.events import Effect
from streampack.core.protocol.message import Envelope, Identity
from streampack.core.protocol.producer_messages import Amend, Amended, Mark, Start
from streampack.core.staging.staged_chunk import StagedChunk
from streampack.core.staging.staging import Staging


class StagedIntake:
    """Takes and admits the samples of partitions that are staged; other partitions have nothing to do with it.

    Args:
        identity: The run and the epoch of the broker.
        partitions, records, accounts, producers, credits, staging: The parts of ``Leases``.
        max_chunk_bytes: Most bytes of a chunk.
        pull: Reads a partition's next chunk from the log, if the log has one.
    """

    def __init__(
        self, identity: Identity, partitions: Partitions, records: PartitionRecords, accounts: PartitionAccounts,
        producers: Producers, credits: Credits, staging: Staging, max_chunk_bytes: int,
        pull: Callable[[int], list[Effect]],
    ) -> None:  # fmt: skip
        self._max_chunk_bytes = max_chunk_bytes
        self._identity, self._partitions, self._records, self._accounts = identity, partitions, records, accounts
        self._producers, self._credits, self._staging, self._pull = producers, credits, staging, pull

    def stage(self, p: int, chunk: ReceivedChunk) -> list[Effect]:
        """Record a good chunk, and let its samples wait for their late fields."""
        intake, stream = self._partitions.intakes[p], self._partitions.stream_of[p]
        stream.admission.counts[stream.number].count_warnings(chunk.message.warnings)
        effects = self._staging.stage(p, chunk.message, chunk.envelope.payload)
        self._note_staged(p)
        intake.session_bytes += chunk.num_tokens * intake.token_bytes + chunk.extra_bytes
        return effects + self._staging.amend_early(p) + self._admit_complete(p) + self.answer()

    def mark(self, p: int, message: Mark) -> list[Effect]:
        """Record the end of a batch, which waits for the samples before it."""
        effects = self._staging.mark(p, message)
        self._note_staged(p)
        return effects + self._admit_complete(p)

    def end(self, p: int, total: int) -> list[Effect]:
        """Record the end of a partition, which waits for its samples."""
        effects = self._staging.end(p, total)
        self._note_staged(p)
        return effects + self._admit_complete(p)

    def _note_staged(self, p: int) -> None:
        """Remember that all samples of partition ``p`` so far are safe once the last record is safe."""
        intake = self._partitions.intakes[p]
        intake.note_sent(self._credits.last_lsn)

    def amend(self, producer: ConnectedProducer, envelope: Envelope, message: Amend) -> list[Effect]:
        """Take the values of late fields, and answer once they are safe."""
        if self._credits.drained:
            return []
        p = self._partitions.find(message.stream, message.partition)
        staged = None if p is None else self._partitions.intakes[p].staged
        if p is None or staged is None:
            names = ", ".join(name for name, stream in self._partitions.streams.items() if stream.terms.late)
            text = (
                f"got values for stream {message.stream!r} partition {message.partition}, expected a partition of a "
                f"stream with late fields: {names or 'there is none'}"
            )
            return self._credits.send(producer.peer, Amended(number=message.number, refusal=text))
        intake = self._partitions.intakes[p]
        ended = intake.closed or intake.recorded.known_total is not None or staged.end is not None
        effects = self._staging.amend(p, message, envelope.payload, producer.name, ended)
        return effects + self._admit_complete(p) + self.answer()

    def recalled(self, event: Recalled) -> list[Effect]:
        """Take a record of samples that wait for late fields, which was read from the log; admit complete samples."""
        record = event.record
        assert isinstance(record, ChunkStaged | SamplesAmended)
        p = self._partitions.find(record.stream, record.partition)
        if p is None:
            return []
        self._staging.recalled(p, event)
        return self._admit_complete(p)

    def tick(self, now: float) -> list[Effect]:
        """Fill in or drop samples that have waited too long, and admit the samples that are complete since then."""
        effects, changed = self._staging.tick(now)
        for p in changed:
            effects += self._admit_complete(p)
        return effects

    def _admit_complete(self, p: int, chosen: StagedChunk | None = None) -> list[Effect]:
        """Admit the samples of partition ``p`` that have all late fields, and the marks and the end behind them.

        In a paced feed, only the samples of a ``chosen`` chunk are admitted.
        """
        intake = self._partitions.intakes[p]
        effects: list[Effect] = []
        if self._partitions.stream_of[p].merge.awaits_state:
            return effects
        while (
            intake.staged is not None and (staged := intake.staged.take(intake.recorded.next_seq, chosen)) is not None
        ):
            chosen = None
            if isinstance(staged, EndStaged):
                effects += self._accounts.end(p, staged.total)
            elif isinstance(staged, MarkStaged):
                mark = Mark(
                    stream=staged.stream, partition=staged.partition, number=staged.number,
                    seq=intake.recorded.next_seq, batch=staged.batch,
                )  # fmt: skip
                effects += self._records.append_mark(p, mark) + self._pull(p)
            else:
                envelope = self._identity.envelope(staged.message, 0, staged.payload)
                chunk = parse_chunk(envelope, staged.message, self._partitions.stream_of[p].terms)
                assert isinstance(chunk, ReceivedChunk)  # the samples were checked when they came
                effects += self._accounts.take(p, chunk, staged.sent)
        return effects

    def admit(self, partitions: list[int]) -> list[Effect]:
        """Admit the samples that became complete while their feed went to another step."""
        return [effect for p in partitions for effect in self._admit_complete(p)]

    def release(self, feed: str) -> list[Effect] | None:
        """Admit the complete samples of a paced feed that were begun first; None if there are none, or not yet."""
        partitions = self._partitions.of_feed(feed)
        if any(
            self._partitions.intakes[p].behind or self._partitions.stream_of[p].merge.awaits_state for p in partitions
        ):
            return None
        in_turn = self._staging.next_in_turn(feed)
        return None if in_turn is None else self._admit_complete(*in_turn)

    def make_room(self, name: str) -> list[Effect]:
        """Give credit for a chunk to a producer in a paced feed, if newer samples have taken all of its credit.

        The next step waits for an older sample of this producer. Without credit, it would wait for ever.
        """
        effects: list[Effect] = []
        for p in self._producers.held_by(name):
            intake = self._partitions.intakes[p]
            if intake.staged is not None and not intake.behind and intake.make_room(self._max_chunk_bytes):
                effects += self._credits.flow(p, repeat=True)
        return effects

    def start(self, producer: ConnectedProducer, session: int, message: Start) -> list[Effect]:
        """Take a program's counts of tickets, unless they are of an earlier session; ``Feed`` gives tickets."""
        p = self._partitions.find(message.stream, message.partition)
        if p is None or self._producers.holder[p] != producer.name or session != self._partitions.intakes[p].session:
            return []
        tickets = self._staging.tickets.get(self._partitions.stream_of[p].feed)
        if tickets is not None:
            tickets.report(p, producer.name, message, session)
        return []

    def grant(self, feed: str, merged: int, version: int) -> list[Effect]:
        """Give tickets of a paced feed to programs that ask.

        Args:
            feed: Name of the feed.
            merged: Number of samples that are merged, and not trained.
            version: Version of the newest policy that programs are told; 0 if there is none.
        """
        tickets, intakes = self._staging.tickets[feed], self._partitions.intakes
        partitions = self._partitions.of_feed(feed)
        for p in partitions:
            tickets.hand_over(p, self._producers.holder[p])
        waiting = merged + sum(intakes[p].num_waiting for p in partitions)
        return [e for p in sorted(tickets.grant(waiting, version)) for e in self._credits.flow(p, repeat=True)]

    def answer(self) -> list[Effect]:
        """Answer producers whose values are safe."""
        answers = [(self._producers.named(name), answer) for name, answer in self._staging.answers()]
        return [e for to, answer in answers if to is not None for e in self._credits.send(to.peer, answer)]
