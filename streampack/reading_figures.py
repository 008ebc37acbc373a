"""Counts and times of a rank's reading: how much came, and how long the trainer waited for it."""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from streampack.formats import real_tokens
from streampack.packs import Step

_WAITS_KEPT = 4096


class ReadingFigures:
    """Noted by the trainer's thread; any thread may ask."""

    def __init__(self) -> None:
        self._waits: deque[float] = deque(maxlen=_WAITS_KEPT)
        self._counts = {"steps": 0, "packs": 0, "tokens": 0, "wait_s": 0.0}
        self._starved_s = 0.0
        self._steady = time.monotonic()

    def note_wait(self, seconds: float) -> None:
        """A step was waited for so long."""
        self._counts["wait_s"] += seconds
        if self._counts["steps"] <= 2:
            self._steady = time.monotonic()
            return
        self._waits.append(seconds)
        self._starved_s += seconds

    def note_step(self, step: Step) -> None:
        """It was handed out."""
        self._counts["steps"] += 1
        self._counts["packs"] += len(step)
        self._counts["tokens"] += sum(real_tokens(pack) for pack in step)

    def stats(self, skipped_steps: int) -> dict[str, float]:
        """Counts and times so far: ``steps``, ``packs``, ``tokens`` (real ones of this rank's packs), ``wait_s``,
        ``next_p50_ms``, ``next_p99_ms``, ``next_p999_ms`` of a step's wait, ``starved_fraction``: the share of
        the time since the third step was asked for that was spent waiting, and ``skipped_steps``."""
        waits = np.array(self._waits) * 1000 if self._waits else np.zeros(1)
        p50, p99, p999 = np.percentile(waits, [50, 99, 99.9]).tolist()
        steady = max(time.monotonic() - self._steady, 1e-9)
        figures = {"next_p50_ms": p50, "next_p99_ms": p99, "next_p999_ms": p999}
        starved = min(1.0, self._starved_s / steady)
        return {**self._counts, **figures, "starved_fraction": starved, "skipped_steps": skipped_steps}
