"""A batch's packs on a mesh: split as their definition says, in time that grows with the batch and no faster."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from streampack.core.deal.assignment import split
from streampack.core.deal.deal import deal, split_dearest
from streampack.core.model.samples import I64, PACK

Step = tuple[I64, I64, NDArray[np.uint8]]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Bounds of packs, and each sample's cost and what it says of the next: packs of groups of samples."""
    packs = draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=8))
    bounds = np.cumsum([0, *(sum(groups) for groups in packs)])
    keeps = [np.array([PACK] * (size - 1) + [0], np.uint8) for groups in packs for size in groups]
    costs = draw(st.lists(st.integers(0, 9), min_size=int(bounds[-1]), max_size=int(bounds[-1])))
    return bounds, np.array(costs, np.int64), np.concatenate(keeps)


@given(steps(), st.integers(0, 20))
def test_the_dearest_packs_are_split_and_groups_stay_whole(step: Step, more: int) -> None:
    bounds, costs, keeps = step
    items = np.split(np.arange(len(costs)), np.flatnonzero(keeps != PACK)[:-1] + 1)
    packs = [[i for i, item in enumerate(items) if start <= item[0] < stop] for start, stop in pairwise(bounds)]
    expected = split_dearest(packs, np.array([costs[item].sum() for item in items]), len(packs) + more)
    found, origins = split(bounds, costs, keeps, len(packs) + more)
    assert [pack.tolist() for pack in found] == [
        [i for item in pack for i in items[item].tolist()] for pack in expected
    ]
    for number, (pack, origin) in enumerate(zip(found, origins, strict=True)):
        assert origin == number if not len(pack) else bounds[origin] <= pack[0] < bounds[origin + 1]


def test_a_batch_of_a_hundred_thousand_samples_is_split_in_no_time() -> None:
    """15 ms; 800 when each pack went over all samples."""
    bounds = np.arange(0, 100_001, 12).clip(max=100_000)
    costs = np.random.default_rng(0).integers(1, 10**9, 100_000)
    began = time.process_time()
    split(bounds, costs, np.zeros(100_000, np.uint8), len(bounds) + 8)
    assert time.process_time() - began < 0.2


def test_two_thousand_micro_batches_are_dealt_in_no_time() -> None:
    """25 ms; 1,000 when each merger of two looked at all that was merged before."""
    costs = (np.random.default_rng(0).lognormal(0, 1, 16_000) * 1e9).astype(np.int64)
    began = time.process_time()
    deal(costs, 8, "karmarkar_karp")
    assert time.process_time() - began < 0.3
