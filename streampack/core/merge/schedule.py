"""The merge by weights: which stream gives the next sample, as a function of seed, weights and position.

Streams take turns by stride scheduling (Waldspurger and Weihl, 1995). Each stream has a clock that advances by ``stride
* tokens`` for every sample it gives; or by ``stride``, where weights are shares of samples. The stream with the lowest
clock is next; ties go by number. ``merge_kernels.merge_take`` takes these turns. Strides are integers, inversely
proportional to the weights. So shares do not depend on the lengths of samples or the speed of producers. A stream that
has ended loses its turns, or ends the merge at its next turn if it stops the others. A silent stream blocks the others,
and ``blocked`` names its partition.

Within a stream its partitions take turns; those that ended are skipped. Entries wait in ``queues``.

Where a pass over the data ends before the next begins, a stream whose partitions are at their barriers pauses. Once all
have paused the merge gives nothing until ``next_pass``. The next pass begins as the first pass did: with the clocks
that the seed gives.

When weights change, each stream keeps its lead over the last sample's clock as a number of tokens (or samples). The
lead is multiplied by the new stride and divided by the old (Waldspurger and Weihl's dynamic tickets). From there on its
share follows its new weight, as if it had always had that weight. The result depends only on the position, never on
which streams are already known to end. So a change that is replayed at its position gives the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from streampack.core.merge.arrival import Arrival
from streampack.core.merge.merge_kernels import merge_take
from streampack.core.merge.queues import BLOCK, NOWHERE, Queues, Taken
from streampack.core.model.keys.planning_keys import WeightUnit
from streampack.core.model.rules import MAX_WEIGHT_RATIO, Rules
from streampack.core.model.samples import I64
from streampack.core.model.snapshot import MergeState

STRIDE_ONE = 1 << 20
PHASES = 1024
MAX_CLOCK = 1 << 40
"""Clocks are rebased once they are above this, so that no sample's stride makes them overflow 64 bits."""
_NOTHING = np.zeros(0, np.int64)


def strides(weights: list[float]) -> I64:
    """Return each stream's stride, int64 [streams]: the clock ticks per token or sample, fewest for the largest weight.

    Raises ValueError if a weight is not positive or the ratio of two exceeds 4096.
    """
    heaviest = max(weights)
    for weight in weights:
        if not weight > 0 or heaviest / weight > MAX_WEIGHT_RATIO:
            raise ValueError(f"got weight {weight:g}, expected a weight above {heaviest / MAX_WEIGHT_RATIO:g}")
    return np.array([round(STRIDE_ONE * heaviest / weight) for weight in weights], np.int64)


