"""A feed: streams with their own rules, from the merge to the readers. Trainers connect to a feed.

A feed merges its streams' samples, and gets steps formed from them (``planner``). It records each step (``recorder``),
and serves it to its ``readers`` (``outbox``). It does not touch another feed. No other feed uses its streams, and each
feed numbers its own streams. So a feed's steps do not depend on the other feeds of a run.

To go to a step, the feed restores a snapshot at or before it, and reads the samples of that window again. It forms the
steps in between again, without serving them. In this way a broker resumes after a crash, and trainers go back to a
checkpoint. A new iteration of a finite feed goes to step 0, which needs no snapshot.
"""

from __future__ import annotations

import msgspec
import numpy as np

from streampack.core.feed.checkpoints import Checkpoints
from streampack.core.feed.merged_memory import MergedMemory
from streampack.core.feed.outbox import Outbox
from streampack.core.feed.planner import Planner
from streampack.core.feed.snapshot_check import SnapshotCheck
from streampack.core.form.form_stats import FormedFigures
from streampack.core.intake.leases import Leases
from streampack.core.journal.history import History
from streampack.core.journal.journal import Journal
from streampack.core.journal.log_effects import Recall, Recalled
from streampack.core.journal.log_records import (
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
from streampack.core.model.bounded import MOST_VERSION
from streampack.core.model.capacity import FeedPlan
from streampack.core.model.rules import Rules, first_difference
from streampack.core.model.samples import I64, SampleTable
from streampack.core.model.snapshot import Snapshot
from streampack.core.model.steps import PlannedStep
from streampack.core.protocol.effects import Formed, Release
from streampack.core.protocol.events import Effect, Report
from streampack.core.protocol.handlers import Handlers
from streampack.core.protocol.message import Envelope, Identity
from streampack.core.protocol.result_messages import ABOUT_RESULTS, AskResults, Publish, ReportValues
from streampack.core.protocol.trainer_messages import State
from streampack.core.results.step_values import StepValues
from streampack.core.serve.readers import Readers
from streampack.core.staging.tickets import LEARN_S, InFlight
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
        self._identity = identity
        self._steps_ahead = steps_ahead
        self._table, self._leases, self._journal = table, leases, journal
        self._partitions, self._producers = leases.partitions, leases.producers
        name, rules = plan.name, plan.rules
        self.history = History(rules, sum(stream.partitions for stream in rules.streams))
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
        self.figures = FormedFigures(plan.rules)
        self._waits_for: int | None = None
        """LSN of the snapshot to restore, while it is read from the log."""
        self._now, self._first_tick = 0.0, -1.0
        self.failed = ""
        """Error text, if nothing more can be served: the data have changed, or a batch does not fit in memory."""
        self._failed_code = ""
        self._ignored: int | None = None
        """Version of a published policy in the log that no trainer can have published."""

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
            return Missing("peers", self.steps.slowest)
        if self.memory.room <= 0:
            return Missing("memory", f"the arena is full: {self.steps.slowest}")
        if planner.blocked is not None and self._journal.full and self.history.in_order:
            return Missing("log", self._journal.full)
        if planner.blocked is not None:
            if waits := self._pacing_waits_for():
                return waits
            missing = self._partitions.of_feed(self.name)[planner.blocked]
            stream = self._partitions.name_of(missing)
            if lost := self._lost_text(missing):
                return Missing("stream", lost, stream)
            if late := self._late_text(missing, stream):
                return Missing("stream", late, stream, batch=True)
            end = f"end_of_batch call for batch {self._partitions.intakes[missing].recorded.num_marks}"
            if not self._ends_by_marks:
                who = self._producers.describe(missing)
                if not (planner.merge.current.has_barriers and self._partitions.stream_of[missing].terms.pushed):
                    pushed = self._partitions.stream_of[missing].terms.pushed
                    alive = pushed and self._producers.pushed_from(missing) is not None
                    text = f"the next sample of {who}" if alive else f"the next sample has not come from {who}"
                    return Missing("stream", text, stream, batch=alive)
                both = f"no sample and no {end} has come from {who}, but another partition ended this batch"
                return Missing("stream", both, stream)
            if (where := self._producers.pushed_from(missing)) is None:
                return Missing("stream", f"no {end} has come from {self._producers.describe(missing)}", stream)
            partition = missing - self._partitions.stream_of[missing].first
            text = f"the {end} of stream {stream!r} partition {partition} from the producer at {where}"
            return Missing("stream", text, stream, batch=True)
        return FORMING

    def _late_text(self, p: int, stream: str) -> str:
        """Return a text that names the samples of partition ``p`` that wait for late fields; empty if none does."""
        waits = self._leases.staging.waiting([p])
        if waits is None or not waits.samples:
            return ""
        return (
            f"{waits.samples} samples of stream {stream!r} partition {p - self._partitions.stream_of[p].first}, which "
            f"lack late fields. The oldest has waited {waits.oldest_s:.0f} s for {', '.join(waits.fields)}"
        )

    def _pacing_waits_for(self) -> Missing | None:
        """Return the cause of a wait that is due to pacing; None if there is none."""
        if not self.rules.paces:
            return None
        if self._learns:
            text = "the first reports of programs, because the broker has just started"
            return Missing("stream", text, self._partitions.name_of(self._partitions.of_feed(self.name)[0]), batch=True)
        if (oldest := self._in_the_way) is None:
            return None
        producer = self._producers.named(oldest.producer)
        doing = f"are being generated by {producer.where}" if producer is not None else "lack late fields"
        stream = self._partitions.name_of(self._partitions.of_feed(self.name)[0])
        text = (
            f"{oldest.samples} samples of policy {oldest.version}, which {doing}. The step keeps room for them, "
            f"because they would be too old for a later one (max_policy_lag: {self.rules.max_policy_lag})"
        )
        return Missing("stream", text, stream, batch=True)

    @property
    def _ends_by_marks(self) -> bool:
        """True if each batch ends where the pushing programs end it, instead of after a fixed number of samples."""
        batch = self.plan.rules.batch
        return batch is not None and batch.samples is None

    def _lost_text(self, p: int) -> str:
        """Return an error text if the log lacks pushed samples of steps that trainers have already read; else empty."""
        stream, begins = self._partitions.stream_of[p], self.steps.released_upto
        if not stream.terms.pushed or self._partitions.intakes[p].behind or self.planner.former.next_step >= begins:
            return ""
        return (
            f"samples that were pushed to stream {stream.terms.name!r} are lost. Trainers continue at step {begins}, "
            f"but the log holds only the samples of steps before step {self.planner.former.next_step}. Restore the "
            f"state_dir that has the lost samples, or start a new run."
        )

    # Forming steps

    def advance(self) -> list[Effect]:
        """Merge samples, request the packs of the next step, and serve steps, as far as possible now."""
        effects: list[Effect] = []
        planner = self.planner
        while not planner.ended and not self.steps.draining and not self.failed:
            effects += planner.fill()
            if planner.forming is not None or self._is_ahead:
                break
            if request := planner.request():
                effects += request
                break
            if self.rules.paces and (released := self._release()) is not None:
                effects += released
                continue
            if not planner.former.closed:
                effects += self._fail("memory", planner.overfull) if planner.overfull else []
                break
            effects += self._publish(planner.cut())  # the feed has ended, or its next pass begins
        effects += self._outbox.hand_out() + self.readers.sender.tell_starving(forming=False)
        return effects + (self._grant() if self.rules.paces else [])

    # Pacing

    def _release(self) -> list[Effect] | None:
        """Admit the samples that were begun first, for the next step of a paced feed; None if none may be admitted."""
        if self.planner.former.closed or self._learns or self._in_the_way is not None:
            return None
        return self._leases.staged.release(self.name)

    def _grant(self) -> list[Effect]:
        """Give tickets to programs that want to generate samples, and credit to one for which the next step waits."""
        if self._learns:
            return []
        oldest = self._in_the_way
        effects = [] if oldest is None else self._leases.staged.make_room(oldest.producer)
        told, merged = self._leases.credits.told(self.name), self.memory.held_samples
        if told is not None:  # returned steps after the last published policy are not trained, as programs see it
            merged += max(self.steps.released_upto - told.step, 0) * (self._batch_samples or 1)
        return effects + self._leases.staged.grant(self.name, merged, 0 if told is None else told.version)

    @property
    def _batch_samples(self) -> int | None:
        """Number of samples of a step, if it is fixed."""
        return None if self.rules.batch is None else self.rules.batch.samples

    @property
    def _learns(self) -> bool:
        """True while a new broker learns which samples are being generated."""
        return self._now < LEARN_S

    @property
    def _in_the_way(self) -> InFlight | None:
        """Samples for which the next step keeps room; None if the next complete sample need not wait for them."""
        published = self.history.published
        if published is None:
            return None
        policy = published.version + max(self.next_step - published.step, 0)
        return self._leases.staging.in_the_way(self.name, policy, self.planner.former.queued_samples)

    def tick(self, now: float) -> list[Effect]:
        """Note the time, in seconds since the broker's first tick; complete results of steps that are done."""
        self._first_tick = now if self._first_tick < 0 else self._first_tick
        self._now = now - self._first_tick
        self.results.subscribers.tick(now)
        return self.results.carry(self.steps.returned_by)

    def formed(self, event: Formed) -> list[Effect]:
        """Make and serve the steps of a packer's choice; ignore the choice if the feed has moved to another step."""
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
            self._outbox.put(step)
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
            effects += self._recorder.record_end(*end)
            self._outbox.put(end)
        return effects

    # Going to a step

    def unfit(self, step: int, given: Snapshot | None) -> tuple[str, str] | None:
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
        wrong = self._snapshot_check.fault(given) if given is not None and given.step <= step else ""
        return ("snapshot", f"the checkpoint's snapshot: {wrong}") if wrong else None

    def knows(self, given: Snapshot) -> bool:
        """Return whether the log has all rule changes and skipped steps of a checkpoint's snapshot."""
        return self.history.knows(given)

    def rewind(self, step: int, given: Snapshot | None, back: bool) -> list[Effect]:
        """Go to ``step``, which trainers request and which is not the next step.

        Args:
            step: The step.
            given: Snapshot of the trainers' checkpoint.
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
        return effects + self.go_to(step, given, discards)

    def go_to(self, step: int, given: Snapshot | None = None, anew: bool = False) -> list[Effect]:
        """Go to a state from which ``step`` is the next served step; readers must keep no steps.

        Args:
            step: The step.
            given: Snapshot of the trainers' checkpoint.
            anew: True to restore a snapshot even if the feed could continue from its current state.
        """
        found, here = self.history.nearest(step), self.next_step
        nearest = max(found[0] if found is not None else 0, given.step if given is not None else 0)
        effects: list[Effect] = []
        knows_more = given is not None and not self.history.knows(given)
        if not knows_more and (chain := self.history.chain_after(step - 1)) is not None:
            effects += self.readers.attempts.check(step, chain)
        if nearest <= here <= step and not self.planner.ended and not anew and not knows_more:
            return effects + self._outbox.hand_out()
        held = np.concatenate([self.planner.reset(), *self._outbox.clear()])
        self._waits_for = None
        if len(held):
            effects.append(Release(held))
        if step or self.figures.totals.steps:
            effects.append(Report("info", f"feed {self.name!r} continues with step {step}", feed=self.name, step=step))
        if given is not None and (found is None or given.step > found[0] or knows_more):
            return effects + self._adopt(given, step)
        if found is None or found[2] is not None:
            return effects + self.planner.restore(found[2] if found is not None else None)
        self._waits_for = found[1]
        return [*effects, Recall(self.name, found[1])]

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

    def _adopt(self, given: Snapshot, step: int) -> list[Effect]:
        """Restore the snapshot of a checkpoint at ``step``; record the changes and skips that the log lacks."""
        effects: list[Effect] = []
        history = self.history
        for number, change in enumerate(given.changes):
            if number < len(history.changes) and not history.changes[number].position < 0 <= change.position:
                continue
            if change.position >= 0:
                history.forget_after(change.position)
            else:  # no position yet: the trainers had the steps before ``step`` without this change
                change = msgspec.structs.replace(change, step=max(change.step, step))
            if change.step < history.num_steps:  # steps formed before the trainer came, which no rank has had
                effects += self._branch(change.step, f"a checkpoint knows of {change.note}")
            effects += self._recorder.record_change(change)
            self.planner.live.know(change.rules)
        for first, last in given.skips:
            if (first, last) not in history.skips:
                effects += self._recorder.record_skip(first, last)
        history.begin_at(given.step)
        if given.step > history.last_snapshot:
            effects += self._recorder.record_snapshot(given)
        return effects + self.planner.restore(given)

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
            self.planner.live.know(record.change.rules)
        elif isinstance(record, CheckpointCommitted):
            self._checkpoints.recover(record.step)
        elif isinstance(record, ValuesReported):
            self.results.add(lsn, record)
        elif isinstance(record, PolicyPublished) and self._is_possible(record):
            self.history.published = record
        elif isinstance(record, LineageBegan):
            self.results.pending.branch(record.lineage)

    def recover_facts(self, facts: FeedFacts, released: int) -> None:
        """Apply the facts that replace deleted records; raise ValueError if their rules are not this feed's."""
        differs = first_difference(self.rules, facts.rules)
        if differs:
            raise ValueError(f"feeds.{self.name}: {differs} as the log has it")
        self.history.recover(facts, released)
        if self.history.published is not None and not self._is_possible(self.history.published):
            self.history.published = None
        self.planner.live.know(self.latest_rules)

    def _is_possible(self, published: PolicyPublished) -> bool:
        """Return whether trainers can have published a policy: earlier versions accepted numbers of any size."""
        if published.version <= MOST_VERSION and published.attempt[0] <= self._identity.epoch:
            return True
        self._ignored = published.version
        return False

    def begin(self) -> list[Effect]:
        """Start after all records were applied: go to the first step that some rank has not returned."""
        step = self.steps.formed_upto
        self.steps.kept.lineage = self.history.lineage
        if self.history.published is not None:
            self._leases.credits.publish(self.history.published)
        effects = self._leases.records.discard(self.name)  # lost samples that the last broker has not recorded
        if self._ignored is not None:
            text = (
                f"feed {self.name!r}: ignored policy version {self._ignored} in the log, because no trainer of this "
                f"run can have published it. Producers get the version that is published next"
            )
            effects.append(Report("warning", text, feed=self.name))
        return effects + self.go_to(step, anew=True) if self.history.order or step else []

    @property
    def wanted_lsn(self) -> int:
        """LSN below which the feed needs no records (R7)."""
        return self._checkpoints.wanted_lsn(self.steps.released_upto)

    # Requests

    def change(self, rules: Rules, at_step: int | None, note: str) -> tuple[list[Effect], int]:
        """Change to ``rules``, from ``at_step`` or a later step on.

        Args:
            rules: The new rules.
            at_step: The requested step; None for the first step that no rank has had.
            note: Text to record.

        Returns:
            The effects, and the first step with the new rules.

        Raises:
            ValueError: The feed has ended, or memory is short.
        """
        # steps that are formed again, or that a trainer has had from another broker, keep their rules
        unformed = max(self.next_step, self.history.num_steps, self.readers.attempts.known_upto)
        effects, step = self.planner.live.ask(rules, unformed, at_step, note)
        said = Report("info", f"feed {self.name!r} changes from step {step} on: {note}", feed=self.name, step=step)
        return [said, *effects, *self.advance()], step

    def skip(self, first: int, last: int) -> list[Effect]:
        """Skip steps ``first`` to ``last``; raise ValueError for steps that a rank may have had."""
        if not 0 <= first <= last:
            raise ValueError(f"got steps {first} to {last}, expected 0 <= first step <= last step")
        if self.steps.joined and first < self.steps.formed_upto:
            raise ValueError(
                f"got step {first}, expected step {self.steps.formed_upto} or later, because ranks may have read "
                f"earlier steps. To skip step {first}, stop the trainers, skip the step, and restart the trainers "
                f"from a checkpoint before step {first}."
            )
        self.steps.kept.skip(first, last)
        said = Report("info", f"feed {self.name!r} skips steps {first} to {last}", feed=self.name, step=first)
        return [said, *self._recorder.record_skip(first, last)]

    def tell_back(self, peer: bytes, envelope: Envelope, now: float) -> list[Effect]:
        """Handle a message about results: a published policy, reported values, or a subscriber's request."""
        self.results.subscribers.streams = [stream.name for stream in self.latest_rules.streams]
        message = envelope.message
        return self._about_results[type(message)](self, message, peer, envelope, now)

    _about_results = Handlers[[bytes, Envelope, float], list[Effect]]()

    @_about_results.of(AskResults)
    def _on_ask(self, message: AskResults, peer: bytes, envelope: Envelope, now: float) -> list[Effect]:
        """Answer a subscriber."""
        return self.results.subscribers.ask(peer, message, now)

    @_about_results.of(ReportValues)
    def _on_values(self, message: ReportValues, peer: bytes, envelope: Envelope, now: float) -> list[Effect]:
        """Record the values that a rank reports."""
        if (refused := self._refuse_attempt(peer, message)) is not None:
            return refused
        samples = self.steps.samples_of(message.step, message.part, message.parts)
        served = max(self.steps.formed_upto, self.history.num_steps)  # also by an earlier broker
        return self.results.report(peer, message, envelope.payload, self.history.lineage, served, samples)

    def _refuse_attempt(self, peer: bytes, message: Publish | ReportValues) -> list[Effect] | None:
        """Return the answer to a message that cannot be of the present attempt yet; None for any other message."""
        if self.results.is_unanswered(peer):
            return []  # the trainer repeats the message
        epoch, attempt = message.attempt
        if epoch != self._identity.epoch or attempt <= self.readers.attempts.number:
            return None
        text = f"got attempt {attempt}, expected at most {self.readers.attempts.number}, the present attempt"
        return self.results.refuse(peer, message.number, text)

    @_about_results.of(Publish)
    def _on_publish(self, message: Publish, peer: bytes, envelope: Envelope, now: float) -> list[Effect]:
        """Record the version of a policy, unless it is known; answer once that is safe.

        Trainers that go back to a checkpoint begin a new attempt, whose versions may be lower.
        """
        if (refused := self._refuse_attempt(peer, message)) is not None:
            return refused
        if message.attempt[0] > self._identity.epoch:
            return []  # a standby has taken over. The rank repeats its message until it knows
        known, effects = self.history.published, list[Effect]()
        if message.version > MOST_VERSION:
            text = f"got policy version {message.version}, expected at most {MOST_VERSION}"
            return self.results.refuse(peer, message.number, text)
        if known is not None and message.attempt == known.attempt and message.version < known.version:
            text = (
                f"got policy version {message.version}, but version {known.version} is published, expected a version "
                f"that is not lower. To publish a lower one, restart all ranks"
            )
            return self.results.refuse(peer, message.number, text)
        if known is None or (message.attempt, message.version) > (known.attempt, known.version):
            record = PolicyPublished(
                feed=self.name, version=message.version, step=message.step, attempt=message.attempt
            )
            effects += self._journal.append(record)
            self.history.published = record
            self._leases.credits.publish(record)
        self.results.note(peer, message.number)
        return effects + self.safe(self._journal.safe_upto) + self._leases.credits.tell_published()

    def state_of(self, step: int) -> State | list[Effect]:
        """Return the state of a checkpoint at ``step``, or the effects that fetch it; an empty list if unknown."""
        return self._checkpoints.state_of(step)

    def commit(self, step: int) -> list[Effect]:
        """Record that the checkpoint at ``step`` is durable, and confirm it once the record is safe."""
        if step > max(self.history.num_steps, self.steps.formed_upto):
            text = f"feed {self.name!r}: ignored the commit of step {step}, which the feed has not formed"
            return [Report("warning", text, feed=self.name, step=step)]
        return self._checkpoints.commit(step) + self.safe(self._journal.safe_upto)

    _about_results.require(ABOUT_RESULTS)
