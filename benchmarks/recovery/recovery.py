"""Measure the delay that a killed broker causes its trainers, and the log's cost for a broker that is not killed.

Recovery, of real processes (`streampack broker`, `streampack produce`, a client in this one), window 1024, 100,000
samples behind it: kill -9, 0.1 s later a new process; how long to the first step that it serves. Once with the same
state_dir, the trainer waiting; once with an empty one, the trainer started again from its own checkpoint.

Cost: the broker's CPU seconds per million tokens of `streampack_pipe.py` with a state_dir and without, in pairs that
turn round who goes first; the mean difference and its 95% interval (Student's t over the pairs).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import streampack
from benchmarks.report import arguments, head, say
from benchmarks.throughput import streampack_pipe
from benchmarks.throughput.streampack_pipe import run_streampack
from benchmarks.traffic import Traffic

WINDOW, BUDGET, PACKS = 1024, 2048, 8
SHARDS, ROWS, MEAN_TOKENS = 8, 5000, 64
BEHIND = 100_000
"""Samples served before the first kill."""
DOWN_S = 0.1
GIVE_UP_S = 60.0
PAIRS, T_95 = 10, 2.262
"""Student's t, two-sided, for 9 degrees of freedom."""


@dataclass
class Service:
    """A broker and a producer on loopback; ``start`` and ``kill`` are the broker's."""

    folder: Path
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    broker: subprocess.Popen[bytes] | None = None
    states: int = 0

    def __post_init__(self) -> None:
        rows = ["".join(json.dumps({"tokens": [7] * _length(s, i)}) + "\n" for i in range(ROWS)) for s in range(SHARDS)]
        for shard, text in enumerate(rows):
            (self.folder / f"{shard}.jsonl").write_text(text)
        self.trainers = f"ipc://{self.folder}/t"
        source = {"source": "jsonl", "shards": str(self.folder / "*.jsonl")}
        producer = {"broker": f"ipc://{self.folder}/p", "processes": 1, "streams": {"web": source}}
        (self.folder / "producer.yaml").write_text(json.dumps(producer))

    def start(self, *, fresh: bool = False) -> None:
        """With the state of the one before, or with none."""
        self.states += fresh
        tree = {
            "listen": {"producers": f"ipc://{self.folder}/p", "trainers": self.trainers, "http": "127.0.0.1:0"},
            "state_dir": str(self.folder / f"state-{self.states}"),
            "memory": "64MiB",
            "tokens": "uint16",
            "rules": {"budget": BUDGET, "window": {"samples": WINDOW}, "step": {"packs": PACKS}},
            "streams": {"web": {"repeat": True, "partitions": 2}},
        }
        (self.folder / "broker.yaml").write_text(json.dumps(tree))
        self.broker = self._run("broker")

    def produce(self) -> None:
        self._run("produce")

    def kill(self) -> None:
        assert self.broker is not None
        self.broker.kill()
        self.broker.wait(10)

    def _run(self, command: str) -> subprocess.Popen[bytes]:
        config = self.folder / ("broker.yaml" if command == "broker" else "producer.yaml")
        with (self.folder / f"{command}.log").open("ab") as log:
            arguments = [sys.executable, "-m", "streampack", command, "-c", str(config)]
            self.running.append(subprocess.Popen(arguments, stdout=log, stderr=log, start_new_session=True))
        return self.running[-1]

    def end(self) -> None:
        """All of it, children too."""
        for process in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def _length(shard: int, row: int) -> int:
    return 1 + (row * 7919 + shard * 31) % (2 * MEAN_TOKENS - 1)


class Trainer:
    """A client that takes every step at once, in a thread; ``had`` are their times and numbers."""

    def __init__(self, endpoint: str, state: dict[str, Any] | None = None) -> None:
        self.loader: Any = streampack.connect(endpoint, format="numpy", prefetch=1)
        if state is not None:
            self.loader.load_state_dict(state)
        self.had: list[tuple[float, int]] = []
        self.samples = 0
        self._asked = threading.Event()
        self._state: dict[str, Any] | None = None
        self._thread = threading.Thread(target=self._train)
        self._thread.start()

    def _train(self) -> None:
        with contextlib.suppress(streampack.errors.UserError):  # closed
            for step in self.loader.steps():
                self.had.append((time.monotonic(), step.index))
                self.samples += step.num_samples
                if self._asked.is_set() and self._state is None:
                    self._state = self.loader.state_dict(step.index)

    def checkpoint(self) -> dict[str, Any]:
        """A state, once it has its next step; it goes on."""
        self._asked.set()
        _until(lambda: self._state is not None)
        state: dict[str, Any] = json.loads(json.dumps(self._state))
        return state

    def until(self, samples: int) -> None:
        _until(lambda: self.samples >= samples)

    def first_after(self, at: float) -> float:
        """When it had its first step after ``at``."""
        _until(lambda: bool(self.had) and self.had[-1][0] > at)
        return next(when for when, _ in self.had if when > at)

    def close(self) -> None:
        self.loader.close()
        self._thread.join(20)


