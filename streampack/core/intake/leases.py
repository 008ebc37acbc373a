"""The producers' side of the broker: handles the messages of producers, and gets samples for the feeds.

A producer offers streams and gets leases of partitions (``rebalance``), with credit (``credits``). A chunk that is good
and the next one of its partition (``chunk_check``) is recorded and admitted (``partition_accounts``). Messages of an
older session or an older broker change nothing. A producer that breaks the protocol, or reports a failure, loses its
leases; trainers that wait for its samples get the reason. When a feed goes back or forward, new sessions read its
partitions from the new position.

A partition is named by its number ``p``, which counts the partitions of all feeds.
"""

from __future__ import annotations

from streampack.core.intake.admission import Admission
from streampack.core.intake.chunk_check import NotTaken, ReceivedChunk
from streampack.core.intake.credits import Credits
from streampack.core.intake.partition_accounts import PartitionAccounts
from streampack.core.intake.partition_records import PartitionRecords
from streampack.core.intake.partitions import Partitions
from streampack.core.intake.producers import CLAIM_S, ConnectedProducer, ProducerDeparture, Producers, Seen, refusal
from streampack.core.intake.rebalance import Rebalancer
from streampack.core.intake.staged_intake import StagedIntake
from streampack.core.journal.history import History
from streampack.core.journal.journal import Journal
from streampack.core.journal.log_effects import Recalled
from streampack.core.merge.feed_merge import FeedMerge
from streampack.core.model.capacity import Capacity
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64, SampleTable
from streampack.core.model.snapshot import Floor
from streampack.core.protocol.events import Effect, Report
from streampack.core.protocol.handlers import Handlers
from streampack.core.protocol.message import WRONG_SIDE, Bye, Envelope, Identity, Message, Reject, Who
from streampack.core.protocol.producer_messages import (
    PRODUCER_MESSAGES,
    Amend,
    CommitWrite,
    Done,
    Eos,
    Hello,
    LateFields,
    Mark,
    ProducerMessage,
    ProducerPing,
    Samples,
    Sent,
    SessionMessage,
    Start,
)
from streampack.core.protocol.trainer_messages import Attach, Get, ReaderPing
from streampack.core.staging.staging import Staging
from streampack.core.staging.tickets import fault

FAREWELL = Bye(reason="the broker is stopping")
REPEAT_S = 1.0
"""Seconds after which unchanged credit is sent again."""
FEW_PARTITIONS = 32
"""Partitions of a broker whose producers read a chunk of each in turn. With more, the merge says which it waits for."""
PRODUCER_SILENT_S = 15.0
"""Seconds without a message after which a producer loses its leases."""


