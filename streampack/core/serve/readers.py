"""The readers of one feed: handles their messages, and answers them.

A reader asks for a rank (``rank_registry``), takes part in an attempt (``attempts``) and gets its steps
(``step_server``). This module handles the readers' messages, and drops readers that are silent. It asks the feed for
the state of a checkpoint, and tells readers when their checkpoint is recorded as durable.
"""

from __future__ import annotations

from streampack.core.model.capacity import MAX_PEERS
from streampack.core.model.rules import Rules
from streampack.core.model.samples import SampleTable
from streampack.core.model.steps import PlannedStep
from streampack.core.protocol.effects import SendShard, SendTrainer
from streampack.core.protocol.events import Effect
from streampack.core.protocol.handlers import Handlers
from streampack.core.protocol.message import Bye, Envelope, Identity, Message, Who
from streampack.core.protocol.relay_messages import NodeGet, NodePing, ReaderReport, relayed
from streampack.core.protocol.trainer_messages import (
    FROM_READERS,
    AskSnapshot,
    AskState,
    Attach,
    Brought,
    Commit,
    Committed,
    Fenced,
    Get,
    ReaderPing,
)
from streampack.core.serve.attempts import AttemptCoordinator, Departure, diverged
from streampack.core.serve.rank_reader import Reader, Receiver
from streampack.core.serve.rank_registry import MOST_CLAIMS, RankRegistry, refusal
from streampack.core.serve.reader_link import ReaderLink
from streampack.core.serve.snapshot_requests import TOO_MANY, SnapshotRequests
from streampack.core.serve.step_server import StepServer
from streampack.core.serve.step_source import StepSource

TELL_S = 1.0
"""Seconds after which readers are told again what they wait for; with many readers, the time between pings."""
READER_SILENT_S = 15.0
"""Seconds without a message after which a reader loses its rank."""
SILENT_PINGS = 3
"""Intervals between pings without a message after which a reader loses its rank, where they are longer."""


