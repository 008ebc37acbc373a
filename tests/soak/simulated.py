"""The first part of a soak: seeds of the simulation, as many as fit into its time, on every core.

Each worker takes every n-th seed until the time is over; a seed that fails says how to run it alone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import get_context
from types import FrameType

from tests.simulation.data import MEDIA_CASES
from tests.simulation.rl.world import run_loop
from tests.simulation.standby import run_standby
from tests.simulation.world import run

HANGS_S = 120
"""Seconds of the processor; a seed takes a fifth of a second."""


@dataclass
class Simulated:
    """How many seeds ran, and what was wrong with some."""

    seeds: int = 0
    wrong: list[str] = field(default_factory=list)


def simulate(first: int, seconds: float) -> Simulated:
    """Run seeds from ``first`` on for so long; a failure is on stderr at once."""
    workers, found = os.cpu_count() or 1, Simulated()
    until = time.monotonic() + seconds
    with get_context("spawn").Pool(workers, signal.signal, (signal.SIGVTALRM, _hangs)) as pool:
        parts = pool.starmap_async(run_every, [(first + worker, workers, until) for worker in range(workers)])
        for part in parts.get(seconds + 2 * HANGS_S):
            found.seeds += part.seeds
            found.wrong += part.wrong
    return found


def run_every(first: int, step: int, until: float) -> Simulated:
    """Every ``step``-th seed, at least one, until then: the clock is the machine's, which all its processes share."""
    found = Simulated()
    for seed in count(first, step):
        signal.setitimer(signal.ITIMER_VIRTUAL, HANGS_S)
        try:
            run(seed)
            run_standby(seed)
            if seed % 3 == 0:
                run_loop(seed)
            elif seed % 3 == 1:
                run(seed, MEDIA_CASES[seed % len(MEDIA_CASES)])
            else:
                run(seed, relays=seed % 2 == 0, standby=seed % 2 == 1)
        except AssertionError as error:
            print(error, file=sys.stderr, flush=True)
            found.wrong.append(str(error))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        found.seeds += 1
        if time.monotonic() > until:
            break
    return found


def _hangs(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"not over after {HANGS_S} s of the processor")
