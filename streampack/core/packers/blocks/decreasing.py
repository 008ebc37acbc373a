"""``first_fit_decreasing``: longest first, each into the first pack with room.

Ties go to the later sample first, as in NeMo-RL, whose packs these are; LLaMA-Factory's
``greedy_knapsack``, which fills one pack after the other with the longest that fits, forms the same. On a closed
set it needs at most 11/9 of the best number of packs, plus 6/9: Johnson, "Near-optimal bin packing
algorithms", MIT 1973; Dosa, "The tight bound of first fit decreasing bin-packing algorithm is
FFD(I) <= 11/9 OPT(I) + 6/9", ESCAPE 2007. O(n log n): see ``first_fit``.

>>> first_fit_decreasing([3, 6, 5, 2, 4], 8)
[[1, 3], [2, 0], [4]]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streampack.core.packers.blocks.first_fit import first_fit
from streampack.core.packers.blocks.tumbling import Tumbling


@dataclass(frozen=True, slots=True)
class FirstFitDecreasing(Tumbling):
    """See the module."""

    name: str = "first_fit_decreasing"

    def pack(self, lengths: Sequence[int], budget: int, sizes: Sequence[int]) -> list[list[int]]:
        """Packs of a block."""
        return first_fit_decreasing(lengths, budget, self.max_samples_per_pack, sizes)


def first_fit_decreasing(
    lengths: Sequence[int], budget: int, max_samples_per_pack: int | None = None, sizes: Sequence[int] | None = None
) -> list[list[int]]:
    """Packs of a closed set, in the order they were opened; inside a pack longest first.

    Arguments are those of ``first_fit``.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], -i))
    return first_fit(order, lengths, budget, max_samples_per_pack, sizes)
