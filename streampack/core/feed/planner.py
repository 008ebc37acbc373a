"""What one feed's steps are formed of, and how far it has come: admitted samples, merged, in a window, in packs.

It merges while the next step may need more and there is memory for it, asks for packs to be chosen, and can be put
anywhere: where a snapshot was taken, or at the first sample. ``generation`` tells one stay from the next, so that
what was asked for in an earlier one is known to be of no use. Knows nothing of readers, nor of what becomes of steps.
"""

from __future__ import annotations

import msgspec
import numpy as np

from streampack.core.feed.live_rules import LiveRules
from streampack.core.feed.merged_memory import MergedMemory
from streampack.core.feed.resume import restore, snapshot
from streampack.core.form.former import Former
from streampack.core.intake.admission import Admission
from streampack.core.intake.lease_terms import terms_of
from streampack.core.intake.leases import Leases
from streampack.core.journal.history import History
from streampack.core.journal.recorder import Recorder
from streampack.core.merge.arrival import Arrival
from streampack.core.merge.schedule import merge_of
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64, SampleTable
from streampack.core.model.snapshot import Floor, Snapshot
from streampack.core.model.steps import Step
from streampack.core.protocol.effects import Form, Formed, Release
from streampack.core.protocol.events import Effect

SNAPSHOT_WINDOWS = 4
"""A snapshot is taken when so many windows of samples are in steps since the last, which a restart forms again, and as
many as that one holds: one for each step of many samples would be most of the log."""


