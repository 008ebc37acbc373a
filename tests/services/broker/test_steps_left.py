"""Steps left of a pass: the truth lies within the bounds, which close in as shards are opened."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from streampack_services.broker.steps_left import Left, estimate, size_left

from streampack.core.protocol.producer_messages import SourceSize


def size_of(samples: list[int], shards: int) -> SourceSize:
    """Of a source of which the first shards were opened."""
    squares = float(sum(each * each for each in samples))
    return SourceSize(shards=shards, opened=len(samples), samples=sum(samples), squares=squares)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=50), st.integers(1, 5))
def test_a_source_whose_shards_were_all_opened_is_known(samples: list[int], passes: int) -> None:
    total, variance = size_left(size_of(samples, len(samples)), passes)
    assert total == pytest.approx(passes * sum(samples))
    assert not variance


@given(st.integers(1, 1000), st.integers(2, 40), st.integers(1, 200))
def test_shards_that_are_alike_are_known_from_two_of_them(each: int, opened: int, more: int) -> None:
    total, variance = size_left(size_of([each] * opened, opened + more), 1)
    assert total == pytest.approx(each * (opened + more))
    assert variance == pytest.approx(0.0, abs=1e-3)


def test_the_sizes_of_other_shards_are_not_known_from_one() -> None:
    total, variance = size_left(size_of([100], 10), 1)
    assert total == 1000
    assert 2 * variance**0.5 > 1000


@given(st.integers(0, 10**6), st.integers(0, 10**4), st.integers(1, 10**4))
def test_known_sizes_leave_one_step_of_doubt(samples: int, held: int, of_step: int) -> None:
    """The tail, and that the last packs are not quite as full."""
    steps, low, high = estimate([Left(samples, 0.0, 1.0, 10)], held, of_step, 0.0)
    assert steps == -(-(samples + held) // of_step)
    assert steps - 1 <= low <= steps < high <= steps + 1


def test_the_bounds_hold_the_truth_in_95_of_100_runs_and_close_in() -> None:
    """400 streams of shards and samples of any size, of which the first shards were opened."""
    draws = np.random.default_rng(1)
    found, widths = 0, []
    for _ in range(400):
        shards = np.maximum(draws.normal(200, draws.uniform(0, 100), 40), 1).astype(int)
        opened = int(draws.integers(4, 36))
        lengths = draws.lognormal(5, 1, shards.sum())
        read = lengths[: int(shards[: opened - 1].sum()) + 1]
        total, variance = size_left(size_of(shards[:opened].tolist(), 40), 1)
        left = Left(total - len(read), variance, float(read.mean()), len(read))
        steps, low, high = estimate([left], 0.0, 5000.0, float(read.std()))
        assert low <= steps <= high
        found += low <= lengths[len(read) :].sum() / 5000 <= high
        widths.append((opened, high - low))
    assert found >= 0.93 * 400
    narrow, wide = ([w for n, w in widths if few == (n < 12)] for few in (False, True))
    assert 2 * np.mean(narrow) < np.mean(wide)


def test_a_stream_that_stops_the_feed_counts_with_its_share_of_a_step() -> None:
    steps, low, high = estimate([Left(100, 0.0, 10.0, 10, share=0.25)], 0.0, 400.0, 0.0)
    assert (steps, low, high) == (10, 10, 11)
