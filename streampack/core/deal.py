"""DEAL: a step's packs to ranks, a function of (step, mesh) and of nothing else.

Ranks run in lock step, so the packs that run at the same moment, those of one micro-batch index,
should cost the same; a rank's total comes second. Packs are sorted by cost, ties by number, and
each ``dp`` consecutive ones share an index; within it the dearest goes to the rank with the
least load so far. DEAL permutes and pads with empty packs; it never moves a sample between steps.
"""

from __future__ import annotations

import numpy as np

from streampack.core.samples import I64


def deal(costs: I64, dp: int, balance: str) -> I64:
    """Pack numbers by [micro_batch, rank], int64 [G / dp, dp].

    ``costs`` int64 [G] is each pack's work; ``balance`` is ``none`` (packs in order) or ``deal``.
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
    load = np.zeros(dp, np.int64)
    for micro_batch, packs in enumerate(order):
        ranks = np.argsort(load, kind="stable")
        dealt[micro_batch, ranks] = packs
        load[ranks] += costs[packs]
    return dealt
