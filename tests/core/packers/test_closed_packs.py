"""A closed set: how many packs it makes, and the way back from packs to samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streampack
from streampack.core.packers import PACKERS, pack_lengths, way_back
from streampack.core.packers.closed import with_count
from streampack.errors import ConfigError, SampleError

LENGTHS = [700, 100, 450, 300, 350, 120, 550, 450, 170, 260, 80, 330, 640, 170, 300, 90, 510, 40]
sets_of_packs = st.lists(st.integers(1, 6), max_size=12).map(
    lambda counts: [list(range(sum(counts[:k]), sum(counts[: k + 1]))) for k in range(len(counts))]
)


def test_more_packs_are_split_off_those_with_most_samples_as_nemo_rl_does() -> None:
    """NeMo-RL's own answer for min_bin_count=5, bin_count_multiple=4."""
    packs = [[0, 14], [12, 4], [6, 7], [16, 2, 17], [11, 3, 9, 1], [13, 8, 5], [10], [15]]
    assert pack_lengths(LENGTHS, 1000, "first_fit_decreasing", min_packs=5, pack_count_multiple=4) == packs


def test_the_pack_with_most_samples_is_looked_for_anew_each_time() -> None:
    """NeMo-RL would take both from the last pack, and leave 3, 1, 1, 1."""
    assert with_count([[0, 1, 2], [3, 4, 5]], min_packs=4) == [[0, 1], [3, 4], [5], [2]]


@given(sets_of_packs, st.integers(0, 30), st.integers(1, 9))
def test_the_count_is_as_asked_for_and_no_pack_grows(packs: list[list[int]], least: int, multiple: int) -> None:
    num_samples = sum(map(len, packs))
    expected = max(len(packs), least)
    expected += -expected % multiple
    if expected > num_samples:
        with pytest.raises(SampleError, match=f"got {num_samples} samples, expected at least {expected}, one for each"):
            with_count(packs, least, multiple)
    found = with_count(packs, least, multiple, empty="pad")
    assert len(found) == expected
    assert sorted(i for pack in found for i in pack) == list(range(num_samples))
    for before, after in zip(packs, found, strict=False):
        assert after == before[: len(after)]
    new, num_full = found[len(packs) :], min(expected, num_samples)
    assert [len(pack) for pack in new] == [1] * (num_full - len(packs)) + [0] * (expected - num_full)
    if new and new[0]:
        assert max(map(len, found)) <= max(map(len, packs))
    if expected >= num_samples and packs:
        assert max(map(len, found)) == 1


@pytest.mark.parametrize("name", PACKERS)
def test_every_packer_makes_as_many_packs_as_are_asked_for(name: str) -> None:
    packs = pack_lengths(LENGTHS, 1000, name, min_packs=13, pack_count_multiple=2)
    assert len(packs) == (14 if name != "none" else 18)  # which leaves every sample alone to begin with
    assert sorted(i for pack in packs for i in pack) == list(range(18))
    assert all(0 < sum(LENGTHS[i] for i in pack) <= 1000 for pack in packs)


def test_too_few_samples_are_an_error_or_empty_packs_at_the_end() -> None:
    with pytest.raises(
        SampleError, match=r"got 2 samples, expected at least 4, .*pack_count_multiple=4 require. Lower these"
    ):
        pack_lengths([3, 4], 8, pack_count_multiple=4)
    assert pack_lengths([3, 4], 8, pack_count_multiple=4, empty="pad") == [[0], [1], [], []]
    assert pack_lengths([], 8, min_packs=2, empty="pad") == [[], []]
    assert pack_lengths([], 8, pack_count_multiple=2) == []


