"""What a log's rare records say of a run, put together: rules, changes, lineages, ends. Pure; knows no steps' rows.

Which history counts: a lineage that begins at step j makes all that was recorded of steps from j on one that does not
count any more. So of each step one lineage is *effective*: the last that had begun at or before it, of those that no
later one has taken the place of.

A record may be said again: by the ``Base`` that every segment of a log begins with, after a restart, or where data is
read again. ``add`` says whether one is new, so that whoever keeps them keeps each fact once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from streampack.core.journal.log_records import (
    Base,
    CheckpointCommitted,
    FeedEnded,
    FeedFacts,
    LineageBegan,
    PartitionEnded,
    Record,
    RulesChanged,
    SnapshotTaken,
    SourceAccepted,
    StepFormed,
    StepsSkipped,
    TailDropped,
)
from streampack.core.model.rules import Rules, RulesChange, StreamRules
from streampack.core.model.samples import ROW
from streampack.core.model.snapshot import Snapshot

T = TypeVar("T")
NEVER = 2**63 - 1
"""Beyond every record's number."""
LATEST = NEVER - 1
"""As if of the last record."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """Lineage ``number`` goes on from step ``step``, and ``why``."""

    number: int
    step: int
    lsn: int
    why: str = ""


@dataclass(slots=True)
class RulesFrom:
    """``rules`` hold from ``step`` on, as record ``lsn`` says. ``note`` is what was asked; None for the rules that the
    run began with. ``position``: -1 for a change that was asked for and is not in force yet.
    """

    lsn: int
    step: int
    rules: Rules
    note: str | None = None
    position: int = 0


@dataclass(slots=True)
class FeedHistory:
    """A feed's facts, in the order of the log."""

    name: str
    rules: list[RulesFrom] = field(default_factory=list)
    lineages: list[Lineage] = field(default_factory=lambda: [Lineage(0, 0, -1)])
    skips: list[tuple[int, int]] = field(default_factory=list)
    commits: list[int] = field(default_factory=list)
    ends: list[FeedEnded] = field(default_factory=list)
    tails: list[TailDropped] = field(default_factory=list)
    first_snapshot: tuple[int, Snapshot] | None = None
    snapshots: dict[int, tuple[int, Snapshot]] = field(default_factory=dict)
    """By lineage, the one of the highest step."""
    brought: list[tuple[int, Snapshot]] = field(default_factory=list)
    """(record, snapshot) of each snapshot whose preceding step was not recorded: a trainer's checkpoint brought it."""
    contradictions: list[StepFormed] = field(default_factory=list)
    """Steps that were recorded before, in the same lineage, with another digest."""

    @property
    def branches(self) -> list[Lineage]:
        """The lineages that count, in the order of the steps that they begin at."""
        found: list[Lineage] = []
        for lineage in self.lineages:
            found = [each for each in found if each.step < lineage.step]
            found.append(lineage)
        return found

    def effective(self, step: int) -> int:
        """The lineage that counts at ``step``."""
        return next((each.number for each in reversed(self.branches) if each.step <= step), 0)

    def rules_at(self, step: int, lsn: int = LATEST) -> Rules:
        """The rules of ``step`` as record ``lsn`` has it, or as it would be now."""
        held = [each for each in self.rules if each.step <= step and each.lsn <= lsn]
        return max(held, key=lambda each: (each.step, each.lsn)).rules

    @property
    def streams(self) -> dict[str, StreamRules]:
        """Every stream that it has or had, by name, as its rules were last."""
        return {stream.name: stream for each in self.rules for stream in each.rules.streams}

    def rules_of(self, snapshot: Snapshot) -> Rules:
        """The rules that the merge went by where a snapshot was taken."""
        return snapshot.changes[snapshot.applied - 1].rules if snapshot.applied else self.rules[0].rules

    def merged(self, snapshot: Snapshot) -> dict[str, list[int]]:
        """Samples merged of each stream's partitions where a snapshot was taken, by stream."""
        left = list(snapshot.merge.merged_samples)
        found = {}
        for stream in self.rules_of(snapshot).streams:
            found[stream.name], left = left[: stream.partitions], left[stream.partitions :]
        return found

    def stream_name(self, number: int, step: int, lsn: int) -> str:
        """The name of the stream of this number then."""
        streams = self.rules_at(step, lsn).streams
        return streams[number].name if number < len(streams) else f"#{number}"

    @property
    def end(self) -> FeedEnded | None:
        """The end of the history that counts, if it has one."""
        return next((end for end in self.ends if self.effective(end.num_steps) == end.lineage), None)

    def dropped(self, upto: int = NEVER) -> NDArray[np.void]:
        """What ``tail: drop`` left over before steps up to ``upto``, in the history that counts: ``samples.ROW``."""
        tails = [tail for tail in self.tails if tail.step <= upto and self.effective(tail.step) == tail.lineage]
        return np.frombuffer(b"".join(tail.rows for tail in tails), ROW)

    def snapshot(self, next_step: int) -> Snapshot | None:
        """The highest snapshot of the history that counts that is not after ``next_step``."""
        held = [snapshot for number, (_, snapshot) in self.snapshots.items()
                if snapshot.step <= next_step and self.effective(max(snapshot.step - 1, 0)) == number]  # fmt: skip
        return max(held, key=lambda snapshot: snapshot.step, default=None)


