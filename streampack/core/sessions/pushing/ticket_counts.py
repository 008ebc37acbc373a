"""The tickets of a pushing process: how many samples it may generate, and which it generates now."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

UNKNOWN = 0
"""Version that stands for the policy of samples that were begun before any policy was published."""


@dataclass(slots=True)
class TicketCounts:
    """Counts since the process began; ``core.staging.tickets`` explains them.

    Attributes:
        asked: Tickets that the program has asked for.
        granted: Tickets that the broker has given.
        begun: Samples that the program has begun, also those that it gave back.
        open: Samples that it generates now, by version of the policy.
    """

    asked: int = 0
    granted: int = 0
    begun: int = 0
    open: Counter[int] = field(default_factory=Counter)

    @property
    def used(self) -> int:
        """Tickets whose samples are safe in the broker's log, or were given back."""
        return self.begun - self.open.total()

    def may_be_open(self, newest: int | None) -> tuple[tuple[int, int], ...]:
        """Return (version, number) of the samples that are generated, or may be begun with the ``newest`` policy."""
        tickets = self.open + Counter({UNKNOWN if newest is None else newest: self.granted - self.begun})
        return tuple(sorted((version, count) for version, count in tickets.items() if count))

    def begin(self, count: int, version: int | None) -> None:
        """Begin ``count`` samples with the newest policy."""
        self.begun += count
        self.open[UNKNOWN if version is None else version] += count

    def use(self, count: int, version: int | None) -> None:
        """Count samples as sent: first those that were begun with their policy, then the oldest."""
        for _ in range(min(count, self.open.total())):
            self._take(version)

    def give_back(self, count: int, version: int | None) -> None:
        """Take back samples that will not be sent. Their tickets are used, so that others may get tickets instead."""
        self.use(count, version)

    def _take(self, version: int | None) -> None:
        """Remove a sample from those that are generated."""
        key = version if version is not None and self.open[version] else min(v for v, n in self.open.items() if n)
        self.open[key] -= 1
        self.open += Counter()  # removes versions without samples