class Planner:
    """One feed's; ``admission`` gets its samples from ``leases``, ``memory`` bounds what is merged."""

    def __init__(
        self, feed: str, rules: Rules, history: History, memory: MergedMemory, max_sample_tokens: int,
        table: SampleTable, leases: Leases, recorder: Recorder,
    ) -> None:  # fmt: skip
        self._feed, self._rules, self._history = feed, rules, history
        self._memory, self._table, self._leases = memory, table, leases
        merge = merge_of(rules)
        self.admission = Admission(terms_of(rules), rules.tokens, rules.fields, max_sample_tokens, table, merge)
        leases.open(feed, rules, self.admission, history)
        self.live = LiveRules(feed, rules, history, self.admission, memory, leases, recorder)
        self.former = Former(rules, table)
        self.generation = 0
        self.forming = False
        """A choice of packs is being made."""
        self.ended = False
        """Everything there ever was is in a step, or dropped."""
        self.blocked: int | None = None
        """The partition, of the feed's own, whose next sample the merge waits for."""
        self._since_snapshot = 0
        """Samples in steps since the last one that is recorded."""

    # Forming steps

    def fill(self) -> list[Effect]:
        """Merge while the next step may need more, and there is room."""
        merge, target = self.admission.merge, 2 * self._rules.packs * self._rules.budget
        effects = self._change_rules()
        while (room := self._memory.room) > 0 and (self.former.hungry or self._waits_for_group):
            taken = merge.take(1 if self._waits_for_group else min(room, target), self.live.next_position)
            self.blocked = taken.blocked
            if not len(taken.moved):
                if not (merge.between_passes and self.former.too_few):
                    break
                merge.next_pass()
            effects += self._leases.merged(self._feed, taken.moved)
            self.former.admit(taken.handles, taken.lengths)
            self._memory.hold(taken.handles)
            effects += self._change_rules()
        closed = merge.closed or (merge.between_passes and not self.former.too_few)
        if closed and not self.former.closed and merge.stopped:
            effects += self._stop()
        self.former.closed = closed
        return effects

    def _change_rules(self) -> list[Effect]:
        return self.live.apply(self.former.next_step, self.former.in_group) if self.live.waiting else []

    @property
    def _waits_for_group(self) -> bool:
        """Does a change of the rules that the next step needs wait for the rest of a group?"""
        if self.former.closed or not self.live.waiting:
            return False
        return self.live.waits_for_group(self.former.next_step, self.former.in_group)

    @property
    def overfull(self) -> str:
        """Why the next batch can never be whole: it alone fills the memory. Empty where it can."""
        former, memory = self.former, self._memory
        if self._rules.batch is None or memory.room > 0 or memory.held_tokens > former.queued_tokens or former.closed:
            return ""
        return (
            f"got {former.queued_samples} samples of {former.queued_tokens} tokens for the batch of step "
            f"{former.next_step}, which is not whole, and no more fit in memory: set memory to more, or make batches "
            f"smaller, and start the broker again"
        )

    def request(self) -> list[Effect]:
        """Ask for the packs of the next step to be chosen; nothing where that needs more samples, or none are left."""
        waits = self._waits_for_group and self._memory.room > 0  # else only a step makes room for the rest of it
        request = None if waits else self.former.request()
        if request is None:
            return []
        self.forming = True
        return [Form(self._feed, request, self.generation)]

    def formed(self, event: Formed) -> list[Step]:
        """The steps of a packer's choice."""
        self.forming = False
        return self._count(self.former.apply(event.choice))

    def cut(self) -> list[Step]:
        """The last steps of a feed, or of a pass over it, which nothing more comes to."""
        return self._count(self.former.cut())

    def end_pass(self) -> I64:
        """Everything held is in a step: go on with the next pass, or be at the end; what ``tail: drop`` has left over,
        int64 [n]."""
        dropped, self.former.dropped = self.former.dropped, self.former.dropped[:0]
        if self.admission.merge.closed:
            self.ended = True
        else:
            self.admission.merge.next_pass()
            self.former.closed = False
        return dropped

    def _count(self, steps: list[Step]) -> list[Step]:
        recorded = self._history.last_snapshot
        self._since_snapshot += sum(step.num_samples for step in steps if step.number >= recorded)
        return steps

    def _stop(self) -> list[Effect]:
        """A stream has stopped the feed: let go of what the others hold, and ask for no more of it."""
        handles = self._drop_waiting()
        return [*([Release(handles)] if len(handles) else []), *self._leases.close(self._feed)]

    def _drop_waiting(self) -> I64:
        """What waits for the merge, int64 [n]: no longer there, and counted as merged until it is released."""
        handles = self.admission.merge.drop()
        self._memory.hold(handles)
        return handles

    # Being elsewhere

    def snapshot(self) -> Snapshot | None:
        """One to begin from here, between two steps; None where the last is near enough, or beyond this place."""
        history = self._history
        if self._since_snapshot < max(SNAPSHOT_WINDOWS * self._rules.window, history.in_last_snapshot):
            return None
        self._since_snapshot = 0
        floors = self._leases.books.floors(self._feed, self.former.held())
        return msgspec.structs.replace(
            snapshot(self._rules, self.admission.merge, self.former, floors), lineage=history.lineage,
            changes=list(history.changes), applied=self.live.applied, skips=list(history.skips),
        )  # fmt: skip

    def let_go(self) -> I64:
        """Forget where it is; handles, int64 [n], of all that it held."""
        held = np.concatenate([self._drop_waiting(), self.former.held()])
        self.admission.merge, self.former = merge_of(self._rules), Former(self._rules, self._table)
        self.generation += 1
        self.forming, self.ended, self.blocked = False, False, None
        self._since_snapshot = 0
        return held

    def restore(self, taken: Snapshot | None) -> list[Effect]:
        """Be where a snapshot was taken, or at the first sample; everything was let go of."""
        self.live.applied = taken.applied if taken is not None else 0
        rules = self.live.current
        merge = self.admission.merge = merge_of(rules)
        floors: list[Floor] = [(0, None)] * len(merge.merged_samples) if taken is None else taken.floors
        if taken is not None:
            restore(taken, self._rules, merge, self.former)
        if isinstance(merge, Arrival):
            for place in self._history.order:
                if place.count:
                    merge.script(place.partition, place.base_seq, place.count)
        held = self.former.held()
        self._memory.hold(held)
        return self._leases.go_to(self._feed, floors, held) + self._leases.remove(self._feed, rules)
