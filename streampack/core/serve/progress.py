"""The number of steps that each rank of an attempt has returned, and the least of these numbers.

Every rank reports every step, and each report needs the least number. So the class counts the ranks at each number.
Ranks run in lock step, so there are few numbers. Scanning all ranks at each report took 0.25 s per step for 4,096
ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from streampack.core.serve.rank_reader import Ranks


class Progress(Mapping[Ranks, int]):
    """The number of returned steps of each rank, including ranks that left."""

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
        """Remove all ranks."""
        self._upto.clear()
        self._ranks_at.clear()

    def others(self, ranks: Ranks) -> set[Ranks]:
        """Return every rank but ``ranks``."""
        return self._upto.keys() - {ranks}

    @property
    def least(self) -> int:
        """The least number of returned steps; there must be a rank."""
        return min(self._ranks_at)
