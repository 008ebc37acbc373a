"""Arrival: the merge of a feed that takes samples in the order in which they came.

Whose turn it is says the *script*: runs of (partition, samples up to which sequence number), in the order
in which chunks were admitted, over all streams. While the broker runs, a chunk that is pushed is the script's next
run. A broker that comes back is told the script first, from the log (``script``, for every
``ChunkAdmitted`` in its order); the samples may then come again in any order and are taken as they
were, and what the script covers adds nothing to it when it is pushed. A sample that the script
names next and that is not there yet holds up the rest, and ``blocked`` names its partition.

Runs are numbered, and each partition's are linked: next is the partition whose first run has the
lowest number, of those that are not at a barrier. So what a partition sent ahead of the others' marks
waits without being in anybody's way, and keeps its place in the script for the pass that it is of. What
is taken is the script, sorted stably by pass: a function of script, marks and ends alone. A
partition that has ended holds nobody up. Weights, units and ``on_exhaust`` have no say.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streampack.core.merge.merge_kernels import arrival_take
from streampack.core.merge.queues import BLOCK, NOWHERE, Queues, Taken
from streampack.core.model.samples import I64
from streampack.core.model.snapshot import MergeState

NONE = -1


class Script:
    """Runs in their order, from number ``base`` on: ``stop`` int64 [n], the partition's sequence number that ends
    it, and ``after``, the number of the partition's next run. ``current`` and ``last`` are each partition's.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self.base = 0
        self.upto = 0
        self.stop = np.zeros(capacity, np.int64)
        self.after = np.zeros(capacity, np.int64)
        self.current = np.zeros(0, np.int64)
        self.last = np.zeros(0, np.int64)

    def add(self, partition: int, stop: int) -> None:
        """The partition's samples up to ``stop`` are next; a run that goes on is not begun again."""
        listed = self.current[partition] != NONE
        if listed and self.last[partition] == self.upto - 1:
            self.stop[self.upto - 1 - self.base] = stop
            return
        if self.upto - self.base == len(self.stop):
            self._make_room()
        number, slot = self.upto, self.upto - self.base
        self.stop[slot], self.after[slot] = stop, NONE
        if listed:
            self.after[int(self.last[partition]) - self.base] = number
        else:
            self.current[partition] = number
        self.last[partition] = number
        self.upto = number + 1

    def grow(self, partitions: int) -> None:
        """So many more partitions, without runs."""
        if not partitions:
            return
        more = np.full(partitions, NONE, np.int64)
        self.current, self.last = np.concatenate([self.current, more]), np.concatenate([self.last, more])

    def clear(self) -> None:
        """Forget all runs."""
        self.base = self.upto
        self.current[:] = NONE

    def _make_room(self) -> None:
        """Leave out the runs that everyone is past, and double if those left fill half of the room."""
        listed = self.current[self.current != NONE]
        base = int(listed.min()) if len(listed) else self.upto
        left = self.upto - base
        room = len(self.stop) * (2 if 2 * left > len(self.stop) else 1)
        for name in ("stop", "after"):
            grown = np.zeros(room, np.int64)
            grown[:left] = getattr(self, name)[base - self.base : self.upto - self.base]
            setattr(self, name, grown)
        self.base = base


