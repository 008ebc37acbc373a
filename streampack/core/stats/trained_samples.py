"""Samples and tokens of each stream in the steps that every rank has returned: the mixture that was trained.

A recorded step counts once, when every rank has returned it; a skipped step never counts. Trainers that go back to a
checkpoint, or iterate a finite feed again, get recorded steps, which do not count again. A new lineage has other steps
under known numbers: they count, and the steps that they replace stay counted, because they were trained, too.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.samples import I64

LAST_STEPS = 100
"""Steps that figures of the last steps cover."""


class TrainedSamples:
    """Sums over the steps that were returned, and those of recorded steps that were not returned yet."""

    def __init__(self) -> None:
        self.upto = 0
        """The steps before this one are counted."""
        self.sums: I64 = np.zeros((2, 0), np.int64)
        """Samples and tokens of each stream, int64 [2, streams]; streams without a sample may be missing at the end."""
        self._waiting: dict[int, I64] = {}
        """The same of each recorded step that is not counted yet, by its number."""
        self._last: dict[int, I64] = {}
        """The same of each of the last recorded steps, by its number."""

    @property
    def last_sums(self) -> I64:
        """Samples and tokens of each stream in the last ``LAST_STEPS`` recorded steps, int64 [2, streams]."""
        total: I64 = np.zeros((2, 0), np.int64)
        for sums in self._last.values():
            total = _added(total, sums)
        return total

    @property
    def last_steps(self) -> list[int]:
        """The steps that ``last_sums`` covers."""
        return list(self._last)

    def add(self, step: int, streams: NDArray[np.integer], lengths: NDArray[np.integer]) -> None:
        """Add a recorded step, with the stream and the tokens of each sample, both [n]; ignore a step that counts."""
        if step >= self.upto:
            sums = np.stack([np.bincount(streams), np.bincount(streams, lengths)]).astype(np.int64)
            self._waiting[step] = self._last[step] = sums
            if len(self._last) > LAST_STEPS:
                del self._last[next(iter(self._last))]

    def count(self, returned: int, is_skipped: Callable[[int], bool]) -> None:
        """Count the recorded steps before ``returned``, which every rank has returned."""
        for step in [step for step in self._waiting if step < returned]:
            sums = self._waiting.pop(step)
            self.upto = max(self.upto, step + 1)
            if not is_skipped(step):
                self.sums = _added(self.sums, sums)

    def branch(self, step: int) -> None:
        """Forget the recorded steps from ``step`` on that are not counted; other steps follow under their numbers."""
        for kept in (self._waiting, self._last):
            for number in [number for number in kept if number >= step]:
                del kept[number]
        self.upto = min(self.upto, step)

    def facts(self) -> tuple[int, list[tuple[int, int]]]:
        """Return ``upto``, and (samples, tokens) of each stream."""
        return self.upto, [(samples, tokens) for samples, tokens in self.sums.T.tolist()]

    def recover(self, upto: int, sums: list[tuple[int, int]]) -> None:
        """Replace the counts with the values that ``facts`` returned."""
        self.upto = upto
        self.sums = np.array(sums, np.int64).reshape(-1, 2).T.copy()
        self._waiting = {number: waits for number, waits in self._waiting.items() if number >= upto}


def _added(sums: I64, more: I64) -> I64:
    """Return ``sums``, int64 [2, streams], with ``more`` of the same or of fewer or further streams added."""
    missing = max(more.shape[1] - sums.shape[1], 0)
    total: I64 = np.pad(sums, ((0, 0), (0, missing))) if missing else sums.copy()
    total[:, : more.shape[1]] += more
    return total
