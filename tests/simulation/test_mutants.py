"""The test of the simulation: take a rule of the protocol away, and some seed must fail.

Each mutant names its rule (R1 to R10 are those of the recovery design) and takes it out of the
real code for the length of a test.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

import msgspec
import numpy as np
import pytest
from streampack_services.broker.arena import Arena

from streampack.core.deal import dealt_steps
from streampack.core.deal.assignment import PaddedStep, deal_padded, split
from streampack.core.deal.dealt_steps import StepDealer
from streampack.core.deal.part_flow import PartFlows
from streampack.core.deal.step_cache import KeptSteps
from streampack.core.feed.feed import Feed
from streampack.core.feed.merged_memory import MergedMemory
from streampack.core.feed.outbox import Outbox
from streampack.core.feed.planner import Planner
from streampack.core.form import former
from streampack.core.form.former import Former, Request
from streampack.core.intake import admission
from streampack.core.intake.admission import Admission
from streampack.core.intake.credits import Credits
from streampack.core.intake.intake import Intake, Recorded
from streampack.core.intake.leases import Leases
from streampack.core.intake.partition_accounts import PartitionAccounts
from streampack.core.intake.producers import ConnectedProducer
from streampack.core.journal.history import History
from streampack.core.journal.log_effects import Recalled
from streampack.core.journal.log_records import ChunkAdmitted
from streampack.core.media.media_counts import MediaOfChunk
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64
from streampack.core.model.steps import PlannedStep
from streampack.core.protocol.effects import Formed, Store
from streampack.core.protocol.events import Effect, FromBroker, Send
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.producer_messages import Eos, Flow, Hello, ProducerPing, Samples
from streampack.core.protocol.step_part import StepPart
from streampack.core.protocol.trainer_messages import Get, ReaderPing
from streampack.core.serve.attempts import AttemptCoordinator
from streampack.core.serve.rank_reader import ReaderPhase
from streampack.core.serve.rank_registry import RankRegistry
from streampack.core.serve.readers import Readers
from streampack.core.serve.receivers import Receivers
from streampack.core.serve.served_steps import ServedSteps
from streampack.core.serve.snapshot_requests import SnapshotRequests
from streampack.core.sessions.client_session import ClientSession
from streampack.core.sessions.producer_session import ProducerSession
from tests.simulation.checks import BrokerChecks
from tests.simulation.data import (
    FIRST_ARRIVAL,
    FIRST_BATCH,
    FIRST_PADDED,
    FIRST_PUSHED,
    FIRST_READ_BATCH,
    MEDIA_CASES,
    NUM_CASES,
)
from tests.simulation.mutating import Patch, expect_failure, wrap
from tests.simulation.world import World, run

SLOW_S = 0.5
ALL, ARRIVAL, PUSHED = range(FIRST_BATCH), range(FIRST_ARRIVAL, FIRST_BATCH), range(FIRST_PUSHED, FIRST_BATCH)
GROUPS = range(FIRST_PUSHED, FIRST_READ_BATCH)
BATCHES, PADDED = range(FIRST_BATCH, FIRST_PADDED), range(FIRST_PADDED, NUM_CASES)
MUTANTS: list[Any] = []


def mutant(
    rule: str, cases: range = ALL, work_s: float | None = None, first: int = 0
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Register a mutant under the rule that it breaks; only some cases may show it, or ranks that are slow.

    The search begins at seed ``first``: one that showed it, where few do. It goes on from there when it does no more.
    """

    def register(patch: Callable[[Patch], None]) -> Callable[[Patch], None]:
        name = f"{rule}-{patch.__name__}{'-slowly' if work_s else ''}"
        MUTANTS.append(pytest.param(patch, cases, work_s, first, id=name))
        return patch

    return register


@pytest.mark.parametrize(("patch", "cases", "work_s", "first"), MUTANTS)
def test_a_rule_that_is_taken_out_is_missed(
    patch: Callable[[Patch], None], cases: range, work_s: float | None, first: int, monkeypatch: Patch
) -> None:
    patch(monkeypatch)
    expect_failure(patch.__name__, first, lambda seed: run(seed, cases[seed % len(cases)], work_s))


def _without(effects: list[Effect], *kinds: type) -> list[Effect]:
    return [e for e in effects if not (isinstance(e, Send) and isinstance(e.envelope.message, kinds))]


