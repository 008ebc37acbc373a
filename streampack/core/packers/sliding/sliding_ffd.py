"""``sliding_ffd``: first fit decreasing over a window that is refilled after every pack.

The oldest sample held seeds the pack. The rest is filled from the window, longest first: each sample is taken if it
still fits (ties: the later sample first, as ``first_fit_decreasing``). Then the window is refilled. A tumbling window
loses tokens at the end of every block; this packer loses them once, at the end of the stream. Every pack holds the
oldest sample, so none waits more packs than there were samples held when it came.

First fit decreasing: Johnson, "Near-optimal bin packing algorithms", MIT 1973. One bin of it with a given seed is the
greedy step of Martello and Toth, "Knapsack Problems", 1990, ch. 8.

>>> import numpy as np
>>> sliding = SlidingFFD()
>>> lengths = np.array([3, 6, 5, 2, 4])
>>> choice = sliding.choose(lengths, np.full(5, -1), 8, 9, True, window=4)
>>> choice.indices.tolist(), choice.bounds.tolist()
([0, 2, 1, 3, 4], [0, 2, 4, 5])
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from streampack.core.packers.packer import I64, NO_EXTRA, Capped, Choice, Extra, sample_counts
from streampack.core.packers.window import SlidingWindow, slide


@dataclass(frozen=True, slots=True)
class SlidingFFD(Capped):
    """Packer that seeds each pack with the oldest sample and fills it longest first."""

    name: str = "sliding_ffd"

    def choose(
        self, lengths: I64, ages: I64, budget: int, count: int, closed: bool, *, window: int, sizes: I64 | None = None,
        extra: Extra = NO_EXTRA,
    ) -> Choice:  # fmt: skip
        """Choose up to ``count`` packs, as in ``Packer.choose``; each pack lists its seed, then the longest first."""
        view = SlidingWindow(lengths, ages, budget, window)
        samples = sample_counts(sizes, len(lengths))
        cap = self.max_samples_per_pack or sum(samples)
        order: list[tuple[int, int]] = []  # (-length, -position): longest first, then latest first
        sorted_to = 0

        def next_packs(view: SlidingWindow) -> list[list[int]]:
            """Return a list of one pack, after sorting the samples that entered the window into ``order``."""
            nonlocal sorted_to
            for position in range(sorted_to, view.edge):
                insort(order, (-view.held[position], -position))
            sorted_to = view.edge
            return [_take_pack(view, order, samples, cap)]

        return slide(view, count, closed, next_packs)


def _take_pack(view: SlidingWindow, order: list[tuple[int, int]], samples: list[int], cap: int) -> list[int]:
    """Return the positions of one pack: the oldest sample, then the longest that fit. Remove these from ``order``.

    ``order`` holds (-length, -position) of the samples held, sorted; ``samples``, the samples in each item; ``cap``,
    the most samples in a pack.
    """
    seed, length = next(iter(view.held.items()))
    del order[bisect_left(order, (-length, -seed))]
    pack = [seed]
    room, spare = view.budget - length, cap - samples[seed]
    at = 0
    while room and spare:
        at = bisect_left(order, (-room, -view.edge), at)
        if at == len(order):
            break
        if samples[-order[at][1]] > spare:
            at += 1
            continue
        negated, position = order.pop(at)
        pack.append(-position)
        room += negated
        spare -= samples[-position]
    return pack
