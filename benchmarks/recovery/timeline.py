"""Record what four ranks see while the broker is killed: ``python -m benchmarks.recovery.timeline``.

A real broker, a real producer and four clients in threads of this process. An update of a rank takes 0.15 s, and
all ranks wait for each other after it. After 10 steps the broker gets SIGKILL; 0.5 s later it is started again on its
``state_dir``. A second run has no kill. The table has the time at which each rank had each step; the SHA-256 of
each rank's packs must be equal in both runs. ``docs/generate/figures.py`` draws the recorded table.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from dataclasses import dataclass, field

import numpy as np

import streampack
from benchmarks.recovery.recovery import Service, service

RANKS, STEPS, KILL_AFTER = 4, 20, 10
UPDATE_S, DOWN_S = 0.15, 0.5


@dataclass
class Ranks:
    """Four clients, and the time and the hash of each step that each rank got."""

    endpoint: str
    times: list[list[float]] = field(default_factory=lambda: [[] for _ in range(RANKS)])
    hashes: list[list[str]] = field(default_factory=lambda: [[] for _ in range(RANKS)])
    together: threading.Barrier = field(default_factory=lambda: threading.Barrier(RANKS))

    def train(self, rank: int) -> None:
        mesh = {"dp": RANKS, "dp_rank": rank}
        with streampack.connect(self.endpoint, mesh=mesh, format="numpy", prefetch=1) as loader:
            for step in loader.steps():
                packs = [np.asarray(pack.input_ids).tobytes() for pack in step]
                self.times[rank].append(time.monotonic())
                self.hashes[rank].append(hashlib.sha256(b"".join(packs)).hexdigest())
                time.sleep(UPDATE_S)
                self.together.wait(60)
                if step.index + 1 == STEPS:
                    return


def run(running: Service, *, kill: bool) -> tuple[Ranks, list[float]]:
    """Train ``STEPS`` steps; return what the ranks got, and the times of the kill and of the new start."""
    ranks, broker = Ranks(running.trainers), list[float]()
    threads = [threading.Thread(target=ranks.train, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    if kill:
        while len(ranks.times[0]) <= KILL_AFTER:
            time.sleep(0.005)
        time.sleep(UPDATE_S / 2)
        broker.append(time.monotonic())
        running.kill()
        time.sleep(DOWN_S)
        broker.append(time.monotonic())
        running.start()
    for thread in threads:
        thread.join()
    return ranks, broker


def main() -> None:
    with service() as running:
        killed, (at, again) = run(running, kill=True)
    with service() as running:
        calm, _ = run(running, kill=False)
    if killed.hashes != calm.hashes:
        raise SystemExit("got other packs after the kill, expected those of the run without one")
    zero = min(times[0] for times in killed.times)
    print(f"load {os.getloadavg()[0]:.0f}; {STEPS * RANKS} hashes of packs are those of a run without a kill\n")
    print("| step | " + " | ".join(f"rank {rank}" for rank in range(RANKS)) + " |\n|---|" + "---|" * RANKS)
    for step in range(STEPS):
        print(f"| {step} | " + " | ".join(f"{times[step] - zero:.3f}" for times in killed.times) + " |")
    print(f"\nThe broker was killed at {at - zero:.3f} and started again at {again - zero:.3f} seconds.")


if __name__ == "__main__":
    main()
