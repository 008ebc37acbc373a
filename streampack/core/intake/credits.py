"""Leases and credit: tell the holder of each partition where to begin, how much to send, and which samples are safe.

A lease begins a *session*, at the next missing sample. When that position jumps, a new session begins, so that chunks
in flight belong to an old session. Credit is absolute within a session; ``Intake.grant_seq`` and
``Intake.grant_bytes`` compute it. Credit is sent when it has grown by a quarter, and repeated, so that a lost message
does no harm. ``rebalance`` decides which producer holds a partition.
"""

from __future__ import annotations

from collections import deque

import msgspec

from streampack.core.intake.intake import MAX_UNMERGED
from streampack.core.intake.partitions import Partitions
from streampack.core.intake.producers import ConnectedProducer, Producers
from streampack.core.journal.journal import Journal
from streampack.core.journal.log_records import PolicyPublished
from streampack.core.model.capacity import Capacity
from streampack.core.model.lease_terms import StreamTerms
from streampack.core.model.rules import Rules
from streampack.core.protocol.effects import SendProducer
from streampack.core.protocol.events import Effect
from streampack.core.protocol.message import Identity, Message
from streampack.core.protocol.producer_messages import Flow, Lease, Revoke, SessionMessage
from streampack.core.staging.staging import Staging


class Credits:
    """Sends the leases and the credit of ``partitions`` to the ``producers`` that hold them."""

    def __init__(
        self, identity: Identity, capacity: Capacity, partitions: Partitions, producers: Producers, journal: Journal,
        staging: Staging,
    ) -> None:  # fmt: skip
        self._identity, self._capacity, self._staging = identity, capacity, staging
        self._partitions, self._producers, self._journal = partitions, producers, journal
        self.drained = False
        """True if the broker stops, and gives no more leases or credit."""
        self._sessions = 0
        self._granted: list[tuple[int, int]] = []
        """Credit of each partition as last sent: (``grant_seq``, ``grant_bytes``)."""
        self._published: deque[tuple[int, PolicyPublished]] = deque()
        self._announced: dict[str, PolicyPublished] = {}
        """The newest policy that is safely published, by feed."""
        self._num_told = 0
        self._held_back: set[int] = set()
        """Partitions that are leased once all samples pushed to them are safe."""

    def publish(self, published: PolicyPublished) -> None:
        """Tell the producers of a feed that a policy is published, once the newest record is safe."""
        self._published.append((self._journal.next_lsn, published))

    def told(self, feed: str) -> PolicyPublished | None:
        """Return the newest policy that the producers of ``feed`` are told; None if there is none."""
        return self._announced.get(feed)

    def tell_published(self) -> list[Effect]:
        """Tell pushing producers the versions of policies that are safe now."""
        moved = set[str]()
        while self._published and self._published[0][0] <= self._journal.safe_upto:
            _, published = self._published.popleft()
            self._announced[published.feed] = published
            self._num_told += 1
            moved.add(published.feed)
        partitions = [p for feed in sorted(moved) for p in self._partitions.of_feed(feed)]
        return [e for p in partitions if self._partitions.stream_of[p].terms.pushed for e in self.flow(p, repeat=True)]

    def open(self) -> None:
        """Add the partitions that were opened, without credit at first."""
        self._granted += [(0, 0)] * (len(self._partitions) - len(self._granted))

    @property
    def last_lsn(self) -> int:
        """Log sequence number of the newest record."""
        return self._journal.next_lsn - 1

    def begin(self, p: int) -> None:
        """Begin a new session of partition ``p``; messages of the session before become void."""
        self._sessions += 1
        self._partitions.intakes[p].begin(self._sessions)
        self._granted[p] = (0, 0)

    def again(self, p: int) -> list[Effect]:
        """Lease a partition again from the first missing sample on, because something was lost (go-back-N)."""
        self.begin(p)
        return self.lease(p)

    def lease(self, p: int) -> list[Effect]:
        """Send the lease of partition ``p``'s current session to its holder, if there is a holder."""
        holder = self._producers.holder_of(p)
        if holder is None or self.drained:
            return []
        stream, intake = self._partitions.stream_of[p], self._partitions.intakes[p]
        terms = stream.terms
        if terms.pushed and intake.recorded.waits:  # unsafe samples may get lost, and their numbers be used again
            self._held_back.add(p)
            return []
        size = self._capacity
        lease = lease_of(terms, stream.rules, p - stream.first, size.max_sample_tokens, size.max_chunk_bytes)
        cursor = intake.last_cursor or self._partitions.begins.get(terms.name)
        lease = msgspec.structs.replace(lease, first_seq=intake.next_seq, cursor=cursor)
        return self.send(holder.peer, lease, intake.session) + self.flow(p, repeat=True)

    def flow(self, p: int, repeat: bool = False, wanted: bool = False) -> list[Effect]:
        """Send the credit of partition ``p``, if it grew by a quarter of its limit, or always with ``repeat``.

        ``wanted``: the merge waits for the next sample of ``p``.
        """
        intake, holder = self._partitions.intakes[p], self._producers.holder_of(p)
        if holder is None or self.drained:
            return []
        seq, size = intake.grant_seq, intake.grant_bytes
        # Chunks of the log come first; no new ones are taken while the log is full.
        if intake.behind or (self._journal.full and self._partitions.stream_of[p].in_order):
            seq = min(seq, intake.sent_seq)  # recorded samples may come again
        keys = self._partitions.stream_of[p].keys
        keys_full = bool(keys) and intake.sent_seq + keys.room < seq
        if keys_full:
            seq = intake.sent_seq + keys.room
        said_seq, said_size = self._granted[p]
        if intake.behind and intake.staged is not None:  # no new samples are taken until the log's are read
            seq, size = said_seq, said_size
        if not repeat and seq - said_seq < MAX_UNMERGED // 4 and size - said_size < intake.quota_bytes // 4:
            return []
        self._granted[p] = (seq, size)
        stream = self._partitions.stream_of[p]
        flow = Flow(
            stream=stream.terms.name, partition=p - stream.first, expected_seq=intake.next_seq,
            grant_seq=seq, grant_bytes=size, durable_seq=intake.recorded.durable_seq,
            durable_marks=intake.recorded.durable_marks,
            ended=self._needs_no_more(p), write=keys.safe_write(self._journal.safe_upto),
            keys_full=keys_full, granted=self._granted_tickets(p),
            policy_version=self._announced[stream.feed].version if stream.feed in self._announced else msgspec.UNSET,
            policy_number=self._num_told, wanted=wanted or msgspec.UNSET,
        )  # fmt: skip
        return self.send(holder.peer, flow, intake.session)

    def _granted_tickets(self, p: int) -> int | msgspec.UnsetType:
        """Return the number of tickets that the holder of ``p`` was given in a paced feed."""
        tickets = self._staging.tickets.get(self._partitions.stream_of[p].feed)
        if tickets is None:
            return msgspec.UNSET
        tickets.hand_over(p, self._producers.holder[p])
        granted = tickets.granted(p)
        return msgspec.UNSET if granted is None else granted

    def _needs_no_more(self, p: int) -> bool:
        """Return whether the holder is done sending; for a pushed partition, its end must be safe in the log."""
        intake = self._partitions.intakes[p]
        if not self._partitions.stream_of[p].terms.pushed:
            return intake.ended
        if intake.closed or intake.staged is None or intake.staged.end is None:
            return intake.closed or intake.recorded.is_end_safe(self._journal.safe_upto)
        return intake.staged.end[0] < self._journal.safe_upto

    def safe(self, upto: int) -> list[Effect]:
        """Tell pushing producers which samples are safe, now that the log is safe below ``upto``."""
        moved = [p for p, intake in enumerate(self._partitions.intakes) if intake.recorded.note_safe(upto)]
        effects = [e for p in moved for e in self.flow(p, repeat=True)]
        ready = [p for p in self._held_back if not self._partitions.intakes[p].recorded.waits]
        self._held_back.difference_update(ready)
        return effects + [e for p in ready for e in self.lease(p)] + self.tell_published()

    def settle(self, p: int) -> list[Effect]:
        """Tell the holder of ``p`` at once that new samples are safe, if the log does not wait for the disk."""
        is_new = self._partitions.intakes[p].recorded.note_safe(self._journal.safe_upto)
        return self.flow(p, repeat=True) if is_new else []

    def revoke(self, producer: ConnectedProducer, session: int, message: SessionMessage) -> list[Effect]:
        """Tell a producer that the session of its message is over."""
        revoke = Revoke(stream=message.stream, partition=message.partition)
        return self.send(producer.peer, revoke, session)

    def send(self, peer: bytes, message: Message, session: int = 0) -> list[Effect]:
        """Return the effect that sends a message to the producer at ``peer``."""
        return [SendProducer(peer, self._identity.envelope(message, session))]


