"""Steps that are formed and not yet with the readers.

A step goes to them once the log has it, and everything that decided it (R2), and once the payload of its samples is
there: after a restart they are read again. Those formed on the way to the step that is served next go to nobody: all
that they are good for is that their digests are known.
"""

from __future__ import annotations

from collections import deque

from streampack.core.intake.leases import Leases
from streampack.core.journal.history import History
from streampack.core.journal.journal import Journal
from streampack.core.model.samples import I64
from streampack.core.model.steps import PlannedStep
from streampack.core.protocol.effects import Release
from streampack.core.protocol.events import Effect
from streampack.core.serve.readers import Readers
from streampack.core.stats.data_wait import Missing

Ended = tuple[int, bytes]
"""(steps, digest of all): no step follows."""


class Outbox:
    """One feed's; in the order in which steps were formed."""

    def __init__(self, readers: Readers, history: History, journal: Journal, leases: Leases) -> None:
        self._readers, self._history, self._journal, self._leases = readers, history, journal, leases
        self._waiting: deque[tuple[int, PlannedStep | Ended]] = deque()  # behind which record each

    def put(self, what: PlannedStep | Ended) -> None:
        """A step, or the end, that everything in the log by now decides."""
        self._waiting.append((self._journal.next_lsn - 1, what))

    def hand_out(self) -> list[Effect]:
        """Give the readers what is safe and whole; steps before the one that was gone to have been served."""
        effects: list[Effect] = []
        absent, readers = self._leases.accounts.absent, self._readers
        while self._waiting and self._waiting[0][0] < self._journal.safe_upto:
            step = self._waiting[0][1]
            if not isinstance(step, PlannedStep):
                effects += readers.steps.finish(*step)
            elif step.number < readers.steps.formed_upto:
                effects.append(Release(step.packs.handles))
                effects += readers.attempts.check(step.number + 1, step.chain)
            elif absent and any(handle in absent for handle in step.packs.handles.tolist()):
                break
            else:
                effects += readers.add(step, self._history.is_skipped(step.number))
            self._waiting.popleft()
        return effects

    def waiting_for(self) -> Missing | None:
        """Why the first of them is not handed out; None where there is none."""
        if not self._waiting:
            return None
        lsn, step = self._waiting[0]
        if lsn >= self._journal.safe_upto:
            return Missing("log", self._journal.stalled or "the step is being written to the log")
        if not isinstance(step, PlannedStep):
            return None
        absent = self._leases.accounts.absent
        again = f"samples of step {step.number} are read again"
        for p in (absent[h][0] for h in step.packs.handles.tolist() if h in absent):
            who, stream = self._leases.producers.describe(p), self._leases.partitions.name_of(p)
            return Missing("stream", f"{again}, from {who}", stream)
        return Missing("stream", again)

    def let_go(self) -> list[I64]:
        """Forget them; the handles of each step, int64 [n]."""
        held = [step.packs.handles for _, step in self._waiting if isinstance(step, PlannedStep)]
        self._waiting.clear()
        return held
