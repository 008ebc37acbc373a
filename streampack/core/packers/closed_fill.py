"""What ``exact_fill`` does at the end of a stream, in plain Python: all that is left, at once.

Once the stream is closed and the window runs dry, all that will come is known, so its packs need not be formed one
after the other. First fit decreasing forms them; then two samples of two packs change places, or a sample moves, as
long as that makes the fuller of the two packs fuller: hill climbing on the sum of squares of what packs hold, as in
Fleszar and Hindi, "New heuristics for one-dimensional bin-packing", Computers & Operations Research 29, 2002. A pack
whose last sample moves away is gone. So there are never more packs than first fit decreasing makes, and where that
wastes a few packs of some hundred, often two fewer.

A move is a change of places with nothing: each pack has one sample of length 0 to begin with.

The numba twin is in ``exact_fill_cases``.
"""

from __future__ import annotations

import numpy as np

from streampack.core.packers.first_fit import first_fit
from streampack.core.packers.window import I64, Window

#: Samples left, at most, for them to change places: it takes the square of their number, a few times.
MAX_SWAPPED = 2048
#: Times that all samples are looked at, at most.
SWEEPS = 16


def last_packs(view: Window, samples: list[int], cap: int) -> list[list[int]]:
    """All that is held, in packs of ``cap`` samples at most, the one with the oldest first; those in each item are
    ``samples``, by position."""
    ordered = sorted(view.held, key=lambda position: -view.held[position])
    lengths = [view.held[position] for position in ordered]
    sizes = [samples[position] for position in ordered]
    packs = first_fit(range(len(ordered)), lengths, view.budget, cap, sizes)
    pack_of = np.empty(len(ordered), np.int64)
    for number, pack in enumerate(packs):
        pack_of[pack] = number
    if len(ordered) <= MAX_SWAPPED:
        pack_of = _swapped(pack_of, len(packs), np.array(lengths), np.array(sizes), view.budget, cap)
    number_of = dict(zip(ordered, pack_of.tolist(), strict=True))
    found: dict[int, list[int]] = {}
    for position in view.held:
        found.setdefault(number_of[position], []).append(position)
    return list(found.values())


def _swapped(pack_of: I64, num_packs: int, lengths: I64, sizes: I64, budget: int, cap: int) -> I64:
    """The packs, int64 [n], of samples of ``lengths`` int64 [n] after they have changed places."""
    count = len(lengths)
    pack_of = np.concatenate([pack_of, np.arange(num_packs)])
    lengths, sizes = (np.concatenate([each, np.zeros(num_packs, np.int64)]) for each in (lengths, sizes))
    room, free = np.full(num_packs, budget), np.full(num_packs, cap)
    np.subtract.at(room, pack_of, lengths)
    np.subtract.at(free, pack_of, sizes)
    for _ in range(SWEEPS):
        moved = False
        for i in range(count):
            here = pack_of[i]
            if not room[here]:
                continue
            more, also = lengths[i] - lengths, sizes[i] - sizes  # what the other pack then has more
            fits = (more <= room[pack_of]) & (-more <= room[here]) & (also <= free[pack_of]) & (-also <= free[here])
            gains = np.where(fits & (pack_of != here), more * (room[here] - room[pack_of] + more), 0)
            j = int(np.argmax(gains))
            if gains[j] <= 0:
                continue
            there = pack_of[j]
            room[here], room[there] = room[here] + more[j], room[there] - more[j]
            free[here], free[there] = free[here] + also[j], free[there] - also[j]
            pack_of[i], pack_of[j] = there, here
            moved = True
        if not moved:
            break
    return pack_of[:count]
