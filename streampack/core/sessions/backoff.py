"""When to repeat a message that has no answer, and when to ping: at different times for different peers.

The delays depend only on the peer's name and the number of tries, so that a session stays deterministic.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

PING_S = 1.0
"""Seconds between two pings, until the broker sets another interval."""
UNSENT_S = 0.5
"""Seconds until the next try of a message that never left this process."""


def spread(name: str, number: int) -> float:
    """Return a value from 0 to 1 that depends only on a name and a number.

    >>> spread("rank 0", 1) == spread("rank 0", 1) != spread("rank 1", 1)
    True
    """
    digest = hashlib.blake2b(f"{name}:{number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") / 2**32


@dataclass(slots=True)
class Backoff:
    """The times at which the peer ``name`` repeats one message until it has an answer.

    The first delay is ``first_s`` seconds; each delay is twice the last, up to ``most_s``. Depending on the peer's
    name, a delay is up to a quarter longer or shorter.
    """

    name: str
    first_s: float
    most_s: float
    _due_at: float = 0.0
    """Time of the next try."""
    _tries: int = 0

    def due(self, now: float) -> bool:
        """Return whether the message should be sent at time ``now``, in seconds."""
        return now >= self._due_at

    def sent(self, now: float) -> None:
        """Record that the message was sent at ``now``, and double the delay before the next try."""
        delay = min(self.first_s * 2.0 ** min(self._tries, 32), self.most_s)
        self._due_at = now + delay * (0.75 + 0.5 * spread(self.name, self._tries))
        self._tries += 1

    def answered(self, now: float) -> None:
        """Record an answer at ``now``: the next try comes after the first, short delay."""
        self._tries = 0
        self.sent(now)

    def unsent(self, now: float) -> None:
        """Record that the message never left this process: try again soon, and do not count this try."""
        self._tries = 0
        self._due_at = now + UNSENT_S * (0.75 + 0.5 * spread(self.name, 0))

    def reset(self) -> None:
        """Make the message due at once, and count its tries from 0."""
        self._tries, self._due_at = 0, 0.0


@dataclass(slots=True)
class PingTimes:
    """The times of the pings of the peer ``name``, every ``every_s`` seconds.

    If pings are rarer than every second, each comes up to a fifth earlier, so that peers do not ping all at once.
    """

    name: str
    every_s: float = PING_S
    _due_at: float = 0.0
    """Time of the next ping."""
    _count: int = 0

    def due(self, now: float) -> bool:
        """Return whether the next ping should be sent at time ``now``, in seconds."""
        return now >= self._due_at

    def sent(self, now: float) -> None:
        """Record a ping at ``now``, and set the time of the next."""
        self._count += 1
        early = 0.2 * spread(self.name, self._count) if self.every_s > PING_S else 0.0
        self._due_at = now + self.every_s * (1.0 - early)

    def hurry(self, now: float) -> None:
        """Send the next ping at most an interval after ``now``: the interval may be shorter than before."""
        self._due_at = min(self._due_at, now + self.every_s)
