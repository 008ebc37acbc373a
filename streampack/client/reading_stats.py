"""Counts and times of a rank's reading: how much came, how long the trainer waited for it, and what for.

At every moment the trainer waits for a step, or has one, or is at neither: before it first asks, and after the end.
Time is added up where one follows the other, and, of a wait, where it becomes one for something else: so the waits
by cause are all there was, to the last moment, and one that lasts is seen while it does.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from streampack.core.stats.data_wait import CAUSES, WAIT_BOUNDS_S, Starvation, bucket_of

_WAITS_KEPT = 4096
_STEPS_KEPT = 32
"""A step takes lately what so many have taken."""


class ReadingFigures:
    """Noted by the trainer's thread, and by the client's what a wait is for; any thread may ask. ``clock``: seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._waits: deque[float] = deque(maxlen=_WAITS_KEPT)
        self._counts = {"steps": 0, "packs": 0, "tokens": 0}
        self._unsteady_s = 0.0
        """Waits for the first steps."""
        self._steady = clock()
        self._since: float | None = None  # up to when a wait, or the work on a step, is added up; None: it is neither
        self._waiting = False
        self._began = 0.0
        self._cause: tuple[str, str | None] = ("network", None)
        self._causes_s = dict.fromkeys(CAUSES, 0.0)
        self._streams_s: dict[str, float] = {}
        self._buckets = [0] * (len(WAIT_BOUNDS_S) + 1)
        self._trainer_s = 0.0
        self._handed_out: deque[float] = deque(maxlen=_STEPS_KEPT)

    # What the trainer's thread says

    def begin_wait(self) -> None:
        """The next step is asked for."""
        with self._lock:
            now = self._pass()
            self._waiting, self._began, self._since = True, now, now

    def end_wait(self, got: bool) -> None:
        """It is there; or, unless ``got``, there is none."""
        with self._lock:
            now = self._pass()
            self._waiting, self._since = False, now if got else None
            waited = now - self._began
            self._buckets[bucket_of(waited)] += 1
            if self._counts["steps"] <= 2:
                self._steady, self._unsteady_s = now, sum(self._causes_s.values())
            else:
                self._waits.append(waited)
            if got:
                self._handed_out.append(now)

    def note_step(self, num_packs: int, num_tokens: int) -> None:
        """It was handed out: so many packs, of so many real tokens."""
        self._counts["steps"] += 1
        self._counts["packs"] += num_packs
        self._counts["tokens"] += num_tokens

    # What the client's thread says

    def waits_for(self, cause: str, stream: str | None) -> None:
        """What a wait is for from now on, if there is one; ``stream`` of the cause ``stream``."""
        with self._lock:
            self._pass()
            self._cause = cause, stream

    # What anybody may ask

    def starvation(self) -> Starvation:
        """What was waited for so far."""
        with self._lock:
            self._pass()
            times = self._handed_out
            step_s = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
            return Starvation(
                causes_s=dict(self._causes_s), streams_s=dict(self._streams_s), waits=list(self._buckets),
                trainer_s=self._trainer_s, step_s=step_s,
            )  # fmt: skip

    def counts(self, skipped_steps: int) -> dict[str, float]:
        """Counts and times so far: ``steps``, ``packs``, ``tokens`` (real ones of this rank's packs), ``wait_s``,
        ``next_p50_ms``, ``next_p99_ms``, ``next_p999_ms`` of a step's wait, ``starved_fraction``: the share of
        the time since the third step was asked for that was spent waiting, and ``skipped_steps``.
        """
        with self._lock:
            now = self._pass()
            waits, waited = np.array(self._waits), sum(self._causes_s.values())
        p50, p99, p999 = np.percentile(waits if len(waits) else np.zeros(1), [50, 99, 99.9]).tolist()
        figures = {"next_p50_ms": p50 * 1000, "next_p99_ms": p99 * 1000, "next_p999_ms": p999 * 1000}
        steady_s = (waited - self._unsteady_s) / max(now - self._steady, 1e-9)
        starved = min(1.0, steady_s) if self._counts["steps"] > 2 else 0.0
        return {
            **self._counts, "wait_s": waited, **figures, "starved_fraction": starved, "skipped_steps": skipped_steps
        }  # fmt: skip

    def stats(self, skipped_steps: int) -> dict[str, float]:
        """See ``Client.stats``."""
        starvation = self.starvation()
        by_cause = {f"starved_{cause}_s": seconds for cause, seconds in starvation.causes_s.items()}
        step = {} if starvation.step_s is None else {"step_s": starvation.step_s}
        return {**self.counts(skipped_steps), **by_cause, "trainer_s": starvation.trainer_s, **step}

    def _pass(self) -> float:
        """Add up what has passed, under the lock; the time."""
        now = self._clock()
        if self._since is not None:
            passed, self._since = now - self._since, now
            if not self._waiting:
                self._trainer_s += passed
            else:
                cause, stream = self._cause
                self._causes_s[cause] += passed
                if stream is not None:
                    self._streams_s[stream] = self._streams_s.get(stream, 0.0) + passed
        return now
