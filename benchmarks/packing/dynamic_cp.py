"""Measure plans of dynamic context parallelism: how near to the bound they are, and how long planning takes.

Six sets of lengths, 8 to 1,024 ranks of 8,192 tokens, steps that fill 8 micro-batches to 0.9, and the cost of a layer
of hidden size 4096 (a = 49,152 with its MLP, b = 1). Times are CPU time. A checker that shares no code with the planner
recomputes costs:

- *over the bound*: the sum of the costliest ranks over the work of all samples divided by the ranks, without exchange;
- *static*: the same for the best single size of groups, *dynamic* for the plan, with an exchange of 0.05 a token within
  a node of 8 ranks and 0.2 across nodes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from runpy import run_path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lengths import I64
from benchmarks.report import arguments, head, say
from streampack.core.deal.dynamic_cp.cp_plan import CpCosts, CpPlan, plan_groups, plan_uniform
from tests.core.deal.cp_checker import check_plan

KINDS = ("lognormal", "long_sft", "rl", "code", "uniform", "zipf")
RANKS = (8, 64, 256, 1024)
RANK_TOKENS, MICRO_BATCHES, FILL, MAX_GROUP = 8192, 8, 0.9, 64
WITHOUT = CpCosts(12 * 4096, 1)
WITH = CpCosts(12 * 4096, 1, 0.05, 0.2, 8)


def lengths_of(kind: str, ranks: int, seed: int = 1) -> I64:
    """Return the lengths of a step for so many ranks, int64 [n]."""
    rng, tokens, drawn = np.random.default_rng(seed), int(FILL * MICRO_BATCHES * ranks * RANK_TOKENS), np.zeros(0)
    while drawn.sum() < tokens:
        drawn = np.append(drawn, _draw(kind, rng))
    most = min(MAX_GROUP, ranks) * RANK_TOKENS
    lengths = drawn.astype(np.int64).clip(16, most)
    return lengths[np.cumsum(lengths) <= tokens]


def many_lengths(kind: str, ranks: int, samples: int) -> I64:
    """Return so many lengths, drawn for so many ranks or more."""
    return np.concatenate([lengths_of(kind, ranks, seed) for seed in range(10)])[:samples]


def _draw(kind: str, rng: np.random.Generator, n: int = 4096) -> NDArray[np.float64]:
    if kind == "long_sft":
        return np.where(rng.random(n) < 0.005, rng.uniform(16e3, 120e3, n), rng.lognormal(6.5, 0.8, n))
    if kind == "uniform":
        return rng.uniform(1, 65536, n)
    if kind == "zipf":
        return (64.0 * rng.zipf(1.5, n)).clip(max=65536)
    mean, deviation, most = {
        "lognormal": (6.5, 1.2, 1 << 19), "rl": (8.3, 0.9, 32768), "code": (7.3, 1.5, 65536)
    }[kind]  # fmt: skip
    drawn: NDArray[np.float64] = np.minimum(rng.lognormal(mean, deviation, n), most)
    return drawn


def main() -> None:
    parser = arguments(__doc__, "8 and 64 ranks only")
    parser.add_argument("--seeds", type=int, default=1, help="draws of each set, for the least and the greatest figure")
    parser.add_argument("--megatron", type=Path, help="a checkout of Megatron-LM, whose scheduler plans the same steps")
    args = parser.parse_args()
    report, rows = head("dynamic_cp"), []
    for ranks in RANKS[:2] if args.quick else RANKS:
        for kind in KINDS:
            lengths = lengths_of(kind, ranks)
            work = float((WITHOUT.a * lengths + WITHOUT.b * lengths.astype(np.float64) ** 2).sum()) / ranks
            plan, ms = _timed(lengths, ranks, WITHOUT)
            with_exchange, ms_with = _timed(lengths, ranks, WITH)
            static, size = _best_static(lengths, ranks)
            dynamic = _checked(lengths, with_exchange, ranks, WITH)
            row: dict[str, Any] = {
                "kind": kind, "ranks": ranks, "samples": len(lengths), "micro_batches": plan.num_micro_batches,
                "over_bound": _checked(lengths, plan, ranks, WITHOUT) / work, "ms": ms,
                "static": static / work, "static_size": size, "ms_with_exchange": ms_with,
                "dynamic": dynamic / work,
                "micro_batches_with_exchange": with_exchange.num_micro_batches,
            }  # fmt: skip
            rows.append(row)
            print(
                f"{kind:<10} N={ranks:<5} n={len(lengths):<6} over the bound {row['over_bound']:.4f} "
                f"({plan.num_micro_batches} micro-batches, {ms:5.1f} ms); with exchange: static {row['static']:.4f} "
                f"(cp {size}), dynamic {row['dynamic']:.4f} ({with_exchange.num_micro_batches}, {ms_with:5.1f} ms), "
                f"gain {static / dynamic:.3f}",
                flush=True,
            )
            if args.seeds > 1:
                row["seeds"] = _of_seeds(kind, ranks, args.seeds)
    timed = [_times(kind, *size) for size in ((64, 1024), (1024, 16384)) for kind in KINDS]
    for row in timed:
        print(
            "N={ranks:<5} n={samples:<6} {kind:<10} {ms:5.1f} ms, with exchange {ms_with_exchange:5.1f} ms".format(
                **row
            )
        )
    if args.megatron:
        _beside_megatron(args.megatron)
    say(report | {"rows": rows, "times": timed}, args.json)


def _of_seeds(kind: str, ranks: int, seeds: int) -> dict[str, tuple[float, float, float]]:
    """Return the least, the median and the greatest path over the work, without and with exchange."""
    found: dict[str, list[float]] = {"without": [], "with": []}
    for seed in range(1, seeds + 1):
        lengths = lengths_of(kind, ranks, seed)
        work = float((WITHOUT.a * lengths + WITHOUT.b * lengths.astype(np.float64) ** 2).sum()) / ranks
        for name, costs in (("without", WITHOUT), ("with", WITH)):
            plan = plan_groups(lengths, ranks, RANK_TOKENS, MAX_GROUP, costs)
            found[name].append(_checked(lengths, plan, ranks, costs) / work)
    spread = {name: (min(paths), float(np.median(paths)), max(paths)) for name, paths in found.items()}
    texts = (f"{name} exchange {low:.4f}, {mid:.4f}, {high:.4f}" for name, (low, mid, high) in spread.items())
    print(f"{'':<10} seeds 1 to {seeds}: {'; '.join(texts)} (least, median, greatest)", flush=True)
    return spread


def _beside_megatron(checkout: Path) -> None:
    """Print the critical paths and times of Megatron-LM's hybrid scheduler and of the planner, for the same steps."""
    names = ("megatron", "megatron.core", "megatron.core.parallel_state", "megatron.core.rerun_state_machine")
    modules = {name: ModuleType(name) for name in names}
    vars(modules["megatron.core"])["parallel_state"] = modules["megatron.core.parallel_state"]
    vars(modules["megatron.core.rerun_state_machine"])["RerunDataIterator"] = object
    sys.modules.update(modules)  # the scheduler needs nothing of them
    scheduling = run_path(str(checkout / "megatron/core/pipeline_parallel/hybrid_cp_schedule.py"))
    for ranks, samples in ((8, 0), (64, 0), (64, 1024)):
        for kind in KINDS:
            lengths = many_lengths(kind, ranks, samples) if samples else lengths_of(kind, ranks)
            scheduler = scheduling["BalancedCPScheduler"](RANK_TOKENS, SimpleNamespace(size=lambda ranks=ranks: ranks))
            began = time.process_time()
            _, groups = scheduler.get_groups_and_subsamples(list(enumerate(lengths.tolist())), None)
            ms = 1e3 * (time.process_time() - began)
            work = float((WITHOUT.a * lengths + WITHOUT.b * lengths.astype(np.float64) ** 2).sum()) / ranks
            theirs = [_path_of_groups(lengths, groups, costs) / work for costs in (WITHOUT, WITH)]
            plans = [_timed(lengths, ranks, costs) for costs in (WITHOUT, WITH)]
            costs = zip((WITHOUT, WITH), plans, strict=True)
            ours = [_checked(lengths, plan, ranks, cost) / work for cost, (plan, _) in costs]
            print(
                f"{kind:<10} N={ranks:<5} n={len(lengths):<6} Megatron {theirs[0]:.3f}, with exchange {theirs[1]:.3f}, "
                f"{ms:.0f} ms; planner {ours[0]:.3f}, {ours[1]:.3f}, {plans[0][1]:.1f} and {plans[1][1]:.1f} ms"
            )


