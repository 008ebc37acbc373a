"""The rows of ``/history``: an answer has a limited number of them."""

from __future__ import annotations

import json

from msgspec.structs import replace
from streampack_services.broker.ranks.rank_status import RanksStatus
from streampack_services.broker.status import BrokerStatus, FeedStatus, PackTotals
from streampack_services.http.history import COLUMNS, MOST_ROWS, Timelines

from streampack.core.stats.data_wait import CAUSES as STARVED_BY
from streampack.core.stats.padding import CAUSES
from tests.blank import blank

TOTALS = blank(PackTotals)
RANKS = blank(RanksStatus, starved_s=dict.fromkeys(STARVED_BY, 0.0))
FEED = blank(FeedStatus, waste_tokens=dict.fromkeys(CAUSES, 0), ranks=RANKS)
BROKER = blank(BrokerStatus, epoch=7)


def status(second: float, feeds: int) -> BrokerStatus:
    tokens = 10 * int(second)
    feed = replace(FEED, totals=replace(TOTALS, tokens=tokens), delivered_tokens=tokens)
    names = [f"feed{n}" for n in range(feeds)]
    return replace(BROKER, uptime_s=second, taken_at=1e9 + second, feeds=dict.fromkeys(names, feed))


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
