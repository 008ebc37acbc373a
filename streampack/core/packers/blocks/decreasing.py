"""``first_fit_decreasing``: longest first, each into the first pack with room.

Ties go to the later sample, as in NeMo-RL, whose packs these are. LLaMA-Factory's ``greedy_knapsack`` fills one pack
after the other with the longest that fits, and forms the same packs. A closed set needs at most 11/9 of the best number
of packs, plus 6/9. See Johnson, "Near-optimal bin packing algorithms", MIT 1973; and Dosa, ESCAPE 2007, "The tight
bound of first fit decreasing bin-packing algorithm is FFD(I) <= 11/9 OPT(I) + 6/9". O(n log n): see ``first_fit``.

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
    """Packer by first fit decreasing."""

    name: str = "first_fit_decreasing"

    def pack(self, lengths: Sequence[int], budget: int, sizes: Sequence[int]) -> list[list[int]]:
        """Pack one block of items, as ``Tumbling.pack`` says."""
        return first_fit_decreasing(lengths, budget, self.max_samples_per_pack, sizes)


def first_fit_decreasing(
    lengths: Sequence[int], budget: int, max_samples_per_pack: int | None = None, sizes: Sequence[int] | None = None
) -> list[list[int]]:
    """Return the packs of a closed set by first fit decreasing, in the order of opening; each pack lists longest first.

    Arguments are those of ``first_fit``.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], -i))
    return first_fit(order, lengths, budget, max_samples_per_pack, sizes)
