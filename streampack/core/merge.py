"""Merge: which stream gives the next sample, as a function of seed, weights and position.

Streams take turns by stride scheduling (Waldspurger and Weihl, 1995): each has a clock that runs
on by ``stride * tokens`` for every sample it gives (or by ``stride``, where weights are shares of
samples), and the stream whose clock is lowest is next, ties by number. Strides are integers,
inversely proportional to the weights, so shares hold whatever the lengths, and nothing depends on
which producer was faster. A stream that has ended drops out, or, if it is to stop the rest, ends the
merge when its turn comes; one that is silent stalls the rest, and ``blocked`` names it.

Within a stream its partitions take turns, those that ended being passed over. Entries wait in ``rings``.

Where a pass over the data is to end before the next begins, a stream whose partitions are at their
barriers pauses; once all have paused the merge gives nothing until ``next_pass``, which begins as the
first pass did: with the clocks that the seed gives.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from streampack.core.arrival import Arrival
from streampack.core.kernels import merge_take
from streampack.core.rings import Rings, Taken
from streampack.core.rules import MAX_WEIGHT_RATIO, Rules, WeightUnit
from streampack.core.samples import I64
from streampack.core.snapshot import MergeState

STRIDE_ONE = 1 << 20
PHASES = 1024


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


class Merge(Rings):
    """The merge of some streams; partitions are numbered through, streams in their order.

    ``partitions`` int per stream; ``unit`` is what weights are shares of; ``stops`` are the numbers of streams
    that end the merge with them. ``merged_samples`` and ``merged_tokens`` int64 [partitions] count
    what was taken. State is small integers and rings of entries not yet merged.
    """

    def __init__(
        self, weights: list[float], partitions: list[int], seed: int, width: int = 1024,
        unit: WeightUnit = "tokens", stops: Sequence[int] = (),
    ) -> None:  # fmt: skip
        super().__init__(sum(partitions), width)
        self._stride = strides(weights)
        self._by_sample = unit == "samples"
        self._stops = np.isin(np.arange(len(weights)), stops)
        phases = np.array([phase(seed, s) for s in range(len(weights))], np.int64)
        # Those that stop the rest go first, so that a pass in which they are missing is not begun.
        self._start = np.where(self._stops, -1, phases * (self._stride // (PHASES if self._by_sample else 1)))
        self._clock = self._start.copy()
        self._paused = np.zeros(len(weights), np.bool_)
        self._stopped = False
        self._first = np.concatenate([[0], np.cumsum(partitions)]).astype(np.int64)
        self._turn = np.zeros(len(weights), np.int64)
        self._live = np.ones(len(weights), np.bool_)

    def take(self, max_tokens: int) -> Taken:
        """All that can be merged now, until ``max_tokens`` are reached (the last sample may pass them)."""
        active = self._live & ~self._paused
        if self._stopped or not active.any():
            nothing = np.zeros(0, np.int64)
            return Taken(nothing, nothing, None, nothing)
        self._clock[active] -= self._clock[active].min()
        bound = int((self._tail - self._head).sum())
        handles, lengths = np.empty(bound, np.int64), np.empty(bound, np.int64)
        before = self.merged_samples.copy()
        count, blocked = merge_take(
            self._clock, self._stride, self._first, self._turn, self._live, self._paused, self._stops,
            self._head, self._tail, self._ended, self._handle, self._length, self._part,
            self.merged_samples, self.merged_tokens, self._by_sample, max_tokens, handles, lengths,
        )  # fmt: skip
        self._stopped = blocked == -2
        moved = np.flatnonzero(self.merged_samples != before)
        return Taken(handles[:count], lengths[:count], None if blocked < 0 else int(blocked), moved)

    def state(self) -> MergeState:
        """What decides the order of all that is not merged yet; entries that wait are read again."""
        return MergeState(
            self._clock.tolist(), self._turn.tolist(), self._live.tolist(), self._done.tolist(),
            self.merged_samples.tolist(), self.merged_tokens.tolist(), self._at_barrier.tolist(), self._stopped,
        )  # fmt: skip

    def load(self, state: MergeState) -> None:
        """Go on from a state, in a merge of the same streams that has taken nothing.

        Each partition's next entry is the one after its first ``merged_samples``.
        """
        columns = (self._clock, self._turn, self._live, self._ended, self.merged_samples, self.merged_tokens)
        *values, at_barrier, self._stopped = msgspec.structs.astuple(state)
        for column, each in zip(columns, values, strict=True):
            column[:] = each
        for partition in np.flatnonzero(at_barrier).tolist():
            self.end_pass(partition)  # nobody will send it again: it came with the last sample before it

    @property
    def stopped(self) -> bool:
        """A stream that was to stop the rest has ended: what is not merged never will be."""
        return self._stopped

    def next_pass(self) -> None:
        """Go over the barriers that all streams are at; only ``between_passes``."""
        super().next_pass()
        self._clock[:] = self._start
        self._turn[:] = 0
        self._paused[:] = False


AnyMerge = Merge | Arrival


def merge_of(rules: Rules) -> AnyMerge:
    """The merge of all streams of some rules."""
    streams = rules.streams
    if rules.merge == "arrival":
        return Arrival([stream.partitions for stream in streams])
    stops = [number for number, stream in enumerate(streams) if stream.on_exhaust == "stop"]
    return Merge(
        [s.weight for s in streams], [s.partitions for s in streams], rules.seed, unit=rules.weight_unit, stops=stops
    )
