"""How much ``joint`` holds back: tokens, groups that a sample waits, and outliers."""

from __future__ import annotations

import numpy as np

from streampack.core.packers.packer import I64

PATIENCE = 64
"""Groups that an outlier waits for others alike, about, where nothing else is said."""
WAITING = 8
"""Groups' worth of outliers that may wait."""


def held_tokens(budget: int, group: int, window: int) -> int:
    """Tokens held at most between two groups, whatever the lengths, in the unit of ``budget``.

    Before the last samples come there are fewer than ``window`` ordinary ones, each at most 3/5 of the budget, or less
    than two groups' tokens of them, and fewer outliers than are too many; then what was missing comes, of any length.
    """
    ordinary = max(window * budget * 3 // 5, 2 * group * budget)
    return ordinary + max(WAITING * group * budget, 2 * ordinary) + max(window, 2 * group + 1) * budget


def max_wait(group: int, patience: int, held: int) -> int:
    """Groups formed without a sample, at most, where ``held`` samples, it included, were held when it had come."""
    return 2 * patience + 2 * -(-held // group)


def num_outliers(lengths: I64, budget: int) -> int:
    """How many of the samples held, of ``lengths`` int64 [n], would wait for others alike."""
    falling = np.sort(lengths)[::-1].astype(np.float64)
    tokens, squares = (np.cumsum(each[::-1])[::-1] for each in (falling, falling * falling))
    within = 5.0 * falling * falling * tokens <= 3.0 * budget * squares
    return int(np.argmax(within)) if within.any() else len(lengths)
