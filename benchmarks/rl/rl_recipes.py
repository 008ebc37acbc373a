"""Micro-batches of RL frameworks that are not installed here: their own functions, and the recipes of the docs.

    python -m benchmarks.rl.rl_recipes FOLDER [--json]

FOLDER has clones named ``AReaL``, ``SkyRL``, ``RL`` (NeMo-RL), ``OpenRLHF``, ``prime-rl`` and ``slime``. The functions
that plan micro-batches are read from there and run on lengths; what they import besides is left out. A step has the 512
rollouts of ``rl_frameworks`` on 8 ranks, at most 16,384 tokens in a micro-batch. Costs are those of ``plan_step``. The
critical path is the sum over micro-batches of the dearest rank's cost; 1.00 is that of equal ranks.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np

from benchmarks.rl.rl_frameworks import BUDGET, RANKS, STEPS, cost_of, lengths_of, note
from streampack.planning import plan_step

Packs = list[list[list[int]]]
"""Places of the samples of each rank's micro-batches."""


def allocate(values: Any, capacity: int, min_groups: int = 1, n_groups_divisor: int = 1) -> list[list[int]]:
    """The recipe for frameworks that plan each rank by itself."""
    plan = plan_step(
        values, budget=capacity, min_micro_batches=min_groups, micro_batch_multiple=n_groups_divisor, empty="error"
    )
    return plan.packs[0]


def dealt(lengths: Any, budget: int, ranks: int) -> list[list[int]]:
    """The recipe for frameworks that plan all ranks: rank r has every ``ranks``-th pack, from r."""
    plan = plan_step(lengths, budget=budget, dp=ranks, empty="error")
    return [pack for micro_batch in zip(*plan.packs, strict=True) for pack in micro_batch]


