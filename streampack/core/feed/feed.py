"""A feed: streams with their own rules, from the merge to the readers. Trainers connect to a feed.

A feed merges its streams' samples, and gets steps formed from them (``planner``). It records each step (``recorder``),
and serves it to its ``readers`` (``outbox``). It does not touch another feed. No other feed uses its streams, and each
feed numbers its own streams. So a feed's steps do not depend on the other feeds of a run.

To go to a step, the feed restores a snapshot at or before it, and reads the samples of that window again. It forms the
steps in between again, without serving them. In this way a broker resumes after a crash, and trainers go back to a
checkpoint. A new iteration of a finite feed goes to step 0, which needs no snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec import UNSET

from streampack.core.deal.dynamic_cp.cp_plan import GroupRequest
from streampack.core.feed.checkpoints import Checkpoints
from streampack.core.feed.merged_memory import MergedMemory
from streampack.core.feed.mixture import FeedMixture
from streampack.core.feed.outbox import Outbox
from streampack.core.feed.pacing import Pacing
from streampack.core.feed.planner import Planner
from streampack.core.feed.result_requests import ResultRequests
from streampack.core.feed.snapshot_check import SnapshotCheck
from streampack.core.feed.stream_waits import StreamWaits
from streampack.core.form.form_stats import FormedFigures
from streampack.core.intake.leases import Leases
from streampack.core.journal.history import History
from streampack.core.journal.journal import Journal
from streampack.core.journal.log_effects import Recall, Recalled
from streampack.core.journal.log_records import (
    ChangeAsked,
    CheckpointCommitted,
    FeedFacts,
    LineageBegan,
    PolicyPublished,
    Record,
    RulesChanged,
    SnapshotTaken,
    ValuesReported,
)
from streampack.core.journal.recorder import Recorder
from streampack.core.model.capacity import FeedPlan
from streampack.core.model.keys.stage_keys import Stage, StageBegin
from streampack.core.model.mesh import DynamicCp
from streampack.core.model.rule_changes import Difference, Scheduled
from streampack.core.model.rules import Rules, first_difference
from streampack.core.model.samples import I64, SampleTable
from streampack.core.model.snapshot import Snapshot
from streampack.core.model.steps import PlannedStep
from streampack.core.protocol.effects import Form, Formed, Release
from streampack.core.protocol.events import Effect, Report
from streampack.core.protocol.message import Identity
from streampack.core.protocol.trainer_messages import MixedStream, State
from streampack.core.results.step_values import StepValues
from streampack.core.serve.readers import Readers
from streampack.core.stats.data_wait import Missing

FORMING = Missing("forming", "the step is being packed")


class Feed:
    """One feed of a broker; ``table``, ``leases`` and ``journal`` are shared with the other feeds.

    At most ``steps_ahead`` formed steps wait until every rank has returned them.
    """

    def __init__(
        self, identity: Identity, plan: FeedPlan, max_sample_tokens: int, steps_ahead: int, table: SampleTable,
        leases: Leases, journal: Journal,
    ) -> None:  # fmt: skip
        self.plan, self.name, self.rules = plan, plan.name, plan.rules
        self._steps_ahead = steps_ahead
        self._table, self._leases, self._journal = table, leases, journal
        name, rules = plan.name, plan.rules
        dealt_by = UNSET if DynamicCp.of(plan.layout) is None else plan.layout
        self.history = History(rules, sum(stream.partitions for stream in rules.streams), dealt_by)
        self.memory = MergedMemory(plan.merged_tokens, rules, max_sample_tokens, table, plan.max_extra_bytes)
        self._recorder = Recorder(name, self.history, journal, table)
        self.planner = Planner(
            name, rules, self.history, self.memory, max_sample_tokens, table, leases, self._recorder
        )  # fmt: skip
        self.readers = Readers(
            identity, name, rules, plan.layout, table, self, plan.max_readers, plan.leaving_bytes
        )  # fmt: skip
        self.steps = self.readers.steps
        """The formed steps, and how many of them each rank has returned."""
        self._outbox = Outbox(self.readers, self.history, journal, leases)
        self._checkpoints = Checkpoints(name, rules, plan.keeps, self.history, journal, table)
        self._snapshot_check = SnapshotCheck(
            name, rules, self.history, self.planner.live, self.memory, leases.partitions
        )
        self.results = StepValues(identity, name, journal, lambda ids: leases.partitions.sent_as(name, ids))
        """Values that trainers report for samples of steps."""
        self._pacing = Pacing(name, rules, self.planner, self.history, self.memory, self.steps, leases)
        self._mixture = FeedMixture(self.planner, self.history, self.steps, leases)
        self._stream_waits = StreamWaits(name, rules, self.planner, self.steps, leases)
        self.result_requests = ResultRequests(
            identity, name, self.planner.live, self.history, self.readers, self.results, journal, leases, self.safe
        )
        """Handles the messages about results."""
        self.figures = FormedFigures(plan.rules, dealt_by is not UNSET)
        self._waits_for: int | None = None
        """LSN of the snapshot to restore, while it is read from the log."""
        self.failed = ""
        """Error text, if nothing more can be served: the data have changed, or a batch does not fit in memory."""
        self._failed_code = ""

    @property
    def finished(self) -> bool:
        """True if every rank has returned every step, and no reader is attached."""
        steps = self.steps
        returned = steps.end is not None and steps.released_upto >= steps.end.num_steps
        return returned and not self.readers.num_readers

    @property
    def next_step(self) -> int:
        """Number of the step that is formed next."""
        return self.planner.former.next_step

    @property
    def waste(self) -> I64:
        """Padding of the delivered packs in tokens, by cause, int64 [``padding.CAUSES``]."""
        return self.figures.waste + self.steps.dealt.waste

    @property
    def delivered_tokens(self) -> int:
        """Tokens of the delivered packs: those of samples, and padding."""
        return self.figures.delivered_tokens + self.steps.dealt.delivered_tokens

    @property
    def latest_rules(self) -> Rules:
        """The rules after every requested change."""
        return self.planner.live.latest

    def waiting_for(self) -> Missing:
        """Return the cause of the wait for the next step."""
        planner = self.planner
        if self.failed:
            return Missing("failed", self.failed)
        if waits := self._outbox.waiting_for():
            return waits
        if planner.forming is not None:
            return FORMING
        if self._is_ahead:
            return self.steps.wait_for_ranks("peers")
        if self.memory.room <= 0:
            return self.steps.wait_for_ranks("memory", "the arena is full: ")
        if planner.blocked is None:
            return FORMING
        if self._journal.full and self.history.in_order:
            return Missing("log", self._journal.full)
        return self._pacing.waiting_for() or self._stream_waits.of(planner.blocked)

    # Forming steps

    def advance(self) -> list[Effect]:
        """Merge samples, request the packs of the next step, and serve steps, as far as possible now."""
        effects: list[Effect] = []
        planner = self.planner
        while not planner.ended and not self.steps.draining and not self.failed:
            effects += planner.fill()
            if planner.overlong:
                effects += self._fail("overlong", planner.overlong)
                break
            if planner.forming is not None or self._is_ahead:
                break
            if steps := planner.complete():
                effects += self._publish(steps)
                continue
            if request := planner.request():
                effects += request
                break
            if (released := self._pacing.release()) is not None:
                effects += released
                continue
            if not planner.former.closed:
                effects += self._fail("memory", planner.overfull) if planner.overfull else []
                break
            effects += self._publish(planner.cut())  # the feed has ended, or its next pass begins
        return (
            effects + self._outbox.hand_out() + self.readers.sender.tell_starving(forming=False) + self._pacing.grant()
        )

    def tick(self, now: float) -> list[Effect]:
        """Note the time, in seconds; complete results of steps that are done."""
        self._pacing.tick(now)
        self.results.subscribers.tick(now)
        return self.results.carry(self.steps.returned_by)

    def formed(self, event: Formed) -> list[Effect]:
        """Make the steps of a packer's choice, or take the plan of a step, and serve steps.

        A choice is ignored if the feed has moved to another step.
        """
        if isinstance(event.request, GroupRequest):
            event.request.plan = event.choice
            return self._outbox.hand_out()
        if event.request is not self.planner.forming:
            return []
        return self._publish(self.planner.formed(event))

    def settle(self, effects: list[Effect]) -> list[Effect]:
        """Free the rows of samples that the effects release, and return the effects."""
        for effect in effects:
            if isinstance(effect, Release):
                self.memory.release(effect.handles)
                self._leases.accounts.forget(effect.handles)
                self._table.free(effect.handles)
        return effects

    @property
    def _is_ahead(self) -> bool:
        """True if ``steps_ahead`` steps are formed that some rank has not returned."""
        return self.next_step >= self.steps.released_upto + self._steps_ahead

    def _publish(self, steps: list[PlannedStep]) -> list[Effect]:
        """Record formed steps, put them into the outbox, and take a snapshot or end the pass if due."""
        effects: list[Effect] = []
        for step in steps:
            self.figures.add(step, self._table)
            effects += self._record_step(step)
            if self.failed:
                return effects
            request = self.steps.request(step)
            effects += [] if request is None else [Form(self.name, request)]
            self._outbox.put(step, request)
        if steps and (taken := self.planner.snapshot()) is not None:
            effects += self._recorder.record_snapshot(taken)
            self.history.forget_snapshots(self.steps.released_upto, self._journal.keeps)
        if self.planner.former.finished and not self.planner.ended:
            effects += self._close()
        return effects + self._outbox.hand_out()

    def _record_step(self, step: PlannedStep) -> list[Effect]:
        """Record a step, or fail the feed if the step differs from the recorded one."""
        if not self._recorder.contradicts(step):
            return self._recorder.record_step(step, self.steps.released_upto)
        return self._fail(
            "diverged",
            f"step {step.number} differs from the recorded step, although every compared sample is the same. The data, "
            f"the tokenizer or the version of streampack has changed. Undo the change, or start a new run.",
        )

    def _fail(self, code: str, why: str) -> list[Effect]:
        """Fail the feed: log the error, and reject every reader with it."""
        self.failed, self._failed_code = why, code
        return [Report("error", f"feed {self.name!r}: {why}", feed=self.name), *self.readers.fail(code, why)]

    def _close(self) -> list[Effect]:
        """End the pass, or the feed, once every merged sample is in a step; record the tail and the end."""
        effects: list[Effect] = []
        dropped = self.planner.end_pass()
        if len(dropped):
            first = self._table.rows(dropped[:1]).tobytes()
            tail = self.readers.attempts.iteration, self.history.lineage, self.next_step, first
            self.figures.drop(self._table.length[dropped], tail)
            effects += [*self._recorder.record_tail(self.next_step, dropped), Release(dropped)]
        if self.planner.ended:
            end = self.next_step, self.planner.former.chain
            effects += [*self._recorder.record_end(*end), *self._never_begun()]
            self._outbox.put(end)
        return effects

    def _never_begun(self) -> list[Effect]:
        """Return a warning for changes that the feed ended before, and for streams that pause at its end."""
        waits = [f"change {change.id} ({change.name}) at {change.at}" for change in self.history.pending]
        paused = [stream.name for stream in self.planner.live.current.streams if stream.weight and stream.paused]
        texts = [f"before {', '.join(waits)}"] if waits else []
        texts += [f"while {', '.join(paused)} paused. Samples that are left there are in no step"] if paused else []
        if not texts:
            return []
        text = f"feed {self.name!r} has ended after {self.next_step:,} steps {', and '.join(texts)}"
        return [Report("warning", text, feed=self.name, step=self.next_step)]

    # Going to a step

    def all_rules(self) -> Sequence[Rules]:
        """Return the rules at the begin of the run, and after each change that took effect or is to come."""
        return self.planner.live.every()

    def unfit(self, step: int, snapshot: Snapshot | None) -> tuple[str, str] | None:
        """Return why the feed cannot go to ``step`` with a snapshot, as (error code, error text); None if it can."""
        if self.failed:
            return self._failed_code, self.failed
        oldest = self.history.oldest_step
        if step < oldest:
            return "step_gone", (
                f"got a request to start at step {step}, expected step {oldest} or later, because the log no longer "
                f"has the order of earlier steps. Start from a newer checkpoint. `retain.checkpoints` sets the number "
                f"of checkpoints for which the log keeps the order."
            )
        wrong = self._snapshot_check.fault(snapshot) if snapshot is not None and snapshot.step <= step else ""
        return ("snapshot", f"the checkpoint's snapshot: {wrong}") if wrong else None

    def knows(self, snapshot: Snapshot) -> bool:
        """Return whether the log has all rule changes and skipped steps of a checkpoint's snapshot."""
        return self.history.knows(snapshot)

    def rewind(self, step: int, snapshot: Snapshot | None, back: bool) -> list[Effect]:
        """Go to ``step``, which trainers request and which is not the next step.

        Args:
            step: The step.
            snapshot: Snapshot of the trainers' checkpoint.
            back: True if the trainers had returned ``step`` before. Then the rules may demand that pushed samples that
                came since are dropped, and that a new lineage begins with other steps.
        """
        effects: list[Effect] = []
        self._checkpoints.go_back(step)
        discards = self.plan.discards and back and step < self.history.num_steps
        if discards:
            since = self.history.begin_of(step)
            why = (
                f"trainers went back from step {self.history.num_steps} to {step}, and samples pushed since are dropped"
            )
            effects += self._branch(step, why, since)
            effects += self._leases.records.discard(self.name)
            self._leases.staging.discard(self.name, since)
        return effects + self.go_to(step, snapshot, discards)

    def go_to(self, step: int, snapshot: Snapshot | None = None, anew: bool = False) -> list[Effect]:
        """Go to a state from which ``step`` is the next served step; readers must keep no steps.

        Args:
            step: The step.
            snapshot: Snapshot of the trainers' checkpoint.
            anew: True to restore a snapshot even if the feed could continue from its current state.
        """
        recorded, here = self.history.nearest(step), self.next_step
        nearest = max(recorded[0] if recorded is not None else 0, snapshot.step if snapshot is not None else 0)
        effects: list[Effect] = []
        knows_more = snapshot is not None and not self.history.knows(snapshot)
        if not knows_more and (chain := self.history.chain_after(step - 1)) is not None:
            effects += self.readers.attempts.check(step, chain)
        if nearest <= here <= step and not self.planner.ended and not anew and not knows_more:
            return effects + self._outbox.hand_out()
        handles = np.concatenate([self.planner.reset(), *self._outbox.clear()])
        self._waits_for = None
        if len(handles):
            effects.append(Release(handles))
        if step or self.figures.totals.steps:
            effects.append(Report("info", f"feed {self.name!r} continues with step {step}", feed=self.name, step=step))
        if snapshot is not None and (recorded is None or snapshot.step > recorded[0] or knows_more):
            return effects + self._adopt(snapshot, step)
        if recorded is None or recorded[2] is not None:
            return effects + self.planner.restore(recorded[2] if recorded is not None else None)
        self._waits_for = recorded[1]
        return [*effects, Recall(self.name, recorded[1])]

    def recalled(self, event: Recalled) -> list[Effect]:
        """Handle a snapshot that was read from the log: restore it, or answer the readers that asked for a state."""
        if not isinstance(event.record, SnapshotTaken):
            return []
        taken = event.record.snapshot
        self.history.keep(taken)
        effects = self.readers.questions.tell_states()
        if event.lsn == self._waits_for:
            self._waits_for = None  # another read of this record is for a state only
            effects += self.planner.restore(taken)
        return effects

    def _adopt(self, snapshot: Snapshot, step: int) -> list[Effect]:
        """Restore the snapshot of a checkpoint at ``step``; record the changes and skips that the log lacks."""
        effects: list[Effect] = []
        history = self.history
        for change in snapshot.placed[len(history.changes) :]:
            history.forget_after(change.position)
            if change.step < history.num_steps:  # steps formed before the trainer came, which no rank has had
                effects += self._branch(change.step, f"a checkpoint knows of {change.note}")
            effects += self._recorder.record_change(change)
        numbers = {change.id for change in history.asked} | {change.id for change in history.changes}
        for request in snapshot.asked:
            if request.id in numbers:
                continue
            if request.at.step is not None:  # the trainers had the steps before ``step`` without this change
                begin = max(request.at.step, step)
                request = msgspec.structs.replace(request, at=StageBegin(step=begin))
                if begin < history.num_steps:  # steps formed before the trainer came, which no rank has had
                    effects += self._branch(begin, f"a checkpoint knows of {request.name}")
            effects += self._recorder.record_asked(request)
        for number in snapshot.canceled:
            begins = [change.step for change in history.changes if change.id == number]
            if begins and begins[0] < history.num_steps:
                effects += self._branch(begins[0], f"a checkpoint knows that change {number} was canceled")
            if number not in history.canceled:
                effects += self._recorder.record_canceled(number)
        self.planner.live.know_asked()
        for first, last in snapshot.skips:
            if (first, last) not in history.skips:
                effects += self._recorder.record_skip(first, last)
        history.begin_at(snapshot.step)
        if snapshot.step > history.last_snapshot:
            effects += self._recorder.record_snapshot(snapshot)
        return effects + self.planner.restore(snapshot)

    def _branch(self, step: int, why: str, since: int | None = None) -> list[Effect]:
        """Begin a new lineage at ``step``, and record the reason ``why``.

        Pushed samples that the log admitted in records from number ``since`` on are dropped. With None, none are.
        """
        effects = self._recorder.begin_lineage(step, why, since)
        self.steps.kept.lineage = self.history.lineage
        self.steps.forget_chains(step)
        self.results.pending.branch(self.history.lineage)
        return effects

    # The log

    def safe(self, upto: int) -> list[Effect]:
        """Record that all log records before ``upto`` are safe: confirm commits, and serve steps."""
        committed = self.readers.questions.committed(self._checkpoints.safe(upto))
        return committed + self.readers.questions.tell_states() + self._outbox.hand_out() + self.results.safe()

    def recover(self, lsn: int, record: Record) -> None:
        """Apply a record of an earlier broker while this broker starts."""
        self._recorder.recover(lsn, record)
        if isinstance(record, RulesChanged):
            self.planner.live.recover_change()
        elif isinstance(record, ChangeAsked):
            self.planner.live.know_asked()
        elif isinstance(record, CheckpointCommitted):
            self._checkpoints.recover(record.step)
        elif isinstance(record, ValuesReported):
            self.results.add(lsn, record)
        elif isinstance(record, PolicyPublished):
            self.result_requests.recover(record)
        elif isinstance(record, LineageBegan):
            self.results.pending.branch(record.lineage)

    def recover_facts(self, facts: FeedFacts, released: int) -> None:
        """Apply the facts that replace deleted records; raise ValueError if their rules are not this feed's."""
        differs = first_difference(self.rules, facts.rules)
        if differs:
            raise ValueError(f"feeds.{self.name}: {differs} as the log has it")
        self.history.recover(facts, released)
        published, self.history.published = self.history.published, None
        self.result_requests.recover(published)
        self.planner.live.know_asked()

    def begin(self) -> list[Effect]:
        """Start after all records were applied: go to the first step that some rank has not returned."""
        step = self.steps.formed_upto
        self.steps.kept.lineage = self.history.lineage
        ignored = self.result_requests.begin()
        effects = self._leases.records.discard(self.name) + ignored  # the last broker may not have recorded lost ones
        return effects + self.go_to(step, anew=True) if self.history.order or step else []

    @property
    def wanted_lsn(self) -> int:
        """LSN below which the feed needs no records (R7)."""
        return self._checkpoints.wanted_lsn(self.steps.released_upto)

    # Requests

    def change(self, ask: Difference, at: StageBegin | None, note: str) -> tuple[list[Effect], Scheduled]:
        """Change the rules, from ``at`` or a later step on.

        Args:
            ask: The change.
            at: The requested begin; None for the first step that no rank has had.
            note: Text to record.

        Returns:
            The effects, and the change.

        Raises:
            ValueError: The feed has ended, the change is not possible, or memory is short.
        """
        # steps that are formed again, or that a trainer has had from another broker, keep their rules
        unformed = max(self.next_step, self.history.num_steps, self.readers.attempts.known_upto)
        if isinstance(ask, Stage) and unformed == self.next_step and self.planner.has_begun:
            unformed += 1
        effects, change = self.planner.live.ask(ask, unformed, at, note)
        begin = f"after {change.at} in steps" if change.at.step is None else f"from {change.at} on"
        text = f"feed {self.name!r} changes {begin}: {note}"
        report = Report("info", text, feed=self.name, step=change.at.step)
        return [report, *effects], change

    def cancel(self, number: int, note: str) -> list[Effect]:
        """Cancel the waiting change with this number. Raises ValueError if none waits."""
        text = f"feed {self.name!r} cancels change {number}" + (f": {note}" if note else "")
        effects = self.planner.live.cancel(number, note)
        return [Report("info", text, feed=self.name), *effects]

    def skip(self, first: int, last: int, note: str = "") -> list[Effect]:
        """Skip steps ``first`` to ``last``; raise ValueError for steps that a rank may have had.

        ``note``: a person's reason, which is recorded with the skip.
        """
        if not 0 <= first <= last:
            raise ValueError(f"got steps {first} to {last}, expected 0 <= first step <= last step")
        if self.steps.joined and first < self.steps.formed_upto:
            raise ValueError(
                f"got step {first}, expected step {self.steps.formed_upto} or later, because ranks may have read "
                f"earlier steps. To skip step {first}, stop the trainers, skip the step, and restart the trainers "
                f"from a checkpoint before step {first}."
            )
        self.steps.kept.skip(first, last)
        why = f": {note}" if note else ""
        report = Report("info", f"feed {self.name!r} skips steps {first} to {last}{why}", feed=self.name, step=first)
        return [report, *self._recorder.record_skip(first, last, note)]

    def state_of(self, step: int) -> State | list[Effect]:
        """Return the state of a checkpoint at ``step``, or the effects that fetch it; an empty list if unknown."""
        return self._checkpoints.state_of(step)

    def mixture(self) -> list[MixedStream]:
        """Return the streams, and how they are mixed now and in the steps that every rank has returned."""
        return self._mixture.streams()

    def commit(self, step: int) -> list[Effect]:
        """Record that the checkpoint at ``step`` is durable, and confirm it once the record is safe."""
        if step > max(self.history.num_steps, self.steps.formed_upto):
            text = f"feed {self.name!r}: ignored the commit of step {step}, which the feed has not formed"
            return [Report("warning", text, feed=self.name, step=step)]
        return self._checkpoints.commit(step) + self.safe(self._journal.safe_upto)