@pytest.mark.parametrize("kind", ["bimodal", "lognormal", "uniform"])
@pytest.mark.parametrize("order", ["as drawn", "sorted"])
def test_a_closed_list_needs_no_more_packs_than_first_fit_decreasing(kind: str, order: str) -> None:
    """Sorted, windows of 1024 hold samples that do not fit together: 3 to 30 % more packs."""
    draws, count, budget = np.random.default_rng(1), 6000, 8192
    if kind == "bimodal":
        is_long = draws.random(count) < 0.3
        drawn = np.where(is_long, draws.normal(4500, 800, count), draws.normal(800, 400, count))
    else:
        drawn = draws.lognormal(6.5, 1.2, count) if kind == "lognormal" else draws.uniform(1, budget, count)
    lengths = drawn.astype(np.int64).clip(1, budget)
    lengths = np.sort(lengths) if order == "sorted" else lengths
    packs = pack_lengths(lengths, budget)
    assert len(packs) <= len(pack_lengths(lengths, budget, "first_fit_decreasing"))
    assert sorted(i for pack in packs for i in pack) == list(range(count))
    assert all(pack == sorted(pack) and int(lengths[pack].sum()) <= budget for pack in packs)


@given(st.lists(st.integers(1, 5), max_size=40), st.integers(5, 12), st.integers(1, 4), st.sampled_from([1, 3]))
def test_closed_groups_and_caps_need_no_more_packs_than_first_fit_decreasing(
    lengths: list[int], budget: int, cap: int, align: int
) -> None:
    given_all: dict[str, Any] = {"align": align, "max_samples_per_pack": cap, "sizes": [1 + i % cap for i in lengths]}
    budget = 3 * budget
    packs = pack_lengths(lengths, budget, **given_all)
    assert len(packs) <= len(pack_lengths(lengths, budget, "first_fit_decreasing", **given_all))
    assert all(sum(1 + lengths[i] % cap for i in pack) <= cap for pack in packs)


def test_groups_are_counted_by_their_samples_and_are_not_split() -> None:
    sizes = [2, 2, 2, 1]
    packs = pack_lengths([2, 2, 2, 1], 8, "first_fit_decreasing", sizes=sizes, max_samples_per_pack=4)
    assert packs == [[2, 1], [0, 3]]
    assert pack_lengths([2, 2, 2, 1], 8, "first_fit_decreasing", sizes=sizes) == [[2, 1, 0, 3]]
    with pytest.raises(
        SampleError, match="sample 1: got a group of 5 samples, expected 1 to 4, the value of max_samples_per_pack"
    ):
        pack_lengths([2, 2], 8, "concatenative", sizes=[4, 5], max_samples_per_pack=4)
    with pytest.raises(SampleError, match="sample 0: got a group of 0 samples, expected at least 1"):
        pack_lengths([2, 2], 8, sizes=[0, 5])
    with pytest.raises(SampleError, match="got 1 sizes for 2 lengths"):
        pack_lengths([2, 2], 8, sizes=[1])


@pytest.mark.parametrize(
    "wrong", [{"min_packs": -1}, {"min_packs": 1.0}, {"pack_count_multiple": 0}, {"empty": "drop"}]
)
def test_counts_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}: got .*, expected"):
        pack_lengths([1], 8, **wrong)


@pytest.mark.parametrize("name", PACKERS)
@given(lengths=st.lists(st.integers(1, 20), max_size=40), multiple=st.integers(1, 5))
def test_the_way_back_restores_the_order_of_samples(name: str, lengths: list[int], multiple: int) -> None:
    packs = pack_lengths(lengths, 20, name, pack_count_multiple=multiple, empty="pad")
    results = np.array([lengths[i] for pack in packs for i in pack], np.int64)  # as a forward pass over packs gives
    back = streampack.way_back(packs)
    assert back.dtype == np.int64
    assert results[back].tolist() == lengths


@pytest.mark.parametrize(
    ("packs", "message"),
    [
        ([[0, 1], [1]], "sample 1: got 2 occurrences in packs of 3 samples, expected 1"),
        ([[0], [2]], "sample 1: got 0 occurrences in packs of 2 samples, expected 1"),
        ([[-1], [0]], "sample 1: got 0 occurrences in packs of 2 samples, expected 1"),
    ],
)
def test_packs_that_are_no_permutation_have_no_way_back(packs: list[list[int]], message: str) -> None:
    with pytest.raises(SampleError, match=message):
        way_back(packs)
