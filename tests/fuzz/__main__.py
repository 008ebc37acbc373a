"""``make fuzz``: changed inputs for everything that reads what others say, guided by the lines that they reach.

Each target has a process of its own for its share of the time, one for each core at a time. It says every few seconds
how many inputs it has run, how many lines of ours they reached, how many inputs are kept for that, and its memory. An
input that makes a target raise, or hang, is written to a file, with the command that runs it again, and the exit code
is 1; so it is where a process grew (``engine.MAX_GROWTH``). The last line on stdout is one JSON object.

    python -m tests.fuzz --minutes 10                    # all targets
    python -m tests.fuzz --target broker --seconds 60    # one
    python -m tests.fuzz --replay .fuzz/broker-0123456789
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from streampack.packs.kernel_loader import kernels
from tests.fuzz.engine import MAX_GROWTH, Crash, Fuzzer, bound_memory, resident_bytes, watch_for_hangs
from tests.fuzz.targets import TARGETS, found_before

TELL_S = 5.0


def main() -> int:
    given = _arguments()
    if given.replay is not None:
        return replay(given.replay, given.target[0] if given.target else given.replay.name.rpartition("-")[0])
    if given.worker:
        return work(given.target[0], given.seconds, given.seed, given.folder)
    names = given.target or list(TARGETS)
    seconds = given.minutes * 60 if given.seconds is None else given.seconds
    jobs = min(given.jobs, len(names))
    share = seconds * jobs / len(names)
    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(lambda name: _start(name, share, given), names))
    total = {
        "targets": {result["target"]: result for result in results},
        "executions": sum(result.get("executions", 0) for result in results),
        "crashes": sum(result["crash"] is not None for result in results),
        "grown": [result["target"] for result in results if result["growth_bytes"] > MAX_GROWTH],
    }
    print(json.dumps(total) if given.json else _told(total), flush=True)
    return 1 if total["crashes"] or total["grown"] else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all targets together")
    parser.add_argument("--seconds", type=float, help="the same, in seconds")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="one of them; may be repeated")
    parser.add_argument("--replay", type=Path, help="run one input, of the target that its name begins with")
    parser.add_argument("--seed", type=int, default=None, help="the same inputs again (default: other ones each time)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="targets at a time")
    parser.add_argument("--folder", type=Path, default=Path(".fuzz"), help="where inputs that crash are written")
    parser.add_argument("--json", action="store_true", help="nothing but the last line, as JSON")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.seed = time.time_ns() % 2**32 if given.seed is None else given.seed
    return given


def _start(name: str, seconds: float, given: argparse.Namespace) -> dict[str, Any]:
    """A target's process; what it came to."""
    command = [
        sys.executable, "-m", "tests.fuzz", "--worker", "--target", name, "--seconds", str(seconds),
        "--seed", str(given.seed), "--folder", str(given.folder),
    ]  # fmt: skip
    result: dict[str, Any] = {"target": name, "crash": "the process died", "growth_bytes": 0}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said = json.loads(line)
            result = said if "crash" in said else result
            if not given.json:
                print(_line(said), flush=True)
    if result["crash"] == "the process died":
        print(f"{name}: the process ended with {process.returncode}", file=sys.stderr, flush=True)
    return result


def work(name: str, seconds: float, seed: int, folder: Path) -> int:
    """One target, in this process: lines of JSON, the last of them says what it came to."""
    watch_for_hangs()
    kernels.load()  # numba takes 20 MiB, once
    kernels.wait()
    bound_memory()
    logging.disable()  # of what is found wrong, one line each
    fuzzer, began = Fuzzer(TARGETS[name], seed), time.monotonic()

    def tell(_: Fuzzer, **more: Any) -> None:
        said = {
            "target": name, "seconds": round(time.monotonic() - began, 1), "executions": fuzzer.executions,
            "lines": fuzzer.lines, "kept": len(fuzzer.kept), "resident_bytes": resident_bytes(), "seed": seed,
        }  # fmt: skip
        print(json.dumps(said | more), flush=True)

    crash: str | None = None
    try:
        fuzzer.begin(list(found_before(name).values()))
        fuzzer.for_seconds(seconds, tell, TELL_S)
    except Crash as error:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}-{error.name}"
        path.write_bytes(error.data)
        crash = str(path)
        print(f"{error.text}\n{name}: again with: python -m tests.fuzz --replay {path}", file=sys.stderr, flush=True)
    tell(fuzzer, crash=crash, growth_bytes=fuzzer.growth)
    return 0 if crash is None else 1


def replay(path: Path, name: str) -> int:
    """One input again: how it raises, if it does."""
    if name not in TARGETS:
        said = f"got {path.name}, expected a file that is named by its target, or --target: {', '.join(TARGETS)}"
        print(said, file=sys.stderr)
        return 2
    TARGETS[name].run(path.read_bytes())
    print(f"{name}: {path} raises nothing")
    return 0


def _line(said: dict[str, Any]) -> str:
    rate = said["executions"] / max(said["seconds"], 0.1)
    text = (
        f"{said['target']:>14} {said['seconds']:6.0f} s {said['executions']:9,} inputs, {rate:6,.0f} a second "
        f"{said['lines']:6,} lines {said['kept']:5,} kept {said['resident_bytes'] / 2**20:6.0f} MiB"
    )
    if "crash" not in said:
        return text
    return text + (f"  CRASH {said['crash']}" if said["crash"] else f"  grew {said['growth_bytes'] / 2**20:+.1f} MiB")


def _told(total: dict[str, Any]) -> str:
    grown = f", grown: {', '.join(total['grown'])}" if total["grown"] else ", none grew"
    return f"{total['executions']:,} inputs to {len(total['targets'])} targets, {total['crashes']} crashes{grown}"


if __name__ == "__main__":
    sys.exit(main())