def _path_of_groups(lengths: I64, groups: list[list[list[int]]], costs: CpCosts) -> float:
    """Return the sum of the costliest ranks of Megatron's groups, which are sample numbers by [group, rank]."""
    critical = 0.0
    for by_rank in groups:
        ranks_of: dict[int, list[int]] = {}
        for rank, samples in enumerate(by_rank):
            for sample in samples:
                ranks_of.setdefault(sample, []).append(rank)
        load = np.zeros(len(by_rank))
        for sample, ranks in ranks_of.items():
            tokens, size = float(lengths[sample]), len(ranks)
            link = costs.node if size <= costs.ranks_of_node else costs.across
            load[ranks] += ((costs.a + costs.b * tokens) * tokens + link * costs.a * tokens * (size - 1)) / size
        critical += float(load.max())
    return critical


def _times(kind: str, ranks: int, samples: int) -> dict[str, Any]:
    """Return the time of a plan of so many samples."""
    lengths = many_lengths(kind, ranks, samples)
    times = [_timed(lengths, ranks, costs)[1] for costs in (WITHOUT, WITH)]
    return {"kind": kind, "ranks": ranks, "samples": len(lengths), "ms": times[0], "ms_with_exchange": times[1]}


def _timed(lengths: I64, ranks: int, costs: CpCosts) -> tuple[CpPlan, float]:
    times = []
    for _ in range(5):
        began = time.process_time()
        plan = plan_groups(lengths, ranks, RANK_TOKENS, MAX_GROUP, costs)
        times.append(time.process_time() - began)
    return plan, 1e3 * float(np.median(times))


def _checked(lengths: I64, plan: CpPlan, ranks: int, costs: CpCosts) -> float:
    return check_plan(lengths, plan, ranks, RANK_TOKENS, MAX_GROUP, costs)


def _best_static(lengths: I64, ranks: int) -> tuple[float, int]:
    """Return the least critical path of groups of one size, and the size."""
    sizes = [1 << level for level in range(min(MAX_GROUP, ranks).bit_length())]
    fits = [size for size in sizes if -(-int(lengths.max()) // (2 * size)) * 2 <= RANK_TOKENS]
    plans = [(plan_uniform(lengths, ranks, RANK_TOKENS, size, WITH), size) for size in fits]
    return min((_checked(lengths, plan, ranks, WITH), size) for plan, size in plans)


if __name__ == "__main__":
    main()
