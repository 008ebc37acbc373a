"""The planner of one feed's steps: merges admitted samples into a window, and gets packs chosen from it.

The planner merges while the next step may need more samples, and there is memory for them. It can go back or forward,
to a snapshot or to the first sample. Packs requested before such a move are not used after it. The planner does not
know readers.
"""

from __future__ import annotations

import msgspec
import numpy as np
from msgspec import UNSET

from streampack.core.feed.live_rules import LiveRules
from streampack.core.feed.merged_memory import MergedMemory
from streampack.core.feed.resume import restore, snapshot
from streampack.core.form.former import Former, Request
from streampack.core.intake.admission import Admission
from streampack.core.intake.leases import Leases
from streampack.core.journal.history import History
from streampack.core.journal.recorder import Recorder
from streampack.core.merge.arrival import Arrival
from streampack.core.merge.feed_merge import FeedMerge
from streampack.core.merge.queues import NOWHERE
from streampack.core.merge.schedule import AnyMerge
from streampack.core.model.capacity import largest_budget
from streampack.core.model.lease_terms import terms_of
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64, SampleTable
from streampack.core.model.snapshot import Floor, Snapshot
from streampack.core.model.steps import PlannedStep
from streampack.core.protocol.effects import Form, Formed, Release
from streampack.core.protocol.events import Effect
from streampack.core.stats.displacement import Displacements
from streampack.core.stats.length_histogram import LengthCounts

SNAPSHOT_WINDOWS = 4
"""Windows of samples in steps after which the next snapshot is taken. A restart forms these steps again. More snapshots
would fill the log."""
ASKED_AT_ONCE = 32
"""Partitions whose holders are told at once that the merge waits for their samples."""


