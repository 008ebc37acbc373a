"""The history of a run, put together from a log's rare records: rules, changes, lineages, ends.

A lineage that begins at step j replaces all recorded steps from j on, which then no longer count. So for each step one
lineage is *effective*: the last one that began at or before the step and was not replaced.

A fact may be recorded again: after a restart, when data is read again, or by the ``Base`` at the start of a segment.
``add`` returns whether a record is new, so that its caller stores each fact once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from numpy.typing import NDArray

from streampack.core.journal.log_records import (
    Base,
    ChangeAsked,
    ChangeCanceled,
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
from streampack.core.model.keys.stage_keys import Stage
from streampack.core.model.lease_terms import terms_of
from streampack.core.model.rule_changes import Schedule, Scheduled
from streampack.core.model.rules import Rules, RulesChange, StreamRules
from streampack.core.model.samples import I64, ROW
from streampack.core.model.snapshot import Cursor, Snapshot

T = TypeVar("T")
NEVER = 2**63 - 1
"""A number above that of every record and step."""
LATEST = NEVER - 1
"""Stands for the number of the last record or step."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """Lineage ``number``, which record ``lsn`` begins at step ``step``; ``why``: the reason."""

    number: int
    step: int
    lsn: int
    why: str = ""


@dataclass(slots=True)
class RulesFrom:
    """The ``rules`` that record ``lsn`` sets from ``step`` on.

    ``note``: the user's reason for a change; None for the rules that the run began with. ``position``: -1 for a change
    that was requested and is not in force yet. ``id``: the change's number; None in logs of versions before 0.2.
    ``merged``: samples of each partition that were merged before; None if they are not known.
    """

    lsn: int
    step: int
    rules: Rules
    note: str | None = None
    position: int = 0
    id: int | None = None
    merged: list[int] | None = None

    def merged_of(self, stream: str) -> list[int]:
        """Return the samples of each partition of a stream that were merged before; empty if they are not known."""
        return _by_stream(self.rules, self.merged or []).get(stream, [])


@dataclass(frozen=True, slots=True)
class StageOf:
    """The stage of a step: its number, its name, and its first step; number 0 are the rules that the run began with."""

    number: int
    name: str
    begin: int


@dataclass(slots=True)
class FeedHistory:
    """The recorded facts of one feed, in the order of the log.

    ``rules``: those that the run began with, then those after each change. ``stages``: those that the run began with.
    ``asked``: changes that people asked for. ``canceled``: the reasons for which changes were canceled, by number.
    ``skips``: (first, last) of skipped steps; ``notes_of_skips``: the reasons that people gave. ``commits``: numbers of
    the next step after each committed checkpoint. ``ends``, ``tails``: records of the feed's ends and of dropped tails.
    ``first_snapshot``: (lsn, snapshot).
    """

    name: str
    rules: list[RulesFrom] = field(default_factory=list)
    stages: tuple[Stage, ...] = ()
    asked: list[Scheduled] = field(default_factory=list)
    canceled: dict[int, str] = field(default_factory=dict)
    lineages: list[Lineage] = field(default_factory=lambda: [Lineage(0, 0, -1)])
    skips: list[tuple[int, int]] = field(default_factory=list)
    notes_of_skips: dict[tuple[int, int], str] = field(default_factory=dict)
    commits: list[int] = field(default_factory=list)
    ends: list[FeedEnded] = field(default_factory=list)
    tails: list[TailDropped] = field(default_factory=list)
    dealt_by: list[tuple[int, str]] = field(default_factory=list)
    """(lsn, settings of dynamic context parallelism) from a record on; the settings are empty without it."""
    first_snapshot: tuple[int, Snapshot] | None = None
    snapshots: dict[int, tuple[int, Snapshot]] = field(default_factory=dict)
    """(lsn, snapshot) of the snapshot with the highest step, by lineage."""
    brought: list[tuple[int, Snapshot]] = field(default_factory=list)
    """(lsn, snapshot) of each snapshot from a trainer's checkpoint, whose preceding step is not recorded."""
    contradictions: list[StepFormed] = field(default_factory=list)
    """Steps that were recorded again in the same lineage with another digest."""
    begins: dict[str, Cursor] = field(default_factory=dict)
    """Cursor of the first sample of a stream's source, by stream; absent if shards are read one after the other."""

    def begin_of(self, stream: str) -> Cursor:
        """Return the cursor of the first sample of a stream's source."""
        return self.begins.get(stream, (0, 0, 0))

    @property
    def branches(self) -> list[Lineage]:
        """Lineages that count, in the order of their first steps."""
        counting: list[Lineage] = []
        for lineage in self.lineages:
            counting = [other for other in counting if other.step < lineage.step]
            counting.append(lineage)
        return counting

    def effective(self, step: int) -> int:
        """Return the number of the lineage that counts at ``step``."""
        return next((branch.number for branch in reversed(self.branches) if branch.step <= step), 0)

    def is_skipped(self, step: int) -> bool:
        """Return whether every rank skips the step."""
        return any(first <= step <= last for first, last in self.skips)

    def skip_notes(self, step: int) -> list[str]:
        """Return the reasons that people gave for skipping the step."""
        return [note for (first, last), note in self.notes_of_skips.items() if first <= step <= last]

    def rules_at(self, step: int, lsn: int = LATEST) -> Rules:
        """Return the rules of ``step`` that record ``lsn`` and earlier records give; by default, all records."""
        return self.changes_at(step, lsn)[-1].rules

    def changes_at(self, step: int, lsn: int = LATEST) -> list[RulesFrom]:
        """Return the first rules and those of each change up to ``step``, in order; ``lsn`` as for ``rules_at``."""
        return sorted((change for change in self.rules if change.step <= step and change.lsn <= lsn), key=_place_of)

    def dealt_at(self, lsn: int) -> tuple[str, list[str]]:
        """Return the settings of dynamic context parallelism at record ``lsn``, and other settings since then."""
        now = next((settings for begin, settings in reversed(self.dealt_by) if begin <= lsn), "")
        return now, [settings for begin, settings in self.dealt_by if begin > lsn]

    def rules_of_sample(self, stream: str, index: int) -> Rules:
        """Return the rules in force when sample ``index`` of a stream was merged; they decide where it was cut."""
        changes = self.changes_at(LATEST)
        for before, change in pairwise(changes):
            merged = change.merged_of(stream)
            if merged and index // len(merged) < merged[index % len(merged)]:
                return before.rules
        return changes[-1].rules

    def cut_anew(self, stream: str, index: I64, last: bool = False) -> NDArray[np.bool_]:
        """Return which samples of a stream may have been rejected by rules that changed before they were merged.

        ``index`` int64 [n]; the result is bool [n]. Such a sample is read again, and may be in a step. ``last``: only
        the last change counts.
        """
        anew, changes = np.zeros(len(index), np.bool_), self.changes_at(LATEST)
        for before, change in pairwise(changes[-2:] if last else changes):
            merged = np.array(change.merged_of(stream), np.int64)
            if len(merged) and _cuts(before.rules, stream) != _cuts(change.rules, stream):
                anew |= index // len(merged) >= merged[index % len(merged)]
        return anew

    @property
    def first_rules(self) -> Rules:
        """The rules that the run began with, with their stages, as the log has them."""
        return replace(self.rules[0].rules, stages=self.stages) if self.stages else self.rules[0].rules

    @property
    def scheduled(self) -> dict[int, Scheduled]:
        """Each change by number: the stages that the run began with, and what people asked for since."""
        stages = (Scheduled(number, stage, stage.at) for number, stage in enumerate(self.stages))
        return {change.id: change for change in (*stages, *self.asked)}

    @property
    def pending(self) -> list[Scheduled]:
        """The changes that have not taken effect and are not canceled, in the order of their numbers."""
        done = self.canceled.keys() | {change.id for change in self.rules}
        return [change for number, change in sorted(self.scheduled.items()) if number not in done]

    def stage_at(self, step: int, lsn: int = LATEST) -> StageOf | None:
        """Return the stage of ``step``; None in a run that never had a change of its rules. ``lsn``: see ``rules_at``.

        Every change begins a stage. A stage without a name has the text of its change.
        """
        changes = self.changes_at(step, lsn)
        last = changes[-1]
        if last.note is None and len(self.rules) == 1 and not self.stages:
            return None
        return StageOf(len(changes) - 1, self.name_of(last), last.step)

    def name_of(self, change: RulesFrom) -> str:
        """Return the name of the stage that a change begins; ``start`` for the rules that the run began with."""
        if change.note is None:
            return "start"
        change_asked = None if change.id is None else self.scheduled.get(change.id)
        return change.note.partition(", asked at step")[0] if change_asked is None else change_asked.name

    @property
    def streams(self) -> dict[str, StreamRules]:
        """Latest rules of every stream that the feed has or had, by name."""
        return {stream.name: stream for change in self.rules for stream in change.rules.streams}

    def rules_of(self, snapshot: Snapshot) -> Rules:
        """Return the rules that the merge used when a snapshot was taken."""
        return snapshot.changes[snapshot.applied - 1].rules if snapshot.applied else self.rules[0].rules

    def merged(self, snapshot: Snapshot) -> dict[str, list[int]]:
        """Return for each stream the number of merged samples of each partition when a snapshot was taken."""
        return _by_stream(self.rules_of(snapshot), snapshot.merge.merged_samples)

    def stream_name(self, number: int, step: int, lsn: int) -> str:
        """Return the name of the stream with this number at ``step``, as of record ``lsn``; ``#5`` if unknown."""
        streams = self.rules_at(step, lsn).streams
        return streams[number].name if number < len(streams) else f"#{number}"

    @property
    def end(self) -> FeedEnded | None:
        """The feed's end in the history that counts; None if it has not ended."""
        return next((end for end in self.ends if self.effective(end.num_steps) == end.lineage), None)

    def by_stream(
        self, rows: NDArray[np.void], step: int = LATEST, lsn: int = LATEST
    ) -> dict[str, NDArray[np.void]]:  # fmt: skip
        """Return samples, dtype ROW [n], by the name that their stream has at ``step``, as of record ``lsn``."""
        numbers = np.unique(rows["stream"]).tolist()
        return {self.stream_name(number, step, lsn): rows[rows["stream"] == number] for number in numbers}

    def waiting(self, lsn: int, snapshot: Snapshot) -> dict[str, NDArray[np.void]]:
        """Return by stream the samples in the window of record ``lsn``'s snapshot, and in packs without a step yet."""
        return self.by_stream(np.frombuffer(snapshot.form.window + snapshot.form.pending, ROW), snapshot.step, lsn)

    def dropped(self, upto: int = NEVER) -> dict[str, NDArray[np.void]]:
        """Return by stream the valid samples that ``tail: drop`` left out before steps up to ``upto``."""
        tails = [tail for tail in self.tails if tail.step <= upto and self.effective(tail.step) == tail.lineage]
        return self.by_stream(np.frombuffer(b"".join(tail.rows for tail in tails), ROW))

    def snapshot(self, next_step: int) -> Snapshot | None:
        """Return the snapshot with the highest step up to ``next_step`` in the history that counts, or None."""
        snapshots = [snapshot for number, (_, snapshot) in self.snapshots.items()
                if snapshot.step <= next_step and self.effective(max(snapshot.step - 1, 0)) == number]  # fmt: skip
        return max(snapshots, key=lambda snapshot: snapshot.step, default=None)


