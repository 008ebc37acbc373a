"""Packers that need all lengths before the first pack, on a stream: tumbling blocks.

The samples left are cut into blocks of ``window``. A block is packed whole, and all of its packs
are returned even when that is more than was asked for, so packs are a function of the order of
samples alone. A partial block is packed only once no more can come. What every block loses in its
last packs is the price; whoever has a closed set gives its size as the window.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from streampack.core.packers.packer import I64, Capped, Choice, choice_of, sample_counts


@dataclass(frozen=True, slots=True)
class Tumbling(Capped, ABC):
    """A packer of blocks; ages stay as they are, for no sample is ever left in a block."""

    def choose(
        self, lengths: I64, ages: I64, budget: int, count: int, closed: bool, *, window: int, sizes: I64 | None = None
    ) -> Choice:
        """Whole blocks, until there are at least ``count`` packs; a partial block only when ``closed``."""
        packs: list[list[int]] = []
        items, samples = lengths.tolist(), sample_counts(sizes, len(lengths))
        start = 0
        while len(packs) < count and start < len(items) and (closed or start + window <= len(items)):
            block = slice(start, start + window)
            packs += [[start + i for i in pack] for pack in self.pack(items[block], budget, samples[block])]
            start += window
        return choice_of(packs, ages.copy())

    @abstractmethod
    def pack(self, lengths: Sequence[int], budget: int, sizes: Sequence[int]) -> list[list[int]]:
        """Packs of positions in ``lengths``, a block, each once; ``sizes`` are the samples of each item."""