def _changed(envelope: Envelope, **changes: int) -> Envelope:
    return msgspec.structs.replace(envelope, **changes)


@mutant("passes", first=5)
def the_end_of_a_pass_is_not_told(patch: Patch) -> None:
    def chunk(original: Any, self: ProducerSession, chunk: Any) -> Any:
        return original(self, msgspec.structs.replace(chunk, pass_ended=False))

    wrap(patch, ProducerSession, "_hold_chunk", chunk)


@mutant("passes", first=4)
def what_a_stopped_feed_holds_is_kept(patch: Patch) -> None:
    patch.setattr(Leases, "close", lambda self, origin: [])


@mutant("R3")
def a_step_goes_out_before_all_ranks_are_there(patch: Patch) -> None:
    patch.setattr(RankRegistry, "all_wait", lambda self: any(reader.ready for reader in self.held.values()))


@mutant("R4")
def a_step_is_forgotten_when_the_fastest_rank_returned_it(patch: Patch) -> None:
    def has_returned(original: Any, self: ServedSteps, reader: Any, done_upto: int) -> Any:
        most = max(*self.returned.values(), done_upto, 0)
        for ranks in self.returned:
            self.returned[ranks] = most
        return original(self, reader, done_upto)

    wrap(patch, ServedSteps, "_has_returned", has_returned)


@mutant("R4")
def a_step_is_dealt_anew_each_time_it_is_read(patch: Patch) -> None:
    times = count()

    def parts(original: Any, self: KeptSteps, number: int, mesh: Mesh, *more: int) -> Any:
        self._steps[number].dealt = None
        return original(self, number, mesh, *more)

    def in_order(original: Any, self: StepDealer, placed: Any, mesh: Mesh) -> Any:
        return original(self, placed._replace(dealt=np.roll(placed.dealt, next(times))), mesh)

    wrap(patch, StepDealer, "_in_order", in_order)
    wrap(patch, KeptSteps, "parts", parts)


@mutant("R5")
def samples_of_an_old_session_are_taken(patch: Patch) -> None:
    def receive(original: Any, self: Leases, peer: bytes, envelope: Envelope, now: float) -> Any:
        if isinstance(envelope.message, Samples | Eos):
            p = self.partitions.find(envelope.message.stream, envelope.message.partition)
            assert p is not None
            envelope = _changed(envelope, fence=self.partitions.intakes[p].session)
        return original(self, peer, envelope, now)

    wrap(patch, Leases, "receive", receive)


@mutant("R5")
def producers_of_an_old_broker_are_believed(patch: Patch) -> None:
    def receive(original: Any, self: Leases, peer: bytes, envelope: Envelope, now: float) -> Any:
        return original(self, peer, _changed(envelope, epoch=self._identity.epoch), now)

    wrap(patch, Leases, "receive", receive)


@mutant("R5", first=3)
def readers_of_an_old_broker_or_attempt_are_believed(patch: Patch) -> None:
    def receive(original: Any, self: Readers, peer: bytes, envelope: Envelope, now: float) -> Any:
        reader = self.registry.at(peer)
        fence = envelope.fence if reader is None else reader.fence
        return original(self, peer, _changed(envelope, epoch=self._identity.epoch, fence=fence), now)

    wrap(patch, Readers, "receive", receive)


@mutant("R5")
def a_producer_believes_an_old_broker(patch: Patch) -> None:
    def receive(original: Any, self: ProducerSession, event: FromBroker) -> Any:
        epoch = max(event.envelope.epoch, self.epoch)
        return original(self, FromBroker(_changed(event.envelope, epoch=epoch)))

    wrap(patch, ProducerSession, "_receive", receive)


@mutant("R5", first=42)
def a_client_believes_an_old_broker(patch: Patch) -> None:
    def receive(original: Any, self: ClientSession, event: FromBroker) -> Any:
        epoch = max(event.envelope.epoch, self.epoch)
        return original(self, FromBroker(_changed(event.envelope, epoch=epoch)))

    wrap(patch, ClientSession, "_receive", receive)


@mutant("R5")
def a_partition_moves_without_a_new_session(patch: Patch) -> None:
    def begin(original: Any, self: Credits, p: int) -> None:
        if not self._partitions.intakes[p].session:
            original(self, p)

    wrap(patch, Credits, "begin", begin)


