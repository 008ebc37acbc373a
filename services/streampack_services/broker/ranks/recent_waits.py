"""Data waits of ranks, from the totals that their clients send: over the last seconds, and summed since the start.

A client sends totals since it began. ``RankTotals`` makes totals of them that count from the time at which the rank
attached to this broker. Each recent figure is a difference of two such totals of the same process. The broker's
thread reads the ranks in parts, and all calls are for such a part: the ranks from an index on.

A row of figures has ``COLUMNS`` columns. These are seconds of data wait by cause, seconds of the trainer, and steps
returned. Two more are for the MFU: seconds that useful FLOPs need, and seconds of ranks that count them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from streampack.core.stats.data_wait import CAUSES

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Streams = dict[str, float]
"""Seconds of the cause ``stream``, by stream."""

UNHEARD = -1
"""Number of the process of a rank that is not attached, or has not reported."""
TRAINER = len(CAUSES)
"""Column of the seconds in which the trainer worked on a step."""
STEPS = TRAINER + 1
"""Column of the steps returned."""
USEFUL = STEPS + 1
"""Column of the seconds that useful FLOPs need at the device's peak."""
TIMED = USEFUL + 1
"""Column of the seconds of the rank, if it counts its useful FLOPs; else 0."""
COLUMNS = TIMED + 1
_OTHERS = tuple(CAUSES.index(cause) for cause in ("peers", "join"))
"""Causes of a wait for other ranks."""
_STREAM = CAUSES.index("stream")


@dataclass(frozen=True)
class RecentWaits:
    """Data waits of ranks over some time."""

    figures: F64
    """Increase of each figure over this time, float64 [n, COLUMNS]."""
    streams: list[Streams]
    """The part of the cause ``stream`` by stream, for each rank."""

    @cached_property
    def seconds(self) -> F64:
        """Seconds of each rank, in data waits and in its trainer, float64 [n]."""
        return np.asarray(self.figures[:, :STEPS].sum(axis=1))

    @cached_property
    def shares(self) -> F64:
        """Data wait as a share of the rank's time, by cause, float64 [n, CAUSES]; 0 if not known."""
        return np.asarray(self.figures[:, :TRAINER] / np.maximum(self.seconds, 1e-9)[:, None])

    @cached_property
    def share(self) -> F64:
        """Data wait as a share of the rank's time, float64 [n]; NaN if not known."""
        return np.where(self.seconds > 0, self.shares.sum(axis=1), np.nan)

    @cached_property
    def cause(self) -> I64:
        """Index of the main cause, int64 [n]."""
        return np.asarray(self.figures[:, :TRAINER].argmax(axis=1))

    @cached_property
    def own(self) -> F64:
        """The part of ``share`` that other ranks do not cause, float64 [n]; 0 if not known."""
        return np.asarray(np.maximum(self.shares.sum(axis=1) - self.shares[:, _OTHERS].sum(axis=1), 0.0))

    @cached_property
    def longest(self) -> F64:
        """Longest data wait of a rank as a share of its time, by cause, float64 [CAUSES]."""
        return np.asarray(self.shares.max(axis=0, initial=0.0))

    @cached_property
    def mfu(self) -> F64:
        """Useful FLOPs as a share of the device's peak, float64 [n]; NaN if not known."""
        timed = self.figures[:, TIMED]
        return np.where(timed > 0, self.figures[:, USEFUL] / np.maximum(timed, 1e-9), np.nan)

    def mfu_of_all(self) -> float | None:
        """Return the useful FLOPs of all ranks that count them as a share of their peak; None if there are none."""
        useful, timed = self.figures[:, USEFUL:].sum(axis=0).tolist()
        return round(useful / timed, 4) if timed > 0 else None

    @cached_property
    def mean_s(self) -> float:
        """Seconds that the data waits cover, mean over the ranks that report them."""
        return float(self.seconds.sum()) / max(int((self.seconds > 0).sum()), 1)

    def of_all(self) -> tuple[dict[str, float], Streams]:
        """Return the data wait of all ranks as a share of their time: by cause, and the cause ``stream`` by stream."""
        seconds_of_all = max(float(self.seconds.sum()), 1e-9)
        by_cause = (self.figures[:, :TRAINER].sum(axis=0) / seconds_of_all).round(4).tolist()
        by_stream = Streams()
        for streams in self.streams:
            add_to(by_stream, streams)
        shares = {name: round(seconds / seconds_of_all, 4) for name, seconds in by_stream.items()}
        return dict(zip(CAUSES, by_cause, strict=True)), shares

    @classmethod
    def joined(cls, parts: Sequence[RecentWaits]) -> RecentWaits:
        """Return the waits of the ranks of all parts."""
        figures = np.concatenate([np.zeros((0, COLUMNS)), *(part.figures for part in parts)])
        return cls(figures, [streams for part in parts for streams in part.streams])


def add_to(sums: Streams, seconds: Streams) -> None:
    """Add seconds by stream to sums by stream."""
    for name, more in seconds.items():
        sums[name] = sums.get(name, 0.0) + more


