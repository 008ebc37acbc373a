"""The order of samples: a permutation, the same everywhere, held still by golden vectors."""

import os
import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streampack.core import shuffle
from streampack.sources.order import Cursor, sample_order, shard_order

SEEDS = st.integers(-(2**70), 2**70)
SMALL = st.integers(0, 10**6)


@given(SMALL.filter(lambda n: n < 3000), SEEDS, SMALL, SMALL)
def test_the_samples_of_a_shard_are_permuted(num: int, seed: int, pass_: int, shard: int) -> None:
    found = sample_order(num, seed=seed, pass_=pass_, shard=shard)
    assert found.dtype == np.int64
    assert sorted(found.tolist()) == list(range(num))


@given(st.integers(0, 60), st.integers(1, 8), SEEDS, SMALL)
def test_a_partitions_order_of_shards_is_the_whole_order_without_the_others(
    num: int, partitions: int, seed: int, pass_: int
) -> None:
    whole = shard_order(range(num), seed=seed, pass_=pass_)
    assert sorted(whole) == list(range(num))
    for partition in range(partitions):
        mine = range(partition, num, partitions)
        assert shard_order(mine, seed=seed, pass_=pass_) == [shard for shard in whole if shard in mine]


def test_golden_orders_are_held_still() -> None:
    """Recorded runs depend on these: a change here is a change of every stream's order."""
    assert shard_order(range(12), seed=0, pass_=0) == GOLDEN_SHARDS[0, 0]
    assert shard_order(range(12), seed=17, pass_=3) == GOLDEN_SHARDS[17, 3]
    assert sample_order(12, seed=0, pass_=0, shard=0).tolist() == GOLDEN_SAMPLES[0, 0, 0]
    assert sample_order(12, seed=2**64 - 1, pass_=1, shard=511).tolist() == GOLDEN_SAMPLES[2**64 - 1, 1, 511]


GOLDEN_SHARDS: dict[tuple[int, int], list[int]] = {
    (0, 0): [8, 11, 4, 0, 1, 2, 3, 5, 10, 9, 7, 6],
    (17, 3): [11, 10, 8, 5, 3, 2, 6, 7, 0, 9, 4, 1],
}
GOLDEN_SAMPLES: dict[tuple[int, int, int], list[int]] = {
    (0, 0, 0): [1, 4, 2, 0, 11, 6, 8, 3, 7, 9, 5, 10],
    (2**64 - 1, 1, 511): [2, 10, 9, 8, 6, 11, 4, 1, 7, 0, 5, 3],
}


def test_each_of_seed_pass_and_shard_changes_the_order() -> None:
    orders = {
        tuple(sample_order(50, seed=seed, pass_=pass_, shard=shard).tolist())
        for seed in range(4)
        for pass_ in range(4)
        for shard in range(4)
    }
    assert len(orders) == 64
    assert len({tuple(shard_order(range(50), seed=s, pass_=p)) for s in range(8) for p in range(8)}) == 64


def test_every_sample_comes_to_every_place_about_equally_often() -> None:
    counts = np.zeros((8, 8), np.int64)
    for pass_ in range(4000):
        counts[np.arange(8), sample_order(8, seed=5, pass_=pass_, shard=2)] += 1
    # Binomial(4000, 1/8): mean 500, standard deviation 21; six of them for the 64 cells.
    assert abs(counts - 500).max() < 126


def test_the_order_does_not_depend_on_the_hash_seed() -> None:
    program = (
        "from streampack.sources.order import *; "
        "print(shard_order(range(99), seed=3, pass_=2), sample_order(99, seed=3, pass_=2, shard=1).tolist())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(["", *sys.path])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    (output,) = outputs
    assert str(shard_order(range(99), seed=3, pass_=2)) in output


def test_a_cursor_is_three_ints() -> None:
    assert Cursor(1, 2, 3) == Cursor(pass_=1, shard=2, sample=3)


def test_keys_are_the_published_splitmix64() -> None:
    """The first outputs for state 0 of https://prng.di.unimi.it/splitmix64.c."""
    gamma = 0x9E3779B97F4A7C15
    outputs = [shuffle.mix(gamma * i % 2**64) for i in (1, 2, 3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