@mutant("R6")
def credits_are_added_up(patch: Patch) -> None:
    def flow(original: Any, self: ProducerSession, flow: Flow, session: int) -> Any:
        held = self.held.get((flow.stream, flow.partition))
        granted = held.window.grant_bytes if held is not None else 0
        return original(self, msgspec.structs.replace(flow, grant_bytes=granted + flow.grant_bytes), session)

    wrap(patch, ProducerSession, "_on_flow", flow)


@mutant("R6")
def credits_forget_what_waits_for_the_merge(patch: Patch) -> None:
    patch.setattr(Intake, "grant_bytes", property(lambda self: self.session_bytes + self.quota_bytes))


@mutant("R6", first=8)
def credits_of_an_old_session_count(patch: Patch) -> None:
    def flow(original: Any, self: ProducerSession, flow: Flow, session: int) -> Any:
        held = self.held.get((flow.stream, flow.partition))
        return original(self, flow, held.session[1] if held is not None else session)

    wrap(patch, ProducerSession, "_on_flow", flow)


@mutant("R9", first=5)
def a_client_does_not_ping(patch: Patch) -> None:
    wrap(patch, ClientSession, "_tick", lambda original, self, now: _without(original(self, now), ReaderPing))


@mutant("R9", first=33)
def a_client_does_not_ask_again(patch: Patch) -> None:
    wrap(patch, ClientSession, "_tick", lambda original, self, now: _without(original(self, now), Get))


@mutant("R9", first=14)
def a_producer_does_not_say_how_far_it_has_sent(patch: Patch) -> None:
    patch.setattr(
        ProducerSession, "_repeat_end_or_sent", lambda self, held: [self._end_message(held)] if held.ended else []
    )


@mutant("R9", first=101)
def a_producer_says_the_end_once(patch: Patch) -> None:
    wrap(
        patch,
        ProducerSession,
        "_repeat_end_or_sent",
        lambda original, self, held: [] if held.ended else original(self, held),
    )


@mutant("R9", first=97)
def a_producer_does_not_ping(patch: Patch) -> None:
    wrap(patch, ProducerSession, "_tick", lambda original, self, now: _without(original(self, now), ProducerPing))


@mutant("R9")
def a_producer_says_hello_once(patch: Patch) -> None:
    def handle(original: Any, self: ProducerSession, event: Any) -> Any:
        effects = original(self, event)
        return effects if self._now < 0.6 else _without(effects, Hello)

    wrap(patch, ProducerSession, "handle", handle)


@mutant("R9", first=10)
def credits_are_said_once(patch: Patch) -> None:
    def flow(original: Any, self: Credits, p: int, repeat: bool = False) -> Any:
        return original(self, p, repeat and not self._granted[p])

    wrap(patch, Credits, "flow", flow)


@mutant("go-back-N")
def a_gap_is_not_asked_for(patch: Patch) -> None:
    patch.setattr(Credits, "again", lambda self, p: [])


@mutant("go-back-N")
def a_chunk_is_taken_whatever_its_number(patch: Patch) -> None:
    def samples(
        original: Any, self: Leases, message: Samples, producer: ConnectedProducer, p: int, envelope: Envelope
    ) -> Any:
        placed = msgspec.structs.replace(message, base_seq=self.partitions.intakes[p].expected_seq)
        return original(self, placed, producer, p, envelope)

    wrap(patch, Leases, "_on_samples", samples)


@mutant("go-back-N")
def a_client_takes_a_step_with_parts_missing_before_it(patch: Patch) -> None:
    def part(original: Any, self: ClientSession, message: Any, envelope: Envelope) -> Any:
        self.arrivals.have_upto = max(self.arrivals.have_upto, message.step)
        return original(self, message, envelope)

    wrap(patch, ClientSession, "_on_part", part)


@mutant("loss", first=10)
def what_was_sent_before_a_word_proves_no_loss(patch: Patch) -> None:
    patch.setattr(ClientSession, "_on_sent_upto", lambda self, *sent: [])


@mutant("loss", first=10)
def a_proof_of_loss_is_not_believed(patch: Patch) -> None:
    patch.setattr(PartFlows, "send_again", lambda self, flow, place, request, now: None)


@mutant("queues")
def any_number_of_bytes_is_on_its_way(patch: Patch) -> None:
    patch.setattr(PartFlows, "may_send", lambda self, flow, most_queued: True)
    patch.setattr(PartFlows, "is_full", False)