class Planner:
    """The planner of one feed. Samples come from ``leases`` by ``admission``; ``memory`` bounds the merged ones."""

    def __init__(
        self, feed: str, rules: Rules, history: History, memory: MergedMemory, max_sample_tokens: int,
        table: SampleTable, leases: Leases, recorder: Recorder,
    ) -> None:  # fmt: skip
        self._feed, self._rules, self._history = feed, rules, history
        self._memory, self._table, self._leases = memory, table, leases
        self.merge = FeedMerge(rules)
        """The feed's merge, which begins anew when the feed goes back or forward."""
        later = largest_budget(rules) if rules.stages else 0
        self.admission = Admission(
            terms_of(rules, later), rules.tokens, rules.fields, max_sample_tokens, table, self.merge
        )
        leases.open(feed, rules, self.admission, self.merge, history)
        self.live = LiveRules(
            feed, rules, history, self.admission, self.merge, memory, leases, recorder, max_sample_tokens
        )  # fmt: skip
        self.former = Former(self.live.current, table)
        self._followed = 0
        """Number of changes of the rules that FORM follows."""
        self.displacements = Displacements(table)
        """Displacement in the last steps; it begins anew when the feed goes to another step."""
        self.forming: Request | None = None
        """The request for which the packer chooses packs now."""
        self.ended = False
        """True if every sample is in a step, or was dropped, and none will come."""
        self.overlong = ""
        """Error text of a sample that is too long for its stage, with ``overlong: error``."""
        self.blocked: int | None = None
        """The feed's own number of the partition whose next sample the merge waits for."""
        self._wanted: dict[int, int] = {}
        """Merged samples of each partition when its holder was last told that the merge waits for it."""
        self._since_snapshot = 0
        """Samples in steps since the last recorded snapshot."""

    # Forming steps

    def fill(self) -> list[Effect]:
        """Merge samples while the next step may need more and there is memory."""
        effects = self._change_rules()
        rules = self.former.rules
        step = rules.packs_at(self.former.next_step) * rules.budget
        target = step if rules.window == "auto" else 2 * step  # new weights do not reach what is merged
        while (room := self._memory.room) > 0 and (self.former.wants_samples or self._waits_to_change):
            merge = self.merge.current
            most, tokens = self._may_admit
            if not most:
                break
            one_by_one = self._waits_for_group or self._rules.has_extra_bytes  # the merge knows tokens alone
            taken = merge.take(1 if one_by_one else min(room, target, tokens), self.live.next_position, most)
            self.blocked = taken.blocked
            if self.former.strict and int(taken.lengths.max(initial=0)) > self.live.current.budget:
                self._note_overlong(taken.handles, taken.lengths)
            if not len(taken.moved):
                if not (merge.between_passes and self.former.too_few):
                    break
                merge.next_pass()
            if self._rules.has_extra_bytes:
                table, got = self._table, taken.handles
                self._leases.accounts.note_extra_bytes(
                    self._feed, table.stream[got], table.index[got], table.extra_bytes[got]
                )  # fmt: skip
            effects += self._leases.merged(self._feed, taken.moved)
            shares = self._rules.share is not None
            self.former.admit(taken.handles, self._table.own_lengths(taken.handles) if shares else taken.lengths)
            self.displacements.merged(taken.handles, taken.lengths)
            self._memory.hold(taken.handles)
            effects += self._change_rules()
        merge = self.merge.current
        effects += self._ask_for_missing(merge)
        closed = merge.closed or (merge.between_passes and not self.former.too_few)
        if closed and not self.former.closed and merge.stopped:
            effects += self._stop()
        if closed != self.former.closed:
            self.former.closed = closed
            effects += self._change_rules()
        return effects

    def _ask_for_missing(self, merge: AnyMerge) -> list[Effect]:
        """Tell the holders of the partitions that the merge lacks, if it waits for another one than before."""
        merged, blocked = merge.merged_samples, self.blocked
        if blocked is None or self._wanted.get(blocked) == merged[blocked]:
            return []
        lacking = dict.fromkeys([blocked, *merge.missing(ASKED_AT_ONCE)])
        missing = [p for p in lacking if self._wanted.get(p) != merged[p]]
        told = self._leases.wanted(self._feed, missing)
        if told:
            self._wanted |= {p: int(merged[p]) for p in missing}
        return told

    def _note_overlong(self, handles: I64, lengths: I64) -> None:
        """Note that one of the samples that were merged is longer than the budget of its stage."""
        budget, table = self.live.current.budget, self._table
        first = handles[np.flatnonzero(lengths > budget)[0]]
        stream = self.live.current.streams[int(table.stream[first])].name
        self.overlong = (
            f"sample {stream}:{int(table.index[first])}: got {int(table.length[first])} tokens before the stage whose "
            f"budget holds them begins, expected at most {budget} tokens (`rules.budget`). Set `overlong` in `rules` "
            f"or in the stream to truncate, split or drop"
        )

    @property
    def waiting_lengths(self) -> LengthCounts:
        """Histogram of the lengths of the samples that are merged and not in a step yet."""
        lengths = LengthCounts()
        lengths.add(self._table.length[self.former.held()].astype(np.int64))
        return lengths

    def _change_rules(self) -> list[Effect]:
        """Apply changes of the rules that are due."""
        live, former = self.live, self.former
        former.one_by_one = live.waits or self._followed < live.applied or former.strict
        if not former.one_by_one:
            return []
        self._follow()  # before others are due, so that what they wait for does not depend on speed
        former.strict = live.is_strict(former.next_step)
        applied = live.applied
        effects, is_cut_anew = live.apply(
            former.next_step, self._tokens_in_steps, self.has_begun, former.in_group, former.closed or self._is_ready
        )
        if live.applied > applied:
            former.hold_reach()
        former.strict = live.is_strict(former.next_step)
        self._follow()
        return effects + (self._read_again() if is_cut_anew else [])

    def _follow(self) -> None:
        """Form the next step by the rules that the merge follows, once all samples held fit."""
        live, former = self.live, self.former
        if self._followed < live.applied and not self.has_begun and former.fits(live.current):
            former.change(live.current, live.stage(live.applied))
            self._followed = live.applied

    @property
    def _may_admit(self) -> tuple[int, int]:
        """How many samples and tokens may be merged now, if their number must not depend on speed."""
        live, step = self.live, self.former.next_step
        if not self.former.strict or (live.is_placed(step) and not live.ramps(step)):
            return NOWHERE, NOWHERE
        tokens = self.live.ahead_tokens - self.former.unformed_tokens
        return (self.former.may_admit() if tokens > 0 else 0), tokens

    @property
    def _is_ready(self) -> bool:
        """True if all samples are merged that a stage of the rules may wait for."""
        former, merge = self.former, self.merge.current
        if not former.strict or merge.closed or not self._may_admit[0]:
            return True
        return self._memory.room <= 0 and self._memory.held_tokens <= self._memory.tokens_of(former.held())

    @property
    def _tokens_in_steps(self) -> int:
        """Real tokens of all steps before the next one; 0 if no change waits for tokens."""
        if not self.live.counts_tokens:
            return 0
        merged = int(self.merge.current.merged_tokens.sum())
        return merged - int(self._table.length[self.former.held()].astype(np.int64).sum())

    @property
    def _waits_to_change(self) -> bool:
        """True if the next step waits for a change of the rules that is due."""
        if self.former.closed or not (self.live.waits or self.former.strict):
            return False
        return self.live.is_due(self.former.next_step, self._tokens_in_steps, self.has_begun)

    @property
    def _must_wait(self) -> bool:
        """True if no step may be formed before a change. Without memory, only a step makes room for what it needs."""
        return self._waits_to_change and self._memory.room > 0

    @property
    def _waits_for_group(self) -> bool:
        """True if a change of the rules for the next step waits for the rest of a group."""
        return self.former.in_group and self._waits_to_change

    def _read_again(self) -> list[Effect]:
        """Read again the samples that wait for the merge: they were cut for other packs."""
        merge, leases = self.merge.current, self._leases
        absent, state = leases.accounts.absent_of(self._feed), merge.state()
        floors = leases.accounts.floors(self._feed, absent)
        waiting = self._drop_waiting()
        merge = self.live.restart(self.live.applied, self.former.next_step + 1)
        merge.load(state)
        self._repeat_order(merge)
        released = [Release(waiting)] if len(waiting) else []
        leases.accounts.cut_anew(self._feed, merge.merged_samples.tolist())
        return [*released, *leases.go_to(self._feed, floors, absent), *leases.remove(self.live.current)]

    def _repeat_order(self, merge: AnyMerge) -> None:
        """Give a new merge the order in which chunks came, if the rules merge by arrival."""
        if isinstance(merge, Arrival):
            for place in self._history.order:
                if place.count:
                    merge.script(place.partition, place.base_seq, place.count)

    @property
    def overfull(self) -> str:
        """Error text if the memory is too small to hold the whole next batch; else empty."""
        former, memory, batch = self.former, self._memory, self.former.rules.batch
        exact = self._rules.share is None and not self._rules.has_extra_bytes
        if (batch is None and exact) or memory.room > 0 or former.closed:
            return ""
        tokens = former.queued_tokens if exact else memory.tokens_of(former.held())
        if memory.held_tokens > tokens:
            return ""
        if batch is None:
            if not former.lacks_samples:
                return ""
            if self._rules.has_extra_bytes:
                return (
                    f"got {former.num_samples} samples for step {former.next_step}. The step is incomplete, but the "
                    f"memory is full of their media. Increase `memory`, make `rules.window` smaller, or send smaller "
                    f"media, and restart the broker."
                )
            return (
                f"got {tokens} tokens for step {former.next_step}, or {former.queued_tokens} if shared ones count "
                f"once. The step is incomplete, but the memory is full of whole samples. Increase `memory`, or make "
                f"`rules.budget` or `rules.step` smaller, and restart the broker."
            )
        return (
            f"got {former.queued_samples} samples with {tokens} tokens for the batch of step "
            f"{former.next_step}. The batch is incomplete, but the memory is full. Increase `memory` or make batches "
            f"smaller, and restart the broker."
        )

    def request(self) -> list[Effect]:
        """Return the effect that requests the next step's packs; no effect if samples are missing, or none are left."""
        request = None if self._must_wait else self.former.request()
        if request is None:
            return []
        self.forming = request
        return [Form(self._feed, request)]

    def formed(self, event: Formed) -> list[PlannedStep]:
        """Return the steps that a packer's choice completes."""
        self.forming = None
        return self._count(self.former.apply(event.choice))

    def complete(self) -> list[PlannedStep]:
        """Return the next steps if their packs are chosen already, and no change of the rules is due before them."""
        return [] if self._must_wait else self._count(self.former.complete())

    def cut(self) -> list[PlannedStep]:
        """Return the last steps of the feed or of a pass, once all of its samples are merged."""
        return self._count(self.former.cut())

    def end_pass(self) -> I64:
        """Begin the next pass, or end the feed, once every merged sample is in a step.

        Returns:
            Handles of the samples that ``tail: drop`` leaves out, int64 [n].
        """
        dropped, self.former.dropped = self.former.dropped, self.former.dropped[:0]
        self.displacements.dropped(dropped)
        if self.merge.current.closed:
            self.ended = True
        else:
            self.merge.current.next_pass()
            self.former.closed = False
        return dropped

    def _count(self, steps: list[PlannedStep]) -> list[PlannedStep]:
        """Count the samples of steps, in all and since the last snapshot, and return the steps."""
        self.displacements.formed(steps)
        recorded = self._history.last_snapshot
        self._since_snapshot += sum(step.num_samples for step in steps if step.number >= recorded)
        return steps

    def _stop(self) -> list[Effect]:
        """End the feed because a stream has stopped it; drop the waiting samples of the other streams."""
        handles = self._drop_waiting()
        return [*([Release(handles)] if len(handles) else []), *self._leases.close(self._feed)]

    def _drop_waiting(self) -> I64:
        """Drop the samples that wait for the merge, and count them as merged until they are released.

        Returns:
            Handles of the samples, int64 [n].
        """
        handles = self.merge.current.drop()
        self._memory.hold(handles)
        return handles

    @property
    def has_begun(self) -> bool:
        """True if packs of the next step are chosen, or are being chosen."""
        return self.former.begun or self.forming is not None

    # Snapshots

    def snapshot(self) -> Snapshot | None:
        """Return a snapshot of the state between two steps; None if the last snapshot is recent enough."""
        history = self._history
        if self._since_snapshot < max(SNAPSHOT_WINDOWS * self.former.rules.max_window, history.in_last_snapshot):
            return None
        self._since_snapshot = 0
        floors = self._leases.accounts.floors(self._feed, self.former.held())
        return msgspec.structs.replace(
            snapshot(self._rules, self.merge.current, self.former, floors), lineage=history.lineage,
            changes=list(history.changes), applied=self.live.applied, skips=list(history.skips),
            followed=UNSET if self._followed == self.live.applied else self._followed, schedule=history.schedule,
        )  # fmt: skip

    def reset(self) -> I64:
        """Forget all samples and pending packs, and return the handles of the samples, int64 [n]."""
        handles = np.concatenate([self._drop_waiting(), self.former.held()])
        self.merge.restart(self.live.current, awaits_state=True)
        former = Former(self.former.rules, self._table, self.former.stage)
        self.former, self.displacements = former, Displacements(self._table)
        self.forming, self.ended, self.blocked, self.overlong = None, False, None, ""
        self._since_snapshot = 0
        return handles

    def restore(self, taken: Snapshot | None) -> list[Effect]:
        """Go to the state of a snapshot, or to the first sample without one, after ``reset``."""
        applied = taken.applied if taken is not None else 0
        step = taken.step if taken is not None else 0
        merge = self.live.restart(applied, step)
        self._followed = applied if taken is None or taken.followed is UNSET else taken.followed
        live, followed = self.live, self._followed
        self.former = Former(live.after(followed), self._table, live.stage(followed))
        self.former.strict = self.live.is_strict(step)
        floors: list[Floor] = [(0, None)] * len(merge.merged_samples) if taken is None else taken.floors
        if taken is not None:
            restore(taken, self._rules, merge, self.former)
        self._repeat_order(merge)
        handles = self.former.held()
        if taken is not None:
            first_out = np.roll(handles, sum(taken.form.counts))  # the samples of pending packs come last in a state
            self.displacements.merged(first_out, self._table.column("length", first_out))
        self._memory.hold(handles)
        return self._leases.go_to(self._feed, floors, handles) + self._leases.remove(self.live.current)
