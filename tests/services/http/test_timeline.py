"""The timeline is bounded, in order, thinned by its tiers, and no count is lost between two rows that are kept."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from streampack_services.http.timeline import TIERS, Tier, Timeline

SMALL = (Tier(1, 5), Tier(4, 6), Tier(20, 3))


def gaps_from(least: int) -> st.SearchStrategy[float]:
    """Seconds up to 9, of which sums are exact."""
    return st.integers(8 * least, 72).map(lambda eighths: eighths / 8)


def filled(gaps: list[float], tiers: tuple[Tier, ...] = SMALL) -> tuple[Timeline, list[float]]:
    """A timeline of rows that come so many seconds after one another, each with a counter and the times of all."""
    timeline, second, seconds = Timeline(tiers), 0.0, []
    for number, gap in enumerate(gaps):
        second += gap
        seconds.append(second)
        timeline.add((second, float(number)))
    return timeline, seconds


@given(st.lists(gaps_from(0), max_size=200))
def test_rows_are_few_in_order_and_no_nearer_than_their_tier_says(gaps: list[float]) -> None:
    timeline, seconds = filled(gaps)
    kept = [row[0] for row in timeline.since(-1)]
    assert len(kept) <= sum(tier.rows for tier in SMALL)
    assert set(kept) <= set(seconds)
    assert all(later - earlier >= 1 for earlier, later in pairwise(kept))
    assert all(later - earlier >= 4 for earlier, later in pairwise(kept[:-5]))
    assert all(later - earlier >= 20 for earlier, later in pairwise(kept[:-11]))


@given(st.lists(gaps_from(1), min_size=1, max_size=200))
def test_the_last_rows_are_kept_as_they_came_and_those_before_leave_no_hole(gaps: list[float]) -> None:
    timeline, seconds = filled(gaps)
    kept = [row[0] for row in timeline.since(-1)]
    assert kept[-5:] == seconds[-5:]
    middle = kept[-11:-4]  # of the second tier, and the first row behind it
    assert all(later - earlier < 4 + 2 * 9 for earlier, later in pairwise(middle))


@given(st.lists(gaps_from(1), max_size=100), st.floats(-1, 500))
def test_a_request_gets_only_the_points_after_its_time(gaps: list[float], second: float) -> None:
    timeline, _ = filled(gaps)
    assert timeline.since(second) == [row for row in timeline.since(-1) if row[0] > second]


def test_days_by_the_second_are_a_few_thousand_rows() -> None:
    timeline = Timeline()
    for second in range(3 * 86400):
        timeline.add((float(second),))
    kept = [row[0] for row in timeline.since(-1)]
    assert len(kept) == sum(tier.rows for tier in TIERS)
    assert 2.1 * 86400 < kept[-1] - kept[0] < 2.3 * 86400
