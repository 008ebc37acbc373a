"""Measure the cost of a standby: tokens per second, data wait and CPU time with one and without, in turns.

Both brokers, the producers and the client are on this machine, so the standby also takes CPU time from the others. On a
host of its own it does not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.report import head, say
from benchmarks.throughput.streampack_pipe import Service, run_streampack
from benchmarks.traffic import PipeResult, Traffic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="Runs with a standby, and as many without (4).")
    parser.add_argument("--seconds", type=float, default=8.0, help="Seconds of each run (8).")
    parser.add_argument("--work-ms", type=float, default=20.0, help="Milliseconds that a trainer works on a pack (20).")
    parser.add_argument("--json", action="store_true", help="Print the report as JSON.")
    args = parser.parse_args()
    report = head("standby", seconds=args.seconds, rounds=args.rounds)
    for part, service in {"throughput": Service(), "latency": Service(packs=8, work_s=args.work_ms / 1e3)}.items():
        runs: dict[bool, list[PipeResult]] = {False: [], True: []}
        for number in range(args.rounds):
            for standby in (False, True) if number % 2 else (True, False):
                chosen = Service(packs=service.packs, work_s=service.work_s, standby=standby)
                runs[standby].append(run_streampack(args.seconds, Traffic("tcp"), chosen))
        report[part] = _compared(runs)
        print(part, report[part], flush=True)
    say(report, args.json)


def _compared(runs: dict[bool, list[PipeResult]]) -> dict[str, Any]:
    """Medians with a standby and without."""
    found: dict[str, Any] = {}
    for standby, results in runs.items():
        tokens = sum(run.tokens for run in results) / 1e6
        found["with" if standby else "without"] = {
            "tokens_per_second": round(statistics.median(run.tokens_per_second for run in results)),
            "next_p99_ms": round(statistics.median(run.next_ms["p99"] for run in results), 3),
            "broker_cpu_ms_per_million_tokens": round(
                sum(run.cpu_seconds["broker"] for run in results) / tokens * 1e3, 2
            ),
        }
    found["ratio"] = round(found["with"]["tokens_per_second"] / found["without"]["tokens_per_second"], 3)
    return found


if __name__ == "__main__":
    main()
