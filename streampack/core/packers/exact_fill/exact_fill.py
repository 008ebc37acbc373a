"""``exact_fill``: packs that are full to the token, from a sliding window, nearly in order.

Theory of operation. A pack is seeded by the oldest sample of the window, and the rest of it is an
exact subset sum over the window: a bitset says which gaps are reachable, one shift and one OR per
sample (Bellman 1957; the bitset is folklore). Samples are tried in age order and the search
stops at the first perfect fill, so packs are near to first-in-first-out, and each is full.

Filling to the token is right while small samples abound. It is wrong when they do not: a sample
longer than half the budget ("long") shares its pack with no other long one, so where the long
ones need almost as many packs as there are tokens for, every long one must get its share of the
small ones, and a perfect fill of three small samples starves two later packs. Therefore, full
samples (see below) not counted,

- *crowded*: ``num_long * budget > 0.8 * tokens``. A small seed first gets the longest long sample
  that fits, and the rest is tried longest first, so that the smallest, which fit anywhere, are
  kept for last;
- *critical*: crowded, and the mean length is above budget / 8, so that there is nothing to fill
  gaps with. Then nothing is seeded by age: the pack is the pair of a long and a short sample that
  leaves the least gap in the whole window, and whatever still fits, longest first. Some 500 long and 500
  short samples leave a pair a gap of about budget / 1000. Only pairs keep the numbers of both in balance: a third
  sample makes a better fit, but on lengths uniform in 1..budget there is one short sample for each
  long one, and triples that closed gaps above budget / 1000 left 600 long samples without (133
  packs over the tokens where pairs left 23 to 28). What pairs do not like is left to the window,
  which takes up the random walk of long against short, until it is late (see ``window``): then
  the oldest seeds the pack, with the sample that fits best. If the window is crowded by less than 15 / 16 there are
  short samples to spare, and the oldest are those that pairs do not need: then one of the 64 oldest that fit and
  another may go with the seed, and the seed before it is late, where that fills more, by at least a sixth of
  (num_long * budget / tokens - 0.8) budgets.

A *full* sample, as long as the budget, leaves alone and at once, so that full ones do not crowd the
window. But each such pack is one more that the others wait, so while these are many, and have on the
average less than 1.2 window sizes of patience left, the full ones wait.

Once the stream is closed and the window runs dry, all that will come is known: the last 2048 samples are formed at
once, and so are more where they are crowded, whatever was asked for: see ``exact_fill_cases.last_packs``. They never
need more packs than first fit decreasing makes of them.

No sample waits more than W packs plus the samples held when it came: a late window's next pack
takes the oldest, and ``window`` says why that is enough.

Where a pack may hold only so many samples, one that would hold more is formed anew: see ``exact_fill_cases.capped``.

Lengths and budget are in any one unit: tokens, or multiples of the alignment, which is faster.
``exact_fill_kernels`` is how it is done, compiled where numba is installed.

>>> import numpy as np
>>> choice = ExactFill().choose(np.array([3, 6, 5, 2, 4]), np.full(5, -1), 8, 9, True, window=4)
>>> choice.indices.tolist(), choice.bounds.tolist()
([1, 3, 0, 2, 4], [0, 2, 4, 5])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from streampack.core.packers.packer import I64, Choice, check_cap
from streampack.errors import ConfigError

#: A subset sum takes a bit for each token of the budget and sample tried: 17 GB of address space here.
MAX_BUDGET = 2**27
NO_CAP = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class ExactFill:
    """See the module; ``choose`` is the Packer protocol's. Inside a pack samples are in age order.

    ``max_samples_per_pack``: None for no cap.
    """

    config_key: ClassVar[str] = "packer"
    max_budget: ClassVar[int | None] = MAX_BUDGET

    name: str = "exact_fill"
    max_samples_per_pack: int | None = None

    def __post_init__(self) -> None:
        check_cap(self.max_samples_per_pack)

    def max_wait(self, window: int, held: int) -> int:
        """See ``Packer`` and the module."""
        return window + held

    def choose(
        self, lengths: I64, ages: I64, budget: int, count: int, closed: bool, *, window: int, sizes: I64 | None = None
    ) -> Choice:
        """Up to ``count`` packs, or at the end all."""
        if budget >= MAX_BUDGET:
            raise ConfigError(
                f"budget: got {budget}, expected less than {MAX_BUDGET} for exact_fill: take align or sliding_ffd"
            )
        from streampack.core.packers.exact_fill.exact_fill_kernels import exact_fill  # not before: numba takes a second

        cap = self.max_samples_per_pack
        if sizes is None or cap is None:
            sizes, cap = np.ones(len(lengths), np.int64), cap or NO_CAP
        # Of one type, layout and access, or numba would stop to compile another variant.
        lengths, sizes, ages = _plain(lengths), _plain(sizes), _plain(ages)
        return Choice(*exact_fill(lengths, sizes, ages, int(budget), int(count), bool(closed), int(window), int(cap)))


def _plain(array: I64) -> I64:
    found: I64 = np.ascontiguousarray(array, np.int64)
    return found if found.flags.writeable else found.copy()
