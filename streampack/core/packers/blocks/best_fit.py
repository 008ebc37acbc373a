"""``best_fit_decreasing``: longest first, each into the fullest pack with room.

The packs are those of TRL's ``bfd`` packing. Ties of length go to the earlier sample. Among equally full packs, the one
that reached this fill first is taken. It needs at most 11/9 of the best number of packs, plus 4: Johnson, Demers,
Ullman, Garey and Graham, SIAM J. Comput. 3 (1974), "Worst-case performance bounds for simple one-dimensional packing
algorithms".

The room left in packs is a set of integers up to the budget, kept as a trie of bitmaps. That is van Emde Boas's idea
(1975) with a fixed width. The smallest sufficient room is found in O(log budget / 10), so n samples take O(n log n)
for the sorting.

>>> best_fit_decreasing([3, 6, 5, 2, 4], 8)
[[1, 3], [2, 0], [4]]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from streampack.core.packers.blocks.tumbling import Tumbling

_WIDTH = 10
_LOW = (1 << _WIDTH) - 1


@dataclass(frozen=True, slots=True)
class BestFitDecreasing(Tumbling):
    """Packer by best fit decreasing."""

    name: str = "best_fit_decreasing"

    def pack(self, lengths: Sequence[int], budget: int, sizes: Sequence[int]) -> list[list[int]]:
        """Pack one block of items, as ``Tumbling.pack`` says."""
        return best_fit_decreasing(lengths, budget, self.max_samples_per_pack, sizes)


def best_fit_decreasing(
    lengths: Sequence[int], budget: int, max_samples_per_pack: int | None = None, sizes: Sequence[int] | None = None
) -> list[list[int]]:
    """Return the packs of a closed set by best fit decreasing, in the order of opening; each pack lists longest first.

    Arguments are those of ``first_fit``.
    """
    cap = sum(sizes or ()) + len(lengths) if max_samples_per_pack is None else max_samples_per_pack
    rooms = _IntSet(budget)
    packs: list[list[int]] = []
    spare: list[int] = []
    with_room: dict[int, deque[int]] = {}
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        size = sizes[i] if sizes else 1
        place = _take_fullest(rooms, with_room, spare, lengths[i], size)
        if place is None:
            place = budget, len(packs)
            packs.append([])
            spare.append(cap)
        room, pack = place
        packs[pack].append(i)
        spare[pack] -= size
        room -= lengths[i]
        if room and spare[pack]:
            with_room.setdefault(room, deque()).append(pack)
            rooms.add(room)
    return packs


def _take_fullest(
    rooms: _IntSet, with_room: dict[int, deque[int]], spare: list[int], length: int, size: int
) -> tuple[int, int] | None:
    """Find the fullest pack with room for an item, remove the pack from ``with_room``, and return its (room, number).

    Returns None if no pack has room for ``length`` tokens and ``size`` samples. ``with_room`` lists the packs by their
    free tokens; ``rooms`` holds its keys. Each pack may still take ``spare`` samples.
    """
    room = rooms.at_least(length)
    while room is not None:
        for pack in with_room[room]:
            if spare[pack] >= size:
                with_room[room].remove(pack)
                if not with_room[room]:
                    rooms.remove(room)
                return room, pack
        room = rooms.at_least(room + 1)
    return None


class _IntSet:
    """A set of integers from 0 to ``most``: a trie of bitmaps of 2**10 bits.

    A bit on the lowest level stands for a member. A bit on a higher level is set if a bitmap one level below is not
    empty.
    """

    def __init__(self, most: int) -> None:
        self._levels: list[dict[int, int]] = [{} for _ in range(max(-(-most.bit_length() // _WIDTH), 1))]

    def add(self, value: int) -> None:
        for level in self._levels:
            value, bit = value >> _WIDTH, value & _LOW
            before = level.get(value, 0)
            level[value] = before | 1 << bit
            if before:
                return

    def remove(self, value: int) -> None:
        for level in self._levels:
            value, bit = value >> _WIDTH, value & _LOW
            level[value] &= ~(1 << bit)
            if level[value]:
                return

    def at_least(self, value: int) -> int | None:
        """Return the smallest member that is at least ``value``; None if there is none."""
        for height, level in enumerate(self._levels):
            node = value >> _WIDTH
            members = level.get(node, 0) >> (value & _LOW) << (value & _LOW)
            if members:
                for below in reversed(self._levels[:height]):
                    node = node << _WIDTH | _lowest_bit(members)
                    members = below[node]
                return node << _WIDTH | _lowest_bit(members)
            value = node + 1
        return None


def _lowest_bit(members: int) -> int:
    """Return the number of the lowest set bit."""
    return (members & -members).bit_length() - 1
