"""How many steps each rank of an attempt has returned, and the fewest that any has.

Every rank says it of every step, and every time the fewest is asked for: so it is kept how many ranks are at each
number. Ranks run in lock step, there are few numbers; to look at all ranks each time was a quarter of a second a step
at 4,096 of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from streampack.core.serve.rank_registry import Ranks


class Progress(Mapping[Ranks, int]):
    """Steps returned, by rank; of ranks that left, too."""

    def __init__(self) -> None:
        self._upto: dict[Ranks, int] = {}
        self._ranks_at: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._upto)

    def __iter__(self) -> Iterator[Ranks]:
        return iter(self._upto)

    def __getitem__(self, ranks: Ranks) -> int:
        return self._upto[ranks]

    def __setitem__(self, ranks: Ranks, upto: int) -> None:
        if (before := self._upto.get(ranks)) is not None:
            self._ranks_at[before] -= 1
            if not self._ranks_at[before]:
                del self._ranks_at[before]
        self._upto[ranks] = upto
        self._ranks_at[upto] += 1

    def clear(self) -> None:
        """No rank takes part."""
        self._upto.clear()
        self._ranks_at.clear()

    def others(self, ranks: Ranks) -> set[Ranks]:
        """Every rank but ``ranks``."""
        return self._upto.keys() - {ranks}

    @property
    def least(self) -> int:
        """The fewest; there is a rank."""
        return min(self._ranks_at)
