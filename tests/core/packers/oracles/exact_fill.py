"""An oracle for ``exact_fill``: the same packs, over a dict of the samples held."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

import numpy as np

from streampack.core.packers.blocks.first_fit import first_fit
from streampack.core.packers.exact_fill.exact_fill import NO_CAP
from streampack.core.packers.exact_fill.exact_fill_cases import CAPPED_TRIED, MAX_SWAPPED, OLD, SWEEPS
from streampack.core.packers.exact_fill.exact_fill_kernels import MAX_LAST
from streampack.core.packers.packer import I64, Choice, sample_counts
from streampack.core.packers.packer_kernels import MAX_TRIED
from streampack.core.packers.window import SlidingWindow, slide

Sample = tuple[int, int]  # position, length


class CountedWindow(SlidingWindow):
    """A window that counts what ``exact_fill`` decides by.

    ``num_long`` counts the samples longer than half the budget, ``num_full`` those as long as the budget; ``full`` is a
    queue of these (some behind its head may have left), and ``patience`` the sum of the others' patience.
    """

    def __init__(self, lengths: I64, ages: I64, budget: int, size: int, in_turn: bool = False) -> None:
        super().__init__(lengths, ages, budget, size)
        self.in_turn = in_turn
        self.num_long = self.num_full = self.patience = 0
        self.full: deque[int] = deque()
        self._late_from = 0

    def is_late(self) -> bool:
        """Whether the oldest sample has to be in the next pack."""
        if self.packs < self._late_from:
            return False
        counted = [
            self._due[position] - rank
            for rank, (position, length) in enumerate(self.held.items())
            if not self.in_turn or length < self.budget
        ]
        spare = min(counted, default=NO_CAP) - self.packs
        self._late_from = self.packs + min(spare, self.size)  # a sample yet to come begins with ``size`` to spare
        return spare <= 0

    def refill(self) -> None:
        """Take in samples from behind the edge until it is ready or there are none."""
        while self.edge < len(self._lengths) and (self._ages[self.edge] >= 0 or not self.is_ready()):
            position, length, age = self.edge, self._lengths[self.edge], int(self._ages[self.edge])
            turn = self.tokens // self.budget if self.in_turn and length == self.budget else self.size + len(self.held)
            self._due.append(self.packs + (age if age >= 0 else turn))
            self.held[position] = length
            self.tokens += length
            self.edge += 1
            if length == self.budget:
                self.full.append(position)
            self._count(position, length, 1)

    def ages(self) -> I64:
        """The patience of each sample; of a full one that waits beyond its turn, 0."""
        ages = super().ages()
        ages[: self.edge] = np.maximum(ages[: self.edge], 0)
        return ages

    def full_goes(self, patient: bool) -> bool:
        """Return True if a full sample may go now, unless another sample is late."""
        return bool(self.full) and (self._due[self.full[0]] <= self.packs if self.in_turn else patient)

    def remove(self, pack: Sequence[int]) -> None:
        """Take a formed pack out."""
        for position in pack:
            self._count(position, self.held[position], -1)
        super().remove(pack)
        while self.full and self.full[0] not in self.held:
            self.full.popleft()
        self.patience -= len(self.held) - self.num_full

    def _count(self, position: int, length: int, sign: int) -> None:
        self.num_long += sign * (2 * length > self.budget)
        self.num_full += sign * (length == self.budget)
        if length < self.budget:
            self.patience += sign * (self._due[position] - self.packs)


def exact_fill_oracle(
    lengths: I64, ages: I64, budget: int, count: int, closed: bool, window: int,
    sizes: I64 | None = None, cap: int | None = None, in_turn: bool = False,
) -> Choice:  # fmt: skip
    """What ``exact_fill_kernels.exact_fill`` returns."""
    view = CountedWindow(lengths, ages, budget, window, in_turn)
    samples, most = sample_counts(sizes, len(lengths)), NO_CAP if cap is None else cap

    def next_packs(_: SlidingWindow) -> list[list[int]]:
        last = not view.is_ready() and (len(view.held) <= MAX_LAST or _is_crowded(view))
        if last and not (in_turn and len(view.held) <= MAX_LAST):
            return last_packs(view, samples, most)
        pack = _next_pack(view)
        pack = pack if sum(samples[position] for position in pack) <= most else capped(view, samples, most)
        if last and _num_last(view, samples, most, pack) >= _num_last(view, samples, most, []):
            return last_packs(view, samples, most)
        return [pack]

    return slide(view, count, closed, next_packs)


def _is_crowded(view: CountedWindow) -> bool:
    return 5 * (view.num_long - view.num_full) * view.budget > 4 * (view.tokens - view.num_full * view.budget)


def _next_pack(view: CountedWindow) -> list[int]:
    """Positions of the next pack, in age order."""
    late = view.is_late()
    others = len(view.held) - view.num_full
    patient = 8 * others < 3 * view.size or 5 * view.patience >= 6 * view.size * others
    if not late and view.full_goes(patient):
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
    return sorted(pack + fill_exactly(rest, room))


def _critical_pack(view: CountedWindow, seed: int, late: bool) -> list[int]:
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


def _closest_pair(view: CountedWindow, by_length: list[Sample]) -> list[int]:
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


def _best_with(view: CountedWindow, by_length: list[Sample], seed: int, gain: int) -> list[int]:
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


def _take_ahead(view: CountedWindow, rest: list[Sample], room: int, pack: list[int]) -> int:
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


def fill_exactly(rest: list[Sample], room: int) -> list[int]:
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


def capped(view: CountedWindow, samples: list[int], cap: int) -> list[int]:
    """The oldest sample's pack, of ``cap`` samples at most; ``samples`` are those in each item, by position."""
    seed, length = next(iter(view.held.items()))
    pack = [seed]
    rest: list[tuple[int, int, int]] = []
    room, slots = view.budget - length, cap - samples[seed]
    held = sum(samples[position] for position in view.held)
    ahead = room * held >= slots * view.tokens
    for position, length in list(view.held.items())[1:]:
        if len(rest) == CAPPED_TRIED or not slots:
            break
        size = samples[position]
        if length > room or size > slots:
            continue
        if ahead and (room - length) * held >= (slots - size) * view.tokens:
            pack.append(position)
            room -= length
            slots -= size
        else:
            rest.append((position, length, size))
    return sorted(pack + _fill_with_few([each for each in rest if each[1] <= room], room, slots))


