"""A feed: some streams under rules of their own, from the merge to the readers.

What a trainer connects to. It merges its streams' samples, has steps formed of them and serves
them to its readers; nothing of it touches another feed. Its streams belong to it alone, and
are numbered among themselves, so that a run with more feeds has the same steps in this one.

Memory: samples that wait for the merge are bounded by each partition's quota, those merged (in
the window, in packs, in steps that some rank has not returned) by ``merged_tokens``. Neither
borrows from the other nor from another feed, so the merge can always get the sample it waits
for, and a full arena cannot deadlock.

A feed whose streams all end may be iterated again. It then goes back to its first sample:
everything held is forgotten, the producers seek back, and the same steps come again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streampack.core.admission import Admission, terms_of
from streampack.core.effects import Form, Formed, Release
from streampack.core.events import Effect, Report
from streampack.core.form import Former, Step
from streampack.core.kept import LINEAGE
from streampack.core.leases import Leases
from streampack.core.merge import merge_of
from streampack.core.messages import State
from streampack.core.readers import Readers
from streampack.core.rules import Rules
from streampack.core.samples import I64, SampleTable
from streampack.core.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class FeedPlan:
    """A feed before it runs: ``layout`` is how context parallelism cuts its packs, ``merged_tokens`` its share of
    the arena for all that is merged."""

    name: str
    rules: Rules
    merged_tokens: int
    layout: str = "zigzag"


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
        leases: Leases,
    ) -> None:  # fmt: skip
        self.plan, self.name, self.rules = plan, plan.name, plan.rules
        self._max_sample_tokens, self._steps_ahead = max_sample_tokens, steps_ahead
        self._table, self._leases = table, leases
        rules = plan.rules
        self.admission = Admission(
            terms_of(rules), rules.tokens, rules.fields, max_sample_tokens, table, merge_of(rules)
        )  # fmt: skip
        self.origin = leases.open(rules, self.admission)
        """Its first partition's number in ``leases``."""
        self.readers = Readers(
            run, epoch, plan.name, rules, plan.layout, table, self.waiting_for, self._rewind, self._state_of,
            self._commit,
        )  # fmt: skip
        self.former = Former(rules, table)
        self.totals = Totals()
        self.held_tokens = 0
        """Merged and not yet released."""
        self._forming = False
        self._generation = 0
        self._blocked: int | None = None

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
        if self._forming:
            return "forming", "the step is being packed"
        if self.former.next_step >= self.readers.released_upto + self._steps_ahead:
            return "peers", self.readers.slowest
        if self._room() <= 0:
            return "memory", f"the arena is full: {self.readers.slowest}"
        if self._blocked is not None:
            return "stream", f"no sample has come from {self._leases.describe(self.origin + self._blocked)}"
        return "forming", "the step is being packed"

    def advance(self) -> list[Effect]:
        """Move on as far as can be: merge what may be merged, ask for a step to be formed."""
        effects: list[Effect] = []
        while self.readers.end is None and not self.readers.draining:
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
        return effects

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
                self._table.free(effect.handles)
        return effects

    def _fill(self) -> list[Effect]:
        """Merge while the next step may need more, and there is room."""
        merge, target = self.admission.merge, 2 * self.rules.packs * self.rules.budget
        effects: list[Effect] = []
        while (room := self._room()) > 0 and (self.former.queued_tokens < target or self.former.starved):
            taken = merge.take(min(room, target))
            self._blocked = taken.blocked
            if not len(taken.moved):
                break
            effects += self._leases.merged(self.origin, taken.moved)
            self.former.admit(taken.handles, taken.lengths)
            self.held_tokens += int(taken.lengths.sum())
        closed = merge.closed or merge.between_passes
        if closed and not self.former.closed and merge.stopped:
            effects += self._stop()
        self.former.closed = closed
        return effects

    def _stop(self) -> list[Effect]:
        """A stream has stopped the feed: let go of what the others hold, and ask for no more of it."""
        handles = self._drop_waiting()
        return [*([Release(handles)] if len(handles) else []), *self._leases.close(self.origin)]

    def _drop_waiting(self) -> I64:
        """What waits for the merge, int64 [n]: no longer there, and counted as merged until it is released."""
        handles = self.admission.merge.drop()
        self.held_tokens += int(self._table.length[handles].sum())
        return handles

    def _room(self) -> int:
        return self.plan.merged_tokens - self.held_tokens - self._max_sample_tokens

    def _publish(self, steps: list[Step]) -> list[Effect]:
        effects: list[Effect] = []
        for step in steps:
            self.totals.add(step)
            effects += self.readers.add(step) if step.number >= self.readers.formed_upto else self._pass(step)
        if self.former.finished and self.readers.end is None:
            dropped, self.former.dropped = self.former.dropped, self.former.dropped[:0]
            self.totals.dropped_samples += len(dropped)
            if len(dropped):
                effects.append(Release(dropped))
            if not self.admission.merge.closed:
                self.admission.merge.next_pass()
                self.former.closed = False
                return effects
            count = self.former.next_step
            effects.append(Report("info", f"feed {self.name!r} has ended after {count} steps"))
            effects += self.readers.finish(count, self.former.chain)
        return effects

    def _pass(self, step: Step) -> list[Effect]:
        """A step before the one that the readers begin at."""
        handles = np.concatenate([pack.handles for pack in step.packs])
        return [Release(handles), *self.readers.check(step.number + 1, step.chain)]

    def _state_of(self, step: int) -> State | None:
        chain = self.readers.chain_of(step)
        known = chain or not step
        return State(feed=self.name, lineage=LINEAGE, step=step, chain=chain, snapshot=None) if known else None

    def _commit(self, step: int) -> list[Effect]:
        return self.readers.committed(step)

    def _rewind(self, step: int, snapshot: Snapshot | None) -> list[Effect]:
        """Go to ``step``, from the first sample if it is behind; the readers have let go of their steps."""
        if step >= self.former.next_step:
            return []
        held = np.concatenate([self._drop_waiting(), self.former.held()])
        self.admission.merge, self.former = merge_of(self.rules), Former(self.rules, self._table)
        self._generation += 1
        self._forming, self._blocked = False, None
        again = Report("info", f"feed {self.name!r} begins again at its first sample")
        return [Release(held), again, *self._leases.rewind(self.origin)]