def lease_of(terms: StreamTerms, rules: Rules, partition: int, max_sample_tokens: int, max_chunk_bytes: int) -> Lease:
    """Return the lease of a stream's partition, from its first sample on.

    Args:
        terms: The stream's terms.
        rules: The rules of its feed.
        partition: Number of the partition in the stream.
        max_sample_tokens: Most tokens of a sample, unless the stream's policy rejects longer samples.
        max_chunk_bytes: Most bytes of a chunk.
    """
    return Lease(
        stream=terms.name, partition=partition, partitions=terms.partitions, first_seq=0, cursor=None,
        seed=rules.seed, passes=terms.passes, dtype=rules.tokens,
        fields=tuple(field for field in rules.fields if not (terms.late and field.late)),
        late_fields=rules.late_fields if terms.late else msgspec.UNSET,
        paced=rules.paces or msgspec.UNSET, overlong=terms.overlong, poison=terms.poison,
        max_sample_tokens=terms.limit if terms.overlong == "error" else max_sample_tokens,
        max_chunk_bytes=max_chunk_bytes, batches=terms.batches or msgspec.UNSET,
        share=terms.share or msgspec.UNSET, media_fields=terms.media_fields or msgspec.UNSET,
        no_loss_tokens=msgspec.UNSET if terms.no_loss_tokens == "train" else terms.no_loss_tokens,
        budget=msgspec.UNSET if terms.no_loss_tokens == "train" else terms.limit,
    )  # fmt: skip
