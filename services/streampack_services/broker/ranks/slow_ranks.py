"""Find the ranks for which all others wait, because their trainers take longer for a step.

Ranks run in lock step. A rank that takes longer never waits. Each faster rank waits for it with the cause ``peers``, or
with ``memory`` if its steps fill the arena. So the seconds of the trainer for a step tell the two apart. The seconds
from one step to the next do not: they are the same for all.

The trainer's seconds include its collectives. If the ranks wait for each other there, all look alike, and none is slow
here. Jitter makes ranks wait for each other in turn, so their times are alike, too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from streampack.core.stats.data_wait import CAUSES
from streampack_services.broker.ranks.recent_waits import F64, I64, STEPS, TRAINER, RecentWaits

_VICTIMS = tuple(CAUSES.index(cause) for cause in ("peers", "memory"))
WAITS = 0.1
"""A rank waits for slow ranks if it waits for its peers for at least this share of its time."""
TIMES = 1.5
"""A slow rank takes at least this many times as long for a step as the ranks that wait."""
MOST_SHARE = 0.5
"""At most this share of the ranks is slow. If more are, the others are fast."""
FIRST_STEPS = 3
"""A rank is not judged by the first steps, in which kernels are compiled."""
FEW_STEPS = 3
"""With fewer steps in the last seconds, those of the last minutes count."""


class SlowRanks(NamedTuple):
    """The ranks for which the others wait: ``rank`` is the index of the slowest, which takes ``step_s`` for a step."""

    rank: int
    num_slow: int
    step_s: float
    others_step_s: float


def work_s(lately: RecentWaits, long: RecentWaits) -> F64:
    """Return the seconds in which the trainer of each rank works on a step, float64 [n]; NaN if not known."""
    steps = lately.figures[:, STEPS]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(
            steps >= FEW_STEPS,
            lately.figures[:, TRAINER] / steps,
            np.where(long.figures[:, STEPS] > 0, long.figures[:, TRAINER] / long.figures[:, STEPS], np.nan),
        )


def slow_ranks(lately: RecentWaits, long: RecentWaits, steps: I64) -> SlowRanks | None:
    """Return the slow ranks; None if there are none.

    Args:
        lately: Data waits of the last seconds, of attached ranks.
        long: The same of the last minutes.
        steps: Steps that each rank has returned since it attached, int64 [n].
    """
    seconds = work_s(lately, long)
    enough = bool(len(steps)) and bool(np.median(lately.figures[:, STEPS]) >= FEW_STEPS)
    waits = (lately if enough else long).shares[:, _VICTIMS].sum(axis=1) >= WAITS
    is_known = np.isfinite(seconds) & (steps >= FIRST_STEPS)
    if not (waits & is_known).any():
        return None
    others_s = float(np.median(seconds[waits & is_known]))
    slow = is_known & ~waits & (seconds >= TIMES * others_s)
    if not slow.any() or slow.sum() > MOST_SHARE * len(steps):
        return None
    rank = int(np.argmax(np.where(slow, seconds, -1.0)))
    return SlowRanks(rank, int(slow.sum()), float(seconds[rank]), others_s)
