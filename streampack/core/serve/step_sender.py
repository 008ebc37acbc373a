"""Sends the steps of one feed to the ranks of the attempt, and tells receivers why their next step waits.

A step goes out whole, to every rank (R3). Reads are pure (R4): a reader that asks again for a step gets the same bytes.
A part is sent again only if a request proves that it was lost (``deal.part_flow``).
"""

from __future__ import annotations

from msgspec import UNSET
from msgspec.structs import replace

from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Rules
from streampack.core.protocol.effects import SendShard, SendTrainer
from streampack.core.protocol.events import Effect
from streampack.core.protocol.message import Bye, Message, Reject
from streampack.core.protocol.relay_messages import NodeGet
from streampack.core.protocol.trainer_messages import End, Get, ReaderPing, Wait
from streampack.core.serve.rank_reader import Reader, ReaderLink, Receiver
from streampack.core.serve.rank_registry import RankRegistry
from streampack.core.serve.receivers import Receivers
from streampack.core.serve.served_steps import ServedSteps
from streampack.core.serve.step_source import StepSource
from streampack.core.stats.data_wait import Missing


class StepSender:
    """Sends kept steps to the receivers of the attempt."""

    def __init__(
        self, link: ReaderLink, rules: Rules, layout: str, registry: RankRegistry, steps: ServedSteps,
        receivers: Receivers, source: StepSource,
    ) -> None:  # fmt: skip
        self._link, self._rules, self._layout, self._registry = link, rules, layout, registry
        self._steps, self._receivers, self._source = steps, receivers, source
        self._flows = receivers.flows
        self._missing: Missing | None = None
        """Cause of the wait for the next step, computed once a tick for all readers."""
        self._told_cause: tuple[str, str | None] | None = None
        """(reason, stream) of the last ``Wait`` to receivers without a step, if all got the same."""

    def get(self, reader: Reader, message: Get) -> list[Effect]:
        """Answer a reader's request for steps: send parts, or tell the reader why its next step waits."""
        receiver = reader.receiver
        if receiver.is_relay:  # only its relay requests steps for it
            return []
        self._request(receiver, message)
        effects = self._steps.note_progress(reader, message.done_upto, message.start) + self.serve_held_back()
        return effects + self._serve_or_wait(receiver, message.start <= message.done_upto)

    def node_get(self, relay: Receiver, message: NodeGet) -> list[Effect]:
        """Answer a relay's request for steps: send parts for all its readers, or tell the relay why they wait."""
        if not relay.readers:
            return []
        self._request(relay, message)
        effects = self._steps.note_all_done(relay, message.done) + self.serve_held_back()
        least = min(self._steps.returned[reader.mesh.ranks] for reader in relay.readers.values())
        return effects + self._serve_or_wait(relay, message.start <= least)

    def _serve_or_wait(self, receiver: Receiver, starves: bool) -> list[Effect]:
        """Send parts; if there are none, and a reader ``starves`` without a step, tell the receiver the cause."""
        served = self.serve(receiver)
        if served or not starves:
            return served
        self._receivers.starving[receiver] = None
        return self.wait_for_step(receiver)

    def _request(self, receiver: Receiver, message: Get | NodeGet) -> None:
        """Take a request for steps; go back to its first part if the request proves that later parts are lost."""
        flow, steps, now = receiver.flow, self._steps, self._registry.now
        self._flows.request(flow, message.start, message.stop, message.part)
        if not flow.may_resend(message.request, now):
            return
        if receiver.is_relay:
            receiver.choose_ranks(self._rules, self._layout)
        returned = max((steps.returned[reader.mesh.ranks] for reader in receiver.readers.values()), default=0)
        place = min(message.start, max(steps.formed_upto, returned)), message.part
        self._flows.send_again(flow, max(place, (steps.released_upto, 0)), message.request, now)

    def forget_missing(self) -> None:
        """Forget the cause of the wait for the next step, so that the cause is computed again."""
        self._missing = None

    def serve_held_back(self) -> list[Effect]:
        """Send parts to the receivers that had to wait until others confirmed their parts."""
        effects: list[Effect] = []
        held_back = self._receivers.held_back
        while held_back and not self._flows.is_full:
            receiver = next(iter(held_back))
            del held_back[receiver]
            effects += self.serve(receiver)
        return effects

    def tell_starving(self, forming: bool = True) -> list[Effect]:
        """Tell the readers without a step the cause of their wait, if the cause has changed.

        If ``forming`` is False, readers get no message while the packer forms the step, which takes a moment.
        """
        if not self._receivers.starving:
            return []
        missing = self._source.waiting_for()
        if (missing.reason, missing.stream) == self._told_cause or (missing.reason == "forming" and not forming):
            return []
        self._missing, self._told_cause = missing, (missing.reason, missing.stream)
        return [e for receiver in list(self._receivers.starving) for e in self.wait_for_step(receiver)]

    def ping(self, reader: Reader, message: ReaderPing) -> list[Effect]:
        """Handle a reader's ping, which reports its progress; answer with the cause of its wait."""
        if reader.receiver.is_relay:
            return []
        effects = self._steps.note_progress(reader, message.done_upto, message.have_upto)
        return effects + self.confirm(reader.receiver, message.have_upto, message.part)

    def confirm(self, receiver: Receiver, step: int, part: int) -> list[Effect]:
        """Record that a receiver has every part before ``part`` of ``step``; answer with the cause of its wait."""
        self._flows.confirm(receiver.flow, step, part)
        return self.serve_held_back() + self.wait_for_step(receiver)

    def serve_all(self) -> list[Effect]:
        """Send to every receiver the steps that it wants."""
        return [e for receiver in self._receivers.entered for e in self.serve(receiver)]

    def serve(self, receiver: Receiver) -> list[Effect]:
        """Send to a receiver the formed steps that it wants, then the end of the feed or a goodbye."""
        flow, steps = receiver.flow, self._steps
        if not receiver.readers or (receiver.is_relay and receiver.node is None):
            return []
        effects: list[Effect] = []
        mesh = receiver.mesh
        while (number := max(flow.sent_upto, steps.released_upto)) < min(flow.want_stop, steps.formed_upto):
            if refused := self._refuse(receiver, number):
                return effects + refused
            effects += self._send_parts(receiver, mesh, number)
            if flow.sent_upto <= number:
                return effects
        if steps.end is not None and flow.sent_upto >= steps.end.num_steps:
            effects += self._send_end(receiver, steps.end)
        elif steps.draining and flow.sent_upto >= steps.formed_upto:
            effects += self._send_all(receiver, Bye(reason="the broker is stopping"))
        return effects

    def _refuse(self, receiver: Receiver, number: int) -> list[Effect]:
        """Return the messages to a receiver that cannot have step ``number``; none if it can."""
        mesh, steps = receiver.mesh, self._steps
        end, stage = steps.end_for(number, mesh), steps.kept.stage_of(number)
        if end is not None or (stage is not UNSET and stage.rules is not UNSET):
            old = [reader for reader in receiver.readers.values() if not reader.knows_stages]
            if old:
                why = (
                    f"step {number} has other rules than the first steps of this run, which versions of streampack "
                    f"before 0.2 cannot read. Install version 0.2 or later for this trainer, and for the relay of its "
                    f"host"
                )
                return [e for reader in old for e in self._link.send(reader, Reject(code="version", detail=why))]
        if end is not None:
            return self._send_end(receiver, end)
        if unfit := steps.kept.unfit(number, mesh):
            return self._send_all(receiver, Reject(code="too_few", detail=unfit))
        return []

    def _send_all(self, receiver: Receiver, message: Message) -> list[Effect]:
        """Send a message to every reader of a receiver."""
        return [e for reader in list(receiver.readers.values()) for e in self._link.send(reader, message)]

    def _send_parts(self, receiver: Receiver, mesh: Mesh, number: int) -> list[Effect]:
        """Send the next parts of step ``number`` to a receiver, as far as the limits allow."""
        effects: list[Effect] = []
        flow, node, kept = receiver.flow, receiver.node, self._steps.kept
        begin = flow.sent_part if flow.sent_upto == number else 0
        parts = (
            kept.parts(number, mesh, begin, flow.request)
            if node is None
            else kept.node_parts(number, node, begin, flow.request)
        )
        cp_ranks = (mesh.cp_rank,) if node is None else node.cp_ranks
        most = self._receivers.most_queued(receiver)
        while flow.sent_upto <= number and self._flows.may_send(flow, most):
            if self._flows.is_full:
                self._receivers.held_back[receiver] = None
                break
            plan, packs = next(parts)
            is_last = plan.part + 1 >= plan.parts
            size = kept.num_bytes(packs, mesh, plan.frames) if node is None else kept.node_bytes(packs, node)
            self._flows.sent(flow, (plan.step, plan.part), is_last, size)
            envelope = self._link.envelope(plan, receiver.fence)
            effects.append(
                SendShard(receiver.peer, envelope, packs, plan.frames, self._layout, mesh.cp, cp_ranks)
                if plan.micro_batches
                else SendTrainer(receiver.peer, envelope)
            )
        if effects:
            self._receivers.starving.pop(receiver, None)
        return effects

    def _send_end(self, receiver: Receiver, end: End) -> list[Effect]:
        """Tell a receiver that the feed has ended, or ends for its mesh."""
        return self._link.send_to(receiver, replace(end, request=receiver.flow.request))

    def wait_for_step(self, receiver: Receiver) -> list[Effect]:
        """Tell a receiver the cause of its wait, if it has requested a step that it does not have."""
        flow, end, formed_upto = receiver.flow, self._steps.end, self._steps.formed_upto
        wants = flow.sent_upto < flow.want_stop
        if not receiver.readers or (not wants and not flow.queued):
            return []
        if wants and end is not None and flow.sent_upto >= end.num_steps:
            return self._send_end(receiver, end)
        if wants and flow.sent_upto < formed_upto and (served := self.serve(receiver)):
            return served
        if not wants or flow.sent_upto < formed_upto:
            to = "the relay of this rank" if receiver.is_relay else "this rank"
            detail = f"step {flow.sent_upto}: {flow.queued_bytes} bytes are in flight to {to}"
            return self._send_wait(receiver, Missing("network", detail))
        if self._missing is None:
            self._missing = self._source.waiting_for()
        missing = self._missing
        if (missing.reason, missing.stream) != self._told_cause:
            self._told_cause = None
        return self._send_wait(receiver, missing)

    def _send_wait(self, receiver: Receiver, missing: Missing) -> list[Effect]:
        """Send a receiver the cause of its wait."""
        flow = receiver.flow
        wait = Wait(
            feed=self._link.feed, step=flow.sent_upto, part=flow.sent_part, request=flow.request,
            reason=missing.reason, detail=missing.detail[:2000], stream=missing.stream, batch=missing.batch,
        )  # fmt: skip
        return self._link.send_to(receiver, wait)