def phase(seed: int, stream: int) -> int:
    """Return the start value of a stream's clock: splitmix64 of seed and stream number, below 1024.

    The unit is tokens, or 1024ths of a sample.
    """
    z = (seed * 0x9E3779B97F4A7C15 + (stream + 1) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (z ^ (z >> 31)) % PHASES


class Merge(Queues):
    """The merge of streams by weights. Its state is small integers, and queues of entries not merged yet.

    Args:
        weights: Weight of each stream; 0 for a removed stream.
        partitions: Number of partitions of each stream. Partition numbers continue from one stream to the next.
        seed: Seed of the clocks' start values.
        block: Entries in a block of memory.
        unit: Unit of the weights: shares of ``tokens`` or of ``samples``.
        stops: Numbers of streams that end the merge when they end.
        paused: Numbers of streams that give no samples now.
    """

    def __init__(
        self, weights: list[float], partitions: list[int], seed: int, block: int = BLOCK,
        unit: WeightUnit = "tokens", stops: Sequence[int] = (), paused: Sequence[int] = (),
    ) -> None:  # fmt: skip
        super().__init__(partitions, block, _removed(weights))
        self._seed, self._by_sample = seed, unit == "samples"
        self._set_strides(weights, stops, paused)
        self._clock = self._start.copy()
        self._paused = np.zeros(len(weights), np.bool_)
        self._stopped = False
        self._now = np.zeros(1, np.int64)
        self._turn = np.zeros(len(weights), np.int64)
        self._live = self._stride > 0
        self._num_ordered = np.zeros(1, np.int64)
        self._put_in_order()
        self._out: I64 = np.empty((2, 0), np.int64)  # room for all waiting entries; memory is used when written to
        self._blocked = -1

    def _set_strides(self, weights: Sequence[float], stops: Sequence[int], paused: Sequence[int]) -> None:
        """Set the strides (0 for a stream that gives nothing), the streams that end the merge, and the start clocks."""
        self.pause(paused)
        self._removed = np.array(weights) == 0
        gives = ~self._removed & ~np.isin(np.arange(len(weights)), paused)
        left = [weight for weight, is_giving in zip(weights, gives.tolist(), strict=True) if is_giving]
        self._stride = np.zeros(len(weights), np.int64)
        self._stride[gives] = strides(left) if left else 0
        self._stops = np.isin(np.arange(len(weights)), stops)
        phases = np.array([phase(self._seed, s) for s in range(len(weights))], np.int64)
        # Streams that stop the others go first, so that a pass in which they are missing is not begun.
        self._start = np.where(self._stops, -1, phases * (self._stride // (PHASES if self._by_sample else 1)))

    def take(self, max_tokens: int, max_position: int = NOWHERE, max_entries: int = NOWHERE) -> Taken:
        """Take samples in merge order, until one is missing, or one of the limits is reached.

        The last sample may exceed ``max_tokens`` or ``max_entries``, which counts pieces of samples. Rejected samples
        count in the position, but are not returned.
        """
        if self._stopped or self._stuck:
            return Taken(_NOTHING, _NOTHING, self._blocked if self._stuck else None, _NOTHING)
        if self._now[0] > MAX_CLOCK:
            self._rebase()
        if len(self._out[0]) < self._queues.num_entries:
            self._out = np.empty((2, self._queues.num_entries), np.int64)
        handles, lengths = self._out
        before = self.merged_samples.copy()
        left = max_position - self.position if max_position < NOWHERE else NOWHERE
        count, blocked = merge_take(
            self._order, self._num_ordered, self._now, self._clock, self._stride, self._first, self._turn, self._live,
            self._paused, self._stops, self._queues, self._ended, self.merged_samples,
            self.merged_tokens, self._by_sample, max_tokens, left, max_entries,
            handles, lengths,
        )  # fmt: skip
        self._stopped, self._stuck, self._blocked = blocked == -2, blocked >= 0, int(blocked)
        moved = np.flatnonzero(self.merged_samples != before)
        self._fresh &= not len(moved)
        return Taken(handles[:count].copy(), lengths[:count].copy(), None if blocked < 0 else int(blocked), moved)

    def missing(self, most: int) -> list[int]:
        """Return up to ``most`` partitions without entries from which the next sample of their stream comes.

        The partition of the stream with the lowest clock is first.
        """
        streams = self._order[: self._num_ordered[0]]
        streams = streams[np.lexsort((streams, self._clock[streams]))]
        rows = self._first[streams] + self._turn[streams]
        lacking = (self._queues.head[rows] == self._queues.tail[rows]) & ~self._ended[rows]
        return rows[lacking][:most].tolist()  # type: ignore[no-any-return]

    def change(
        self, weights: Sequence[float], partitions: Sequence[int], stops: Sequence[int] = (), paused: Sequence[int] = ()
    ) -> I64:  # fmt: skip
        """Change the weights from the next sample on; arguments as for a new merge.

        A weight of 0 removes a stream: its waiting entries are dropped, and nothing more is pushed to it. New streams
        come after the existing streams. They start at the clock of the last sample, as do streams that paused. In a run
        that is replayed, call it at the same position before anything else.

        Returns:
            The handles of the dropped entries' samples, int64 [n].

        Raises:
            ValueError: A weight is not allowed, a removed stream comes back, or a stream is added between two passes.
                The merge is then unchanged.
        """
        old, num_streams, removed = self._stride, len(self._stride), _removed(weights)
        back = [s for s in range(num_streams) if self._removed[s] and weights[s]]
        if back:
            raise ValueError(
                f"got a weight for stream {back[0]}, expected 0, because the stream was removed. Add a new stream "
                f"instead"
            )
        gives = [weight for number, weight in enumerate(weights) if weight and number not in paused]
        strides(gives or list(weights))  # raises before anything changes
        dropped = self._restream(partitions, removed)
        self._set_strides(weights, stops, paused)
        self._rebase()
        clock = self._start.copy()
        if not self._fresh:
            leads = zip(self._clock.tolist(), self._stride.tolist(), old.tolist(), strict=False)
            clock[:num_streams] = [lead * new // was if was else 0 for lead, new, was in leads]
            clock[num_streams:] = 0
        more = len(weights) - num_streams
        self._clock, self._turn = clock, np.concatenate([self._turn, np.zeros(more, np.int64)])
        self._paused = np.concatenate([self._paused, np.zeros(more, np.bool_)])
        resumed = np.concatenate([old == 0, np.ones(more, np.bool_)])
        self._live = (np.concatenate([self._live, np.ones(more, np.bool_)]) | resumed) & (self._stride > 0)
        self._put_in_order()
        return dropped

    def _put_in_order(self) -> None:
        """Set up the heap of streams that may give samples; a sorted list is a heap."""
        active = np.flatnonzero(self._live & ~self._paused)
        self._order = np.zeros(len(self._live), np.int64)
        self._order[: len(active)] = active[np.argsort(self._clock[active], kind="stable")]
        self._num_ordered[0] = len(active)

    def _rebase(self) -> None:
        """Make all clocks relative to the last sample's; clocks that are not read again in this pass become 0."""
        active = self._live & ~self._paused
        self._clock = np.where(active, self._clock - self._now, 0)
        self._now[0] = 0

    def state(self) -> MergeState:
        """Return the state that decides the order of all later samples, without the waiting entries."""
        self._rebase()
        return MergeState(
            self._clock.tolist(), self._turn.tolist(), self._live.tolist(), self._done.tolist(),
            self.merged_samples.tolist(), self.merged_tokens.tolist(), self._at_barrier.tolist(), self._stopped,
            self._fresh, self._passes,
        )  # fmt: skip

    def load(self, state: MergeState) -> None:
        """Resume from a state; this merge must have the same streams and no taken samples.

        Each partition's next entry follows its first ``merged_samples`` samples.
        """
        columns = (self._clock, self._turn, self._live, self._ended, self.merged_samples, self.merged_tokens)
        *values, at_barrier, self._stopped, self._fresh, self._passes = msgspec.structs.astuple(state)
        for column, value in zip(columns, values, strict=True):
            column[:] = value
        self._stuck = False
        self._put_in_order()
        for partition in np.flatnonzero(at_barrier).tolist():
            self.end_pass(partition)  # no producer sends the barrier again: it came with the last sample before it

    @property
    def stopped(self) -> bool:
        """True if a stream with ``on_exhaust: stop`` has ended, so that no more samples are merged."""
        return self._stopped

    def next_pass(self) -> None:
        """Remove the barriers that all streams have reached, and set the clocks as at the first pass.

        Call it only ``between_passes``.
        """
        super().next_pass()
        self._clock, self._now[0] = self._start.copy(), 0
        self._turn[:] = 0
        self._paused[:] = False
        self._put_in_order()


AnyMerge = Merge | Arrival


def merge_of(rules: Rules, step: int = 0) -> AnyMerge:
    """Return an empty merge of the streams of ``rules`` at ``step``; streams with weight 0 count as removed."""
    weights, partitions, stops, paused = _merge_terms(rules, step)
    if rules.merge == "arrival":
        merge = Arrival(partitions, removed=_removed(weights))
        merge.pause(paused)
        return merge
    return Merge(weights, partitions, rules.seed, unit=rules.weight_unit, stops=stops, paused=paused)


def warm_up(rules: Rules) -> None:
    """Compile the merge's kernels, or load them from the disk, by merging one sample of each partition."""
    merge, one = merge_of(rules), np.ones(1, np.int64)
    for partition in range(len(merge.merged_samples)):
        merge.push(partition, one, one, one - 1)
        merge.end_pass(partition)
    merge.take(NOWHERE)
    merge.next_pass()
    merge.drop()


def change_merge(merge: AnyMerge, rules: Rules, step: int = 0) -> I64:
    """Change the weights and streams of ``merge`` to those of ``rules`` at ``step``, from the next sample on.

    Returns the handles of dropped entries, and raises ValueError, as ``Merge.change`` does.
    """
    return merge.change(*_merge_terms(rules, step))


def _merge_terms(rules: Rules, step: int) -> tuple[list[float], list[int], list[int], list[int]]:
    """Return each stream's weight and number of partitions, the streams that end the merge, and those that pause."""
    streams, shares = rules.streams, rules.shares_at(step)
    stops = [number for number, stream in enumerate(streams) if stream.on_exhaust == "stop"]
    paused = [number for number, stream in enumerate(streams) if stream.weight and not shares[number]]
    weights = [share or stream.weight for share, stream in zip(shares, streams, strict=True)]
    return weights, [stream.partitions for stream in streams], stops, paused


def _removed(weights: Sequence[float]) -> list[int]:
    """Return the numbers of the streams with weight 0, which were removed."""
    return [number for number, weight in enumerate(weights) if weight == 0]
