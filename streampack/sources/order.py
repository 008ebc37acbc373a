"""The order of samples: a pure function of (seed, pass, shard number).

Theory of operation. A pass reads the shards of a partition in a shuffled order, and the samples of each shard in
another shuffled order. Both orders come from sorting 64-bit pseudo-random keys of ``core.shuffle``. The keys derive
from a hash of (shards, samples or blocks; seed; pass; shard number).

A shard's key depends on its number among *all* shards, and a sample's key on the number of its shard. So the order
within a shard does not depend on the number of partitions. A partition's order of shards is the order of all shards,
without those of other partitions.

This module knows numbers. It does not know files, tokens or partitions.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streampack.core.shuffle import BLOCKS, GAMMA, MASK, SAMPLES, SHARDS, keys, mix, state


class Cursor(NamedTuple):
    """Where reading continues in one partition. Only sources interpret a cursor.

    - ``pass_``: number of the pass, from 0.
    - ``shard``: place among the partition's shards in the order of the pass (not a shard number).
    - ``sample``: place in that shard's order of samples.

    A cursor is valid with the seed, partition and number of partitions that it came from.

    >>> Cursor(pass_=0, shard=0, sample=0)  # the beginning
    Cursor(pass_=0, shard=0, sample=0)
    """

    pass_: int
    shard: int
    sample: int


def shard_order(shards: Sequence[int], *, seed: int, pass_: int) -> list[int]:
    """Return the shard numbers ``shards`` in the shuffled order of pass ``pass_``.

    ``seed`` is any int (taken modulo 2**64); shard numbers and ``pass_`` are at least 0.

    >>> shard_order([0, 1, 2, 3, 4], seed=0, pass_=0)
    [4, 0, 1, 2, 3]
    """
    start = state(SHARDS, seed, pass_, 0)
    return sorted(shards, key=lambda shard: (mix(start + GAMMA * (shard + 1) & MASK), shard))


def sample_order(
    num_samples: int, *, seed: int, pass_: int, shard: int, blocks: Sequence[int] = ()
) -> NDArray[np.int64]:
    """Return one shard's sample numbers in the shuffled order of a pass: a permutation of 0..n-1, int64 [n].

    ``blocks``: sizes, in samples, of runs that stay together; they add up to ``num_samples``. Runs are shuffled, and
    so are the samples in each run. With fewer than two blocks, all samples are one run.

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
