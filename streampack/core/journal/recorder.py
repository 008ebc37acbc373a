"""What a feed decides, written down: each decision becomes a record and a line of its history, in one move.

A broker that starts reads the records back and has the same history. What is decided again, since steps are formed
again, is written once.
"""

from __future__ import annotations

from streampack.core.journal.history import History
from streampack.core.journal.journal import Journal
from streampack.core.journal.log_records import (
    FeedEnded,
    LineageBegan,
    Record,
    RulesChanged,
    SnapshotTaken,
    StepFormed,
    StepsSkipped,
    TailDropped,
)
from streampack.core.model.rules import RulesChange
from streampack.core.model.samples import I64, ROW, SampleTable
from streampack.core.model.snapshot import Snapshot
from streampack.core.model.steps import PlannedStep
from streampack.core.protocol.events import Effect, Report


class Recorder:
    """Keeps one feed's ``history`` and the log in step; samples are rows of ``table``."""

    def __init__(self, feed: str, history: History, journal: Journal, table: SampleTable) -> None:
        self._feed, self._history, self._journal, self._table = feed, history, journal, table

    def contradicts(self, step: PlannedStep) -> bool:
        """Did a step come out otherwise than it is recorded?"""
        return self._history.chain_after(step.number) not in (None, step.chain)

    def step(self, step: PlannedStep, released: int) -> list[Effect]:
        """A step was formed; those below ``released`` were returned by every rank."""
        history = self._history
        if history.is_gone(step.number) or history.chain_after(step.number) is not None:
            return []
        history.add_step(step.number, step.chain, self._journal.next_lsn)
        if not self._journal.keeps:
            return self._journal.pass_over()
        handles, counts = step.packs.handles, step.packs.counts.astype("<u4")
        record = StepFormed(
            feed=self._feed, lineage=history.lineage, step=step.number, digest=step.digest, chain=step.chain,
            num_loss_tokens=step.num_loss_tokens, num_samples=step.num_samples, counts_u32=counts.tobytes(),
            rows=self._table.rows(handles).tobytes(), released=released, keeps=self._table.keeps(handles),
        )  # fmt: skip
        return self._journal.append(record)

    def snapshot(self, taken: Snapshot) -> list[Effect]:
        """A snapshot was taken, or brought."""
        self._history.add_snapshot(taken, self._journal.next_lsn)
        return self._journal.append(SnapshotTaken(feed=self._feed, lineage=taken.lineage, snapshot=taken))

    def tail(self, step: int, dropped: I64) -> list[Effect]:
        """Before ``step`` the samples ``dropped``, int64 [n], were left over."""
        history = self._history
        rows = self._table.rows(dropped).tobytes()
        tail = step, rows[: ROW.itemsize]
        if tail in history.tails or history.is_gone(step):
            return []
        history.tails.add(tail)
        return self._journal.append(TailDropped(feed=self._feed, lineage=history.lineage, step=step, rows=rows))

    def end(self, num_steps: int, chain: bytes) -> list[Effect]:
        """The feed has ended (R8: said once)."""
        history = self._history
        if history.end is not None:
            return []
        history.end = (num_steps, chain)
        ended = FeedEnded(feed=self._feed, lineage=history.lineage, num_steps=num_steps, chain=chain)
        report = Report(
            "info", f"feed {self._feed!r} has ended after {num_steps} steps", feed=self._feed, step=num_steps
        )
        return [*self._journal.append(ended), report]

    def lineage(self, step: int, why: str, since: int | None = None) -> list[Effect]:
        """Another lineage begins at ``step``, without what was pushed since record ``since``."""
        history = self._history
        history.branch(history.lineage + 1, step, since)
        began = LineageBegan(feed=self._feed, lineage=history.lineage, step=step, why=why, since=since)
        report = Report("warning", f"feed {self._feed!r}: {why}", feed=self._feed, step=step)
        return [*self._journal.append(began), report]

    def change(self, change: RulesChange) -> list[Effect]:
        """A change is asked for, or its position is known."""
        self._history.note_change(change)
        return self._journal.append(RulesChanged(feed=self._feed, change=change))

    def skip(self, first: int, last: int) -> list[Effect]:
        """Steps ``first`` to ``last`` are passed over."""
        self._history.skips.append((first, last))
        return self._journal.append(StepsSkipped(feed=self._feed, first=first, last=last))

    def recover(self, lsn: int, record: Record) -> None:
        """One of these records, read back before anything else happens."""
        history = self._history
        if isinstance(record, StepFormed):
            history.add_step(record.step, record.chain, lsn)
            history.released = max(history.released, record.released)
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
        elif isinstance(record, StepsSkipped):
            history.skips.append((record.first, record.last))
