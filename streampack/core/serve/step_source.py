"""What a feed does for its readers."""

from __future__ import annotations

from typing import Protocol

from streampack.core.model.snapshot import Snapshot
from streampack.core.protocol.events import Effect
from streampack.core.protocol.trainer_messages import State
from streampack.core.stats.data_wait import Missing


class StepSource(Protocol):
    """Where the readers' steps come from; a ``Feed``."""

    def waiting_for(self) -> Missing:
        """Return why the next step is not there."""

    def unfit(self, step: int, given: Snapshot | None) -> tuple[str, str] | None:
        """Return why the feed cannot go to ``step`` with a reader's snapshot: (code, detail); None where it can."""

    def rewind(self, step: int, given: Snapshot | None, back: bool) -> list[Effect]:
        """Go to ``step``, from the snapshot ``given`` where no nearer one is known.

        ``back``: the trainers have returned that step before, and no reader goes on where another broker served it.
        """

    def knows(self, given: Snapshot) -> bool:
        """Return whether all changes and skips of a checkpoint's snapshot are recorded."""

    def state_of(self, step: int) -> State | list[Effect]:
        """Return a checkpoint's state, or the effects that fetch it. ``Readers.tell_states`` follows then."""

    def commit(self, step: int) -> list[Effect]:
        """Note that a checkpoint is durable. ``Readers.committed`` follows once the note is safe."""
