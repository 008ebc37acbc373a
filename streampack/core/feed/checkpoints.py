"""The checkpoints that trainers keep beside their model: their contents, and the records that the log keeps for them.

A checkpoint is *committed* when the trainers have reported it as durable, and the log has a record of their report. The
log keeps the records for the last few checkpoints. If trainers went back to a checkpoint, the log also keeps the
records for its step until they commit a later one.
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
    """The checkpoints of one feed, which began with ``rules``; the last ``keeps`` are kept."""

    def __init__(
        self, feed: str, rules: Rules, keeps: int, history: History, journal: Journal, table: SampleTable
    ) -> None:  # fmt: skip
        self._feed, self._rules, self._keeps = feed, rules, keeps
        self._history, self._journal, self._table = history, journal, table
        self._unsafe: deque[tuple[int, int]] = deque()  # (LSN, step) of commits that are not safe yet
        self.committed_upto = -1
        """Step of the last checkpoint whose commit is safe, since trainers went back; -1 if there is none."""
        self._went_back_to = NOWHERE

    def state_of(self, step: int) -> State | list[Effect]:
        """Return the state of a checkpoint at ``step``, or the effects that fetch it; an empty list if unknown."""
        history = self._history
        nearest = history.nearest(step)
        chain = history.chain_after(step - 1) if step else FIRST_CHAIN
        if nearest is not None and nearest[1] >= self._journal.safe_upto:
            return []  # a killed broker would take another one, but all ranks must have equal states
        if nearest is not None and nearest[2] is None:
            return [Recall(self._feed, nearest[1])]
        taken = nearest[2] if nearest is not None else None
        if chain is None and taken is not None and taken.step == step:
            chain = taken.form.chain
        if chain is None:
            return []
        if taken is None and (history.changes or history.skips or history.schedule):
            merge, former = merge_of(self._rules), Former(self._rules, self._table)
            taken = snapshot(self._rules, merge, former, [(0, None)] * len(merge.merged_samples))
        if taken is not None:  # later changes and skips belong to the same run
            taken = msgspec.structs.replace(
                taken, changes=list(history.changes), skips=list(history.skips), schedule=history.schedule
            )
        return State(feed=self._feed, lineage=history.lineage, step=step, chain=chain, snapshot=taken)

    def commit(self, step: int) -> list[Effect]:
        """Record that the checkpoint at ``step`` is durable, unless this or a later checkpoint is already recorded."""
        if step <= max([self.committed_upto, *(commit for _, commit in self._unsafe)]):
            return []
        self._note(step)
        effects = self._journal.append(CheckpointCommitted(feed=self._feed, step=step))
        self._unsafe.append((self._journal.next_lsn - 1, step))
        return effects

    def safe(self, upto: int) -> int:
        """Record that all log records before ``upto`` are safe; return the last step whose commit record is safe."""
        while self._unsafe and self._unsafe[0][0] < upto:
            self.committed_upto = max(self.committed_upto, self._unsafe.popleft()[1])
        return self.committed_upto

    def go_back(self, step: int) -> None:
        """Forget the commits after ``step``: the trainers start again there, and commit later checkpoints again."""
        self._unsafe.clear()
        self.committed_upto, self._went_back_to = min(self.committed_upto, step - 1), step

    def recover(self, step: int) -> None:
        """Apply a commit of ``step`` from the log when the broker starts."""
        self._note(step)
        self.committed_upto = step

    def wanted_lsn(self, released_upto: int) -> int:
        """Return the LSN below which no kept checkpoint and no rank needs records (R7).

        Args:
            released_upto: Every rank has returned the steps before this one.
        """
        history = self._history
        short = self._journal.full and not history.in_order
        if not history.commits and not short:  # if all can be read again, records may be deleted when room is short
            return 0
        step = min([*history.commits, self._went_back_to, released_upto])
        if short and history.nearest(step) is None:  # every step is formed again from the first sample
            return NOWHERE
        return history.wanted_lsn(step)

    def _note(self, step: int) -> None:
        """Add ``step`` to the kept checkpoints, and drop the oldest."""
        commits = self._history.commits
        commits[:] = [*(commit for commit in commits if commit != step), step][-self._keeps :]
        if step >= self._went_back_to:
            self._went_back_to = NOWHERE
