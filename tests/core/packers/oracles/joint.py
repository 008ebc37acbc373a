"""An oracle for ``joint``: the same groups over lists. Its module says what is done and why."""

from __future__ import annotations

import numpy as np

from streampack.core.packers.joint.joint_bounds import WAITING
from streampack.core.packers.joint.joint_kernels import OPEN
from streampack.core.packers.packer import I64, choice_of
from tests.core.packers.oracles.exact_fill import fill_exactly


def joint_oracle(
    lengths: I64, work: I64, ages: I64, counts: I64, most: I64, budget: int, count: int, closed: bool,
    window: int, group: int, patience: int,
) -> tuple[I64, I64, I64]:  # fmt: skip
    """What ``joint_kernels.joint`` returns: indices, bounds and ages of a Choice."""
    view = View(
        lengths.tolist(), work.tolist(), ages.tolist(), counts.T.tolist(), most.tolist(),
        budget, window, group, patience,
    )  # fmt: skip
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
    """The samples held: ``held`` positions by age, ``by_work`` most work first, of which ``num_outliers`` are such."""

    def __init__(
        self, lengths: list[int], work: list[int], ages: list[int], counts: list[list[int]], most: list[int],
        budget: int, window: int, group: int, patience: int,
    ) -> None:  # fmt: skip
        self.lengths, self.work, self.counts, self.most = lengths, work, counts, most
        self.budget, self.window, self.group, self.patience = budget, window, group, patience
        self.groups = 0
        self.edge = self.seen = sum(age >= 0 for age in ages)
        self.due = ages[: self.edge]  # the group in which a sample is late
        self.held = list(range(self.edge))
        self.split()

    def split(self) -> None:
        """Tell the outliers apart."""
        self.by_work = sorted(self.held, key=lambda i: (-self.work[i], i))
        tokens = sum(self.lengths[i] for i in self.held)
        work = sum(self.work[i] for i in self.held)
        self.num_outliers = self.outlier_tokens = 0
        for i in self.by_work:
            # In floats, as in the kernel, where the products would not fit 64 bits.
            if 5.0 * float(self.work[i]) * float(tokens) <= 3.0 * float(self.budget) * float(work):
                break
            self.num_outliers += 1
            self.outlier_tokens += self.lengths[i]
            tokens -= self.lengths[i]
            work -= self.work[i]
        self.tokens, self.density = tokens, work // max(tokens, 1)
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
        order = [*sorted(late, key=self.largest_first), *sorted({*runs, *rest} - {*late}, key=self.largest_first)]
        bins = _Bins(self, self.group, mean)
        outliers = {*self.by_work[: self.num_outliers]}
        for i in order:
            keep = 0 if i in forced else self.budget // (OPEN // 2)
            bins.place(i, keep if i in outliers else min(keep, self.budget - self.lengths[i]))
        placed = {i for pack in bins.packs for i in pack}
        waiting = outliers if ready else set()
        left = [i for i in self.held if i not in placed and i not in waiting]
        left.sort(key=lambda i: self.work[i] > short)  # stable: the short ones, then the others, both by age
        for p in range(self.group):
            left = bins.fill(p, left)
        return [sorted(pack) for pack in bins.packs if pack]

    def largest_first(self, i: int) -> tuple[int, int]:
        return -max(self.work[i], self.lengths[i] * self.density), i

    def last_packs(self) -> list[list[int]]:
        """All that is left in the fewest packs, ``group`` at most, that placing finds; or none."""
        tokens = sum(self.lengths[i] for i in self.held)
        for count in range(-(-tokens // self.budget), self.group + 1):
            bins = _Bins(self, count, 0)
            if all(bins.place(i, 0) for i in self.by_work):
                return [sorted(pack) for pack in bins.packs]
        return []

    def runs(self, ready: bool) -> list[int]:
        """The outliers that go with this group: neighbors by work, alike if they can be; lesser runs beside."""
        outliers = self.by_work[: self.num_outliers]
        size = min(self.group, len(outliers))
        first, room, chosen = self.first_run(outliers, size) if ready else 0, self.budget, []
        while first + size <= len(outliers) and size:
            chosen += outliers[first : first + size]
            room -= max(self.lengths[i] for i in outliers[first : first + size])
            first = self.next_run(outliers, first + size, room) if ready else len(outliers)
        return chosen

    def first_run(self, outliers: list[int], size: int) -> int:
        """Where the first run begins: around the oldest that is impatient; or the first alike; or if crowded any."""
        lasts = len(outliers) - size
        soon = min((i for i in outliers if self.due[i] <= self.groups + self.patience), default=-1)
        starts = range(lasts + 1)
        if soon >= 0:
            at = outliers.index(soon)
            starts = range(max(0, at - size + 1), min(at, lasts) + 1)
        else:
            first = self.next_run(outliers, 0, self.budget)
            if first < len(outliers) or not self.crowded:
                return first
        return min(starts, key=lambda k: self.work[outliers[k]] / self.work[outliers[k + size - 1]])

    def next_run(self, outliers: list[int], start: int, room: int) -> int:
        """Where the next run of outliers alike begins, from ``start`` on, that fits ``room``; the end if none."""
        for k in range(start, len(outliers) - self.group + 1):
            run = outliers[k : k + self.group]
            open_most, open_least = (room - self.lengths[i] for i in (run[0], run[-1]))
            alike = (
                self.work[run[0]] + open_most * self.density <= self.work[run[-1]] + open_least * self.density * 3 // 2
            )
            if alike and all(self.lengths[i] <= room for i in run):
                return k
        return len(outliers)

    def by_age(self, forced: set[int]) -> list[int]:
        """The oldest ordinary samples, then the oldest outliers, that fit beside those forced in."""
        open_tokens = self.group * self.budget - self.group * (self.budget // OPEN) * 3
        tokens = sum(self.lengths[i] for i in forced)
        outliers = {*self.by_work[: self.num_outliers]}
        chosen = []
        for i in sorted(self.held, key=lambda i: i in outliers):
            if i not in forced:
                tokens += self.lengths[i]
                if tokens > open_tokens:
                    break
                chosen.append(i)
        return chosen

    def shorts(self) -> tuple[int, int]:
        """The most work of a short sample, and the work of a token of short ones; 0 where there are none."""
        tokens = highest = media = count = 0
        for i in self.by_work[: self.num_outliers - len(self.by_work) - 1 : -1]:
            if 8 * tokens >= self.tokens:
                break
            highest = self.work[i]
            tokens += self.lengths[i]
            media += self.work[i] - self.lengths[i] ** 2
            count += 1
        return highest, tokens // max(count, 1) + media // max(tokens, 1)

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
    """The packs of a group while they are filled: room in tokens and in other units, and work."""

    def __init__(self, view: View, count: int, mean: int) -> None:
        self.view, self.lengths, self.mean = view, view.lengths, mean
        self.packs: list[list[int]] = [[] for _ in range(count)]
        self.room, self.load = [view.budget] * count, [0] * count

    def place(self, i: int, keep: int) -> bool:
        """Put sample i where there is least work, of the packs that have ``keep`` tokens to spare then, if any has."""
        length = self.lengths[i]
        fits = [p for p, room in enumerate(self.room) if room >= length + keep and self.within([*self.packs[p], i])]
        if not fits:
            return False
        p = min(fits, key=self.load.__getitem__)
        self.put(p, i)
        self.load[p] += self.view.work[i] - length * self.mean
        return True

    def within(self, pack: list[int], first: int = 0) -> bool:
        """No limit is exceeded, of the units from the ``first`` on."""
        sums = [sum(column) for column in zip(*(self.view.counts[i] for i in pack), strict=True)]
        return all(total <= most for total, most in zip(sums[first:], self.view.most[first:], strict=True))

    def put(self, p: int, i: int) -> None:
        self.packs[p].append(i)
        self.room[p] -= self.lengths[i]

    def fill(self, p: int, left: list[int]) -> list[int]:
        """Fill pack p exactly if that can be; where it takes too many samples, longest first. What is left then."""
        pack, room = self.packs[p], self.room[p]
        fits = [(i, self.lengths[i]) for i in left if self.lengths[i] <= room and self.within([*pack, i], 1)]
        picks = fill_exactly(fits, room) if room else []
        if picks and not self.within([*pack, *picks]):
            picks = []
            for i, length in sorted(fits, key=lambda fit: (-fit[1], fit[0])):
                if length <= room and self.within([*pack, *picks, i]):
                    picks.append(i)
                    room -= length
        for i in picks:
            self.put(p, i)
        return [i for i in left if i not in {*picks}]
