"""A time series in bounded memory: one row a second for the last minutes, fewer rows for older times.

Rows hold counters that only rise, and current values. Leaving out rows loses no count: the difference of two rows has
everything between them. The module knows neither the meaning of the numbers nor a clock; the first number of a row is
its time.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

Row = Sequence[float]
"""(time in seconds, *figures)."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A part of a timeline: at most ``rows`` rows, each at least ``every_s`` seconds after the row before."""

    every_s: float
    rows: int


TIERS = (Tier(0.7, 600), Tier(10, 1440), Tier(60, 2880))
"""10 minutes with a row a second, 4 hours with a row every 10 s, 2 days with a row a minute: 1 MB for 25 figures. Rows
come a little early or late, so the first tier takes them from 0.7 s on."""


class Timeline:
    """Rows of the same length, in tiers. The oldest row of a full tier moves to the next tier, or is left out there.

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
        """Add a row. It is left out if it comes too soon after the last row for the first tier."""
        going: array[float] | None = array("d", row)
        for tier, rows in zip(self._tiers, self._rows, strict=True):
            if going is None or (rows and going[0] - rows[-1][0] < tier.every_s):
                return
            rows.append(going)
            going = rows.popleft() if len(rows) > tier.rows else None

    def since(self, second: float) -> list[Row]:
        """Return the rows after time ``second``, oldest first."""
        newest: list[Row] = []
        for row in (row for rows in self._rows for row in reversed(rows)):
            if row[0] <= second:
                break
            newest.append(row)
        return newest[::-1]
