"""A set of step numbers that takes little memory when steps follow each other."""

from __future__ import annotations

from bisect import bisect_right


class StepRanges:
    """A set of step numbers, kept as ranges ``starts[i]`` to ``stops[i] - 1``.

    Example:
        >>> ranges = StepRanges()
        >>> for step in (4, 6, 5):
        ...     ranges.add(step)
        >>> 5 in ranges, 7 in ranges, ranges.num_ranges
        (True, False, 1)
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    @property
    def num_ranges(self) -> int:
        """Number of ranges."""
        return len(self._starts)

    def __contains__(self, step: int) -> bool:
        at = bisect_right(self._starts, step)
        return at > 0 and step < self._stops[at - 1]

    def add(self, step: int) -> None:
        """Add a step."""
        if step in self:
            return
        at = bisect_right(self._starts, step)
        follows = at > 0 and self._stops[at - 1] == step
        precedes = at < len(self._starts) and self._starts[at] == step + 1
        if follows and precedes:
            self._stops[at - 1] = self._stops.pop(at)
            del self._starts[at]
        elif follows:
            self._stops[at - 1] = step + 1
        elif precedes:
            self._starts[at] = step
        else:
            self._starts.insert(at, step)
            self._stops.insert(at, step + 1)
