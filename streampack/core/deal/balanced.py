"""Packs of one step that take equally long: samples are assigned to ranks and micro-batches by their cost.

Ranks wait for each other at each micro-batch, so a step takes as long as its *critical path*. That is the cost of the
costliest pack of each micro-batch, summed over the micro-batches. If packs are filled first and dealt afterwards,
samples cannot move to make them alike. Here packs are formed by cost:

- *By rank*: samples go to ranks by largest differencing, once with equal numbers of samples and once with any numbers.
  Then each rank's samples go to its packs by largest differencing again (``karmarkar_karp``). If that breaks the
  budget, they go costliest first, each to the rank's cheapest pack with room ("longest processing time": Graham, SIAM
  J. Appl. Math. 17, 1969). The costliest packs of all ranks share a micro-batch, so do the second costliest, and so on.
  Both results are leveled, and the one with the shorter critical path is taken. Any sizes are allowed only if the
  costliest rank gets no more work.
- *By cost*: samples go costliest first, each to the cheapest pack of all with room, and packs of similar cost share a
  micro-batch. This has room where a rank has too many tokens, and long samples need not be spread over all ranks.
- Then packs are *leveled* by exchanges of samples. A sample of the costliest pack of a micro-batch goes to any other
  pack, and a cheaper sample, or none, comes back. The exchange that shortens the critical path most is made. Among
  equal ones, the one that leaves both packs furthest below the costliest of their micro-batches is made. Leveling ends
  when no exchange helps, or after ``LOOKS`` pairs of samples for each sample. In packs by rank no rank's work grows
  beyond that of the costliest rank, so ranks stay as alike as differencing made them.

All values are integers, and ties go to the longer sample, then to the first: packs are a function of the samples. The
argument ``work`` int64 [n] is each sample's cost. ``sizes`` int64 [k, n] are its padded tokens, and what it has of
other units that a pack has limits for, such as patches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from streampack.core.deal import balanced_kernels
from streampack.core.deal.deal import MOST, deal
from streampack.core.model.samples import I64

LOOKS = 128
"""Pairs of samples that leveling looks at, for each sample."""
MAX_DIFFERENCED = 2**16
"""Differencing is used up to this product of a rank's samples and packs: its time and memory grow with the product."""
MAX_PLACED = 2**22
"""Samples are placed by cost up to this product of samples and packs, because placing a sample looks at each pack."""
MAX_TWICE = 2**7
"""The most samples of a step for which packs by rank are formed twice: few samples leave more to chance."""
MAX_SAMPLES = 2**13
"""The most samples of a step that is formed by cost. With more, full packs of a sorted step cost alike."""


class Bounds(NamedTuple):
    """The number of data-parallel ranks, and the most of each unit (``most`` int64 [k]) and samples of a pack."""

    dp: int
    most: I64
    cap: int


class BalancedPacks(NamedTuple):
    """An assignment of samples to packs: ``where`` int64 [n] is the pack of each sample.

    The m-th pack of rank r is number m * dp + r; each rank has ``rows`` packs.
    """

    where: I64
    rows: int


