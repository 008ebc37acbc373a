"""Measure tokens per second of the service on 8 ranks, dp=2 and cp=4, with static and with dynamic context parallelism.

Both run in turns, with the same samples, packs of 8,192 tokens, and 64 packs a step. The ranks are threads of one
process. They receive each step whole and compute nothing. The broker's CPU time shows what planning costs.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import streampack
from benchmarks.processes import START_TIMEOUT_S, Processes
from benchmarks.report import arguments, head, say
from benchmarks.throughput.streampack_pipe import broker_command, produce
from benchmarks.traffic import NUM_PRODUCERS, PACK_TOKENS, WARM_UP_S, Traffic

DP, CP, PACKS = 2, 4, 64
RANK_TOKENS = 2304
"""With it, steps fill 32 micro-batches to 0.89; a static rank has 2,048 tokens in each of 32."""
FEEDS: dict[str, Any] = {
    "static": {},
    "dynamic": {"cp": "dynamic", "rank_tokens": RANK_TOKENS, "max_group": DP * CP, "exchange": {"node_ranks": 4}},
}


def main() -> None:
    parser = arguments(__doc__, "one round of 4 s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    rounds, seconds = (1, 4.0) if args.quick else (args.rounds, args.seconds)
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in FEEDS}
    for i in range(rounds):
        for name in list(FEEDS)[:: -1 if i % 2 else 1]:
            runs[name].append(_measure(FEEDS[name], seconds))
            speed, cpu = runs[name][-1]
            print(f"{name:<8} {speed / 1e6:6.1f}M tokens/s, broker {cpu:.1f} ms of CPU per million tokens", flush=True)
    speeds = {name: statistics.median(speed for speed, _ in measured) for name, measured in runs.items()}
    ratio = speeds["dynamic"] / speeds["static"]
    print(f"dynamic cp moves {ratio:.2f} of the tokens of static cp")
    say(head("groups_of_ranks") | {"runs": runs, "dynamic_to_static": round(ratio, 3)}, args.json)


def _measure(feed: dict[str, Any], seconds: float) -> tuple[float, float]:
    """Return tokens per second, and the broker's CPU time in ms per million tokens."""
    with tempfile.TemporaryDirectory(prefix="streampack-") as folder, Processes() as processes:
        settings, rendezvous = Path(folder) / "broker.yaml", Path(folder) / "rendezvous.json"
        conf = {
            "listen": {side: f"ipc://{folder}/{side}" for side in ("producers", "trainers")} | {"http": "127.0.0.1:0"},
            "rendezvous": str(rendezvous), "memory": "256MiB", "planned_mesh": {"dp": DP, "cp": CP},
            "rules": {"budget": PACK_TOKENS, "step": {"packs": PACKS}, "shape": "exact"}, "feeds": {"train": feed},
            "streams": {"web": {"repeat": True, "partitions": NUM_PRODUCERS}},
        }  # fmt: skip
        settings.write_text(json.dumps(conf))
        processes.command("broker", broker_command(settings), Path(folder) / "broker.log")
        ranks = processes.start("ranks", _read, rendezvous, seconds)
        for i in range(NUM_PRODUCERS):
            processes.start(f"producer-{i}", produce, rendezvous, Traffic())
        processes.receive(ranks, START_TIMEOUT_S)
        before = processes.cpu_seconds()["broker"]
        tokens, elapsed = processes.receive(ranks, seconds + START_TIMEOUT_S)
        cpu = processes.cpu_seconds()["broker"] - before
    return tokens / elapsed, 1e9 * cpu / tokens


def _read(report: Connection, rendezvous: Path, seconds: float) -> None:
    """Read all ranks in threads; report that they are warm, then the tokens of all steps and the time they took."""
    begun, over = threading.Barrier(DP * CP), threading.Event()

    def read(rank: int) -> None:
        mesh = {"dp": DP, "cp": CP, "dp_rank": rank // CP, "cp_rank": rank % CP}
        with streampack.connect(f"file://{rendezvous}", mesh=mesh, format="numpy", timeout_s=START_TIMEOUT_S) as loader:
            steps = loader.steps()
            next(steps)
            begun.wait(START_TIMEOUT_S)
            warm_at = time.perf_counter() + WARM_UP_S
            while time.perf_counter() < warm_at:
                next(steps)
            if rank:
                for _ in steps:
                    if over.is_set():
                        return
            report.send("warm")
            start, tokens = time.perf_counter(), 0
            while (now := time.perf_counter()) - start < seconds:
                step = next(steps)
                tokens += step.num_loss_tokens + step.num_samples
            report.send((tokens, now - start))
            over.wait()

    for rank in range(DP * CP):
        threading.Thread(target=read, args=(rank,), daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
