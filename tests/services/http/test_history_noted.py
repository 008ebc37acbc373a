"""What is noted over time of what ranks have waited: it never falls, counts each wait once, and none of elsewhere."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from streampack_services.broker.status import BrokerStatus, FeedStatus, PackTotals, RankStatus
from streampack_services.http.history import COLUMNS, MOST_ROWS, DataWaitSums, Timelines

from streampack.core.stats.data_wait import CAUSES as STARVED_BY
from streampack.core.stats.padding import CAUSES
from tests.blank import blank


def row(rank: int, waited: float | None, cause: str = "stream") -> RankStatus:
    """Return the row of a rank that has reported so many seconds of waiting; None: that has not reported."""
    return blank(
        RankStatus, where="node:1", host="node", dp_rank=rank, stats={} if waited is None else {"steps": 1.0},
        starved_s=dict.fromkeys(STARVED_BY, 0.0) | {cause: waited or 0.0},
    )  # fmt: skip


@given(st.lists(st.dictionaries(st.integers(0, 3), st.one_of(st.none(), st.floats(0, 1)), max_size=4), max_size=30))
def test_the_sum_rises_by_what_ranks_have_waited_while_they_were_there(turns: list[dict[int, float | None]]) -> None:
    """Of the ranks that are there in a second, each has waited so much of it, or says nothing (None)."""
    starved, waited, heard = DataWaitSums(), dict.fromkeys(range(4), 1000.0), dict[int, float]()
    least = most = last = 0.0
    for second, there in enumerate(turns):
        rows = []
        for rank, more in there.items():
            waited[rank] += more or 0.0
            rows.append(row(rank, None if more is None else waited[rank]))
        found = starved.add(float(second), rows)["stream"]
        heard = {rank: before for rank, before in heard.items() if rank in there}
        spoken = {rank: waited[rank] for rank, more in there.items() if more is not None}
        least += sum(now - heard[rank] for rank, now in spoken.items() if rank in heard)
        most += len(there)
        heard |= spoken
        assert last <= found
        assert least - 1e-6 <= found <= most
        last = found


def test_a_rank_that_comes_from_another_broker_has_waited_no_longer_than_it_is_here() -> None:
    starved = DataWaitSums()
    assert starved.add(1.0, [row(0, None)])["stream"] == 0
    assert starved.add(3.0, [row(0, 5000.0)])["stream"] == pytest.approx(2.0)
    assert starved.add(4.0, [row(0, 5000.5)])["stream"] == pytest.approx(2.5)
    assert starved.add(5.0, [row(0, None)])["stream"] == pytest.approx(2.5)
    assert starved.add(6.0, [row(0, 5001.0)])["stream"] == pytest.approx(3.0)
    assert starved.add(7.0, [])["stream"] == pytest.approx(3.0), "it has left"
    assert starved.add(8.0, [row(0, 5009.0)])["stream"] == pytest.approx(3.0), "it has come again"


def status(second: float, feeds: int) -> BrokerStatus:
    tokens = 10 * int(second)
    feed = blank(
        FeedStatus, totals=blank(PackTotals, tokens=tokens), delivered_tokens=tokens,
        waste_tokens=dict.fromkeys(CAUSES, 0),
    )  # fmt: skip
    names = [f"feed{n}" for n in range(feeds)]
    return blank(BrokerStatus, uptime_s=second, taken_at=1e9 + second, epoch=7, feeds=dict.fromkeys(names, feed))


def test_an_answer_is_no_longer_of_many_feeds_than_of_one() -> None:
    history = Timelines(lambda: status(1e6, 8))
    for second in range(2000):
        history.add(status(second, 8))
    every, one = (json.loads(history.since(-1, feed) or b"") for feed in (None, "feed3"))
    assert sum(map(len, every["feeds"].values())) <= MOST_ROWS
    assert {len(rows) for rows in every["feeds"].values()} == {MOST_ROWS // 8}
    assert all(rows[-1][0] == 1999 for rows in every["feeds"].values()), "the last ones"
    assert list(one["feeds"]) == ["feed3"]
    assert history.since(-1, "nobody's") is None
    assert one["columns"] == list(COLUMNS)
