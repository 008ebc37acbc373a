"""The functions of a feed that its readers need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from streampack.core.model.rules import Rules
from streampack.core.model.snapshot import Snapshot
from streampack.core.protocol.events import Effect
from streampack.core.protocol.trainer_messages import MixedStream, State
from streampack.core.stats.data_wait import Missing


class StepSource(Protocol):
    """The source of the readers' steps; ``Feed`` implements it."""

    def waiting_for(self) -> Missing:
        """Return the cause of the wait for the next step."""

    def all_rules(self) -> Sequence[Rules]:
        """Return the rules at the begin of the run, and after each change that took effect or is to come."""

    def unfit(self, step: int, snapshot: Snapshot | None, /) -> tuple[str, str] | None:
        """Return why the feed cannot go to ``step`` with a snapshot, as (error code, error text); None if it can."""

    def rewind(self, step: int, snapshot: Snapshot | None, back: bool, /) -> list[Effect]:
        """Form the steps from ``step`` on again, from ``snapshot`` or a nearer snapshot.

        ``back`` is True if the trainers had returned ``step`` before; False if they continue after a restart of the
        broker.
        """

    def knows(self, snapshot: Snapshot, /) -> bool:
        """Return whether the log has all rule changes and skipped steps of a checkpoint's snapshot."""

    def state_of(self, step: int) -> State | list[Effect]:
        """Return the state of a checkpoint at ``step``, or the effects that fetch it for ``Readers.tell_states``."""

    def mixture(self) -> list[MixedStream]:
        """Return the streams, and how they are mixed now and in the steps that every rank has returned."""

    def commit(self, step: int) -> list[Effect]:
        """Record that the checkpoint at ``step`` is durable; ``Readers.committed`` follows once the record is safe."""