class Arrival(Queues):
    """The merge of streams of ``partitions`` each, numbered through as in ``Merge``, in the order of arrival.

    State is the script, small integers and queues of entries not yet merged.
    """

    def __init__(self, partitions: Sequence[int], block: int = BLOCK, removed: Sequence[int] = ()) -> None:
        super().__init__(partitions, block, removed)
        self._script = Script()
        self._passed, self._marks = list[int](), list[int]()
        self._pushed, self._scripted = list[int](), list[int]()
        self._extend(sum(partitions))

    @property
    def marks(self) -> list[int]:
        """Barriers said of each partition, those before a loaded state among them: who repeats recorded marks says
        those whose number is not below it.
        """
        return list(self._marks)

    def script(self, partition: int, first_seq: int, count: int) -> None:
        """Samples ``first_seq`` on of a partition, ``count`` of them, were admitted next; idempotent.

        Call it before anything is pushed, for all that was admitted since the loaded state or longer ago; the
        partition may be of a stream that ``change`` adds later on. Raises ValueError where samples are missing
        before ``first_seq``.
        """
        self._extend(partition + 1)
        known, stop = self._scripted[partition], first_seq + count
        if first_seq > known:
            raise ValueError(f"got sample {first_seq} of partition {partition} in the script, expected {known} first")
        if stop > known:
            self._script.add(partition, stop)
            self._scripted[partition] = stop

    def push(self, partition: int, handles: I64, lengths: I64, parts: I64) -> None:
        """Entries that follow the partition's last, whole samples; all int64 [n], length 0 being a tombstone."""
        self._enter(partition, handles, lengths, parts)
        before, count = self._pushed[partition], int(np.count_nonzero(parts == 0))
        self._pushed[partition] = before + count
        self.script(partition, before, count)

    def end_pass(self, partition: int) -> None:
        """What follows is of the partition's next pass."""
        super().end_pass(partition)
        self._marks[partition] += 1

    def take(self, max_tokens: int, max_position: int = NOWHERE) -> Taken:
        """All that can be merged now, until ``max_tokens`` are reached (the last sample may pass them), or a position.

        Where nothing is missing but more is to come, ``blocked`` is the partition that gave the fewest samples
        of those that the pass still waits for.
        """
        queues, script = self._queues, self._script
        bound = int((queues.tail - queues.head).sum())
        handles, lengths = np.empty(bound, np.int64), np.empty(bound, np.int64)
        before = self.merged_samples.copy()
        count, blocked = arrival_take(
            script.base, script.stop, script.after, script.current, queues, self._ended,
            self.merged_samples, self.merged_tokens,
            max_tokens, max_position - self.position, handles, lengths,
        )  # fmt: skip
        if blocked == -2:
            blocked = self._awaited()
        moved = np.flatnonzero(self.merged_samples != before)
        self._fresh &= not len(moved)
        return Taken(handles[:count], lengths[:count], None if blocked < 0 else int(blocked), moved)

    def change(self, weights: Sequence[float], partitions: Sequence[int], _: Sequence[int] = ()) -> I64:
        """Other streams from here on, as ``Merge.change`` does it; weights matter no more than before."""
        dropped = self._restream(partitions, [s for s, weight in enumerate(weights) if weight == 0])
        self._extend(len(self._ended))
        return dropped

    def state(self) -> MergeState:
        """What decides, with the script, the order of all that is not merged yet.

        ``clock`` and ``live`` are empty, ``turn`` counts the barriers that each partition went over.
        """
        return MergeState(
            [], self._passed[: len(self._ended)], [], self._done.tolist(), self.merged_samples.tolist(),
            self.merged_tokens.tolist(), self._at_barrier.tolist(), False, self._fresh,
            self._passes,
        )  # fmt: skip

    def load(self, state: MergeState) -> None:
        """Go on from a state, in a merge of the same streams that has taken nothing and was pushed nothing.

        Each partition's next entry is the one after its first ``merged_samples``; a barrier that it is at is not
        said again. The script may have been told before or is afterwards, from its beginning or from here.
        """
        self._ended[:], self._fresh, self._passes = state.ended, state.fresh, state.passes
        self.merged_samples[:], self.merged_tokens[:] = state.merged_samples, state.merged_tokens
        count = len(self._ended)
        self._passed[:count] = self._marks[:count] = state.turn
        self._pushed[:count] = state.merged_samples
        self._scripted = [max(pair) for pair in zip(self._scripted, self._pushed, strict=True)]
        for partition in np.flatnonzero(state.at_barrier).tolist():
            self.end_pass(partition)

    def next_pass(self) -> None:
        """Go over the barriers that all partitions are at; only ``between_passes``."""
        for partition in np.flatnonzero(self._at_barrier).tolist():
            self._passed[partition] += 1
        super().next_pass()

    def drop(self) -> I64:
        """Forget what waits, and the script; handles, int64 [n], of its samples. Nothing is pushed afterwards."""
        self._script.clear()
        return super().drop()

    def _extend(self, count: int) -> None:
        """Keep books of ``count`` partitions at least."""
        more = max(count - len(self._marks), 0)
        for each in (self._passed, self._marks, self._pushed, self._scripted):
            each += [0] * more
        self._script.grow(more)

    def _awaited(self) -> int:
        """Of the partitions that may give more in this pass the one that gave the fewest samples, or -1."""
        open_ = np.flatnonzero(~self._ended & ~self._at_barrier)
        return int(open_[np.argmin(self.merged_samples[open_])]) if len(open_) else NONE
