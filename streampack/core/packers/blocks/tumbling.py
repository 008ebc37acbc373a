"""Base class of packers that need all lengths before the first pack: a stream is cut into tumbling blocks.

The samples left are cut into blocks of ``window`` samples. A block is packed whole, and all of its packs are returned,
even when that is more than was asked for. So packs are a function of the order of samples alone. A partial block is
packed only once no more samples can come. Every block loses some tokens in its last packs. For a closed set, pass its
number of samples as the window.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from streampack.core.packers.packer import I64, NO_EXTRA, Capped, Choice, Extra, choice_of, sample_counts


@dataclass(frozen=True, slots=True)
class Tumbling(Capped, ABC):
    """Base of packers that pack one block of samples after another. Ages stay unchanged: blocks are packed whole."""

    takes_all: ClassVar[bool] = True

    def choose(
        self, lengths: I64, ages: I64, budget: int, count: int, closed: bool, *, window: int, sizes: I64 | None = None,
        extra: Extra = NO_EXTRA,
    ) -> Choice:  # fmt: skip
        """Pack whole blocks until there are at least ``count`` packs; arguments are those of ``Packer.choose``.

        A partial block is packed only when ``closed``.
        """
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
        """Pack one block of items: return packs of positions in ``lengths``, each position once.

        An item is a sample, or a group of samples that stay together. ``lengths`` are the items' tokens, each in
        1..``budget``; ``sizes`` are the samples in each item.
        """
