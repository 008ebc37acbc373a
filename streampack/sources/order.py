"""The order of samples: a pure function of (seed, pass, shard number).

Theory of operation. A pass reads the shards of a partition in groups, and the samples of each group in a shuffled
order. Both orders come from sorting 64-bit pseudo-random keys of ``core.shuffle``. The keys derive from a hash of
(shards, samples or blocks; seed; pass; shard number).

Data is often sorted: by class, by source or by length. So shards that are neighbors come into different groups, and
each group has shards from the whole partition. The same holds for blocks (row groups, record batches) in the windows of
a group. With groups of one shard, shards are read one after the other. Runs that began before groups existed read so.

A shard's key depends on its number among *all* shards, and a sample's key on the number of its shard. So with groups of
one shard, a partition's order of shards is the order of all shards, without those of other partitions.

This module knows numbers. It does not know files, tokens or partitions.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.snapshot import MIXED
from streampack.core.shuffle import BLOCKS, GAMMA, MASK, SAMPLES, SHARDS, keys, mix, state


class Cursor(NamedTuple):
    """Where reading continues in one partition. Only sources interpret a cursor.

    - ``pass_``: number of the pass, from 0; plus ``MIXED`` if groups have several shards.
    - ``shard``: place among the partition's groups of shards in the order of the pass (not a shard number).
    - ``sample``: place in that group's order of samples.

    A cursor is valid with the seed, partition and number of partitions that it came from.

    >>> Cursor(pass_=0, shard=0, sample=0)  # the beginning
    Cursor(pass_=0, shard=0, sample=0)
    """

    pass_: int
    shard: int
    sample: int


def is_begin(cursor: Cursor) -> bool:
    """Return whether no sample comes before ``cursor``.

    >>> is_begin(Cursor(MIXED, 0, 0)), is_begin(Cursor(1, 0, 0))
    (True, False)
    """
    return cursor.pass_ in (0, MIXED) and cursor.shard == cursor.sample == 0


def shard_order(shards: Sequence[int], *, seed: int, pass_: int) -> list[int]:
    """Return the shard numbers ``shards`` in the shuffled order of pass ``pass_``.

    ``seed`` is any int (taken modulo 2**64); shard numbers and ``pass_`` are at least 0.

    >>> shard_order([0, 1, 2, 3, 4], seed=0, pass_=0)
    [4, 0, 1, 2, 3]
    """
    start = state(SHARDS, seed, pass_, 0)
    return sorted(shards, key=lambda shard: (mix(start + GAMMA * (shard + 1) & MASK), shard))


def shard_groups(shards: Sequence[int], *, most: int, seed: int, pass_: int) -> list[list[int]]:
    """Return the shard numbers ``shards`` in groups of at most ``most``, in the shuffled order of a pass.

    Each group has shards from everywhere in ``shards``, so that it is mixed even if neighbors are alike. With ``most``
    1, the groups are ``shard_order``.

    >>> shard_groups([0, 1, 2, 3, 4, 5], most=3, seed=0, pass_=0)
    [[4, 0, 2], [1, 3, 5]]
    """
    order = shard_order(shards, seed=seed, pass_=pass_)
    ranks = {shard: rank for rank, shard in enumerate(order)}
    groups: list[list[int]] = [[] for _ in range(-(-len(order) // most))]
    for shard, group in zip(shards, _spread(np.array([ranks[shard] for shard in shards]), most).tolist(), strict=True):
        groups[group].append(shard)
    return [sorted(group, key=ranks.__getitem__) for group in groups]


class Part(NamedTuple):
    """One shard of a group: its number, its number of samples, and the sizes of its ``blocks``, as for ``Shard``."""

    shard: int
    num_samples: int
    blocks: Sequence[int] = ()


class GroupOrder(NamedTuple):
    """The order of the samples of a group of shards, which are numbered from 0 through all its shards.

    - ``samples``: numbers of the samples in their order, int64 [n].
    - ``windows``: runs of that order, each with the place after its last sample, and the numbers of the blocks whose
      samples it mixes. Blocks are numbered through all shards; a shard without blocks is one block.
    """

    samples: NDArray[np.int64]
    windows: list[tuple[int, list[int]]]


def group_order(parts: Sequence[Part], *, most: int, seed: int, pass_: int) -> GroupOrder:
    """Return the shuffled order of the samples of a group of shards.

    Up to ``most`` blocks are a window, whose samples are shuffled together. The blocks of a window come from everywhere
    in the group.
    """
    own = np.concatenate([keys(part.num_samples, state(SAMPLES, seed, pass_, part.shard)) for part in parts])
    sizes = [size for part in parts for size in part.blocks or [part.num_samples]]
    block_keys = [keys(len(part.blocks) or 1, state(BLOCKS, seed, pass_, part.shard)) for part in parts]
    window = _spread(np.concatenate(block_keys), most)
    count = int(window.max(initial=0)) + 1
    order = np.argsort(own, kind="stable") if count == 1 else np.lexsort((own, np.repeat(window, sizes)))
    ends = np.cumsum(np.bincount(window, sizes, count)).astype(np.int64).tolist()
    blocks: list[list[int]] = [[] for _ in range(count)]
    for block, at in enumerate(window.tolist()):
        blocks[at].append(block)
    return GroupOrder(order.astype(np.int64, copy=False), list(zip(ends, blocks, strict=True)))


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
    return group_order([Part(shard, num_samples, blocks)], most=1, seed=seed, pass_=pass_).samples


def _spread(sort_keys: NDArray[Any], most: int) -> NDArray[np.int64]:
    """Return a group for each of n things, int64 [n], so that a group has at most ``most`` things.

    With g groups, each run of g neighbors is divided among them, as ``sort_keys`` [n] say.
    """
    num_groups = -(-len(sort_keys) // most)
    order = np.lexsort((sort_keys, np.arange(len(sort_keys)) // max(num_groups, 1)))
    group = np.empty(len(sort_keys), np.int64)
    group[order] = np.arange(len(sort_keys)) % max(num_groups, 1)
    return group
