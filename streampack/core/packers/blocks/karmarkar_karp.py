"""``karmarkar_karp``: packs that cost the same, by largest differencing, with the budget as a hard cap.

Karmarkar and Karp, "The differencing method of set partitioning", UC Berkeley 1982. For k parts: Michiels, Korst, Aarts
and van Leeuwen, "Performance ratios for the differencing method", STACS 2003. Each item begins as a partition of
its own: one part holds the item, k - 1 parts are empty. Then the two partitions with the greatest spread between their
parts are merged, again and again. A merge joins the costliest part of one with the cheapest of the other, and so on, so
that their differences cancel. With *equal sizes* each first partition
holds k consecutive items by cost, one in each part. Then parts have as many items as each other, or one less.

verl and ROLL use it as a packer, on costs a * s + b * s * s. They begin with as many parts as the tokens need. This
packer then adds parts until every part is within the budget and the cap on samples. The packers of verl and ROLL stop
at the first count, or fail with fewer samples than packs. (In ROLL, 8 samples of 7 tokens and a budget of 8 make a pack
of 14 tokens.) Here there are never more packs than samples. Packs are balanced, not full: use it for closed sets.

O(n (k + log n)) for each count that is tried. Ties go to the item that comes first.

>>> karmarkar_karp([8, 7, 6, 5, 4], 2)
[[0, 2], [1, 3, 4]]
>>> karmarkar_karp([9, 1, 8, 2], 2, equal_sizes=True)
[[2, 3], [0, 1]]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

import numpy as np

from streampack.core.packers.blocks.tumbling import Tumbling
from streampack.core.packers.packer import I64

Items = tuple["Items | int", ...]  # a tree, so that two parts are joined in O(1)
Part = tuple[int, Items]  # cost, items


@dataclass(frozen=True, slots=True)
class KarmarkarKarp(Tumbling):
    """Packer by largest differencing; a sample of s tokens (or units of ``align``) costs ``a * s + b * s * s``."""

    name: str = "karmarkar_karp"
    a: int = 24576
    b: int = 1
    equal_sizes: bool = False

    def __post_init__(self) -> None:
        Tumbling.__post_init__(self)
        if self.a < 0 or self.b < 0 or not (self.a or self.b):
            raise ValueError(f"got a={self.a} and b={self.b}, expected at least 0, and a or b above 0")

    def pack(self, lengths: Sequence[int], budget: int, sizes: Sequence[int]) -> list[list[int]]:
        """Pack one block: return lists of positions in ``lengths``, which lie in 1..``budget``.

        No pack is empty, and the costliest pack is last. Inside a pack, positions ascend. ``sizes`` are the samples in
        each item.
        """
        cap = self.max_samples_per_pack or sum(sizes)
        costs = [self.a * length + self.b * length * length for length in lengths]
        count = max(-(-sum(lengths) // budget), -(-sum(sizes) // cap)) if lengths else 0
        while True:
            packs = karmarkar_karp(costs, count, equal_sizes=self.equal_sizes)
            over = sum(max(sum(lengths[i] for i in pack) - budget, 0) for pack in packs)
            crowded = any(sum(sizes[i] for i in pack) > cap for pack in packs)
            if not over and not crowded:
                return packs
            # The tokens over the budget need at least this many packs more. With one pack for each sample all fit.
            count = min(count + max(-(-over // budget), 1), len(lengths))


def karmarkar_karp(costs: Sequence[int], parts: int, *, equal_sizes: bool = False) -> list[list[int]]:
    """Split items into ``parts`` lists of nearly equal cost; return positions in ``costs``, the cheapest list first.

    Costs are at least 0. With fewer items than parts some lists are empty. With ``equal_sizes`` the lists have as many
    items as each other, or one less.
    """
    if not parts:
        return []
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    step = parts if equal_sizes else 1
    # A partition: negated spread, number (breaks ties), and its parts that are not empty, costliest first.
    partitions: list[tuple[int, int, list[Part]]] = []
    for number, start in enumerate(range(0, len(order), step)):
        first: list[Part] = [(costs[i], (i,)) for i in order[start : start + step]]
        partitions.append((-_spread(first, parts), number, first))
    heapify(partitions)
    while len(partitions) > 1:
        _, number, one = heappop(partitions)
        merged = _merge(one, partitions[0][2], parts)
        heapreplace(partitions, (-_spread(merged, parts), number, merged))
    last = partitions[0][2] if partitions else []
    filled = [sorted(_flat(items)) for _, items in reversed(last)]
    return [[] for _ in range(parts - len(filled))] + filled


def _spread(partition: list[Part], parts: int) -> int:
    """Return the cost of the costliest part minus that of the cheapest; parts not in the list are empty and cost 0."""
    return partition[0][0] - (partition[-1][0] if len(partition) == parts else 0)


def _merge(one: list[Part], other: list[Part], parts: int) -> list[Part]:
    """Merge two partitions: the costliest part of ``one`` with the cheapest part of ``other``, and so on.

    Lists are costliest first and leave out empty parts; ``parts`` is the number of parts with the empty ones.
    """
    alone = parts - len(other)  # the first of ``one`` meet empty parts
    merged = [*one[:alone], *other[: parts - len(one)]]
    for (cost, items), (more, others) in zip(one[alone:], reversed(other), strict=False):
        merged.append((cost + more, (items, others)))
    merged.sort(key=lambda part: -part[0])
    return merged


def _flat(items: Items) -> list[int]:
    """Return the items of a tree as a list."""
    flat: list[int] = []
    stack: list[Items | int] = [items]
    while stack:
        top = stack.pop()
        if isinstance(top, int):
            flat.append(top)
        else:
            stack += top
    return flat


def difference_columns(rows: I64) -> I64:
    """Assign each number of a row to a column so that the columns' sums are nearly equal; return int64 [m, k].

    ``rows`` int64 [m, k], each from costliest to cheapest. Every row of the result is a permutation: ``result[m, j]``
    is the column of ``rows[m, j]``. The method is largest differencing with equal sizes, a row at a time: O(m k log k).

    >>> difference_columns(np.array([[9, 7], [4, 1]])).tolist()
    [[1, 0], [0, 1]]
    """
    count, width = rows.shape
    # A partition: negated spread, number (breaks ties), and its columns' sums from costliest to cheapest.
    # Each merge adds to ``merged`` the two partitions, and the order that sorts their added sums.
    partitions = [(int(row[-1] - row[0]), m, row) for m, row in enumerate(rows)]
    heapify(partitions)
    merged: list[tuple[int, int, I64]] = []
    at = list(range(count))  # the partition of each number: below count a row, from count on an entry of ``merged``
    while len(partitions) > 1:
        _, number, sums = heappop(partitions)
        _, other, more = partitions[0]
        total = sums + more[::-1]
        order = np.argsort(-total, kind="stable")
        total = total[order]
        merged.append((at[number], at[other], order))
        at[number] = count + len(merged) - 1
        heapreplace(partitions, (int(total[-1] - total[0]), number, total))
    columns = np.empty((count, width), np.int64)
    places = {at[partitions[0][1]]: np.arange(width)} if count else {}
    for number in range(count + len(merged) - 1, count - 1, -1):
        one, other, order = merged[number - count]
        of_all = order[places.pop(number)]
        places[one], places[other] = of_all, width - 1 - of_all
    for m, placed in places.items():
        columns[m, placed] = np.arange(width)
    return columns
