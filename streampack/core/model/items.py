"""Items: what a packer packs. One is a sample, or a group that is kept in one pack, as if it were one sample.

A group is told by its samples, which follow each other in merge order: each but its last says that the next one
belongs to it (``samples.PACK``, ``samples.STEP``). So a group is known to be whole once its last sample is there,
whatever comes next. An item is as long as the slots of its samples together, and they stay next to each other in their
pack; the pieces of a split sample, and samples kept in a step, are items of their own.

Knows rows and positions; neither packs nor steps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.samples import I64, PACK


def num_whole(keeps: NDArray[np.uint8]) -> int:
    """How many of these samples, uint8 [n], come before a group that has more to come."""
    last = np.flatnonzero(keeps != PACK)
    return int(last[-1]) + 1 if len(last) else 0


def item_sizes(keeps: NDArray[np.uint8], slots: I64, most_tokens: int, most_samples: int | None) -> I64:
    """Samples of each item, int64 [items]; of samples that say ``keeps``, uint8 [n], and take ``slots``, int64 [n].

    What no pack holds together, more than ``most_tokens`` or ``most_samples``, is no group: only a snapshot that was
    made up has such, and its samples are items of their own.
    """
    if not keeps.any():
        return np.ones(len(keeps), np.int64)
    ends = keeps != PACK
    ends[-1:] = True
    sizes = np.diff(np.flatnonzero(ends), prepend=-1)
    tokens = np.add.reduceat(slots, np.cumsum(sizes) - sizes)
    wrong = (tokens > most_tokens) | (sizes > (most_samples or len(keeps)))
    if wrong.any():
        ends |= np.repeat(wrong, sizes)
        sizes = np.diff(np.flatnonzero(ends), prepend=-1)
    return sizes


def samples_of(sizes: I64, items: I64) -> I64:
    """Positions, int64 [m], of the samples of ``items``, one after another; ``sizes`` are those of all items."""
    if len(items) == 0:
        return np.zeros(0, np.int64)
    counts = sizes[items]
    begins = (np.cumsum(sizes) - sizes)[items]
    found: I64 = np.arange(int(counts.sum())) + np.repeat(begins - (np.cumsum(counts) - counts), counts)
    return found
