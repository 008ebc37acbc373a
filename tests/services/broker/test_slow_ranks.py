"""A slow rank is named, and neither its victims nor a rank of a healthy run, whatever the jitter."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from streampack_services.broker.ranks.recent_waits import COLUMNS, STEPS, TRAINER, RankTotals, RecentWaits, WaitWindow
from streampack_services.broker.ranks.slow_ranks import slow_ranks

from streampack.core.stats.data_wait import CAUSES

PEERS, STREAM = CAUSES.index("peers"), CAUSES.index("stream")


def lock_step(times: np.ndarray) -> RecentWaits:
    """Return the waits of ranks that take ``times`` [steps, ranks] for their steps, and wait for each other."""
    figures = np.zeros((times.shape[1], COLUMNS))
    figures[:, TRAINER] = times.sum(axis=0)
    figures[:, PEERS] = (times.max(axis=1, keepdims=True) - times).sum(axis=0)
    figures[:, STEPS] = len(times)
    return RecentWaits(figures, [{}] * times.shape[1])


def found(lately: RecentWaits, long: RecentWaits | None = None) -> tuple[int, int] | None:
    """Return the index of the slowest rank and the number of slow ranks."""
    slow = slow_ranks(lately, long or lately, np.full(len(lately.figures), 100))
    return None if slow is None else (slow.rank, slow.num_slow)


@given(ranks=st.integers(2, 64), steps=st.integers(3, 300), jitter=st.floats(0.0, 0.3), seed=st.integers(0, 2**32 - 1))
def test_a_healthy_run_has_no_slow_rank(ranks: int, steps: int, jitter: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    assert found(lock_step(0.1 * (1 + jitter * rng.uniform(-0.5, 0.5, (steps, ranks))))) is None


@given(
    ranks=st.integers(2, 64), steps=st.integers(3, 300), jitter=st.floats(0.0, 0.2), times=st.floats(2.5, 100.0),
    which=st.integers(0, 63), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_a_rank_that_takes_longer_is_the_slow_one(
    ranks: int, steps: int, jitter: float, times: float, which: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    step_s = 0.1 * (1 + jitter * rng.uniform(-0.5, 0.5, (steps, ranks)))
    step_s[:, which % ranks] *= times
    assert found(lock_step(step_s)) == (which % ranks, 1)


def test_its_seconds_and_those_of_the_others_are_of_a_step() -> None:
    waits = lock_step(np.tile([0.1, 0.1, 1.0], (20, 1)))
    slow = slow_ranks(waits, waits, np.full(3, 20))
    assert slow is not None
    assert (slow.rank, round(slow.step_s, 6), round(slow.others_step_s, 6)) == (2, 1.0, 0.1)


def test_ranks_of_one_slow_host_are_counted_and_a_fast_rank_among_slow_ones_is_none() -> None:
    assert found(lock_step(np.tile([0.1] * 8 + [0.5] * 7 + [0.52], (20, 1)))) == (15, 8)
    assert found(lock_step(np.tile([0.1] + [1.0] * 7, (20, 1)))) is None


def test_steps_of_a_minute_are_judged_over_minutes_and_a_rank_s_first_steps_are_not() -> None:
    long = lock_step(np.tile([10.0, 60.0], (4, 1)))
    lately = lock_step(np.tile([10.0, 60.0], (1, 1)))
    assert found(lately, long) == (1, 1)
    assert slow_ranks(lately, long, np.array([2, 2])) is None
    assert slow_ranks(RecentWaits.joined([]), RecentWaits.joined([]), np.zeros(0, np.int64)) is None


def test_ranks_that_wait_for_a_stream_have_no_slow_rank() -> None:
    waits = lock_step(np.full((20, 3), 0.1))
    waits.figures[:, STREAM] = [5.0, 9.0, 1.0]
    assert found(waits) is None


def test_an_outage_has_its_share_and_cause_of_the_last_minute_and_not_those_since_the_start() -> None:
    """Ten minutes with a little waiting for peers, then a minute of which 60 % is waited for ``web``."""
    totals, window = RankTotals(), WaitWindow()
    figures, streams = np.zeros((2, COLUMNS)), {"code": 0.0, "web": 0.0}
    keys, reported = np.array([7, 8]), np.array([True, True])
    for second in range(661):
        window.begin(float(second), 30.0, 2)
        turns, counted = totals.add(float(second), 0, keys, reported, figures.copy())
        recent = window.since(0, turns, counted, [dict(streams)] * 2)
        figures[:, STEPS] += 1
        out = second >= 600
        figures[:, STREAM if out else PEERS] += 0.6 if out else 0.05
        figures[:, TRAINER] += 0.4 if out else 0.95
        streams["web" if out else "code"] += 0.6 if out else 0.0
    by_cause, by_stream = recent.of_all()
    assert round(by_cause["stream"], 2) == 0.6
    assert by_cause["peers"] == 0
    assert {name: round(share, 2) for name, share in by_stream.items()} == {"web": 0.6}
    assert 30 <= recent.mean_s <= 60
    since_start = totals.sums[:TRAINER].sum() / totals.sums[:STEPS].sum()
    assert 0.09 < since_start < 0.11


def test_the_wait_for_the_first_step_counts_since_the_start_and_not_lately() -> None:
    totals, window = RankTotals(), WaitWindow()
    figures, keys, reported = np.zeros((1, COLUMNS)), np.array([7]), np.array([True])
    for second in range(20):
        window.begin(float(second), 30.0, 1)
        turns, counted = totals.add(float(second), 0, keys, reported, figures.copy())
        recent = window.since(0, turns, counted, [{}])
        if second == 9:
            assert recent.share == 1.0, "while it lasts, it counts"
        figures[:, STREAM if second < 10 else TRAINER] += 1.0
        figures[:, STEPS] += second >= 10
    assert recent.share == 0.0
    assert totals.sums[STREAM] == 10
