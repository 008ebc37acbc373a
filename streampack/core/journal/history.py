"""What is recorded of one feed: how each step came out, where it may be taken up again, in which order chunks came.

It is filled as records are appended, and from the log when a broker starts, in the same way. Steps are
known by the digest of all steps up to them (16 bytes a step); snapshots by the step that they begin and
the record that holds them. Of chunks that were taken in the order of their arrival it knows where each
begins and which record holds it: from them the merge gets its script, and pushed partitions are read again.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass, field

from msgspec import UNSET

from streampack.core.journal.log_records import FeedFacts
from streampack.core.model.rules import Rules, RulesChange
from streampack.core.model.snapshot import Snapshot

DIGEST_BYTES = 16
KEPT_STEPS = 16
"""Snapshots of so many steps before the oldest that a rank may ask for stay in memory: trainers fetch ahead."""


@dataclass(slots=True)
class ChunkPlace:
    """A recorded chunk: ``count`` samples, of ``tokens``, of a partition from ``base_seq`` on; or the ``mark``-th mark,
    behind ``base_seq`` samples. ``lost``: trainers went back and its samples were discarded; ``counted``: the log says
    of each that it was. ``version`` is the policy's that made them, -1 where none is said.
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

    @property
    def stop_seq(self) -> int:
        return self.base_seq + self.count


@dataclass(slots=True)
class _Place:
    step: int
    lsn: int
    floors: list[int]
    position: int
    held: int
    snapshot: Snapshot | None

    def floor(self, partition: int) -> int:
        """Where a partition is read again from; one that joined later has none: from its beginning."""
        return self.floors[partition] if partition < len(self.floors) else 0


