"""Freeze a broker (SIGSTOP, then SIGCONT), and measure how long its ranks need to go on.

Real processes on loopback: `streampack broker`, `streampack produce`, and four ranks (dp 2, cp 2) in threads of this
process that take a step every 50 ms. After each freeze the seconds are measured until every rank has taken 40 more
steps; 2.0 is the least. In the end the digests of the steps are compared over all ranks.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import streampack
from benchmarks.attacks.attack import Service
from benchmarks.report import arguments, head, say

STEP_S = 0.05
MORE = 40
PATIENCE_S = 120.0
MESH = {"dp": 2, "cp": 2}


class Ranks:
    """Four ranks; ``digests`` of each by step."""

    def __init__(self, service: Service) -> None:
        self.digests: list[dict[int, str]] = [{} for _ in range(4)]
        self.failed: list[BaseException] = []
        self._over = threading.Event()
        key = str(service.folder / "keys" / "trainer.key") if service.keys else ""
        self._threads = [
            threading.Thread(target=self._read, args=(rank, service.where["trainers"], key)) for rank in range(4)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, rank: int, endpoint: str, key: str) -> None:
        mesh = streampack.Mesh(**MESH, dp_rank=rank // 2, cp_rank=rank % 2)
        try:
            with streampack.connect(endpoint, format="numpy", mesh=mesh, key_file=key) as loader:
                for step in loader.steps():
                    self.digests[rank][step.index] = step.digest
                    if self._over.wait(STEP_S):
                        return
        except BaseException as error:
            self.failed.append(error)

    @property
    def num_steps(self) -> int:
        """Steps of the rank that has taken the fewest."""
        return min(map(len, self.digests))

    def go_on(self, more: int) -> float:
        """Seconds until every rank has taken so many more steps. Raises RuntimeError where one does not."""
        began, goal = time.monotonic(), self.num_steps + more
        while self.num_steps < goal:
            if self.failed or time.monotonic() - began > PATIENCE_S:
                raise RuntimeError(f"the ranks do not go on: {self.failed}")
            time.sleep(0.01)
        return time.monotonic() - began

    @property
    def differing(self) -> int:
        """Steps whose digests differ between ranks."""
        steps = set.intersection(*(set(each) for each in self.digests))
        return sum(len({each[step] for each in self.digests}) > 1 for step in steps)

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def measured(transport: str, keys: bool, freezes: list[float], times: int) -> dict[str, Any]:
    """All freezes of one broker."""
    with tempfile.TemporaryDirectory(prefix="sp") as folder:
        service = Service(Path(folder), keys, transport, MESH)
        ranks = Ranks(service)
        found: list[dict[str, float]] = []
        try:
            ranks.go_on(MORE)
            for frozen_s in freezes:
                for _ in range(times):
                    os.kill(service.broker.pid, signal.SIGSTOP)
                    time.sleep(frozen_s)
                    os.kill(service.broker.pid, signal.SIGCONT)
                    found.append({"frozen_s": frozen_s, "went_on_s": round(ranks.go_on(MORE), 2)})
            ended = service.broker.poll()
        finally:
            ranks.close()
            service.close()
    return {
        "transport": transport, "keys": keys, "freezes": found, "broker_ended": ended, "steps": ranks.num_steps,
        "steps_that_differ": ranks.differing,
    }  # fmt: skip


def main() -> None:
    parser = arguments(__doc__, quick="one freeze of 18 s")
    parser.add_argument("--transport", choices=("tcp", "ipc"), default="tcp")
    parser.add_argument("--keys", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--seconds", type=float, nargs="+", default=[10, 17, 20, 40, 120], help="of the freezes")
    parser.add_argument("--times", type=int, default=5, help="of each freeze (default 5)")
    given = parser.parse_args()
    report = head("freeze")
    freezes, times = ([18.0], 1) if given.quick else (given.seconds, given.times)
    found = measured(given.transport, given.keys, freezes, times)
    report["freeze"] = found
    for each in found["freezes"]:
        print(f"frozen for {each['frozen_s']:.0f} s: {MORE} steps later after {each['went_on_s']:.2f} s")
    state = "lives" if found["broker_ended"] is None else "has ended"
    print(f"{found['steps']} steps on every rank, {found['steps_that_differ']} differ; the broker {state}")
    say(report, given.json)


if __name__ == "__main__":
    main()
