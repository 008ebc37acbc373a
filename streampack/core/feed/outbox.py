"""The outbox: formed steps that readers do not have yet.

A step goes to the readers once its record, and all records that decided it, are safe (R2). The payload of its samples
must be there, too: after a restart, samples are read again. Groups of ranks are planned meanwhile, in a thread.

A feed that restarts forms some steps again on the way to the next served step. These steps go to no reader; only their
digests are used.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from streampack.core.deal.dynamic_cp.cp_plan import GroupRequest
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
"""The end of the feed: (number of steps, digest of all)."""


class _OutboxItem(NamedTuple):
    """A step that waits until the record ``lsn`` is safe, and for the plan of its ``request``."""

    lsn: int
    step: PlannedStep | Ended
    request: GroupRequest | None

    @property
    def is_being_planned(self) -> bool:
        return self.request is not None and self.request.plan is None


class Outbox:
    """The formed steps of one feed that wait for the log, for payload or for the plan of their ranks, in order."""

    def __init__(self, readers: Readers, history: History, journal: Journal, leases: Leases) -> None:
        self._readers, self._history, self._journal, self._leases = readers, history, journal, leases
        self._waiting = deque[_OutboxItem]()

    def put(self, item: PlannedStep | Ended, request: GroupRequest | None = None) -> None:
        """Add a step or the end; it waits until every record that was appended so far is safe.

        A step also waits for the plan of its ``request``.
        """
        self._waiting.append(_OutboxItem(self._journal.next_lsn - 1, item, request))

    def hand_out(self) -> list[Effect]:
        """Give readers the steps whose records are safe and whose payload has come; release returned steps."""
        effects: list[Effect] = []
        absent, readers = self._leases.accounts.absent, self._readers
        while self._waiting and self._waiting[0].lsn < self._journal.safe_upto:
            _, step, request = self._waiting[0]
            if not isinstance(step, PlannedStep):
                effects += readers.finish(*step)
            elif step.number < readers.steps.formed_upto:
                effects.append(Release(step.packs.handles))
                effects += readers.attempts.check(step.number + 1, step.chain)
            elif self._waiting[0].is_being_planned or (
                absent and any(handle in absent for handle in step.packs.handles.tolist())
            ):
                break
            else:
                effects += readers.add(step, self._history.is_skipped(step.number), request)
            self._waiting.popleft()
        return effects

    def waiting_for(self) -> Missing | None:
        """Return the reason that the first step in the outbox waits; None if no step waits."""
        if not self._waiting:
            return None
        lsn, step, _ = self._waiting[0]
        if lsn >= self._journal.safe_upto:
            return Missing("log", self._journal.stalled or "the broker is writing the step to its log")
        if not isinstance(step, PlannedStep):
            return None
        absent = self._leases.accounts.absent
        if self._waiting[0].is_being_planned:
            return Missing("forming", "the groups of the step's ranks are being planned")
        reason = f"samples of step {step.number} are being read again"
        for p in (absent[h][0] for h in step.packs.handles.tolist() if h in absent):
            who, stream = self._leases.producers.describe(p), self._leases.partitions.name_of(p)
            return Missing("stream", f"{reason} from {who}", stream)
        return Missing("stream", reason)

    def clear(self) -> list[I64]:
        """Forget all steps; return the sample handles of each step, int64 [n]."""
        handles = [step.packs.handles for _, step, _ in self._waiting if isinstance(step, PlannedStep)]
        self._waiting.clear()
        return handles
