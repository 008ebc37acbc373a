"""The order of samples: a pure function of (seed, pass, shard number), and of nothing else.

Theory of operation. A pass walks the shards of a partition in a shuffled order, and the samples within each
shard in another. Both orders come from sorting by 64-bit keys: key ``i`` is output ``i`` of a splitmix64
generator (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014, section 5; the
constants are those of Vigna's splitmix64.c) whose state is a hash of (what is ordered, seed, pass, shard
number). Equal keys, which 64 bits make all but impossible, go by index.

Why this and not ``numpy.random``: NEP 19 keeps the bit streams of numpy's generators, but not
``Generator.permutation``, from version to version. Here there is nothing but multiplication, shift and
exclusive-or modulo 2**64 and a sort, so the order is the same on every machine, Python and numpy; the golden
vectors of the tests hold it still. PYTHONHASHSEED does not enter: no ``hash()`` is taken.

A shard's key depends on its number among *all* shards, and a sample's on its shard's number. So the order
within a shard is the same however many partitions there are, and a partition's order of shards is one order of
all shards with the other partitions' left out.

This module knows numbers: never files, tokens or partitions.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_SHARDS, _SAMPLES, _BLOCKS = 1, 2, 3  # what is ordered: they must never share keys


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
    state = _state(_SHARDS, seed, pass_, 0)
    return sorted(shards, key=lambda shard: (_mix(state + _GAMMA * (shard + 1) & _MASK), shard))


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
    keys = _keys(num_samples, _state(_SAMPLES, seed, pass_, shard))
    if len(blocks) < 2:
        order = np.argsort(keys, kind="stable")
    else:
        places = np.argsort(np.argsort(_keys(len(blocks), _state(_BLOCKS, seed, pass_, shard)), kind="stable"))
        order = np.lexsort((keys, np.repeat(places, blocks)))
    return order.astype(np.int64, copy=False)


def _keys(count: int, state: int) -> NDArray[np.uint64]:
    """The first ``count`` outputs of splitmix64 from ``state`` on."""
    keys = np.arange(1, count + 1, dtype=np.uint64)
    keys *= np.uint64(_GAMMA)  # array arithmetic wraps modulo 2**64 and says nothing, as wanted
    keys += np.uint64(state)
    keys ^= keys >> np.uint64(30)
    keys *= np.uint64(_MIX_1)
    keys ^= keys >> np.uint64(27)
    keys *= np.uint64(_MIX_2)
    keys ^= keys >> np.uint64(31)
    return keys


def _state(*words: int) -> int:
    """A 64-bit hash of some ints: each is folded in and mixed before the next, so that their places matter."""
    state = 0
    for word in words:
        state = _mix((state + _GAMMA ^ word) & _MASK)
    return state


def _mix(x: int) -> int:
    """The finalizer of splitmix64: a bijection of 0..2**64-1."""
    x = (x ^ x >> 30) * _MIX_1 & _MASK
    x = (x ^ x >> 27) * _MIX_2 & _MASK
    return x ^ x >> 31
