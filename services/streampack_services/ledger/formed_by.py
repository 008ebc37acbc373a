"""The rules by which FORM made a recorded step.

A change of the rules holds for the merge from its step on. FORM follows it at once, if each sample that is held fits in
a pack of the new rules. Otherwise FORM follows at the first step that is formed without such a sample. The log does not
record that step. Samples tell it: a sample of a step or of a later one was held there, if it was merged before.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.rules import Rules
from streampack.core.model.samples import PACK
from streampack_services.ledger.ledger import Ledger
from streampack_services.ledger.run_history import FeedHistory, RulesFrom
from streampack_services.ledger.step_rows import StepRows


class FormingRules:
    """The rules that FORM used for the steps of a feed, as far as the recorded steps show."""

    def __init__(self, ledger: Ledger, feed: FeedHistory) -> None:
        self._ledger, self._feed = ledger, feed
        self._late: dict[tuple[int, int], int] = {}
        """The last step at which FORM did not follow a change, by the step and the record of the change."""

    def of(self, step: StepRows) -> RulesFrom:
        """Return the rules that FORM used for a step."""
        changes, number = self._feed.changes_at(step.step, step.lsn), step.step
        while len(changes) > 1 and number <= self._last_late(changes):
            number = changes[-1].step - 1
            changes = [changes[0], *(change for change in changes[1:] if change.step <= number)]
        return changes[-1]

    def _last_late(self, changes: list[RulesFrom]) -> int:
        """Return the last step with a sample that was held at the last change, and fits in no pack of its rules."""
        *earlier, change = changes
        if all(_is_wider(change.rules, before.rules) for before in earlier):
            return -1
        key = change.step, change.lsn
        if key not in self._late:
            self._late[key] = next((step.step for step in self._held_at(change) if not _fits(step, change)), -1)
        return self._late[key]

    def _held_at(self, change: RulesFrom) -> list[StepRows]:
        """Return the steps that may have samples that were held at a change, last first."""
        last = change.step - 1
        for stream in change.rules.streams:
            if merged := change.merged_of(stream.name):
                last = max(last, self._ledger.last_with(stream.name, len(merged) * max(merged), change.step))
        name, effective = self._feed.name, self._feed.effective
        steps = (self._ledger.step(name, step, effective(step)) for step in range(last, change.step - 1, -1))
        return [step for step in steps if step is not None]


def _is_wider(new: Rules, old: Rules) -> bool:
    """Return whether everything that fits in a pack of ``old`` rules fits in one of ``new`` rules."""
    most, before = new.max_samples_per_pack, old.max_samples_per_pack
    same = (new.align.sample, new.limits) == (old.align.sample, old.limits)
    return same and new.budget >= old.budget and (most is None or (before is not None and before <= most))


def _fits(step: StepRows, change: RulesFrom) -> bool:
    """Return whether each sample of a step that was merged before a change fits in a pack of its rules."""
    rules, align = change.rules, change.rules.align.sample
    slots = -(-step.own_lengths // align) * align
    if not len(slots):
        return True
    counts = [(slots, rules.budget // align * align), (np.ones(len(slots), np.int64), rules.max_samples_per_pack)]
    if (limits := rules.limits) is not None:
        counts += [(step.column("patches"), limits.patches), (step.column("items"), limits.items)]
    begins = np.flatnonzero(np.concatenate([[True], step.extras["keep"][:-1] != PACK]))
    was_held = _before(step, change)[begins]
    return not any(
        (np.add.reduceat(count, begins) > most)[was_held].any() for count, most in counts if most is not None
    )


def _before(step: StepRows, change: RulesFrom) -> NDArray[np.bool_]:
    """Return which samples of a step were merged before a change, bool [n]."""
    before = np.zeros(len(step.rows), np.bool_)
    for number, stream in enumerate(change.rules.streams):
        merged = np.array(change.merged_of(stream.name), np.int64)
        if len(merged):
            own = step.rows["stream"] == number
            index = step.rows["index"][own].astype(np.int64)
            before[own] = index // len(merged) < merged[index % len(merged)]
    return before
