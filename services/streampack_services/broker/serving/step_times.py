"""The time between two steps that all ranks have returned, for the last steps of each feed.

A time counts if the next step was formed when the one before was returned: then no rank waited for samples. Steps that
are returned in one turn of the broker's loop have no time. Nor have those of feeds with ``cp: dynamic``: the fit of a
cost to times deals packs to ranks, not samples to groups of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

from streampack.core.feed.feed import Feed
from streampack.core.model.mesh import DynamicCp
from streampack_services.ledger.run_hours import StepTimes


class StepTimer:
    """Takes the times of steps in the broker's thread; any thread may read ``times``."""

    def __init__(self) -> None:
        self.times: dict[str, StepTimes] = {}
        """The times of each feed; replaced whole."""
        self._last: dict[str, tuple[int, float, bool]] = {}

    def look(self, now: float, feeds: Iterable[Feed]) -> None:
        """Note the steps that all ranks have returned by ``now``, in seconds."""
        for feed in feeds:
            steps = feed.readers.steps
            returned, (before, then, was_ready) = steps.released_upto, self._last.get(feed.name, (-1, now, False))
            if returned == before:
                continue
            if returned == before + 1 and was_ready and steps.joined and DynamicCp.of(feed.plan.layout) is None:
                self._add(feed, before, now - then)
            self._last[feed.name] = returned, now, steps.formed_upto > returned

    def _add(self, feed: Feed, step: int, seconds: float) -> None:
        """Add the time of a step, on the mesh of the attached ranks."""
        mesh = next(iter(feed.readers.registry.held.values())).mesh
        old = self.times.get(feed.name, StepTimes())
        new = StepTimes(dp=mesh.dp, pp=mesh.pp, seconds={step: round(seconds, 6)})
        self.times = {**self.times, feed.name: old.plus(new)}
