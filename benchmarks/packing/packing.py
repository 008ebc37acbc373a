"""Measure every packer on the same streams: fill of packs, wait of samples, and balance of the packs' costs.

Ours and those of other projects that streampack reproduces, from its registry; TRL's and Grain's own if they are
installed beside it (``pip install trl grain``; see ``peers.py``). Six kinds of lengths that stay the same and five that
shift (``lengths.py``), three budgets, two windows. The slow ones (other projects' own, ``karmarkar_karp``) are left out
where lengths shift.

- *over*: packs above the least there can be: ceil(tokens / budget), or Martello and Toth's bound L2 where long samples
  make it higher (Knapsack Problems, 1990, ch. 8), in percent;
- *wait*: how many packs later a sample leaves than the first younger one, so since it was surely in sight;
- *cost*: the sum of squared lengths, what attention works on, over data-parallel ranks after DEAL: in steps of
  ``MICRO_BATCHES`` packs a rank, ranks in lock step, the costliest pack of each micro-batch over the mean;
- *samples/s*: CPU time of one process. numba's and plain Python's are told apart by their names' ``*``.

At the end the two bounds that ``exact_fill`` has to keep: on lengths that stay the same no more packs than first fit
decreasing of all of them at once, on those that shift no more than that on blocks of two windows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lengths import BUDGETS, I64, SHIFTING, STATIONARY, lengths_of
from benchmarks.packing.peers import MISSING, PEERS
from benchmarks.report import arguments, head, say
from streampack.core.deal.deal import deal
from streampack.core.packers import PACKERS, make_packer
from streampack.core.packers.blocks.decreasing import first_fit_decreasing
from streampack.core.packers.blocks.first_fit import first_fit

MICRO_BATCHES = 4
SEEDS = 3
SAMPLES, BOUND_SAMPLES, QUICK_SAMPLES = 12_288, 49_152, 6_144
COMPILED = ("exact_fill", "joint", "joint, group 64")
SLOW = ("karmarkar_karp",)
WHOSE = {
    "exact_fill": "ours",
    "joint": "ours",
    "sliding_ffd": "ours",
    "first_fit_decreasing": "NeMo-RL, LLaMA-Factory",
    "modified_first_fit_decreasing": "NeMo-RL",
    "first_fit_shuffle": "NeMo-RL",
    "best_fit_decreasing": "TRL",
    "greedy_knapsack": "AutoModel",
    "buffer_first_fit": "VeOmni",
    "karmarkar_karp": "verl, ROLL",
    "concatenative": "NeMo-RL, AutoModel",
}
"""The system that each packer of the registry reproduces."""
OFFLINE, UNSORTED, JOINT_64 = "first_fit_decreasing, offline", "first fit, unsorted", "joint, group 64"

Packed = tuple[I64, I64, float]
"""Positions, bounds of the packs in them, and CPU seconds."""


@dataclass(frozen=True)
class Row:
    """One packer on one stream."""

    kind: str
    budget: int
    window: int
    packer: str
    packs: int
    least: int
    over_percent: float
    utilization: float
    wait_p99: float
    wait_max: int
    samples_per_s: float
    cost_dp8: float | None
    cost_dp64: float | None


def main() -> None:
    args = _arguments()
    names = [name for name in PACKERS if name in WHOSE]
    samples = args.samples or (QUICK_SAMPLES if args.quick else SAMPLES)
    budgets, windows = ((8192,), (1024,)) if args.quick else (BUDGETS, (1024, 256))
    for name in names:
        _ours(name, np.array([1, 2]), 4, 2)  # compiles
    report = head("packing", samples=samples, missing=MISSING)
    if MISSING:
        print(f"not installed, hence left out: {', '.join(MISSING)}")
    rows: list[Row] = []
    for window in windows:
        for title, kinds in (("same throughout", STATIONARY), ("shifting", SHIFTING)):
            found = [row for kind in kinds for budget in budgets for row in _rows(kind, budget, window, samples, names)]
            print(f"\nlengths {title}, window {window}, budgets {', '.join(map(str, budgets))}\n")
            _show(found)
            rows += found
    bounds = list(_bounds(QUICK_SAMPLES if args.quick else BOUND_SAMPLES, budgets, 1 if args.quick else SEEDS))
    broken = [each for each in bounds if each["packs"] > each["bound"]]
    print(f"\nexact_fill's bounds: kept on {len(bounds) - len(broken)} of {len(bounds)} streams", *broken, sep="\n")
    if args.png:
        _draw(rows, args.png)
    kept = {"bounds_kept": 1 - len(broken) / len(bounds), "speed_to_ffd": _speeds(rows)}
    say(report | kept | {"rows": [asdict(row) for row in rows], "bounds": bounds}, args.json)


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__, "one budget, one window, short streams: under a minute")
    parser.add_argument("--samples", type=int, help=f"of each stream; {SAMPLES}, or {QUICK_SAMPLES} if quick")
    parser.add_argument("--png", type=Path, help="draw packs over the bound there (pip install matplotlib)")
    return parser.parse_args()


def _rows(kind: str, budget: int, window: int, samples: int, names: list[str]) -> Iterator[Row]:
    """Every packer on one stream."""
    lengths = lengths_of(kind, budget, samples)
    slow_too = kind in STATIONARY
    ways: dict[str, Callable[[], Packed]] = {
        **{name: partial(_ours, name, lengths, budget, window) for name in names if slow_too or name not in SLOW},
        OFFLINE: partial(_offline, lengths, budget),
        UNSORTED: partial(_unsorted, lengths, budget, window),
        JOINT_64: partial(_ours, "joint", lengths, budget, window, group=64),
        **{name: partial(_peer, pack, lengths, budget, window) for name, pack in PEERS.items() if slow_too},
    }
    least = max(_ceil(lengths, budget), martello_toth(lengths, budget))
    for name, way in ways.items():
        positions, bounds, seconds = way()
        _check(positions, bounds, lengths, budget)
        packs = len(bounds) - 1
        wait = _waits(positions, bounds)
        cost = np.add.reduceat(lengths[positions] ** 2, bounds[:-1])
        yield Row(
            kind, budget, window, name, packs, least,
            over_percent=100 * (packs / least - 1),
            utilization=100 * int(lengths.sum()) / (packs * budget),
            wait_p99=float(np.percentile(wait, 99)),
            wait_max=int(wait.max()),
            samples_per_s=len(lengths) / max(seconds, 1e-9),
            cost_dp8=_cost_ratio(cost, 8),
            cost_dp64=_cost_ratio(cost, 64),
        )  # fmt: skip


def _ours(name: str, lengths: I64, budget: int, window: int, **parameters: int) -> Packed:
    ages = np.full(len(lengths), -1)
    begin = time.process_time()
    choice = make_packer(name, **parameters).choose(lengths, ages, budget, len(lengths), True, window=window)
    return choice.indices, choice.bounds, time.process_time() - begin


def _offline(lengths: I64, budget: int) -> Packed:
    """All at once; the packs are then shuffled, or their lengths would fall from the first step to the last."""
    begin = time.process_time()
    packs = first_fit_decreasing(lengths.tolist(), budget)
    seconds = time.process_time() - begin
    np.random.default_rng(0).shuffle(packs)
    return *_flat(packs), seconds


def _unsorted(lengths: I64, budget: int, window: int) -> Packed:
    """First fit in order over blocks, as in Axolotl's multipack; its blocks have 100,000 samples."""
    begin = time.process_time()
    packs: list[list[int]] = []
    for at in range(0, len(lengths), window):
        block = lengths[at : at + window].tolist()
        packs += [[at + i for i in pack] for pack in first_fit(range(len(block)), block, budget)]
    return *_flat(packs), time.process_time() - begin


