"""A limit on the log lines that peers can cause.

Each rejected message is worth a line, and a peer may send any number of messages. The limit allows a burst, since
thousands of ranks may connect at once, then a fixed rate. It counts the lines that are left out.
"""

from __future__ import annotations

BURST = 5000
"""Lines that are allowed at once."""
PER_SECOND = 10.0
"""Lines that are allowed per second after the burst."""


KEY_BURST = 1
"""Lines about refused messages of one key that are allowed at once."""
KEY_PER_SECOND = 1 / 600
"""Lines about refused messages of one key that are allowed per second after the burst."""


class ReportLimit:
    """A token bucket for log lines; ``held_back`` counts the lines left out since ``take_held_back``."""

    def __init__(self, burst: int = BURST, per_second: float = PER_SECOND) -> None:
        self.held_back = 0
        self._burst, self._per_second = float(burst), per_second
        self._left = self._burst
        self._at = 0.0

    def allows(self, now: float) -> bool:
        """Return True if a line may be logged at ``now``, in seconds of a monotonic clock; otherwise count the line."""
        self._left = min(self._left + (now - self._at) * self._per_second, self._burst)
        self._at = now
        if self._left < 1.0:
            self.held_back += 1
            return False
        self._left -= 1.0
        return True

    def take_held_back(self) -> int:
        """Return the number of lines left out, and set the count to 0."""
        count, self.held_back = self.held_back, 0
        return count
