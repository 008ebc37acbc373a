"""The readers of one feed: handles their messages, and answers them.

A reader asks for a rank (``attaching``), takes part in an attempt (``attempts``) and gets its steps (``step_sender``).
This module hands each message to one of these, and drops readers that are silent.
"""

from __future__ import annotations

from streampack.core.deal.dynamic_cp.cp_plan import GroupRequest
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
    AskMixture,
    AskState,
    Attach,
    Brought,
    Commit,
    Get,
    Mixture,
    ReaderPing,
)
from streampack.core.serve.attaching import Attaching
from streampack.core.serve.attempts import AttemptCoordinator, Departure
from streampack.core.serve.checkpoint_questions import CheckpointQuestions
from streampack.core.serve.rank_reader import Reader, ReaderLink, Receiver
from streampack.core.serve.rank_registry import SILENT_AFTER_S, RankRegistry
from streampack.core.serve.receivers import Receivers
from streampack.core.serve.served_steps import ServedSteps
from streampack.core.serve.step_sender import StepSender
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
        steps: The steps, and how many of them each rank has returned.
        receivers: The connections that receive steps.
        sender: Sends steps.
        attempts: Begins attempts.
        attaching: Lets readers attach.
        questions: Their questions about checkpoints.
    """

    def __init__(
        self, identity: Identity, feed: str, rules: Rules, layout: str, table: SampleTable, source: StepSource,
        max_readers: int = MAX_PEERS, leaving_bytes: int = 64 << 20,
    ) -> None:  # fmt: skip
        self._feed, self._identity, self._source = feed, identity, source
        self.link = link = ReaderLink(identity, feed)
        self.registry = registry = RankRegistry()
        self.steps = steps = ServedSteps(feed, rules, layout, table, registry)
        self.receivers = receivers = Receivers(registry, leaving_bytes)
        self.sender = sender = StepSender(link, rules, layout, registry, steps, receivers, source)
        self.attempts = AttemptCoordinator(link, rules, layout, registry, steps, receivers, sender, source)
        self.attaching = Attaching(
            link, rules, layout, max_readers, registry, receivers, self.attempts, source, steps
        )  # fmt: skip
        self.questions = CheckpointQuestions(link, registry, source)
        self._told_at = 0.0

    # Calls of the feed

    def begin(self, step: int) -> None:
        """Start at ``step``, because an earlier broker of this run has served all steps before it."""
        self.steps.released_upto = self.steps.formed_upto = step

    def add(self, step: PlannedStep, skipped: bool = False, request: GroupRequest | None = None) -> list[Effect]:
        """Keep a formed step, and send it to readers; for a ``skipped`` step, send only its digests.

        ``request``: the request for its plan, with the plan.
        """
        self.steps.keep(step, skipped, request)
        self.sender.forget_missing()  # the step after it may wait for something else
        effects = self.attempts.check(self.steps.formed_upto, step.chain)
        return effects + self.steps.release() + self.sender.serve_all()

    def finish(self, num_steps: int, chain: bytes) -> list[Effect]:
        """End the iteration after ``num_steps`` steps; ``chain`` is the digest of all these steps."""
        self.steps.finish(num_steps, chain)
        return self.sender.serve_all()

    def drain(self) -> list[Effect]:
        """Stop serving: send readers the steps that are already formed, then a ``Bye``."""
        self.steps.draining = True
        attempts, sender = self.attempts, self.sender
        return [
            e
            for reader in self.registry
            for e in (sender.serve(reader.receiver) if reader.entered else attempts.wait(reader))
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
        return self.questions.ask_state(reader, message.step)

    @_from_readers.of(Commit)
    def _on_commit(self, message: Commit, reader: Reader, envelope: Envelope) -> list[Effect]:
        """Record that a checkpoint is durable; the answer comes once the record is safe."""
        return self.questions.commit(reader, message.step)

    @_from_readers.of(AskMixture)
    def _on_ask_mixture(self, message: AskMixture, reader: Reader, envelope: Envelope) -> list[Effect]:
        """Tell a reader how the feed's streams are mixed."""
        return self.link.send(reader, Mixture(feed=self._feed, streams=self._source.mixture()))

    @_from_readers.of(Get)
    def _on_get(self, message: Get, reader: Reader, envelope: Envelope) -> list[Effect]:
        """Send the requested steps."""
        if not self._is_current(reader, envelope):
            return self.attempts.answer(reader)
        if not reader.entered:
            waits = reader.ready and not reader.fence
            return self.attempts.wait(reader) if waits else self.link.send(reader, Who())  # it must attach again
        return self.steps.note_alive(reader) + self.sender.get(reader, message)

    @_from_readers.of(ReaderPing)
    def _on_ping(self, message: ReaderPing, reader: Reader, envelope: Envelope) -> list[Effect]:
        """Take a reader's report of itself."""
        if not self._is_current(reader, envelope):
            return self.attempts.answer(reader)
        self.steps.note_figures(reader, message.stats, message.starvation)
        if not reader.entered:
            return []
        return self.steps.note_alive(reader) + self.sender.ping(reader, message)

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
        if (relay := self.receivers.relays.get(peer)) is not None:
            relay.heard = now
        message = envelope.message
        return self._from_relays[type(message)](self, message, peer, envelope)

    @_from_relays.of(NodeGet)
    def _on_node_get(self, message: NodeGet, peer: bytes, envelope: Envelope) -> list[Effect]:
        """Send the requested steps to a relay."""
        relay = self._current_relay(peer, envelope)
        return [] if relay is None else self.sender.node_get(relay, message)

    @_from_relays.of(NodePing)
    def _on_node_ping(self, message: NodePing, peer: bytes, envelope: Envelope) -> list[Effect]:
        """Take a relay's reports of its readers, and answer."""
        effects = [e for report in message.ranks for e in self._note_report(peer, envelope.epoch, report)]
        if (relay := self._current_relay(peer, envelope)) is not None:
            effects += self.sender.confirm(relay, message.have_upto, message.part)
        if not any(isinstance(effect, SendTrainer | SendShard) and effect.peer == peer for effect in effects):
            answer = NodePing(feed=self._feed, have_upto=self.steps.released_upto)
            effects.append(SendTrainer(peer, self.link.envelope(answer, envelope.fence)))
        return effects

    def _current_relay(self, peer: bytes, envelope: Envelope) -> Receiver | None:
        """Return the relay at ``peer`` if its message is of the present attempt; else None."""
        relay = self.receivers.relays.get(peer)
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

    def leave(self, peer: bytes, why: Departure) -> list[Effect]:
        """Remove the reader at ``peer``, if there is one, for the reason ``why``."""
        reader = self.registry.at(peer)
        return [] if reader is None else self.attempts.leave(reader, why)

    def fail(self, code: str, detail: str) -> list[Effect]:
        """Reject every reader with an error: nothing more can be served."""
        return [effect for reader in self.registry for effect in self.attempts.refuse(reader, code, detail)]

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
        self.questions.forget_gone()
        effects: list[Effect] = []
        ping_s = self.attempts.ping_s
        silent_s = max(READER_SILENT_S, SILENT_PINGS * ping_s)
        self.registry.silent_after_s = max(SILENT_AFTER_S, SILENT_PINGS * ping_s)
        for reader in self.registry:
            if now - reader.heard > silent_s:
                effects += self.attempts.leave(reader, Departure.SILENT, now - reader.heard)
                self.receivers.note_lost(reader.receiver)
        effects += self.attempts.settle() + self.sender.serve_held_back()  # a reader that others wait for may have left
        if now - self._told_at >= max(TELL_S, ping_s):
            self._told_at = now
            self.receivers.forget_relays(silent_s)
            outside = [reader for reader in self.registry if not reader.entered]
            effects += [effect for reader in outside for effect in self.attempts.wait(reader)]
            waiting = [receiver for receiver in self.receivers.entered if not self._is_behind(receiver)]
            return effects + [effect for receiver in waiting for effect in self.sender.wait_for_step(receiver)]
        return effects + self.sender.tell_starving()

    def _is_behind(self, receiver: Receiver) -> bool:
        """Return whether a receiver waits for parts that are in flight, not for a step to be formed."""
        flow = receiver.flow
        return bool(flow.queued) and not self.steps.formed_upto <= flow.sent_upto < flow.want_stop

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
        ranks = [rank for rank in self.registry.ranks() if rank not in self.registry.held]
        names = self.registry.names_of(ranks, len(ranks))
        return f"{len(ranks)} of {self.num_ranks} ranks are not there: {names}" if ranks else ""

    # Taking a rank

    @_from_clients.of(Attach)
    def _on_attach(self, message: Attach, peer: bytes, envelope: Envelope) -> list[Effect]:
        """Let a reader attach."""
        return self.attaching.attach(message, peer)

    @_from_readers.of(Brought)
    def _on_brought(self, message: Brought, reader: Reader, envelope: Envelope) -> list[Effect]:
        """Take the snapshot of a checkpoint."""
        return self.attaching.take_snapshot(message, reader)

    _from_readers.require(set(FROM_READERS) - {Attach}, unless=Message)
    _from_relays.require((NodeGet, NodePing))
