"""Bounds of ``joint``: the tokens in the window, the groups that a sample waits, and the number of outliers."""

from __future__ import annotations

import numpy as np

from streampack.core.packers.packer import I64

PATIENCE = 64
"""Default of ``patience``: groups that an outlier waits for similar outliers, about."""
WAITING = 8
"""Outliers that may wait, as a multiple of a group's tokens."""


def held_tokens(budget: int, group: int, window: int) -> int:
    """Return the most tokens that the window can hold between two groups, for any lengths, in the unit of ``budget``.

    Before the last refill there are fewer than ``window`` ordinary samples, each at most 3/5 of the budget; or they
    hold less than two groups' tokens. There are also fewer outliers than the limit. The refill then adds the missing
    samples, of any length.
    """
    ordinary = max(window * budget * 3 // 5, 2 * group * budget)
    return ordinary + max(WAITING * group * budget, 2 * ordinary) + max(window, 2 * group + 1) * budget


def max_wait(group: int, patience: int, held: int) -> int:
    """Return the most groups that may be formed while one sample waits.

    ``held`` is the number of samples in the window when the sample came, itself included.
    """
    return 2 * patience + 2 * -(-held // group)


def num_outliers(lengths: I64, budget: int) -> int:
    """Return the number of outliers among the window's samples, of ``lengths`` int64 [n]."""
    falling = np.sort(lengths)[::-1].astype(np.float64)
    tokens, squares = (np.cumsum(each[::-1])[::-1] for each in (falling, falling * falling))
    within = 5.0 * falling * falling * tokens <= 3.0 * budget * squares
    return int(np.argmax(within)) if within.any() else len(lengths)
