"""The merge in order of arrival: samples are taken in the order in which their chunks were admitted.

The *script* is that order: runs of (partition, the sequence number at which the run ends), over all streams. While the
broker runs, a pushed chunk is the script's next run. A broker that restarts first gets the script from the log
(``script``, for every ``ChunkAdmitted`` in its order). Then the samples may come again in any order: the merge takes
them in the order of the script, and the script does not grow. A sample that is next in the script and missing blocks
the others, and ``blocked`` names its partition.

Runs are numbered, and the runs of a partition are linked. The next partition is the one whose first run has the lowest
number, of those that are not at a barrier. So entries behind a partition's barrier wait for their own pass without
blocking other partitions, and keep their place in the script. The order is the script, sorted stably by pass: a
function of script, barriers and ends alone. A partition that has ended blocks no other. Weights, units and
``on_exhaust`` are not used.
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
    """The order in which chunks were admitted: runs of samples of one partition each.

    Attributes:
        base: Number of the first run in the arrays.
        upto: Number of the next run to come.
        stop: int64 [n], for run ``base + i``: the partition's sequence number at which the run ends.
        after: int64 [n], for run ``base + i``: the number of the partition's next run; -1 if there is none.
        current: int64 [partitions], the number of each partition's first run; -1 if there is none.
        last: int64 [partitions], the number of each partition's last run.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self.base = 0
        self.upto = 0
        self.stop = np.zeros(capacity, np.int64)
        self.after = np.zeros(capacity, np.int64)
        self.current = np.zeros(0, np.int64)
        self.last = np.zeros(0, np.int64)

    def add(self, partition: int, stop: int) -> None:
        """Append a run: next come the samples of ``partition`` up to sequence number ``stop``.

        If the last run belongs to the same partition, extend that run.
        """
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
        """Add ``partitions`` new partitions, which have no samples in the script yet."""
        if not partitions:
            return
        more = np.full(partitions, NONE, np.int64)
        self.current, self.last = np.concatenate([self.current, more]), np.concatenate([self.last, more])

    def clear(self) -> None:
        """Remove all runs."""
        self.base = self.upto
        self.current[:] = NONE

    def _make_room(self) -> None:
        """Drop the runs that are merged, and double the memory if the other runs fill half of it."""
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
    """The merge of streams in the order of arrival. Its state is the script, small integers and queues.

    Arguments are those of ``Queues``.
    """

    def __init__(self, partitions: Sequence[int], block: int = BLOCK, removed: Sequence[int] = ()) -> None:
        super().__init__(partitions, block, removed)
        self._script = Script()
        # For each partition: barriers passed, barriers pushed, samples pushed, samples in the script.
        self._passed, self._barriers_pushed = list[int](), list[int]()
        self._pushed, self._scripted = list[int](), list[int]()
        self._extend(sum(partitions))

    @property
    def num_barriers_pushed(self) -> list[int]:
        """Number of barriers (ends of passes) pushed to each partition, including barriers before a loaded state.

        A partition's barriers are numbered from 0. To replay recorded barriers, push only those from this number on.
        """
        return list(self._barriers_pushed)

    def script(self, partition: int, first_seq: int, count: int) -> None:
        """Add admitted samples to the script, the order of arrival: ``count`` of a partition, from ``first_seq`` on.

        The method ignores samples that are in the script already.

        Call it before anything is pushed, for all chunks admitted since the loaded state or earlier. Later, call it for
        a chunk that is admitted now and pushed later. The partition may be of a stream that ``change`` adds later.
        Raises ValueError if samples before ``first_seq`` are missing.
        """
        self._extend(partition + 1)
        scripted, stop = self._scripted[partition], first_seq + count
        if first_seq > scripted:
            raise ValueError(
                f"got sample {first_seq} of partition {partition} in the script, expected sample {scripted} next"
            )
        if stop > scripted:
            self._script.add(partition, stop)
            self._scripted[partition] = stop

    def push(self, partition: int, handles: I64, lengths: I64, parts: I64) -> None:
        """Append entries of whole samples to a partition's queue, and to the script unless they are in it.

        All int64 [n]. Length 0 is a tombstone; ``parts`` number the pieces of a sample from 0.
        """
        self._append(partition, handles, lengths, parts)
        before, count = self._pushed[partition], int(np.count_nonzero(parts == 0))
        self._pushed[partition] = before + count
        self.script(partition, before, count)

    def end_pass(self, partition: int) -> None:
        """End a partition's pass: entries that follow belong to its next pass."""
        super().end_pass(partition)
        self._barriers_pushed[partition] += 1

    def take(self, max_tokens: int, max_position: int = NOWHERE, max_entries: int = NOWHERE) -> Taken:
        """Take samples in merge order, until one is missing, or one of the limits is reached.

        The last sample may exceed ``max_tokens`` or ``max_entries``. At the end of the script the pass may still wait
        for some partitions. Then ``blocked`` names the waiting partition that has given the fewest samples.
        """
        queues, script = self._queues, self._script
        bound = int((queues.tail - queues.head).sum())
        handles, lengths = np.empty(bound, np.int64), np.empty(bound, np.int64)
        before = self.merged_samples.copy()
        count, blocked = arrival_take(
            script.base, script.stop, script.after, script.current, queues, self._ended,
            self.merged_samples, self.merged_tokens,
            max_tokens, max_position - self.position, max_entries, handles, lengths,
        )  # fmt: skip
        if blocked == -2:
            blocked = self._awaited()
        moved = np.flatnonzero(self.merged_samples != before)
        self._fresh &= not len(moved)
        return Taken(handles[:count], lengths[:count], None if blocked < 0 else int(blocked), moved)

    def change(
        self, weights: Sequence[float], partitions: Sequence[int], _: Sequence[int] = (), paused: Sequence[int] = ()
    ) -> I64:
        """Remove the streams with weight 0, and add new ones, as ``Merge.change`` does; other weights are not used.

        Returns the handles of the dropped entries' samples, int64 [n].
        """
        dropped = self._restream(partitions, [s for s, weight in enumerate(weights) if weight == 0])
        self._extend(len(self._ended))
        self.pause(paused)
        return dropped

    def state(self) -> MergeState:
        """Return the state that decides, with the script, the order of all later samples.

        The state's ``clock`` and ``live`` are empty; ``turn`` counts the barriers that each partition passed.
        """
        return MergeState(
            [], self._passed[: len(self._ended)], [], self._done.tolist(), self.merged_samples.tolist(),
            self.merged_tokens.tolist(), self._at_barrier.tolist(), False, self._fresh,
            self._passes,
        )  # fmt: skip

    def load(self, state: MergeState) -> None:
        """Resume from a state; this merge must have the same streams, no entries, and no taken samples.

        Each partition's next entry follows its first ``merged_samples`` samples. If the partition is at a barrier, do
        not push that barrier again. The script may be added before or afterwards, from its beginning or from this
        state.
        """
        self._ended[:], self._fresh, self._passes = state.ended, state.fresh, state.passes
        self.merged_samples[:], self.merged_tokens[:] = state.merged_samples, state.merged_tokens
        count = len(self._ended)
        self._passed[:count] = self._barriers_pushed[:count] = state.turn
        self._pushed[:count] = state.merged_samples
        self._scripted = [max(pair) for pair in zip(self._scripted, self._pushed, strict=True)]
        for partition in np.flatnonzero(state.at_barrier).tolist():
            self.end_pass(partition)

    def next_pass(self) -> None:
        """Remove the barriers that all partitions have reached. Call it only ``between_passes``."""
        for partition in np.flatnonzero(self._at_barrier).tolist():
            self._passed[partition] += 1
        super().next_pass()

    def drop(self) -> I64:
        """Drop all waiting entries and the script; return the samples' handles, int64 [n].

        Nothing may be pushed afterwards.
        """
        self._script.clear()
        return super().drop()

    def _extend(self, count: int) -> None:
        """Extend the counters and the script to at least ``count`` partitions."""
        more = max(count - len(self._barriers_pushed), 0)
        for column in (self._passed, self._barriers_pushed, self._pushed, self._scripted):
            column += [0] * more
        self._script.grow(more)

    def _awaited(self) -> int:
        """Return the partition with the fewest merged samples among those that may give more in this pass, or -1."""
        open_ = np.flatnonzero(~self._ended & ~self._at_barrier)
        return int(open_[np.argmin(self.merged_samples[open_])]) if len(open_) else NONE
