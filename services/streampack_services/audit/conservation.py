"""Account for every sample of one stream: whether it is in a step, rejected, dropped or missing.

One byte per sample holds its state. A sample that the overlong policy split is represented by its part 0; its other
parts are listed separately. A missing last part is not detected if all parts before it are full: the log does not
record the length of the whole sample.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.samples import I64

NOWHERE, BEFORE, IN_STEP, REJECTED, DROPPED = range(5)
"""States of a sample. ``BEFORE``: in a step that is older than the records. ``NOWHERE``: not seen yet."""


class Books:
    """States of all samples of one stream, by index: sample n of partition p has index ``n * partitions + p``."""

    def __init__(self, partitions: int) -> None:
        self.partitions = partitions
        self._states: NDArray[np.uint8] = np.zeros(1 << 12, np.uint8)
        self._pieces: list[tuple[I64, I64]] = []
        self._twice: list[tuple[int, int]] = []
        self.num_samples = 0
        """Number of samples in steps; a split sample counts once."""

    def begin(self, upto: list[int], held_index: I64, held_part: I64) -> None:
        """Begin at a snapshot: mark as ``BEFORE`` the samples that were merged by then and not in its window.

        Samples that are in a recorded step keep their state. ``upto``: for each partition, the number of samples that
        were merged. ``held_index``, ``held_part``: samples in the window, int64 [n] each.
        """
        heads = held_index[held_part == 0]
        for partition, stop in enumerate(upto):
            self.mark(np.setdiff1d(self.missing(partition, stop), heads), BEFORE)
        waiting = set(zip(held_index.tolist(), held_part.tolist(), strict=True))
        for index, part in self._pieces:
            waiting |= set(zip(index.tolist(), part.tolist(), strict=True))
        before = [(sample, k) for sample, part in waiting for k in range(1, part) if (sample, k) not in waiting]
        if before:
            index, part = np.array(sorted(set(before)), np.int64).T
            self._pieces.append((index, part))

    def take(self, index: I64, part: I64) -> None:
        """Mark the samples of a step as ``IN_STEP``; ``index``, ``part``: their ids, int64 [n] each."""
        whole = part == 0
        if not whole.all():
            self._pieces.append((index[~whole], part[~whole]))
        heads, counts = np.unique(index[whole], return_counts=True)
        self._reach(heads)
        is_again = (counts > 1) | np.isin(self._states[heads], (BEFORE, IN_STEP, DROPPED))
        self._twice += [(head, 0) for head in heads[is_again].tolist()]
        self.num_samples += int((self._states[heads] != IN_STEP).sum())
        self._states[heads] = IN_STEP

    def mark(self, index: I64, where: int) -> I64:
        """Set samples in the state ``NOWHERE`` to the state ``where``; return the indices of all others, int64."""
        self._reach(index)
        elsewhere = self._states[index] != NOWHERE
        self._states[index[~elsewhere]] = where
        others: I64 = index[elsewhere]
        return others

    def in_steps(self, index: I64) -> I64:
        """Return the sample indices from ``index`` that are in a step."""
        self._reach(index)
        packed: I64 = index[self._states[index] == IN_STEP]
        return packed

    def upto(self, partition: int) -> int:
        """Return the number after the last sample of a partition that is or was in a step, or was dropped; 0 if none.

        The number counts samples of the partition. Rejected samples may follow, because they are not merged.
        """
        merged = np.flatnonzero(np.isin(self._states[partition :: self.partitions], (BEFORE, IN_STEP, DROPPED)))
        return int(merged[-1]) + 1 if len(merged) else 0

    def missing(self, partition: int, upto: int) -> I64:
        """Return the indices of those of a partition's first ``upto`` samples that are ``NOWHERE``, int64."""
        index = np.arange(upto, dtype=np.int64) * self.partitions + partition
        self._reach(index)
        unseen: I64 = index[self._states[index] == NOWHERE]
        return unseen

    def lost(self, upto: list[int], held_index: I64, held_part: I64) -> list[tuple[int, int]]:
        """Return (index, part) of all samples and parts that are ``NOWHERE`` and not held, sorted.

        Look at the first ``upto`` samples of each partition, and at split samples with at least one known part.
        ``held_index``, ``held_part``: samples that are accounted for elsewhere, int64 [n] each.
        """
        heads = held_index[held_part == 0]
        missing = np.concatenate([self.missing(partition, stop) for partition, stop in enumerate(upto)])
        index, part = self._sorted_pieces(held_index[held_part > 0], held_part[held_part > 0])
        self._reach(index)
        headless = np.unique(index[self._states[index] == NOWHERE])
        lost_parts = [(head, 0) for head in np.setdiff1d(np.union1d(missing, headless), heads).tolist()]
        before = self._parts_before(index, part)
        for i in np.flatnonzero(part - before > 1).tolist():
            lost_parts += [(int(index[i]), k) for k in range(int(before[i]) + 1, int(part[i]))]
        return sorted(lost_parts)

    def twice(self) -> list[tuple[int, int]]:
        """Return (index, part) of all samples and parts that are in the steps more than once, sorted."""
        nothing = np.zeros(0, np.int64)
        index, part = self._sorted_pieces(nothing, nothing)
        is_back = part == self._parts_before(index, part)
        return sorted({*self._twice, *zip(index[is_back].tolist(), part[is_back].tolist(), strict=True)})

    def _sorted_pieces(self, index: I64, part: I64) -> tuple[I64, I64]:
        """Return the known parts other than 0 together with the given ones, sorted by (index, part)."""
        index = np.concatenate([index, *(piece for piece, _ in self._pieces)])
        part = np.concatenate([part, *(piece for _, piece in self._pieces)])
        order = np.lexsort((part, index))
        return index[order], part[order]

    @staticmethod
    def _parts_before(index: I64, part: I64) -> I64:
        """Return for each part the previous part of the same sample, int64 [n]; 0 for a sample's first part."""
        before = np.concatenate([[0], part[:-1]])
        before[np.flatnonzero(np.diff(index, prepend=-1))] = 0
        return before

    def _reach(self, index: I64) -> None:
        """Grow the array of states so that it has an entry for each index."""
        if len(index) and (most := int(index.max())) >= len(self._states):
            grown = np.zeros(max(2 * len(self._states), most + 1), np.uint8)
            grown[: len(self._states)] = self._states
            self._states = grown
