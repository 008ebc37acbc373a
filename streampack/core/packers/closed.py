"""A closed set of packs: how many there must be, and the way back to its samples.

Ranks that run in lock step need a number of packs that divides by theirs. More packs than a packer
made are split off those there are: each new one takes the last sample of the pack with most samples (ties: the
later pack), as in NeMo-RL, which goes on with the same pack until one is left in it, where this
looks for the one with most each time. No pack grows, so none passes its budget. A pack never becomes
empty: with fewer samples than packs the rest are empty ones, where the policy allows that. An empty pack is an empty
list, at the end.

>>> with_count([[0, 1, 2], [3]], multiple=4)
[[0], [3], [2], [1]]
>>> way_back([[2, 0], [1]]).tolist()
[1, 2, 0]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heapreplace
from itertools import chain
from typing import Literal

import numpy as np

from streampack.core.packers.window import I64
from streampack.errors import SampleError

Empty = Literal["error", "pad"]


def with_count(
    packs: Iterable[Sequence[int]], min_packs: int = 0, multiple: int = 1, empty: Empty = "error"
) -> list[list[int]]:
    """These packs in a number of at least ``min_packs``, rounded up to ``multiple``; the new ones behind the others.

    ``empty`` says what happens where there are fewer samples than packs: ``error``, or ``pad``, empty packs at the
    end. O(n log n). Raises SampleError.
    """
    found = [list(pack) for pack in packs]
    num_packs = -(-max(len(found), min_packs) // multiple) * multiple
    num_samples = sum(map(len, found))
    if num_samples < num_packs and empty == "error":
        raise SampleError(
            f"got {num_samples} samples, expected at least {num_packs}, one for each pack of min_packs={min_packs} and "
            f"pack_count_multiple={multiple}: lower them, or ask for empty='pad'"
        )
    most = [(-len(pack), -number) for number, pack in enumerate(found)]
    heapify(most)
    for _ in range(min(num_packs, num_samples) - len(found)):
        negated, number = most[0]
        found.append([found[-number].pop()])
        heapreplace(most, (negated + 1, number))
    return found + [[] for _ in range(num_packs - len(found))]


def way_back(packs: Iterable[Sequence[int]]) -> I64:
    """Where in the packs, laid end to end, each sample is: int64 [n].

    ``packs`` hold 0..n-1, each once. With results r in the packs' order, ``r[way_back(packs)]`` is in that of the
    samples. Raises SampleError naming what is missing, or more than once there.
    """
    order = np.fromiter(chain.from_iterable(packs), np.int64)
    counts = np.bincount(order[(order >= 0) & (order < len(order))], minlength=len(order))
    if (wrong := np.flatnonzero(counts != 1)).size:
        raise SampleError(
            f"sample {wrong[0]}: got it {counts[wrong[0]]} times in packs of {len(order)} samples, expected it once"
        )
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    return back
