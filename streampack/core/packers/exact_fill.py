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
once, and so are more where they are crowded, whatever was asked for: see ``closed_fill``. They never need more packs
than first fit decreasing makes of them.

No sample waits more than W packs plus the samples held when it came: a late window's next pack
takes the oldest, and ``window`` says why that is enough.

Where a pack may hold only so many samples, one that would hold more is formed anew: see ``capped_fill``.

Lengths and budget are in any one unit: tokens, or multiples of the alignment, which is faster.
Below is the plain-Python twin, where a row of the bitset is one big int. ``exact_fill_kernel``
holds the same in numba, used where numba is installed; tests hold the two equal, pack for pack.

>>> import numpy as np
>>> choice = ExactFill().choose(np.array([3, 6, 5, 2, 4]), np.full(5, -1), 8, 9, True, window=4)
>>> choice.indices.tolist(), choice.bounds.tolist()
([1, 3, 0, 2, 4], [0, 2, 4, 5])
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from streampack.core.packers.capped_fill import capped
from streampack.core.packers.closed_fill import last_packs
from streampack.core.packers.window import I64, Choice, Window, check_cap, sample_counts, slide
from streampack.errors import ConfigError

#: Samples tried in one subset sum. 20 to 40 are enough for a perfect fill unless lengths share a factor.
MAX_TRIED = 1024
#: The end of a stream is formed at once when no more samples than these are left.
MAX_LAST = 2048
#: What a third sample in the pack of a late one may be, in a critical window: one of the oldest so many that fit.
OLD = 64
#: A subset sum takes a bit for each token of the budget and sample tried: 17 GB of address space here.
MAX_BUDGET = 2**27
NO_CAP = np.iinfo(np.int64).max

Sample = tuple[int, int]  # position, length
Kernel = Callable[[I64, I64, I64, int, int, bool, int, int], tuple[I64, I64, I64]]


@dataclass(frozen=True, slots=True)
class ExactFill:
    """See the module; ``choose`` is the Packer protocol's. Inside a pack samples are in age order.

    ``max_samples_per_pack``: None for no cap.
    """

    name: str = "exact_fill"
    max_samples_per_pack: int | None = None

    def __post_init__(self) -> None:
        check_cap(self.max_samples_per_pack)

    def choose(
        self, lengths: I64, ages: I64, budget: int, count: int, closed: bool, *, window: int, sizes: I64 | None = None
    ) -> Choice:
        """Up to ``count`` packs, or at the end all; by the numba kernel where there is numba."""
        if budget >= MAX_BUDGET:
            raise ConfigError(
                f"budget: got {budget}, expected less than {MAX_BUDGET} for exact_fill: take align or sliding_ffd"
            )
        kernel = _kernel()
        cap = self.max_samples_per_pack
        if kernel is None:
            return choose_in_python(lengths, ages, budget, count, closed, window, sizes, cap)
        if sizes is None or cap is None:
            sizes, cap = np.ones(len(lengths), np.int64), cap or NO_CAP
        # Of one type, layout and access, or numba would stop to compile another variant.
        lengths, sizes, ages = _plain(lengths), _plain(sizes), _plain(ages)
        return Choice(*kernel(lengths, sizes, ages, int(budget), int(count), bool(closed), int(window), int(cap)))


def _plain(array: I64) -> I64:
    found: I64 = np.ascontiguousarray(array, np.int64)
    return found if found.flags.writeable else found.copy()


@cache
def _kernel() -> Kernel | None:
    """The compiled twin, or None without numba; imported at the first pack, for numba takes a second."""
    try:
        from streampack.core.packers import exact_fill_kernel
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("numba", "llvmlite"):
            raise
        return None
    kernel: Kernel = exact_fill_kernel.exact_fill
    return kernel


def choose_in_python(
    lengths: I64, ages: I64, budget: int, count: int, closed: bool, window: int,
    sizes: I64 | None = None, cap: int | None = None,
) -> Choice:  # fmt: skip
    """The twin of ``exact_fill_kernel.exact_fill``: slower, needs numpy alone, and is the tests' oracle."""
    view = Window(lengths, ages, budget, window)
    samples, most = sample_counts(sizes, len(lengths)), NO_CAP if cap is None else cap

    def next_packs(view: Window) -> list[list[int]]:
        if not view.is_ready() and (len(view.held) <= MAX_LAST or _is_crowded(view)):
            return last_packs(view, samples, most)
        pack = _next_pack(view)
        return [pack if sum(samples[position] for position in pack) <= most else capped(view, samples, most)]

    return slide(view, count, closed, next_packs)


