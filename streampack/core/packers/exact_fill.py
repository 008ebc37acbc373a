"""``exact_fill``: packs that are full to the token, from a sliding window, nearly in order.

Theory of operation. A pack is seeded by the oldest sample of the window, and the rest of it is an
exact subset sum over the window: a bitset says which gaps are reachable, one shift and one OR per
sample (Bellman 1957; the bitset is folklore). Samples are tried in age order and the search
stops at the first perfect fill, so packs are near to first-in-first-out, and each is full.

Filling to the token is right while small samples abound. It is wrong when they do not: a sample
longer than half the budget ("long") shares its pack with no other long one, so where the long
ones alone need almost as many packs as there are tokens for, every long one must get its share of
the small ones, and a perfect fill of three small samples starves two later packs. Therefore

- *crowded*: ``num_long * budget > 0.7 * tokens`` held. A small seed first gets the longest long
  sample that fits, and the rest is tried longest first, so that the smallest, which fit anywhere,
  are kept for last;
- *scarce*: crowded, and ``num_long * budget > 0.75 * tokens``. The rest is taken longest first,
  whatever fits, and a small gap is accepted: a bin of first fit decreasing, near-optimal there
  (Johnson, "Near-optimal bin packing algorithms", MIT 1973; Shor, "The average-case analysis of
  some on-line algorithms for bin packing", Combinatorica 6, 1986). A seed that would leave more
  than budget / 1024 waits for a better partner, and the next oldest is tried; if none of 64 does
  better, the least gap wins.

Once the stream is closed and the window runs dry, all that will come is known. First fit decreasing
packs it; where that plan is provably minimal, or the window scarce, its pack with the oldest sample
is the next. Otherwise the window counts as crowded, and the plan is tried again after the pack.
Nothing is remembered: without one of its packs, first fit decreasing makes the others as before.

A *full* sample, as long as the budget, leaves alone and at once, so that full ones do not crowd the
window. Both rules make others wait; when the oldest has waited W packs, it goes first, whatever
the gap.

No sample waits more than W packs plus the samples held when it came. For once it has waited W packs, so
has every older one, and each pack takes the oldest until it has gone itself; the older ones were
held when it came.

Lengths and budget are in any one unit: tokens, or multiples of the alignment, which is faster.
Below is the plain-Python twin, where a row of the bitset is one big int. ``kernels`` holds the
same in numba, used where numba is installed; tests hold the two equal, pack for pack.

>>> import numpy as np
>>> choice = ExactFill().choose(np.array([3, 6, 5, 2, 4]), np.full(5, -1), 8, 9, True, window=4)
>>> choice.indices.tolist(), choice.bounds.tolist()
([0, 2, 1, 3, 4], [0, 2, 4, 5])
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from streampack.core.packers.decreasing import first_fit_decreasing
from streampack.core.packers.window import I64, Choice, Window, slide

#: Samples tried in one subset sum. 20 to 40 are enough for a perfect fill unless lengths share a factor.
MAX_TRIED = 1024
#: In a scarce window: seeds tried for a pack, and the part of the budget that may be left empty without trying on.
MAX_SEEDS = 64
NEARLY_FULL = 1024

Sample = tuple[int, int]  # position, length
Kernel = Callable[[I64, I64, int, int, bool, int], tuple[I64, I64, I64]]


@dataclass(frozen=True, slots=True)
class ExactFill:
    """See the module; ``choose`` is the Packer protocol's. Inside a pack samples are in age order."""

    name: str = "exact_fill"

    def choose(self, lengths: I64, ages: I64, budget: int, count: int, closed: bool, *, window: int) -> Choice:
        """Up to ``count`` packs, by the numba kernel where there is numba."""
        kernel = _kernel()
        if kernel is None:
            return choose_in_python(lengths, ages, budget, count, closed, window)
        # Of one type, layout and access, or numba would stop to compile another variant.
        lengths, ages = (np.require(array, np.int64, ["C", "W"]) for array in (lengths, ages))
        return Choice(*kernel(lengths, ages, int(budget), int(count), bool(closed), int(window)))


@cache
def _kernel() -> Kernel | None:
    """The compiled twin, or None without numba; imported at the first pack, for numba takes a second."""
    try:
        from streampack.core.packers import kernels
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("numba", "llvmlite"):
            raise
        return None
    kernel: Kernel = kernels.exact_fill
    return kernel


