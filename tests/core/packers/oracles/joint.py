"""An oracle for ``joint``: the same groups over lists. Its module says what is done and why."""

from __future__ import annotations

import numpy as np

from streampack.core.packers.joint.joint_bounds import WAITING
from streampack.core.packers.joint.joint_kernels import OPEN
from streampack.core.packers.packer import I64, choice_of
from tests.core.packers.oracles.exact_fill import fill_exactly


def joint_oracle(
    lengths: I64, ages: I64, sizes: I64, budget: int, count: int, closed: bool,
    window: int, group: int, patience: int, cap: int,
) -> tuple[I64, I64, I64]:  # fmt: skip
    """What ``joint_kernels.joint`` returns: indices, bounds and ages of a Choice."""
    view = View(lengths.tolist(), ages.tolist(), sizes.tolist(), budget, window, group, patience, cap)
    packs: list[list[int]] = []
    while len(packs) < count:
        ready = view.refill()
        if not view.held or not (closed or ready):
            break
        formed = view.form(ready)
        packs += formed
        view.remove(formed)
    choice = choice_of(packs, view.ages())
    return choice.indices, choice.bounds, choice.ages


class View:
    """The samples held: ``held`` positions by age, ``by_length`` longest first, of which ``num_outliers`` are such."""

    def __init__(
        self, lengths: list[int], ages: list[int], sizes: list[int],
        budget: int, window: int, group: int, patience: int, cap: int,
    ) -> None:  # fmt: skip
        self.lengths, self.sizes, self.budget, self.window, self.group = lengths, sizes, budget, window, group
        self.patience, self.cap = patience, cap
        self.groups = 0
        self.edge = self.seen = sum(age >= 0 for age in ages)
        self.due = ages[: self.edge]  # the group in which a sample is late
        self.held = list(range(self.edge))
        self.split()

    def split(self) -> None:
        """Tell the outliers apart."""
        self.by_length = sorted(self.held, key=lambda i: (-self.lengths[i], i))
        tokens = sum(self.lengths[i] for i in self.held)
        squares = sum(self.lengths[i] ** 2 for i in self.held)
        self.num_outliers = self.outlier_tokens = 0
        for i in self.by_length:
            length = self.lengths[i]
            # In floats, as in the kernel, where the products would not fit 64 bits.
            if 5.0 * float(length) * float(length) * float(tokens) <= 3.0 * float(self.budget) * float(squares):
                break
            self.num_outliers += 1
            self.outlier_tokens += length
            tokens -= length
            squares -= length * length
        self.tokens, self.density = tokens, squares // max(tokens, 1)
        self.crowded = self.outlier_tokens >= max(WAITING * self.group * self.budget, 2 * tokens)

    def refill(self) -> bool:
        """Take samples in until the window is ready; False where there were not enough."""
        tokens, short = self.group * self.budget, False
        while not short:
            missing = self.window - len(self.held) + self.num_outliers
            missing_tokens = 2 * tokens - self.tokens
            if (missing <= 0 and missing_tokens <= 0) or self.crowded:
                return True
            all_tokens = self.tokens + self.outlier_tokens
            while self.edge < len(self.lengths) and (missing > 0 or missing_tokens > 0):
                self.due.append(self.groups + 2 * self.patience + all_tokens // tokens)
                self.held.append(self.edge)
                missing -= 1
                missing_tokens -= self.lengths[self.edge]
                all_tokens += self.lengths[self.edge]
                self.edge += 1
            short = missing > 0 or missing_tokens > 0
            self.split()
        return False

    def form(self, ready: bool) -> list[list[int]]:
        """The packs of the next group."""
        if not ready:
            packs = self.last_packs()
            if packs:
                return packs
        late = [i for i in self.held if self.due[i] <= self.groups][: self.group]
        runs = self.runs(ready)
        forced = {*late, *runs}
        rest = self.by_age(forced)
        short, mean = self.shorts()
        order = [*sorted(late, key=self.longest_first), *sorted({*runs, *rest} - {*late}, key=self.longest_first)]
        bins = _Bins(self, self.group, mean)
        for i in order:
            bins.place(i, 0 if i in forced else self.budget // (OPEN // 2))
        placed = {i for pack in bins.packs for i in pack}
        waiting = {*self.by_length[: self.num_outliers]} if ready else set()
        left = [i for i in self.held if i not in placed and i not in waiting]
        left.sort(key=lambda i: self.lengths[i] > short)  # stable: the short ones, then the others, both by age
        for p in range(self.group):
            left = bins.fill(p, left)
        return [sorted(pack) for pack in bins.packs if pack]

    def longest_first(self, i: int) -> tuple[int, int]:
        return -self.lengths[i], i

    def last_packs(self) -> list[list[int]]:
        """All that is left in the fewest packs, ``group`` at most, that placing finds; or none."""
        tokens = sum(self.lengths[i] for i in self.held)
        for count in range(-(-tokens // self.budget), self.group + 1):
            bins = _Bins(self, count, 0)
            if all(bins.place(i, 0) for i in self.by_length):
                return [sorted(pack) for pack in bins.packs]
        return []

    def runs(self, ready: bool) -> list[int]:
        """The outliers that go with this group: neighbors by length, alike if they can be; shorter runs beside."""
        outliers = self.by_length[: self.num_outliers]
        size = min(self.group, len(outliers))
        lengths = [self.lengths[i] for i in outliers]
        first, room, chosen = self.first_run(outliers, lengths, size) if ready else 0, self.budget, []
        while first + size <= len(outliers) and size:
            chosen += outliers[first : first + size]
            room -= lengths[first]
            first = self.longest_run(lengths, first + size, room) if ready else len(outliers)
        return chosen

    def first_run(self, outliers: list[int], lengths: list[int], size: int) -> int:
        """Where the first run begins: around the oldest that is impatient; or the longest alike; or if crowded any."""
        lasts = len(outliers) - size
        soon = min((i for i in outliers if self.due[i] <= self.groups + self.patience), default=-1)
        starts = range(lasts + 1)
        if soon >= 0:
            at = outliers.index(soon)
            starts = range(max(0, at - size + 1), min(at, lasts) + 1)
        else:
            first = self.longest_run(lengths, 0, self.budget)
            if first < len(outliers) or not self.crowded:
                return first
        return min(starts, key=lambda k: lengths[k] / lengths[k + size - 1])

    def longest_run(self, lengths: list[int], start: int, room: int) -> int:
        """Where the longest run of outliers alike begins, from ``start`` on, that fits ``room``; the end if none."""
        for k in range(start, len(lengths) - self.group + 1):
            long, short = lengths[k], lengths[k + self.group - 1]
            work = long * long + (room - long) * self.density
            if long <= room and work <= short * short + (room - short) * self.density * 3 // 2:
                return k
        return len(lengths)

    def by_age(self, forced: set[int]) -> list[int]:
        """The oldest ordinary samples, then the oldest outliers, that fit beside those forced in."""
        open_tokens = self.group * self.budget - self.group * (self.budget // OPEN) * 3
        tokens = sum(self.lengths[i] for i in forced)
        outliers = {*self.by_length[: self.num_outliers]}
        chosen = []
        for i in sorted(self.held, key=lambda i: i in outliers):
            if i not in forced:
                tokens += self.lengths[i]
                if tokens > open_tokens:
                    break
                chosen.append(i)
        return chosen

    def shorts(self) -> tuple[int, int]:
        """The length of the longest short sample, and the mean length of the short ones; 0 where there are none."""
        tokens = longest = count = 0
        for i in self.by_length[: self.num_outliers - len(self.by_length) - 1 : -1]:
            if 8 * tokens >= self.tokens:
                break
            longest = self.lengths[i]
            tokens += longest
            count += 1
        return longest, tokens // max(count, 1)

    def remove(self, packs: list[list[int]]) -> None:
        """Take a formed group out."""
        gone = {i for pack in packs for i in pack}
        self.held = [i for i in self.held if i not in gone]
        self.split()
        self.seen = self.edge
        self.groups += 1

    def ages(self) -> I64:
        """Groups until each sample is late, int64 [n]; -1 for those that no group has seen."""
        ages = np.full(len(self.lengths), -1, np.int64)
        ages[: self.seen] = np.maximum(np.array(self.due[: self.seen], np.int64) - self.groups, 0)
        return ages


class _Bins:
    """The packs of a group while they are filled: room in tokens and in samples, and work."""

    def __init__(self, view: View, count: int, mean: int) -> None:
        self.lengths, self.sizes, self.mean = view.lengths, view.sizes, mean
        self.packs: list[list[int]] = [[] for _ in range(count)]
        self.room, self.work, self.free = [view.budget] * count, [0] * count, [view.cap] * count

    def place(self, i: int, keep: int) -> bool:
        """Put sample i where there is least work, of the packs that have ``keep`` tokens to spare then, if any has."""
        length, size = self.lengths[i], self.sizes[i]
        fits = [p for p, room in enumerate(self.room) if room >= length + keep and self.free[p] >= size]
        if not fits:
            return False
        p = min(fits, key=self.work.__getitem__)
        self.put(p, i)
        self.work[p] += length * (length - self.mean)
        return True

    def put(self, p: int, i: int) -> None:
        self.packs[p].append(i)
        self.room[p] -= self.lengths[i]
        self.free[p] -= self.sizes[i]

    def fill(self, p: int, left: list[int]) -> list[int]:
        """Fill pack p exactly if that can be; where it takes too many samples, longest first. What is left then."""
        fits = [(i, self.lengths[i]) for i in left if self.lengths[i] <= self.room[p]]
        picks = fill_exactly(fits, self.room[p]) if self.room[p] else []
        if sum(self.sizes[i] for i in picks) > self.free[p]:
            picks, room, free = [], self.room[p], self.free[p]
            for i, length in sorted(fits, key=lambda fit: (-fit[1], fit[0])):
                if length <= room and self.sizes[i] <= free:
                    picks.append(i)
                    room -= length
                    free -= self.sizes[i]
        for i in picks:
            self.put(p, i)
        return [i for i in left if i not in {*picks}]
