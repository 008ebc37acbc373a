"""Counts and times of one rank: steps, packs and tokens handed out, and data wait by cause.

The trainer waits for a step, works on a step, or does neither (before the first request and after the end). Each
change between these, and each change of the wait's cause, adds the time since the last change. The waits by cause
therefore add up to the whole data wait, and a wait shows up while it lasts.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from streampack.core.flops.model_flops import ModelFlops
from streampack.core.stats.data_wait import CAUSES, WAIT_BOUNDS_S, Starvation, bucket_of
from streampack.packs.step import Step

TERA = 1e12
_WAITS_KEPT = 4096
_STEPS_KEPT = 32
"""Number of recent steps over which the time for a step is averaged."""


class UsefulFlops(NamedTuple):
    """How useful FLOPs count: those of ``model``, over the devices that share a rank's packs.

    These are ``cp`` context-parallel ranks, or the ranks of a pack's group, times ``others`` tensor and pipeline ranks.
    ``peak`` is the FLOPs that a device can do in a second; 0 if it is not known, and then there is no MFU.
    """

    model: ModelFlops
    cp: int
    others: int
    peak: float

    def of(self, step: Step[Any]) -> float:
        """Return the useful FLOPs of one device for a step."""
        if step.cp_sizes is None or step.lengths is None:
            return step.flops(self.model) / (self.cp * self.others)
        sizes: list[int] = np.unique(step.cp_sizes).tolist()
        parts = [self.model.samples(step.lengths[step.cp_sizes == size]) / size for size in sizes]
        return sum(parts) / self.others


class ReadingFigures:
    """Counters and timers of one rank's reading, shared by several threads.

    The trainer's thread reports waits and steps, the client's thread reports the cause of a wait, and any thread may
    read. ``clock`` returns seconds. ``useful`` counts the useful FLOPs of steps; None if the model is not known.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, useful: UsefulFlops | None = None) -> None:
        self._clock, self._useful = clock, useful
        self._flops = self._flops_in_use = 0.0  # of this device: of the steps that are done, and of the one in use
        self._flops_before: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._lock = threading.Lock()
        self._waits: deque[float] = deque(maxlen=_WAITS_KEPT)
        self._counts = {"steps": 0, "packs": 0, "tokens": 0}
        self._unsteady_s = 0.0
        """Data wait for the first three steps, in seconds; ``starved_fraction`` leaves it out."""
        self._steady = clock()
        self._since: float | None = None  # time is added up to this moment; None: no wait and no work on a step
        self._waiting = False
        self._began = 0.0
        self._cause: tuple[str, str | None] = ("network", None)
        self._causes_s = dict.fromkeys(CAUSES, 0.0)
        self._streams_s: dict[str, float] = {}
        self._buckets = [0] * (len(WAIT_BOUNDS_S) + 1)
        self._trainer_s = 0.0
        self._handed_out: deque[float] = deque(maxlen=_STEPS_KEPT)

    # Called by the trainer's thread

    def begin_wait(self) -> None:
        """Begin a wait: the trainer requests the next step."""
        with self._lock:
            now = self._add_elapsed()
            self._waiting, self._began, self._since = True, now, now
            self._flops, self._flops_in_use = self._flops + self._flops_in_use, 0.0

    def end_wait(self, got: bool) -> None:
        """End the wait; ``got`` is False if no step came, as at the end of the feed."""
        with self._lock:
            now = self._add_elapsed()
            self._waiting, self._since = False, now if got else None
            waited = now - self._began
            self._buckets[bucket_of(waited)] += 1
            if self._counts["steps"] <= 2:
                self._steady, self._unsteady_s = now, sum(self._causes_s.values())
            else:
                self._waits.append(waited)
            if got:
                self._handed_out.append(now)
                self._flops_before.append(self._flops)

    def note_step(self, num_packs: int, num_tokens: int, flops: float = 0.0) -> None:
        """Count a step that was handed out: its packs, their real tokens, and the useful FLOPs of this device."""
        self._counts["steps"] += 1
        self._counts["packs"] += num_packs
        self._counts["tokens"] += num_tokens
        self._flops_in_use = flops

    # Called by the client's thread

    def set_cause(self, cause: str, stream: str | None) -> None:
        """Set the cause to which data wait counts from now on; ``stream`` names the stream of the cause ``stream``."""
        with self._lock:
            self._add_elapsed()
            self._cause = cause, stream

    # Called by any thread

    def starvation(self) -> Starvation:
        """Return the data wait so far, by cause and by stream, and the times of recent steps."""
        with self._lock:
            self._add_elapsed()
            times = self._handed_out
            step_s = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
            return Starvation(
                causes_s=dict(self._causes_s), streams_s=dict(self._streams_s), waits=list(self._buckets),
                trainer_s=self._trainer_s, step_s=step_s, useful_s=self._useful_s(),
            )  # fmt: skip

    def _useful_s(self) -> float | None:
        """Return the seconds that the useful FLOPs need at the device's peak; None without a peak."""
        return None if self._useful is None or not self._useful.peak else self._flops / self._useful.peak

    def _rates(self) -> dict[str, float]:
        """Return the useful FLOPs of this device over the last steps: per second, and as a share of its peak."""
        times = self._handed_out
        if self._useful is None or len(times) < 2:
            return {}
        rate = (self._flops_before[-1] - self._flops_before[0]) / max(times[-1] - times[0], 1e-9)
        return {"useful_tflops": rate / TERA} | ({"mfu": rate / self._useful.peak} if self._useful.peak else {})

    def counts(self, skipped_steps: int) -> dict[str, float]:
        """Return the counts and times that are not split by cause, by name; see ``Client.stats`` for the names."""
        with self._lock:
            now = self._add_elapsed()
            waits, waited, rates = np.array(self._waits), sum(self._causes_s.values()), self._rates()
        p50, p99, p999 = np.percentile(waits if len(waits) else np.zeros(1), [50, 99, 99.9]).tolist()
        figures = {"next_p50_ms": p50 * 1000, "next_p99_ms": p99 * 1000, "next_p999_ms": p999 * 1000}
        steady_s = (waited - self._unsteady_s) / max(now - self._steady, 1e-9)
        starved = min(1.0, steady_s) if self._counts["steps"] > 2 else 0.0
        return {
            **self._counts, "wait_s": waited, **figures, "starved_fraction": starved, "skipped_steps": skipped_steps,
            **rates,
        }  # fmt: skip

    def stats(self, skipped_steps: int) -> dict[str, float]:
        """Return all counts and times by name; see ``Client.stats`` for the names."""
        starvation = self.starvation()
        by_cause = {f"starved_{cause}_s": seconds for cause, seconds in starvation.causes_s.items()}
        step = {} if starvation.step_s is None else {"step_s": starvation.step_s}
        return {**self.counts(skipped_steps), **by_cause, "trainer_s": starvation.trainer_s, **step}

    def _add_elapsed(self) -> float:
        """Add the time since the last call to the wait's cause or the trainer's work; return the time in seconds.

        The caller holds the lock.
        """
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
