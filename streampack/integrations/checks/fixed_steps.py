"""Frameworks whose settings fix the length or the number of packs: training ends where a stage has others.

The framework cannot change its own settings while it trains. So the steps up to such a stage are handed out, and then
StageEnds says which setting the next run needs. A loader that begins warns of such stages, since a framework saves a
checkpoint there only if it is told to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from streampack.client.connect import Client
from streampack.core.model.keys.stage_keys import StageBegin
from streampack.core.model.rule_changes import rules_of_stages
from streampack.core.model.rules import Rules
from streampack.errors import StageEnds, UserError
from streampack.packs.step import Step

log = logging.getLogger("streampack.client")

Check = Callable[[Rules, int], None]
"""Raises UserError if the framework's settings do not fit rules, at a step from which they hold."""


class FixedSteps:
    """The steps of an iteration; raises StageEnds, at each call, from the first step on that ``check`` refuses."""

    def __init__(self, loader: Client[Any], check: Check) -> None:
        self._steps, self._check = loader.steps(), check
        self._ends: StageEnds | None = None

    def __iter__(self) -> FixedSteps:
        return self

    def __next__(self) -> Step[Any]:
        if self._ends is None:
            step = next(self._steps)
            assert step.rules is not None, "a loader has made it"
            try:
                self._check(step.rules, step.index)
                return step
            except UserError as error:
                self._ends = StageEnds(step.index, step.stage, str(error))
        raise StageEnds(self._ends.step, self._ends.stage, self._ends.detail)


def check_stages(loader: Client[Any], check: Check, advice: str) -> None:
    """Check the rules with which a run began, and its stages; warn on rank 0 of those that end training.

    Args:
        loader: A loader that has handed out no step.
        check: Raises UserError if the framework's settings do not fit some rules.
        advice: Words that say how the framework saves a checkpoint at a certain step.

    Raises:
        UserError: The settings fit neither the first rules nor a stage.
    """
    stages = loader.rules.stages
    ends: list[tuple[int, StageBegin, UserError]] = []
    every = rules_of_stages(loader.rules)
    for number, rules in enumerate(every):
        at = stages[number - 1].at if number else StageBegin(step=0)
        try:
            check(rules, at.step or 0)
        except UserError as error:
            ends.append((number, at, error))
    if len(ends) == len(every):
        raise ends[0][2]
    for number, at, why in ends if not any(loader.mesh.ranks) else ():
        if number:
            name = stages[number - 1].name or str(number)
            log.warning("training ends with StageEnds where stage %r begins (%s): %s. %s", name, at, why, advice)