def _is_crowded(view: Window) -> bool:
    return 5 * (view.num_long - view.num_full) * view.budget > 4 * (view.tokens - view.num_full * view.budget)


def _next_pack(view: Window) -> list[int]:
    """Positions of the next pack, in age order."""
    late = view.is_late()
    others = len(view.held) - view.num_full
    patient = 8 * others < 3 * view.size or 5 * view.patience >= 6 * view.size * others
    if view.full and not late and patient:
        return [view.full[0]]
    seed, length = next(iter(view.held.items()))
    tokens = view.tokens - view.num_full * view.budget
    crowded = _is_crowded(view)
    if crowded and 8 * tokens > others * view.budget:
        return sorted(_critical_pack(view, seed, late))
    pack = [seed]
    room = view.budget - length
    rest = [sample for sample in view.held.items() if sample[1] <= room and sample[0] != seed]
    if crowded:
        rest.sort(key=lambda sample: -sample[1])
        if 2 * length <= view.budget and rest and 2 * rest[0][1] > view.budget:
            partner, length = rest.pop(0)
            pack.append(partner)
            room -= length
    room = _take_ahead(view, rest, room, pack)
    return sorted(pack + _fill_exactly(rest, room))


def _critical_pack(view: Window, seed: int, late: bool) -> list[int]:
    """The pair that fits best, or what fits best with the seed; then longest first whatever still fits."""
    by_length = sorted(view.held.items(), key=lambda sample: -sample[1])
    negated = [-length for _, length in by_length]
    tokens = view.tokens - view.num_full * view.budget
    long_share = (view.num_long - view.num_full) * view.budget
    gain = view.budget
    if 16 * long_share < 15 * tokens:
        gain = (5 * long_share - 4 * tokens) // (30 * max(1, tokens // view.budget))
    if late:
        pack = _best_with(view, by_length, seed, gain)
    else:
        pack = _closest_pair(view, by_length)
        filled = sum(view.held[position] for position in pack)
        if gain < view.budget - filled and view.held[seed] < view.budget:
            other = _best_with(view, by_length, seed, gain)
            if sum(view.held[position] for position in other) >= filled + gain:
                pack = other
    room = view.budget - sum(view.held[position] for position in pack)
    at = 0
    while room:
        at = bisect_left(negated, -room, at)
        while at < len(by_length) and by_length[at][0] in pack:
            at += 1
        if at == len(by_length):
            break
        pack.append(by_length[at][0])
        room -= by_length[at][1]
        at += 1
    return pack


def _closest_pair(view: Window, by_length: list[Sample]) -> list[int]:
    """A long sample, not a full one, and the longest short one that fits, if any: those that leave the least gap."""
    pack: list[int] = []
    least = view.budget
    at = len(by_length)  # of the first short sample that fits
    for position, length in by_length[view.num_full : view.num_long]:
        gap = view.budget - length
        while at > view.num_long and by_length[at - 1][1] <= gap:
            at -= 1
        fits = by_length[at : at + 1]
        gap -= sum(length for _, length in fits)
        if gap < least:
            least, pack = gap, [position, *(position for position, _ in fits)]
    return pack


def _best_with(view: Window, by_length: list[Sample], seed: int, gain: int) -> list[int]:
    """The seed with the longest other that fits, or with one of the oldest and another if these fill ``gain`` more."""
    room = view.budget - view.held[seed]
    others = [sample for sample in by_length if sample[1] <= room and sample[0] != seed]
    negated = [-length for _, length in others]
    pack = [seed, *(position for position, _ in others[:1])]
    least = room - others[0][1] - gain if others else 0
    oldest = [sample for sample in view.held.items() if sample[1] <= room and sample[0] != seed][:OLD]
    for old, length in oldest:
        at = bisect_left(negated, length - room)
        for other, also in [sample for sample in others[at : at + 2] if sample[0] != old][:1]:
            if room - length - also < least:
                least = room - length - also
                pack = [seed, other, old]
    return pack


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

    Bit g of a row is set when a gap of g is reachable with the samples tried so far. A length that reaches no new gap
    reaches none later in the pack either, with other samples before it: the rest of that length need not be tried.
    """
    row = 1 << room
    rows = []
    tried = []
    barren = set()
    for position, length in [sample for sample in rest if sample[1] <= room][:MAX_TRIED]:
        if row & 1:
            break
        if length in barren:
            continue
        wider = row | row >> length
        if wider == row:
            barren.add(length)
            continue
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
