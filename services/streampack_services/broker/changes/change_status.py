"""The types of a snapshot's part about changes of the rules: those in force, those that wait, and those before."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from streampack.core.model.keys.planning_keys import MediaLimits
from streampack.core.model.keys.stage_keys import StageRules
from streampack_services.figure import gauge


class RulesInForce(Struct, frozen=True, kw_only=True):
    """The rules with which the next step is formed."""

    stage: str
    """Name of the stage, or a text about the change; empty before the first."""
    since_step: Annotated[int, gauge("stage_since_step", "Step at which the rules in force began.")]
    budget: Annotated[int, gauge("budget_tokens", "Budget of the packs of the next step, in tokens.")]
    packs: Annotated[int | None, gauge(
        "step_packs", "Packs of the next step. Only of feeds whose step is a number of packs.",
        label="packs in a step")]  # fmt: skip
    window: int | str
    """Samples in the window, or ``auto``."""
    limits: MediaLimits | None
    """Limits for the media of a pack."""
    packer: str
    """The packer; ``joint`` with ``balance: {kind: joint}``."""
    paused: list[str]
    """Streams that pause."""
    changed: StageRules = StageRules()
    """The rules that differ from those with which the feed began, except those of streams."""

    @gauge("stage_info", "Always 1; the label is the name of the stage in force, or `start` before the first.", "stage")
    def stages(self) -> dict[str, int]:
        return {self.stage or "start": 1}


class ComingChange(Struct, frozen=True, kw_only=True):
    """A change of the rules that has not begun, or that comes again after the trainers went back to an earlier step."""

    id: int | None
    """Its number, for ``streampack set --cancel``. None in logs of versions that had none."""
    name: str
    """Name of the stage, or a text about the change."""
    what: str
    """A text about everything that changes."""
    step: int | None
    """The step from which on it holds; None for a change that waits for tokens."""
    tokens: int | None
    """The tokens in steps for which it waits."""
    estimated_step: int | None
    """The step at which a change that waits for tokens is likely to begin; None if nobody can know it yet."""
    note: str
    """A person's reason, and the step at which the change was asked for; empty for stages of broker.yaml."""


class PastChange(Struct, frozen=True, kw_only=True):
    """A change of the rules that has taken effect."""

    id: int | None
    """Its number; None in logs of versions that had none."""
    name: str
    """Name of the stage, or a text about the change."""
    step: int
    """The step from which on it holds."""
    note: str
    """A person's reason, and the step at which it was asked for."""


class ChangesStatus(Struct, frozen=True, kw_only=True):
    """The changes of a feed's rules."""

    in_force: RulesInForce
    """The rules with which the next step is formed."""
    num_coming: Annotated[int, gauge("changes_waiting", "Changes of the rules that have not begun.")]
    coming: list[ComingChange]
    """The next of them, in the order of their begins."""
    past: list[PastChange]
    """The last changes that have taken effect, latest last."""
    text: str
    """The rules in force and the next change, in words; empty without changes."""

    @gauge(
        "next_stage_step", "Step at which the next change of the rules begins; an estimate if the change waits for "
        "tokens."
    )  # fmt: skip
    def next_step(self) -> int | None:
        if not self.coming:
            return None
        return self.coming[0].estimated_step if self.coming[0].step is None else self.coming[0].step