class Readers:
    """The readers of one feed; ``source`` is the feed.

    Attributes:
        link: Wraps messages to readers.
        registry: The readers, and the ranks that they hold or claim.
        steps: Keeps steps, and sends them.
        attempts: Begins attempts.
    """

    def __init__(
        self, identity: Identity, feed: str, rules: Rules, layout: str, table: SampleTable, source: StepSource,
        max_readers: int = MAX_PEERS, leaving_bytes: int = 64 << 20,
    ) -> None:  # fmt: skip
        self._feed, self._rules, self._layout, self._max_readers = feed, rules, layout, max_readers
        self._identity, self._source = identity, source
        self.link = ReaderLink(identity, feed)
        self.registry = RankRegistry()
        self.steps = StepServer(self.link, rules, layout, table, self.registry, source, leaving_bytes)
        self.attempts = AttemptCoordinator(self.link, rules, layout, self.registry, self.steps, source)
        self._snapshots = SnapshotRequests(self.registry)
        self._asked: dict[Reader, int] = {}
        """The step whose state each reader waits for."""
        self._commits: dict[Reader, int] = {}
        """The step of the checkpoint whose commit each reader waits for."""
        self._told = 0.0

    # Calls of the feed

    def begin(self, step: int) -> None:
        """Start at ``step``, because an earlier broker of this run has served all steps before it."""
        self.steps.released_upto = self.steps.formed_upto = step

    def add(self, step: PlannedStep, skipped: bool = False) -> list[Effect]:
        """Keep a formed step, and send it to readers; for a ``skipped`` step, send only its digests."""
        self.steps.keep(step, skipped)
        effects = self.attempts.check(self.steps.formed_upto, step.chain)
        return effects + self.steps.release() + self.steps.serve_all()

    def committed(self, step: int) -> list[Effect]:
        """Tell readers with a checkpoint at or before ``step`` that the checkpoint is recorded as durable."""
        self._forget_gone()
        told = [(reader, asked) for reader, asked in self._commits.items() if asked <= step]
        for reader, _ in told:
            del self._commits[reader]
        return [e for reader, asked in told for e in self.link.send(reader, Committed(feed=self._feed, step=asked))]

    def drain(self) -> list[Effect]:
        """Stop serving: send readers the steps that are already formed, then a ``Bye``."""
        self.steps.draining = True
        attempts, steps = self.attempts, self.steps
        return [
            e
            for reader in self.registry
            for e in (steps.serve(reader.receiver) if reader.entered else attempts.wait(reader))
        ]

    # Messages of readers

    def receive(self, peer: bytes, envelope: Envelope, now: float) -> list[Effect]:
        """Handle a message of the client at ``peer``, and return the answers."""
        self.registry.now = now
        message = envelope.message
        return self._from_clients[type(message)](self, message, peer, envelope)

    _from_clients = Handlers[[bytes, Envelope], list[Effect]]()
    _from_readers = Handlers[[Reader, Envelope], list[Effect]]()
    _from_relays = Handlers[[bytes, Envelope], list[Effect]]()

    @_from_clients.of(Message)
    def _on_message(self, message: Message, peer: bytes, envelope: Envelope) -> list[Effect]:
        """Handle a message of a reader that has attached."""
        reader = self.registry.at(peer)
        assert reader is not None
        return self._from_readers[type(message)](self, message, reader, envelope)

    @_from_clients.of(Bye)
    def _on_bye(self, message: Bye, peer: bytes, envelope: Envelope) -> list[Effect]:
        """Let a reader leave."""
        return self.leave(peer, Departure.GOODBYE)

    @_from_readers.of(AskState)
    def _on_ask_state(self, message: AskState, reader: Reader, envelope: Envelope) -> list[Effect]:
        """Send a checkpoint's state, once it is known."""
        self._asked[reader] = message.step
        return self._tell_state(reader)

    @_from_readers.of(Commit)
    def _on_commit(self, message: Commit, reader: Reader, envelope: Envelope) -> list[Effect]:
        """Record that a checkpoint is durable; the answer comes once the record is safe."""
        self._commits[reader] = message.step
        return self._source.commit(message.step)

    @_from_readers.of(Get)
    def _on_get(self, message: Get, reader: Reader, envelope: Envelope) -> list[Effect]:
        """Send the requested steps."""
        if not self._is_current(reader, envelope):
            return self.attempts.answer(reader)
        if not reader.entered:
            return self._wait_for_ready(reader)
        return self.steps.note_alive(reader) + self.steps.get(reader, message)

    @_from_readers.of(ReaderPing)
    def _on_ping(self, message: ReaderPing, reader: Reader, envelope: Envelope) -> list[Effect]:
        """Take a reader's report of itself."""
        if not self._is_current(reader, envelope):
            return self.attempts.answer(reader)
        self.steps.note_figures(reader, message.stats, message.starvation)
        if not reader.entered:
            return []
        return self.steps.note_alive(reader) + self.steps.ping(reader, message)

    @_from_readers.of(Message)
    def _on_unexpected(self, message: Message, reader: Reader, envelope: Envelope) -> list[Effect]:
        """Reject a client for a message that no reader sends."""
        if not self._is_current(reader, envelope):
            return self.attempts.answer(reader)
        if not reader.entered:
            return []
        return self.attempts.reject(reader.peer, "protocol", f"got {type(message).__name__} from a client")

    def _is_current(self, reader: Reader, envelope: Envelope) -> bool:
        """Return whether a message is of the reader's present attempt, and note that it was heard if so."""
        if (envelope.epoch, envelope.fence) != (self._identity.epoch, reader.fence):
            return False
        reader.heard = self.registry.now
        return True

    # Messages of relays

    def receive_node(self, peer: bytes, envelope: Envelope, now: float) -> list[Effect]:
        """Handle a request or a ping of the relay at ``peer`` for its readers, and return the answers."""
        self.registry.now = now
        if (relay := self.steps.relays.get(peer)) is not None:
            relay.heard = now
        message = envelope.message
        return self._from_relays[type(message)](self, message, peer, envelope)

    @_from_relays.of(NodeGet)
    def _on_node_get(self, message: NodeGet, peer: bytes, envelope: Envelope) -> list[Effect]:
        """Send the requested steps to a relay."""
        relay = self._current_relay(peer, envelope)
        return [] if relay is None else self.steps.node_get(relay, message)

    @_from_relays.of(NodePing)
    def _on_node_ping(self, message: NodePing, peer: bytes, envelope: Envelope) -> list[Effect]:
        """Take a relay's reports of its readers, and answer."""
        effects = [e for report in message.ranks for e in self._note_report(peer, envelope.epoch, report)]
        if (relay := self._current_relay(peer, envelope)) is not None:
            effects += self.steps.confirm(relay, message.have_upto, message.part)
        if not any(isinstance(effect, SendTrainer | SendShard) and effect.peer == peer for effect in effects):
            answer = NodePing(feed=self._feed, have_upto=self.steps.released_upto)
            effects.append(SendTrainer(peer, self.link.envelope(answer, envelope.fence)))
        return effects

    def _current_relay(self, peer: bytes, envelope: Envelope) -> Receiver | None:
        """Return the relay at ``peer`` if its message is of the present attempt; else None."""
        relay = self.steps.relays.get(peer)
        current = relay is not None and (envelope.epoch, envelope.fence) == (self._identity.epoch, relay.fence)
        return relay if current else None

    def _note_report(self, relay: bytes, epoch: int, report: ReaderReport) -> list[Effect]:
        """Record what the relay at ``relay`` reports of one of its readers."""
        address = relayed(relay, report.reader)
        reader = self.registry.at(address)
        if reader is None:  # it is unknown, or has another connection by now
            return [SendTrainer(address, self.link.envelope(Who(), 0))]
        if (epoch, report.fence) != (self._identity.epoch, reader.fence):
            return self.attempts.answer(reader)
        reader.heard = max(reader.heard, self.registry.now - report.silent_s)
        self.steps.note_figures(reader, report.stats, report.starvation)
        if not reader.entered:
            return []
        return self.steps.note_alive(reader) + self.steps.note_progress(reader, report.done_upto, report.have_upto)

    def leave_relay(self, peer: bytes) -> None:
        """Handle the goodbye of a relay; its readers attach again by themselves."""
        self.steps.leave_relay(peer)

    def tell_states(self) -> list[Effect]:
        """Answer the readers that wait for a checkpoint's state, if the state is known now."""
        self._forget_gone()
        return [effect for reader in list(self._asked) for effect in self._tell_state(reader)]

    def _forget_gone(self) -> None:
        """Forget the requests of readers that have left."""
        for asked in (self._asked, self._commits):
            for reader in [reader for reader in asked if self.registry.named(reader.name) is not reader]:
                del asked[reader]

    def _tell_state(self, reader: Reader) -> list[Effect]:
        """Send a reader the state for which it has asked, or return the effects that fetch the state first."""
        state = self._source.state_of(self._asked[reader])
        if isinstance(state, list):
            return state
        del self._asked[reader]
        return self.link.send(reader, state)

    def leave(self, peer: bytes, why: Departure) -> list[Effect]:
        """Remove the reader at ``peer``, if there is one, for the reason ``why``."""
        reader = self.registry.at(peer)
        return [] if reader is None else self.attempts.leave(reader, why)

    def fail(self, code: str, detail: str) -> list[Effect]:
        """Reject every reader with an error: nothing more can be served."""
        return [effect for reader in self.registry for effect in self._refuse(reader, code, detail)]

    def _refuse(self, reader: Reader, code: str, detail: str) -> list[Effect]:
        """Reject a reader with an error, and remove it."""
        return self.attempts.refuse(reader, code, detail)

    def knows(self, peer: bytes) -> bool:
        """Return whether ``peer`` has attached to this feed."""
        return self.registry.at(peer) is not None

    @property
    def peers(self) -> list[bytes]:
        """The connections of all readers that hold or claim a rank."""
        return [reader.peer for reader in self.registry]

    def tick(self, now: float) -> list[Effect]:
        """Remove silent readers, grant or reject claims to ranks, and tell waiting readers why they wait."""
        self.registry.now = now
        self.attempts.tick()
        self._forget_gone()
        effects: list[Effect] = []
        ping_s = self.attempts.ping_s
        silent_s = max(READER_SILENT_S, SILENT_PINGS * ping_s)
        for reader in self.registry:
            if now - reader.heard > silent_s:
                effects += self.attempts.leave(reader, Departure.SILENT, now - reader.heard)
                self.steps.note_lost(reader.receiver)
        effects += self.attempts.settle() + self.steps.serve_held_back()  # readers that others waited for may have left
        if now - self._told >= max(TELL_S, ping_s):
            self._told = now
            self.steps.forget_relays(silent_s)
            outside = [reader for reader in self.registry if not reader.entered]
            effects += [effect for reader in outside for effect in self.attempts.wait(reader)]
            waiting = [receiver for receiver in self.steps.receivers if not self._is_behind(receiver)]
            return effects + [effect for receiver in waiting for effect in self.steps.wait_for_step(receiver)]
        return effects + self.steps.tell_starving()

    def _is_behind(self, receiver: Receiver) -> bool:
        """Return whether a receiver waits for parts that are in flight, not for a step to be formed."""
        flow = receiver.flow
        return bool(flow.queued) and not self.steps.formed_upto <= flow.sent_upto < flow.want_stop

    def expects_snapshot_from(self, key: bytes) -> bool:
        """Return whether a reader whose connection begins with ``key`` was asked for a snapshot and still waits."""
        return self._snapshots.expects_from(key)

    @property
    def num_readers(self) -> int:
        """Number of readers that hold or claim a rank."""
        return len(self.registry)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the mesh that read, attached or not; 0 before the first reader came."""
        return self.registry.num_ranks

    @property
    def absent(self) -> str:
        """A text that names the ranks without a reader; empty if there are none."""
        ranks = [each for each in self.registry.ranks() if each not in self.registry.held]
        names = self.registry.names_of(ranks, len(ranks))
        return f"{len(ranks)} of {self.num_ranks} ranks are not there: {names}" if ranks else ""

    # Taking a rank

    @_from_clients.of(Attach)
    def _on_attach(self, message: Attach, peer: bytes, envelope: Envelope) -> list[Effect]:
        """Handle an ``Attach``: add a new reader, which gets or claims its rank, or reject the reader."""
        if message.reader in self.registry.fenced:
            detail = self.registry.fenced[message.reader]
            return [SendTrainer(peer, self.link.envelope(Fenced(feed=self._feed, detail=detail), 0))]
        reader = self.registry.named(message.reader)
        if reader is not None and (reader.mesh, reader.readers) == (message.mesh, message.readers):
            return self._attach_again(reader, peer, message)
        unfit = refusal(message, self._rules, self._layout)
        if unfit:
            return self.attempts.reject(peer, "mesh", unfit, message.mesh, message.host)
        if reader is None and self._is_full(message):
            return self.attempts.reject(peer, "too_many", (
                f"got more than {self._max_readers} readers of feed {self._feed!r} at a time, expected at most "
                f"{self._max_readers}. Stop other readers, or raise `limits.peers` in broker.yaml."
            ), message.mesh, message.host)  # fmt: skip
        effects: list[Effect] = []
        if reader is None and self.registry.is_claimed_by_many(message.mesh.ranks):
            effects = self.attempts.drop_silent_claim(message.mesh.ranks)
            if not effects:
                return self.attempts.reject(peer, "too_many", (
                    f"got more than {MOST_CLAIMS} processes that ask for rank {message.mesh}, expected one. Start one "
                    f"process for each rank"
                ), message.mesh, message.host)  # fmt: skip
        waits, snapshot = self._snapshots.misses(message), self._snapshots.of(message)
        if waits and self._snapshots.is_full(message.snapshot_digest):
            return effects + self.attempts.reject(peer, "snapshot", TOO_MANY, message.mesh, message.host)
        if message.ready and not waits and (gone := self._source.unfit(message.next_step, snapshot)):
            return effects + self.attempts.reject(peer, *gone, message.mesh, message.host)
        effects += [] if reader is None else self.attempts.leave(reader, Departure.OTHER_RANK)
        effects += self.leave(peer, Departure.PEER_TOOK_RANK)
        now = self.registry.now
        before = reader or self.registry.held_last(message.reader, message.mesh.ranks)
        receiver = self.steps.receiver_of(peer, message.host)
        reader = Reader(
            message.reader, peer, receiver, f"{message.host}:{message.pid}", message.mesh, message.readers, now, now,
            route_changes=message.route_changes,
        )  # fmt: skip
        reader.starvation = message.starvation  # counted since the process began, also with earlier brokers
        if before is not None:  # the rank's counts go on
            reader.stats, reader.starvation = before.stats, before.starvation
        reader.begin(message, now, snapshot, waits)
        if not waits and self.attempts.has_diverged(reader):
            why = diverged(reader, self._rules)
            return effects + self.attempts.reject(peer, "diverged", why, message.mesh, message.host)
        self.registry.add(reader)
        effects += self._ask_for_snapshot(reader)
        if self.registry.in_the_way(reader):
            return effects + self.attempts.wait(reader)
        return effects + self.attempts.take_rank(reader)

    def _is_full(self, message: Attach) -> bool:
        """Return whether the limit of readers is reached.

        A process that claims a rank replaces its holder. So the limit holds separately for claims and for held ranks.
        """
        registry = self.registry
        there = registry.claims if registry.in_the_way(message) else registry.held
        return len(there) >= self._max_readers

    def _ask_for_snapshot(self, reader: Reader) -> list[Effect]:
        """Ask a reader for the snapshot that it waits for, unless another reader was asked."""
        digest = self._snapshots.should_ask(reader, self.registry.now)
        return [] if digest is None else self.link.send(reader, AskSnapshot(feed=self._feed, digest=digest))

    @_from_readers.of(Brought)
    def _on_brought(self, message: Brought, reader: Reader, envelope: Envelope) -> list[Effect]:
        """Handle a requested snapshot; the readers that waited for this snapshot are ready now."""
        reader.heard = self.registry.now
        if not self._snapshots.expects(message.digest):
            return []
        if message.snapshot.digest != message.digest:
            text = "got a snapshot whose digest differs from the digest in the attach message, expected the same digest"
            return self._refuse(reader, "snapshot", text)
        waiting = self._snapshots.take(message.digest, message.snapshot)
        return [e for each, attach in waiting for e in self._attach_again(each, each.peer, attach)]

    def _attach_again(self, reader: Reader, peer: bytes, message: Attach) -> list[Effect]:
        """Handle an ``Attach`` of a known reader: a repetition, a report of readiness, or another iteration.

        An older ``Attach`` changes nothing.
        """
        earlier = message.iteration < reader.iteration or message.route_changes < reader.route_changes
        if earlier or (reader.ready and not message.ready):
            return []
        reader.route_changes = message.route_changes
        effects: list[Effect] = []
        if self.registry.at(peer) is not reader:
            effects += self.leave(peer, Departure.PEER_TOOK_RANK)
            self.registry.move(reader, peer)
            self.steps.move(reader, message.next_step, message.host)
        reader.heard = self.registry.now
        if not message.ready or (reader.ready and message.iteration == reader.iteration):
            if message.ready and not reader.entered and message.next_step > reader.first_step:
                return effects + self._move_on(reader, message)
            return effects + self.attempts.answer(reader)
        if self._snapshots.misses(message):
            before = reader.pending
            if before is None or (before.iteration, before.snapshot_digest) != (
                message.iteration,
                message.snapshot_digest,
            ):
                if self._snapshots.is_full(message.snapshot_digest):
                    return effects + self._refuse(reader, "snapshot", TOO_MANY)
                self.steps.leave_attempt(reader)
                reader.begin(message, self.registry.now, None, waits=True)
            return effects + self._ask_for_snapshot(reader) + self.attempts.wait(reader)
        snapshot = self._snapshots.of(message)
        if gone := self._source.unfit(message.next_step, snapshot):
            return effects + self._refuse(reader, *gone)
        self.steps.leave_attempt(reader)  # it confirms no parts of that attempt any more
        reader.begin(message, self.registry.now, snapshot, waits=False)
        if self.attempts.has_diverged(reader):
            return effects + self._refuse(reader, "diverged", diverged(reader, self._rules))
        return effects + (self.attempts.arrive(reader) if reader.holds else self.attempts.wait(reader))

    def _move_on(self, reader: Reader, message: Attach) -> list[Effect]:
        """Take the later step of a reader outside the attempt, which has used steps of an earlier broker meanwhile."""
        if gone := self._source.unfit(message.next_step, reader.snapshot):
            return self._refuse(reader, *gone)
        reader.first_step, reader.chain, reader.going_on = message.next_step, message.chain, message.going_on
        if self.attempts.has_diverged(reader):
            return self._refuse(reader, "diverged", diverged(reader, self._rules))
        return self.attempts.arrive(reader) if reader.holds else self.attempts.wait(reader)

    def _wait_for_ready(self, reader: Reader) -> list[Effect]:
        """Answer a reader that requests steps outside an attempt: it must wait for an attempt, or attach again."""
        return self.attempts.wait(reader) if reader.ready and not reader.fence else self.link.send(reader, Who())

    _from_readers.require(set(FROM_READERS) - {Attach}, unless=Message)
    _from_relays.require((NodeGet, NodePing))