@mutant("queues")
def what_a_reader_confirms_is_not_heard(patch: Patch) -> None:
    patch.setattr(PartFlows, "confirm", lambda self, flow, step, part: None)


@mutant("queues")
def what_is_queued_for_a_reader_that_is_gone_counts_for_ever(patch: Patch) -> None:
    def leave(original: Any, self: Receivers, reader: Any) -> None:
        if reader.name in self._registry._names:
            original(self, reader)

    wrap(patch, Receivers, "leave", leave)


@mutant("brought", first=949)
def a_snapshot_is_asked_for_once_even_if_the_question_is_lost(patch: Patch) -> None:
    def should_ask(original: Any, self: SnapshotRequests, reader: Any, now: float) -> bytes | None:
        known = reader.pending is not None and self.expects(reader.pending.snapshot_digest)
        return None if known else original(self, reader, now)

    wrap(patch, SnapshotRequests, "should_ask", should_ask)


@mutant("no timer touches FORM")
def packs_are_formed_of_what_is_there(patch: Patch) -> None:
    def request(original: Any, self: Former, max_steps: int = 1) -> Request | None:
        found = original(self, max_steps)
        return None if found is None else dataclasses.replace(found, closed=True)

    wrap(patch, Former, "request", request)


@mutant("in place", first=28)
def a_client_forgets_where_it_was_when_it_attaches_again(patch: Patch) -> None:
    def handle(original: Any, self: ClientSession, event: Any) -> Any:
        if isinstance(event, FromBroker) and event.envelope.epoch > self.epoch > 0:
            self.arrivals.have_upto = self.arrivals.done_upto
        return original(self, event)

    wrap(patch, ClientSession, "handle", handle)


@mutant("rounds", first=31)
def an_iteration_begins_before_all_ranks_are_through_with_the_one_before(patch: Patch) -> None:
    def arrive(original: Any, self: AttemptCoordinator, reader: Any) -> Any:
        if self._steps.returned and reader.iteration > self.iteration:
            for other in self._registry.held.values():
                other.iteration, other.first_step = reader.iteration, 0
                other.phases.go(ReaderPhase.HOLDS_READY)
        return original(self, reader)

    wrap(patch, AttemptCoordinator, "arrive", arrive)


@mutant("rounds")
def an_iteration_has_no_attempt_of_its_own(patch: Patch) -> None:
    def opened(original: Any, self: AttemptCoordinator) -> Any:
        self.number = max(self.number - 1, 0)
        return original(self)

    wrap(patch, AttemptCoordinator, "_begin", opened)


@mutant("rounds")
def a_client_takes_the_steps_of_any_iteration(patch: Patch) -> None:
    def receive(original: Any, self: ClientSession, event: FromBroker) -> Any:
        before, envelope = self.attempt, event.envelope
        if isinstance(envelope.message, StepPart) and envelope.epoch == self.epoch:
            self.attempt = envelope.fence
        effects = original(self, event)
        self.attempt = before
        return effects

    wrap(patch, ClientSession, "_receive", receive)


@mutant("rounds")
def a_feed_does_not_go_back(patch: Patch) -> None:
    patch.setattr(Feed, "go_to", lambda self, *more, **options: [])


@mutant("rounds")
def a_feed_goes_back_without_new_sessions(patch: Patch) -> None:
    def go_to(original: Any, self: Leases, feed: str, floors: Any, held: Any) -> Any:
        before = [intake.session for intake in self.partitions.intakes]
        original(self, feed, floors, held)
        for intake, session in zip(self.partitions.intakes, before, strict=True):
            intake.session = session
        return [e for p in self.partitions.of_feed(feed) for e in self.credits.lease(p)]

    wrap(patch, Leases, "go_to", go_to)


@mutant("rounds", first=26)
def a_choice_from_before_a_feed_went_back_is_taken(patch: Patch) -> None:
    def formed(original: Any, self: Feed, event: Formed) -> Any:
        assert isinstance(event.request, Request)
        self.planner.forming = event.request
        return original(self, event)

    wrap(patch, Feed, "formed", formed)


@mutant("feeds")
def producers_go_when_everything_is_taken(patch: Patch) -> None:
    wrap(patch, Leases, "dismiss", lambda original, self, done: original(self, self.partitions.ended))


@mutant("feeds")
def a_feed_takes_more_than_its_share_of_the_memory(patch: Patch) -> None:
    patch.setattr(MergedMemory, "room", property(lambda self: 1 << 20))