def read(path: Path, *without: str, **beside: Any) -> Any:
    """The module in a file of a clone, without some of what it imports."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, {**{name: MagicMock() for name in without}, **beside, path.stem: module}):
        spec.loader.exec_module(module)
    return module


def by_rank(lengths: list[int], parts: list[list[int]], split: Callable[..., list[list[int]]]) -> Packs:
    """Packs of ranks that plan by themselves, and agree on a number."""
    most = max(len(split([lengths[at] for at in part], BUDGET, 1)) for part in parts)
    found = [split([lengths[at] for at in part], BUDGET, most) for part in parts]
    return [[[part[at] for at in pack] for pack in packs] for part, packs in zip(parts, found, strict=True)]


def in_turn(packs: list[list[int]]) -> Packs:
    """Packs that ranks take in turn."""
    return [packs[rank::RANKS] for rank in range(RANKS)]


def areal(folder: Path) -> tuple[Callable[..., Packs], Callable[..., Packs]]:
    """AReaL: the controller splits the batch evenly, and ranks allocate."""
    theirs = read(folder / "areal/utils/seqpack.py", "areal", "areal.utils")

    def way(split: Callable[..., list[list[int]]]) -> Callable[..., Packs]:
        return lambda lengths: by_rank(lengths, theirs.balanced_greedy_partition(lengths, RANKS), split)

    return way(theirs.ffd_allocate), way(allocate)


def skyrl(folder: Path) -> tuple[Callable[..., Packs], Callable[..., Packs]]:
    """SkyRL: ranks take equal parts in order, and pack; ranks with fewer micro-batches add empty ones."""
    theirs = read(folder / "skyrl/train/dataset/bin_packing.py")

    def way(split: Callable[..., list[list[int]]]) -> Callable[..., Packs]:
        def packs(lengths: list[int]) -> Packs:
            parts = np.arange(len(lengths)).reshape(RANKS, -1).tolist()
            return [[[p[at] for at in pack] for pack in split([lengths[at] for at in p])] for p in parts]

        return packs

    return way(theirs.make_seq_packer("balanced", bin_capacity=BUDGET).pack), way(lambda each: allocate(each, BUDGET))


def nemo_rl(folder: Path) -> tuple[Callable[..., Packs], Callable[..., Packs]]:
    """NeMo-RL: bins for all ranks, which take them in turn."""
    theirs = read(folder / "nemo_rl/data/packing/algorithms.py")
    packer = theirs.get_packer("modified_first_fit_decreasing", BUDGET, False, RANKS, RANKS)
    return lambda lengths: in_turn(packer.pack(lengths)), lambda lengths: in_turn(dealt(lengths, BUDGET, RANKS))


def slime(folder: Path, balance: bool = False) -> tuple[Callable[..., Packs], Callable[..., Packs]]:
    """slime: packs by first fit for all ranks, which take them in turn, or with ``--balance-data`` by cost."""
    balancing = read(folder / "slime/utils/seqlen_balancing.py")
    beside = {"slime": ModuleType("slime"), "slime.utils": ModuleType("slime.utils")}
    theirs = read(
        folder / "slime/utils/dp_schedule.py", "slime.utils.flops_utils",
        **beside, **{"slime.utils.seqlen_balancing": balancing},
    )  # fmt: skip
    args = SimpleNamespace(
        use_dynamic_batch_size=True, max_tokens_per_gpu=BUDGET, balance_data=False, balance_by_flops=False
    )
    mesh = {"dp_size": RANKS, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}

    def own(lengths: list[int]) -> Packs:
        count = len(lengths)
        places, packs, *_ = theirs.build_dp_schedule(
            args, mesh, lengths, global_batch_size=count, rollout_indices=list(range(count))
        )
        return [[[places[rank][at] for at in pack] for pack in packs[rank]] for rank in range(RANKS)]

    own_packing = theirs._pack_step_into_mbs

    def balanced(lengths: list[int]) -> Packs:
        args.balance_data = balance
        theirs._calculate_workloads = lambda each, _: cost_of(np.array(each)).astype(int).tolist()
        return own(lengths)

    def ours(lengths: list[int]) -> Packs:
        args.balance_data = False
        theirs._pack_step_into_mbs = lambda each, *, max_per_bin, **_: dealt(each, max_per_bin, RANKS)
        try:
            return own(lengths)
        finally:
            theirs._pack_step_into_mbs = own_packing

    return balanced, ours


def openrlhf(folder: Path) -> tuple[Callable[..., Packs], Callable[..., Packs]]:
    """OpenRLHF: ranks get long and short samples in turn, and split them into the same number of micro-batches."""
    theirs = read(folder / "openrlhf/utils/seqlen_balancing.py")
    dealing = read(folder / "openrlhf/trainer/ppo_utils/experience.py", "openrlhf", "openrlhf.utils.utils")
    dealing.split_experience_batch, dealing.make_experience_batch = lambda each: [each], list
    args = SimpleNamespace(
        actor=SimpleNamespace(num_nodes=1, num_gpus_per_node=RANKS),
        ds=SimpleNamespace(ring_attn_size=1, tensor_parallel_size=1),
    )

    def own(lengths: list[int], budget: int, least: int) -> list[list[int]]:
        count = max(least, theirs.get_minimum_num_micro_batch_size(lengths, budget, 1, 1))
        packs: list[list[int]] = theirs.get_seqlen_balanced_partitions(lengths, count, equal_size=False)
        return packs

    def way(split: Callable[..., list[list[int]]]) -> Callable[..., Packs]:
        def packs(lengths: list[int]) -> Packs:
            samples = [SimpleNamespace(total_length=length, at=at) for at, length in enumerate(lengths)]
            parts = [[sample.at for sample in part] for part in dealing.balance_experiences(samples, args)]
            return by_rank(lengths, parts, split)

        return packs

    return way(own), way(allocate)


def prime_rl(folder: Path) -> tuple[Callable[..., Packs], Callable[..., Packs]]:
    """prime-rl: bins by first fit for all ranks, dealt by cost."""
    types = read(folder / "src/prime_rl/transports/rollouts/types.py")
    beside = {"prime_rl.transports.rollouts.types": types}
    theirs = read(folder / "src/prime_rl/trainer/batch.py", "prime_rl", "prime_rl.transports", **beside)
    theirs._materialize_bin = lambda made: SimpleNamespace(
        samples=made.samples, sequence_lengths=[len(sample.input_ids) for sample in made.samples]
    )
    own_packing, own_dealing = theirs.packed_samples_into_micro_bs, theirs._distribute_group

    def packing(samples: list[Any], max_seq_len: int, num_train_workers: int, _: Any) -> list[Any]:
        packs = dealt([len(sample.input_ids) for sample in samples], max_seq_len, num_train_workers)
        return [theirs._materialize_bin(SimpleNamespace(samples=[samples[at] for at in pack])) for pack in packs]

    def dealing(group: list[Any], num_train_workers: int, _: Any) -> list[list[Any]]:
        return [group[rank::num_train_workers] for rank in range(num_train_workers)]

    def way(pack: Callable[..., Any], deal: Callable[..., Any]) -> Callable[..., Packs]:
        def packs(lengths: list[int]) -> Packs:
            samples = [
                SimpleNamespace(input_ids=range(length), mm_kwargs=None, routed_experts=None, at=at)
                for at, length in enumerate(lengths)
            ]
            ranks = deal(pack(samples, BUDGET, RANKS, whole), RANKS, whole)
            return [[[sample.at for sample in made.samples] for made in rank] for rank in ranks]

        return packs

    def whole(lengths: Any) -> int:
        return int(cost_of(np.array(lengths)).sum())

    return way(own_packing, own_dealing), way(packing, dealing)


def main() -> None:
    """Print the figures of each framework."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with the clones")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    plan_step(lengths_of(0), budget=BUDGET, dp=RANKS)  # compiles what is compiled
    report: dict[str, dict[str, dict[str, float]]] = {}
    for name, make in (
        ("AReaL", areal), ("SkyRL", skyrl), ("RL", nemo_rl), ("OpenRLHF", openrlhf),
        ("prime-rl", prime_rl), ("slime", slime), ("slime --balance-data", partial(slime, balance=True)),
    ):  # fmt: skip
        ways = dict(zip(("own", "recipe"), make(arguments.folder / name.split()[0]), strict=True))
        for way, split in ways.items():
            found: dict[str, list[float]] = defaultdict(list)
            for step in range(STEPS):
                lengths = lengths_of(step)
                began = time.perf_counter()
                packs = split(lengths)
                seconds = time.perf_counter() - began
                assert sorted(at for rank in packs for pack in rank for at in pack) == list(range(len(lengths)))
                work = cost_of(np.array(lengths))
                costs = [[float(work[pack].sum()) for pack in rank] for rank in packs]
                note(found, costs, seconds)
                found["max_mean"].append(max(map(sum, costs)) * RANKS / sum(map(sum, costs)))
                found["largest"].append(max(sum(lengths[at] for at in pack) for rank in packs for pack in rank))
            report.setdefault(name, {})[way] = {key: float(np.mean(values)) for key, values in found.items()}
    if arguments.json:
        print(json.dumps(report))
        return
    for name, ways_of in report.items():
        for way, figures in ways_of.items():
            print(f"{name:20} {way:8}", "  ".join(f"{key} {value:.3f}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