def choose_in_python(lengths: I64, ages: I64, budget: int, count: int, closed: bool, window: int) -> Choice:
    """The twin of ``kernels.exact_fill``: slower, needs numpy alone, and is the tests' oracle."""
    return slide(Window(lengths, ages, budget, window), count, closed, _next_pack)


def _next_pack(view: Window) -> list[int]:
    """Positions of the next pack, in age order. The window is short only when the stream is closed."""
    seed, length = next(iter(view.held.items()))
    if view.full and view.age(seed) < view.size:
        return [view.full[0]]
    long_share = view.num_long * view.budget
    scarce = 4 * long_share > 3 * view.tokens
    if not view.is_ready():
        last = _last_packs(view)
        if scarce or len(last) == max(-(-view.tokens // view.budget), view.num_long):
            return next(sorted(pack) for pack in last if seed in pack)
    elif scarce:
        return sorted(_scarce_pack(view))
    pack = [seed]
    room = view.budget - length
    rest = [sample for sample in view.held.items() if sample[1] <= room and sample[0] != seed]
    if 10 * long_share > 7 * view.tokens or not view.is_ready():
        rest.sort(key=lambda sample: -sample[1])
        if 2 * length <= view.budget and rest and 2 * rest[0][1] > view.budget:
            partner, length = rest.pop(0)
            pack.append(partner)
            room -= length
    room = _take_ahead(view, rest, room, pack)
    return sorted(pack + _fill_exactly(rest, room))


def _last_packs(view: Window) -> list[list[int]]:
    """First fit decreasing over all that is held. Without one of its packs it would form the others just so."""
    youngest_first = list(view.held)[::-1]  # so that ties go to the oldest
    packs = first_fit_decreasing([view.held[position] for position in youngest_first], view.budget)
    return [[youngest_first[i] for i in pack] for pack in packs]


def _scarce_pack(view: Window) -> list[int]:
    """The first of the oldest samples' packs that is as good as full; if there is none, the fullest of them."""
    by_length = sorted(view.held.items(), key=lambda sample: -sample[1])
    negated = [-length for _, length in by_length]
    best: list[int] = []
    least = view.budget
    for i, seed in enumerate(view.held):
        pack, gap = _greedy_pack(view, by_length, negated, seed)
        if gap < least:
            best, least = pack, gap
        if NEARLY_FULL * least <= view.budget or i + 1 == MAX_SEEDS or view.age(seed) >= view.size:
            break
    return best


def _greedy_pack(view: Window, by_length: list[Sample], negated: list[int], seed: int) -> tuple[list[int], int]:
    """The seed, a long sample if it is none, and longest first whatever still fits; and the gap left."""
    pack = [seed]
    room = view.budget - view.held[seed]
    at = bisect_left(negated, -room)
    if 2 * view.held[seed] <= view.budget and at < len(by_length) and 2 * by_length[at][1] > view.budget:
        pack.append(by_length[at][0])
        room -= by_length[at][1]
    while room:
        at = bisect_left(negated, -room, at)
        while at < len(by_length) and by_length[at][0] in pack:
            at += 1
        if at == len(by_length):
            break
        pack.append(by_length[at][0])
        room -= by_length[at][1]
        at += 1
    return pack, room


def _take_ahead(view: Window, rest: list[Sample], room: int, pack: list[int]) -> int:
    """Move samples from ``rest`` to ``pack`` until at most 16 mean lengths are open, and at least 8; the room left.

    The last few samples decide whether a pack is full; the bitset need not be wider than they are.
    """
    held = len(view.held)
    skipped = []
    for i, (position, length) in enumerate(rest):
        if room * held <= 16 * view.tokens:
            skipped += rest[i:]
            break
        if (room - length) * held < 8 * view.tokens:
            skipped.append((position, length))
        else:
            pack.append(position)
            room -= length
    rest[:] = skipped
    return room


def _fill_exactly(rest: list[Sample], room: int) -> list[int]:
    """The subset that leaves the smallest gap; among those, one of the first samples in order.

    Bit g of a row is set when a gap of g is reachable with the samples tried so far.
    """
    row = 1 << room
    rows = []
    tried = []
    for position, length in [sample for sample in rest if sample[1] <= room][:MAX_TRIED]:
        if row & 1:
            break
        wider = row | row >> length
        if wider != row:
            rows.append(row)
            tried.append((position, length))
            row = wider
    gap = (row & -row).bit_length() - 1
    picks = []
    for before, (position, length) in zip(reversed(rows), reversed(tried), strict=True):
        if not before >> gap & 1:
            picks.append(position)
            gap += length
    return picks