@mutant("R1", PUSHED)
def samples_are_said_to_be_safe_before_they_are(patch: Patch) -> None:
    wrap(patch, Recorded, "note_safe", lambda original, self, upto: original(self, 1 << 60))


@mutant("R1", PUSHED)
def samples_are_lost_that_were_said_to_be_safe(patch: Patch) -> None:
    """Seen only in what becomes of them: the check of each acknowledgment is off."""
    patch.setattr(BrokerChecks, "_flow", lambda self, session, flow: None)
    patch.setattr(World, "_check_credit", lambda self, *more: None)
    samples_are_said_to_be_safe_before_they_are(patch)


@mutant("R2")
def a_step_goes_out_before_its_record_is_safe(patch: Patch) -> None:
    def hand_out(original: Any, self: Outbox) -> Any:
        self._waiting = deque(i._replace(lsn=-1) if isinstance(i.step, PlannedStep) else i for i in self._waiting)
        return original(self)

    wrap(patch, Outbox, "hand_out", hand_out)


def ranks_get_other_steps_when_the_record_of_the_first_is_lost(patch: Patch) -> None:
    """Seen only in what ranks get: the check of each step that goes out is off."""
    patch.setattr(BrokerChecks, "_is_safe", lambda self, lsn: True)
    a_step_goes_out_before_its_record_is_safe(patch)


mutant("R2", ARRIVAL, first=305)(ranks_get_other_steps_when_the_record_of_the_first_is_lost)
mutant("R2", work_s=SLOW_S)(a_step_goes_out_before_its_record_is_safe)


@mutant("R5", first=113)
def a_process_that_was_replaced_is_not_fenced(patch: Patch) -> None:
    patch.setattr(RankRegistry, "_fence", lambda self, last, by: None)


@mutant("R7", ARRIVAL, first=3)
def the_log_is_cut_at_the_latest_snapshot(patch: Patch) -> None:
    patch.setattr(History, "wanted_lsn", lambda self, step: self._places[-1].lsn if self._places else 0)


@mutant("R8")
def the_end_is_recorded_each_time(patch: Patch) -> None:
    def close(original: Any, self: Feed) -> Any:
        self.history.end = None
        return original(self)

    wrap(patch, Feed, "_close", close)


@mutant("R8", first=7)
def the_end_goes_out_before_its_record_is_safe(patch: Patch) -> None:
    def hand_out(original: Any, self: Outbox) -> Any:
        self._waiting = deque(i if isinstance(i.step, PlannedStep) else i._replace(lsn=-1) for i in self._waiting)
        return original(self)

    wrap(patch, Outbox, "hand_out", hand_out)


@mutant("R8")
def the_end_is_recorded_before_the_last_step(patch: Patch) -> None:
    def publish(original: Any, self: Feed, steps: Any) -> Any:
        return original(self, steps[:-1] if self.planner.former.finished else steps)

    wrap(patch, Feed, "_publish", publish)


@mutant("batch", BATCHES)
def what_waits_behind_a_batch_is_packed_with_it(patch: Patch) -> None:
    def batch_size(original: Any, self: Former) -> Any:
        return len(self._handles) if original(self) else 0

    wrap(patch, Former, "_batch_size", batch_size)


@mutant("groups", GROUPS)
def a_pack_splits_a_group(patch: Patch) -> None:
    patch.setattr(former, "item_sizes", lambda keeps, *_: np.ones(len(keeps), np.int64))


@mutant("groups", GROUPS, first=3)
def a_pack_that_is_split_for_a_mesh_splits_a_group(patch: Patch) -> None:
    def split_anywhere(bounds: I64, costs: I64, _: Any, count: int) -> Any:
        return split(bounds, costs, np.zeros(len(costs), np.uint8), count)

    patch.setattr(dealt_steps, "split", split_anywhere)


@mutant("groups", GROUPS)
def a_batch_ends_inside_a_group(patch: Patch) -> None:
    patch.setattr(admission, "KEEPS", {"pack": 1, "step": 0})


@mutant("groups", GROUPS)
def a_group_that_comes_out_of_the_log_is_none(patch: Patch) -> None:
    def recalled(original: Any, self: PartitionAccounts, event: Recalled) -> Any:
        assert isinstance(event.record, ChunkAdmitted)
        record = msgspec.structs.replace(event.record, keep=msgspec.UNSET)
        return original(self, msgspec.structs.replace(event, record=record))

    wrap(patch, PartitionAccounts, "recalled", recalled)


