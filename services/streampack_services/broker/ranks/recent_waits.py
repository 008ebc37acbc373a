"""Data waits of ranks, from the totals that their clients send: over the last seconds, and summed since the start.

A client sends totals since it began. So each figure here is a difference to earlier totals of the same process. The
broker's thread reads the ranks in parts, and all calls are for such a part: the ranks from an index on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streampack.core.stats.data_wait import CAUSES

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

UNHEARD = -1
"""Number of the process of a rank that is not attached."""
_OTHERS = tuple(CAUSES.index(cause) for cause in ("peers", "join"))
"""Causes of a wait for other ranks."""


@dataclass(frozen=True, slots=True)
class RecentWaits:
    """Data waits of ranks over some time."""

    share: F64
    """Data wait as a share of the rank's time, float64 [n]; NaN if not known."""
    cause: I64
    """Index of the main cause, int64 [n]."""
    own: F64
    """The part of ``share`` that other ranks do not cause, float64 [n]; 0 if not known."""
    longest: F64
    """Longest data wait of a rank as a share of its time, by cause, float64 [CAUSES]."""

    @classmethod
    def of(cls, seconds: F64) -> RecentWaits:
        """Return the waits of ranks with these seconds of data wait by cause, and of the trainer [n, CAUSES + 1]."""
        whole = seconds.sum(axis=1)
        shares = seconds[:, :-1] / np.maximum(whole, 1e-9)[:, None]
        share = shares.sum(axis=1)
        own = np.maximum(share - shares[:, _OTHERS].sum(axis=1), 0.0)
        longest = shares.max(axis=0) if len(shares) else np.zeros(len(CAUSES))
        return cls(np.where(whole > 0, share, np.nan), shares.argmax(axis=1), own, longest)

    @classmethod
    def joined(cls, parts: Sequence[RecentWaits]) -> RecentWaits:
        """Return the waits of the ranks of all parts."""
        share, cause, own = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("share", "cause", "own")
        )
        return cls(share, cause, own, np.max([part.longest for part in parts], axis=0))


class WaitWindow:
    """Data waits over the last seconds: the increase since earlier figures, which are replaced from time to time."""

    def __init__(self) -> None:
        self._older = self._newer = self._next = _no_figures(0)
        self._newer_at = -math.inf

    def begin(self, now: float, least_s: float, ranks: int) -> None:
        """Begin a pass over so many ranks at the time ``now``, in seconds.

        The data waits of the pass cover ``least_s`` to twice as many seconds. Passes that are further apart cover
        more.
        """
        if now - self._newer_at >= least_s:
            self._older, self._newer, self._newer_at = self._newer, self._next, now
            self._next = _no_figures(ranks)
        elif ranks > len(self._next[0]):
            self._next = _no_figures(ranks)

    def since(self, first: int, keys: I64, waits: F64) -> RecentWaits:
        """Return the data waits of some ranks, or their data waits since a client began that was not there before.

        Args:
            first: Index of the first of these ranks.
            keys: Number of the process at each rank, int64 [n].
            waits: Seconds of data wait of each rank by cause, and seconds of its trainer, float64 [n, CAUSES + 1].
        """
        part = slice(first, first + len(keys))
        self._next[0][part], self._next[1][part] = keys, waits
        before, (old_keys, old) = np.zeros_like(waits), (each[part] for each in self._older)
        same = old_keys == keys[: len(old_keys)]
        before[: len(old)][same] = old[same]
        return RecentWaits.of(np.maximum(waits - before, 0.0))


def _no_figures(ranks: int) -> tuple[I64, F64]:
    """Return the process at each rank, int64 [n], and its figures, float64 [n, CAUSES + 1], before any is known."""
    return np.full(ranks, UNHEARD), np.zeros((ranks, len(CAUSES) + 1))


class DataWaitSums:
    """Data wait of all ranks of a feed, in seconds by cause, since this broker began: ``sums``, float64 [CAUSES].

    A sum never falls when a rank leaves. Time that a rank waited before it attached to this broker does not count.
    """

    def __init__(self) -> None:
        self.sums: F64 = np.zeros(len(CAUSES))
        self._keys: I64 = np.zeros(0, np.int64)
        self._came: F64 = np.zeros(0)
        self._last: F64 = np.zeros((0, len(CAUSES)))
        self._known: NDArray[np.bool_] = np.zeros(0, bool)

    def add(self, now: float, first: int, keys: I64, reported: NDArray[np.bool_], waits: F64) -> None:
        """Add what some ranks have waited since the last call.

        A rank's first report counts for no more than the time for which it has been attached.

        Args:
            now: The time, in seconds.
            first: Index of the first of these ranks.
            keys: Number of the process at each rank, or -1 without one, int64 [n].
            reported: True for each rank that has reported its data wait, bool [n].
            waits: Data wait since the rank's client began, in seconds by cause, float64 [n, CAUSES].
        """
        self._grow(first + len(keys))
        part = slice(first, first + len(keys))
        same = (self._keys[part] == keys) & (keys != UNHEARD)
        came = np.where(same, self._came[part], now)
        known = self._known[part] & same
        last = np.where(known[:, None], self._last[part], 0.0)
        share = np.where(known, 1.0, np.minimum(1.0, (now - came) / np.maximum(waits.sum(axis=1), 1e-9)))
        self.sums = self.sums + (share[:, None] * np.maximum(waits - last, 0.0))[reported].sum(axis=0)
        self._keys[part], self._came[part] = keys, came
        self._last[part] = np.where(reported[:, None], waits, last)
        self._known[part] = known | reported

    def _grow(self, ranks: int) -> None:
        """Make room for so many ranks."""
        if (more := ranks - len(self._keys)) > 0:
            self._keys = np.concatenate([self._keys, np.full(more, UNHEARD)])
            self._came = np.concatenate([self._came, np.zeros(more)])
            self._last = np.concatenate([self._last, np.zeros((more, len(CAUSES)))])
            self._known = np.concatenate([self._known, np.zeros(more, bool)])
