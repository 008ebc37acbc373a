"""The messages of a session that the broker has not answered."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


class OpenMessages(dict[int, T]):
    """Messages without an answer, by number; the oldest first."""

    _next = 0

    def take_number(self) -> int:
        """Return a number for the next message."""
        self._next += 1
        return self._next
