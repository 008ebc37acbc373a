"""Merge: which stream gives the next sample, as a function of seed, weights and position.

Streams take turns by stride scheduling (Waldspurger and Weihl, 1995): each has a clock that runs
on by ``stride * tokens`` for every sample it gives (or by ``stride``, where weights are shares of
samples), and the stream whose clock is lowest is next, ties by number. Strides are integers,
inversely proportional to the weights, so shares hold whatever the lengths, and nothing depends on
which producer was faster. A stream that has ended drops out, or, if it is to stop the rest, ends the
merge when its turn comes; one that is silent stalls the rest, and ``blocked`` names it.

Within a stream its partitions take turns, those that ended being passed over. Entries wait in ``queues``.

Where a pass over the data is to end before the next begins, a stream whose partitions are at their
barriers pauses; once all have paused the merge gives nothing until ``next_pass``, which begins as the
first pass did: with the clocks that the seed gives.

When weights change, each stream keeps the lead over the last sample's clock that it has, as a number of
tokens (or samples): multiplied by new stride and divided by old (Waldspurger and Weihl's dynamic
tickets). What it got before is neither made up for nor held against it, so from there on its share follows
its new weight, as if it had always had it. All of it is a function of the position alone, never of what
is known of ends that are still to come: so a change that is replayed at its position gives the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from streampack.core.merge.arrival import Arrival
from streampack.core.merge.merge_kernels import merge_take
from streampack.core.merge.queues import BLOCK, NOWHERE, Queues, Taken
from streampack.core.model.rules import MAX_WEIGHT_RATIO, Rules, WeightUnit
from streampack.core.model.samples import I64
from streampack.core.model.snapshot import MergeState

STRIDE_ONE = 1 << 20
PHASES = 1024
MAX_CLOCK = 1 << 40
"""Clocks are set back once they have come so far: far from 64 bits, whatever a sample's stride."""
_NOTHING = np.zeros(0, np.int64)


def strides(weights: list[float]) -> I64:
    """Integer strides, int64 [streams]: clock per token or sample, lowest for the heaviest stream.

    Raises ValueError if a weight is not positive or the ratio of two exceeds 4096.
    """
    heaviest = max(weights)
    for weight in weights:
        if not weight > 0 or heaviest / weight > MAX_WEIGHT_RATIO:
            raise ValueError(f"got weight {weight:g}, expected one above {heaviest / MAX_WEIGHT_RATIO:g}")
    return np.array([round(STRIDE_ONE * heaviest / weight) for weight in weights], np.int64)