def _fill_with_few(rest: list[tuple[int, int, int]], room: int, slots: int) -> list[int]:
    """Those of (position, length, size) that leave the smallest gap, with ``slots`` samples at most."""
    fewest = np.full(room + 1, slots + 1)  # by gap; slots + 1 where it cannot be left
    fewest[room] = 0
    rows = []
    for _, length, size in rest:
        if fewest[0] <= slots:
            break
        fewer = fewest[length:] + size
        better = fewer < fewest[: room + 1 - length]
        fewest[: len(better)][better] = fewer[better]
        rows.append(better)
    gap = int(np.argmax(fewest <= slots))
    picks = []
    for better, (position, length, _) in zip(reversed(rows), reversed(rest[: len(rows)]), strict=True):
        if gap < len(better) and better[gap]:
            picks.append(position)
            gap += length
    return picks


def _num_last(view: CountedWindow, samples: list[int], cap: int, left_out: list[int]) -> int:
    """How many packs first fit decreasing makes of what is held, without ``left_out``."""
    ordered = sorted((p for p in view.held if p not in left_out), key=lambda position: -view.held[position])
    lengths, sizes = [view.held[p] for p in ordered], [samples[p] for p in ordered]
    return len(first_fit(range(len(ordered)), lengths, view.budget, cap, sizes))


def last_packs(view: CountedWindow, samples: list[int], cap: int) -> list[list[int]]:
    """All that is held, in packs of ``cap`` samples at most, the one with the oldest first; those in each item are
    ``samples``, by position.
    """
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
