"""Tokens per second end to end: streampack against the bare pipe, in turns, on this machine.

The bare pipe (bare_pipe.py) moves the same bytes and promises nothing; streampack's figure means something only
next to it. Rounds alternate which goes first, so that a machine that warms up or is shared favours neither.
`run_streampack(seconds, transport)` is looked for in streampack_pipe.py; without it the bare pipe runs alone.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import signal
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bare_pipe import PipeResult, run_bare_pipe
from benchmarks.report import arguments, head, say

Runner = Callable[[float, str], PipeResult]

STREAMPACK_PIPE = "benchmarks.streampack_pipe"
QUICK_SECONDS, QUICK_ROUNDS = 3.0, 3
FULL_SECONDS, FULL_ROUNDS = 10.0, 5


def main() -> None:
    args = _arguments()
    seconds = args.seconds or (QUICK_SECONDS if args.quick else FULL_SECONDS)
    rounds = QUICK_ROUNDS if args.quick else FULL_ROUNDS
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the processes of a run end, too
    report = head("throughput", transport=args.transport, seconds=seconds)
    results = compare(pipes(), rounds, seconds, args.transport)
    report["results"] = {name: summary(runs) for name, runs in results.items()}
    if "streampack" in results:
        report["streampack_to_bare"] = round(_median(results["streampack"]) / _median(results["bare_pipe"]), 3)
        print(f"streampack moves {report['streampack_to_bare']} of what the bare pipe moves")
    say(report, args.json)


def pipes() -> dict[str, Runner]:
    """What is compared, by name."""
    found: dict[str, Runner] = {"bare_pipe": run_bare_pipe}
    if importlib.util.find_spec(STREAMPACK_PIPE) is not None:
        found["streampack"] = importlib.import_module(STREAMPACK_PIPE).run_streampack
    return found


def compare(pipes: dict[str, Runner], rounds: int, seconds: float, transport: str) -> dict[str, list[PipeResult]]:
    """Run every pipe once a round, the order turned round each time, printing a line for each run."""
    results: dict[str, list[PipeResult]] = {name: [] for name in pipes}
    for i in range(rounds):
        for name in list(pipes)[:: -1 if i % 2 else 1]:
            result = pipes[name](seconds, transport)
            results[name].append(result)
            cpu = ", ".join(f"{process} {used:.2f}" for process, used in result.cpu_seconds.items())
            print(
                f"{name:<10} {transport}  {result.tokens_per_second / 1e6:7.1f}M tokens/s"
                f"  in {result.seconds:.2f} s; CPU s: {cpu}",
                flush=True,
            )
    for name, runs in results.items():
        print(f"{name:<10} {transport}  {_median(runs) / 1e6:7.1f}M tokens/s, the median of {len(runs)}")
    return results


def summary(runs: list[PipeResult]) -> dict[str, object]:
    speeds = [run.tokens_per_second for run in runs]
    return {
        "tokens_per_second": {"median": round(_median(runs)), "min": round(min(speeds)), "max": round(max(speeds))},
        "runs": [asdict(run) for run in runs],
    }


def _median(runs: list[PipeResult]) -> float:
    return statistics.median(run.tokens_per_second for run in runs)


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__, "3 rounds of 3 s, under a minute in all (else 5 of 10 s)")
    parser.add_argument("--transport", choices=("ipc", "tcp"), default="ipc", help="default: %(default)s")
    parser.add_argument("--seconds", type=_positive, metavar="S", help="time each run for S seconds instead")
    return parser.parse_args()


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


if __name__ == "__main__":
    main()