def balanced_packs(
    work: I64, sizes: I64, bounds: Bounds, fewest: int, full: Callable[[], list[list[int]]]
) -> list[list[int]]:
    """Return the samples of each pack of a step, with a short critical path.

    The function ``full`` packs the same samples as full as possible. The step gets ``fewest`` packs, a multiple of
    dp. If the samples do not fit, it gets as many packs as ``full`` returns. Packs by rank are returned if their
    critical path is at most that of the full packs. Otherwise the function compares the full packs with packs by cost,
    and levels those with the shorter path.
    """
    order = np.lexsort((-sizes[0], -work))
    work, sizes = work[order], np.ascontiguousarray(sizes[:, order])
    filled = _filled(full(), order, work, bounds)
    balanced = _by_rank(work, sizes, bounds, fewest // bounds.dp)
    if balanced is None and filled.rows * bounds.dp > fewest:
        balanced = _by_rank(work, sizes, bounds, filled.rows)
    if balanced is None or _path(balanced, work, bounds) > _path(filled, work, bounds):
        by_cost = _by_cost(work, sizes, bounds, fewest // bounds.dp)
        start = min((packs for packs in (by_cost, filled) if packs), key=lambda packs: _path(packs, work, bounds))
        balanced = _leveled(start, work, sizes, bounds, MOST)
    by_sample = np.empty_like(order)
    by_sample[order] = balanced.where
    packs: list[list[int]] = [[] for _ in range(balanced.rows * bounds.dp)]
    for sample, pack in enumerate(by_sample.tolist()):
        packs[pack].append(sample)
    return packs


# Below, samples are sorted, costliest first.


def _by_rank(work: I64, sizes: I64, bounds: Bounds, rows: int) -> BalancedPacks | None:
    """Deal samples to ranks, then to packs; return the leveled packs, or None if a rank's samples do not fit."""
    dp = bounds.dp
    rank_of = dp - 1 - balanced_kernels.difference(work, dp, dp)
    most = int(_sums(rank_of, work, dp).max())
    packs = _within_ranks(rank_of, work, sizes, bounds, rows, most)
    if len(work) > MAX_TWICE:
        return packs
    rank_of = dp - 1 - balanced_kernels.difference(work, dp, 1)
    least = int(_sums(rank_of, work, dp).max())
    if least > most or _sums(rank_of, 1, dp).min() < rows:
        return packs
    other = _within_ranks(rank_of, work, sizes, bounds, rows, least)
    if packs is None or (other is not None and _path(other, work, bounds) < _path(packs, work, bounds)):
        return other
    return packs


def _within_ranks(rank_of: I64, work: I64, sizes: I64, bounds: Bounds, rows: int, most: int) -> BalancedPacks | None:
    """Return leveled packs of samples dealt to the ranks ``rank_of``, int64 [n]; None if they do not fit.

    Leveling gives no rank more work than ``most``.
    """
    dp, cap = bounds.dp, bounds.cap
    if len(work) * rows > MAX_PLACED or not _fit(rank_of, sizes, dp, rows * bounds.most):
        return None
    where, fits = np.empty(0, np.int64), False
    if -(-len(work) // dp) * rows <= MAX_DIFFERENCED:
        where = balanced_kernels.difference_within(work, rank_of, dp, rows)
        fits = _fit(where, sizes, rows * dp, bounds.most) and bool(_sums(where, 1, rows * dp).max() <= cap)
    if not fits:
        where, fits = balanced_kernels.place(work, sizes, rank_of, dp, rows, bounds.most, cap)
    return _leveled(BalancedPacks(where, rows), work, sizes, bounds, most) if fits else None


def _by_cost(work: I64, sizes: I64, bounds: Bounds, rows: int) -> BalancedPacks | None:
    """Place samples in all packs by cost, without leveling; None if they do not fit."""
    dp, most, cap = bounds
    if len(work) * rows * dp > MAX_PLACED:
        return None
    where, fits = balanced_kernels.place(work, sizes, np.full(len(work), -1), dp, rows, most, cap)
    return _in_rows(BalancedPacks(where, rows), work, bounds, MOST) if fits else None


def _filled(packs: list[list[int]], order: I64, work: I64, bounds: Bounds) -> BalancedPacks:
    """Return full packs as ``BalancedPacks``; ``order`` int64 [n] sorts the samples, costliest first."""
    where = np.empty_like(order)
    for number, pack in enumerate(packs):
        where[pack] = number
    return _in_rows(BalancedPacks(where[order], len(packs) // bounds.dp), work, bounds, MOST)


def _leveled(packs: BalancedPacks, work: I64, sizes: I64, bounds: Bounds, most: int) -> BalancedPacks:
    """Exchange samples between packs to level their cost; ``most`` bounds the work of a rank."""
    dp, limits, cap = bounds
    where, rows = _in_rows(packs, work, bounds, most)
    free = np.zeros((len(sizes), rows * dp), np.int64)  # a place in each pack
    where = np.append(where, np.arange(rows * dp))
    balanced_kernels.level(
        np.append(work, free[0]), np.hstack([sizes, free]), where, dp, rows, limits, cap, most, LOOKS * len(work)
    )
    return _in_rows(BalancedPacks(where[: len(work)], rows), work, bounds, most)


def _in_rows(packs: BalancedPacks, work: I64, bounds: Bounds, most: int) -> BalancedPacks:
    """Renumber packs so that the packs of a micro-batch cost alike, the most costly first.

    Packs stay on their rank, unless ``most`` is ``MOST``: then a rank's work is not bounded.
    """
    where, rows = packs
    if most != MOST:
        return BalancedPacks(balanced_kernels.sort_rows(where, work, bounds.dp, rows), rows)
    dealt = deal(_sums(where, work, rows * bounds.dp), bounds.dp, "deal")
    number = np.empty(rows * bounds.dp, np.int64)
    number[dealt.ravel()] = np.arange(rows * bounds.dp)
    return BalancedPacks(number[where], rows)


def _path(packs: BalancedPacks, work: I64, bounds: Bounds) -> int:
    """Return the critical path of packs: the largest cost of each micro-batch, summed."""
    return int(_sums(packs.where, work, packs.rows * bounds.dp).reshape(packs.rows, -1).max(axis=1).sum())


def _fit(where: I64, sizes: I64, count: int, most: I64) -> bool:
    """Return whether the sums of ``sizes``, int64 [k, n], by number ``where`` are at most ``most``, int64 [k]."""
    return all(int(_sums(where, size, count).max()) <= limit for size, limit in zip(sizes, most.tolist(), strict=True))


def _sums(where: I64, values: I64 | int, count: int) -> I64:
    """Return the sums of ``values`` by pack (or rank) number ``where``, int64 [count]."""
    sums = np.zeros(count, np.int64)
    np.add.at(sums, where, values)
    return sums


def warm_up() -> None:
    """Compile the kernels, or load them from the disk, by forming packs of a few samples."""
    work, sizes = np.arange(8, 0, -1), np.ones((1, 8), np.int64)
    for most, cap in ((4, 4), (8, 1)):
        bounds = Bounds(2, np.array([most]), cap)
        balanced_packs(work, sizes, bounds, 2, lambda: [[0, 1, 2, 3], [4, 5, 6, 7]])
