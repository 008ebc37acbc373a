"""Several open shards as one, whose samples are numbered through all of them.

Theory of operation. A group of shards is read in one order, in which neighbors come from different shards. So shards
whose samples are arrays must be read together, else each sample would be read alone. Shards of one kind know how to
become one: they have a class method ``join``. Other shards are read one after the other.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.sources.arrays import one_sample
from streampack.sources.records import AnyShard, ArrayShard, RawSamples, Sample


def join(shards: Sequence[AnyShard], by_sample: frozenset[str]) -> AnyShard:
    """Return ``shards`` as one shard. ``by_sample``: names of the fields that have one value per sample."""
    if len(shards) == 1:
        return shards[0]
    first, *others = map(type, shards)
    of_one_kind: Any = getattr(first, "join", None)
    if of_one_kind is not None and set(others) == {first} and (joined := of_one_kind(shards)) is not None:
        return joined  # type: ignore[no-any-return]
    return JoinedArrays(shards, by_sample) if any(isinstance(shard, ArrayShard) for shard in shards) else Joined(shards)


class Joined:
    """Shards end to end; their samples are read one by one."""

    def __init__(self, shards: Sequence[AnyShard]) -> None:
        self.shards = shards
        self.starts = [0, *accumulate(map(len, shards))]
        """Number of the first sample of each shard, and the number of samples."""
        self.blocks = [size for shard in shards for size in shard.blocks or [len(shard)]]
        self.block_bytes = max(getattr(shard, "block_bytes", 0) for shard in shards)

    def __len__(self) -> int:
        return self.starts[-1]

    def hold(self, blocks: Sequence[int]) -> None:
        """Keep these blocks of the shards in memory once they are read, and free all others."""
        begin = 0
        for shard in self.shards:
            end = begin + (len(shard.blocks) or 1)
            if hasattr(shard, "hold"):
                shard.hold([block - begin for block in blocks if begin <= block < end])
            begin = end

    def apart(self, samples: NDArray[np.int64]) -> Iterator[tuple[Any, int]]:
        """Yield the shard that holds each sample, and the sample's number in that shard."""
        owners = np.searchsorted(self.starts, samples, "right") - 1
        numbers = samples - np.array(self.starts)[owners]
        return zip(map(self.shards.__getitem__, owners.tolist()), numbers.tolist(), strict=True)

    def shard_of(self, sample: int) -> int:
        """Return the index of the shard that holds a sample."""
        return bisect_right(self.starts, sample) - 1

    def where(self, sample: int) -> str:
        """Return the file and row of a sample, for messages."""
        at = self.shard_of(sample)
        return self.shards[at].where(sample - self.starts[at])

    def load(self, sample: int) -> Sample | str:
        """Read one sample, or return the reason why it is rejected."""
        at = self.shard_of(sample)
        shard: Any = self.shards[at]
        return shard.load(sample - self.starts[at])  # type: ignore[no-any-return]


class JoinedArrays(Joined):
    """Shards of several kinds end to end: samples are read together only where neighbors are of one shard."""

    def __init__(self, shards: Sequence[AnyShard], by_sample: frozenset[str]) -> None:
        super().__init__(shards)
        self._by_sample = by_sample

    def gather(self, samples: NDArray[np.int64], tokens: int) -> RawSamples:
        """Read the leading samples that lie in one shard and fit into ``tokens`` ids, at least one."""
        at = self.shard_of(int(samples[0]))
        outside = np.flatnonzero((samples < self.starts[at]) | (samples >= self.starts[at + 1]))
        rows = samples[: outside[0] if len(outside) else None] - self.starts[at]
        shard = self.shards[at]
        if isinstance(shard, ArrayShard):
            return shard.gather(rows, tokens)
        return one_sample(shard.load(int(rows[0])), self._by_sample)
