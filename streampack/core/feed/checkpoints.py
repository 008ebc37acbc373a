"""The checkpoints that trainers keep beside their model: what is in one, and what must stay in the log for the last.

One is *committed* when the trainers have said that it is durable, and that is in the log. The last few are kept, and
the place that trainers have gone back to until they have committed another beyond it: they had a checkpoint there.
"""

from __future__ import annotations

from collections import deque

import msgspec

from streampack.core.feed.resume import snapshot
from streampack.core.form.former import Former
from streampack.core.journal.history import History
from streampack.core.journal.journal import Journal
from streampack.core.journal.log_effects import Recall
from streampack.core.journal.log_records import CheckpointCommitted
from streampack.core.merge.queues import NOWHERE
from streampack.core.merge.schedule import merge_of
from streampack.core.model.rules import Rules
from streampack.core.model.samples import SampleTable
from streampack.core.model.steps import FIRST_CHAIN
from streampack.core.protocol.events import Effect
from streampack.core.protocol.trainer_messages import State


class Checkpoints:
    """One feed's, of which ``keeps`` stay; it began with ``rules``."""

    def __init__(
        self, feed: str, rules: Rules, keeps: int, history: History, journal: Journal, table: SampleTable
    ) -> None:  # fmt: skip
        self._feed, self._rules, self._keeps = feed, rules, keeps
        self._history, self._journal, self._table = history, journal, table
        self._unsafe: deque[tuple[int, int]] = deque()  # (record, step) of commits that are not safe yet
        self.committed_upto = -1
        """The last whose commit is safe, since trainers went back."""
        self._went_back_to = NOWHERE

    def state_of(self, step: int, generation: int) -> State | list[Effect]:
        """What one holds that begins at ``step``; or what is done to know it, nothing where nobody can."""
        history = self._history
        found = history.nearest(step)
        chain = history.chain_after(step - 1) if step else FIRST_CHAIN
        if found is not None and found[1] >= self._journal.safe_upto:
            return []  # a broker that is killed now would take another: ranks' states are equal
        if found is not None and found[2] is None:
            return [Recall(self._feed, found[1], generation)]
        taken = found[2] if found is not None else None
        if chain is None and taken is not None and taken.step == step:
            chain = taken.form.chain
        if chain is None:
            return []
        if taken is None and (history.changes or history.skips):
            merge, former = merge_of(self._rules), Former(self._rules, self._table)
            taken = snapshot(self._rules, merge, former, [(0, None)] * len(merge.merged_samples))
        if taken is not None:  # what was asked for later is known as well: it is the same run
            taken = msgspec.structs.replace(taken, changes=list(history.changes), skips=list(history.skips))
        return State(feed=self._feed, lineage=history.lineage, step=step, chain=chain, snapshot=taken)

    def commit(self, step: int) -> list[Effect]:
        """One that begins at ``step`` is durable; said again, or of an earlier one, it changes nothing."""
        if step <= max([self.committed_upto, *(said for _, said in self._unsafe)]):
            return []
        self._note(step)
        effects = self._journal.append(CheckpointCommitted(feed=self._feed, step=step))
        self._unsafe.append((self._journal.next_lsn - 1, step))
        return effects

    def safe(self, upto: int) -> int:
        """Records below ``upto`` are safe; ``committed_upto``."""
        while self._unsafe and self._unsafe[0][0] < upto:
            self.committed_upto = max(self.committed_upto, self._unsafe.popleft()[1])
        return self.committed_upto

    def go_back(self, step: int) -> None:
        """Trainers begin again at ``step``; what they commit from there on is new."""
        self._unsafe.clear()
        self.committed_upto, self._went_back_to = min(self.committed_upto, step - 1), step

    def recover(self, step: int) -> None:
        """The commit of ``step`` is in the log."""
        self._note(step)
        self.committed_upto = step

    def wanted_lsn(self, released_upto: int) -> int:
        """Records below are wanted no more: neither by the oldest that is kept nor by the slowest rank (R7)."""
        history = self._history
        short = self._journal.full and not history.in_order
        if not history.commits and not short:  # where all can be read again, it may go when room is short
            return 0
        step = min([*history.commits, self._went_back_to, released_upto])
        if short and history.nearest(step) is None:  # all of it is formed again from the first sample
            return NOWHERE
        return history.wanted_lsn(step)

    def _note(self, step: int) -> None:
        commits = self._history.commits
        commits[:] = [*(each for each in commits if each != step), step][-self._keeps :]
        if step >= self._went_back_to:
            self._went_back_to = NOWHERE
