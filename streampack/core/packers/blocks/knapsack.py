"""``greedy_knapsack``: longest first, each into the emptiest pack if it fits there, else into a new one.

The packs are those of AutoModel's neat packing. Among equally long samples the earlier goes first; among equally empty
packs, the one opened first is taken. It is worst fit decreasing: it evens out the packs' tokens, and so leaves more
gaps than best fit. In the limit it needs at most 5/4 of the best number of packs (Johnson, "Fast algorithms for bin
packing", J. Comput. Syst. Sci. 8, 1974). LLaMA-Factory's function of this name does something else: see ``decreasing``.

The emptiest pack is the head of a heap: O(n log n). Where items are groups of several samples, packs without room for
the group's samples are skipped one by one.

>>> greedy_knapsack([3, 6, 5, 2, 4], 8)
[[1], [2, 3], [4, 0]]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from streampack.core.packers.blocks.tumbling import Tumbling


@dataclass(frozen=True, slots=True)
class GreedyKnapsack(Tumbling):
    """Packer that puts each sample, longest first, into the emptiest pack."""

    name: str = "greedy_knapsack"

    def pack(self, lengths: Sequence[int], budget: int, sizes: Sequence[int]) -> list[list[int]]:
        """Pack one block of items, as ``Tumbling.pack`` says."""
        return greedy_knapsack(lengths, budget, self.max_samples_per_pack, sizes)


def greedy_knapsack(
    lengths: Sequence[int], budget: int, max_samples_per_pack: int | None = None, sizes: Sequence[int] | None = None
) -> list[list[int]]:
    """Return the packs of a closed set by worst fit decreasing, in the order of opening; each pack lists longest first.

    Arguments are those of ``first_fit``.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return emptiest_fit(order, lengths, budget, max_samples_per_pack, sizes)[0]


def emptiest_fit(
    order: Sequence[int], lengths: Sequence[int], budget: int, max_samples_per_pack: int | None,
    sizes: Sequence[int] | None, first_come: bool = False,
) -> tuple[list[list[int]], list[tuple[int, int]]]:  # fmt: skip
    """Put each item of ``order`` into the emptiest pack if it fits there, else into a new pack.

    Among equally empty packs, the pack opened first is taken; with ``first_come``, the pack that reached this room
    first. The other arguments are those of ``first_fit``.

    Returns:
        The packs, in the order they were opened, and a sort key for each pack: sorted by these keys, packs go from
        the emptiest to the fullest.
    """
    cap = sum(sizes or ()) + len(lengths) if max_samples_per_pack is None else max_samples_per_pack
    packs: list[list[int]] = []
    spare: list[int] = []
    keys: list[tuple[int, int]] = []  # tokens, tie breaker
    heap: list[tuple[int, int, int]] = []  # tokens, tie breaker, pack
    for turn, i in enumerate(order):
        size = sizes[i] if sizes else 1
        passed = []
        while heap and spare[heap[0][2]] < size:
            passed.append(heappop(heap))
        if heap and heap[0][0] + lengths[i] <= budget:
            fill, _, pack = heappop(heap)
        else:
            fill, pack = 0, len(packs)
            packs.append([])
            spare.append(cap)
            keys.append((0, 0))
        packs[pack].append(i)
        spare[pack] -= size
        keys[pack] = (fill + lengths[i], turn if first_come else pack)
        if spare[pack]:
            passed.append((*keys[pack], pack))
        for entry in passed:
            heappush(heap, entry)
    return packs, keys