def phase(seed: int, stream: int) -> int:
    """Where the seed lets a stream begin: splitmix64 of both, below 1024. Tokens, or 1024ths of a sample."""
    z = (seed * 0x9E3779B97F4A7C15 + (stream + 1) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (z ^ (z >> 31)) % PHASES


class Merge(Queues):
    """The merge of some streams; partitions are numbered through, streams in their order.

    ``partitions`` int per stream; ``unit`` is what weights are shares of; ``stops`` are the numbers of streams
    that end the merge with them. ``merged_samples`` and ``merged_tokens`` int64 [partitions] count
    what was taken. State is small integers and queues of entries not yet merged.
    """

    def __init__(
        self, weights: list[float], partitions: list[int], seed: int, block: int = BLOCK,
        unit: WeightUnit = "tokens", stops: Sequence[int] = (),
    ) -> None:  # fmt: skip
        super().__init__(partitions, block, _removed(weights))
        self._seed, self._by_sample = seed, unit == "samples"
        self._weigh(weights, stops)
        self._clock = self._start.copy()
        self._paused = np.zeros(len(weights), np.bool_)
        self._stopped = False
        self._now = np.zeros(1, np.int64)
        self._turn = np.zeros(len(weights), np.int64)
        self._live = self._stride > 0
        self._num_ordered = np.zeros(1, np.int64)
        self._put_in_order()
        self._out: I64 = np.empty((2, 0), np.int64)  # room for all that waits, which is not touched before it is used
        self._blocked = -1

    def _weigh(self, weights: Sequence[float], stops: Sequence[int]) -> None:
        """Strides (0 for what is removed), and where the clocks begin a pass."""
        left = [weight for weight in weights if weight] or list(weights)
        self._stride = np.zeros(len(weights), np.int64)
        self._stride[np.array(weights) != 0] = strides(left)
        self._stops = np.isin(np.arange(len(weights)), stops)
        phases = np.array([phase(self._seed, s) for s in range(len(weights))], np.int64)
        # Those that stop the rest go first, so that a pass in which they are missing is not begun.
        self._start = np.where(self._stops, -1, phases * (self._stride // (PHASES if self._by_sample else 1)))

    def take(self, max_tokens: int, max_position: int = NOWHERE) -> Taken:
        """All that can be merged now, until ``max_tokens`` (the last sample may pass them) or a position is reached."""
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
            self.merged_tokens, self._by_sample, max_tokens, left, handles, lengths,
        )  # fmt: skip
        self._stopped, self._stuck, self._blocked = blocked == -2, blocked >= 0, int(blocked)
        moved = np.flatnonzero(self.merged_samples != before)
        self._fresh &= not len(moved)
        return Taken(handles[:count].copy(), lengths[:count].copy(), None if blocked < 0 else int(blocked), moved)

    def change(self, weights: Sequence[float], partitions: Sequence[int], stops: Sequence[int] = ()) -> I64:
        """Other weights from here on; arguments as for a new merge. Handles of what is dropped, int64 [n].

        A weight of 0 removes a stream: what waits of it is dropped, and no more is pushed. New streams stand after
        those there are and join at the clock of the last sample. In a run that is played again, call it at the same
        position before anything else. Raises ValueError for weights that cannot be, a removed stream that comes
        back, or a new one at the beginning of a later pass; nothing has changed then.
        """
        old, known, removed = self._stride, len(self._stride), _removed(weights)
        back = [s for s in range(known) if old[s] == 0 and weights[s]]
        if back:
            raise ValueError(f"got a weight for stream {back[0]}, expected 0: it was removed, add it anew")
        strides([weight for weight in weights if weight] or list(weights))  # before anything changes
        dropped = self._restream(partitions, removed)
        self._weigh(weights, stops)
        self._rebase()
        clock = self._start.copy()
        if not self._fresh:
            leads = zip(self._clock.tolist(), self._stride.tolist(), old.tolist(), strict=False)
            clock[:known] = [lead * new // was if was else 0 for lead, new, was in leads]
            clock[known:] = 0
        more = len(weights) - known
        self._clock, self._turn = clock, np.concatenate([self._turn, np.zeros(more, np.int64)])
        self._paused = np.concatenate([self._paused, np.zeros(more, np.bool_)])
        self._live = np.concatenate([self._live, np.ones(more, np.bool_)]) & (self._stride > 0)
        self._put_in_order()
        return dropped

    def _put_in_order(self) -> None:
        """Set up the heap of streams that may give samples; a sorted list is a heap."""
        active = np.flatnonzero(self._live & ~self._paused)
        self._order = np.zeros(len(self._live), np.int64)
        self._order[: len(active)] = active[np.argsort(self._clock[active], kind="stable")]
        self._num_ordered[0] = len(active)

    def _rebase(self) -> None:
        """Clocks count from the last sample's on; those that will not be read again in this pass stand at 0."""
        active = self._live & ~self._paused
        self._clock = np.where(active, self._clock - self._now, 0)
        self._now[0] = 0

    def state(self) -> MergeState:
        """What decides the order of all that is not merged yet; entries that wait are read again."""
        self._rebase()
        return MergeState(
            self._clock.tolist(), self._turn.tolist(), self._live.tolist(), self._done.tolist(),
            self.merged_samples.tolist(), self.merged_tokens.tolist(), self._at_barrier.tolist(), self._stopped,
            self._fresh, self._passes,
        )  # fmt: skip

    def load(self, state: MergeState) -> None:
        """Go on from a state, in a merge of the same streams that has taken nothing.

        Each partition's next entry is the one after its first ``merged_samples``.
        """
        columns = (self._clock, self._turn, self._live, self._ended, self.merged_samples, self.merged_tokens)
        *values, at_barrier, self._stopped, self._fresh, self._passes = msgspec.structs.astuple(state)
        for column, each in zip(columns, values, strict=True):
            column[:] = each
        self._stuck = False
        self._put_in_order()
        for partition in np.flatnonzero(at_barrier).tolist():
            self.end_pass(partition)  # nobody will send it again: it came with the last sample before it

    @property
    def stopped(self) -> bool:
        """A stream that was to stop the rest has ended: what is not merged never will be."""
        return self._stopped

    def next_pass(self) -> None:
        """Go over the barriers that all streams are at; only ``between_passes``."""
        super().next_pass()
        self._clock, self._now[0] = self._start.copy(), 0
        self._turn[:] = 0
        self._paused[:] = False
        self._put_in_order()


AnyMerge = Merge | Arrival


def merge_of(rules: Rules) -> AnyMerge:
    """The merge of all streams of some rules; one of weight 0 was removed."""
    weights, partitions, stops = _terms(rules)
    if rules.merge == "arrival":
        return Arrival(partitions, removed=_removed(weights))
    return Merge(weights, partitions, rules.seed, unit=rules.weight_unit, stops=stops)


def warm_up(rules: Rules) -> None:
    """Merge a sample of each partition, over the end of a pass: kernels are compiled, or read from the disk."""
    merge, one = merge_of(rules), np.ones(1, np.int64)
    for partition in range(len(merge.merged_samples)):
        merge.push(partition, one, one, one - 1)
        merge.end_pass(partition)
    merge.take(NOWHERE)
    merge.next_pass()
    merge.drop()


def change(merge: AnyMerge, rules: Rules) -> I64:
    """Go on by other rules from the next sample on; ``Merge.change`` says how, what it raises and returns."""
    return merge.change(*_terms(rules))


def _terms(rules: Rules) -> tuple[list[float], list[int], list[int]]:
    """Of every stream weight and partitions, and the numbers of those that stop the rest."""
    streams = rules.streams
    stops = [number for number, stream in enumerate(streams) if stream.on_exhaust == "stop"]
    return [stream.weight for stream in streams], [stream.partitions for stream in streams], stops


def _removed(weights: Sequence[float]) -> list[int]:
    return [number for number, weight in enumerate(weights) if weight == 0]
