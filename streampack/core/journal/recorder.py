"""Records the decisions of a feed: each decision becomes a record of the log, and part of the feed's history.

A broker that starts reads the records, and gets the same history. When steps are formed again, their records are not
written again.
"""

from __future__ import annotations

import numpy as np
from msgspec import UNSET

from streampack.core.journal.history import History
from streampack.core.journal.journal import Journal
from streampack.core.journal.log_records import (
    ChangeAsked,
    ChangeCanceled,
    FeedEnded,
    LineageBegan,
    Record,
    RulesChanged,
    SnapshotTaken,
    StepFormed,
    StepsSkipped,
    TailDropped,
)
from streampack.core.model.rule_changes import Scheduled
from streampack.core.model.rules import RulesChange
from streampack.core.model.samples import I64, ROW, SampleTable
from streampack.core.model.snapshot import Snapshot
from streampack.core.model.steps import PlannedStep
from streampack.core.protocol.events import Effect, Report


class Recorder:
    """Records the decisions of one feed in the log and in its ``history``; samples are rows of ``table``."""

    def __init__(self, feed: str, history: History, journal: Journal, table: SampleTable) -> None:
        self._feed, self._history, self._journal, self._table = feed, history, journal, table

    def contradicts(self, step: PlannedStep) -> bool:
        """Return whether a step differs from the recorded step with the same number."""
        return self._history.chain_after(step.number) not in (None, step.chain)

    def record_step(self, step: PlannedStep, released: int) -> list[Effect]:
        """Record a formed step, unless it is recorded; every rank has returned the steps before ``released``."""
        history = self._history
        if history.is_gone(step.number) or history.chain_after(step.number) is not None:
            return []
        history.add_step(step.number, step.chain, self._journal.next_lsn)
        handles, table = step.packs.handles, self._table
        history.trained.add(step.number, table.stream[handles], table.length[handles])
        history.trained_before(released)
        if not self._journal.keeps:
            return self._journal.pass_over()
        counts = step.packs.counts.astype("<u4")
        record = StepFormed(
            feed=self._feed, lineage=history.lineage, step=step.number, digest=step.digest, chain=step.chain,
            num_loss_tokens=step.num_loss_tokens, num_samples=step.num_samples, counts_u32=counts.tobytes(),
            rows=table.rows(handles).tobytes(), released=released, **table.extras(handles),
        )  # fmt: skip
        return self._journal.append(record)

    def record_snapshot(self, taken: Snapshot) -> list[Effect]:
        """Record a snapshot that was taken, or that a trainer has sent."""
        self._history.add_snapshot(taken, self._journal.next_lsn)
        return self._journal.append(SnapshotTaken(feed=self._feed, lineage=taken.lineage, snapshot=taken))

    def record_tail(self, step: int, dropped: I64) -> list[Effect]:
        """Record the samples ``dropped``, int64 [n] handles, that ``tail: drop`` leaves out before ``step``."""
        history = self._history
        rows = self._table.rows(dropped).tobytes()
        tail = step, rows[: ROW.itemsize]
        if tail in history.tails or history.is_gone(step):
            return []
        history.tails.add(tail)
        return self._journal.append(TailDropped(feed=self._feed, lineage=history.lineage, step=step, rows=rows))

    def record_end(self, num_steps: int, chain: bytes) -> list[Effect]:
        """Record that the feed has ended after ``num_steps`` steps, once (R8)."""
        history = self._history
        if history.end is not None:
            return []
        history.end = (num_steps, chain)
        ended = FeedEnded(feed=self._feed, lineage=history.lineage, num_steps=num_steps, chain=chain)
        report = Report(
            "info", f"feed {self._feed!r} has ended after {num_steps} steps", feed=self._feed, step=num_steps
        )
        return [*self._journal.append(ended), report]

    def begin_lineage(self, step: int, why: str, since: int | None = None) -> list[Effect]:
        """Record that a new lineage begins at ``step``, without samples pushed in records from LSN ``since`` on."""
        history = self._history
        history.branch(history.lineage + 1, step, since)
        began = LineageBegan(feed=self._feed, lineage=history.lineage, step=step, why=why, since=since)
        report = Report("warning", f"feed {self._feed!r}: {why}", feed=self._feed, step=step)
        return [*self._journal.append(began), report]

    def record_change(self, change: RulesChange) -> list[Effect]:
        """Record that a change of the rules takes effect at its position."""
        self._history.note_change(change)
        return self._journal.append(RulesChanged(feed=self._feed, change=change))

    def record_asked(self, change: Scheduled) -> list[Effect]:
        """Record a change that was asked for."""
        self._history.asked.append(change)
        return self._journal.append(ChangeAsked(feed=self._feed, change=change))

    def record_canceled(self, number: int, note: str = "") -> list[Effect]:
        """Record that the change with this number does not take effect, with a person's reason."""
        self._history.cancel(number)
        return self._journal.append(ChangeCanceled(feed=self._feed, id=number, note=note or UNSET))

    def record_skip(self, first: int, last: int, note: str = "") -> list[Effect]:
        """Record that steps ``first`` to ``last`` are skipped, with a person's reason."""
        self._history.skips.append((first, last))
        return self._journal.append(StepsSkipped(feed=self._feed, first=first, last=last, note=note or UNSET))

    def recover(self, lsn: int, record: Record) -> None:
        """Add a record of an earlier broker to the history while this broker starts."""
        history = self._history
        if isinstance(record, StepFormed):
            history.add_step(record.step, record.chain, lsn)
            history.released = max(history.released, record.released)
            samples = np.frombuffer(record.rows, ROW)
            history.trained.add(record.step, samples["stream"], samples["length"])
            history.trained_before(record.released)
        elif isinstance(record, SnapshotTaken):
            history.add_snapshot(record.snapshot, lsn, keep=False)
        elif isinstance(record, FeedEnded):
            history.end = (record.num_steps, record.chain)
        elif isinstance(record, TailDropped):
            history.tails.add((record.step, record.rows[: ROW.itemsize]))
        elif isinstance(record, LineageBegan):
            history.branch(record.lineage, record.step, record.since)
            history.released = min(history.released, record.step)
        elif isinstance(record, RulesChanged):
            history.note_change(record.change)
        elif isinstance(record, ChangeAsked):
            history.asked.append(record.change)
        elif isinstance(record, ChangeCanceled):
            history.cancel(record.id)
        elif isinstance(record, StepsSkipped):
            history.skips.append((record.first, record.last))
