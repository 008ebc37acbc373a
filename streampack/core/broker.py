"""The broker as a pure state machine: ``handle(event) -> effects``.

The broker passes each event to the part that it concerns. ``leases`` takes samples from producers; each ``feed`` forms
steps of its streams and serves them. Only the feed of a message's sender advances by it. Time comes as ``Tick``; no
step depends on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from streampack.core.claims import Claims
from streampack.core.feed.feed import Feed
from streampack.core.intake.leases import Leases
from streampack.core.intake.producers import ProducerDeparture
from streampack.core.journal.journal import Journal
from streampack.core.journal.log_effects import Recalled, Safe, WasCut
from streampack.core.journal.log_records import Base, ChunkAdmitted, ChunkStaged, Record, SamplesAmended, ValuesReported
from streampack.core.model.capacity import Capacity, FeedPlan
from streampack.core.model.keys.stage_keys import Stage, StageBegin
from streampack.core.model.rule_changes import Cancel, Restream, Skip, describe_change
from streampack.core.model.samples import SampleTable
from streampack.core.protocol.effects import (
    Answer,
    Change,
    Drain,
    Formed,
    FromProducer,
    FromTrainer,
    NotSent,
    SendTrainer,
    Withdrawn,
)
from streampack.core.protocol.events import Effect, Event, Report, Tick
from streampack.core.protocol.handlers import Handlers
from streampack.core.protocol.message import WRONG_SIDE, Bye, Envelope, Identity, Message, Reject, Who
from streampack.core.protocol.producer_messages import CommitWrite, Hello, ProducerMessage, ProducerPing, Samples, Sent
from streampack.core.protocol.recent_events import RecentEvents
from streampack.core.protocol.relay_messages import RelayMessage, relay_of
from streampack.core.protocol.result_messages import NumberedMessage, ReportValues
from streampack.core.protocol.rights import REVOKED, key_of
from streampack.core.protocol.trainer_messages import Attach, Get, ReaderPing
from streampack.core.run_log import RunLog
from streampack.core.serve.attempts import Departure

MAX_EPOCH = 2**62 - 1
OUTBID_BY = 2**56
"""Most by which a peer's epoch may exceed this broker's. Epochs are nanoseconds, so a clock may be two years ahead."""


class Broker:
    """The broker of one run; ``epoch`` is higher than the epoch of every earlier broker of the run.

    Without ``outbids``, an arbiter decides which broker is active, and no peer's epoch raises that of the broker.

    Call ``recover`` with each record of the log, if there is one, then ``begin``, then ``handle`` with events.
    """

    def __init__(
        self, *, run: int, epoch: int, feeds: Sequence[FeedPlan], capacity: Capacity, steps_ahead: int = 8,
        journal: Journal | None = None, run_name: str = "", outbids: bool = True,
    ) -> None:  # fmt: skip
        self.identity, self.run_name, self.capacity = Identity(run, epoch), run_name, capacity
        self.table = SampleTable()
        self.journal = journal or Journal()
        self.leases = Leases(self.identity, capacity, self.table, self.journal)
        self.feeds = {
            plan.name: Feed(
                self.identity, plan, capacity.max_sample_tokens, steps_ahead, self.table, self.leases, self.journal
            )
            for plan in feeds
        }
        self._log = RunLog(self.identity, run_name, self.feeds, self.leases, self.journal)
        self._claims = Claims(self.feeds, self.leases.producers)
        self._answers: deque[tuple[int, Answer]] = deque()
        """Answers to changes, each with the LSN of the record that must be safe first."""
        self._used: set[str] = set()
        """Feeds that a reader ever attached to."""
        self._now = 0.0
        self.draining = False
        """True if the broker stops."""
        self.foreign = 0
        """Number of messages of another run or a newer broker."""
        self._refused = 0  # clients that were rejected before they came to a feed
        self._highest_epoch = min(epoch + OUTBID_BY, MAX_EPOCH) if outbids else 0
        self.recent = RecentEvents()
        """The last events, for bug reports."""

    @property
    def run(self) -> int:
        """Number of the run."""
        return self.identity.run

    @property
    def epoch(self) -> int:
        """The broker's epoch."""
        return self.identity.epoch

    def handle(self, event: Event) -> list[Effect]:
        """Return the effects of an event, for the shell to perform in order."""
        self.recent.note(event)
        return self._events[type(event)](self, event)

    _events = Handlers[[], list[Effect]]()
    _from_producers = Handlers[[FromProducer], list[Effect]]()
    _from_trainers = Handlers[[FromTrainer], list[Effect]]()

    @_events.of(FromProducer)
    def _on_producer(self, event: FromProducer) -> list[Effect]:
        """Handle a message to the address for producers."""
        if (refused := self._drop(event)) is not None:
            return refused
        message = event.envelope.message
        return self._from_producers[type(message)](self, message, event)

    @_events.of(FromTrainer)
    def _on_trainer(self, event: FromTrainer) -> list[Effect]:
        """Handle a message to the address for trainers."""
        if (refused := self._drop(event)) is not None:
            return refused
        message = event.envelope.message
        if not message.RELAYED and relay_of(event.peer) is not None:
            got = f"got {type(message).__name__} of a rank from a relay, expected a message that relays pass on"
            return self._refuse(event.peer, "protocol", got)
        return self._from_trainers[type(message)](self, message, event)

    def _drop(self, event: FromProducer | FromTrainer) -> list[Effect] | None:
        """Return the answer to a message that its key, its epoch or its run forbids; None for any other message."""
        envelope, message = event.envelope, event.envelope.message
        if event.rights is not None and (why := self._claims.refusal(event, event.rights)):
            return self._forbid(event, why)
        identity = self.identity
        if 0 < envelope.epoch < identity.epoch and isinstance(message, Attach):
            return self._send(event.peer, Who())  # R5: meant for an earlier broker, and may be out of date
        if envelope.epoch > identity.epoch:
            self._raise_epoch(envelope)
        if envelope.run not in (0, identity.run) or envelope.epoch > identity.epoch:
            return self._on_foreign(event)
        return None

    @_events.of(Formed)
    def _on_formed(self, event: Formed) -> list[Effect]:
        """Serve the steps of a packer's choice."""
        feed = self.feeds[event.feed]
        return self._advance(feed, feed.formed(event))

    @_events.of(Safe)
    def _on_safe(self, event: Safe) -> list[Effect]:
        """Send producers and trainers the answers that waited until records are safe."""
        self.journal.safe(event.upto, event.stalled, event.full)
        effects = self.leases.safe(event.upto) + self._answer_changes()
        return effects + [e for feed in self.feeds.values() for e in self._advance(feed, feed.safe(event.upto))]

    @_events.of(Tick)
    def _on_tick(self, event: Tick) -> list[Effect]:
        """Pass the time on to the producers' side, the log and the feeds."""
        self._now = event.now
        effects = self.leases.tick(event.now) + self._log.cut()
        for feed in self.feeds.values():
            effects += self._advance(feed, feed.tick(event.now) + feed.readers.tick(event.now))
        return effects

    @_events.of(NotSent)
    def _on_not_sent(self, event: NotSent) -> list[Effect]:
        """Note that a message did not leave."""
        for feed in self.feeds.values():
            feed.readers.receivers.not_sent(event.peer, event.envelope)
        return []

    @_events.of(WasCut)
    def _on_cut(self, event: WasCut) -> list[Effect]:
        """Forget the records that were deleted from the log."""
        self.leases.records.forget_below(event.first_lsn)
        for feed in self.feeds.values():
            feed.history.forget_below(event.first_lsn)
            feed.results.forget_below(event.first_lsn)
        return []

    @_events.of(Drain)
    def _on_drain(self, event: Drain) -> list[Effect]:
        """Stop the broker."""
        self.draining = True
        effects = self.leases.drain()
        return effects + [e for feed in self.feeds.values() for e in self._advance(feed, feed.readers.drain())]

    @_events.of(Recalled)
    def _on_recalled(self, event: Recalled) -> list[Effect]:
        """Hand a record that was read from the log to the part that has asked for it."""
        feed, record = self.feeds[event.feed], event.record
        if isinstance(record, ValuesReported):
            return feed.results.subscribers.recalled(event)
        if isinstance(record, ChunkStaged | SamplesAmended):
            effects = self.leases.staged.recalled(event)
        elif isinstance(record, ChunkAdmitted):
            effects = self.leases.recalled(event)
        else:
            effects = feed.recalled(event)
        return self._advance(feed, effects)

    # Rights

    def _forbid(self, event: FromProducer | FromTrainer, why: str) -> list[Effect]:
        """Reject a peer whose key does not allow its message; it loses its leases or its rank."""
        self._refused += 1
        report = Report("warning", f"refused a peer: {why}")
        reject = Reject(code="forbidden", detail=why)
        return [report, *self._remove_peer(event.peer, isinstance(event, FromTrainer), reject)]

    @_events.of(Withdrawn)
    def _withdraw(self, event: Withdrawn) -> list[Effect]:
        """Remove the peers that use a key.

        They must say hello or attach again, and get the key's remaining rights. If it has none, they are rejected.
        """
        key, word = event.key, Reject(code="forbidden", detail=REVOKED) if event.revoked else Who()
        producers = [producer.peer for producer in self.leases.producers]
        trainers = [peer for feed in self.feeds.values() for peer in feed.readers.peers]
        effects = [e for peer in producers if key_of(peer) == key for e in self._remove_peer(peer, False, word)]
        return effects + [e for peer in trainers if key_of(peer) == key for e in self._remove_peer(peer, True, word)]

    def _remove_peer(self, peer: bytes, is_trainer: bool, word: Message) -> list[Effect]:
        """Remove a peer's leases or its rank, and send the message ``word`` to the peer."""
        if not is_trainer:
            effects = self.leases.leave(peer, ProducerDeparture.KEY_CHANGED)
            return effects + self.leases.credits.send(peer, word)
        feed = self._read_by(peer)
        effects = [] if feed is None else self._advance(feed, feed.readers.leave(peer, Departure.KEY_CHANGED))
        return effects + self._send(peer, word)

    # The log

    def recover(self, lsn: int, record: Record) -> None:
        """Apply the next record of the log; call this for each record, in order, before ``begin``.

        Args:
            lsn: Log sequence number of the record.
            record: The record.

        Raises:
            ValueError: The record belongs to another run or to other rules; the error text names the difference.
        """
        self._log.recover(lsn, record)

    def begin(self) -> list[Effect]:
        """Start where the log ends, or at the first step if there is no log; return the first effects."""
        for feed in self.feeds.values():
            feed.readers.begin(max(feed.history.released, feed.history.oldest_step))
        effects = self._log.write_base()
        for feed in self.feeds.values():
            effects += self._advance(feed, feed.begin())
        return effects + self.leases.staging.read_again()

    def base(self) -> Base:
        """Return the record of all facts that must survive when the earlier records are deleted."""
        return self._log.base()

    @property
    def refused(self) -> int:
        """Number of producers and clients that were rejected so far."""
        return self._refused + self.leases.refused + sum(feed.readers.link.refused for feed in self.feeds.values())

    def expects_snapshot_from(self, key: bytes) -> bool:
        """Return whether a reader whose connection begins with ``key`` was asked for a snapshot and still waits."""
        return any(feed.readers.attaching.snapshots.expects_from(key) for feed in self.feeds.values())

    @property
    def num_readers(self) -> int:
        """Number of attached readers of all feeds."""
        return sum(feed.readers.num_readers for feed in self.feeds.values())

    @property
    def finished(self) -> bool:
        """True if every feed that had a reader was read to its end, and no reader is attached any more."""
        used = [self.feeds[name] for name in self._used]
        return bool(used) and all(feed.finished for feed in used)

    def _on_foreign(self, event: FromProducer | FromTrainer) -> list[Effect]:
        """Drop a message from another run or a newer broker. The answer lets its sender look for that broker elsewhere.

        Peers do nothing else with this answer, because its run or its epoch is not theirs.
        """
        self.foreign += 1
        to_trainer = isinstance(event, FromTrainer)
        who = self._send(event.peer, Who()) if to_trainer else self.leases.credits.send(event.peer, Who())
        if self.foreign & (self.foreign - 1):  # log only the 1st, 2nd, 4th, 8th
            return who
        text = f"dropped a message from another run or a newer broker ({self.foreign} such messages so far)"
        return [Report("warning", text), *who]

    def _raise_epoch(self, envelope: Envelope) -> None:
        """Raise this broker's epoch above the epoch in a peer's message, if the broker has just started."""
        if envelope.run != self.run:
            return
        formed = any(feed.next_step for feed in self.feeds.values())
        believed = envelope.epoch < self._highest_epoch
        if not formed and believed and not self.num_readers and not self.leases.num_producers:
            self.identity.epoch = envelope.epoch + 1

    @_events.of(Change)
    def _on_change(self, event: Change) -> list[Effect]:
        """Apply a change of the rules to its feed, or refuse it with an ``Answer``."""
        feed = self.feeds.get(event.feed or next(iter(self.feeds)))
        if feed is None or (not event.feed and len(self.feeds) > 1):
            got = f"feed {event.feed!r}" if event.feed else "no feed"
            refusal = f"got {got}, expected one of: {', '.join(map(repr, self.feeds))}"
            return [Answer(event.token, refusal=refusal)]
        try:
            effects, step, number = self._apply_change(feed, event)
        except ValueError as error:
            return [Answer(event.token, feed.name, refusal=str(error))]
        self._answers.append((self.journal.next_lsn - 1, Answer(event.token, feed.name, step, id=number)))
        return self._advance(feed, effects) + self._answer_changes()

    def _answer_changes(self) -> list[Effect]:
        """Answer each change whose record is safe in the log; a killed broker would forget the other changes (R2)."""
        effects: list[Effect] = []
        while self._answers and self._answers[0][0] < self.journal.safe_upto:
            effects.append(self._answers.popleft()[1])
        return effects

    def _apply_change(self, feed: Feed, event: Change) -> tuple[list[Effect], int | None, int | None]:
        """Apply a change; return its effects, first step and number. Raise ValueError if it is not possible."""
        ask = event.ask
        if isinstance(ask, Skip):
            return feed.skip(ask.first, ask.last, event.note), ask.first, None
        for stream in ask.add if isinstance(ask, Restream) else ():  # a stream belongs to one feed
            opened = self.leases.partitions.streams.get(stream.name)
            if opened is not None and opened.feed != feed.name:
                raise ValueError(
                    f"got a new stream {stream.name!r}, expected an unused name, because feed {opened.feed!r} has a "
                    f"stream with this name"
                )
        if isinstance(ask, Cancel):
            return feed.cancel(ask.id, event.note), None, ask.id
        note = describe_change(ask) + (f" ({event.note})" if event.note else "")
        at = StageBegin(step=event.at_step) if event.at_step is not None else None
        effects, change = feed.change(ask, ask.at if isinstance(ask, Stage) else at, note)
        return effects, change.at.step, change.id

    # Messages of producers

    @_from_producers.of(Sent, CommitWrite)
    @_from_producers.of(Message)
    def _to_leases(self, message: Message, event: FromProducer) -> list[Effect]:
        """Pass a producer's message on."""
        return self.leases.receive(event.peer, event.envelope, self._now)

    @_from_producers.of(ProducerMessage)
    def _to_partition(self, message: ProducerMessage, event: FromProducer) -> list[Effect]:
        """Pass a message on that may complete the next step of a feed."""
        effects = self.leases.receive(event.peer, event.envelope, self._now)
        stream = self.leases.partitions.streams.get(message.stream)
        if stream is None:
            return effects
        feed = self.feeds[stream.feed]
        return effects + feed.settle(feed.advance())

    # Messages of trainers

    @_from_trainers.of(Message)
    def _to_reader(self, message: Message, event: FromTrainer) -> list[Effect]:
        """Pass a message on to the feed that its sender reads."""
        feed = self._read_by(event.peer)
        if feed is None:
            return self._send(event.peer, Who())
        return self._advance(feed, feed.readers.receive(event.peer, event.envelope, self._now))

    @_from_trainers.of(Get, ReaderPing)
    def _on_progress(self, message: Get | ReaderPing, event: FromTrainer) -> list[Effect]:
        """Pass a reader's progress on; only the last rank to return a step advances the feed."""
        feed = self._read_by(event.peer)
        if feed is None:
            return self._send(event.peer, Who())
        released = feed.steps.released_upto
        effects = feed.readers.receive(event.peer, event.envelope, self._now)
        return effects if feed.steps.released_upto == released else self._advance(feed, effects)

    @_from_trainers.of(RelayMessage)
    def _on_relay(self, message: RelayMessage, event: FromTrainer) -> list[Effect]:
        """Pass a relay's request or ping to its feed."""
        feed = self.feeds.get(message.feed)
        if feed is None:
            return []  # its readers were refused for that
        released = feed.steps.released_upto
        effects = feed.readers.receive_node(event.peer, event.envelope, self._now)
        return effects if feed.steps.released_upto == released else self._advance(feed, effects)

    @_from_trainers.of(Attach)
    def _on_attach(self, message: Attach, event: FromTrainer) -> list[Effect]:
        """Let a client read a feed, and leave the feed that it has read before."""
        feed = self.feeds.get(message.feed)
        if feed is None:
            return self._refuse_feed(event.peer, message.feed)
        old_feed, effects = self._read_by(event.peer), list[Effect]()
        if old_feed is not None and old_feed is not feed:
            effects = self._advance(old_feed, old_feed.readers.leave(event.peer, Departure.OTHER_FEED))
        effects += self._advance(feed, feed.readers.receive(event.peer, event.envelope, self._now))
        if feed.readers.num_readers:
            self._used.add(feed.name)
        return effects

    @_from_trainers.of(NumberedMessage)
    def _on_numbered(self, message: NumberedMessage, event: FromTrainer) -> list[Effect]:
        """Pass on a message about results to its feed."""
        feed = self.feeds.get(message.feed)
        if feed is None:
            return self._refuse_feed(event.peer, message.feed)
        return self._advance(feed, feed.result_requests.receive(event.peer, event.envelope, self._now))

    @_from_trainers.of(ReportValues)
    def _on_values(self, message: ReportValues, event: FromTrainer) -> list[Effect]:
        """Pass reported values on, unless the key is for some ranks and it is not known yet which rank reports."""
        if event.rights is not None and event.rights.ranks and self._claims.rank_of(message) is None:
            return []  # until the rank has attached; it repeats its message
        return self._on_numbered(message, event)

    @_from_trainers.of(Hello, Samples, ProducerPing)
    def _on_wrong_side(self, message: Hello | Samples | ProducerPing, event: FromTrainer) -> list[Effect]:
        """Reject a producer."""
        where = "Only trainers connect to this address. Producers connect to the address in `listen.producers`."
        return self._refuse(event.peer, "wrong_address", f"{WRONG_SIDE}. {where}")

    @_from_trainers.of(Bye)
    def _on_bye(self, message: Bye, event: FromTrainer) -> list[Effect]:
        """Let a reader or a relay leave."""
        if self._read_by(event.peer) is not None:
            return self._to_reader(message, event)
        for feed in self.feeds.values():
            feed.readers.receivers.leave_relay(event.peer)
        return []

    def _read_by(self, peer: bytes) -> Feed | None:
        """Return the feed to which the client at ``peer`` has attached."""
        return next((feed for feed in self.feeds.values() if feed.readers.knows(peer)), None)

    def _refuse_feed(self, peer: bytes, feed: str) -> list[Effect]:
        """Reject a client that asks for an unknown feed."""
        feeds = ", ".join(map(repr, self.feeds))
        return self._refuse(peer, "unknown_feed", f"got feed {feed!r}, expected one of: {feeds}")

    # Effects

    def _advance(self, feed: Feed, effects: list[Effect]) -> list[Effect]:
        """Return ``effects`` of an event on a feed, and add the new steps and the message that dismisses producers.

        A broker with several feeds never dismisses producers, because a feed without readers may get readers later.
        """
        effects = feed.settle(effects)
        effects += feed.settle(feed.advance())
        return effects + self.leases.dismiss(self.finished and len(self.feeds) == 1)

    def _refuse(self, peer: bytes, code: str, detail: str) -> list[Effect]:
        """Reject a client with an error, and log it."""
        self._refused += 1
        effects: list[Effect] = [Report("warning", f"refused a client: {detail}")]
        return effects + self._send(peer, Reject(code=code, detail=detail[:2000]))

    def _send(self, peer: bytes, message: Message) -> list[Effect]:
        """Return the effect that sends a message to the client at ``peer``."""
        return [SendTrainer(peer, self.identity.envelope(message))]
