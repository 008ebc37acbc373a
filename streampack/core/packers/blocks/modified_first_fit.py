"""``modified_first_fit_decreasing`` (MFFD): packs of large samples are filled first, by size classes.

Johnson and Garey, "A 71/60 theorem for bin packing", J. Complexity 1 (1985). Samples are large (over half of the
budget C), medium (over C/3), small (over C/6) or tiny. Each large one opens a pack. Then

1. Forward over these packs: each takes the largest medium sample that fits.
2. Backward over the packs without a medium sample. If the two smallest small samples fit, the pack takes the smallest,
   and the largest small sample that fits with it.
3. Forward: each takes the largest remaining sample that fits, again and again.
4. The remaining samples go into packs of their own. By default this is first fit decreasing, as in the paper. With
   ``leftovers="emptiest"`` each goes into the emptiest of these packs if it fits, else into a new one.

The packs are NeMo-RL's. Its manual says first fit decreasing in step 4, its code does ``emptiest`` and returns these
packs emptiest first. Ties go to the earlier sample, but for the second small sample of step 2 to the later. The worst
case is better than first fit decreasing's: 71/60 of the best number of packs against 11/9. On lengths as they occur it
never needed fewer packs (40 sets), and on 21 of the 40 sets more.

Samples are only taken, never put back. So the largest that fits is found by a binary search, and a walk over the
samples already taken with path compression (Tarjan, J. ACM 22, 1975): O(n log n).

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
    """Packer by modified first fit decreasing; ``leftovers`` selects how samples without a large sample are packed."""

    name: str = "modified_first_fit_decreasing"
    leftovers: Leftovers = "decreasing"

    def __post_init__(self) -> None:
        Tumbling.__post_init__(self)
        if self.leftovers not in ("decreasing", "emptiest"):
            raise ValueError(f"got leftovers={self.leftovers!r}, expected 'decreasing' or 'emptiest'")

    def pack(self, lengths: Sequence[int], budget: int, sizes: Sequence[int]) -> list[list[int]]:
        """Pack one block of items, as ``Tumbling.pack`` says."""
        return modified_first_fit_decreasing(lengths, budget, self.leftovers, self.max_samples_per_pack, sizes)


def modified_first_fit_decreasing(
    lengths: Sequence[int], budget: int, leftovers: Leftovers = "decreasing",
    max_samples_per_pack: int | None = None, sizes: Sequence[int] | None = None,
) -> list[list[int]]:  # fmt: skip
    """Return the packs of a closed set by MFFD: packs with a large sample, longest first, then packs of leftovers.

    ``leftovers`` selects how samples without a large sample are packed. The other arguments are those of ``first_fit``.
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
    """The samples not packed yet, sorted by decreasing length. A place is a position in that order."""

    def __init__(self, order: list[int], lengths: Sequence[int], samples: Sequence[int]) -> None:
        self.lengths, self.samples = lengths, samples
        self._order = order
        self._negated = [-lengths[i] for i in order]
        self._links = list(range(len(order) + 1))  # for each place: itself, or once taken a place nearer to the next
        self._before = list(range(-1, len(order)))  # for each place not taken: the last one before it not taken

    def largest(self, room: int, spare: int) -> int | None:
        """Return the place of the longest sample left that fits ``room`` tokens and ``spare`` samples, or None."""
        at = self._find(bisect_left(self._negated, -room)) if spare else len(self._order)
        while at < len(self._order) and self.samples[self._order[at]] > spare:
            at = self._find(at + 1)
        return at if at < len(self._order) else None

    def smallest_two(self) -> list[int]:
        """Return the places of the two shortest samples left, the shortest first; fewer if fewer are left."""
        last = self._before[len(self._order)]
        return [at for at in (last, self._before[last] if last >= 0 else -1) if at >= 0]

    def take(self, at: int) -> int:
        """Remove the sample at place ``at``, and return its position in ``lengths``."""
        self._before[self._find(at + 1)] = self._before[at]
        self._links[at] = at + 1
        return self._order[at]

    def item(self, at: int) -> int:
        """Return the position in ``lengths`` of the sample at place ``at``."""
        return self._order[at]

    def rest(self) -> list[int]:
        """Return the positions of the samples left, longest first."""
        return [i for at, i in enumerate(self._order) if self._links[at] == at]

    def _find(self, at: int) -> int:
        """Return the first place from ``at`` on that is not taken."""
        while self._links[at] != at:
            self._links[at] = at = self._links[self._links[at]]
        return at


@dataclass(slots=True)
class _Pack:
    """The pack of a large sample: its ``items``, and the tokens (``room``) and samples (``spare``) that still fit."""

    items: list[int]
    room: int
    spare: int

    def take_largest(self, left: _Left) -> bool:
        """Move the largest sample of ``left`` that fits into this pack; return False if none fits."""
        at = left.largest(self.room, self.spare)
        if at is None:
            return False
        i = left.take(at)
        self.items.append(i)
        self.room -= left.lengths[i]
        self.spare -= left.samples[i]
        return True

    def take_two(self, small: _Left) -> None:
        """Move two samples of ``small`` into this pack: the smallest, and the largest that fits together with it.

        Do nothing if the two smallest samples do not fit.
        """
        two = small.smallest_two()
        items = [small.item(at) for at in two]
        room, spare = sum(small.lengths[i] for i in items), sum(small.samples[i] for i in items)
        if len(two) == 2 and room <= self.room and spare <= self.spare:
            self.items.append(small.take(two[0]))
            self.room -= small.lengths[items[0]]
            self.spare -= small.samples[items[0]]
            self.take_largest(small)
