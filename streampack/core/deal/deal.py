"""The assignment of a step's packs to ranks by cost: a function of (step, mesh) and of nothing else.

Ranks run in lock step, so the packs of one micro-batch index, which run at the same moment, should cost the same. The
ranks' totals come second. Packs are sorted by cost, ties by number, and each ``dp`` consecutive packs share an index.
No other assignment has a smaller sum of the costliest packs of all indices. The totals decide which rank gets which
pack:

- ``deal``: within an index the costliest pack goes to the rank with the least load so far;
- ``karmarkar_karp``: by largest differencing with equal sizes, whole indices at a time. This leaves totals more alike
  (see ``karmarkar_karp``; ROLL and verl balance a batch so).

In batch mode the packs of a step may not be a multiple of dp. Then ``split_dearest`` splits the costliest pack in two,
again and again. It adds empty packs only when no pack can be split, because a rank runs a whole forward pass for an
empty pack. A pack's parts fit its budget. ``arrange`` sets the order of the micro-batches, the same on all ranks. DEAL
permutes, splits and pads with empty packs; it never moves a sample to another step.

512 ranks x 8 micro-batches take 0.2 ms with ``deal`` and 0.3 ms with ``karmarkar_karp``
(``benchmarks/packing/balance.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from streampack.core.model.samples import I64
from streampack.core.packers.blocks.karmarkar_karp import difference_columns, karmarkar_karp

MOST = 1 << 62
"""A number above any cost; as a bound, no bound."""

BALANCES = ("none", "deal", "karmarkar_karp")
ORDERS = ("packer", "largest_first", "small_at_edges")


def deal(costs: I64, dp: int, balance: str) -> I64:
    """Deal packs to ranks: return the pack numbers by [micro_batch, rank], int64 [packs / dp, dp].

    Args:
        costs: int64 [packs], the cost of each pack.
        dp: Number of data-parallel ranks.
        balance: ``none`` (packs in order), ``deal`` or ``karmarkar_karp``. ``joint`` deals as ``deal`` does, because
            FORM has already made its packs cost the same.

    Raises:
        ValueError: dp does not divide the number of packs.

    >>> deal(np.array([9, 1, 8, 2]), 2, "deal").tolist()
    [[0, 2], [1, 3]]
    """
    count = len(costs)
    if dp < 1 or count % dp:
        raise ValueError(f"got dp={dp} for a step of {count} packs, expected a divisor of {count}")
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
    """Return the number of packs that ``packs`` packs become when they are dealt to ``dp`` ranks.

    It is a multiple of dp * micro_batch_multiple, and at least dp * min_micro_batches.

    >>> num_packs(9, 4, micro_batch_multiple=2)
    16
    """
    multiple = dp * micro_batch_multiple
    return -(-max(packs, dp * min_micro_batches) // multiple) * multiple


def split_dearest(packs: Sequence[Sequence[int]], costs: I64, count: int) -> list[list[int]]:
    """Split the costliest pack in two until there are ``count`` packs; add empty packs if none can be split.

    ``packs`` hold positions in ``costs`` int64 [n], the cost of each sample. Largest differencing halves a pack, and
    samples keep their order. The costlier half keeps the pack's place, the other goes to the end. Ties go to the pack
    that comes first. No pack becomes empty, and none grows. Raises ValueError if there are more packs than ``count``.

    >>> split_dearest([[0, 1, 2], [3]], np.array([5, 3, 2, 4]), 4)
    [[0], [3], [1], [2]]
    """
    if len(packs) > count:
        raise ValueError(f"got {len(packs)} packs, expected at most {count}, because packs are split but never merged")
    parts = [list(pack) for pack in packs]
    work: list[int] = costs.tolist()
    dearest = [(-sum(work[i] for i in pack), number) for number, pack in enumerate(parts) if len(pack) > 1]
    heapify(dearest)
    while len(parts) < count and dearest:
        _, number = heappop(dearest)
        pack = parts[number]
        halves = karmarkar_karp([work[i] for i in pack], 2)
        cheap, dear = ([pack[i] for i in half] for half in halves)
        parts[number] = dear
        parts.append(cheap)
        for place in (number, len(parts) - 1):
            if len(parts[place]) > 1:
                heappush(dearest, (-sum(work[i] for i in parts[place]), place))
    return parts + [[] for _ in range(count - len(parts))]


def arrange(dealt: I64, costs: I64, order: str) -> I64:
    """Return ``dealt`` (int64 [m, dp]) with its rows, the micro-batches, in another ``order``.

    ``packer`` orders by the first pack of each row. ``largest_first`` orders by the costliest pack of each, so that
    memory is claimed once. ``small_at_edges`` puts the costliest in the middle, where a pipeline is full (ROLL, verl).
    Whole rows move, so ranks stay in lock step; ``costs`` int64 [packs].

    >>> arrange(np.array([[0], [1], [2], [3], [4]]), np.array([8, 7, 6, 5, 4]), "small_at_edges").ravel().tolist()
    [4, 2, 0, 1, 3]
    """
    if order == "packer":
        return dealt[np.argsort(dealt.min(axis=1), kind="stable")]
    by_cost = np.argsort(-costs[dealt].max(axis=1), kind="stable")
    if order == "small_at_edges":
        by_cost = np.concatenate([by_cost[::2][::-1], by_cost[1::2]])
    return dealt[by_cost]
