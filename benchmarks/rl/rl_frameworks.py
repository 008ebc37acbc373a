"""Micro-batches of RL frameworks: how many, and how even, with the framework's own code and with streampack.

    python -m benchmarks.rl.rl_frameworks [--json]

``verl``: 512 rollouts on 8 ranks, at most 16,384 tokens each: verl balances the ranks, and splits each rank's part.
``GRPO``: the same rollouts, in groups of 8 with one prompt, as a generation batch of TRL's GRPOTrainer: 8 micro-batches
with 8 rollouts each on 8 ranks. ``AsyncGRPO``: groups of 8 rollouts on 8 ranks, rows of 16,384 tokens, as they come
from a queue. Costs are those of each framework's own model; for GRPO, those of ``plan_step``, padding included. The
critical path is the sum over micro-batches of the dearest rank's cost; 1.00 is that of equal ranks and no padding.
Times are those of planning alone. Frameworks are verl 0.9.1 and trl 1.16.0, as installed for the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections import defaultdict
from typing import Any

import numpy as np
import torch

from streampack.planning import plan_step

RANKS, BUDGET, SAMPLES, STEPS, MICRO_BATCHES = 8, 16_384, 512, 8, 8


def lengths_of(step: int) -> list[int]:
    """Lengths of the rollouts of a step: a prompt of about 500 tokens, and an answer with a long tail."""
    draw = np.random.default_rng(step)
    answers = np.clip(draw.lognormal(np.log(1500), 0.9, SAMPLES), 16, 15_000)
    lengths = (np.clip(draw.normal(500, 100, SAMPLES), 50, 1000) + answers).clip(max=BUDGET)
    return [int(length) for length in lengths]


def batch_of(lengths: list[int]) -> Any:
    """A batch as verl's workers get it."""
    from tensordict import TensorDict

    ids = torch.nested.as_nested_tensor([torch.ones(n, dtype=torch.long) for n in lengths], layout=torch.jagged)
    return TensorDict({"input_ids": ids}, batch_size=len(lengths))


def path_of(costs: list[list[float]]) -> float:
    """The critical path of ``costs[rank][micro_batch]``, relative to equal ranks."""
    most = max(map(len, costs))
    table = np.array([each + [0.0] * (most - len(each)) for each in costs])
    return float(table.max(axis=0).sum() / (table.sum() / len(costs)))


def verl() -> dict[str, dict[str, float]]:
    """Verl's split of its balanced ranks, ours of the same, and a plan of the whole step."""
    from verl.utils import seqlen_balancing as theirs

    from streampack.integrations import verl as ours

    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for step in (0, *range(STEPS)):  # the first one warms up
        lengths = lengths_of(step)
        work = theirs.calculate_workload(torch.tensor(lengths)).tolist()
        began = time.perf_counter()
        parts = theirs.get_seqlen_balanced_partitions(work, RANKS, equal_size=True)
        dealt_s = time.perf_counter() - began
        for name, split in (("verl", theirs.rearrange_micro_batches), ("adapter", ours.rearrange_micro_batches)):
            began = time.perf_counter()
            least = max(len(split(batch_of([lengths[at] for at in part]), BUDGET)[1]) for part in parts)
            costs = []
            for part in parts:  # all ranks agree on a number
                _, places = split(batch_of([lengths[at] for at in part]), BUDGET, min_num_micro_batch=least)
                costs.append([sum(work[part[at]] for at in each) for each in places])
            note(found[name], costs, dealt_s + (time.perf_counter() - began) / 2)
        began = time.perf_counter()
        plan = plan_step(lengths, budget=BUDGET, dp=RANKS)
        costs = [[sum(work[at] for at in pack) for pack in packs] for packs in plan.packs]
        note(found["plan_step"], costs, time.perf_counter() - began)
    return {name: {key: float(np.mean(values[1:])) for key, values in each.items()} for name, each in found.items()}


def note(found: dict[str, list[float]], costs: list[list[float]], seconds: float) -> None:
    """Add the figures of a step."""
    found["micro_batches"].append(max(map(len, costs)))
    found["critical_path"].append(path_of(costs))
    found["ms"].append(1000 * seconds)


