"""The sliding window of the packers in plain Python, and the bound on how long a sample waits.

The window is the shortest prefix of the samples left with at least ``size`` samples *and* at least two budgets of
tokens. A sample that has entered stays, also when ``size`` falls. Without the second condition a window of short
samples would hold too few tokens. It is refilled after every pack.

A sample waits at most ``size`` packs plus one pack for each sample held when it came. The rest of that wait is the
sample's *patience*: the number of packs that may still be formed without it. A window is *late* when its oldest sample
has to be in the next pack. That is so when some sample has no more patience than there are older samples. Until then
any pack is allowed. From then on every pack takes the oldest sample. Then none waits too long, since each older sample
delays a sample by one pack at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from streampack.core.packers.packer import I64, Choice, choice_of


class SlidingWindow:
    """The samples in the window of one call of a packer, and the patience of each.

    Attributes:
        held: length by position, oldest first.
        tokens: sum of the lengths held.
        edge: number of samples of ``lengths`` that have entered the window so far.
        packs: packs formed so far in this call.
    """

    def __init__(self, lengths: I64, ages: I64, budget: int, size: int) -> None:
        self.budget = budget
        self.size = size
        self.held: dict[int, int] = {}
        self.tokens = 0
        self.edge = 0
        self.packs = 0
        self._lengths: list[int] = lengths.tolist()
        self._ages = ages
        #: the last pack, counted from this call's first, that each sample may wait for
        self._due: list[int] = []

    def is_ready(self) -> bool:
        """Return True if the window holds ``size`` samples and two budgets of tokens."""
        return len(self.held) >= self.size and self.tokens >= 2 * self.budget

    def refill(self) -> None:
        """Admit samples from behind the window until the window is ready or no samples are left."""
        while self.edge < len(self._lengths) and (self._ages[self.edge] >= 0 or not self.is_ready()):
            age = int(self._ages[self.edge])
            self._due.append(self.packs + (age if age >= 0 else self.size + len(self.held)))
            self.held[self.edge] = self._lengths[self.edge]
            self.tokens += self._lengths[self.edge]
            self.edge += 1

    def remove(self, pack: Sequence[int]) -> None:
        """Remove the samples of a formed pack from the window, and count the pack."""
        for position in pack:
            self.tokens -= self.held.pop(position)
        self.packs += 1

    def ages(self) -> I64:
        """Return the patience of every position, counted in packs, int64 [n]; -1 for samples not in the window yet."""
        ages = self._ages.astype(np.int64)
        ages[: self.edge] = np.array(self._due, np.int64) - self.packs
        return ages


def slide(
    view: SlidingWindow, count: int, closed: bool, next_packs: Callable[[SlidingWindow], list[list[int]]]
) -> Choice:
    """Refill the window and take the packs that ``next_packs`` returns, again and again.

    Stop at ``count`` packs, when no sample is left, or when the window is not ready and more samples may come. The
    window is not refilled after the last pack, because the next call may have a window of another size.
    """
    packs: list[list[int]] = []
    while True:
        if len(packs) < count:
            view.refill()
        if len(packs) >= count or not view.held or not (closed or view.is_ready()):
            return choice_of(packs, view.ages())
        for pack in next_packs(view):
            view.remove(pack)
            packs.append(pack)
