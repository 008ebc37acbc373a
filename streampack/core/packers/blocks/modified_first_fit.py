"""``modified_first_fit_decreasing`` (MFFD): large samples get company first, by size.

Johnson and Garey, "A 71/60 theorem for bin packing", J. Complexity 1 (1985). Samples are large (over half of the
budget C), medium (over C/3), small (over C/6) or tiny. Each large one opens a pack. Then

1. forward over these packs: the largest medium one that fits;
2. backward over those without a medium one: if the two smallest small ones fit, the smallest, and the largest
   small one that fits with it;
3. forward: the largest of what is left that fits, again and again;
4. what is left then (``leftovers``) goes into packs of its own: ``decreasing``, by first fit as in the paper, or
   ``emptiest``, each into the emptiest of them if it fits, else into a new one.

The packs are NeMo-RL's, which says first fit decreasing in its manual and in its code does ``emptiest``, where the
packs of step 4 come out emptiest first. Ties go to the earlier sample, but for the second small one of step 2: the
later. Its worst case is better than first fit decreasing's, 71/60 of the best number of packs against 11/9. On
lengths as they occur it never was: no less packs on 40 of 40 sets, more on 21.

"The largest that fits" of a set from which samples are only taken is a binary search, and a walk over those that are
gone, whose paths are compressed (Tarjan, J. ACM 22, 1975): O(n log n).

>>> modified_first_fit_decreasing([6, 3, 4, 2, 2, 1, 5, 4], 9)
[[0, 1], [6, 2], [7, 3, 4, 5]]
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from streampack.core.packers.blocks.first_fit import first_fit
from streampack.core.packers.blocks.knapsack import emptiest_fit
from streampack.core.packers.blocks.tumbling import Tumbling

Leftovers = Literal["decreasing", "emptiest"]


@dataclass(frozen=True, slots=True)
class ModifiedFirstFitDecreasing(Tumbling):
    """See the module."""

    name: str = "modified_first_fit_decreasing"
    leftovers: Leftovers = "decreasing"

    def __post_init__(self) -> None:
        Tumbling.__post_init__(self)
        if self.leftovers not in ("decreasing", "emptiest"):
            raise ValueError(f"got leftovers={self.leftovers!r}, expected 'decreasing' or 'emptiest'")

    def pack(self, lengths: Sequence[int], budget: int, sizes: Sequence[int]) -> list[list[int]]:
        """Packs of a block."""
        return modified_first_fit_decreasing(lengths, budget, self.leftovers, self.max_samples_per_pack, sizes)


def modified_first_fit_decreasing(
    lengths: Sequence[int], budget: int, leftovers: Leftovers = "decreasing",
    max_samples_per_pack: int | None = None, sizes: Sequence[int] | None = None,
) -> list[list[int]]:  # fmt: skip
    """Packs of a closed set: those of large samples, longest first, then those of ``leftovers``.

    The other arguments are those of ``first_fit``.
    """
    samples = sizes or [1] * len(lengths)
    cap = sum(samples) + 1 if max_samples_per_pack is None else max_samples_per_pack
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    later_first = sorted(longest_first, key=lambda i: (-lengths[i], -i))
    packs = [_Pack([i], budget - lengths[i], cap - samples[i]) for i in longest_first if 2 * lengths[i] > budget]
    medium = _Left([i for i in longest_first if 3 * lengths[i] > budget >= 2 * lengths[i]], lengths, samples)
    for pack in packs:
        pack.take_largest(medium)
    small = _Left([i for i in later_first if 6 * lengths[i] > budget >= 3 * lengths[i]], lengths, samples)
    for pack in reversed(packs):
        if len(pack.items) == 1:
            pack.take_two(small)
    placed = {i for pack in packs for i in pack.items}
    left = _Left([i for i in longest_first if i not in placed], lengths, samples)
    for pack in packs:
        while pack.take_largest(left):
            pass
    rest = left.rest()
    if leftovers == "decreasing":
        own = first_fit(rest, lengths, budget, max_samples_per_pack, sizes)
    else:
        opened, keys = emptiest_fit(rest, lengths, budget, max_samples_per_pack, sizes, first_come=True)
        own = [pack for _, pack in sorted(zip(keys, opened, strict=True))]
    return [pack.items for pack in packs] + own


class _Left:
    """Samples in an order of decreasing length, of which some are taken. A place is a position in that order."""

    def __init__(self, order: list[int], lengths: Sequence[int], samples: Sequence[int]) -> None:
        self.lengths, self.samples = lengths, samples
        self._order = order
        self._negated = [-lengths[i] for i in order]
        self._links = list(range(len(order) + 1))  # towards the first place, at it or behind, that is not taken
        self._before = list(range(-1, len(order)))  # of a place that is not taken, the last such before it

    def largest(self, room: int, spare: int) -> int | None:
        """The place of the first sample that fits; None if none does."""
        at = self._find(bisect_left(self._negated, -room)) if spare else len(self._order)
        while at < len(self._order) and self.samples[self._order[at]] > spare:
            at = self._find(at + 1)
        return at if at < len(self._order) else None

    def smallest_two(self) -> list[int]:
        """The places of the last two, the last first; of fewer where fewer are left."""
        last = self._before[len(self._order)]
        return [at for at in (last, self._before[last] if last >= 0 else -1) if at >= 0]

    def take(self, at: int) -> int:
        """Take the sample of a place."""
        self._before[self._find(at + 1)] = self._before[at]
        self._links[at] = at + 1
        return self._order[at]

    def item(self, at: int) -> int:
        """The sample of a place."""
        return self._order[at]

    def rest(self) -> list[int]:
        """The samples that are left, in order."""
        return [i for at, i in enumerate(self._order) if self._links[at] == at]

    def _find(self, at: int) -> int:
        while self._links[at] != at:
            self._links[at] = at = self._links[self._links[at]]
        return at


@dataclass(slots=True)
class _Pack:
    """The pack of a large sample: what it holds, the tokens and the samples that it may still take."""

    items: list[int]
    room: int
    spare: int

    def take_largest(self, left: _Left) -> bool:
        """Take the largest that fits; whether any does."""
        at = left.largest(self.room, self.spare)
        if at is None:
            return False
        i = left.take(at)
        self.items.append(i)
        self.room -= left.lengths[i]
        self.spare -= left.samples[i]
        return True

    def take_two(self, small: _Left) -> None:
        """Take the smallest, and the largest that fits with it, if the smallest two fit."""
        two = small.smallest_two()
        items = [small.item(at) for at in two]
        room, spare = sum(small.lengths[i] for i in items), sum(small.samples[i] for i in items)
        if len(two) == 2 and room <= self.room and spare <= self.spare:
            self.items.append(small.take(two[0]))
            self.room -= small.lengths[items[0]]
            self.spare -= small.samples[items[0]]
            self.take_largest(small)
