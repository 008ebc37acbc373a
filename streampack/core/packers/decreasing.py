"""``first_fit_decreasing``: longest first, each into the first pack with room.

Ties go to the later sample first, as in NeMo-RL, whose packs these are. On a closed set it needs
at most 11/9 of the best number of packs, plus a constant: Johnson, "Near-optimal bin packing
algorithms", MIT 1973; Johnson, Demers, Ullman, Garey and Graham, "Worst-case performance bounds
for simple one-dimensional packing algorithms", SIAM J. Comput. 3 (1974).

It needs all lengths before the first pack, so on a stream it works on tumbling blocks of
``window`` samples: a block is packed whole and all of its packs are returned, even when that is
more than was asked for. What every block loses in its last packs is the price.

"First pack with room" is found in O(log packs) with a tournament tree over the room left: the
structure of Johnson, "Fast algorithms for bin packing", J. Comput. Syst. Sci. 8 (1974).

>>> first_fit_decreasing([3, 6, 5, 2, 4], 8)
[[1, 3], [2, 0], [4]]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streampack.core.packers.window import I64, Choice, choice_of


@dataclass(frozen=True, slots=True)
class FirstFitDecreasing:
    """See the module; ages stay as they are, for no sample is ever left in a block."""

    name: str = "first_fit_decreasing"

    def choose(self, lengths: I64, ages: I64, budget: int, count: int, closed: bool, *, window: int) -> Choice:
        """Whole blocks, until there are at least ``count`` packs; a partial block only when ``closed``."""
        packs: list[list[int]] = []
        start = 0
        while len(packs) < count and start < len(lengths) and (closed or start + window <= len(lengths)):
            block = first_fit_decreasing(lengths[start : start + window].tolist(), budget)
            packs += [[start + i for i in pack] for pack in block]
            start += window
        return choice_of(packs, ages.copy())


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Packs of a closed set, in the order they were opened; inside a pack longest first.

    ``lengths`` must lie in 1..``budget``.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], -i))
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    room = [budget] * (2 * leaves)  # room[k] is the most room in the packs below node k
    packs: list[list[int]] = []
    for i in order:
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= lengths[i] else 2 * node + 1
        if node - leaves == len(packs):
            packs.append([])
        packs[node - leaves].append(i)
        room[node] -= lengths[i]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return packs
