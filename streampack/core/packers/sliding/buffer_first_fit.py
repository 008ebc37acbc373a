"""``buffer_first_fit``: take every sample that fits, in order of arrival.

A pack takes the oldest sample, and then each next one that still fits. This is VeOmni's ``dyn_bsz``, the best open
streaming packer that we compared with. VeOmni's buffer is ready with one budget of tokens, our window with two. Over a
closed set that lies in the window it is first fit. So is Axolotl's ``multipack``, which is called first fit decreasing
but does not sort. A pack costs O(window).

>>> import numpy as np
>>> choice = BufferFirstFit().choose(np.array([3, 6, 5, 2, 4]), np.full(5, -1), 8, 9, True, window=5)
>>> choice.indices.tolist(), choice.bounds.tolist()
([0, 2, 1, 3, 4], [0, 2, 4, 5])
"""

from __future__ import annotations

from dataclasses import dataclass

from streampack.core.packers.packer import I64, NO_EXTRA, Capped, Choice, Extra, sample_counts
from streampack.core.packers.window import SlidingWindow, slide


@dataclass(frozen=True, slots=True)
class BufferFirstFit(Capped):
    """Packer that fills each pack from the window in order of arrival."""

    name: str = "buffer_first_fit"

    def choose(
        self, lengths: I64, ages: I64, budget: int, count: int, closed: bool, *, window: int, sizes: I64 | None = None,
        extra: Extra = NO_EXTRA,
    ) -> Choice:  # fmt: skip
        """Choose up to ``count`` packs, as in ``Packer.choose``; inside a pack, samples are oldest first."""
        samples = sample_counts(sizes, len(lengths))
        cap = self.max_samples_per_pack or sum(samples)

        def next_packs(view: SlidingWindow) -> list[list[int]]:
            """Return a list of one pack: the oldest sample, and each later sample in the window that still fits."""
            pack: list[int] = []
            room, spare = view.budget, cap
            for position, length in view.held.items():
                if length <= room and samples[position] <= spare:
                    pack.append(position)
                    room -= length
                    spare -= samples[position]
                    if not (room and spare):
                        break
            return [pack]

        return slide(SlidingWindow(lengths, ages, budget, window), count, closed, next_packs)