@dataclass(slots=True)
class History:
    """One feed's; ``rules`` are those that it began with."""

    rules: Rules
    num_partitions: int
    lineage: int = 0
    lineage_step: int = 0
    changes: list[RulesChange] = field(default_factory=list)
    skips: list[tuple[int, int]] = field(default_factory=list)
    commits: list[int] = field(default_factory=list)
    released: int = 0
    """Steps below are returned by every rank, as far as is known."""
    end: tuple[int, bytes] | None = None
    """(steps, digest of all), once the end is recorded."""
    tails: set[tuple[int, bytes]] = field(default_factory=set)
    """What ``tail: drop`` left out, as recorded: (the step that follows, the first sample's row). Passes shorter than a
    step leave several tails before one step."""
    order: list[ChunkPlace] = field(default_factory=list)
    newest_version: int = -1
    """Of the policies that made the samples in that order; -1 where none is said."""
    is_cut: bool = False
    """Its first records are gone."""
    _first: int = 0
    _chains: bytearray = field(default_factory=bytearray)
    _lsns: array[int] = field(default_factory=lambda: array("q"))
    _places: list[_Place] = field(default_factory=list)
    _at_hand: list[_Place] = field(default_factory=list)
    """Those whose snapshot is in memory."""

    # Steps

    @property
    def num_steps(self) -> int:
        """Steps below are recorded."""
        return self._first + len(self._lsns)

    def chain_after(self, step: int) -> bytes | None:
        """Digest of ``step`` and all before it, or None where that is not recorded, or not any more."""
        at = step - self._first
        if not 0 <= at < len(self._lsns):
            return None
        return bytes(self._chains[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES])

    def add_step(self, step: int, chain: bytes, lsn: int) -> None:
        """Step ``step`` is recorded; it follows those before it, or they are no longer there, or another broker's."""
        if not self._lsns or step > self.num_steps:
            self._first = step
            del self._lsns[:], self._chains[:]
        if step == self.num_steps:
            self._chains += chain
            self._lsns.append(lsn)

    def is_gone(self, step: int) -> bool:
        """Is ``step`` before all steps that a cut log still has? It is formed again, and not recorded again."""
        return self.is_cut and step < self._first

    def begin_at(self, step: int) -> None:
        """What is recorded begins at ``step``, which a checkpoint has brought, if it is beyond all that is known."""
        if step > self.num_steps:
            self._first = step
            del self._lsns[:], self._chains[:]

    def lsn_of(self, step: int) -> int:
        """The record of ``step``, or -1."""
        at = step - self._first
        return self._lsns[at] if 0 <= at < len(self._lsns) else -1

    def note_change(self, change: RulesChange) -> None:
        """A change is asked for; or the position is known at which the first that waits for one holds."""
        waiting = (number for number, known in enumerate(self.changes) if known.position < 0 <= change.position)
        at = next(waiting, len(self.changes))
        self.changes[at : at + 1] = [change]

    def knows(self, given: Snapshot) -> bool:
        """Is all that a checkpoint knows of changes and skips recorded here?"""
        own = self.changes[: len(given.changes)]
        return (
            len(own) == len(given.changes)
            and all(
                mine.rules == other.rules and other.position in (-1, mine.position)
                for mine, other in zip(own, given.changes, strict=True)
            )
            and all(skip in self.skips for skip in given.skips)
        )

    def is_skipped(self, step: int) -> bool:
        """Is ``step`` passed over?"""
        return any(first <= step <= last for first, last in self.skips)

    # Snapshots

    def add_snapshot(self, snapshot: Snapshot, lsn: int, keep: bool = True) -> None:
        """A snapshot is in record ``lsn``, and kept here as well if ``keep``."""
        if not self._lsns:
            self._first = max(self._first, snapshot.step)
        if not self._places or snapshot.step > self._places[-1].step:
            floors = [seq for seq, _ in snapshot.floors] if self.in_order else []
            position = sum(snapshot.merge.merged_samples)
            held, at_hand = snapshot.form.num_samples, snapshot if keep else None
            self._places.append(_Place(snapshot.step, lsn, floors, position, held, at_hand))
            self._at_hand += self._places[-1:] if keep else []

    def keep(self, snapshot: Snapshot) -> None:
        """Have one that is recorded at hand again."""
        at = bisect_right(self._places, snapshot.step, key=lambda place: place.step) - 1
        if at >= 0 and self._places[at].step == snapshot.step:
            self._at_hand += [self._places[at]] if self._places[at].snapshot is None else []
            self._places[at].snapshot = snapshot

    def nearest(self, step: int) -> tuple[int, int, Snapshot | None] | None:
        """(its step, its record, itself if at hand) of the last snapshot not after ``step``."""
        at = bisect_right(self._places, step, key=lambda place: place.step) - 1
        if at < 0:
            return None
        place = self._places[at]
        return place.step, place.lsn, place.snapshot

    @property
    def last_position(self) -> int:
        """Samples merged at the last snapshot: what holds from before it on would have to be in it."""
        return self._places[-1].position if self._places else 0

    def forget_after(self, position: int) -> None:
        """Let go of snapshots at which more samples were merged."""
        self._places = [place for place in self._places if place.position <= position]

    @property
    def last_snapshot(self) -> int:
        """The step of the last one, or 0."""
        return self._places[-1].step if self._places else 0

    @property
    def in_last_snapshot(self) -> int:
        """Samples that the last one holds."""
        return self._places[-1].held if self._places else 0

    def forget_snapshots(self, released: int, keeps_log: bool) -> None:
        """Let go of what no rank will ask for: from memory, or wholly where there is no log to read it from."""
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
        """The first record without which nobody could go to ``step``."""
        at = bisect_right(self._places, step, key=lambda place: place.step) - 1
        if at < 0:
            return 0
        place = self._places[at]
        needed = (chunk.lsn for chunk in self.order if chunk.stop_seq >= place.floor(chunk.partition))
        return min(place.lsn, next(needed, place.lsn))

    def forget_below(self, lsn: int) -> None:
        """Records below ``lsn`` are gone from the log."""
        self._places = [place for place in self._places if place.lsn >= lsn]
        self.order = [chunk for chunk in self.order if chunk.lsn >= lsn]
        self.is_cut = True
        gone = bisect_right(self._lsns, lsn - 1)
        del self._lsns[:gone]
        del self._chains[: gone * DIGEST_BYTES]
        self._first += gone

    @property
    def oldest_step(self) -> int:
        """The first step that can be gone to: 0, or, where the order of arrival decides and the log has lost its first
        chunks, that of the first snapshot which needs none of them.
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
        """Have a broker that begins serve ``step`` first, passed over or not, and keep nothing for anybody else: to
        look at it again.
        """
        self.released = step
        self.skips.clear()
        self.commits.clear()

    @property
    def in_order(self) -> bool:
        """Does the order in which chunks came decide the steps?"""
        return self.rules.merge == "arrival"

    # Policies

    def is_stale(self, version: int) -> bool:
        """Is what a policy of this version made too old to be taken next in the order?"""
        lag = self.rules.max_policy_lag
        return lag is not None and 0 <= version < self.newest_version - lag

    def came(self, place: ChunkPlace) -> None:
        """A chunk, or a mark, is next in the order."""
        self.order.append(place)
        self.newest_version = max(self.newest_version, place.version)

    # Lineages

    def branch(self, lineage: int, step: int, since: int | None = None) -> None:
        """Forget what is recorded of ``step`` and after: another lineage follows, without chunks of records from
        ``since`` on.
        """
        for place in self.order:
            place.lost = place.lost or (since is not None and place.lsn >= since)
        if since is not None:  # policies begin again from an older version: theirs is not to be too old
            self.newest_version = max((place.version for place in self.order if not place.lost), default=-1)
        self.lineage, self.lineage_step = lineage, step
        keep = max(step - self._first, 0)
        del self._lsns[keep:]
        del self._chains[keep * DIGEST_BYTES :]
        while self._places and self._places[-1].step > step:
            self._places.pop()
        self.end = None
        self.tails = {tail for tail in self.tails if tail[0] < step}

    def begin_of(self, step: int) -> int:
        """The record after that of ``step - 1``, be it a snapshot; 0 for the first step."""
        found = self.nearest(step)
        if self.lsn_of(step - 1) < 0 and found is not None and found[0] == step:
            return found[1]
        return self.lsn_of(step - 1) + 1

    def recover(self, facts: FeedFacts, released: int) -> None:
        """What survived of records that are gone; steps below ``released`` were returned by every rank."""
        self.lineage, self.lineage_step = facts.lineage, facts.lineage_step
        self.changes = list(facts.changes)
        self.skips, self.commits = list(facts.skips), list(facts.commits)
        self.released = max(self.released, released)
        if facts.newest_version is not UNSET:
            self.newest_version = max(self.newest_version, facts.newest_version)

    def facts(self) -> FeedFacts:
        """What must survive when records of the log go."""
        return FeedFacts(
            rules=self.rules, lineage=self.lineage, lineage_step=self.lineage_step, changes=self.changes,
            skips=self.skips, commits=self.commits,
            newest_version=UNSET if self.newest_version < 0 else self.newest_version,
        )  # fmt: skip