class WaitWindow:
    """Data waits over the last seconds: the increase since earlier figures, which are replaced from time to time."""

    def __init__(self) -> None:
        self._older = self._newer = self._next = _Totals(0)
        self._newer_at = -math.inf

    def begin(self, now: float, least_s: float, ranks: int) -> None:
        """Begin a pass over so many ranks at the time ``now``, in seconds.

        The data waits of the pass cover ``least_s`` to twice as many seconds. Passes that are further apart cover
        more.
        """
        if now - self._newer_at >= least_s:
            self._older, self._newer, self._newer_at = self._newer, self._next, now
            self._next = _Totals(ranks)
        elif ranks > len(self._next.keys):
            self._next = _Totals(ranks)

    def since(self, first: int, keys: I64, figures: F64, streams: Sequence[Streams]) -> RecentWaits:
        """Return the data waits of some ranks, or all their data waits if they were not there before.

        Args:
            first: Index of the first of these ranks.
            keys: Number of the process at each rank, int64 [n].
            figures: Totals of each rank, float64 [n, COLUMNS].
            streams: Seconds of the cause ``stream`` by stream of each rank.
        """
        part = slice(first, first + len(keys))
        self._next.keys[part], self._next.figures[part], self._next.streams[part] = keys, figures, streams
        before, old = np.zeros_like(figures), self._older
        same = old.keys[part] == keys[: len(old.keys[part])]
        before[: len(same)][same] = old.figures[part][same]
        recent = np.maximum(figures - before, 0.0)
        streams_before = [old.streams[first + at] if at < len(same) and same[at] else {} for at in range(len(keys))]
        waited = recent[:, _STREAM].tolist()
        return RecentWaits(recent, [_split(*rank) for rank in zip(waited, streams, streams_before, strict=True)])


def _split(seconds: float, now: Streams, before: Streams) -> Streams:
    """Return seconds of the cause ``stream`` by stream, in proportion to the increase of each from ``before``."""
    if not seconds:
        return {}
    more = {name: value - before.get(name, 0.0) for name, value in now.items() if value > before.get(name, 0.0)}
    increase = sum(more.values())
    return {name: seconds * value / increase for name, value in more.items()}


class _Totals:
    """The process at each rank, int64 [n], with its totals, float64 [n, COLUMNS]; none is known at first."""

    def __init__(self, ranks: int) -> None:
        self.keys: I64 = np.full(ranks, UNHEARD)
        self.figures: F64 = np.zeros((ranks, COLUMNS))
        self.streams: list[Streams] = [{}] * ranks


class RankTotals:
    """Totals of ranks since they returned their first step here, and sums over all ranks: ``sums``.

    Before its first step is returned, a rank's totals count from the time at which it attached. ``sums`` float64
    [COLUMNS] count from there, and ranks that left, too. A sum never falls when a rank leaves.
    """

    def __init__(self) -> None:
        self.sums: F64 = np.zeros(COLUMNS)
        self._keys: I64 = np.zeros(0, np.int64)
        self._came: F64 = np.zeros(0)
        self._known: NDArray[np.bool_] = np.zeros(0, bool)
        self._origin: F64 = np.zeros((0, COLUMNS))  # what the totals leave out
        self._last: F64 = np.zeros((0, COLUMNS))  # the last report
        self._turns: I64 = np.zeros(0, np.int64)  # how often the totals began anew

    def add(self, now: float, first: int, keys: I64, reported: NDArray[np.bool_], figures: F64) -> tuple[I64, F64]:
        """Return the totals of some ranks, and add their increase since the last call to ``sums``.

        A rank's first report counts for no more seconds than the rank has been attached, and for no steps.

        Args:
            now: The time, in seconds.
            first: Index of the first of these ranks.
            keys: Number of the process at each rank, or -1 without one, int64 [n].
            reported: True for each rank that has reported its data wait, bool [n].
            figures: Totals since the rank's client began, float64 [n, COLUMNS].

        Returns:
            Numbers that are others once the totals begin anew, or -1 without a process, int64 [n]; the totals, float64
            [n, COLUMNS].
        """
        self._grow(first + len(keys))
        part = slice(first, first + len(keys))
        same = (self._keys[part] == keys) & (keys != UNHEARD)
        times, is_known = np.where(same, self._came[part], now), self._known[part] & same
        counted = np.minimum(1.0, (now - times) / np.maximum(figures[:, :STEPS].sum(axis=1), 1e-9))
        fresh = figures * (1.0 - counted)[:, None]
        fresh[:, STEPS] = figures[:, STEPS]
        origin, last = (np.where(is_known[:, None], rows[part], fresh) for rows in (self._origin, self._last))
        figures = np.where(reported[:, None], figures, last)
        self.sums = self.sums + np.maximum(figures - last, 0.0)[reported].sum(axis=0)
        began = is_known & (last[:, STEPS] == origin[:, STEPS]) & (figures[:, STEPS] > last[:, STEPS])
        began &= self._turns[part] % 2 == 0
        origin = np.where(began[:, None], figures, origin)
        turns = self._turns[part] + began
        turns = np.where(is_known, turns, (turns + 2) // 2 * 2)
        self._keys[part], self._came[part], self._known[part] = keys, times, is_known | reported
        self._origin[part], self._last[part], self._turns[part] = origin, figures, turns
        return np.where(keys == UNHEARD, keys, (keys << 8) + turns % 256), np.maximum(figures - origin, 0.0)

    def _grow(self, ranks: int) -> None:
        """Make room for so many ranks."""
        if (more := ranks - len(self._keys)) > 0:
            self._keys = np.concatenate([self._keys, np.full(more, UNHEARD)])
            self._came = np.concatenate([self._came, np.zeros(more)])
            self._known = np.concatenate([self._known, np.zeros(more, bool)])
            self._turns = np.concatenate([self._turns, np.zeros(more, np.int64)])
            self._origin, self._last = (
                np.concatenate([rows, np.zeros((more, COLUMNS))]) for rows in (self._origin, self._last)
            )