class Leases:
    """The producers' side of the broker; all feeds share it and its parts.

    Attributes:
        partitions: The partitions of all feeds, and the intake of each.
        staging: Holds samples that wait for their late fields.
        records: Writes records of partitions to the log.
        accounts: Records and admits chunks, and reads partitions again.
        producers: The connected producers, and the holder of each partition.
        credits: Sends leases and credit to holders.
        rebalancer: Decides which producer holds which partition.
        staged: Takes samples that wait, and admits those that are complete.
    """

    def __init__(self, identity: Identity, capacity: Capacity, table: SampleTable, journal: Journal) -> None:
        self._identity, self._capacity = identity, capacity
        self.staging = Staging(journal)
        self.partitions = Partitions(capacity.quota_tokens, self.staging, capacity.max_keys)
        self.records = PartitionRecords(self.partitions, journal, self.staging)
        self.accounts = PartitionAccounts(identity.run, self.partitions, self.records, table, capacity.max_chunk_bytes)
        self.producers = Producers(self.partitions)
        self.credits = Credits(identity, capacity, self.partitions, self.producers, journal, self.staging)
        self.rebalancer = Rebalancer(self.partitions, self.records, self.producers, self.credits)
        self.staged = StagedIntake(
            identity,
            self.partitions,
            self.records,
            self.accounts,
            self.producers,
            self.credits,
            self.staging,
            capacity.max_chunk_bytes,
            self._pull,
        )
        self.refused = 0
        """Number of messages that were rejected."""
        self._repeated = 0.0
        """Time at which credits were last repeated."""
        self._done = False
        """True if no trainer will need samples again."""

    @property
    def num_producers(self) -> int:
        """The number of connected producers."""
        return len(self.producers)

    def seen(self, stream: str) -> Seen:
        """Return the producers that offer a stream, and the time since their last message."""
        return self.producers.seen(stream)

    # Calls of a feed

    def open(self, feed: str, rules: Rules, admission: Admission, merge: FeedMerge, history: History) -> None:
        """Add the new streams of ``feed``; their samples go to ``admission`` and ``merge``."""
        self.partitions.open(feed, rules, admission, merge, history)
        self.producers.open()
        self.credits.open()

    def merged(self, feed: str, moved: I64) -> list[Effect]:
        """Send more credit for the partitions whose samples the merge of ``feed`` has taken.

        Args:
            feed: Name of the feed.
            moved: int64 [n], the feed's own numbers of the partitions.
        """
        effects: list[Effect] = []
        for p in self.accounts.note_merged(feed, moved):
            effects += self.credits.flow(p) + self._pull(p)
        return effects

    def wanted(self, feed: str, missing: list[int]) -> list[Effect]:
        """Tell the holders of partitions that the merge waits for their next samples.

        Args:
            feed: Name of the feed.
            missing: The feed's own numbers of the partitions, the one whose sample is next first.
        """
        if len(self.partitions) <= FEW_PARTITIONS:
            return []
        partitions = self.partitions.of_feed(feed)
        return [e for p in reversed(missing) for e in self.credits.flow(partitions[p], repeat=True, wanted=True)]

    def close(self, feed: str) -> list[Effect]:
        """Take no more samples for ``feed``, which has ended."""
        return [e for p in self.partitions.of_feed(feed) for e in self._close(p)]

    def join(self, feed: str, first_new: int) -> list[Effect]:
        """Lease the new partitions of ``feed``, those from number ``first_new`` on, from their first sample."""
        more = self.accounts.join(feed, first_new)
        return self._read_from(more) if more else []

    def remove(self, rules: Rules) -> list[Effect]:
        """Take no more samples of removed streams (of weight 0), and drop those that wait for the merge."""
        removed = [stream.name for stream in rules.streams if not stream.weight]
        return [e for name in removed for p in self.partitions.of_stream(name) for e in self._close(p)]

    def go_to(self, feed: str, floors: list[Floor], awaited: I64) -> list[Effect]:
        """Begin new sessions that read the partitions of ``feed`` from ``floors``; see ``PartitionAccounts.go_to``."""
        effects = self.records.keep_order(feed, floors)
        self.accounts.go_to(feed, floors, awaited)
        partitions = self.partitions.of_feed(feed)
        for p in partitions:
            self.producers.failures.pop(p, None)
        return effects + self._read_from(partitions) + self.staged.admit(partitions)

    def recalled(self, event: Recalled) -> list[Effect]:
        """Admit a chunk of a pushed partition that was read from the log, and read the next."""
        p, effects = self.accounts.recalled(event)
        if p is None:
            return effects
        return effects + self._pull(p) + self.credits.flow(p, repeat=not self.partitions.intakes[p].behind)

    def safe(self, upto: int) -> list[Effect]:
        """Tell producers which samples are safe, now that the log is safe below ``upto``."""
        return self.credits.safe(upto) + self.staged.answer()

    def _read_from(self, partitions: list[int]) -> list[Effect]:
        """Begin new sessions that read partitions from the positions of their intakes on."""
        return self.rebalancer.begin(partitions) + [e for p in partitions for e in self._pull(p)]

    def _close(self, p: int) -> list[Effect]:
        """Take no more samples of a partition, and tell its holder."""
        intake = self.partitions.intakes[p]
        intake.drop_waiting()
        if intake.ended:
            return []
        intake.closed = True
        return self.credits.flow(p, repeat=True)

    def _pull(self, p: int) -> list[Effect]:
        """Read a partition's next chunk from the log, if the log has one; tell the holder if the partition ends."""
        intake = self.partitions.intakes[p]
        ended = intake.ended
        effects = self.accounts.pull(p)
        return effects + (self.credits.flow(p, repeat=True) if intake.ended and not ended else [])

    # Time, and the end

    def tick(self, now: float) -> list[Effect]:
        """Drop silent producers, and repeat the credit of the others."""
        self.producers.now = now
        effects = self.staged.tick(now)
        for producer in self.producers:
            if now - producer.heard > PRODUCER_SILENT_S:
                effects += self.rebalancer.leave(producer, ProducerDeparture.SILENT, round(PRODUCER_SILENT_S))
        if now - self._repeated >= REPEAT_S:
            self._repeated = now
            open_ = [p for p, intake in enumerate(self.partitions.intakes) if not intake.ended]
            effects += [e for p in open_ for e in self.credits.flow(p, repeat=True)]
        return effects

    def dismiss(self, done: bool) -> list[Effect]:
        """Tell producers, once, that they may stop if no trainer will need more samples (``done``)."""
        tell, self._done = done and not self._done, done
        return [e for producer in self.producers for e in self.credits.send(producer.peer, Done())] if tell else []

    def drain(self) -> list[Effect]:
        """Stop: give no more leases or credit, and say goodbye to every producer."""
        self.credits.drained = True
        return [e for producer in self.producers for e in self.credits.send(producer.peer, FAREWELL)]

    # Messages of producers

    def receive(self, peer: bytes, envelope: Envelope, now: float) -> list[Effect]:
        """Handle a message of the producer at ``peer``, and return the answers."""
        self.producers.now = now
        message = envelope.message
        return self._from_anyone[type(message)](self, message, peer, envelope)

    _from_anyone = Handlers[[bytes, Envelope], list[Effect]]()
    _from_producers = Handlers[[ConnectedProducer, Envelope], list[Effect]]()
    _from_holders = Handlers[[ConnectedProducer, int, Envelope], list[Effect]]()

    @_from_anyone.of(Message)
    def _on_message(self, message: Message, peer: bytes, envelope: Envelope) -> list[Effect]:
        """Handle a message of a producer that this broker knows."""
        producer = self.producers.at(peer)
        if producer is None or envelope.epoch < self._identity.epoch:
            return self.credits.send(peer, Who())
        producer.heard = self.producers.now
        return self._from_producers[type(message)](self, message, producer, envelope)

    @_from_anyone.of(Attach, Get, ReaderPing)
    def _on_wrong_side(self, message: Message, peer: bytes, envelope: Envelope) -> list[Effect]:
        """Reject a trainer."""
        where = "Only producers connect to this address. Trainers connect to the address in `listen.trainers`."
        return self._refuse(peer, "wrong_address", f"{WRONG_SIDE}. {where}")

    @_from_anyone.of(Bye)
    def _on_bye(self, message: Bye, peer: bytes, envelope: Envelope) -> list[Effect]:
        """Let a producer leave."""
        return self.leave(peer, ProducerDeparture.GOODBYE)

    @_from_producers.of(Message)
    def _on_unexpected(self, message: Message, producer: ConnectedProducer, envelope: Envelope) -> list[Effect]:
        """Reject a producer for a message that no producer sends."""
        return self._refuse(producer.peer, "protocol", f"got {type(message).__name__} from a producer")

    @_from_producers.of(Amend)
    def _on_amend(self, message: Amend, producer: ConnectedProducer, envelope: Envelope) -> list[Effect]:
        """Take values of late fields."""
        return self.staged.amend(producer, envelope, message)

    @_from_producers.of(Start)
    def _on_start(self, message: Start, producer: ConnectedProducer, envelope: Envelope) -> list[Effect]:
        """Take a program's counts of tickets."""
        if wrong := fault(message):
            return self._refuse(producer.peer, "protocol", wrong)
        return self.staged.start(producer, envelope.fence, message)

    def leave(self, peer: bytes, why: ProducerDeparture) -> list[Effect]:
        """Remove the producer at ``peer``, if there is one, and lease its partitions to others."""
        producer = self.producers.at(peer)
        return [] if producer is None else self.rebalancer.leave(producer, why)

    @_from_anyone.of(Hello)
    def _on_hello(self, hello: Hello, peer: bytes, envelope: Envelope) -> list[Effect]:
        """Admit a producer and lease partitions to it, reject it, or give no answer while its claim waits."""
        producers = self.producers
        for offer in hello.offers:
            if unfit := refusal(offer, self.partitions, self.records.digests):
                return self._refuse(peer, *unfit)
        if self.credits.drained:
            return self.credits.send(peer, FAREWELL)
        if producers.is_replaced(hello.producer):
            return self._refuse(
                peer, "partition_taken", "got a message from a producer that lost its partition to another producer"
            )
        if len(producers) >= self._capacity.max_peers and producers.named(hello.producer) is producers.at(peer) is None:
            return self._refuse(peer, "too_many", (
                f"got more than {self._capacity.max_peers} producers at a time, expected at most "
                f"{self._capacity.max_peers}. "
                f"Stop other producers, or raise `limits.peers` in broker.yaml"
            ))  # fmt: skip
        claim = producers.claim(hello, self.producers.now)
        if claim.refusal:
            return self._refuse(peer, "partition_taken", claim.refusal)
        if claim.waits:
            return []
        effects: list[Effect] = []
        for silent in claim.silent:
            effects += self.rebalancer.leave(silent, ProducerDeparture.TAKEN_OVER, round(CLAIM_S))
        for offer in hello.offers:
            effects += self.records.accept_source(offer)
        other = producers.at(peer)
        if other is not None and other.name != hello.producer:
            effects += self.rebalancer.leave(other, ProducerDeparture.OTHER_NAME)
        effects += self.rebalancer.join(peer, hello, self.producers.now)
        for offer in hello.offers:
            effects += self._tell_late_fields(peer, offer.stream) if offer.amends is True else []
        return effects + (self.credits.send(peer, Done()) if self._done else [])

    def _tell_late_fields(self, peer: bytes, stream: str) -> list[Effect]:
        """Tell a producer that amends samples of a stream which late fields the stream has."""
        opened = self.partitions.streams[stream]
        fields = LateFields(
            stream=stream, partitions=opened.terms.partitions, fields=opened.rules.late_fields,
            max_chunk_bytes=self._capacity.max_chunk_bytes,
        )  # fmt: skip
        return self.credits.send(peer, fields)

    @_from_producers.of(ProducerPing)
    def _on_ping(self, message: ProducerPing, producer: ConnectedProducer, envelope: Envelope) -> list[Effect]:
        """Take a producer's report of itself, and repeat its credit; remove a producer that failed."""
        partitions = self.producers.held_by(producer.name)
        producer.sizes = {name: size for name, size in message.sizes.items() if name in producer.offers}
        producer.waiting = message.waiting
        if message.failure:
            open_ = [p for p in partitions if not self.partitions.intakes[p].ended]
            self.producers.failures |= dict.fromkeys(open_, message.failure)
            text = f"producer {producer.where}: {message.failure}"
            report = Report("error", text, producer=producer.where, host=producer.host)
            return [report, *self.rebalancer.leave(producer, ProducerDeparture.FAILED)]
        if self._done:
            return self.credits.send(producer.peer, Done())
        if self.credits.drained:
            return self.credits.send(producer.peer, FAREWELL)
        return [e for p in partitions for e in self.credits.flow(p, repeat=True)]

    # Messages of the holder of a partition

    @_from_producers.of(SessionMessage)
    def _of_partition(
        self, message: SessionMessage, producer: ConnectedProducer, envelope: Envelope
    ) -> list[Effect]:  # fmt: skip
        """Handle a producer's message about a partition; revoke its lease if the session is not the current one."""
        p = self.partitions.find(message.stream, message.partition)
        if p is None or self.producers.holder[p] != producer.name:
            return self.credits.revoke(producer, envelope.fence, message)
        if envelope.fence != self.partitions.intakes[p].session:
            return self.credits.revoke(producer, envelope.fence, message)
        return self._from_holders[type(message)](self, message, producer, p, envelope)

    @_from_holders.of(Sent)
    def _on_sent(self, message: Sent, producer: ConnectedProducer, p: int, envelope: Envelope) -> list[Effect]:
        """Ask for samples that were lost, or repeat the credit."""
        intake = self.partitions.intakes[p]
        lost = message.next_seq > intake.next_seq and not self.credits.drained and not intake.unwanted
        return self.credits.again(p) if lost else self.credits.flow(p, repeat=True)

    @_from_holders.of(Samples)
    def _on_samples(self, message: Samples, producer: ConnectedProducer, p: int, envelope: Envelope) -> list[Effect]:
        """Take a chunk, reject it, or ask for the samples that are missing before it."""
        intake, stream = self.partitions.intakes[p], self.partitions.stream_of[p]
        if self.credits.drained:
            return []
        after_end = intake.staged is not None and intake.staged.end is not None
        if intake.unwanted or (intake.closed and intake.pushed) or after_end:
            return self.credits.flow(p, repeat=True)
        if stream.merge.awaits_state:
            return []  # a new session begins soon
        chunk = stream.admission.check.verdict(envelope, message, stream.terms, intake, stream.keys)
        if chunk is NotTaken.DUPLICATE:
            return self.credits.flow(p, repeat=True)
        if chunk is NotTaken.OUT_OF_TURN:
            return self.credits.again(p)
        if not isinstance(chunk, ReceivedChunk):
            return self._expel(producer, *chunk, p)
        self.producers.failures.pop(p, None)
        taken = self.accounts.take(p, chunk) if intake.staged is None else self.staged.stage(p, chunk)
        return taken + self.credits.settle(p) + self.credits.flow(p, repeat=intake.closed)

    @_from_holders.of(Eos)
    def _on_end(self, message: Eos, producer: ConnectedProducer, p: int, envelope: Envelope) -> list[Effect]:
        """Take the end of a partition, or ask for the samples that are missing before it."""
        intake = self.partitions.intakes[p]
        if intake.unwanted:
            return self.credits.flow(p, repeat=True)
        if message.total > intake.next_seq:
            return self.credits.again(p)
        taken = max(intake.next_seq, intake.known_seq)
        known_total = intake.recorded.known_total
        if intake.staged is not None and intake.staged.end is not None:
            known_total = intake.staged.end[1].total
        if message.total < taken or message.total != (message.total if known_total is None else known_total):
            expected = f"at least {taken}" if known_total is None else str(known_total)
            return self._expel(
                producer, "short_stream",
                f"stream {message.stream!r} partition {message.partition}: got an end after {message.total} samples, "
                f"expected {expected} samples. The files have changed", p,
            )  # fmt: skip
        if intake.staged is None:
            return self.accounts.end(p, message.total) + self.credits.flow(p, repeat=True)
        return self.staged.end(p, message.total) + self.credits.flow(p, repeat=True)

    @_from_holders.of(Mark)
    def _on_mark(self, message: Mark, producer: ConnectedProducer, p: int, envelope: Envelope) -> list[Effect]:
        """Take the end of a batch of a pushed partition, or ask for the samples that are missing before it."""
        intake, stream = self.partitions.intakes[p], self.partitions.stream_of[p]
        if not stream.terms.pushed or message.number < intake.sent_marks:
            return self.credits.flow(p, repeat=True)
        if message.number > intake.sent_marks or message.seq != intake.sent_seq:
            return self.credits.again(p)
        if intake.staged is not None:
            return self.staged.mark(p, message) + self.credits.settle(p)
        return self.records.append_mark(p, message) + self._pull(p) + self.credits.settle(p)

    # Keys, and messages that are refused

    @_from_holders.of(CommitWrite)
    def _on_commit(self, message: CommitWrite, producer: ConnectedProducer, p: int, envelope: Envelope) -> list[Effect]:
        """Forget the keys of a stream's current write, which its job has completed."""
        stream = self.partitions.stream_of[p]
        if message.write != stream.keys.write or not stream.terms.pushed:
            return self.credits.flow(p, repeat=True)
        name = stream.terms.name
        text = f"stream {name!r}: write {message.write} is complete; {len(stream.keys)} keys are forgotten"
        report = Report("info", text, feed=stream.feed, stream=name)
        effects = self.records.commit_write(p)
        partitions = self.partitions.of_stream(name)
        for number in partitions:
            effects += self.credits.settle(number) or self.credits.flow(number)
        return [report, *effects]

    def _expel(self, producer: ConnectedProducer, code: str, detail: str, p: int) -> list[Effect]:
        """Reject a producer for a message about partition ``p``, and give its leases to others."""
        stream = self.partitions.stream_of[p]
        about = Report(
            "error", f"refused a producer: {detail}", feed=stream.feed, stream=stream.terms.name,
            partition=p - stream.first, producer=producer.where, host=producer.host,
        )  # fmt: skip
        effects = self._refuse(producer.peer, code, detail, about)
        self.producers.failures[p] = detail
        return effects + self.rebalancer.leave(producer, ProducerDeparture.EXPELLED, code)

    def _refuse(self, peer: bytes, code: str, detail: str, report: Report | None = None) -> list[Effect]:
        """Send a rejection with its reason, and log it."""
        self.refused += 1
        effects: list[Effect] = [report or Report("warning", f"refused a producer: {detail}")]
        return effects + self.credits.send(peer, Reject(code=code, detail=detail[:2000]))

    _from_producers.require((kind for kind in PRODUCER_MESSAGES if issubclass(kind, ProducerMessage)), unless=Message)
    _from_holders.require(kind for kind in PRODUCER_MESSAGES if issubclass(kind, SessionMessage))
