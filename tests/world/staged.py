"""A feed's steps with no broker at all, of rules that change: from its data, its rules and what was recorded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from crc32c import crc32c
from msgspec.structs import replace

from streampack.core.form.former import Former
from streampack.core.intake.overlong import apply_overlong
from streampack.core.merge.schedule import AnyMerge, change_merge, merge_of
from streampack.core.model.capacity import ahead_tokens
from streampack.core.model.rule_changes import apply_change
from streampack.core.model.rules import Rules, RulesChange
from streampack.core.model.samples import SampleTable, index_of
from streampack.core.model.steps import PlannedStep
from tests.world.planned import Data, tokens_of

Push = Callable[[Rules, AnyMerge], None]
"""Enters into a merge all samples that it has not merged, cut as the rules say."""


class Staged:
    """The steps of ``rules``, whose stages come in order. No sample is longer than ``longest``.

    With ``changes`` the rules change as was recorded, and not by the stages.
    """

    def __init__(
        self, rules: Rules, table: SampleTable, push: Push, longest: int, changes: list[RulesChange] | None = None
    ) -> None:  # fmt: skip
        self.table, self.changes, self._push = table, list(changes or ()), push
        self.rules = replace(rules, stages=())
        self.waiting = list(rules.stages) if changes is None else []
        self.former, self.merge = Former(self.rules, table), merge_of(self.rules)
        self.former.one_by_one = True
        self.most_tokens, self.longest = ahead_tokens(rules, longest), longest
        self.steps: list[PlannedStep] = []
        self.begins: list[tuple[int, int]] = []
        """The step and the position at which each stage began."""
        push(self.rules, self.merge)

    def plan(self) -> list[PlannedStep]:
        """Form all steps."""
        former = self.former
        while not former.finished:
            self._begin_step()
            while not former.closed and self._admit():
                pass
            if steps := former.complete():
                self.steps += steps
                continue
            request = former.request()
            self.steps += former.cut() if request is None else former.apply(request.choose())
        return self.steps

    def _admit(self) -> bool:
        """Merge as far as is allowed; return whether something came."""
        former, (tokens, most) = self.former, self._bounds()
        place = self.changes[0].position if self.changes else 1 << 40
        taken = self.merge.take(tokens, place, most) if most else None
        if taken is not None:
            former.admit(taken.handles, taken.lengths)
        former.closed = self.merge.closed
        return taken is not None and len(taken.moved) > 0

    def _bounds(self) -> tuple[int, int]:
        """The tokens and pieces that may be merged now."""
        former = self.former
        if not former.strict:
            return 1 << 40, 1 << 40
        tokens = self.most_tokens - former.unformed_tokens
        return tokens, former.may_admit() if tokens > 0 else 0

    def _begin_step(self) -> None:
        """Let the stages begin that are due, before any pack of the step is chosen."""
        former, ramp = self.former, self.rules.weights_ramp
        former.strict = bool(self.waiting) or self._ramps
        if former.begun:
            return
        self._follow()
        if ramp is not None and self._ramps and former.next_step > ramp.begin:
            while self._admit():
                pass
            if former.closed or not self._bounds()[1]:
                change_merge(self.merge, self.rules, former.next_step)
        while self.changes and self.changes[0].step <= former.next_step:
            taken = self.merge.take(1 << 40, self.changes[0].position)
            former.admit(taken.handles, taken.lengths)
            assert self.merge.position == self.changes[0].position
            self._turn(self.changes.pop(0).rules)
        if self.waiting and self._is_due():
            while self._admit():
                pass
        while self.waiting and self._is_due():  # all of them at one place
            self.begins.append((former.next_step, self.merge.position))
            self._turn(apply_change(self.rules, self.waiting.pop(0), former.next_step))
        former.strict = bool(self.waiting) or self._ramps
        self._follow()

    def _follow(self) -> None:
        """Let packs follow the rules of the merge, as soon as all samples fit."""
        if self.former.rules != self.rules and self.former.fits(self.rules):
            self.former.change(self.rules)

    @property
    def _ramps(self) -> bool:
        """True while the weights change from step to step."""
        ramp = self.rules.weights_ramp
        return ramp is not None and self.former.next_step < ramp.begin + ramp.steps

    def _turn(self, rules: Rules) -> None:
        """Let the merge follow other rules."""
        self.rules, step = rules, self.former.next_step
        self.most_tokens = max(self.most_tokens, ahead_tokens(rules, self.longest))
        change_merge(self.merge, rules, step)
        self.former.hold_reach()
        state = self.merge.state()
        self.merge = merge_of(rules, step)
        self.merge.load(state)
        self._push(rules, self.merge)
        self.former.closed = self.merge.closed

    def _is_due(self) -> bool:
        at, former = self.waiting[0].at, self.former
        if at.step is not None:
            return at.step <= former.next_step
        held = int(self.table.length[former.held()].sum())
        return at.tokens is not None and at.tokens <= int(self.merge.merged_tokens.sum()) - held


class StagedPlan(Staged):
    """The steps of rules over ``data``."""

    def __init__(
        self, rules: Rules, data: Data, longest: int, changes: list[RulesChange] | None = None
    ) -> None:  # fmt: skip
        self.data = data
        super().__init__(rules, SampleTable(64), self._push_data, longest, changes)

    def _push_data(self, rules: Rules, merge: AnyMerge) -> None:
        p = 0
        for number, stream in enumerate(rules.streams):
            for partition, lengths in enumerate(self.data[stream.name]):
                first = int(merge.merged_samples[p])
                whole = np.array(lengths[first:], np.int64)
                pieces = apply_overlong(whole, rules.budget, stream.overlong)
                handles = np.full(len(pieces.length), -1, np.int64)
                kept = np.flatnonzero(pieces.length)
                handles[kept] = rows = self.table.take(len(kept))
                seqs = first + pieces.source[kept]
                self.table.stream[rows], self.table.part[rows] = number, pieces.part[kept]
                self.table.index[rows] = index_of(seqs, partition, stream.partitions)
                self.table.length[rows], self.table.loss_tokens[rows] = pieces.length[kept], pieces.length[kept] - 1
                crcs = [crc32c(tokens_of(stream.name, partition, seq, lengths[seq])) for seq in seqs.tolist()]
                self.table.crc[rows] = crcs
                merge.push(p, handles, pieces.length, pieces.part)
                merge.end(p)
                p += 1
