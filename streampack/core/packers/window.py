"""What a packer is, what it returns, and the sliding window that the streaming ones share.

A packer knows lengths, never tokens. It is called again and again with the samples that are left
(the window, and those admitted behind it) and answers with the packs to take out. It remembers
nothing between calls: all that a pack depends on is the lengths left, in order, their ages, and
whether more may come. So the packs are a function of the order of samples alone, never of how
many were asked for at once or how far ahead the producers were.

The window is the shortest prefix of the remaining samples with at least ``size`` samples *and*
at least two budgets of tokens: short samples would starve a window counted in samples. It is
refilled after every pack.

No sample may wait more than ``size`` packs plus the samples held when it came. What is left of that
is its *patience*: the packs that may yet be formed without it. A window is *late* when its oldest
sample has to be in the next pack: where some sample has no more patience than there are older
ones. Up to then any pack will do, and if every pack from then on takes the oldest, none waits too
long, for each older sample costs it one pack at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Choice:
    """The packs that a packer takes out of ``lengths``.

    ``indices`` int64 [m]: positions in ``lengths``, pack after pack, in the order of the pack.
    ``bounds`` int64 [p + 1]: pack i is ``indices[bounds[i]:bounds[i + 1]]``.
    ``ages`` int64 [len(lengths)]: what the packer has to know of the past of all positions (their patience),
    -1 for those not in the window yet; the caller drops the chosen ones and hands the others back with its
    next call.
    """

    indices: I64
    bounds: I64
    ages: I64


class Packer(Protocol):
    """A pure function of (lengths, ages, parameters), and the facts that the rest of the program asks of it.

    A new packer is one file and one entry in the registry.
    """

    config_key: ClassVar[str]
    """The rule that chooses the packer: ``packer``, whose value is its name, or ``balance.kind``."""
    max_budget: ClassVar[int | None]
    """Budgets must be below, in units of ``align.sample``; None: any budget works."""

    @property
    def name(self) -> str:
        """What configuration calls it."""
        ...

    def max_wait(self, window: int, held: int) -> int | None:
        """Packs formed without a sample at most, where ``held`` samples were held when it came; None: no promise."""
        ...

    def choose(
        self, lengths: I64, ages: I64, budget: int, count: int, closed: bool, *, window: int, sizes: I64 | None = None
    ) -> Choice:
        """Up to ``count`` packs from the head of ``lengths``.

        ``lengths`` int64 [n], each in 1..``budget``, in age order: the window and what waits behind it.
        ``ages`` int64 [n], -1 for what no call has seen. ``closed`` says that no more will come: then
        the window may run dry, and all is packed in the end. ``window`` is its size in samples.
        ``sizes`` int64 [n]: samples in each item, which is a group then, from 1 to ``max_samples_per_pack``, which
        alone heeds them; None: one each.
        """
        ...


def check_cap(max_samples_per_pack: int | None) -> None:
    """Raises ValueError for a cap on a pack's samples that no pack could keep."""
    if max_samples_per_pack is not None and max_samples_per_pack < 1:
        raise ValueError(f"got max_samples_per_pack={max_samples_per_pack}, expected at least 1, or None for no cap")


@dataclass(frozen=True, slots=True)
class Capped:
    """What packers have in common: ``max_samples_per_pack``, None for no cap. Raises ValueError for one below 1."""

    config_key: ClassVar[str] = "packer"
    max_budget: ClassVar[int | None] = None

    max_samples_per_pack: int | None = None

    def __post_init__(self) -> None:
        check_cap(self.max_samples_per_pack)

    def max_wait(self, window: int, held: int) -> int | None:
        """See ``Packer``; no promise."""
        return None


def sample_counts(sizes: I64 | None, num_items: int) -> list[int]:
    """``sizes`` as a list, one each for None."""
    return [1] * num_items if sizes is None else sizes.tolist()


def choice_of(packs: Sequence[Sequence[int]], ages: I64) -> Choice:
    """A Choice of packs that are lists of positions."""
    bounds = np.fromiter(accumulate(map(len, packs), initial=0), np.int64, len(packs) + 1)
    return Choice(np.fromiter(chain.from_iterable(packs), np.int64, int(bounds[-1])), bounds, ages)


class SlidingWindow:
    """The sliding window in plain Python: what the packers that are not compiled work on.

    ``held`` maps position to length in age order, ``tokens`` are those held.
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
        #: the number of the last pack that may hold a sample
        self._due: list[int] = []

    def is_ready(self) -> bool:
        """Whether it holds as much as it should."""
        return len(self.held) >= self.size and self.tokens >= 2 * self.budget

    def refill(self) -> None:
        """Take in samples from behind the edge until it is ready or there are none."""
        while self.edge < len(self._lengths) and not self.is_ready():
            age = int(self._ages[self.edge])
            self._due.append(self.packs + (age if age >= 0 else self.size + len(self.held)))
            self.held[self.edge] = self._lengths[self.edge]
            self.tokens += self._lengths[self.edge]
            self.edge += 1

    def remove(self, pack: Sequence[int]) -> None:
        """Take a formed pack out."""
        for position in pack:
            self.tokens -= self.held.pop(position)
        self.packs += 1

    def ages(self) -> I64:
        """The patience of all positions, int64 [n]; -1 behind the edge."""
        ages = np.full(len(self._lengths), -1, np.int64)
        ages[: self.edge] = np.array(self._due, np.int64) - self.packs
        return ages


def slide(
    view: SlidingWindow, count: int, closed: bool, next_packs: Callable[[SlidingWindow], list[list[int]]]
) -> Choice:
    """Refill and form, until there are ``count`` packs, nothing is left, or the window waits for more."""
    packs: list[list[int]] = []
    while True:
        view.refill()
        if len(packs) >= count or not view.held or not (closed or view.is_ready()):
            return choice_of(packs, view.ages())
        for pack in next_packs(view):
            view.remove(pack)
            packs.append(pack)
