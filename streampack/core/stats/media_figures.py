"""Media of the packs formed: items, patches, bytes, and the axis that filled each pack."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64

AXES = ("tokens", "patches", "items")
"""Axes that can fill a pack. If two are equally full, the first counts."""


MEDIA_DROPPED = "media_dropped_"
"""How the names begin of a client's counts of media items that it has dropped; the reason follows."""


class MediaFigures:
    """Media in the packs formed by ``rules``, in all iterations.

    Attributes:
        items: Media items in these packs.
        patches: Their patches.
        bytes: Bytes of the media of their samples; of references, the bytes of the references.
        most_items: Most items of a pack.
        most_patches: Most patches of a pack.
        bound_by: Packs with samples by the axis that is fullest, compared with its limit. An axis without a limit does
            not occur.

    >>> from streampack.core.model.fields import Field
    >>> from streampack.core.model.keys.planning_keys import MediaLimits
    >>> pixels = Field(name="pixels", axis="patch", dtype="uint8")
    >>> media = MediaFigures(Rules(budget=8, media_fields=(pixels,), limits=MediaLimits(patches=4)))
    >>> media.add(np.array([0, 2, 3]), np.array([6, 8]), np.array([1, 1, 0]), np.array([1, 3, 0]), np.array([9, 11, 0]))
    >>> media.items, media.patches, media.most_patches, media.bound_by
    (2, 4, 4, {'tokens': 1, 'patches': 1})
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        limits = rules.limits
        ends = (None, limits.patches, limits.items) if limits is not None else (None, None, None)
        self._limits = dict(zip(AXES, ends, strict=True))
        self.items = self.patches = self.bytes = self.most_items = self.most_patches = 0
        self.bound_by = {axis: 0 for axis, limit in self._limits.items() if axis == "tokens" or limit is not None}

    def add(
        self, bounds: I64, slots: I64, items: NDArray[np.integer], patches: NDArray[np.integer],
        sizes: NDArray[np.integer], step: int | None = None,
    ) -> None:  # fmt: skip
        """Count the packs of a step.

        Args:
            bounds: int64 [packs + 1]; pack i has samples ``bounds[i]`` to ``bounds[i + 1]`` of n.
            slots: Aligned tokens of each pack, int64 [packs].
            items: Media items of each sample, [n].
            patches: Patches of each sample, [n].
            sizes: Bytes of each sample's media, [n].
            step: Number of the step, on which the budget depends during ``warmup``; None for the full budget.
        """
        of_packs = {"tokens": slots, "patches": _sums(patches, bounds), "items": _sums(items, bounds)}
        self.items += int(of_packs["items"].sum())
        self.patches += int(of_packs["patches"].sum())
        self.bytes += int(sizes.sum())
        self.most_items = max(self.most_items, int(of_packs["items"].max(initial=0)))
        self.most_patches = max(self.most_patches, int(of_packs["patches"].max(initial=0)))
        budget = self._rules.budget if step is None else self._rules.budget_at(step)
        fills = np.stack([of_packs[axis] / (self._limits[axis] or budget) for axis in self.bound_by])
        fullest = np.bincount(fills[:, np.diff(bounds) > 0].argmax(axis=0), minlength=len(self.bound_by))
        for axis, count in zip(self.bound_by, fullest.tolist(), strict=True):
            self.bound_by[axis] += count

    def counts(self) -> dict[str, Any]:
        """Return a copy of all counts, by their names."""
        names = ("items", "patches", "bytes", "most_items", "most_patches")
        return {name: getattr(self, name) for name in names} | {"bound_by": dict(self.bound_by)}


def _sums(values: NDArray[np.integer], bounds: I64) -> I64:
    """Return the sums of ``values``, [n], of each pack, int64 [packs]."""
    ends = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    return np.diff(ends[bounds])
