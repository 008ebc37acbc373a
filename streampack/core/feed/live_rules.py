"""The rules of a feed, as they change while it runs.

A change takes effect at a step that no rank has had when the change is requested. The change is recorded at once, and
again when that step is about to be formed. Then the change has a position, counted in merged samples. Whenever the
merge comes to that position again, it applies the change. A position is never inside a group, because a removed stream
would leave a part of the group. A position is never before the last snapshot, which was taken without the change. A new
stream is added as soon as the change is requested, so that its producers can connect. Its partitions take their quota
from the memory of merged samples.
"""

from __future__ import annotations

import msgspec

from streampack.core.feed.merged_memory import MergedMemory
from streampack.core.intake.admission import Admission
from streampack.core.intake.leases import Leases
from streampack.core.journal.history import History
from streampack.core.journal.recorder import Recorder
from streampack.core.merge.feed_merge import FeedMerge
from streampack.core.merge.queues import NOWHERE
from streampack.core.merge.schedule import change_merge
from streampack.core.model.lease_terms import terms_of
from streampack.core.model.rules import Rules, RulesChange
from streampack.core.protocol.effects import Release
from streampack.core.protocol.events import Effect


class LiveRules:
    """The rules of one feed, which began with ``rules``; its ``history`` has the changes."""

    def __init__(
        self, feed: str, rules: Rules, history: History, admission: Admission, merge: FeedMerge,
        memory: MergedMemory, leases: Leases, recorder: Recorder,
    ) -> None:  # fmt: skip
        self._feed, self._rules, self._history, self._recorder = feed, rules, history, recorder
        self._admission, self._merge, self._memory, self._leases = admission, merge, memory, leases
        self.applied = 0
        """Number of changes that the merge follows."""

    @property
    def latest(self) -> Rules:
        """The rules after every requested change."""
        changes = self._history.changes
        return changes[-1].rules if changes else self._rules

    @property
    def current(self) -> Rules:
        """The rules that the merge follows."""
        return self._history.changes[self.applied - 1].rules if self.applied else self._rules

    @property
    def waiting(self) -> bool:
        """True if the merge has not applied some change yet."""
        return self.applied < len(self._history.changes)

    @property
    def num_partitions(self) -> int:
        """Number of partitions of all streams, after every requested change."""
        return _partitions(self.latest)

    @property
    def spare_partitions(self) -> int:
        """Number of partitions that still fit in the memory."""
        return max(self._memory.limit_tokens - self._memory.needed_tokens, 0) // self._leases.partitions.quota_tokens

    @property
    def next_position(self) -> int:
        """The position at which the merge must stop to apply the next change; ``NOWHERE`` if there is no change."""
        changes = self._history.changes
        position = changes[self.applied].position if self.applied < len(changes) else -1
        return position if position >= 0 else NOWHERE

    def waits_for_group(self, next_step: int, in_group: bool) -> bool:
        """Return whether a change for ``next_step`` has to wait until all samples of a group are merged."""
        changes = self._history.changes[self.applied : self.applied + 1]
        return in_group and any(self._is_due(change, next_step) for change in changes)

    def _is_due(self, change: RulesChange, next_step: int) -> bool:
        """Return True if ``change`` has no position yet and may take effect at ``next_step``.

        A step that is recorded was formed before the change had a position. It must be formed again in the same way,
        so the change holds from a later step on.
        """
        return change.position < 0 and max(change.step, self._history.num_steps) <= next_step

    def ask(self, rules: Rules, unformed: int, at_step: int | None, note: str) -> tuple[list[Effect], int]:
        """Request a change to ``rules`` from ``at_step`` on, or from the first later step that no rank has.

        Args:
            rules: The new rules.
            unformed: The first step that no rank has.
            at_step: The requested step; None for the earliest possible one.
            note: A text for the record.

        Returns:
            The effects, and the step.

        Raises:
            ValueError: The feed has ended, or memory is short.
        """
        history = self._history
        if history.end is not None:
            raise ValueError(
                f"got a change of the rules of a feed that has ended after {history.end[0]} steps, expected a "
                f"change before the end"
            )
        more = _partitions(rules) - self.num_partitions
        left = self._memory.limit_tokens - more * self._leases.partitions.quota_tokens
        if left < (least := self._memory.needed_tokens):
            raise ValueError(
                f"got {more} more partitions, which leave {left} tokens of memory for the window and the steps, "
                f"expected at least {least} tokens. Add fewer partitions, or start the broker with more memory."
            )
        step = max(unformed, at_step or 0, history.changes[-1].step if history.changes else 0)
        change = RulesChange(step=step, position=-1, rules=rules, note=f"{note}, asked at step {unformed}")
        effects = self._recorder.record_change(change)
        self.know(rules)
        return effects, step

    def know(self, rules: Rules) -> None:
        """Add the new streams of ``rules`` before the merge has them; their quotas reduce the limit of ``memory``."""
        partitions = self._leases.partitions
        before = len(partitions.of_feed(self._feed))
        self._admission.extend(terms_of(rules))
        self._leases.open(self._feed, rules, self._admission, self._merge, self._history)
        new = partitions.of_feed(self._feed)[before:]
        self._memory.limit_tokens -= len(new) * self._leases.partitions.quota_tokens
        for p in new:
            partitions.intakes[p].closed = True

    def apply(self, next_step: int, in_group: bool = False) -> list[Effect]:
        """Apply the due changes to the merge; record the position of each change the first time that it is applied.

        Args:
            next_step: The step that is about to be formed.
            in_group: True if more samples of the last merged sample's group are still to be merged.
        """
        effects: list[Effect] = []
        merge, changes = self._merge.current, self._history.changes
        while self.applied < len(changes):
            change, known = changes[self.applied], len(merge.merged_samples)
            may_be_here = not in_group and merge.position >= self._history.last_position
            grows = _partitions(change.rules) > known
            if self._is_due(change, next_step) and may_be_here and (merge.may_grow or not grows):
                change = msgspec.structs.replace(change, step=next_step, position=merge.position)
                effects += self._recorder.record_change(change)
            if change.position < 0 or change.position > merge.position:
                break
            dropped = change_merge(merge, change.rules)
            self.applied += 1
            effects += self._leases.join(self._feed, known)
            self._memory.hold(dropped)
            effects += [Release(dropped)] if len(dropped) else []
            effects += self._leases.remove(change.rules)
        return effects


def _partitions(rules: Rules) -> int:
    """Return the number of partitions of all streams."""
    return sum(stream.partitions for stream in rules.streams)
