"""How long a trainer waits before it gets an error: long for faults that heal by themselves, but never forever.

A wait ends with an error after ``stall_s`` without a message of the broker. It also ends after ``join_s`` in which
ranks have not joined, and ``answer_s`` after a question without an answer. A trainer waits without limit while the
broker reports the stream that it waits for. A tick counts as at most a second, so that time in which the process was
stopped does not count as a wait.
"""

from __future__ import annotations

from dataclasses import dataclass

VAIN_S = 30.0
"""Seconds of silence after which a broker that owes an answer at each ping seems to hang; pings may be 10 s apart."""
_TICK_S = 1.0


@dataclass(slots=True)
class Patience:
    """The seconds that a trainer has waited, and their limits.

    Attributes:
        stall_s: Limit of a wait without a message of the broker.
        join_s: Limit of a wait for ranks to join.
        answer_s: Limit of a wait for the answer to a question.
        silent_s: Seconds since the broker's last message, or since the start.
    """

    stall_s: float = 300.0
    join_s: float = 300.0
    answer_s: float = 60.0
    silent_s: float = 0.0
    _waiting_s: float | None = None
    """Seconds that the trainer has waited for a step or an answer; None while it does not wait."""
    _asking_s: float | None = None
    """Seconds since the trainer's question, if it waits for the answer."""
    _joining_s: float | None = None
    """Seconds that the broker has waited for ranks to join, if it does."""
    _missing: str = ""
    """Names of the ranks that have not joined."""
    _now: float = 0.0

    def tick(self, now: float) -> None:
        """Add the seconds since the last tick, at most 1, to every wait that runs."""
        passed, self._now = min(now - self._now, _TICK_S), now
        self.silent_s += passed
        if self._waiting_s is not None:
            self._waiting_s += passed
            self._joining_s = None if self._joining_s is None else self._joining_s + passed
            self._asking_s = None if self._asking_s is None else self._asking_s + passed

    def broker_heard(self, ago_s: float = 0.0) -> None:
        """Record that the broker was heard ``ago_s`` seconds ago; more than 0 if only a relay has answered since."""
        self.silent_s = min(self.silent_s, ago_s)

    def trainer_waits(self, waiting: bool) -> None:
        """Record that the trainer begins to wait (``waiting``), or that its wait has ended."""
        self._waiting_s = 0.0 if waiting else None
        self._joining_s = None if self._joining_s is None else 0.0
        self._asking_s = self._asking_s if waiting else None

    def question_asked(self) -> None:
        """Record a question of the trainer: its wait for the answer begins."""
        self._asking_s = 0.0

    def broker_waits(self, joining: bool, detail: str = "") -> None:
        """Record whether the broker waits for ranks to join (``detail`` names the ranks), or for something else."""
        self._missing = detail
        self._joining_s = (self._joining_s or 0.0) if joining else None

    @property
    def waits_in_vain(self) -> bool:
        """True if the trainer waits for a step, and the broker has long not said why, which it does at each ping."""
        return self._asking_s is None and min(self._waiting_s or 0.0, self.silent_s) > VAIN_S

    def reason_to_stop(self) -> str:
        """Return an error text if the trainer should stop waiting; empty while it may wait."""
        if self._waiting_s is None:
            return ""
        if min(self._waiting_s, self.silent_s) > self.stall_s:
            return (
                f"got no message from the broker for {self.silent_s:.0f} s, expected a message within "
                f"{self.stall_s:g} s (stall_timeout_s). Check that the broker is running"
            )
        if self._joining_s is not None and self._joining_s > self.join_s:
            return (
                f"got ranks that have not joined in {self.join_s:g} s ({self._missing}), expected every rank of the "
                f"mesh. Start the missing ranks, or raise join_timeout_s"
            )
        if self._asking_s is not None and self._asking_s > self.answer_s:
            return (
                f"got no answer from the broker, expected an answer within {self.answer_s:g} s (timeout_s). The "
                f"broker's last message came {self.silent_s:.0f} s ago. Check that the broker is running"
            )
        return ""
