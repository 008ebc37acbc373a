"""Measure the four figures of the README in one run: full packs, tokens per second, kills survived, first pack.

- packs: ``exact_fill`` over a sliding window of 1,024 samples, against offline first-fit decreasing (FFD) of the whole
  set and the least number of packs that could hold the tokens; 100,000 lognormal lengths of mean 500, budget 8,192.
- tokens per second: end to end with torch tensors, against loaders of other projects on the same samples
  (``throughput.py --only loaders``).
- kills: processes that ``python -m tests.soak`` killed or froze, and steps that came out other than in a run
  without faults.
- first pack: seconds from ``git clone`` of this repository to the end of ``make demo``, installation included.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import streampack
from benchmarks.report import arguments, head, say

ROOT = Path(__file__).resolve().parents[2]
NUM_LENGTHS, MEAN, BUDGET, WINDOW = 100_000, 500, 8192, 1024


def main() -> None:
    parser = arguments(__doc__, "1 minute of kills, quick rounds, no clone")
    parser.add_argument("--minutes", type=float, default=10.0, help="of kills (default: 10)")
    args = parser.parse_args()
    report = head("headline", packs=packs())
    print(f"packs: {report['packs']}", flush=True)
    quick = ["--quick"] if args.quick else []
    loaders = last_json(["benchmarks/throughput/throughput.py", "--only", "loaders", "--json", *quick])
    report["loaders"] = loaders["loaders"] | {"ratio": loaders["streampack_to_fastest_peer"]}
    print(f"tokens per second: {report['loaders']}", flush=True)
    report["kills"] = last_json(["-m", "tests.soak", "--minutes", str(1.0 if args.quick else args.minutes)])
    print(f"kills: {report['kills']}", flush=True)
    if not args.quick:
        report["clone_to_demo_s"] = round(clone_to_demo(), 1)
        print(f"clone to the end of the demo: {report['clone_to_demo_s']} s", flush=True)
    say(report, args.json)


def packs() -> dict[str, float]:
    """Return the packs that ``exact_fill`` and offline FFD make of the same lengths, and the least possible number."""
    normal = np.random.default_rng(0).lognormal(np.log(MEAN) - 0.5, 1.0, NUM_LENGTHS)
    lengths = np.clip(normal.astype(np.int64), 1, BUDGET)
    ours = len(streampack.pack_lengths(lengths, BUDGET, window=WINDOW))
    offline = len(streampack.pack_lengths(lengths, BUDGET, packer="first_fit_decreasing"))
    least = -(-int(lengths.sum()) // BUDGET)
    filled = round(int(lengths.sum()) / (ours * BUDGET), 5)
    return {"exact_fill": ours, "offline_ffd": offline, "least": least, "utilization": filled}


def last_json(words: list[str]) -> dict[str, Any]:
    """Run a Python program of this repository, and return the JSON object in its last line."""
    done = subprocess.run([sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def clone_to_demo() -> float:
    """Return the seconds that ``git clone`` and ``make demo`` take where Python and make are installed."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        subprocess.run(["git", "clone", "-q", str(ROOT), "streampack"], cwd=folder, check=True)
        subprocess.run(["make", "-s", "demo"], cwd=Path(folder) / "streampack", check=True, stdout=sys.stderr)
        return time.perf_counter() - began


if __name__ == "__main__":
    main()
