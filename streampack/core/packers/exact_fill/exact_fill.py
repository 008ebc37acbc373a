"""``exact_fill``: packs that are full to the token, from a sliding window, nearly in order.

Theory of operation. The oldest sample of the window seeds a pack. The rest of the pack is an exact subset sum over the
window. A bitset says which gaps are reachable: one shift and one OR per sample (Bellman 1957; the bitset is folklore).
Samples are tried in age order and the search stops at the first perfect fill. So packs are near to
first-in-first-out, and each is full.

Filling to the token is right while small samples abound, and wrong when they do not. A sample longer than half the
budget ("long") shares its pack with no other long one. Where the long samples need almost as many packs as there are
tokens for, each must get its share of the small ones. A perfect fill of three small samples then leaves two later packs
without any. Therefore two states of the window matter; full samples (see below) do not count:

- *crowded*: ``num_long * budget > 0.8 * tokens``. A small seed first gets the longest long sample that fits. The rest
  is tried longest first, so that the smallest samples, which fit anywhere, are kept for last.
- *critical*: crowded, and the mean length is above budget / 8, so that there is nothing to fill gaps with. Then age
  does not seed the pack. The pack is the pair of a long and a short sample that leaves the least gap. Then whatever
  still fits is added, longest first.

Pairs keep the numbers of long and short samples in balance. Some 500 long and 500 short samples leave a pair
a gap of about budget / 1000. A third sample makes a better fit. But lengths uniform in 1..budget have one short sample
for each long one. There, triples that closed gaps above budget / 1000 left 600 long samples without a partner. They
needed 133 packs more than the tokens; pairs needed 23 to 28 more. Samples that fit no pair well stay in the window,
which absorbs the random walk of long against short, until it is late (see ``window``). Then the oldest sample seeds the
pack, with the sample that fits best.

If the window is crowded by less than 15 / 16, there are short samples to spare, and the oldest are those that pairs do
not need. Then one of the 64 oldest that fit may go with the seed and another sample, even before the window is late.
That pack must fill at least a sixth of (num_long * budget / tokens - 0.8) budgets more.

A *full* sample, as long as the budget, leaves alone. With ``in_turn`` it leaves in its turn: after as many packs as the
tokens held when it came fill. Without, as in logs of versions before 0.2, it leaves at once. Streams of long samples
then come first, and the mixture of the first steps is not that of the weights. The full samples then wait only while
the others are many, and have on average less than 1.2 window sizes of patience left.

Once the stream is closed and the window runs dry, all remaining samples are known. The last 2048 samples are formed
at once, whatever count was requested; so are more than 2048 if they are crowded. See ``exact_fill_cases.last_packs``.
They never need more packs than first fit decreasing. With ``in_turn``, packs are formed by age for as long as first fit
decreasing needs one pack less for the rest. Otherwise the longest samples would come last.

No sample waits more than W packs plus the samples held when it came, where W is the window's size. A late window's next
pack takes the oldest; ``window`` says why that is enough. A full sample's turn comes within as many packs as there were
samples before it. From then on only older samples go first. So with ``in_turn``, full samples do not count for
lateness.

A pack with more than ``max_samples_per_pack`` samples is formed again: see ``exact_fill_cases.capped``. So is a pack
that exceeds a limit in another unit (``Limited``), such as patches of images. Its seed is the oldest sample, so no
sample waits longer. A pack that still exceeds a limit is formed once more. Then each sample weighs the
largest of its shares in the limits, so that no limit can be exceeded.

Lengths and budget are in any one unit: tokens, or multiples of the alignment, which is faster. The implementation is in
``exact_fill_kernels``, compiled where numba is installed.

>>> import numpy as np
>>> choice = ExactFill().choose(np.array([3, 6, 5, 2, 4]), np.full(5, -1), 8, 9, True, window=4)
>>> choice.indices.tolist(), choice.bounds.tolist()
([1, 3, 0, 2, 4], [0, 2, 4, 5])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from streampack.core.packers.exact_fill import exact_fill_kernels
from streampack.core.packers.packer import I64, NO_EXTRA, WHOLE, Capped, Choice, Extra, Limited, writable
from streampack.errors import ConfigError

#: A subset sum takes one bit per token of the budget and per sample tried: 17 GB of address space at this budget.
MAX_BUDGET = 2**27
NO_CAP = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class ExactFill(Capped):
    """Packer that fills packs to the token; inside a pack samples are oldest first.

    - ``max_samples_per_pack``: the most samples in a pack; None for no cap.
    - ``in_turn``: full samples leave in their turn, and the end of a stream leaves in order of age.
    """

    max_budget: ClassVar[int | None] = MAX_BUDGET
    keeps_limits: ClassVar[bool] = True
    takes_all: ClassVar[bool] = True

    name: str = "exact_fill"
    in_turn: bool = False

    def max_wait(self, window: int, held: int) -> int:
        """Return the most packs that may be formed while one sample waits: ``window + held``.

        ``held`` is the number of samples in the window when the sample came.
        """
        return window + held

    def choose(
        self, lengths: I64, ages: I64, budget: int, count: int, closed: bool, *, window: int, sizes: I64 | None = None,
        extra: Extra = NO_EXTRA,
    ) -> Choice:  # fmt: skip
        """Choose up to ``count`` packs, as in ``Packer.choose``; at a closed stream's end, choose all packs.

        With limits, ``count`` holds also at the end.
        """
        if budget >= MAX_BUDGET:
            raise ConfigError(
                f"budget: got {budget}, expected less than {MAX_BUDGET} for exact_fill. Set align, or use sliding_ffd"
            )
        cap = self.max_samples_per_pack
        if sizes is None or cap is None:
            sizes, cap = np.ones(len(lengths), np.int64), cap or NO_CAP
        # Numba would compile another variant for every other type, memory layout and access.
        lengths, sizes, ages = writable(lengths), writable(sizes), writable(ages)
        counts, most = extra.limited or Limited(np.zeros((0, len(lengths)), np.int64), np.zeros(0, np.int64))
        if (most > WHOLE).any():  # smaller numbers, so that their products with tokens fit 64 bits
            scale = np.where(most > WHOLE, most, WHOLE)[:, None]
            counts, most = -(-counts * WHOLE // scale), np.minimum(most, WHOLE)
        if len(most) and self.max_samples_per_pack is not None:
            counts, most = np.vstack([sizes, counts]), np.append(self.max_samples_per_pack, most)
        options = int(budget), int(count), bool(closed), int(window), int(cap)
        limits = writable(counts), writable(most)
        return Choice(*exact_fill_kernels.exact_fill(lengths, sizes, ages, *options, *limits, self.in_turn))
