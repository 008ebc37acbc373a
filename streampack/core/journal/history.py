"""The history of one feed, as the log has it: digests of steps, places of snapshots, and the order of chunks.

Every appended record is added to the history, and a broker that starts adds the log's records in the same way. The
history keeps for each step the digest of all steps up to it, 16 bytes. For each snapshot it keeps the step and the
record. If the order of arrival decides the steps, the history also keeps each chunk's place in its partition and its
record. The merge repeats that order, and pushed partitions are read again from these records.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from streampack.core.journal.log_records import FeedFacts, PolicyPublished
from streampack.core.model.bounded import MOST_VERSION
from streampack.core.model.keys.stage_keys import StageBegin
from streampack.core.model.rule_changes import Schedule, Scheduled, WholeRules
from streampack.core.model.rules import Rules, RulesChange
from streampack.core.model.samples import I64
from streampack.core.model.snapshot import Snapshot
from streampack.core.stats.trained_samples import TrainedSamples

DIGEST_BYTES = 16
KEPT_STEPS = 16
"""Steps before the oldest kept step whose snapshots stay in memory, because trainers fetch ahead."""


@dataclass(slots=True)
class ChunkPlace:
    """A recorded chunk, or a recorded mark (the end of a batch).

    Attributes:
        partition: The feed's own number of the partition.
        base_seq: Number of the chunk's first sample; for a mark, number of the sample after the mark.
        count: Samples of the chunk; 0 for a mark.
        lsn: Log sequence number of the record.
        tokens: Tokens of the chunk.
        mark: Number of the mark; -1 for a chunk.
        lost: True if trainers went back, and the samples were discarded.
        counted: True if the log has a record of the discarded samples.
        version: Version of the policy that made the samples; -1 if unknown.
        sent: int64 [count], numbers with which the samples were sent, if they have waited for late fields.
    """

    partition: int
    base_seq: int
    count: int
    lsn: int
    tokens: int = 0
    mark: int = -1
    lost: bool = False
    counted: bool = False
    version: int = -1
    sent: I64 | None = None

    @property
    def stop_seq(self) -> int:
        """Number of the first sample after the chunk."""
        return self.base_seq + self.count


@dataclass(slots=True)
class _Place:
    """A recorded snapshot: its step and LSN, the floors of all partitions, and merged samples up to it (``position``).

    The snapshot holds ``held`` samples. ``snapshot`` is None if the snapshot is only in the log.
    """

    step: int
    lsn: int
    floors: list[int]
    position: int
    held: int
    snapshot: Snapshot | None

    def floor(self, partition: int) -> int:
        """Return the sequence number from which a partition is read again; 0 for a partition that was added later."""
        return self.floors[partition] if partition < len(self.floors) else 0


@dataclass(slots=True)
class History:
    """The history of one feed.

    Attributes:
        rules: The rules with which the feed began.
        lineage, lineage_step: Number of the lineage, and the step at which it began.
        changes: Changes of the rules that have their places, in order.
        asked: Changes that were asked for while the run goes on; those in ``changes`` too.
        canceled: Numbers of changes that do not take effect.
        skips: Skipped steps, as (first, last).
        commits: Steps of the checkpoints that are kept.
        released: Every rank has returned the steps before this one, as far as the log knows.
        end: (number of steps, digest of all), once the end is recorded.
        tails: Recorded tails that ``tail: drop`` left out, as (next step, row of the first sample). Passes shorter than
            a step leave several tails before one step.
        order: Chunks and marks in the order in which they came.
        newest_version: Newest version of the policies that made samples in ``order``; -1 if unknown.
        published: The newest policy that trainers have published; None without one.
        is_cut: True if the first records were deleted from the log.
        trained: Samples and tokens of each stream in the recorded steps.
        dealt_by: Settings of dynamic context parallelism, for readers of the log; UNSET without it.
    """

    rules: Rules
    num_partitions: int
    dealt_by: str | UnsetType = UNSET
    lineage: int = 0
    lineage_step: int = 0
    changes: list[RulesChange] = field(default_factory=list)
    asked: list[Scheduled] = field(default_factory=list)
    canceled: set[int] = field(default_factory=set)
    skips: list[tuple[int, int]] = field(default_factory=list)
    commits: list[int] = field(default_factory=list)
    released: int = 0
    end: tuple[int, bytes] | None = None
    tails: set[tuple[int, bytes]] = field(default_factory=set)
    order: list[ChunkPlace] = field(default_factory=list)
    newest_version: int = -1
    published: PolicyPublished | None = None
    is_cut: bool = False
    trained: TrainedSamples = field(default_factory=TrainedSamples)
    _first: int = 0
    """The first step that is known."""
    _chains: bytearray = field(default_factory=bytearray)
    _lsns: array[int] = field(default_factory=lambda: array("q"))
    _places: list[_Place] = field(default_factory=list)
    """Recorded snapshots, by step."""
    _at_hand: list[_Place] = field(default_factory=list)
    """Recorded snapshots that are in memory, too."""

    # Steps

    @property
    def num_steps(self) -> int:
        """The steps before this one are recorded."""
        return self._first + len(self._lsns)

    def chain_after(self, step: int) -> bytes | None:
        """Return the digest of ``step`` and all steps before it; None if it is not recorded, or was deleted."""
        at = step - self._first
        if not 0 <= at < len(self._lsns):
            return None
        return bytes(self._chains[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES])

    def add_step(self, step: int, chain: bytes, lsn: int) -> None:
        """Add a step, with ``chain``, the digest of all steps up to it. After a gap, forget the earlier steps."""
        if not self._lsns or step > self.num_steps:
            self._first = step
            del self._lsns[:], self._chains[:]
        if step == self.num_steps:
            self._chains += chain
            self._lsns.append(lsn)

    def is_gone(self, step: int) -> bool:
        """Return whether the record of ``step`` was deleted; such a step is not recorded when it is formed again."""
        return self.is_cut and step < self._first

    def begin_at(self, step: int) -> None:
        """Start at ``step`` of a checkpoint if it is beyond all recorded steps; forget the recorded steps."""
        if step > self.num_steps:
            self._first = step
            del self._lsns[:], self._chains[:]

    def lsn_of(self, step: int) -> int:
        """Return the LSN of the record of ``step``; -1 if unknown."""
        at = step - self._first
        return self._lsns[at] if 0 <= at < len(self._lsns) else -1

    def note_change(self, change: RulesChange) -> None:
        """Add a change of the rules; versions before 0.2 recorded it first without its position."""
        if change.position < 0:
            at = StageBegin(step=change.step)
            self.asked.append(Scheduled(self.next_id, WholeRules(change.rules), at, change.note))
            return
        if change.id is UNSET:
            waiting = (change.id for change in self.pending if isinstance(change.ask, WholeRules))
            change = msgspec.structs.replace(change, id=next(waiting, UNSET))
        self.changes.append(change)

    def cancel(self, number: int) -> None:
        """Note that the change with this number does not take effect, also if another broker let it."""
        self.canceled.add(number)
        self.changes = [change for change in self.changes if change.id != number]

    @property
    def next_id(self) -> int:
        """The number of the next change that is asked for; the stages of the rules have the first numbers."""
        return max([len(self.rules.stages), *(number + 1 for number in self._numbers)])

    @property
    def _numbers(self) -> set[int]:
        """The numbers of all changes that were asked for, also of those that have taken effect or were canceled."""
        placed = {change.id for change in self.changes if change.id is not UNSET}
        return {change.id for change in self.asked} | placed | self.canceled

    @property
    def pending(self) -> list[Scheduled]:
        """The changes that have no place yet and were not canceled, in the order of their numbers."""
        if not self.asked and not self.rules.stages:
            return []
        stages = [Scheduled(number, stage, stage.at) for number, stage in enumerate(self.rules.stages)]
        done = self.canceled | {change.id for change in self.changes}
        return [change for change in (*stages, *self.asked) if change.id not in done]

    @property
    def schedule(self) -> Schedule | UnsetType:
        """The changes that were asked for and have no place, and those that were canceled; UNSET without any."""
        waiting = [change for change in self.pending if change.id >= len(self.rules.stages)]
        return Schedule(waiting, sorted(self.canceled)) if waiting or self.canceled else UNSET

    def knows(self, snapshot: Snapshot) -> bool:
        """Return whether all rule changes and skipped steps of a checkpoint's snapshot are recorded."""
        placed = snapshot.placed
        own = self.changes[: len(placed)]
        return (
            len(own) == len(placed)
            and all(
                (own_change.rules, own_change.position) == (other.rules, other.position)
                for own_change, other in zip(own, placed, strict=True)
            )
            and self._numbers.issuperset(change.id for change in snapshot.asked)
            and self.canceled.issuperset(snapshot.canceled)
            and all(skip in self.skips for skip in snapshot.skips)
        )

    def is_skipped(self, step: int) -> bool:
        """Return whether ``step`` is skipped."""
        return any(first <= step <= last for first, last in self.skips)

    def trained_before(self, returned: int) -> I64:
        """Return the samples and tokens of each stream in the recorded steps before ``returned``, int64 [2, streams].

        Every rank has returned these steps. ``TrainedSamples`` says which steps count.
        """
        self.trained.count(returned, self.is_skipped)
        return self.trained.sums

    # Snapshots

    def add_snapshot(self, snapshot: Snapshot, lsn: int, keep: bool = True) -> None:
        """Add a snapshot with its LSN; keep the snapshot itself in memory if ``keep`` is True."""
        if not self._lsns:
            self._first = max(self._first, snapshot.step)
        if not self._places or snapshot.step > self._places[-1].step:
            floors = [seq for seq, _ in snapshot.floors] if self.in_order else []
            position = sum(snapshot.merge.merged_samples)
            num_samples, at_hand = snapshot.form.num_samples, snapshot if keep else None
            self._places.append(_Place(snapshot.step, lsn, floors, position, num_samples, at_hand))
            self._at_hand += self._places[-1:] if keep else []

    def keep(self, snapshot: Snapshot) -> None:
        """Keep in memory a snapshot that was read from the log."""
        at = bisect_right(self._places, snapshot.step, key=lambda place: place.step) - 1
        if at >= 0 and self._places[at].step == snapshot.step:
            self._at_hand += [self._places[at]] if self._places[at].snapshot is None else []
            self._places[at].snapshot = snapshot

    def nearest(self, step: int) -> tuple[int, int, Snapshot | None] | None:
        """Return (step, LSN, snapshot) of the last snapshot at or before ``step``; None if there is none.

        The third value is None if the snapshot is only in the log.
        """
        at = bisect_right(self._places, step, key=lambda place: place.step) - 1
        if at < 0:
            return None
        place = self._places[at]
        return place.step, place.lsn, place.snapshot

    @property
    def last_position(self) -> int:
        """Number of merged samples at the last snapshot; a change cannot take effect at an earlier position."""
        return self._places[-1].position if self._places else 0

    def forget_after(self, position: int) -> None:
        """Forget the snapshots at which more than ``position`` samples were merged."""
        self._places = [place for place in self._places if place.position <= position]

    @property
    def last_snapshot(self) -> int:
        """Step of the last snapshot; 0 without one."""
        return self._places[-1].step if self._places else 0

    @property
    def in_last_snapshot(self) -> int:
        """Number of samples that the last snapshot holds."""
        return self._places[-1].held if self._places else 0

    def forget_snapshots(self, released: int, keeps_log: bool) -> None:
        """Drop snapshots that no rank will need from memory; without a log, forget these snapshots and their chunks.

        Args:
            released: Every rank has returned the steps before this one.
            keeps_log: True if there is a log from which dropped snapshots can be read.
        """
        at = bisect_right(self._places, released - KEPT_STEPS, key=lambda place: place.step) - 1
        if at <= 0:
            return
        oldest = self._places[at]
        for place in self._at_hand:
            place.snapshot = place.snapshot if place.step >= oldest.step else None
        self._at_hand = [place for place in self._at_hand if place.snapshot is not None]
        if not keeps_log:
            del self._places[:at]
            self.order = [chunk for chunk in self.order if chunk.stop_seq > oldest.floor(chunk.partition)]
            self.is_cut = True

    def wanted_lsn(self, step: int) -> int:
        """Return the LSN of the first record that is needed to go to ``step``."""
        at = bisect_right(self._places, step, key=lambda place: place.step) - 1
        if at < 0:
            return 0
        place = self._places[at]
        needed = (chunk.lsn for chunk in self.order if chunk.stop_seq >= place.floor(chunk.partition))
        return min(place.lsn, next(needed, place.lsn))

    def forget_below(self, lsn: int) -> None:
        """Forget steps, snapshots and chunks below ``lsn``: their records were deleted from the log."""
        self._places = [place for place in self._places if place.lsn >= lsn]
        self.order = [chunk for chunk in self.order if chunk.lsn >= lsn]
        self.is_cut = True
        num_deleted = bisect_right(self._lsns, lsn - 1)
        del self._lsns[:num_deleted]
        del self._chains[: num_deleted * DIGEST_BYTES]
        self._first += num_deleted

    @property
    def oldest_step(self) -> int:
        """The first step to which the feed can go.

        This is step 0, unless samples are merged in the order of arrival and the log's first chunks were deleted. Then
        it is the step of the first snapshot that does not need the deleted chunks.
        """
        if not (self.is_cut and self.in_order):
            return 0
        begins: dict[int, int] = {}
        for chunk in self.order:
            begins.setdefault(chunk.partition, chunk.base_seq)
        whole = (
            place.step
            for place in self._places
            if all(begins.get(partition, floor) <= floor for partition, floor in enumerate(place.floors))
        )
        return next(whole, self.num_steps)

    def revisit(self, step: int) -> None:
        """Make a starting broker serve ``step`` first, even if it was skipped, so that a person can inspect the step.

        The steps that ranks have returned and the committed checkpoints are ignored.
        """
        self.released = step
        self.skips.clear()
        self.commits.clear()

    @property
    def in_order(self) -> bool:
        """True if the steps depend on the order in which chunks came."""
        return self.rules.merge == "arrival"

    # Policies

    def is_stale(self, version: int) -> bool:
        """Return whether samples made by policy ``version`` are too old to be admitted now.

        The newest policy is the one that trainers have published. If they publish none, samples tell.
        """
        lag = None if self.rules.paces else self.rules.max_policy_lag
        newest = self.newest_version if self.published is None else self.published.version
        return lag is not None and 0 <= version < newest - lag

    def add_chunk(self, place: ChunkPlace) -> None:
        """Append a chunk or a mark to the order of arrival."""
        self.order.append(place)
        if place.version <= MOST_VERSION:  # earlier versions accepted numbers of any size
            self.newest_version = max(self.newest_version, place.version)

    # Lineages

    def branch(self, lineage: int, step: int, since: int | None = None) -> None:
        """Begin another lineage at ``step``: forget the steps from there on, and mark chunks as lost.

        Args:
            lineage: Number of the new lineage.
            step: Its first step.
            since: LSN of the first lost chunk; None if no chunk is lost.
        """
        for place in self.order:
            place.lost = place.lost or (since is not None and place.lsn >= since)
        if since is not None:  # the trainers' policies go on from an older version
            self.newest_version = max((place.version for place in self.order if not place.lost), default=-1)
        self.lineage, self.lineage_step = lineage, step
        keep = max(step - self._first, 0)
        del self._lsns[keep:]
        del self._chains[keep * DIGEST_BYTES :]
        while self._places and self._places[-1].step > step:
            self._places.pop()
        self.end = None
        self.tails = {tail for tail in self.tails if tail[0] < step}
        self.trained.branch(step)

    def begin_of(self, step: int) -> int:
        """Return the LSN after the record of step ``step - 1``; if unknown, the LSN of the snapshot at ``step``."""
        nearest = self.nearest(step)
        if self.lsn_of(step - 1) < 0 and nearest is not None and nearest[0] == step:
            return nearest[1]
        return self.lsn_of(step - 1) + 1

    def recover(self, facts: FeedFacts, released: int) -> None:
        """Apply the facts that replace deleted records; every rank has returned the steps before ``released``."""
        self.lineage, self.lineage_step = facts.lineage, facts.lineage_step
        schedule = facts.schedule or Schedule()
        self.asked, self.canceled, self.changes = list(schedule.asked), set(schedule.canceled), []
        for change in facts.changes:
            self.note_change(change)
        self.skips, self.commits = list(facts.skips), list(facts.commits)
        self.released = max(self.released, released)
        if facts.newest_version is not UNSET and facts.newest_version <= MOST_VERSION:
            self.newest_version = max(self.newest_version, facts.newest_version)
        if facts.published is not UNSET:
            self.published = facts.published
        if facts.trained is not UNSET:
            self.trained.recover(*facts.trained)

    def facts(self, released: int) -> FeedFacts:
        """Return the facts that must survive when records of the log are deleted; arguments as for ``recover``."""
        self.trained_before(released)
        return FeedFacts(
            rules=self.rules, lineage=self.lineage, lineage_step=self.lineage_step, changes=self.changes,
            skips=self.skips, commits=self.commits,
            newest_version=UNSET if self.newest_version < 0 else self.newest_version,
            published=UNSET if self.published is None else self.published, trained=self.trained.facts(),
            schedule=self.schedule, dealt_by=self.dealt_by,
        )  # fmt: skip
