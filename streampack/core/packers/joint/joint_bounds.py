"""Bounds of ``joint``: tokens in the window, groups that a sample waits, work of a sample, and number of outliers."""

from __future__ import annotations

import numpy as np

from streampack.core.packers.packer import I64

MAX_BUDGET = 2**24
"""Exclusive upper limit of the budget, so that sums of squares stay within 64 bits."""
MAX_MEDIA = 2**32
"""Most work of media that counts for each token of a sample; sums over 2**30 tokens stay within 64 bits."""
PATIENCE = 64
"""Default of ``patience``: groups that an outlier waits for similar outliers, about."""
WAITING = 8
"""Outliers that may wait, as a multiple of a group's tokens."""


def held_tokens(budget: int, group: int, window: int, media: bool = False) -> int:
    """Return the most tokens that the window can hold between two groups, for any lengths, in the unit of ``budget``.

    Before the last refill there are fewer than ``window`` ordinary samples, or they hold less than two groups' tokens.
    Each has at most 3/5 of the budget; with ``media``, at most the budget. There are also fewer outliers than the
    limit. The refill then adds the missing samples, of any length.
    """
    ordinary = max(window * budget if media else window * budget * 3 // 5, 2 * group * budget)
    return ordinary + max(WAITING * group * budget, 2 * ordinary) + max(window, 2 * group + 1) * budget


def max_wait(group: int, patience: int, held: int) -> int:
    """Return the most groups that may be formed while one sample waits.

    ``held`` is the number of samples in the window when the sample came, itself included.
    """
    return 2 * patience + 2 * -(-held // group)


def work_of(lengths: I64, media: I64 | None) -> I64:
    """Return the work of each sample, int64 [n]: its length squared, plus the work of its ``media``.

    The work of media counts up to ``MAX_MEDIA`` for each token of the sample.
    """
    work: I64 = lengths * lengths
    return work if media is None else work + np.minimum(media, lengths * MAX_MEDIA)


def num_outliers(lengths: I64, budget: int, media: I64 | None = None) -> int:
    """Return the number of outliers among the window's samples, of ``lengths`` and ``media`` int64 [n]."""
    work = work_of(lengths, media)
    falling = np.argsort(-work, kind="stable")
    tokens, sums = (np.cumsum(values[falling][::-1].astype(np.float64))[::-1] for values in (lengths, work))
    within = 5.0 * work[falling] * tokens <= 3.0 * budget * sums
    return int(np.argmax(within)) if within.any() else len(lengths)