class RunHistory:
    """All that is known of a run beside its steps, its rejected samples and how far it has admitted."""

    def __init__(self) -> None:
        self.run_name = ""
        self.feeds: dict[str, FeedHistory] = {}
        self.totals: dict[tuple[str, int], list[int]] = {}
        """Samples of a (stream, partition), as said at its end; more than one number is a contradiction."""
        self.sources: dict[str, list[str]] = {}
        """Digests of each stream's source, in the order in which they were accepted."""
        self.obsolete: list[int] = []
        """Records that need be kept no more, for whoever keeps them to take."""

    def feed_of(self, stream: str) -> FeedHistory | None:
        """The feed that a stream belongs to."""
        return next((feed for feed in self.feeds.values() if stream in feed.streams), None)

    def add(self, lsn: int, record: Record, brought: bool = False) -> bool:
        """Take what a record says; whether it says anything new.

        ``brought``: the record is a snapshot of a step whose predecessor was not recorded before it.
        """
        match record:
            case Base():
                return self._base(lsn, record)
            case SourceAccepted(stream=stream, source_digest=digest):
                return _once(self.sources.setdefault(stream, []), digest)
            case PartitionEnded(stream=stream, partition=partition, total=total):
                return _once(self.totals.setdefault((stream, partition), []), total)
            case SnapshotTaken(feed=feed):
                return self._snapshot(lsn, self._feed(feed), record, brought)
            case RulesChanged(feed=feed, change=change):
                return self._change(lsn, self._feed(feed), change)
            case LineageBegan(feed=feed):
                return self._lineage(self._feed(feed), Lineage(record.lineage, record.step, lsn, record.why))
            case StepsSkipped(feed=feed, first=first, last=last):
                return _once(self._feed(feed).skips, (first, last))
            case CheckpointCommitted(feed=feed, step=step):
                return _once(self._feed(feed).commits, step)
            case FeedEnded(feed=feed):
                return _once(self._feed(feed).ends, record)
            case TailDropped(feed=feed):
                return _once(self._feed(feed).tails, record)
            case StepFormed(feed=feed):
                return _once(self._feed(feed).contradictions, record)
        return False

    def _feed(self, name: str) -> FeedHistory:
        return self.feeds.setdefault(name, FeedHistory(name))

    def _base(self, lsn: int, record: Base) -> bool:
        self.run_name = record.run_name
        new = False
        for name, facts in record.feeds.items():
            new |= self._facts(lsn, self._feed(name), facts)
        for stream, known in record.streams.items():
            if known.source_digest:
                new |= _once(self.sources.setdefault(stream, []), known.source_digest)
            for partition, total in enumerate(known.totals):
                if total is not None:
                    new |= _once(self.totals.setdefault((stream, partition), []), total)
        return new

    def _facts(self, lsn: int, feed: FeedHistory, facts: FeedFacts) -> bool:
        new = self._lineage(feed, Lineage(facts.lineage, facts.lineage_step, lsn))
        if not any(each.note is None and each.rules == facts.rules for each in feed.rules):
            feed.rules.append(RulesFrom(lsn, facts.lineage_step if feed.rules else 0, facts.rules))
            new = True
        for change in facts.changes:
            new |= self._change(lsn, feed, change)
        for first, last in facts.skips:
            new |= _once(feed.skips, (first, last))
        for step in facts.commits:
            new |= _once(feed.commits, step)
        return new

    def _change(self, lsn: int, feed: FeedHistory, change: RulesChange) -> bool:
        """One that was asked for is recorded again once it is in force, and where."""
        same = [each for each in feed.rules if (each.rules, each.note) == (change.rules, change.note)]
        if not same:
            feed.rules.append(RulesFrom(lsn, change.step, change.rules, change.note, change.position))
            return True
        new = same[0].position < 0 <= change.position
        if new:
            same[0].step, same[0].position = change.step, change.position
        return new

    def _lineage(self, feed: FeedHistory, lineage: Lineage) -> bool:
        if any((each.number, each.step) == (lineage.number, lineage.step) for each in feed.lineages):
            return False
        feed.lineages.append(lineage)
        return True

    def _snapshot(self, lsn: int, feed: FeedHistory, record: SnapshotTaken, brought: bool) -> bool:
        if brought:
            feed.brought.append((lsn, record.snapshot))
        before = feed.snapshots.get(record.lineage)
        if before is not None and before[1].step >= record.snapshot.step:
            return brought
        feed.snapshots[record.lineage] = lsn, record.snapshot
        if feed.first_snapshot is None:
            feed.first_snapshot = lsn, record.snapshot
        elif before is not None and before[0] not in (feed.first_snapshot[0], *(at for at, _ in feed.brought)):
            self.obsolete.append(before[0])
        return True


def _once(known: list[T], fact: T) -> bool:
    """Add what is not known yet; whether it was new."""
    new = fact not in known
    if new:
        known.append(fact)
    return new
