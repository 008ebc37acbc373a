"""The order of samples: a pure function of (seed, pass, shard number), and of nothing else.

Theory of operation. A pass walks the shards of a partition in a shuffled order, and the samples within each
shard in another. Both orders come from sorting by the 64-bit keys of ``core.shuffle``, whose state is a hash of (what
is ordered, seed, pass, shard number).

A shard's key depends on its number among *all* shards, and a sample's on its shard's number. So the order
within a shard is the same however many partitions there are, and a partition's order of shards is one order of
all shards with the other partitions' left out.

This module knows numbers: never files, tokens or partitions.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streampack.core.shuffle import BLOCKS, GAMMA, MASK, SAMPLES, SHARDS, keys, mix, state


class Cursor(NamedTuple):
    """Where to go on in one partition: places in the ORDER of a pass, not file numbers. Opaque to all but sources.

    Three small ints, in this order, on the wire: pass number, place among the partition's shards, place within
    that shard. The same seed, partition and number of partitions must be given back with it.

    >>> Cursor(pass_=0, shard=0, sample=0)  # the beginning
    Cursor(pass_=0, shard=0, sample=0)
    """

    pass_: int
    shard: int
    sample: int


def shard_order(shards: Sequence[int], *, seed: int, pass_: int) -> list[int]:
    """The given shard numbers in the order of this pass.

    ``seed`` is any int (taken modulo 2**64); numbers and pass are not negative.

    >>> shard_order([0, 1, 2, 3, 4], seed=0, pass_=0)
    [4, 0, 1, 2, 3]
    """
    start = state(SHARDS, seed, pass_, 0)
    return sorted(shards, key=lambda shard: (mix(start + GAMMA * (shard + 1) & MASK), shard))


def sample_order(
    num_samples: int, *, seed: int, pass_: int, shard: int, blocks: Sequence[int] = ()
) -> NDArray[np.int64]:
    """The samples of one shard in the order of this pass: a permutation of 0..num_samples-1, [num_samples] int64.

    ``blocks``: how many samples each run of them has that must stay together, num_samples in all; the runs are
    shuffled, and the samples in each. With none, or one, all samples are one run.

    >>> sample_order(5, seed=0, pass_=0, shard=0).tolist()
    [1, 4, 2, 0, 3]
    >>> sample_order(5, seed=0, pass_=0, shard=0, blocks=[2, 3]).tolist()
    [1, 0, 4, 2, 3]
    """
    own = keys(num_samples, state(SAMPLES, seed, pass_, shard))
    if len(blocks) < 2:
        order = np.argsort(own, kind="stable")
    else:
        places = np.argsort(np.argsort(keys(len(blocks), state(BLOCKS, seed, pass_, shard)), kind="stable"))
        order = np.lexsort((own, np.repeat(places, blocks)))
    return order.astype(np.int64, copy=False)
