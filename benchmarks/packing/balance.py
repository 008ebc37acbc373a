"""Measure load balance and its cost: ``joint`` packs of heavy-tailed lengths, and DEAL on a large mesh.

- *squares*, *cost*: the sum of squared lengths of a pack (attention's work), or 24576 * s + s * s for each sample s:
  the costliest pack of a group (what ranks run at one moment, M = 1) over the mean, mean over groups. *dealt* is the
  same for the packs of ``exact_fill``: each 16 groups are sorted by cost and dealt, the best that dealing can do;
- *wait*: by how many groups later a sample leaves than the first younger one, so since it was surely in sight;
- *samples/s*: CPU time of one process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lengths import I64, lengths_of
from benchmarks.report import arguments, head, say
from streampack.core.deal.deal import deal
from streampack.core.model.keys.planning_keys import Balance
from streampack.core.packers.exact_fill.exact_fill import ExactFill
from streampack.core.packers.joint.joint import Joint
from streampack.core.packers.packer import Packer

BUDGET = 32768
SAMPLES = 400_000


def main() -> None:
    args = arguments(__doc__, "an eighth of the samples").parse_args()
    samples = SAMPLES // 8 if args.quick else SAMPLES
    report = head("balance", samples=samples)
    _joint(lengths_of("rl_rollouts", BUDGET, 3000), 8, 64)  # compiles
    rows = []
    print("kind          group window  squares  dealt   cost     utilization  wait p99  max  samples/s")
    for row in _rows(samples):
        rows.append(row)
        print(
            f"{row['kind']:<13} {row['group']:>5} {row['window']:>6}  {row['squares']:<7} {row['dealt']:<7}  "
            f"{row['cost']:<7}  {row['utilization']:.4%}  {row['wait_p99']:>10} {row['wait_max']:>4}  "
            f"{row['samples_per_s'] / 1e6:.2f}M"
        )
    dealt = {balance: _deal_ms(balance) for balance in ("deal", "karmarkar_karp")}
    took = ", ".join(f"{ms:.2f} ms by {balance}" for balance, ms in dealt.items())
    print(f"\nDEAL, 512 ranks x 8 micro-batches: {took}")
    say(report | {"rows": rows, "deal_ms": dealt}, args.json)


def _rows(samples: int) -> Iterator[dict[str, Any]]:
    for kind in ("rl_rollouts", "source_code"):
        for group in (8, 64):
            lengths = lengths_of(kind, BUDGET, samples // 2 if group == 8 else samples)
            for window in (1024, 4096):
                yield {"kind": kind, "group": group, "window": window, **_joint(lengths, group, window)}


def _joint(lengths: I64, group: int, window: int) -> dict[str, Any]:
    indices, bounds, seconds = _timed(Joint(group=group), lengths, window)
    taken = lengths[indices]
    exact, exact_bounds, _ = _timed(ExactFill(), lengths, window)
    squares, plain = _sums(taken**2, bounds), _sums(lengths[exact] ** 2, exact_bounds)
    whole = len(plain) // (16 * group) * 16 * group
    waits = _waits(indices, bounds, group)
    return {
        "squares": round(_ratio(squares.reshape(-1, group)), 4),
        "dealt": round(_ratio(-np.sort(-plain[:whole].reshape(-1, 16 * group), axis=1).reshape(-1, group)), 4),
        "cost": round(_ratio(_sums(Balance().costs(taken), bounds).reshape(-1, group)), 4),
        "utilization": float(taken.sum() / (len(bounds) - 1) / BUDGET),
        "wait_p99": int(np.quantile(waits, 0.99)),
        "wait_max": int(waits.max()),
        "samples_per_s": round(len(indices) / seconds),
    }


def _timed(packer: Packer, lengths: I64, window: int) -> tuple[I64, I64, float]:
    began = time.process_time()
    choice = packer.choose(lengths, np.full(len(lengths), -1), BUDGET, len(lengths), False, window=window)
    return choice.indices, choice.bounds, time.process_time() - began


def _sums(values: I64, bounds: I64) -> I64:
    sums: I64 = np.add.reduceat(values, bounds[:-1])
    return sums


def _ratio(rows: I64) -> float:
    """Max over mean of each row, mean over rows."""
    return float((rows.max(axis=1) / rows.mean(axis=1)).mean()) if len(rows) else float("nan")


def _waits(indices: I64, bounds: I64, group: int) -> I64:
    number = np.repeat(np.arange(len(bounds) - 1) // group, np.diff(bounds))
    youngest = np.maximum.accumulate(np.maximum.reduceat(indices, bounds[:-1:group]))
    waits: I64 = number - np.minimum(np.searchsorted(youngest, indices), number)
    return waits


def _deal_ms(balance: str) -> float:
    costs = (np.random.default_rng(0).lognormal(0, 1, 4096) * 1e9).astype(np.int64)
    times = []
    for _ in range(20):
        began = time.perf_counter()
        deal(costs, 512, balance)
        times.append(time.perf_counter() - began)
    return 1e3 * float(np.median(times))


if __name__ == "__main__":
    main()
