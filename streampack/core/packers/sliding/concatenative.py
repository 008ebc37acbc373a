"""``concatenative``: next fit in input order, which most training code simply calls packing.

One pack is open; a sample that does not fit closes it and opens the next. Nothing is reordered and nothing waits. The
price is a gap of half a sample in a pack on average. With long samples packs may be half empty: at worst twice the best
number of packs (Johnson, "Fast algorithms for bin packing", J. Comput. Syst. Sci. 8, 1974). The semantics, with the cap
on samples, are those of NeMo-RL and AutoModel's ``pack_dataset``.

>>> import numpy as np
>>> lengths = np.array([4, 1, 3, 2, 1, 3, 4, 5])
>>> Concatenative().choose(lengths, np.full(8, -1), 5, 9, True, window=1).bounds.tolist()
[0, 2, 4, 6, 7, 8]
"""

from __future__ import annotations

from dataclasses import dataclass

from streampack.core.packers.packer import I64, NO_EXTRA, Capped, Choice, Extra, choice_of, sample_counts


@dataclass(frozen=True, slots=True)
class Concatenative(Capped):
    """Packer by next fit; a pack also closes at ``max_samples_per_pack`` samples."""

    name: str = "concatenative"

    def choose(
        self, lengths: I64, ages: I64, budget: int, count: int, closed: bool, *, window: int, sizes: I64 | None = None,
        extra: Extra = NO_EXTRA,
    ) -> Choice:  # fmt: skip
        """Choose up to ``count`` packs, as in ``Packer.choose``, in the order of the samples.

        The open pack is left to the next call unless no sample can join it.
        """
        samples = sample_counts(sizes, len(lengths))
        cap = self.max_samples_per_pack or sum(samples) + 1
        packs: list[range] = []
        start = tokens = held = 0
        for i, (length, size) in enumerate(zip(lengths.tolist(), samples, strict=True)):
            if len(packs) >= count:
                break
            if tokens + length > budget or held + size > cap:
                packs.append(range(start, i))
                start, tokens, held = i, 0, 0
            tokens += length
            held += size
            if len(packs) < count and (tokens == budget or held == cap):
                packs.append(range(start, i + 1))
                start, tokens, held = i + 1, 0, 0
        if closed and len(packs) < count and start < len(lengths):
            packs.append(range(start, len(lengths)))
        return choice_of(packs, ages.copy())
