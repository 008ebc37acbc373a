"""When to repeat a message that was not answered: each time later, and no two peers at the same moment.

The delays are a function of the peer's name and of how often it has tried, so that a session stays deterministic.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

UNSENT_S = 0.5
"""Until a message is tried again that never left this process: nobody is burdened by it."""


def spread(name: str, number: int) -> float:
    """A value from 0 to 1 that differs by name and number.

    >>> spread("rank 0", 1) == spread("rank 0", 1) != spread("rank 1", 1)
    True
    """
    digest = hashlib.blake2b(f"{name}:{number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") / 2**32


@dataclass(slots=True)
class Backoff:
    """Repeats of one message by the peer ``name``: after ``first_s``, then after twice as long each time, up to
    ``most_s``; every delay is a quarter longer or shorter.
    """

    name: str
    first_s: float
    most_s: float
    _at: float = 0.0
    _tries: int = 0

    def due(self, now: float) -> bool:
        """Is it time to say it again?"""
        return now >= self._at

    def said(self, now: float) -> None:
        """The message was sent."""
        delay = min(self.first_s * 2.0 ** min(self._tries, 32), self.most_s)
        self._at = now + delay * (0.75 + 0.5 * spread(self.name, self._tries))
        self._tries += 1

    def answered(self, now: float) -> None:
        """The peer moves: delays are short again."""
        self._tries = 0
        self.said(now)

    def unsent(self, now: float) -> None:
        """The message never left this process: it does not count as a try."""
        self._tries = 0
        self._at = now + UNSENT_S * (0.75 + 0.5 * spread(self.name, 0))

    def reset(self) -> None:
        """The message is due at once."""
        self._tries, self._at = 0, 0.0
