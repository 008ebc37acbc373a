"""First fit in any order, and ``first_fit_shuffle``: first fit in a shuffled order.

A tournament tree over the room left finds the first pack with room in O(log packs), so n samples take O(n log n). It is
the structure of Johnson, "Fast algorithms for bin packing", J. Comput. Syst. Sci. 8 (1974). A pack that holds
``max_samples_per_pack`` samples counts as full. Where items are groups of several samples, packs with room for the
tokens but not for the group are skipped one by one.

First fit needs at most 1.7 times the best number of packs in any order (Dosa and Sgall, "First
Fit bin packing: a tight analysis", STACS 2013). The shuffle is NeMo-RL's ``first_fit_shuffle``, with a seed. Every
block of a stream has the same seed, since a packer keeps nothing between calls.

>>> first_fit([0, 1, 2, 3, 4], [3, 6, 5, 2, 4], 8)
[[0, 2], [1, 3], [4]]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from streampack.core.packers.blocks.tumbling import Tumbling
from streampack.core.shuffle import shuffled


@dataclass(frozen=True, slots=True)
class FirstFitShuffle(Tumbling):
    """Packer by first fit in a shuffled order; ``seed`` is any int."""

    name: str = "first_fit_shuffle"
    seed: int = 0

    def pack(self, lengths: Sequence[int], budget: int, sizes: Sequence[int]) -> list[list[int]]:
        """Pack one block of items, as ``Tumbling.pack`` says.

        Packs are in the order they were opened; inside a pack samples are in the shuffled order.
        """
        return first_fit(shuffled(len(lengths), self.seed), lengths, budget, self.max_samples_per_pack, sizes)


def first_fit(
    order: Iterable[int], lengths: Sequence[int], budget: int,
    max_samples_per_pack: int | None = None, sizes: Sequence[int] | None = None,
) -> list[list[int]]:  # fmt: skip
    """Put each item of ``order`` into the first pack with room; return the packs in the order they were opened.

    Args:
        order: Positions in ``lengths``, each at most once.
        lengths: Tokens in each item, each in 1..``budget``.
        budget: Capacity of a pack, in tokens.
        max_samples_per_pack: The most samples in a pack; None for no cap.
        sizes: Samples in each item, at most ``max_samples_per_pack``; None means one sample per item.
    """
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    room = [budget] * (2 * leaves)  # room[k] is the most room in the packs below node k; pack i is node leaves + i
    cap = len(lengths) if max_samples_per_pack is None else max_samples_per_pack
    if max_samples_per_pack is None:
        sizes = None
    spare: list[int] = []
    packs: list[list[int]] = []
    for i in order:
        size = sizes[i] if sizes else 1
        node = _first_with(room, lengths[i], leaves)
        while node - leaves < len(packs) and spare[node - leaves] < size:
            node = _first_with(room, lengths[i], node + 1)
        pack = node - leaves
        if pack == len(packs):
            packs.append([])
            spare.append(cap)
        packs[pack].append(i)
        spare[pack] -= size
        _set_room(room, node, room[node] - lengths[i] if spare[pack] else 0)
    return packs


def _first_with(room: list[int], least: int, node: int) -> int:
    """Return the first leaf from leaf ``node`` on with a room of at least ``least``; such a leaf must exist."""
    while room[node] < least:
        while node & 1:  # a right child: the search is done with its parent
            node >>= 1
        node += 1
    while 2 * node < len(room):
        node = 2 * node if room[2 * node] >= least else 2 * node + 1
    return node


def _set_room(room: list[int], node: int, value: int) -> None:
    """Set the room of the pack at leaf ``node``, and update the maxima above the leaf."""
    room[node] = value
    while node > 1:
        node >>= 1
        most = max(room[2 * node], room[2 * node + 1])
        if room[node] == most:
            return
        room[node] = most
