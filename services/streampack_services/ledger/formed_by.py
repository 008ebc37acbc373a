"""The rules by which FORM made a recorded step.

A change of the rules holds for the merge from its step on. FORM follows it at once, unless a sample that is held does
not fit in a pack of the new rules. Then FORM follows at the first step that is formed without such a sample. The log
does not record that step, but the samples of the steps tell it. A sample was held if it was merged before the change,
and is in this step or a later one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.rules import Rules
from streampack.core.model.samples import PACK
from streampack_services.ledger.ledger import Ledger
from streampack_services.ledger.run_history import RulesFrom
from streampack_services.ledger.step_rows import StepRows


def formed_by(ledger: Ledger, step: StepRows) -> RulesFrom:
    """Return the rules by which FORM made a step, as far as the recorded steps tell."""
    changes, number = ledger.history.feeds[step.feed].changes_at(step.step, step.lsn), step.step
    while len(changes) > 1 and _is_late(ledger, step.feed, changes, number):
        number = changes[-1].step - 1
        changes = [changes[0], *(change for change in changes[1:] if change.step <= number)]
    return changes[-1]


def _is_late(ledger: Ledger, feed: str, changes: list[RulesFrom], number: int) -> bool:
    """Return whether a sample is held at step ``number`` that does not fit in a pack of the last of the ``changes``."""
    *earlier, change = changes
    if all(_is_wider(change.rules, before.rules) for before in earlier):
        return False
    history, last = ledger.history.feeds[feed], number
    for stream in change.rules.streams:
        if merged := change.merged_of(stream.name):
            last = max(last, ledger.last_with(stream.name, len(merged) * max(merged), number))
    steps = (ledger.step(feed, each, history.effective(each)) for each in range(number, last + 1))
    return any(not _fits(step, change) for step in steps if step is not None)


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
    held = _before(step, change)[begins]
    return not any((np.add.reduceat(count, begins) > most)[held].any() for count, most in counts if most is not None)


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
