"""DEAL: a step's packs to ranks, a function of (step, mesh) and of nothing else.

Ranks run in lock step, so the packs that run at the same moment, those of one micro-batch index,
should cost the same; a rank's total comes second. Packs are sorted by cost, ties by number, and
each ``dp`` consecutive ones share an index: no other way to deal them has a smaller sum of the
dearest of each index. Which rank has which is decided by the totals:

- ``deal``: within an index the dearest goes to the rank with the least load so far;
- ``karmarkar_karp``: by largest differencing with equal sizes, whole indices at a time, which leaves
  totals more alike (see ``karmarkar_karp``; ROLL's and verl's balancing of a batch).

Where the packs of a step are not a multiple of dp (batch mode), ``split_dearest`` splits the dearest in
two until they are, and only then adds empty ones, since an empty pack costs a whole forward; a
pack's parts fit its budget. ``arrange`` sets the order of the micro-batches, the same on all ranks.
DEAL permutes, splits and pads with empty packs; it never moves a sample between steps.

512 ranks x 8 micro-batches take 0.2 ms by ``deal`` and 0.3 ms by ``karmarkar_karp``
(``benchmarks/balance.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from streampack.core.model.samples import I64
from streampack.core.packers.blocks.karmarkar_karp import difference_columns, karmarkar_karp

MOST = 1 << 62
"""More than any cost."""

BALANCES = ("none", "deal", "karmarkar_karp")
ORDERS = ("packer", "largest_first", "small_at_edges")


def deal(costs: I64, dp: int, balance: str) -> I64:
    """Pack numbers by [micro_batch, rank], int64 [G / dp, dp].

    ``costs`` int64 [G] is each pack's work; ``balance`` is ``none`` (packs in order), ``deal`` or ``karmarkar_karp``;
    ``joint`` packs, which FORM has made alike, are dealt as by ``deal``.
    Raises ValueError if dp does not divide the packs of the step.

    >>> deal(np.array([9, 1, 8, 2]), 2, "deal").tolist()
    [[0, 2], [1, 3]]
    """
    count = len(costs)
    if dp < 1 or count % dp:
        raise ValueError(f"got dp={dp} and a step of {count} packs, expected dp to divide it")
    if balance == "none":
        return np.arange(count, dtype=np.int64).reshape(-1, dp)
    order = np.argsort(-costs, kind="stable").reshape(-1, dp)
    if dp == 1:
        return order
    dealt = np.empty_like(order)
    if balance == "karmarkar_karp":
        np.put_along_axis(dealt, difference_columns(costs[order]), order, axis=1)
        return dealt
    load = np.zeros(dp, np.int64)
    for micro_batch, packs in enumerate(order):
        ranks = np.argsort(load, kind="stable")
        dealt[micro_batch, ranks] = packs
        load[ranks] += costs[packs]
    return dealt


def num_packs(packs: int, dp: int, micro_batch_multiple: int = 1, min_micro_batches: int = 1) -> int:
    """How many packs ``packs`` are dealt as: a multiple of dp * micro_batch_multiple, at least dp * min_micro_batches.

    >>> num_packs(9, 4, micro_batch_multiple=2)
    16
    """
    multiple = dp * micro_batch_multiple
    return -(-max(packs, dp * min_micro_batches) // multiple) * multiple


def split_dearest(packs: Sequence[Sequence[int]], costs: I64, count: int) -> list[list[int]]:
    """``count`` packs of the same samples: the dearest is split in two as long as that can be, then empty ones follow.

    ``packs`` hold positions in ``costs`` int64 [n], each sample's work. A pack's samples are divided by largest
    differencing, in their order; the dearer half keeps the place, the other goes to the end. Ties: the pack that
    comes first. No pack becomes empty, and none grows. Raises ValueError where there are more packs than ``count``.

    >>> split_dearest([[0, 1, 2], [3]], np.array([5, 3, 2, 4]), 4)
    [[0], [3], [1], [2]]
    """
    if len(packs) > count:
        raise ValueError(f"got {len(packs)} packs, expected {count} at most: samples would have to move between packs")
    found = [list(pack) for pack in packs]
    work: list[int] = costs.tolist()
    dearest = [(-sum(work[i] for i in pack), number) for number, pack in enumerate(found) if len(pack) > 1]
    heapify(dearest)
    while len(found) < count and dearest:
        _, number = heappop(dearest)
        pack = found[number]
        halves = karmarkar_karp([work[i] for i in pack], 2)
        cheap, dear = ([pack[i] for i in half] for half in halves)
        found[number] = dear
        found.append(cheap)
        for place in (number, len(found) - 1):
            if len(found[place]) > 1:
                heappush(dearest, (-sum(work[i] for i in found[place]), place))
    return found + [[] for _ in range(count - len(found))]


def arrange(dealt: I64, costs: I64, order: str) -> I64:
    """The micro-batches of ``dealt`` (int64 [m, dp]) in another order, whole rows, so that ranks stay in lock step.

    ``packer``: as their first packs were formed. ``largest_first``: by the dearest pack of each, so that memory is
    claimed once. ``small_at_edges``: the dearest in the middle, where a pipeline is full (ROLL, verl).

    >>> arrange(np.array([[0], [1], [2], [3], [4]]), np.array([8, 7, 6, 5, 4]), "small_at_edges").ravel().tolist()
    [4, 2, 0, 1, 3]
    """
    if order == "packer":
        return dealt[np.argsort(dealt.min(axis=1), kind="stable")]
    by_cost = np.argsort(-costs[dealt].max(axis=1), kind="stable")
    if order == "small_at_edges":
        by_cost = np.concatenate([by_cost[::2][::-1], by_cost[1::2]])
    return dealt[by_cost]
