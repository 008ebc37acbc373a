"""Keeps the steps of one feed, and sends them to the ranks of the attempt.

A step goes out whole, to every rank (R3). Reads are pure (R4): a reader that asks again for a step gets the same bytes.
Parts go to *receivers*: readers, and relays for the readers of their hosts. ``deal.part_flow`` bounds the bytes on
their way, and decides when a part is sent again.

A step is kept until every rank has returned it. After a process was replaced, steps are kept until the other ranks send
a message: more processes may be replaced, and go back.

The server knows the numbers of steps and packs, and no tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from streampack.core.deal.deal_stats import DealtFigures
from streampack.core.deal.part_flow import RESEND_S, PartFlows
from streampack.core.deal.step_cache import KeptSteps
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64, SampleTable
from streampack.core.model.steps import PlannedStep
from streampack.core.protocol.effects import Release, SendShard, SendTrainer
from streampack.core.protocol.events import Effect
from streampack.core.protocol.message import Bye, Envelope, Message, Reject
from streampack.core.protocol.relay_messages import NodeGet, relay_of
from streampack.core.protocol.trainer_messages import End, Get, ReaderPing, StepPart, Wait
from streampack.core.serve.progress import Progress
from streampack.core.serve.rank_reader import Ranks, Reader, Receiver
from streampack.core.serve.rank_registry import RankRegistry, rank_name
from streampack.core.serve.reader_link import ReaderLink
from streampack.core.serve.step_source import StepSource
from streampack.core.stats.data_wait import Missing, NextWaits, Starvation

MOST_QUEUED = 8 << 20
"""Most bytes in flight to one reader: later messages wait behind them, for 8 s on a link of 1 MB/s."""
KEPT_CHAINS = 4096
"""Number of the last steps whose digests are remembered."""
LOST_S = 3600.0
"""Seconds for which a relay that has gone without a goodbye is remembered."""
OUT = 1 << 62
"""Number of returned steps of a rank outside the iteration: more than any step, so that no step is kept for it."""


class RankProgress(NamedTuple):
    """The progress of one rank's reader, with the metrics of its client.

    Steps count in ``iteration``; ``silent_s`` is the seconds since the reader's last message. ``queued_bytes`` is 0
    if ``by_relay``: the parts are in flight to the relay.
    """

    ranks: Ranks
    where: str
    iteration: int
    done_upto: int
    have_upto: int
    queued_bytes: int
    silent_s: float
    stats: dict[str, float]
    starvation: Starvation | None
    by_relay: bool = False


class RelayProgress(NamedTuple):
    """A relay: the host of its ranks, their number in the attempt, and the bytes in flight to it.

    ``lost`` is True if the relay has gone without a goodbye.
    """

    host: str
    ranks: int
    queued_bytes: int
    lost: bool


class StepServer:
    """Keeps steps, sends them to the readers of the attempt, and deletes each when every rank has returned it."""

    def __init__(
        self, link: ReaderLink, rules: Rules, layout: str, table: SampleTable, registry: RankRegistry,
        source: StepSource, leaving_bytes: int,
    ) -> None:  # fmt: skip
        self._link, self._rules, self._layout = link, rules, layout
        self._registry, self._source = registry, source
        self.kept = KeptSteps(link.feed, rules, layout, table)
        self.returned = Progress()
        """Number of steps that each rank of the attempt has returned; empty before the first attempt."""
        self.unheard: set[Ranks] = set()
        """Ranks without a message since a process was replaced: all processes may be restarting."""
        self._heard: list[Ranks] = []
        """The other ranks of the attempt, if a process was replaced in it."""
        self._chains: dict[int, bytes] = {}
        """Digest of all steps before a step, by its number."""
        self._missing: Missing | None = None
        """Cause of the wait for the next step, computed once a tick for all readers."""
        self.relays: dict[bytes, Receiver] = {}
        """The relays, by the name of their connection."""
        self._lost_relays: dict[str, float] = {}
        """Hosts whose relay has gone without a goodbye, and when, in seconds."""
        self._starving: dict[Receiver, None] = {}
        """Receivers that have reported that a reader has no step to read."""
        self._said: tuple[str, str | None] | None = None
        """(reason, stream) of the last ``Wait`` to these receivers, if all got the same."""
        self.flows = PartFlows(leaving_bytes)
        self._held_back: dict[Receiver, None] = {}
        """Receivers that get no part until others confirm theirs, the oldest first."""
        self.released_upto = 0
        """Every rank has returned the steps before this one, which are deleted."""
        self.formed_upto = 0
        """The steps before this one are formed."""
        self.end: End | None = None
        """The end of the feed, once it is known."""
        self.draining = False
        """True if the broker stops, and no further step is formed."""
        self.next_waits = NextWaits()
        """Data wait of all ranks, by cause, as they report it."""

    def finish(self, num_steps: int, chain: bytes) -> list[Effect]:
        """End the iteration after ``num_steps`` steps; ``chain`` is the digest of all these steps."""
        self.end = End(feed=self._link.feed, lineage=self.lineage, num_steps=num_steps, chain=chain)
        return self.serve_all()

    def chain_of(self, step: int) -> bytes:
        """Return the digest of all steps before ``step``; empty for step 0 or if unknown."""
        return self._chains.get(step, b"")

    def note_chain(self, step: int, chain: bytes) -> None:
        """Record the digest of all steps before ``step``."""
        self._chains[step] = chain
        self._chains.pop(step - KEPT_CHAINS, None)

    def forget_chains(self, step: int) -> None:
        """Delete the digests of steps after ``step``, since different steps will follow."""
        self._chains = {at: chain for at, chain in self._chains.items() if at <= step}

    @property
    def lineage(self) -> int:
        """Number of the lineage of the steps that are served."""
        return self.kept.lineage

    @lineage.setter
    def lineage(self, lineage: int) -> None:
        self.kept.lineage = lineage

    @property
    def dealt(self) -> DealtFigures:
        """Statistics of the dealt steps: load and padding of the ranks."""
        return self.kept.figures

    @property
    def joined(self) -> bool:
        """True if an attempt has begun with all ranks, even if some ranks have left since."""
        return bool(self.returned) and bool(self._registry.held)

    @property
    def all_there(self) -> bool:
        """True if an attempt has begun with all ranks, and none has left."""
        return self.joined and len(self._registry.held) == self._registry.num_ranks

    @property
    def any_starved(self) -> bool:
        """True if an attached rank that wants to read has no step."""
        return any(
            reader.have_upto <= self.returned[ranks] < OUT if reader.entered else reader.ready
            for ranks, reader in self._registry.held.items()
        )

    @property
    def slowest(self) -> str:
        """A text that names the rank that has returned the fewest steps, and their number."""
        held = self._registry.held
        if not self.returned or not held:
            return "no rank is attached"
        ranks = min(self.returned, key=lambda ranks: (self.returned[ranks], ranks in held))
        if ranks not in held:
            when = "between two iterations" if self.returned[ranks] == OUT else f"after {self.returned[ranks]} steps"
            return f"{rank_name(ranks)} left {when}: restart all ranks from a checkpoint"
        return f"rank {held[ranks].mesh} at {held[ranks].where} has returned {self.returned[ranks]} steps"

    def stats(self) -> list[RankProgress]:
        """Return the progress of each reader that holds a rank, in the order of the ranks."""
        return [self.progress_of(reader) for _, reader in sorted(self._registry.held.items())]

    def progress_of(self, reader: Reader) -> RankProgress:
        """Return the progress of a reader that holds its rank."""
        ranks = reader.mesh.ranks
        return RankProgress(
            ranks, reader.where, reader.iteration, self.returned[ranks] if reader.entered else 0, reader.have_upto,
            0 if reader.receiver.is_relay else reader.receiver.flow.queued_bytes,
            round(self._registry.now - reader.heard, 3), reader.stats, reader.starvation, reader.receiver.is_relay,
        )  # fmt: skip

    def skip(self, first: int, last: int) -> None:
        """Skip steps ``first`` to ``last``, including kept steps: readers get only the digests of these steps."""
        self.kept.skip(first, last)

    def keep(self, step: PlannedStep, skipped: bool) -> None:
        """Keep the next step for readers, which get only its digests if it is ``skipped``."""
        self._missing = None  # the step after it may wait for something else
        self.kept.add(step, skipped)
        self.formed_upto = step.number + 1

    def forget_all(self, step: int) -> list[Effect]:
        """Delete all steps; ``step`` is formed next."""
        gone = [self.kept.forget(number) for number in range(self.released_upto, self.formed_upto)]
        self.released_upto = self.formed_upto = step
        self.end = None
        return [Release(handles) for handles in gone]

    def note_alive(self, reader: Reader) -> list[Effect]:
        """Record that a reader is alive and has not gone back; delete steps that were kept in case it had."""
        if reader.mesh.ranks not in self.unheard:
            return []
        self._hear(reader.mesh.ranks)
        return self.release()

    def _hear(self, ranks: Ranks) -> None:
        """Record that a rank has sent a message since a process was replaced."""
        self.unheard.remove(ranks)
        self._heard.append(ranks)

    def get(self, reader: Reader, message: Get) -> list[Effect]:
        """Answer a reader's request for steps: send parts, or tell the reader why its next step waits."""
        receiver = reader.receiver
        if receiver.is_relay:  # only its relay requests steps for it
            return []
        reader.have_upto = max(reader.have_upto, message.start)
        self._request(receiver, message)
        effects = self._note_done(reader, message.done_upto) + self.serve_held_back()
        served = self.serve(receiver)
        if served or message.start > message.done_upto:
            return effects + served
        self._starving[receiver] = None
        return effects + self.wait_for_step(receiver)

    def node_get(self, relay: Receiver, message: NodeGet) -> list[Effect]:
        """Answer a relay's request for steps: send parts for all its readers, or tell the relay why they wait."""
        if not relay.readers:
            return []
        self._request(relay, message)
        effects = self._note_all_done(relay, message.done) + self.serve_held_back()
        served = self.serve(relay)
        if served or message.start > min(self.returned[reader.mesh.ranks] for reader in relay.readers.values()):
            return effects + served
        self._starving[relay] = None
        return effects + self.wait_for_step(relay)

    def _request(self, receiver: Receiver, message: Get | NodeGet) -> None:
        """Take a request for steps; go back to its first part if the request proves that later parts are lost."""
        flow, now = receiver.flow, self._registry.now
        self.flows.request(flow, message.start, message.stop, message.part)
        if not flow.may_resend(message.request, now):
            return
        if receiver.is_relay:
            receiver.choose_ranks(self._rules, self._layout)
        returned = max((self.returned[reader.mesh.ranks] for reader in receiver.readers.values()), default=0)
        place = min(message.start, max(self.formed_upto, returned)), message.part
        self.flows.send_again(flow, max(place, (self.released_upto, 0)), message.request, now)

    def forget_missing(self) -> None:
        """Forget the cause of the wait for the next step, so that the cause is computed again."""
        self._missing = None

    def end_attempt(self) -> None:
        """Forget the ranks of the attempt."""
        self.returned.clear()
        self.unheard.clear()
        self._heard.clear()

    def begin(self, ranks: Iterable[Ranks]) -> None:
        """Begin an attempt of these ranks; no steps are kept for a rank until ``enter``."""
        self.end_attempt()
        for each in ranks:
            self.returned[each] = OUT

    def enter(self, reader: Reader) -> None:
        """Add a reader to the attempt, from the reader's first step on."""
        self.returned[reader.mesh.ranks] = reader.first_step
        self._join(reader, reader.first_step)

    def _join(self, reader: Reader, step: int) -> None:
        """Send the steps from ``step`` on to the receiver of a reader that takes part in the attempt.

        A relay that had readers in this attempt asks for the parts of a further reader by itself, where it lacks some.
        """
        receiver = reader.receiver
        if receiver.is_relay and receiver.fence == reader.fence:
            receiver.flow.resent_at = -RESEND_S
        else:
            self.flows.begin(receiver.flow, step)
            receiver.readers.clear()
            receiver.node = None
        receiver.fence = reader.fence
        receiver.readers[reader.name] = reader
        self._lost_relays.pop(receiver.host, None)

    def receiver_of(self, peer: bytes, host: str) -> Receiver:
        """Return the receiver of a reader on ``host`` whose connection is ``peer``: a new one, or its relay."""
        at = relay_of(peer)
        if at is None:
            return Receiver(peer)
        relay = self.relays.setdefault(at[0], Receiver(at[0], is_relay=True, heard=self._registry.now))
        relay.host = relay.host or host
        self._lost_relays.pop(relay.host, None)
        return relay

    def move(self, reader: Reader, step: int, host: str) -> None:
        """Send to a reader over its new connection; the parts in flight to the old one are lost.

        ``step`` is the first step that the reader's trainer is not done with.
        """
        before, at = reader.receiver, relay_of(reader.peer)
        if at is None and not before.is_relay:
            before.peer = reader.peer
            self.flows.forget_queue(before.flow)
            before.flow.resent_at = -RESEND_S
            return
        self.leave_attempt(reader)
        self.note_lost(before)
        reader.receiver = self.receiver_of(reader.peer, host)
        if reader.entered:
            self._join(reader, step)

    def leave_attempt(self, reader: Reader) -> None:
        """Send no more parts to a reader's connection, unless it is a relay with other readers."""
        receiver = reader.receiver
        receiver.readers.pop(reader.name, None)
        if not receiver.readers:
            self._stop_sending(receiver)

    def _stop_sending(self, receiver: Receiver) -> None:
        """Forget what a receiver waits for, and the parts that are on their way to it."""
        self._starving.pop(receiver, None)
        self._held_back.pop(receiver, None)
        self.flows.forget_queue(receiver.flow)

    def note_lost(self, receiver: Receiver) -> None:
        """Record that a relay has lost its last reader, which has moved or fallen silent, without a goodbye."""
        if receiver.is_relay and receiver.peer in self.relays and not receiver.readers:
            self._lost_relays.setdefault(receiver.host, self._registry.now)

    def leave_relay(self, peer: bytes) -> None:
        """Handle the goodbye of a relay: send no more parts to it. Its readers attach again by themselves."""
        if (relay := self.relays.pop(peer, None)) is not None:
            self._lost_relays.pop(relay.host, None)
            relay.node = None
            self._stop_sending(relay)

    def relay_stats(self) -> list[RelayProgress]:
        """Return the relays that are connected, and those that were lost in the last hour."""
        lost = self._lost_relays
        found = [
            RelayProgress(relay.host, len(relay.readers), relay.flow.queued_bytes, False)
            for relay in self.relays.values()
            if relay.host not in lost
        ]
        return found + [RelayProgress(host, 0, 0, True) for host in lost]

    def forget_relays(self, silent_s: float) -> None:
        """Forget the relays that were silent for ``silent_s`` seconds and for which no reader is registered."""
        used = {reader.receiver for reader in self._registry}
        now = self._registry.now
        self.relays = {
            peer: relay for peer, relay in self.relays.items() if relay in used or now - relay.heard <= silent_s
        }
        self._lost_relays = {host: since for host, since in self._lost_relays.items() if now - since < LOST_S}

    def await_others(self, ranks: Ranks) -> None:
        """Keep steps until every rank but ``ranks``, whose process was replaced, has sent a message."""
        if not self.returned:
            return
        if len(self.unheard) + len(self._heard) == len(self.returned):
            self.unheard.update(self._heard)  # thousands of processes may be replaced one after another
        else:
            self.unheard = set(self.returned)
        self.unheard.discard(ranks)
        self._heard = [ranks]

    def leave_iteration(self, ranks: Ranks) -> None:
        """Stop keeping steps for a rank that asks for a later iteration."""
        self.returned[ranks] = OUT

    def not_sent(self, peer: bytes, envelope: Envelope) -> None:
        """Record that a message for ``peer`` was dropped before it left; the part is sent again at the next message."""
        reader, message = self._registry.at(peer), envelope.message
        receiver = reader.receiver if reader is not None else self.relays.get(peer)
        if receiver is not None and isinstance(message, StepPart) and envelope.fence == receiver.fence:
            self.flows.not_sent(receiver.flow, (message.step, message.part), message.request)

    def most_queued(self, receiver: Receiver) -> int:
        """Return the most bytes that may be in flight to one reader, or to one relay."""
        share = self.flows.leaving_bytes // max(self._registry.num_ranks, 1)
        return min(MOST_QUEUED, share * max(len(receiver.readers), 1))

    def serve_held_back(self) -> list[Effect]:
        """Send parts to the receivers that had to wait until others confirmed their parts."""
        effects: list[Effect] = []
        while self._held_back and not self.flows.is_full:
            receiver = next(iter(self._held_back))
            del self._held_back[receiver]
            effects += self.serve(receiver)
        return effects

    def tell_starving(self, forming: bool = True) -> list[Effect]:
        """Tell the readers without a step the cause of their wait, if the cause has changed.

        If ``forming`` is False, readers get no message while the packer forms the step, which takes a moment.
        """
        if not self._starving:
            return []
        missing = self._source.waiting_for()
        if (missing.reason, missing.stream) == self._said or (missing.reason == "forming" and not forming):
            return []
        self._missing, self._said = missing, (missing.reason, missing.stream)
        return [e for receiver in list(self._starving) for e in self.wait_for_step(receiver)]

    def ping(self, reader: Reader, message: ReaderPing) -> list[Effect]:
        """Handle a reader's ping, which reports its progress; answer with the cause of its wait."""
        if reader.receiver.is_relay:
            return []
        effects = self.note_progress(reader, message.done_upto, message.have_upto)
        return effects + self.confirm(reader.receiver, message.have_upto, message.part)

    def confirm(self, receiver: Receiver, step: int, part: int) -> list[Effect]:
        """Record that a receiver has every part before ``part`` of ``step``; answer with the cause of its wait."""
        self.flows.confirm(receiver.flow, step, part)
        return self.serve_held_back() + self.wait_for_step(receiver)

    def note_progress(self, reader: Reader, done_upto: int, have_upto: int) -> list[Effect]:
        """Record the steps that a reader has returned and received; delete steps that all ranks returned."""
        reader.have_upto = max(reader.have_upto, have_upto)
        return self._note_done(reader, done_upto)

    def returned_by(self, part: int, parts: int) -> int:
        """Return how many steps the rank that reports part ``part`` of ``parts`` has returned; 0 if unknown.

        Ranks of the last pipeline stage report. Context-parallel ranks are one part, or have a part each.
        """
        found = self._reports(part, parts)
        return 0 if found is None else self.returned.get(found.ranks, 0)

    def rank_of(self, part: int, parts: int) -> Ranks | None:
        """Return the rank that reports part ``part`` of ``parts``; None if no rank of the present mesh does."""
        found = self._reports(part, parts)
        return None if found is None else found.ranks

    def samples_of(self, step: int, part: int, parts: int) -> I64 | None:
        """Return the ids of the samples that a rank may report for a step, int64 [n, 3]; None if they are unknown."""
        found = self._reports(part, parts)
        return None if found is None else self.kept.ids_of(step, found)

    def _reports(self, part: int, parts: int) -> Mesh | None:
        """Return the mesh of the rank that reports part ``part`` of ``parts``; None if no rank of this mesh does."""
        reader = next(iter(self._registry.held.values()), None)
        if reader is None or parts not in (reader.mesh.dp, reader.mesh.dp * reader.mesh.cp) or part >= parts:
            return None
        mesh = reader.mesh
        dp_rank, cp_rank = divmod(part, mesh.cp) if parts == mesh.dp * mesh.cp else (part, 0)
        return replace(mesh, dp_rank=dp_rank, cp_rank=cp_rank, tp_rank=0, pp_rank=mesh.pp - 1)

    def note_figures(self, reader: Reader, stats: dict[str, float], starvation: Starvation | None) -> None:
        """Keep the metrics and the data wait that a reader reports."""
        reader.stats = stats
        if starvation is not None:
            self.next_waits.add(reader.starvation, starvation)
            reader.starvation = starvation

    def _note_done(self, reader: Reader, done_upto: int) -> list[Effect]:
        """Record that a reader has returned the steps before ``done_upto``; delete steps that all ranks returned."""
        done_upto = min(done_upto, reader.receiver.flow.ever_sent[0])
        if done_upto <= self.returned[reader.mesh.ranks]:
            return []
        self.returned[reader.mesh.ranks] = done_upto
        return self.release()

    def _note_all_done(self, relay: Receiver, done: tuple[tuple[str, int], ...]) -> list[Effect]:
        """Record that readers of a relay are alive and have returned steps; delete steps that all ranks returned."""
        changed, ever_sent, returned = False, relay.flow.ever_sent[0], self.returned
        for name, done_upto in done:
            if (reader := relay.readers.get(name)) is None:
                continue
            ranks = reader.mesh.ranks
            reader.have_upto = max(reader.have_upto, done_upto)
            if ranks in self.unheard:
                self._hear(ranks)
                changed = True
            if (upto := min(done_upto, ever_sent)) > returned[ranks]:
                returned[ranks] = upto
                changed = True
        return self.release() if changed else []

    def release(self) -> list[Effect]:
        """Delete the steps that every rank has returned, unless a rank may still request such a step again."""
        last = OUT if self.end is None else self.end.num_steps
        if not self.joined or any(self.returned[ranks] < last for ranks in self.unheard):
            return []
        least = self.returned.least
        # No rank reads if all are outside the iteration.
        upto = self.released_upto if least == OUT else min(self.formed_upto, least)
        effects: list[Effect] = [Release(self.kept.forget(n)) for n in range(self.released_upto, upto)]
        self.released_upto = max(self.released_upto, upto)
        return effects

    @property
    def receivers(self) -> list[Receiver]:
        """The connections that receive the parts of the attempt, each once."""
        return list({reader.receiver: None for reader in self._registry if reader.entered})

    def serve_all(self) -> list[Effect]:
        """Send to every receiver the steps that it wants."""
        return [e for receiver in self.receivers for e in self.serve(receiver)]

    def serve(self, receiver: Receiver) -> list[Effect]:
        """Send to a receiver the formed steps that it wants, then the end of the feed or a goodbye."""
        flow = receiver.flow
        if not receiver.readers or (receiver.is_relay and receiver.node is None):
            return []
        effects: list[Effect] = []
        mesh = receiver.mesh
        while (number := max(flow.sent_upto, self.released_upto)) < min(flow.want_stop, self.formed_upto):
            if unfit := self.kept.unfit(number, mesh):
                return effects + self._send_all(receiver, Reject(code="too_few", detail=unfit))
            effects += self._send_parts(receiver, mesh, number)
            if flow.sent_upto <= number:
                return effects
        if self.end is not None and flow.sent_upto >= self.end.num_steps:
            effects += self._send_end(receiver)
        elif self.draining and flow.sent_upto >= self.formed_upto:
            effects += self._send_all(receiver, Bye(reason="the broker is stopping"))
        return effects

    def _send_all(self, receiver: Receiver, message: Message) -> list[Effect]:
        """Send a message to every reader of a receiver."""
        return [e for reader in list(receiver.readers.values()) for e in self._link.send(reader, message)]

    def _send_parts(self, receiver: Receiver, mesh: Mesh, number: int) -> list[Effect]:
        """Send the next parts of step ``number`` to a receiver, as far as the limits allow."""
        effects: list[Effect] = []
        flow, node = receiver.flow, receiver.node
        begin = flow.sent_part if flow.sent_upto == number else 0
        parts = (
            self.kept.parts(number, mesh, begin, flow.request)
            if node is None
            else self.kept.node_parts(number, node, begin, flow.request)
        )
        cp_ranks = (mesh.cp_rank,) if node is None else node.cp_ranks
        most = self.most_queued(receiver)
        while flow.sent_upto <= number and self.flows.may_send(flow, most):
            if self.flows.is_full:
                self._held_back[receiver] = None
                break
            plan, packs = next(parts)
            is_last = plan.part + 1 >= plan.parts
            size = self.kept.num_bytes(packs, mesh, plan.frames) if node is None else self.kept.node_bytes(packs, node)
            self.flows.sent(flow, (plan.step, plan.part), is_last, size)
            envelope = self._link.envelope(plan, receiver.fence)
            effects.append(
                SendShard(receiver.peer, envelope, packs, plan.frames, self._layout, mesh.cp, cp_ranks)
                if plan.micro_batches
                else SendTrainer(receiver.peer, envelope)
            )
        if effects:
            self._starving.pop(receiver, None)
        return effects

    def _send_end(self, receiver: Receiver) -> list[Effect]:
        """Tell a receiver that the feed has ended."""
        assert self.end is not None
        return self._link.send_to(receiver, msgspec.structs.replace(self.end, request=receiver.flow.request))

    def wait_for_step(self, receiver: Receiver) -> list[Effect]:
        """Tell a receiver the cause of its wait, if it has requested a step that it does not have."""
        flow = receiver.flow
        wants = flow.sent_upto < flow.want_stop
        if not receiver.readers or (not wants and not flow.queued):
            return []
        if wants and self.end is not None and flow.sent_upto >= self.end.num_steps:
            return self._send_end(receiver)
        if wants and flow.sent_upto < self.formed_upto and (served := self.serve(receiver)):
            return served
        if not wants or flow.sent_upto < self.formed_upto:
            to = "the relay of this rank" if receiver.is_relay else "this rank"
            detail = f"step {flow.sent_upto}: {flow.queued_bytes} bytes are in flight to {to}"
            return self._send_wait(receiver, Missing("network", detail))
        if self._missing is None:
            self._missing = self._source.waiting_for()
        missing = self._missing
        if (missing.reason, missing.stream) != self._said:
            self._said = None
        return self._send_wait(receiver, missing)

    def _send_wait(self, receiver: Receiver, missing: Missing) -> list[Effect]:
        """Send a receiver the cause of its wait."""
        flow = receiver.flow
        wait = Wait(
            feed=self._link.feed, step=flow.sent_upto, part=flow.sent_part, request=flow.request,
            reason=missing.reason, detail=missing.detail[:2000], stream=missing.stream, batch=missing.batch,
        )  # fmt: skip
        return self._link.send_to(receiver, wait)
