"""The phases of a peer: one enum and one table of allowed transitions for each kind of peer.

A transition that is not in the table is a bug in streampack, and raises ``InternalError`` with the last phases of the
peer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from streampack.errors import InternalError

KEPT = 32
"""Number of a peer's last phases that the report shows."""

P = TypeVar("P", bound=Enum)


class Phases(Generic[P]):
    """The phase that a peer is in, and the last phases before it.

    Args:
        who: Name of the peer, for the report.
        table: The phases that may follow each phase.
        first: The phase that the peer begins in.

    Raises:
        InternalError: ``go`` was called with a phase that may not follow the current phase.
    """

    __slots__ = ("_history", "_table", "_who", "now")

    def __init__(self, who: str, table: Mapping[P, frozenset[P]], first: P) -> None:
        self._who, self._table = who, table
        self._history: deque[P] = deque([first], KEPT)
        self.now = first

    def go(self, to: P) -> None:
        """Enter the phase ``to``."""
        if to not in self._table[self.now]:
            raise InternalError(
                f"{self._who} went from phase {self.now.name} to phase {to.name}, which is not allowed. Last phases: "
                f"{self}"
            )
        self._history.append(to)
        self.now = to

    def __repr__(self) -> str:
        return " -> ".join(phase.name for phase in self._history)
