"""Staleness of rollouts: which lengths are trained, and how old they are, if old samples are dropped or waited for.

    python -m benchmarks.rl.rl_staleness [--samples 20000] [--json]

A program generates samples whose time grows with their length, 96 at a time; lengths have a long tail. A trainer
publishes a policy after each step of 64 samples. Both runs have the same lengths, broker and ``max_policy_lag``. The
distance between the lengths that were generated and trained is that of Kolmogorov and Smirnov. Ages count policies.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import streampack
from tests.integration.running import RunningBroker

STRANDS, STEP, LAG = 96, 64, 1
TOKEN_S = 100e-6
"""Seconds in which a strand generates a token."""
STEP_S = 0.03
"""Seconds in which the trainer trains a step."""


def lengths_of(count: int) -> NDArray[np.int64]:
    """Lengths of samples, of which some are very long."""
    draw = np.random.default_rng(5)
    return np.clip(draw.lognormal(np.log(300), 1.2, count), 8, 16_000).astype(np.int64)


class Generator:
    """A program that generates many samples at a time; each takes as long as its length says."""

    def __init__(self, endpoint: str, lengths: NDArray[np.int64], waits: bool) -> None:
        self.lengths, self.waits = lengths, waits
        self.rollouts = streampack.Producer(endpoint, stream="rollouts", buffer="256MiB", timeout_s=120.0)
        self.generated: list[int] = []
        self._running: list[tuple[float, int, int]] = []
        self._changed = threading.Condition()
        self._stop = False
        self._next = 0

    def run(self) -> None:
        """Begin samples, and send those that are done, until ``stop``."""
        beginner = threading.Thread(target=self._begin, daemon=True)
        beginner.start()
        while not self._stop:
            with self._changed:
                now = time.monotonic()
                done = []
                while self._running and self._running[0][0] <= now:
                    done.append(heapq.heappop(self._running))
                if not done:
                    self._changed.wait(max(min(self._running[0][0] - now, 0.05), 1e-4) if self._running else 0.05)
                    continue
                self._changed.notify_all()
            for _, length, version in done:
                self.rollouts.send(np.ones(min(length, 512), np.int32), policy_version=version, length=length)
                self.generated.append(length)
        beginner.join(5)
        self.rollouts.close(flush=False)

    def _begin(self) -> None:
        """Begin samples whenever a strand is free and, if it ``waits``, the broker allows it."""
        self.rollouts.wait_for(0)
        while not self._stop:
            with self._changed:
                if len(self._running) >= STRANDS:
                    self._changed.wait(0.05)
                    continue
            version = self.rollouts.policy_version()
            if self.waits:
                try:
                    version = self.rollouts.wait_to_start(timeout_s=0.5)
                except streampack.StreampackError:
                    continue
            length = int(self.lengths[self._next % len(self.lengths)])
            self._next += 1
            with self._changed:
                heapq.heappush(self._running, (time.monotonic() + length * TOKEN_S, length, version or 0))
                self._changed.notify_all()

    def stop(self) -> None:
        """End both threads."""
        self._stop = True
        with self._changed:
            self._changed.notify_all()


def measure(samples: int, on_exceed: str) -> dict[str, Any]:
    """Train at least so many samples."""
    with tempfile.TemporaryDirectory(prefix="streampack-") as folder:
        settings = {
            "run": "staleness", "merge": "arrival", "state_dir": f"{folder}/state", "memory": "1GiB",
            "rules": {
                "budget": 4096, "step": {"samples": STEP},
                "staleness": {"max_policy_lag": LAG, "on_exceed": on_exceed},
            },
            "streams": {"rollouts": {"pushed": True, "partitions": 1}},
            "fields": {"policy_version": {}, "length": {"dtype": "int64", "axis": "sample"}},
        }  # fmt: skip
        broker = RunningBroker(Path(folder), settings)
        generator = Generator(broker.producers, lengths_of(samples), on_exceed == "wait")
        thread = threading.Thread(target=generator.run, daemon=True)
        lengths, ages = list[int](), list[int]()
        try:
            with streampack.connect(broker.trainers, format="numpy", prefetch=1) as loader:
                loader.publish(0)
                thread.start()
                began = time.monotonic()
                for step in loader.steps():
                    for pack in step:
                        lengths += np.asarray(pack["length"])[: pack.num_samples].tolist()
                        ages += (step.index - np.asarray(pack["policy_version"])[: pack.num_samples]).tolist()
                    time.sleep(STEP_S)
                    loader.publish(step.index + 1)
                    if len(lengths) >= samples:
                        break
                seconds = time.monotonic() - began
                dropped = broker.status()["streams"][0]["rejected"].get("policy_lag", 0)
        finally:
            generator.stop()
            thread.join(30)
            broker.kill()
        return {
            "on_exceed": on_exceed, "trained": len(lengths), "generated": len(generator.generated),
            "dropped": dropped, "distance": round(distance(generator.generated, lengths), 4),
            "mean_generated": round(float(np.mean(generator.generated))),
            "mean_trained": round(float(np.mean(lengths))),
            "p99_generated": round(float(np.percentile(generator.generated, 99))),
            "p99_trained": round(float(np.percentile(lengths, 99))),
            "oldest": max(ages), "mean_age": round(float(np.mean(ages)), 2),
            "samples_per_s": round(len(lengths) / seconds),
        }  # fmt: skip


def distance(one: list[int], other: list[int]) -> float:
    """The largest difference between two cumulative distributions."""
    both = np.sort(np.concatenate([one, other]))
    ranks = [np.searchsorted(np.sort(each), both, side="right") / len(each) for each in (one, other)]
    return float(np.max(np.abs(ranks[0] - ranks[1])))


def main() -> None:
    """Print both runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20_000, help="samples to train in each run (default: 20000)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    found = [measure(arguments.samples, on_exceed) for on_exceed in ("drop", "wait")]
    if arguments.json:
        print(json.dumps(found))
        return
    for key in found[0]:
        print(f"{key:16} {found[0][key]!s:>12} {found[1][key]!s:>12}")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
