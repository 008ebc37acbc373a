"""What was, in bounded memory: a row a second of the last minutes, ever fewer of what lies longer back.

Rows hold counters that only rise beside figures of the moment, so that thinning loses no count: whatever lies between
two rows that are kept is their difference. Knows numbers, and neither what they are of nor the time: rows bring it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

Row = Sequence[float]
"""(seconds, *figures)."""


@dataclass(frozen=True, slots=True)
class Tier:
    """At most ``rows`` rows, of which each is at least ``every_s`` seconds after the one before."""

    every_s: float
    rows: int


TIERS = (Tier(0.7, 600), Tier(10, 1440), Tier(60, 2880))
"""10 minutes by the second (snapshots come a little early or late), 4 hours by 10 seconds, 2 days by the minute: 1 MB
for 25 figures."""


class Timeline:
    """Rows of the same length, the oldest first; what falls out of a tier goes to the next, thinned, or is forgotten.

    >>> timeline = Timeline((Tier(1, 2), Tier(10, 2)))
    >>> for second in range(20):
    ...     timeline.add([second, 100 * second])
    >>> [row[0] for row in timeline.since(-1)]
    [0.0, 10.0, 18.0, 19.0]
    """

    def __init__(self, tiers: Sequence[Tier] = TIERS) -> None:
        self._tiers = tiers
        self._rows: tuple[deque[array[float]], ...] = tuple(deque() for _ in tiers)

    def add(self, row: Row) -> None:
        """Note a row; one that comes sooner after the last than the first tier keeps them is left out."""
        going: array[float] | None = array("d", row)
        for tier, rows in zip(self._tiers, self._rows, strict=True):
            if going is None or (rows and going[0] - rows[-1][0] < tier.every_s):
                return
            rows.append(going)
            going = rows.popleft() if len(rows) > tier.rows else None

    def since(self, second: float) -> list[Row]:
        """The rows after ``second``, the oldest first."""
        found: list[Row] = []
        for row in (row for rows in self._rows for row in reversed(rows)):
            if row[0] <= second:
                break
            found.append(row)
        return found[::-1]
