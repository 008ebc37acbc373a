"""A feed: some streams under rules of their own, from the merge to the readers.

What a trainer connects to. It merges its streams' samples, has steps formed of them and serves
them to its readers; nothing of it touches another feed. Its streams belong to it alone, and
are numbered among themselves, so that a run with more feeds has the same steps in this one.

Memory: samples that wait for the merge are bounded by each partition's quota, those merged (in
the window, in packs, in steps that some rank has not returned) by ``merged_tokens``. Neither
borrows from the other nor from another feed, so the merge can always get the sample it waits
for, and a full arena cannot deadlock.

To be at a step is to have gone there: from a snapshot not after it, whose window's samples are read again,
and over the steps between, which are formed again and not served. So a broker that was killed goes
on, trainers go back to a checkpoint, and a finite feed is iterated again, at step 0, which needs no
snapshot. A step goes to the readers once the log has it, and everything that decided it (R2), and once
the payload of its samples is there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice

import msgspec
import numpy as np

from streampack.core.admission import Admission, terms_of
from streampack.core.arrival import Arrival
from streampack.core.effects import Form, Formed, Recall, Recalled, Release
from streampack.core.events import Effect, Report
from streampack.core.form import Former, Step
from streampack.core.history import History
from streampack.core.journal import Journal
from streampack.core.leases import Leases
from streampack.core.merge import change as change_merge
from streampack.core.merge import merge_of
from streampack.core.messages import State
from streampack.core.readers import Readers
from streampack.core.records import (
    CheckpointCommitted,
    FeedEnded,
    FeedFacts,
    LineageBegan,
    Record,
    RulesChanged,
    SnapshotTaken,
    StepFormed,
    StepsSkipped,
    TailDropped,
)
from streampack.core.resume import problem, restore, snapshot
from streampack.core.rings import NOWHERE
from streampack.core.rules import Rules, RulesChange, difference
from streampack.core.samples import I64, SampleTable
from streampack.core.snapshot import Floor, Snapshot

SNAPSHOT_WINDOWS = 4
"""A snapshot is taken when so many windows of samples are in steps since the last: what a restart reads again."""


@dataclass(frozen=True, slots=True)
class FeedPlan:
    """A feed before it runs: ``layout`` is how context parallelism cuts its packs, ``merged_tokens`` its share of
    the arena for all that is merged."""

    name: str
    rules: Rules
    merged_tokens: int
    layout: str = "zigzag"
    keeps: int = 3
    """Committed checkpoints that trainers can go back to."""
    discards: bool = False
    """When they go back, pushed samples that came since are dropped."""


def needed_tokens(rules: Rules, max_sample_tokens: int) -> int:
    """Merged tokens without which a step might never be whole: the window of longest samples,
    the step being formed, one being served, and a sample on its way."""
    return (rules.window + 2) * rules.budget + 2 * rules.packs * rules.budget + max_sample_tokens


@dataclass(slots=True)
class Totals:
    """What was formed, summed over all steps of all iterations: for the figures of section 7 of the packing design."""

    steps: int = 0
    packs: int = 0
    empty_packs: int = 0
    samples: int = 0
    tokens: int = 0
    slot_tokens: int = 0
    square_tokens: int = 0
    dropped_samples: int = 0

    def add(self, step: Step) -> None:
        """Count a step."""
        self.steps += 1
        self.packs += len(step.packs)
        self.samples += step.num_samples
        for pack in step.packs:
            self.empty_packs += not len(pack.handles)
            self.tokens += pack.num_tokens
            self.slot_tokens += pack.num_slot_tokens
            self.square_tokens += pack.num_tokens**2


class Feed:
    """One feed of a broker; ``table`` and ``leases`` are shared with the others.

    ``steps_ahead`` bounds the steps formed and not yet returned by all ranks.
    """

    def __init__(
        self, run: int, epoch: int, plan: FeedPlan, max_sample_tokens: int, steps_ahead: int, table: SampleTable,
        leases: Leases, journal: Journal,
    ) -> None:  # fmt: skip
        self.plan, self.name, self.rules = plan, plan.name, plan.rules
        self._merged_tokens = plan.merged_tokens
        self._max_sample_tokens, self._steps_ahead = max_sample_tokens, steps_ahead
        self._table, self._leases, self._books, self._journal = table, leases, leases.books, journal
        rules = plan.rules
        self.history = History(rules, sum(stream.partitions for stream in rules.streams))
        self.admission = Admission(
            terms_of(rules), rules.tokens, rules.fields, max_sample_tokens, table, merge_of(rules)
        )  # fmt: skip
        leases.open(plan.name, rules, self.admission, self.history)
        self.readers = Readers(
            run, epoch, plan.name, rules, plan.layout, table, self.waiting_for, self.unfit, self.rewind, self.state_of,
            self.commit,
        )  # fmt: skip
        self.readers.is_known = self.history.knows
        self.former = Former(rules, table)
        self.totals = Totals()
        self.held_tokens = 0
        """Merged and not yet released."""
        self._forming = self._ended = False
        self._waits_for: int | None = None
        self._applied = 0
        """Changes of the rules that the merge goes by."""
        self._generation = 0
        self._blocked: int | None = None
        self._formed: deque[tuple[int, Step | None]] = deque()
        """Steps, or the end, that wait for their record to be safe: behind which record."""
        self._since_snapshot = 0
        self._commits: deque[tuple[int, int]] = deque()
        self._sound: Snapshot | None = None  # the last of a checkpoint that nothing was wrong with: all ranks bring it
        self._committed_upto = -1
        """The last checkpoint whose commit is safe, since trainers went back."""
        self._went_back_to = NOWHERE
        """Trainers had a checkpoint there: it is kept until they have committed another."""
        self.failed = ""
        """Why nothing more can be served: the data are not what they were."""

    @property
    def num_partitions(self) -> int:
        return sum(stream.partitions for stream in self.rules.streams)

    @property
    def finished(self) -> bool:
        """Every rank has returned every step, and no reader is attached any more."""
        readers = self.readers
        return readers.end is not None and readers.released_upto >= readers.end.num_steps and not readers.num_readers

    def waiting_for(self) -> tuple[str, str]:
        """Why the next step is not there: (reason, detail)."""
        if self.failed:
            return "failed", self.failed
        if self._formed and self._formed[0][0] >= self._journal.safe_upto:
            return "log", self._journal.stalled or "the step is being written to the log"
        if self._formed and self._formed[0][1] is not None:
            step, absent = self._formed[0][1], self._books.absent
            missing = (absent[h][0] for pack in step.packs for h in pack.handles.tolist() if h in absent)
            of = "".join(f", from {self._leases.describe(p)}" for p in islice(missing, 1))
            return "stream", f"samples of step {step.number} are read again{of}"
        if self._forming:
            return "forming", "the step is being packed"
        if self.former.next_step >= self.readers.released_upto + self._steps_ahead:
            return "peers", self.readers.slowest
        if self._room() <= 0:
            return "memory", f"the arena is full: {self.readers.slowest}"
        if self._blocked is not None and self._journal.full and self.history.in_order:
            return "log", self._journal.full
        if self._blocked is not None:
            return (
                "stream",
                f"no sample has come from {self._leases.describe(self._books.of_feed(self.name)[self._blocked])}",
            )
        return "forming", "the step is being packed"

    def advance(self) -> list[Effect]:
        """Move on as far as can be: merge what may be merged, ask for a step to be formed."""
        effects: list[Effect] = []
        while not self._ended and not self.readers.draining and not self.failed:
            effects += self._fill()
            if self._forming or self.former.next_step >= self.readers.released_upto + self._steps_ahead:
                break
            request = self.former.request()
            if request is not None:
                self._forming = True
                effects.append(Form(self.name, request, self._generation))
                break
            if not self.former.closed:
                break
            effects += self._publish(self.former.cut())  # the feed has ended, or its next pass begins
        return effects + self.hand_out()

    def formed(self, event: Formed) -> list[Effect]:
        """A packer's choice; one that was asked for before the feed went back is of no use."""
        if event.generation != self._generation:
            return []
        self._forming = False
        return self._publish(self.former.apply(event.choice))

    def settle(self, effects: list[Effect]) -> list[Effect]:
        """Take what is released off the books; effects are performed in order, so nobody still reads it."""
        for effect in effects:
            if isinstance(effect, Release):
                self.held_tokens -= int(self._table.length[effect.handles].sum())
                self._books.forget(effect.handles)
                self._table.free(effect.handles)
        return effects

    def _fill(self) -> list[Effect]:
        """Merge while the next step may need more, and there is room."""
        merge, target = self.admission.merge, 2 * self.rules.packs * self.rules.budget
        effects: list[Effect] = self._change()
        while (room := self._room()) > 0 and (self.former.queued_tokens < target or self.former.starved):
            taken = merge.take(min(room, target), self._next_change())
            self._blocked = taken.blocked
            if not len(taken.moved):
                break
            effects += self._leases.merged(self.name, taken.moved)
            self.former.admit(taken.handles, taken.lengths)
            self.held_tokens += int(taken.lengths.sum())
            effects += self._change()
        closed = merge.closed or merge.between_passes
        if closed and not self.former.closed and merge.stopped:
            effects += self._stop()
        self.former.closed = closed
        return effects

    def _next_change(self) -> int:
        """The position that the merge must not pass before the rules change; NOWHERE if they do not."""
        changes = self.history.changes
        position = changes[self._applied].position if self._applied < len(changes) else -1
        return position if position >= 0 else NOWHERE

    def _change(self) -> list[Effect]:
        """Go by other rules, where a change was asked for or is recorded; the first time, record where."""
        effects: list[Effect] = []
        merge, changes = self.admission.merge, self.history.changes
        while self._applied < len(changes):
            change, known = changes[self._applied], len(merge.merged_samples)
            grows = sum(stream.partitions for stream in change.rules.streams) > known
            if change.position < 0 and change.step <= self.former.next_step and (merge.may_grow or not grows):
                # a snapshot that was taken before it was asked for does not have it
                position = max(merge.position, self.history.last_position)
                change = msgspec.structs.replace(change, step=self.former.next_step, position=position)
                self.history.note_change(change)
                effects += self._journal.append(RulesChanged(feed=self.name, change=change))
            if change.position < 0 or change.position > merge.position:
                break
            dropped = change_merge(merge, change.rules)
            self._applied += 1
            effects += self._leases.join(self.name, known)
            self.held_tokens += int(self._table.length[dropped].sum())
            effects += [Release(dropped)] if len(dropped) else []
            effects += self._leases.remove(self.name, change.rules)
        return effects

    def know(self, rules: Rules) -> None:
        """Streams that are new, of which the merge may know later; their partitions take from what is merged."""
        before = len(self._books.of_feed(self.name))
        self.admission.extend(terms_of(rules))
        self._leases.open(self.name, rules, self.admission, self.history)
        more = len(self._books.of_feed(self.name)) - before
        self._merged_tokens -= more * self._leases.quota_tokens
        for p in self._books.of_feed(self.name)[before:]:
            self._books.intakes[p].closed = True

    def _stop(self) -> list[Effect]:
        """A stream has stopped the feed: let go of what the others hold, and ask for no more of it."""
        handles = self._drop_waiting()
        return [*([Release(handles)] if len(handles) else []), *self._leases.close(self.name)]

    def _drop_waiting(self) -> I64:
        """What waits for the merge, int64 [n]: no longer there, and counted as merged until it is released."""
        handles = self.admission.merge.drop()
        self.held_tokens += int(self._table.length[handles].sum())
        return handles

    def _room(self) -> int:
        return self._merged_tokens - self.held_tokens - self._max_sample_tokens

    def _publish(self, steps: list[Step]) -> list[Effect]:
        effects: list[Effect] = []
        for step in steps:
            self.totals.add(step)
            effects += self._note(step)
            if self.failed:
                return effects
            self._formed.append((self._journal.next_lsn - 1, step))
        if steps and self._since_snapshot >= SNAPSHOT_WINDOWS * self.rules.window:
            effects += self._snap()
        if self.former.finished and not self._ended:
            effects += self._close()
        return effects + self.hand_out()

    def _note(self, step: Step) -> list[Effect]:
        """Record a step, or see that it is what was recorded."""
        self._since_snapshot += step.num_samples
        before = self.history.chain_after(step.number)
        if self.history.is_gone(step.number):
            return []
        if before is None:
            handles = np.concatenate([pack.handles for pack in step.packs])
            counts = np.array([len(pack.handles) for pack in step.packs], "<u4")
            record = StepFormed(
                feed=self.name, lineage=self.history.lineage, step=step.number, digest=step.digest, chain=step.chain,
                num_loss_tokens=step.num_loss_tokens, num_samples=step.num_samples, counts_u32=counts.tobytes(),
                rows=self._table.rows(handles).tobytes(), released=self.readers.released_upto,
            )  # fmt: skip
            self.history.add_step(step.number, step.chain, self._journal.next_lsn)
            return self._journal.append(record)
        if before == step.chain:
            return []
        self.failed = (
            f"step {step.number} came out otherwise than the first time, though every sample that was compared is the "
            f"same: the data, the tokenizer or streampack itself have changed: put them back, or start a new run"
        )
        return [Report("error", f"feed {self.name!r}: {self.failed}"), *self.readers.fail("diverged", self.failed)]

    def _snap(self) -> list[Effect]:
        """Take a snapshot: between two steps, once enough samples have gone since the last."""
        self._since_snapshot = 0
        if self.former.next_step <= self.history.last_snapshot:
            return []
        floors = self._books.floors(self.name, self.former.held())
        taken = msgspec.structs.replace(
            snapshot(self.rules, self.admission.merge, self.former, floors), lineage=self.history.lineage,
            changes=list(self.history.changes), applied=self._applied, skips=list(self.history.skips),
        )  # fmt: skip
        self.history.add_snapshot(taken, self._journal.next_lsn)
        self.history.forget_snapshots(self.readers.released_upto, self._journal.keeps)
        return self._journal.append(SnapshotTaken(feed=self.name, lineage=self.history.lineage, snapshot=taken))

    def _close(self) -> list[Effect]:
        """Everything held is in a step: the pass has ended, or the feed."""
        effects: list[Effect] = []
        dropped, self.former.dropped = self.former.dropped, self.former.dropped[:0]
        self.totals.dropped_samples += len(dropped)
        if len(dropped):
            effects += self._note_tail(dropped)
            effects.append(Release(dropped))
        if not self.admission.merge.closed:
            self.admission.merge.next_pass()
            self.former.closed = False
            return effects
        self._ended = True
        count, chain = self.former.next_step, self.former.chain
        if self.history.end is None:  # R8: said once
            self.history.end = (count, chain)
            record = FeedEnded(feed=self.name, lineage=self.history.lineage, num_steps=count, chain=chain)
            effects += self._journal.append(record)
            effects.append(Report("info", f"feed {self.name!r} has ended after {count} steps"))
        self._formed.append((self._journal.next_lsn - 1, None))
        return effects

    def _note_tail(self, dropped: I64) -> list[Effect]:
        step, history = self.former.next_step, self.history
        if step in history.tails or history.is_gone(step):
            return []
        history.tails.add(step)
        rows = self._table.rows(dropped).tobytes()
        return self._journal.append(TailDropped(feed=self.name, lineage=history.lineage, step=step, rows=rows))

    def hand_out(self) -> list[Effect]:
        """Give the readers what is safe and whole; steps before the one that was gone to have been served."""
        effects: list[Effect] = []
        absent = self._books.absent
        while self._formed and self._formed[0][0] < self._journal.safe_upto:
            step = self._formed[0][1]
            if step is None:
                effects += self.readers.finish(self.former.next_step, self.former.chain)
            elif step.number < self.readers.formed_upto:
                effects.append(Release(np.concatenate([pack.handles for pack in step.packs])))
                effects += self.readers.check(step.number + 1, step.chain)
            elif absent and any(handle in absent for pack in step.packs for handle in pack.handles.tolist()):
                break
            else:
                effects += self.readers.add(step, self.history.is_skipped(step.number))
            self._formed.popleft()
        return effects

    # Going to a step

    def unfit(self, step: int, given: Snapshot | None) -> tuple[str, str] | None:
        """Why the feed cannot go to ``step``, with a checkpoint's snapshot: (code, detail), or None."""
        history = self.history
        if step < history.oldest_step:
            return "step_gone", (
                f"got a request to start at step {step}, expected {history.oldest_step} or later, the oldest that the "
                f"log still has the order for: take a newer checkpoint (retain.checkpoints says how many are kept)"
            )
        wrong = self._wrong(given) if given is not None and given.step <= step else ""
        return ("snapshot", f"the checkpoint's snapshot: {wrong}") if wrong else None

    def _wrong(self, given: Snapshot) -> str:
        """Why nobody can go on here from a checkpoint's snapshot; empty if the feed can."""
        if given != self._sound:
            partitions = sum(stream.partitions for stream in self.latest_rules.streams)
            spare = self._merged_tokens - needed_tokens(self.rules, self._max_sample_tokens)
            room = partitions + max(spare, 0) // self._leases.quota_tokens
            if wrong := problem(given, self.rules, self._merged_tokens, room):
                return wrong
            self._sound = given
        return self._wrong_here(given)

    def _wrong_here(self, given: Snapshot) -> str:
        """What of a sound snapshot is not as it is known here."""
        history, chain = self.history, self.history.chain_after(given.step - 1)
        found = history.nearest(given.step)
        begins = chain is None and found is not None and found[0] == given.step  # what is recorded begins with it
        other = chain != given.form.chain and not begins
        if given.lineage < history.lineage and given.step > history.lineage_step and other:
            return (
                f"got step {given.step} of lineage {given.lineage}, expected one up to {history.lineage_step}, where "
                f"trainers went back to and lineage {history.lineage} began: start from an earlier checkpoint"
            )
        if chain is not None and chain != given.form.chain and history.knows(given):
            return f"got other steps before {given.step} than this run has, expected the same: it is of another run"
        for known, change in zip(history.changes, given.changes, strict=False):
            moved = known.position != change.position and min(known.position, change.position) >= 0
            if moved or known.rules != change.rules:
                return (
                    f"got a change of the rules at step {change.step} ({change.note}), expected the one that is asked "
                    f"for here at step {known.step} ({known.note}): give the run another state_dir"
                )
        merged = sum(given.merge.merged_samples)
        for known in history.changes[len(given.changes) :]:
            if 0 <= known.position < merged:
                return (
                    f"got one that does not know of the change at step {known.step} ({known.note}), expected one of "
                    f"this run: give the broker another state_dir, and ask for changes once the trainers are attached"
                )
        for name in {stream.name for change in given.changes for stream in change.rules.streams}:
            of = self._books.streams.get(name)
            if of is not None and of.feed != self.name:
                return f"got a stream {name!r}, which feed {of.feed!r} has, expected one of this feed"
        for p, merged in zip(self._books.of_feed(self.name), given.merge.merged_samples, strict=False):
            recorded = self._books.intakes[p].recorded_seq
            if self._books.stream_of[p].terms.pushed and merged > recorded:
                return (
                    f"got {merged} samples that were pushed, expected at most the {recorded} in the log: give the "
                    f"broker the state_dir that has them"
                )
        return ""

    def rewind(self, step: int, given: Snapshot | None) -> list[Effect]:
        """Trainers begin again at ``step``, before others that they had; where that is wanted, pushed samples that came
        since are dropped, and other steps follow, in another lineage."""
        effects: list[Effect] = []
        self._commits.clear()
        self._committed_upto, self._went_back_to = min(self._committed_upto, step - 1), step
        discards = self.plan.discards and step < self.history.num_steps
        if discards:
            since = self.history.begin_of(step)
            why = f"trainers went back to step {step} from {self.history.num_steps}, what was pushed since is dropped"
            effects += self._branch(step, why, since)
            effects += self._books.discard(self.name)
        return effects + self.go_to(step, given, discards)

    def _branch(self, step: int, why: str, since: int | None = None) -> list[Effect]:
        """Another lineage begins at ``step``."""
        history = self.history
        history.branch(history.lineage + 1, step, since)
        self.readers.lineage = history.lineage
        self.readers.forget_chains(step)
        began = LineageBegan(feed=self.name, lineage=history.lineage, step=step, why=why, since=since)
        return [*self._journal.append(began), Report("warning", f"feed {self.name!r}: {why}")]

    def go_to(self, step: int, given: Snapshot | None = None, anew: bool = False) -> list[Effect]:
        """Have ``step`` be the next that is served; the readers have let go of theirs. ``given`` is a checkpoint's;
        ``anew``: what is merged is not what it would be."""
        found, here = self.history.nearest(step), self.former.next_step
        nearest = max(found[0] if found is not None else 0, given.step if given is not None else 0)
        effects: list[Effect] = []
        knows_more = given is not None and not self.history.knows(given)
        if not knows_more and (chain := self.history.chain_after(step - 1)) is not None:
            effects += self.readers.check(step, chain)
        if nearest <= here <= step and not self._ended and not anew and not knows_more:
            return effects + self.hand_out()
        held = self._let_go()
        if len(held):
            effects.append(Release(held))
        if step or self.totals.steps:
            effects.append(Report("info", f"feed {self.name!r} goes to step {step}"))
        if given is not None and (found is None or given.step > found[0] or knows_more):
            return effects + self._adopt(given)
        if found is None or found[2] is not None:
            return effects + self._restore(found[2] if found is not None else None)
        self._waits_for = found[1]
        return [*effects, Recall(self.name, found[1], self._generation)]

    def recalled(self, event: Recalled) -> list[Effect]:
        """A snapshot that was asked for: to go there, or for a checkpoint's state."""
        if not isinstance(event.record, SnapshotTaken):
            return []
        taken = event.record.snapshot
        self.history.keep(taken)
        effects = self.readers.tell_states()
        if event.generation == self._generation and event.lsn == self._waits_for:
            effects += self._restore(taken)
        return effects

    def _let_go(self) -> I64:
        """Forget the place where the feed is; handles, int64 [n], of all that it held."""
        waiting = [
            np.concatenate([pack.handles for pack in step.packs]) for _, step in self._formed if step is not None
        ]
        held = np.concatenate([self._drop_waiting(), self.former.held(), *waiting])
        self._formed.clear()
        self.admission.merge, self.former = merge_of(self.rules), Former(self.rules, self._table)
        self._generation += 1
        self._forming, self._blocked, self._ended = False, None, False
        self._since_snapshot, self._waits_for = 0, None
        return held

    def _restore(self, taken: Snapshot | None) -> list[Effect]:
        """Be where a snapshot was taken, or at the first sample."""
        self._applied = taken.applied if taken is not None else 0
        rules = self.history.changes[self._applied - 1].rules if self._applied else self.rules
        merge = self.admission.merge = merge_of(rules)
        floors: list[Floor] = [(0, None)] * len(merge.merged_samples) if taken is None else taken.floors
        if taken is not None:
            restore(taken, self.rules, merge, self.former)
        if isinstance(merge, Arrival):
            for place in self.history.order:
                if place.count:
                    merge.script(place.partition, place.base_seq, place.count)
        held = self.former.held()
        self.held_tokens += int(self._table.length[held].sum())
        return self._leases.go_to(self.name, floors, held) + self._leases.remove(self.name, rules)

    def _adopt(self, given: Snapshot) -> list[Effect]:
        """Be where a checkpoint is, and record what it knows and this broker, whose log is another, does not."""
        effects: list[Effect] = []
        history = self.history
        for number, change in enumerate(given.changes):
            if number < len(history.changes) and not history.changes[number].position < 0 <= change.position:
                continue
            if change.position >= 0:
                history.forget_after(change.position)
                if change.step < history.num_steps:  # formed before a trainer came with it: nobody had them
                    effects += self._branch(change.step, f"a checkpoint knows of {change.note}")
            history.note_change(change)
            self.know(change.rules)
            effects += self._journal.append(RulesChanged(feed=self.name, change=change))
        for first, last in given.skips:
            if (first, last) not in history.skips:
                history.skips.append((first, last))
                effects += self._journal.append(StepsSkipped(feed=self.name, first=first, last=last))
        history.begin_at(given.step)
        if given.step > history.last_snapshot:
            history.add_snapshot(given, self._journal.next_lsn)
            effects += self._journal.append(SnapshotTaken(feed=self.name, lineage=given.lineage, snapshot=given))
        return effects + self._restore(given)

    # The log

    def safe(self, upto: int) -> list[Effect]:
        """Records below ``upto`` are safe."""
        while self._commits and self._commits[0][0] < upto:
            self._committed_upto = max(self._committed_upto, self._commits.popleft()[1])
        return self.readers.committed(self._committed_upto) + self.hand_out()

    def recover(self, lsn: int, record: Record) -> None:
        """A record of the log, before anything else happens."""
        history = self.history
        if isinstance(record, StepFormed):
            history.add_step(record.step, record.chain, lsn)
            history.released = max(history.released, record.released)
        elif isinstance(record, SnapshotTaken):
            history.add_snapshot(record.snapshot, lsn, keep=False)
        elif isinstance(record, FeedEnded):
            history.end = (record.num_steps, record.chain)
        elif isinstance(record, TailDropped):
            history.tails.add(record.step)
        elif isinstance(record, LineageBegan):
            history.branch(record.lineage, record.step, record.since)
            history.released = min(history.released, record.step)
        elif isinstance(record, RulesChanged):
            history.note_change(record.change)
            self.know(record.change.rules)
        elif isinstance(record, StepsSkipped):
            history.skips.append((record.first, record.last))
        elif isinstance(record, CheckpointCommitted):
            self._note_commit(record.step)
            self._committed_upto = record.step

    def recover_facts(self, facts: FeedFacts, released: int) -> None:
        """What survived of records that are gone. Raises ValueError for a feed of other rules."""
        differs = difference(self.rules, facts.rules)
        if differs:
            raise ValueError(f"feeds.{self.name}: {differs} as the log has it")
        history = self.history
        history.lineage, history.lineage_step = facts.lineage, facts.lineage_step
        history.changes = list(facts.changes)
        self.know(self.latest_rules)
        history.skips, history.commits = list(facts.skips), list(facts.commits)
        history.released = max(history.released, released)

    def begin(self) -> list[Effect]:
        """Go to where the log ends: to the first step that some rank has not returned."""
        step = self.readers.formed_upto
        self.readers.lineage = self.history.lineage
        effects = self._books.discard(self.name)  # what the last broker was killed before it had counted
        return effects + self.go_to(step, anew=True) if self.history.order or step else []

    @property
    def wanted_lsn(self) -> int:
        """Records below are wanted no more: neither by the oldest checkpoint kept nor by the slowest rank (R7)."""
        history = self.history
        short = self._journal.full and not history.in_order
        if not history.commits and not short:  # where all can be read again, it may go when room is short
            return 0
        step = min([*history.commits, self._went_back_to, self.readers.released_upto])
        if short and history.nearest(step) is None:  # all of it is formed again from the first sample
            return NOWHERE
        return history.wanted_lsn(step)

    # What a person changes

    def change(self, rules: Rules, at_step: int | None, note: str) -> tuple[list[Effect], int]:
        """Go by ``rules`` from a step on that is not formed yet; that step. Raises ValueError where memory is short."""
        history, changes = self.history, self.history.changes
        if history.end is not None:
            raise ValueError(f"got a change of a feed that has ended after {history.end[0]} steps, expected one before")
        before = sum(stream.partitions for stream in self.latest_rules.streams)
        more = sum(stream.partitions for stream in rules.streams) - before
        left = self._merged_tokens - more * self._leases.quota_tokens
        if left < (least := needed_tokens(self.rules, self._max_sample_tokens)):
            raise ValueError(
                f"got {more} more partitions, which leaves {left} tokens of memory for the window and the steps, "
                f"expected {least}: add fewer partitions, or start the broker with more memory"
            )
        # while steps are formed again they stay as they are, and those that a trainer has had elsewhere
        unformed = max(self.former.next_step, history.num_steps, self.readers.known_upto)
        step = max(unformed, at_step or 0, changes[-1].step if changes else 0)
        change = RulesChange(step=step, position=-1, rules=rules, note=f"{note}, asked at step {unformed}")
        changes.append(change)
        self.know(rules)  # their producers may come
        return self._journal.append(RulesChanged(feed=self.name, change=change)) + self.advance(), step

    @property
    def latest_rules(self) -> Rules:
        """With every change that was asked for."""
        changes = self.history.changes
        return changes[-1].rules if changes else self.rules

    def skip(self, first: int, last: int) -> list[Effect]:
        """Pass over steps ``first`` to ``last``; what follows stays as it is. Raises ValueError for steps that some
        rank may have had."""
        if not 0 <= first <= last:
            raise ValueError(f"got steps {first} to {last}, expected the first one first")
        if self.readers.joined and first < self.readers.formed_upto:
            raise ValueError(
                f"got step {first}, expected {self.readers.formed_upto} or later, the first that no rank can have had: "
                f"or stop the trainers, skip, and start them from a checkpoint before step {first}"
            )
        self.history.skips.append((first, last))
        self.readers.skip(first, last)
        return self._journal.append(StepsSkipped(feed=self.name, first=first, last=last))

    # Checkpoints

    def state_of(self, step: int) -> State | list[Effect]:
        """What a checkpoint that begins at ``step`` holds; or what is done to know it, nothing where nobody can."""
        history = self.history
        found = history.nearest(step)
        chain = history.chain_after(step - 1) if step else bytes(16)
        if found is not None and found[2] is None:
            return [Recall(self.name, found[1], self._generation)]
        taken = found[2] if found is not None else None
        if chain is None and taken is not None and taken.step == step:
            chain = taken.form.chain
        if chain is None:
            return []
        if taken is None and (history.changes or history.skips):
            merge, former = merge_of(self.rules), Former(self.rules, self._table)
            taken = snapshot(self.rules, merge, former, [(0, None)] * len(merge.merged_samples))
        if taken is not None:  # what was asked for later is known as well: it is the same run
            taken = msgspec.structs.replace(taken, changes=list(history.changes), skips=list(history.skips))
        return State(feed=self.name, lineage=self.history.lineage, step=step, chain=chain, snapshot=taken)

    def commit(self, step: int) -> list[Effect]:
        """A checkpoint that begins at ``step`` is durable: keep what the last few need."""
        effects: list[Effect] = []
        if step > max(self.history.num_steps, self.readers.formed_upto):
            return [Report("warning", f"feed {self.name!r}: got a commit of step {step}, which was never formed")]
        if step > max([self._committed_upto, *(said for _, said in self._commits)]):
            self._note_commit(step)
            effects = self._journal.append(CheckpointCommitted(feed=self.name, step=step))
            self._commits.append((self._journal.next_lsn - 1, step))
        return effects + self.safe(self._journal.safe_upto)

    def _note_commit(self, step: int) -> None:
        commits = self.history.commits
        commits[:] = [*(each for each in commits if each != step), step][-self.plan.keeps :]
        if step >= self._went_back_to:
            self._went_back_to = NOWHERE
