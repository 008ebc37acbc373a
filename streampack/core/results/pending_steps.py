"""The steps of which some ranks have reported values: their parts, until every part has come.

If the trainers train a step again before it is complete, the parts of the newest attempt count. A complete step is not
reported again in its lineage. This holds for steps whose values are forgotten, too, except after a restart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from streampack.core.journal.log_records import ValuesReported
from streampack.core.results.step_ranges import StepRanges

PENDING_BYTES, LEAST_PENDING = 8 << 20, 16
"""Most bytes of the parts of steps that are not complete; the oldest step is forgotten beyond it, unless only so many
are left."""
MOST_PENDING = 2048
"""Most steps that are not complete, each counted for every set of names; the oldest is forgotten beyond it."""
MOST_NAMES = 8
"""Most different sets of names that are reported for a step."""
Key = tuple[int, int, tuple[str, ...]]
"""(lineage, step, names)."""
Parts = dict[int, tuple[int, ValuesReported]]
"""(log sequence number, record) of each part of a step, by number."""
Returned = Callable[[int, int], int]
"""Function that returns how many steps a rank has returned, from the number of its part, and the number of parts."""


@dataclass(slots=True)
class _Pending:
    """The newest records of a step's parts. ``attempt`` is the newest attempt; parts of others do not count yet."""

    attempt: tuple[int, int]
    parts: Parts = field(default_factory=dict)

    def has(self, part: int, attempt: tuple[int, int]) -> bool:
        """Return whether a part of this attempt, or of a newer one, is known."""
        return part in self.parts and self.parts[part][1].attempt >= attempt

    @property
    def num_bytes(self) -> int:
        """Bytes of the parts' values and ids."""
        return sum(sum(map(len, record.values)) + 4 * len(record.streams_u32) for _, record in self.parts.values())

    def put(self, lsn: int, record: ValuesReported) -> None:
        """Add a part. Parts that belong to another mesh than the newest attempt are dropped."""
        if record.attempt >= self.attempt:
            self.attempt = record.attempt
            self.parts = {part: stored for part, stored in self.parts.items() if stored[1].parts == record.parts}
        elif any(stored.parts != record.parts for _, stored in self.parts.values()):
            return
        self.parts[record.part] = lsn, record

    @property
    def earlier(self) -> list[ValuesReported]:
        """The parts of earlier attempts."""
        return [record for _, record in self.parts.values() if record.attempt < self.attempt]

    @property
    def complete(self) -> bool:
        """True if every part of the newest attempt has come."""
        return not self.earlier and all(len(self.parts) == record.parts for _, record in self.parts.values())


class PendingSteps:
    """The steps of one feed that are not complete; the newest are kept.

    Attributes:
        num_bytes: Bytes of the kept parts.
        forgotten: Steps that were forgotten before they were complete, and not reported yet.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.forgotten: list[Key] = []
        self._steps: dict[Key, _Pending] = {}
        self._done: dict[tuple[int, tuple[str, ...]], StepRanges] = {}
        """Steps that are complete, also forgotten ones, by (lineage, names)."""

    @property
    def steps(self) -> list[int]:
        """The kept steps, each counted for every set of names."""
        return [step for _, step, _ in self._steps]

    def knows(self, key: Key, part: int, attempt: tuple[int, int]) -> bool:
        """Return whether a part of this attempt, or of a newer one, is known, or its step is complete."""
        pending = self._steps.get(key)
        return self._is_done(key) or (pending is not None and pending.has(part, attempt))

    def _is_done(self, key: Key) -> bool:
        """Return whether a step is complete."""
        lineage, step, names = key
        return (lineage, names) in self._done and step in self._done[lineage, names]

    def may_add(self, key: Key) -> bool:
        """Return whether the set of names is known for this step, or the step may have a further set."""
        lineage, step, names = key
        lineages = {pending[2] for pending in self._steps if pending[:2] == key[:2]}
        lineages |= {done for other, done in self._done if other == lineage and self._is_done((lineage, step, done))}
        return len(lineages) < MOST_NAMES or names in lineages

    def add(self, lsn: int, record: ValuesReported) -> Parts | None:
        """Add a recorded part, also one of an earlier broker; return all parts if they are complete now."""
        key = record.lineage, record.step, record.names
        if self.knows(key, record.part, record.attempt):
            return None
        pending = self._steps.setdefault(key, _Pending(record.attempt))
        self.num_bytes -= pending.num_bytes
        pending.put(lsn, record)
        self.num_bytes += pending.num_bytes
        if not pending.complete:
            self._forget_oldest()
            return None
        self._drop(key)
        self._done.setdefault((record.lineage, record.names), StepRanges()).add(record.step)
        return pending.parts

    def _forget_oldest(self) -> None:
        """Forget the oldest steps while there are too many, or they have too many bytes."""
        while len(self._steps) > (LEAST_PENDING if self.num_bytes > PENDING_BYTES else MOST_PENDING):
            oldest = min(self._steps, key=lambda key: key[:2])
            self._drop(oldest)
            self.forgotten.append(oldest)

    def _drop(self, key: Key) -> None:
        """Drop the parts of a step."""
        self.num_bytes -= self._steps.pop(key).num_bytes

    def to_carry(self, returned: Returned) -> list[ValuesReported]:
        """Return the parts of earlier attempts that no rank will report again, as parts of the newest attempt."""
        return [
            replace(record, attempt=pending.attempt)
            for (_, step, _), pending in self._steps.items()
            for record in pending.earlier
            if returned(record.part, record.parts) > step
        ]

    def branch(self, lineage: int) -> None:
        """Forget which steps of earlier lineages are complete or not: no part of them is recorded any more."""
        for key in [key for key in self._steps if key[0] < lineage]:
            self._drop(key)
        self._done = {key: steps for key, steps in self._done.items() if key[0] >= lineage}

    def forget_below(self, lsn: int) -> None:
        """Forget the parts with records below ``lsn``: these records were deleted from the log."""
        for key, pending in list(self._steps.items()):
            pending.parts = {part: stored for part, stored in pending.parts.items() if stored[0] >= lsn}
            if not pending.parts:
                del self._steps[key]
        self.num_bytes = sum(pending.num_bytes for pending in self._steps.values())
