"""Packs formed by cost: as good as other systems' partitions, never worse than full packs, the same with and without
numba.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streampack.core.deal import balanced_kernels
from streampack.core.deal.balanced import LOOKS, MAX_SAMPLES
from streampack.core.deal.balanced_kernels import (
    best_by_arrays,
    best_exchange,
    difference,
    difference_by_lists,
    level,
)
from streampack.core.deal.deal import MOST
from streampack.core.model.samples import I64
from streampack.core.packers.blocks.karmarkar_karp import karmarkar_karp
from streampack.planning import StepPlan, plan_step

# What the partitions of verl and ROLL cost, from their own code at the commits that the file names. No code of theirs
# is here.
PEERS = json.loads((Path(__file__).parent / "peer_partitions.json").read_text())
BATCHES = [f"{b['lengths']}-{b['samples']}-dp{b['dp']}-{b['budget']}-{b['seed']}" for b in PEERS["batches"]]


def lengths_of(batch: dict[str, Any]) -> I64:
    kind, count, budget = batch["lengths"], batch["samples"], batch["budget"]
    draws = np.random.default_rng(batch["seed"])
    if kind == "lognormal":
        drawn = draws.lognormal(6.5, 1.2, count)
    elif kind == "bimodal":
        is_long = draws.random(count) < 0.15
        long, short = (
            draws.normal(0.6 * budget, 0.15 * budget, count),
            draws.normal(0.04 * budget, 0.02 * budget, count),
        )
        drawn = np.where(is_long, long, short)
    else:
        drawn = 16.0 * draws.zipf(1.4, count).clip(max=10**7)
    lengths: I64 = drawn.astype(np.int64).clip(1, budget)
    assert zlib.crc32(lengths.astype("<i8").tobytes()) == batch["crc32"], "not the lengths that were recorded"
    return lengths


def critical_path(plan: StepPlan) -> int:
    return int(plan.costs.max(axis=1).sum())


def dearest_rank(plan: StepPlan) -> int:
    return int(plan.costs.sum(axis=0).max())


@pytest.mark.parametrize("batch", PEERS["batches"], ids=BATCHES)
def test_the_default_is_as_good_as_each_peer_that_keeps_the_budget(batch: dict[str, Any]) -> None:
    lengths, budget = lengths_of(batch), batch["budget"]
    for peer, align in (("verl", 1), ("roll_load_balance", 16), ("roll_dynamic_batching", 16)):
        plan = plan_step(lengths, budget, batch["dp"], align=align)
        slots = -(-lengths // align) * align
        assert max(int(slots[pack].sum()) for rank in plan.packs for pack in rank) <= budget
        micro_batches, path, rank, keeps_budget = batch[peer]
        if not keeps_budget:
            continue
        assert critical_path(plan) <= path, f"{peer}: {critical_path(plan) / path:.5f} of its critical path"
        if plan.num_micro_batches == micro_batches:
            assert dearest_rank(plan) <= rank, f"{peer}: {dearest_rank(plan) / rank:.6f} of its dearest rank"
        else:
            assert plan.num_micro_batches < micro_batches


def test_the_peers_keep_the_budget_in_as_many_batches_as_make_the_comparison_worth_something() -> None:
    for peer in ("verl", "roll_load_balance", "roll_dynamic_batching"):
        assert sum(batch[peer][3] for batch in PEERS["batches"]) >= 20, peer


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], dict[str, Any]]:
    budget = draw(st.integers(4, 64))
    lengths = draw(st.lists(st.integers(1, budget) | st.integers(1, 4), max_size=60))
    options: dict[str, Any] = {"budget": budget, "dp": draw(st.integers(2, 6)), "a": draw(st.integers(0, 40))}
    options |= {"min_micro_batches": draw(st.integers(1, 3))}
    if draw(st.booleans()):
        options["max_samples_per_pack"] = draw(st.integers(1, 6))
    return lengths, options


@given(steps())
@example(([1] * 13 + [12, 19, 22, 33], {"budget": 48, "dp": 2, "a": 35, "min_micro_batches": 1}))
def test_the_critical_path_is_never_longer_than_that_of_full_packs(step: tuple[list[int], dict[str, Any]]) -> None:
    lengths, options = step
    plan, full = plan_step(lengths, **options), plan_step(lengths, **options, balance="deal")
    assert critical_path(plan) <= critical_path(full)
    assert plan.num_micro_batches <= full.num_micro_batches
    assert sorted(plan.order().tolist()) == list(range(len(lengths)))
    for pack in (pack for rank in plan.packs for pack in rank):
        assert sum(lengths[i] for i in pack) <= options["budget"]
        assert len(pack) <= options.get("max_samples_per_pack", len(lengths))
    empty = sum(not pack for rank in plan.packs for pack in rank)
    assert empty == max(0, plan.num_micro_batches * options["dp"] - len(lengths))


@given(steps())
def test_the_plan_is_the_same_without_numba(step: tuple[list[int], dict[str, Any]]) -> None:
    lengths, options = step
    expected = plan_step(lengths, **options).packs  # compiled
    with pytest.MonkeyPatch.context() as patch:
        for name in ("place", "level", "difference_within", "sort_rows"):
            kernel = getattr(balanced_kernels, name)
            patch.setattr(balanced_kernels, name, getattr(kernel, "py_func", kernel))
        patch.setattr(balanced_kernels, "difference", difference_by_lists)
        patch.setattr(balanced_kernels, "best_exchange", best_by_arrays)
        assert plan_step(lengths, **options).packs == expected


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 9), st.booleans())
def test_differencing_by_arrays_is_karmarkar_karp(costs: list[int], parts: int, equal_sizes: bool) -> None:
    costs = sorted(costs, reverse=True)
    found = difference.dispatcher(np.array(costs, np.int64), parts, parts if equal_sizes else 1)
    packs = karmarkar_karp(costs, parts, equal_sizes=equal_sizes)
    assert [np.flatnonzero(found == part).tolist() for part in range(parts)] == packs


sizes = st.lists(st.integers(0, 9), min_size=4, max_size=4).map(lambda drawn: np.array(drawn, np.int64))


@given(st.lists(st.integers(1, 9), min_size=2, max_size=12), st.integers(0, 9), sizes, sizes, sizes, st.data())
def test_the_best_exchange_is_the_same_by_loops_and_by_arrays(
    lengths: list[int], gap: int, spare: I64, room: I64, slack: I64, data: st.DataObject
) -> None:
    slots = np.array(sorted(lengths, reverse=True), np.int64)
    mine = data.draw(st.lists(st.sampled_from(range(len(slots))), unique=True, max_size=len(slots) - 1).map(sorted))
    others = np.array([i for i in range(len(slots)) if i not in mine], np.int64)
    theirs = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(others), max_size=len(others))), np.int64)
    halves = np.where(np.arange(4) < 2, 9 * slack, MOST)
    units = data.draw(st.integers(1, 2))  # tokens, and patches, of which a short sample may have many
    given_all = (
        slots * (3 + slots),
        np.ascontiguousarray(np.stack([slots, slots[::-1]])[:units]),
        np.array(mine, np.int64),
        others,
        theirs,
        9 * spare,
        np.ascontiguousarray(np.stack([room, room[::-1]])[:units]),
        np.ascontiguousarray(spare[:units]),
        9 * slack,
        halves,
        gap,
    )
    assert best_exchange.dispatcher(*given_all) == best_by_arrays(*given_all)


def test_leveling_looks_at_no_more_pairs_than_it_may() -> None:
    work = np.array([9, 5, 4, 1, 0, 0], np.int64)
    where = np.array([0, 0, 1, 1, 0, 1], np.int64)
    most = np.array([99], np.int64)
    level(work, work[np.newaxis], where, 2, 1, most, 99, MOST, 0)
    assert where.tolist() == [0, 0, 1, 1, 0, 1]
    level(work, work[np.newaxis], where, 2, 1, most, 99, MOST, LOOKS * 4)
    assert where.tolist() == [1, 0, 0, 1, 0, 1], "9 + 1 and 5 + 4"


def test_steps_of_very_many_samples_are_dealt_as_full_packs() -> None:
    lengths = [3, 5] * (MAX_SAMPLES // 2) + [1]
    assert plan_step(lengths, 8, 2).packs == plan_step(lengths, 8, 2, balance="deal").packs
