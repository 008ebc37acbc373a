"""How many lines of log peers can cause: each message that is refused is worth one, and a peer may send any number.

A ``Budget`` lets ``MOST`` lines through at once, as thousands of ranks that come together need, and from then on
``A_SECOND``; of the others it says how many there were. It knows the time as it is told.
"""

from __future__ import annotations

MOST = 5000
A_SECOND = 10.0


class Budget:
    """Of lines; ``held_back`` were not said since the last one that was."""

    def __init__(self) -> None:
        self.held_back = 0
        self._left = float(MOST)
        self._at = 0.0

    def lets(self, now: float) -> bool:
        """May a line be said at ``now``, in seconds?"""
        self._left = min(self._left + (now - self._at) * A_SECOND, float(MOST))
        self._at = now
        if self._left < 1.0:
            self.held_back += 1
            return False
        self._left -= 1.0
        return True

    def take_held_back(self) -> int:
        """How many lines were not said; they are told of now."""
        held, self.held_back = self.held_back, 0
        return held