def grpo() -> dict[str, dict[str, float]]:
    """TRL's split of a generation batch, the same split with each micro-batch padded by itself, and ours."""
    from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

    from streampack.integrations.trl_grpo import plan_micro_batches

    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for step in (0, *range(STEPS)):  # the first one warms up
        drawn = np.random.default_rng(step).normal(500, 100, SAMPLES // 8)
        prompts = np.repeat(np.clip(drawn, 50, 1000).astype(int), 8)
        answers = np.maximum(np.array(lengths_of(step)) - 500, 16)
        parts = np.arange(SAMPLES).reshape(RANKS, -1)
        torch.manual_seed(step)
        began = time.perf_counter()
        split: list[list[list[int]]] = []
        for part in parts:
            batch = shuffle_sequence_dict({"number": torch.tensor(part)})
            split.append([each["number"].tolist() for each in split_tensor_dict(batch, MICRO_BATCHES)])
        split_s = time.perf_counter() - began
        began = time.perf_counter()
        plan = plan_micro_batches((prompts + answers).tolist(), MICRO_BATCHES, RANKS)
        plan_s = time.perf_counter() - began
        whole = [[part.tolist()] * MICRO_BATCHES for part in parts]
        for name, ways, padded_to, seconds in (
            ("trl", split, whole, split_s), ("repadded", split, split, split_s),
            ("adapter", plan.packs, plan.packs, plan_s),
        ):  # fmt: skip
            rows = np.array([[len(each) for each in rank] for rank in ways])
            widths = np.array([[prompts[each].max() + answers[each].max() for each in rank] for rank in padded_to])
            costs, tokens = rows * cost_of(widths), rows * widths
            least = cost_of(prompts + answers).sum() / RANKS
            figures = {
                "micro_batches": rows.shape[1], "tokens": tokens.sum(), "largest": tokens.max(),
                "fill": (prompts + answers).sum() / tokens.sum(), "critical_path": costs.max(axis=0).sum() / least,
                "max_mean": costs.sum(axis=1).max() / costs.sum(axis=1).mean(), "ms": 1000 * seconds,
            }  # fmt: skip
            for key, value in figures.items():
                found[name][key].append(float(value))
    return {name: {key: float(np.mean(values[1:])) for key, values in each.items()} for name, each in found.items()}


def cost_of(widths: np.ndarray) -> np.ndarray:
    """Cost of rows of so many tokens, as ``plan_step`` counts it."""
    costs: np.ndarray = 24_576.0 * widths + np.square(widths, dtype=float)
    return costs


def async_grpo() -> dict[str, dict[str, float]]:
    """TRL's batcher and ours, over the same rollouts."""
    from trl.experimental.async_grpo.async_grpo_trainer import TokenBudgetBatcher

    from streampack.integrations.trl import WindowBatcher

    draw, samples = np.random.default_rng(0), list[dict[str, Any]]()
    for step in range(2):
        for group, answers in enumerate(np.array(lengths_of(step)).reshape(-1, 8)):
            prompt = draw.integers(1, 50_000, 500)
            for size in answers:
                ids = torch.from_numpy(np.concatenate([prompt, draw.integers(1, 50_000, max(size - 500, 1))]))
                samples.append({
                    "input_ids": ids, "completion_mask": (torch.arange(len(ids)) >= 500).long(),
                    "group_id": (step, group),
                })  # fmt: skip
    found = {}
    for name, kind in (("trl", TokenBudgetBatcher), ("adapter", WindowBatcher)):
        began = time.perf_counter()
        micro_batches = list(kind(samples, RANKS, BUDGET, defaultdict(list)))
        seconds = time.perf_counter() - began
        costs = [[float(row.load) for row in ranks] for ranks in zip(*micro_batches, strict=True)]
        tokens = sum(len(row.tokens) for rows in micro_batches for row in rows)
        found[name] = {
            "micro_batches": float(len(micro_batches)), "critical_path": path_of(costs),
            "fill": tokens / (len(micro_batches) * RANKS * BUDGET), "ms": 1000 * seconds,
            "rollouts": float(sum(len(row.samples) for rows in micro_batches for row in rows)),
        }  # fmt: skip
    return found


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {"verl": verl(), "GRPO": grpo(), "AsyncGRPO": async_grpo()}
    if arguments.json:
        print(json.dumps(found))
        return
    for framework, ways in found.items():
        for name, figures in ways.items():
            print(f"{framework:10} {name:10}", "  ".join(f"{key} {value:.3f}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
