"""The rules of a feed, as they change while it runs.

Changes come from the stages of the rules, and from people. A change waits (``History.pending``) until the step is about
to be formed from which on it holds, or the first step after so many tokens. Then it becomes whole rules, and is
recorded with its position, counted in merged samples. Whenever the feed comes to that step again, the merge stops at
the position and applies the change. FORM follows it between two steps (``Planner``).

The position of a stage of the rules must not depend on the speed of producers. So while one waits, the merge reads no
further ahead than ``Former.may_admit`` allows. The stage takes its position once all of these samples are merged. A
change that a person asks for takes its position at once when it is due. A position is never inside a group, because a
removed stream would leave a part of the group. A position is never before the last snapshot, which was taken without
the change.

A new stream is added as soon as the change is asked for, so that its producers can connect. Its partitions take their
quota from the memory of merged samples. It pauses until its change takes effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec
from msgspec import UNSET

from streampack.core.feed.merged_memory import MergedMemory
from streampack.core.intake.admission import Admission
from streampack.core.intake.leases import Leases
from streampack.core.journal.history import History
from streampack.core.journal.recorder import Recorder
from streampack.core.merge.feed_merge import FeedMerge
from streampack.core.merge.queues import NOWHERE
from streampack.core.merge.schedule import AnyMerge, change_merge
from streampack.core.model.capacity import ahead_tokens, largest_budget, needed_tokens
from streampack.core.model.keys.stage_keys import Stage, StageBegin
from streampack.core.model.lease_terms import terms_of
from streampack.core.model.rule_changes import (
    Difference,
    Restream,
    Scheduled,
    WholeRules,
    apply_change,
)
from streampack.core.model.rules import Rules, RulesChange, StreamRules
from streampack.core.model.steps import FIRST_STAGE, BegunStage
from streampack.core.protocol.effects import Release
from streampack.core.protocol.events import Effect, Report


class LiveRules:
    """The rules of one feed, which began with ``rules``; its ``history`` has the changes."""

    def __init__(
        self, feed: str, rules: Rules, history: History, admission: Admission, merge: FeedMerge,
        memory: MergedMemory, leases: Leases, recorder: Recorder, max_sample_tokens: int,
    ) -> None:  # fmt: skip
        self._feed, self._history, self._recorder = feed, history, recorder
        self._rules = msgspec.structs.replace(rules, stages=()) if rules.stages else rules
        self._admission, self._merge, self._memory, self._leases = admission, merge, memory, leases
        self._max_sample_tokens = max_sample_tokens
        self._streams: list[StreamRules] = list(rules.streams)
        """Every stream that the rules have or will have, in the order of their numbers."""
        self._latest: tuple[tuple[int, int, int], Rules] | None = None
        self.applied = 0
        """Number of changes that the merge follows."""
        self._ramped = 0
        """The merge has the weights of the step before this one."""

    @property
    def latest(self) -> Rules:
        """The rules after every change that was asked for, in the order of their steps."""
        history = self._history
        state = len(history.changes), len(history.asked), len(history.canceled)
        if self._latest is None or self._latest[0] != state:
            self._latest = state, self._all(history.pending, self._streams)[-1]
        return self._latest[1]

    @property
    def current(self) -> Rules:
        """The rules that the merge follows."""
        return self.after(self.applied)

    def after(self, count: int) -> Rules:
        """Return the rules after the first ``count`` changes."""
        return self._history.changes[count - 1].rules if count else self._rules

    def every(self) -> list[Rules]:
        """Return the rules at the begin of the run, and after each change that took effect or waits."""
        stages, pending = [self.after(count) for count in range(len(self._history.changes) + 1)], self._history.pending
        with suppress(ValueError):  # of a change that is not possible any more, and will not take effect
            stages += self._all(pending, self._streams)[1:] if pending else []
        return stages

    def stage(self, count: int) -> BegunStage:
        """Return the stage that begins with the last of the first ``count`` changes."""
        return BegunStage(count, self._history.changes[count - 1].name or "") if count else FIRST_STAGE

    def is_strict(self, next_step: int) -> bool:
        """Return True if the merge must not read on as fast as producers send.

        A stage of the rules, or the next weights of a change over several steps, is to come then.
        """
        ramp, stages = self.current.weights_ramp, len(self._history.rules.stages)
        return (ramp is not None and next_step < ramp.begin + ramp.steps) or (
            stages > 0 and any(change.id < stages for change in self._history.pending)
        )

    @property
    def waits(self) -> bool:
        """True if a change that the merge does not follow may become due."""
        return self.applied < len(self._history.changes) or bool(self._history.pending)

    @property
    def num_partitions(self) -> int:
        """Number of partitions of all streams, after every requested change."""
        return sum(stream.partitions for stream in self._streams)

    @property
    def spare_partitions(self) -> int:
        """Number of partitions that still fit in the memory."""
        return max(self._memory.limit_tokens - self._memory.needed_tokens, 0) // self._leases.partitions.quota_tokens

    @property
    def next_position(self) -> int:
        """The position at which the merge must stop to apply the next change; ``NOWHERE`` if there is no change."""
        changes = self._history.changes
        return changes[self.applied].position if self.applied < len(changes) else NOWHERE

    @property
    def counts_tokens(self) -> bool:
        """True if a change waits for a number of tokens."""
        return any(change.at.tokens is not None for change in self._history.pending)

    def is_due(self, next_step: int, tokens: int, has_begun: bool) -> bool:
        """Return True if step ``next_step`` must wait for a change of the rules; arguments as for ``apply``."""
        if self.ramps(next_step) or self.is_placed(next_step):
            return True
        return self.applied == len(self._history.changes) and bool(self._due(next_step, tokens, has_begun))

    def is_placed(self, next_step: int) -> bool:
        """Return True if a change for ``next_step`` or before has its place, up to which the merge must read."""
        changes = self._history.changes
        if self.applied == len(changes):
            return False
        return changes[self.applied].merged is not UNSET and changes[self.applied].step <= next_step

    def _due(self, next_step: int, tokens: int, has_begun: bool) -> list[Scheduled]:
        """Return the changes without a place that may take effect at ``next_step``. Stages of the rules begin in order.

        No stage begins within a step. A step that is recorded was formed before the change had its place. It must be
        formed again in the same way, so the change holds from a later step on.
        """
        if next_step < self._history.num_steps:
            return []
        due, stages, waits = list[Scheduled](), len(self._history.rules.stages), False
        for change in self._history.pending:
            comes = next_step >= change.at.step if change.at.step is not None else tokens >= (change.at.tokens or 0)
            comes = comes and not (has_begun and isinstance(change.ask, Stage))
            waits = waits or (change.id < stages and not comes)
            due += [change] if comes and not (waits and change.id < stages) else []
        return due

    def ramps(self, next_step: int) -> bool:
        """Return True if the merge must get other weights before it reads on for ``next_step``."""
        ramp = self.current.weights_ramp
        return ramp is not None and self._ramped <= next_step and ramp.begin < next_step < ramp.begin + ramp.steps

    def ask(self, ask: Difference, unformed: int, at: StageBegin | None, note: str) -> tuple[list[Effect], Scheduled]:
        """Request a change from ``at`` on, or from the first later step that no rank has.

        Args:
            ask: The change.
            unformed: The first step that no rank has.
            at: The requested begin; None for the earliest possible one.
            note: A text for the record.

        Returns:
            The effects, and the change.

        Raises:
            ValueError: The feed has ended, the change is not possible, or memory is short.
        """
        history = self._history
        if history.end is not None:
            raise ValueError(
                f"got a change of the rules of a feed that has ended after {history.end[0]} steps, expected a "
                f"change before the end"
            )
        if at is None or at.step is not None:
            at = StageBegin(step=max(unformed, (at.step if at is not None else None) or 0))
        if isinstance(ask, Stage):
            ask = msgspec.structs.replace(ask, at=at)
        change = Scheduled(history.next_id, ask, at, f"{note}, asked at step {unformed}")
        if isinstance(ask, Restream):
            self._check_streams(ask)
        streams = [*self._streams, *(ask.add if isinstance(ask, Restream) else ())]
        self._check_memory(self._all([*history.pending, change], streams))
        twice = [f"change {other.id} ({other.name})" for other in history.pending if _same(other, change)]
        effects = self._recorder.record_asked(change)
        self.know(streams)
        if twice:
            text = (
                f"feed {self._feed!r}: change {change.id} sets what {' and '.join(twice)} sets at {change.at}, too. It "
                f"holds, because it was asked for last"
            )
            effects.append(Report("warning", text, feed=self._feed))
        return effects, change

    def _check_streams(self, ask: Restream) -> None:
        """Raise ValueError for new streams that are not possible, or leave too little memory."""
        apply_change(self.latest, ask)
        others = any(isinstance(change.ask, Restream) for change in self._history.pending)
        if ask.add and self._rules.merge == "arrival" and others:
            raise ValueError(
                "got new streams while other new streams wait for their step, expected one change of streams at a time "
                "with `merge: arrival`. Wait for that step, or cancel the other change"
            )
        more = sum(stream.partitions for stream in ask.add)
        left = self._memory.limit_tokens - more * self._leases.partitions.quota_tokens
        if left < (least := self._memory.needed_tokens):
            raise ValueError(
                f"got {more} more partitions, which leave {left} tokens of memory for the window and the steps, "
                f"expected at least {least} tokens. Add fewer partitions, or start the broker with more memory."
            )

    def _check_memory(self, rules: list[Rules]) -> None:
        """Raise ValueError if the memory is too small for steps of one of these ``rules``; else plan for them."""
        needed = max(needed_tokens(stage_rules, self._max_sample_tokens) for stage_rules in rules)
        if needed > self._memory.limit_tokens:
            raise ValueError(
                f"got rules that need {needed} tokens of memory for the window and the steps, expected at most "
                f"{self._memory.limit_tokens}. Use a smaller budget, window or number of packs, or start the broker "
                f"with more `memory`"
            )
        self._memory.needed_tokens = max(self._memory.needed_tokens, needed)

    def cancel(self, number: int, note: str) -> list[Effect]:
        """Cancel the waiting change with this number. Raises ValueError if none waits."""
        waiting = {change.id: change for change in self._history.pending}
        if number not in waiting:
            numbers = ", ".join(f"{change.id} ({change.name})" for change in waiting.values()) or "none"
            raise ValueError(
                f"got change {number}, expected the number of a change that waits: {numbers}. A change that holds "
                f"cannot be canceled; ask for another one"
            )
        self._all([change for change in waiting.values() if change.id != number], self._streams)
        return self._recorder.record_canceled(number, note)

    @property
    def ahead_tokens(self) -> int:
        """The most tokens outside steps while samples must not be admitted as fast as they come."""
        rules_so_far = [self._history.rules, *(change.rules for change in self._history.changes[: self.applied])]
        return max(ahead_tokens(rules, self._max_sample_tokens) for rules in rules_so_far)

    def know(self, streams: Sequence[StreamRules]) -> None:
        """Add new streams before the merge has them; their quotas reduce the limit of ``memory``."""
        new_streams = streams[len(self._streams) :]
        if not new_streams:
            return
        self._streams += [msgspec.structs.replace(stream, paused=False) for stream in new_streams]
        partitions = self._leases.partitions
        before = len(partitions.of_feed(self._feed))
        rules = msgspec.structs.replace(self.current, streams=tuple(self._streams))
        self._admission.extend(terms_of(rules))
        self._leases.open(self._feed, rules, self._admission, self._merge, self._history)
        new = partitions.of_feed(self._feed)[before:]
        self._memory.limit_tokens -= len(new) * self._leases.partitions.quota_tokens
        for p in new:
            partitions.intakes[p].closed = True

    def know_asked(self) -> None:
        """Add the streams of every recorded change."""
        for change in self._history.changes:
            self.know(change.rules.streams)
        for request in self._history.asked:
            if isinstance(request.ask, WholeRules):
                self.know(request.ask.rules.streams)
            elif isinstance(request.ask, Restream):
                names = {stream.name for stream in self._streams}
                self.know([*self._streams, *(stream for stream in request.ask.add if stream.name not in names)])

    def recover_change(self) -> None:
        """Apply a recorded change while the broker starts; changes of versions before 0.2 may have no place."""
        self.know_asked()
        count = len(self._history.changes)
        merged = self._history.changes[-1].merged if count else UNSET
        if merged is not UNSET and _cuts_anew(self.after(count - 1), self.after(count)):
            self._leases.accounts.cut_anew(self._feed, merged)

    def restart(self, applied: int, next_step: int) -> AnyMerge:
        """Begin an empty merge that follows the first ``applied`` changes, at ``next_step``; return it."""
        self.applied, self._ramped = applied, next_step
        rules = self.current
        self._set_terms(rules)
        return self._merge.restart(rules, next_step - 1)

    @property
    def _later(self) -> int:
        """The largest budget of the rules' stages while a stage is still to begin; 0 afterwards."""
        rules = self._history.rules
        waits = any(change.id < len(rules.stages) for change in self._history.pending)
        return largest_budget(rules) if waits else 0

    def _set_terms(self, rules: Rules) -> None:
        """Apply the terms of ``rules`` to new samples, and remember the limits that cut earlier samples."""
        self._admission.change_terms(terms_of(rules, self._later))
        intakes = self._leases.partitions.intakes
        changes = self._history.changes[: self.applied]
        budgets = [self.after(number).budget for number in range(len(changes))]
        for number, p in enumerate(self._leases.partitions.of_feed(self._feed)):
            intakes[p].limits = [
                (change.merged[number] if number < len(change.merged) else 0, budget)
                for change, budget in zip(changes, budgets, strict=True)
                if change.merged is not UNSET and budget != change.rules.budget
            ]

    def apply(
        self, next_step: int, tokens: int, has_begun: bool, in_group: bool, is_ready: bool
    ) -> tuple[list[Effect], bool]:
        """Apply the changes that are due to the merge; record the place of each the first time that it is applied.

        Args:
            next_step: The step that is about to be formed.
            tokens: Tokens in the steps before it.
            has_begun: True if packs of the step are chosen, or are being chosen.
            in_group: True if more samples of the last merged sample's group are still to be merged.
            is_ready: True if all samples are merged that the step may wait for.

        Returns:
            The effects, and True if the samples that wait for the merge were cut by other terms.
        """
        effects: list[Effect] = []
        before = self.current
        merge, history = self._merge.current, self._history
        if is_ready and self.ramps(next_step):
            change_merge(merge, self.current, next_step)
            self._ramped = next_step + 1
        while self.applied < len(history.changes):
            change = history.changes[self.applied]
            if change.position > merge.position or (change.merged is not UNSET and change.step > next_step):
                break
            effects += self._follow(change, next_step)
        if self.applied == len(history.changes) and not in_group:
            effects += self._apply_due(next_step, tokens, has_begun, is_ready)
        return effects, self.current is not before and _cuts_anew(before, self.current)

    def _apply_due(self, next_step: int, tokens: int, has_begun: bool, is_ready: bool) -> list[Effect]:
        """Apply the changes that are due, in the order in which they were asked for, and record their places."""
        effects: list[Effect] = []
        merge, history = self._merge.current, self._history
        for due in self._due(next_step, tokens, has_begun):
            if not is_ready and due.id < len(history.rules.stages):
                break
            try:
                rules = self._with(self.current, due.ask, next_step, self._streams)
            except ValueError as error:
                text = f"feed {self._feed!r}: change {due.id} ({due.name}) does not take effect: {error}"
                effects += [Report("error", text, feed=self._feed, step=next_step)]
                effects += self._recorder.record_canceled(due.id, str(error)[:500])
                continue
            grows = len(rules.streams) > len(self.current.streams)
            if merge.position < history.last_position or (grows and not merge.may_grow):
                break
            change = RulesChange(
                step=next_step, position=merge.position, rules=rules, note=due.note or f"stage {due.name}", id=due.id,
                merged=merge.merged_samples.tolist(), name=_name_of(due.ask) or UNSET,
            )  # fmt: skip
            effects += self._recorder.record_change(change)
            effects += self._follow(change, next_step)
        return effects

    def _follow(self, change: RulesChange, next_step: int) -> list[Effect]:
        """Let the merge follow a change."""
        merge = self._merge.current
        num_partitions = len(merge.merged_samples)
        dropped = change_merge(merge, change.rules, next_step)
        self.applied, self._ramped = self.applied + 1, next_step + 1
        effects = self._leases.join(self._feed, num_partitions)
        self._set_terms(change.rules)
        self._memory.hold(dropped)
        effects += [Release(dropped)] if len(dropped) else []
        return effects + self._leases.remove(change.rules)

    def _all(self, pending: Sequence[Scheduled], streams: Sequence[StreamRules]) -> list[Rules]:
        """Return the rules now, and after each of the changes that wait, in the order of their steps."""
        rules_after = [self.after(len(self._history.changes))]
        for change in sorted(pending, key=_order):
            try:
                rules_after.append(self._with(rules_after[-1], change.ask, change.at.step or 0, streams))
            except ValueError as error:
                if change.id == self._history.next_id:  # the change that is asked for
                    raise
                raise ValueError(
                    f"change {change.id} ({change.name}), which begins at {change.at}, would not be possible then: "
                    f"{error}. Cancel it first with 'streampack set --cancel {change.id}'"
                ) from None
        return rules_after

    def _with(self, rules: Rules, ask: Difference, step: int, streams: Sequence[StreamRules]) -> Rules:
        """Return the rules after a change. Streams with lower numbers than the new ones pause until their change."""
        if not isinstance(ask, Restream) or not ask.add:
            return apply_change(rules, ask, step)
        replace = msgspec.structs.replace
        names = {stream.name for stream in ask.add}
        rules = apply_change(rules, Restream(remove=ask.remove), step) if ask.remove else rules
        upto = max(number for number, stream in enumerate(streams) if stream.name in names) + 1
        more = (replace(stream, paused=True) for stream in streams[len(rules.streams) : upto])
        all_streams = (replace(s, paused=False) if s.name in names else s for s in (*rules.streams, *more))
        return replace(rules, streams=tuple(all_streams), stages=())


def _cuts_anew(old: Rules, new: Rules) -> bool:
    """Return whether ``new`` rules cut the samples of a stream in another way than ``old`` rules."""
    return any(one.cuts != other.cuts for one, other in zip(terms_of(old), terms_of(new), strict=False))


def _name_of(ask: Difference) -> str:
    """Return the name of a stage; empty for other changes."""
    return ask.name if isinstance(ask, Stage) else ""


def _same(one: Scheduled, other: Scheduled) -> bool:
    """Return whether two changes set the same rule at the same step."""
    return one.at == other.at and bool(one.keys & other.keys)


def _order(change: Scheduled) -> tuple[int, int]:
    """Return a key that sorts changes by their step and number; those that begin after tokens come last."""
    return NOWHERE if change.at.step is None else change.at.step, change.id