def _until(condition: Any) -> None:
    deadline = time.monotonic() + GIVE_UP_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing came in {GIVE_UP_S:.0f} s")
        time.sleep(0.005)


@contextmanager
def service() -> Iterator[Service]:
    """One that runs, its files in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="sp-recovery-", dir="/tmp") as folder:
        found = Service(Path(folder))
        try:
            found.start()
            found.produce()
            yield found
        finally:
            found.end()


def same_state_dir(times: int) -> list[dict[str, float]]:
    """Kill the broker and start it again, while the trainer waits; return the seconds of each recovery.

    A few hundred samples pass between two kills, so that the last snapshot is at another distance each time.
    """
    found = []
    with service() as running:
        trainer = Trainer(running.trainers)
        try:
            for number in range(times):
                trainer.until(max(BEHIND, trainer.samples) + 700 * (number % 7) + 300)
                killed = time.monotonic()
                running.kill()
                time.sleep(DOWN_S)
                started = time.monotonic()
                running.start()
                first = trainer.first_after(started)
                found.append({"from_kill_s": first - killed, "from_start_s": first - started})
            indices = [index for _, index in trainer.had]
            assert indices == list(range(len(indices))), "steps are missing or repeated"
        finally:
            trainer.close()
    return found


def empty_state_dir(times: int) -> list[dict[str, float]]:
    """Kill, and start with nothing but what the trainer's checkpoint holds; the trainer is a new one."""
    found = []
    with service() as running:
        trainer = Trainer(running.trainers)
        try:
            for number in range(times):
                trainer.until((BEHIND if not number else trainer.samples) + 700 * (number % 7) + 300)
                state = trainer.checkpoint()
                killed = time.monotonic()
                running.kill()
                trainer.close()
                time.sleep(DOWN_S)
                started = time.monotonic()
                running.start(fresh=True)
                trainer = Trainer(running.trainers, state)
                first = trainer.first_after(started)
                found.append({"from_kill_s": first - killed, "from_start_s": first - started})
                assert trainer.had[0][1] == state["next_step"]
        finally:
            trainer.close()
    return found


def cost_of_the_log(seconds: float) -> dict[str, Any]:
    """Broker CPU seconds per million tokens."""
    used: dict[str, list[float]] = {"with": [], "without": []}
    for number in range(PAIRS):
        for kind in ("with", "without")[:: -1 if number % 2 else 1]:
            result = run_streampack(seconds, Traffic(), streampack_pipe.Service(log=kind == "with"))
            used[kind].append(result.cpu_seconds["broker"] / result.tokens * 1e6)
            print(f"log: {kind:<7} {used[kind][-1] * 1000:.3f} ms/M tokens", flush=True)
    differences = [one - other for one, other in zip(used["with"], used["without"], strict=True)]
    mean, spread = statistics.mean(differences), statistics.stdev(differences)
    half = T_95 * spread / PAIRS**0.5
    without = statistics.mean(used["without"])
    return {
        "pairs": PAIRS, "seconds": seconds,
        "with_ms_per_million_tokens": round(statistics.mean(used["with"]) * 1000, 3),
        "without_ms_per_million_tokens": round(without * 1000, 3),
        "difference_percent": round(100 * mean / without, 1),
        "interval_95_percent": [round(100 * (mean - half) / without, 1), round(100 * (mean + half) / without, 1)],
    }  # fmt: skip


def spread(found: list[dict[str, float]]) -> dict[str, Any]:
    return {
        name: {
            "median": round(statistics.median(values), 2), "min": round(min(values), 2), "max": round(max(values), 2)
        }
        for name in ("from_kill_s", "from_start_s")
        for values in [[each[name] for each in found]]
    } | {"kills": len(found)}  # fmt: skip


def main() -> None:
    parser = arguments(__doc__, "10 kills and pairs of 2 s (else 20 kills, pairs of 10 s)")
    parser.add_argument("--only", choices=("state", "checkpoint", "cost"), help="one part")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    report = head("recovery")
    times = 10 if args.quick else 20
    for name, part, measure in (
        ("same_state_dir", "state", same_state_dir), ("empty_state_dir", "checkpoint", empty_state_dir),
    ):  # fmt: skip
        if args.only in (None, part):
            report[name] = spread(measure(times))
            print(f"{name}: {report[name]}", flush=True)
    if args.only in (None, "cost"):
        report["cost_of_the_log"] = cost_of_the_log(2.0 if args.quick else 10.0)
        print(f"cost of the log: {report['cost_of_the_log']}", flush=True)
    say(report, args.json)


if __name__ == "__main__":
    main()
