"""The state of a loader in a framework's checkpoints, and when a checkpoint is committed.

A framework asks for the state when it begins a checkpoint, and not when the checkpoint is durable. It begins
none before the last one is durable, or before the one before the last. So each call commits a checkpoint that came
before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streampack.client.connect import Client
from streampack.errors import UserError


class CheckpointedLoader:
    """A framework's loader that has its state from streampack.

    A subclass sets ``_loader`` and ``_commits`` (one rank commits), and ``_step`` and ``_left`` as it hands out packs.
    """

    _loader: Client[Any]
    _commits = False
    _step = -1
    """The step of the last pack that was handed out; -1 before the first."""
    _left = 0
    """Packs of that step on this rank that were not handed out yet."""
    _behind = 1
    """How many checkpoints were begun after one that is surely durable."""
    _step_key = ""
    """The framework's key of the packs of a step."""
    _saved: tuple[int, ...] = ()
    """The steps of the last checkpoints that are not committed."""

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the current step, equal on all ranks; commit a checkpoint before it.

        Returns:
            A dict that holds only what JSON can hold.

        Raises:
            UserError: The checkpoint falls within a step.
        """
        if self._left:
            raise UserError(
                f"got a checkpoint within step {self._step}, {self._left} packs before its end, expected a checkpoint "
                f"between two steps. Set {self._step_key} to {self._loader.rules.packs}, the packs of a step"
            )
        state = self._loader.state_dict()
        if self._step >= 0 and self._step not in self._saved:
            self._saved = (*self._saved, self._step)
            if len(self._saved) > self._behind:
                durable, *later = self._saved
                self._saved = tuple(later)
                if self._commits:
                    self._loader.commit(durable)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's state, on any number of ranks.

        Args:
            state_dict: The dict that ``state_dict`` returned; an empty one changes nothing.

        Raises:
            StateError: The state is of another run, feed or rules.
        """
        if state_dict:
            self._loader.load_state_dict(state_dict)
            self._step, self._left, self._saved = -1, 0, ()

    def close(self) -> None:
        """Close the loader and release the rank."""
        self._loader.close()
