"""``none``: samples in their original order, in ``samples // micro_batch_size`` packs of nearly equal counts.

This is what ROLL does without packing: n samples make max(n // micro_batch_size, 1) packs. If the division leaves a
remainder, the first packs have one sample more. ROLL has no budget here. Streampack's budget holds for every packer, so
samples beyond the budget or the cap on samples go to another pack, as in ``concatenative``. O(n).

>>> Unpacked(micro_batch_size=2).pack([1, 1, 1, 1, 1, 3, 3], 5, [1] * 7)
[[0, 1, 2], [3, 4], [5], [6]]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streampack.core.packers.blocks.tumbling import Tumbling


@dataclass(frozen=True, slots=True)
class Unpacked(Tumbling):
    """Packer that keeps the order, and makes packs of about ``micro_batch_size`` samples."""

    name: str = "none"
    micro_batch_size: int = 1

    def __post_init__(self) -> None:
        Tumbling.__post_init__(self)
        if self.micro_batch_size < 1:
            raise ValueError(f"got micro_batch_size={self.micro_batch_size}, expected at least 1")

    def pack(self, lengths: Sequence[int], budget: int, sizes: Sequence[int]) -> list[list[int]]:
        """Pack one block of items, and return the packs as lists of adjacent positions in ``lengths``.

        An item is a sample, or a group of samples that stay together. ``lengths``: tokens of each item. ``sizes``:
        number of samples in each item.
        """
        num_packs = max(len(lengths) // self.micro_batch_size, 1)
        least, longer = divmod(len(lengths), num_packs)
        starts = {pack * least + min(pack, longer) for pack in range(num_packs)}
        cap = self.max_samples_per_pack or sum(sizes)
        packs: list[list[int]] = []
        room = spare = 0
        for i, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
            if i in starts or length > room or size > spare:
                packs.append([])
                room, spare = budget, cap
            packs[-1].append(i)
            room -= length
            spare -= size
        return packs