class RunHistory:
    """The history of a run: all recorded facts except steps, rejected samples and admitted samples."""

    def __init__(self) -> None:
        self.run_name = ""
        self.feeds: dict[str, FeedHistory] = {}
        self.totals: dict[tuple[str, int], list[int]] = {}
        """Number of samples of each ended (stream, partition); more than one number is a contradiction."""
        self.sources: dict[str, list[str]] = {}
        """Digests of each stream's source, in the order in which they were accepted."""
        self.obsolete: list[int] = []
        """Numbers of records that are no longer needed; the caller of ``add`` deletes and clears them."""

    def feed_of(self, stream: str) -> FeedHistory | None:
        """Return the feed that a stream belongs to, or None."""
        return next((feed for feed in self.feeds.values() if stream in feed.streams), None)

    def add(self, lsn: int, record: Record, brought: bool = False) -> bool:
        """Add the facts of a record; return whether any of them is new.

        ``brought``: the record is a snapshot of a step whose predecessor was not recorded before it.
        """
        match record:
            case Base():
                return self._base(lsn, record)
            case SourceAccepted(stream=stream, source_digest=digest, begin=begin):
                return self._source(stream, digest, begin)
            case PartitionEnded(stream=stream, partition=partition, total=total):
                return _add_once(self.totals.setdefault((stream, partition), []), total)
            case SnapshotTaken(feed=feed):
                return self._snapshot(lsn, self._feed(feed), record, brought)
            case RulesChanged(feed=feed, change=change):
                return self._change(lsn, self._feed(feed), change)
            case ChangeAsked(feed=feed, change=scheduled):
                return _add_once(self._feed(feed).asked, scheduled)
            case ChangeCanceled(feed=feed, id=number, note=note):
                return self._cancel(self._feed(feed), number, note or "")
            case LineageBegan(feed=feed):
                return self._lineage(self._feed(feed), Lineage(record.lineage, record.step, lsn, record.why))
            case StepsSkipped(feed=feed):
                return self._skip(self._feed(feed), record)
            case CheckpointCommitted(feed=feed, step=step):
                return _add_once(self._feed(feed).commits, step)
            case FeedEnded(feed=feed):
                return _add_once(self._feed(feed).ends, record)
            case TailDropped(feed=feed):
                return _add_once(self._feed(feed).tails, record)
            case StepFormed(feed=feed):
                return _add_once(self._feed(feed).contradictions, record)
        return False

    def _source(self, stream: str, digest: str, begin: Cursor | UnsetType) -> bool:
        """Add the digest of a stream's source, and the cursor of its first sample; return whether one is new."""
        feed = self.feed_of(stream)
        changed = feed is not None and feed.begins.get(stream) != (begin or None)
        if feed is not None and begin:
            feed.begins[stream] = begin
        elif feed is not None:  # the run goes on from a checkpoint of a version that read one shard after the other
            feed.begins.pop(stream, None)
        return _add_once(self.sources.setdefault(stream, []), digest) or changed

    def _feed(self, name: str) -> FeedHistory:
        """Return the history of a feed; make it if it is new."""
        return self.feeds.setdefault(name, FeedHistory(name))

    def _base(self, lsn: int, record: Base) -> bool:
        """Add the facts that a ``Base`` record repeats; return whether any of them is new."""
        self.run_name = record.run_name
        new = False
        for name, facts in record.feeds.items():
            new |= self._facts(lsn, self._feed(name), facts)
        for stream, stream_facts in record.streams.items():
            if stream_facts.source_digest:
                new |= self._source(stream, stream_facts.source_digest, stream_facts.begin)
            for partition, total in enumerate(stream_facts.totals):
                if total is not None:
                    new |= _add_once(self.totals.setdefault((stream, partition), []), total)
        return new

    def _facts(self, lsn: int, feed: FeedHistory, facts: FeedFacts) -> bool:
        """Add the facts of one feed in a ``Base`` record; return whether any of them is new."""
        new = self._lineage(feed, Lineage(facts.lineage, facts.lineage_step, lsn))
        rules = replace(facts.rules, stages=()) if facts.rules.stages else facts.rules
        if not any(change.note is None and change.rules == rules for change in feed.rules):
            feed.rules.append(RulesFrom(lsn, facts.lineage_step if feed.rules else 0, rules))
            feed.stages = facts.rules.stages
            new = True
        for change in facts.changes:
            new |= self._change(lsn, feed, change)
        schedule = facts.schedule or Schedule()
        for change_asked in schedule.asked:
            new |= _add_once(feed.asked, change_asked)
        for number in schedule.canceled:
            new |= number not in feed.canceled and self._cancel(feed, number, "")
        for first, last in facts.skips:
            new |= _add_once(feed.skips, (first, last))
        for step in facts.commits:
            new |= _add_once(feed.commits, step)
        dealt_by = facts.dealt_by or ""
        if dealt_by != (feed.dealt_by[-1][1] if feed.dealt_by else ""):
            feed.dealt_by.append((lsn, dealt_by))
            new = True
        return new

    def _change(self, lsn: int, feed: FeedHistory, change: RulesChange) -> bool:
        """Add a change of rules, or the place where an earlier change takes effect; return whether it is a new fact."""
        number = None if change.id is UNSET else change.id
        merged = None if change.merged is UNSET else change.merged
        facts = change.rules, change.note
        same = [change for change in feed.rules if number is not None and change.id == number] or [
            change for change in feed.rules if None in (number, change.id) and (change.rules, change.note) == facts
        ]
        if not same:
            feed.rules.append(RulesFrom(lsn, change.step, change.rules, change.note, change.position, number, merged))
            return True
        new = same[0].position < 0 <= change.position
        if new:
            same[0].step, same[0].position = change.step, change.position
        return new

    def _cancel(self, feed: FeedHistory, number: int, note: str) -> bool:
        """Add that a change does not take effect, also if another broker let it; return whether it is a new fact."""
        feed.rules = [change for change in feed.rules if change.id != number]
        new = feed.canceled.get(number) != note
        feed.canceled[number] = note
        return new

    def _lineage(self, feed: FeedHistory, lineage: Lineage) -> bool:
        """Add a lineage; return whether it is new."""
        if any((entry.number, entry.step) == (lineage.number, lineage.step) for entry in feed.lineages):
            return False
        feed.lineages.append(lineage)
        return True

    def _skip(self, feed: FeedHistory, record: StepsSkipped) -> bool:
        """Add skipped steps, and the reason; return whether any of them is new. A ``Base`` has no reasons."""
        steps, note = (record.first, record.last), record.note or ""
        new = _add_once(feed.skips, steps)
        if note and steps not in feed.notes_of_skips:
            feed.notes_of_skips[steps] = note
            return True
        return new

    def _snapshot(self, lsn: int, feed: FeedHistory, record: SnapshotTaken, brought: bool) -> bool:
        """Add a snapshot if its step is the highest of its lineage; return whether the record must be stored."""
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


def _by_stream(rules: Rules, values: list[int]) -> dict[str, list[int]]:
    """Return numbers of all partitions of a feed by stream; the last streams may lack."""
    bounds = accumulate((stream.partitions for stream in rules.streams), initial=0)
    parts = {
        stream.name: values[at : at + stream.partitions] for stream, at in zip(rules.streams, bounds, strict=False)
    }
    return {name: part for name, part in parts.items() if part}


def _cuts(rules: Rules, stream: str) -> tuple[object, ...]:
    """Return the terms that decide how samples of a stream are cut, and which are dropped."""
    return next((terms.cuts for terms in terms_of(rules) if terms.name == stream), ())


def _place_of(change: RulesFrom) -> tuple[int, int]:
    """Return a key that sorts changes by their step; equal ones stay in the order in which they were recorded."""
    return change.step, change.lsn


def _add_once(facts: list[T], fact: T) -> bool:
    """Add a fact that is not in ``facts`` yet; return whether it was new."""
    new = fact not in facts
    if new:
        facts.append(fact)
    return new