@mutant("groups", GROUPS, first=22)
def a_snapshot_knows_no_groups(patch: Patch) -> None:
    def state(original: Any, self: Former) -> Any:
        return msgspec.structs.replace(original(self), keeps=msgspec.UNSET)

    wrap(patch, Former, "state", state)


@mutant("batch", PADDED)
def a_rank_pads_its_rows_to_its_own_longest(patch: Patch) -> None:
    def deal(rules: Rules, lengths: I64, dp: int, pp: int) -> PaddedStep:
        found, each = deal_padded(rules, lengths, dp, pp), rules.align.pack
        own = [-(-int(lengths[pack].max(initial=1)) // each) * each for pack in found.packs]
        return dataclasses.replace(found, widths=np.array(own, np.int64))

    patch.setattr(dealt_steps, "deal_padded", deal)


@mutant("media", MEDIA_CASES)
def two_samples_get_the_media_of_each_other(patch: Patch) -> None:
    """Swap the media of two neighboring samples of a chunk, whose media have equally many bytes."""

    def store_media(original: Any, self: Arena, handles: I64, bounds: I64, frame: Any) -> None:
        sizes, bounds = bounds[1] - bounds[0], bounds.copy()
        for i in np.flatnonzero((sizes[1:] == sizes[:-1]) & (sizes[1:] > 0))[:1].tolist():
            bounds[:, [i, i + 1]] = bounds[:, [i + 1, i]]
        original(self, handles, bounds, frame)

    wrap(patch, Arena, "store_media", store_media)


@mutant("media", MEDIA_CASES, first=9)
def media_of_samples_that_come_again_are_lost(patch: Patch) -> None:
    def fill_in(original: Any, self: Admission, *more: Any) -> list[Effect]:
        bare = {"media": None, "media_bounds": None}
        effects: list[Effect] = original(self, *more)
        return [msgspec.structs.replace(e, **bare) if isinstance(e, Store) else e for e in effects]

    wrap(patch, Admission, "_fill_in", fill_in)


@mutant("media", MEDIA_CASES, first=2)
def media_that_are_read_from_the_log_do_not_count_in_the_quota(patch: Patch) -> None:
    wrap(patch, Intake, "may_keep", lambda original, self, tokens, extra_bytes=0: original(self, tokens))


@mutant("media", MEDIA_CASES, first=12)
def a_snapshot_knows_no_media(patch: Patch) -> None:
    def state(original: Any, self: Former) -> Any:
        return msgspec.structs.replace(original(self), media=msgspec.UNSET)

    wrap(patch, Former, "state", state)


@mutant("media", MEDIA_CASES[2:4])
def packs_keep_no_limits_for_media(patch: Patch) -> None:
    """In cases that are packed offline at the end, without limits, too."""
    patch.setattr(Former, "_limited", lambda self, size: None)


@mutant("media", MEDIA_CASES, first=2)
def a_group_is_not_too_much_if_each_of_its_samples_fits(patch: Patch) -> None:
    """Such a group has a pack of its own, which exceeds a limit."""
    patch.setattr(MediaOfChunk, "total", lambda self: self)


@mutant("R10", first=7)
def a_snapshot_holds_no_window(patch: Patch) -> None:
    def state(original: Any, self: Former) -> Any:
        return msgspec.structs.replace(original(self), window=b"", ages=[])

    wrap(patch, Former, "state", state)


@mutant("R10", first=90)
def a_snapshot_holds_no_pending_packs(patch: Patch) -> None:
    def state(original: Any, self: Former) -> Any:
        return msgspec.structs.replace(original(self), pending=b"", counts=[])

    wrap(patch, Former, "state", state)


@mutant("R10", first=7)
def a_partition_is_read_again_from_behind_the_window(patch: Patch) -> None:
    wrap(patch, PartitionAccounts, "floors", lambda original, self, feed, held: original(self, feed, held[:0]))


@mutant("script", ARRIVAL)
def the_merge_is_not_told_the_recorded_order(patch: Patch) -> None:
    def restore(original: Any, self: Planner, taken: Any) -> Any:
        order, self._history.order = self._history.order, []
        try:
            return original(self, taken)
        finally:
            self._history.order = order

    wrap(patch, Planner, "restore", restore)