def _peer(
    pack: Callable[[I64, int, int], tuple[list[list[int]], float]], lengths: I64, budget: int, window: int
) -> Packed:
    packs, seconds = pack(lengths, budget, window)
    return *_flat(packs), seconds


def _flat(packs: list[list[int]]) -> tuple[I64, I64]:
    bounds = np.fromiter(accumulate(map(len, packs), initial=0), np.int64)
    return np.fromiter(chain.from_iterable(packs), np.int64), bounds


def _check(positions: I64, bounds: I64, lengths: I64, budget: int) -> None:
    """A packer that loses, repeats or overfills has no figures."""
    assert np.array_equal(np.sort(positions), np.arange(len(lengths)))
    assert np.add.reduceat(lengths[positions], bounds[:-1]).max() <= budget


def _ceil(lengths: I64, budget: int) -> int:
    return -(-int(lengths.sum()) // budget)


def martello_toth(lengths: I64, budget: int) -> int:
    """The bound L2: no packing has fewer packs.

    For a limit a of at most half a budget: samples above budget - a need a pack each, those above half a budget
    another each, and those from a on that these have no room for need more. The highest over all a.
    """
    ordered = np.sort(lengths)
    sums = np.concatenate([[0], np.cumsum(ordered)])
    limits = np.concatenate([[0], np.unique(ordered[2 * ordered <= budget])])
    alone = np.searchsorted(ordered, budget - limits, "right")
    long = np.searchsorted(ordered, budget // 2, "right")
    excess = sums[alone] - sums[np.searchsorted(ordered, limits)] - (alone - long) * budget
    return int(np.max(len(ordered) - long + np.maximum(0, -(-excess // budget))))


def _waits(positions: I64, bounds: I64) -> I64:
    """By sample: the number of its pack less that of the first pack that holds it or a younger one."""
    pack = np.empty(len(positions), np.int64)
    pack[positions] = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    return pack - np.minimum.accumulate(pack[::-1])[::-1]


def _cost_ratio(cost: I64, dp: int) -> float | None:
    """Mean over steps of the time taken, over that of ranks that never wait for each other; None: no whole step."""
    size = dp * MICRO_BATCHES
    steps = [cost[at : at + size] for at in range(0, len(cost) - size + 1, size)]
    if not steps:
        return None
    return float(np.mean([step[deal(step, dp, "deal")].max(axis=1).sum() * dp / step.sum() for step in steps]))


def _speeds(rows: list[Row]) -> dict[str, float]:
    """By packer, samples a second over those of first fit decreasing, which is plain Python: medians of all streams."""
    names = {row.packer for row in rows}
    speeds = {name: statistics.median(row.samples_per_s for row in rows if row.packer == name) for name in names}
    return {name: round(speed / speeds["first_fit_decreasing"], 3) for name, speed in sorted(speeds.items())}


def _show(rows: list[Row]) -> None:
    """A Markdown table, a line for a packer over all its streams."""
    print("| packer | whose | utilization, mean / worst % | over, mean / worst % | wait p99, median / worst | longest |"
          " samples/s, median | cost dp 8 | dp 64 |\n|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    others = {OFFLINE: "NeMo-RL", UNSORTED: "Axolotl", JOINT_64: "ours"}
    by_packer: dict[str, list[Row]] = {}
    for row in rows:
        by_packer.setdefault(row.packer, []).append(row)
    for name, found in sorted(by_packer.items(), key=lambda each: statistics.mean(row.over_percent for row in each[1])):
        used, over, wait = ([getattr(row, key) for row in found] for key in ("utilization", "over_percent", "wait_p99"))
        dear = [[getattr(row, key) or np.nan for row in found] for key in ("cost_dp8", "cost_dp64")]
        whose = WHOSE.get(name, others.get(name, "its own"))
        print(
            f"| {name}{'*' * (name in COMPILED)} | {whose} | {statistics.mean(used):.3f} / {min(used):.2f} |"
            f" {statistics.mean(over):.3f} / {max(over):.2f} | {statistics.median(wait):.0f} / {max(wait):.0f} |"
            f" {max(row.wait_max for row in found)} | {statistics.median(row.samples_per_s for row in found):,.0f} |"
            f" {np.nanmean(dear[0]):.3f} | {np.nanmean(dear[1]):.3f} |"
        )


def _bounds(samples: int, budgets: tuple[int, ...], seeds: int) -> Iterator[dict[str, Any]]:
    """What exact_fill with a window of 1024 needs on each stream, and what it may."""
    for kind in (*STATIONARY, *SHIFTING):
        for budget in budgets:
            for seed in range(seeds):
                lengths = lengths_of(kind, budget, samples, seed)
                block = len(lengths) if kind in STATIONARY else 2048
                bound = sum(
                    len(first_fit_decreasing(lengths[at : at + block].tolist(), budget))
                    for at in range(0, len(lengths), block)
                )
                packs = len(_ours("exact_fill", lengths, budget, 1024)[1]) - 1
                yield {"kind": kind, "budget": budget, "seed": seed, "packs": packs, "bound": bound}


def _draw(rows: list[Row], path: Path) -> None:
    """A dot for each stream: packs over the bound, by packer; lengths that shift are hollow."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = sorted(
        {row.packer for row in rows},
        key=lambda name: -statistics.mean(r.over_percent for r in rows if r.packer == name),
    )
    figure, axis = pyplot.subplots(figsize=(8, 0.5 + 0.34 * len(names)), layout="constrained")
    colors = dict(zip(sorted({row.window for row in rows}), ("#d95f02", "#1b6ca8"), strict=False))
    for row in rows:
        height = names.index(row.packer) + (0.15 if row.window == max(colors) else -0.15)
        fill = colors[row.window] if row.kind in STATIONARY else "none"
        axis.plot(row.over_percent, height, "o", ms=4, mfc=fill, mec=colors[row.window], mew=0.7)
    axis.set_yticks(range(len(names)), names)
    axis.set_xscale("symlog", linthresh=0.01)
    axis.set_xlim(left=-0.001)
    axis.set_xlabel("packs over the least there can be, % (a dot a stream, hollow: lengths shift)")
    for window, color in colors.items():
        axis.plot([], [], "o", ms=4, color=color, label=f"window {window}")
    axis.legend(loc="upper right")
    axis.grid(axis="x", lw=0.3)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
