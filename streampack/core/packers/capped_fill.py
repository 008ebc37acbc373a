"""What ``exact_fill`` does where a pack would hold more samples than it may, in plain Python.

The oldest sample seeds the pack. Where samples are so short that as many as may be in the pack would not fill it,
its samples are what is scarce: it takes the oldest that leave room for as many as may still come. Else, and with what
is left, it is filled exactly with few: the fewest samples that leave each gap, by dynamic programming over the oldest
(the knapsack of Bellman 1957 with a count for each weight). Long samples first would do too, once; here those that
are short and many leave with their share of the long ones.

The numba twin is in ``exact_fill_cases``.
"""

from __future__ import annotations

import numpy as np

from streampack.core.packers.window import Window

#: Samples tried.
CAPPED_TRIED = 256


def capped(view: Window, samples: list[int], cap: int) -> list[int]:
    """The oldest sample's pack, of ``cap`` samples at most; ``samples`` are those in each item, by position."""
    seed, length = next(iter(view.held.items()))
    pack = [seed]
    rest: list[tuple[int, int, int]] = []
    room, slots = view.budget - length, cap - samples[seed]
    held = sum(samples[position] for position in view.held)
    ahead = room * held >= slots * view.tokens
    for position, length in list(view.held.items())[1:]:
        if len(rest) == CAPPED_TRIED or not slots:
            break
        size = samples[position]
        if length > room or size > slots:
            continue
        if ahead and (room - length) * held >= (slots - size) * view.tokens:
            pack.append(position)
            room -= length
            slots -= size
        else:
            rest.append((position, length, size))
    return sorted(pack + _fill_with_few([each for each in rest if each[1] <= room], room, slots))


def _fill_with_few(rest: list[tuple[int, int, int]], room: int, slots: int) -> list[int]:
    """Those of (position, length, size) that leave the smallest gap, with ``slots`` samples at most."""
    fewest = np.full(room + 1, slots + 1)  # by gap; slots + 1 where it cannot be left
    fewest[room] = 0
    rows = []
    for _, length, size in rest:
        if fewest[0] <= slots:
            break
        fewer = fewest[length:] + size
        better = fewer < fewest[: room + 1 - length]
        fewest[: len(better)][better] = fewer[better]
        rows.append(better)
    gap = int(np.argmax(fewest <= slots))
    picks = []
    for better, (position, length, _) in zip(reversed(rows), reversed(rest[: len(rows)]), strict=True):
        if gap < len(better) and better[gap]:
            picks.append(position)
            gap += length
    return picks
