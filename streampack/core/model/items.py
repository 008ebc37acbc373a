"""Items, the units that a packer packs: a sample, or a group that stays in one pack as if it were one sample.

The samples of a group follow each other in merge order. For each sample but the last, the column ``keep`` marks that
the next sample belongs to the group (``samples.PACK``, ``samples.STEP``). So a group is complete once its last sample
has come. The length of an item is the sum of the slots (aligned tokens) of its samples, which stay adjacent in their
pack. Each piece of a split sample, and each sample of a group kept in a step, is an item of its own.

The module knows rows and positions; neither packs nor steps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.samples import I64, PACK


def num_whole(keeps: NDArray[np.uint8]) -> int:
    """Return the number of samples before a last, incomplete group; ``keeps`` uint8 [n] is the column ``keep``."""
    last = np.flatnonzero(keeps != PACK)
    return int(last[-1]) + 1 if len(last) else 0


def item_sizes(keeps: NDArray[np.uint8], slots: I64, most_tokens: int, most_samples: int | None) -> I64:
    """Return the number of samples in each item, int64 [items].

    If a group does not fit any pack, each of its samples becomes an item. Only a forged snapshot has such a group.

    Args:
        keeps: uint8 [n], the samples' column ``keep``.
        slots: int64 [n], the samples' aligned tokens.
        most_tokens: The most tokens in a pack.
        most_samples: The most samples in a pack; None for no cap.
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
    """Return the positions of the samples of ``items``, one item after another, int64 [m].

    ``sizes`` int64 [k] are the samples of every item; ``items`` int64, indices into ``sizes``.
    """
    if len(items) == 0:
        return np.zeros(0, np.int64)
    counts = sizes[items]
    begins = (np.cumsum(sizes) - sizes)[items]
    positions: I64 = np.arange(int(counts.sum())) + np.repeat(begins - (np.cumsum(counts) - counts), counts)
    return positions
