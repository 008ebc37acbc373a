"""How long a trainer waits before it is told that nothing will come: long for what heals by itself, never for ever.

Three things end a wait: the broker was not heard for ``stall_s``, ranks of the mesh have not joined for
``join_s``, a question was not answered in ``answer_s``. A broker that is alive and says which stream it waits for
ends none. Time counts by ticks, none of them as more than a second: a process that was stopped and wakes up hours
later has not waited.
"""

from __future__ import annotations

from dataclasses import dataclass

_TICK_S = 1.0


@dataclass(slots=True)
class Patience:
    """Seconds that have passed of each wait, None where there is none."""

    stall_s: float = 300.0
    join_s: float = 300.0
    answer_s: float = 60.0
    silent_s: float = 0.0
    """Since the broker was heard, or since the start."""
    _asking_s: float | None = None
    _wanting_s: float | None = None
    _joining_s: float | None = None
    _missing: str = ""
    _now: float = 0.0

    def tick(self, now: float) -> None:
        """Time passes."""
        passed, self._now = min(now - self._now, _TICK_S), now
        self.silent_s += passed
        if self._wanting_s is not None:
            self._wanting_s += passed
            self._joining_s = None if self._joining_s is None else self._joining_s + passed
            self._asking_s = None if self._asking_s is None else self._asking_s + passed

    def heard(self) -> None:
        """The broker has said anything."""
        self.silent_s = 0.0

    def wants(self, waiting: bool) -> None:
        """A trainer begins to wait, or has what it waited for."""
        self._wanting_s = 0.0 if waiting else None
        self._joining_s = None if self._joining_s is None else 0.0
        self._asking_s = self._asking_s if waiting else None

    def asks(self) -> None:
        """The trainer has asked something, and waits until it has its answer."""
        self._asking_s = 0.0

    def told(self, joining: bool, detail: str = "") -> None:
        """What the broker waits for: ranks that have yet to join (``detail`` names them), or something else."""
        self._missing = detail
        self._joining_s = (self._joining_s or 0.0) if joining else None

    def over(self) -> str:
        """Why it is no use to wait any longer; empty if it is."""
        if self._wanting_s is None:
            return ""
        if min(self._wanting_s, self.silent_s) > self.stall_s:
            return (
                f"got no word of the broker for {self.silent_s:.0f} s, expected one within {self.stall_s:g} s: "
                f"is it running, or stopped? (stall_timeout_s)"
            )
        if self._joining_s is not None and self._joining_s > self.join_s:
            return (
                f"got ranks that have not joined in {self.join_s:g} s ({self._missing}), expected every rank of the "
                f"mesh: start what is missing (join_timeout_s)"
            )
        if self._asking_s is not None and self._asking_s > self.answer_s:
            return (
                f"got no answer of the broker in {self.answer_s:g} s, it was heard {self.silent_s:.0f} s ago, "
                f"expected one: is it running? (timeout_s)"
            )
        return ""
