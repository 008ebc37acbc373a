"""What the live page draws over time: figures of each feed, noted once a second beside the broker, for ``/history``.

A thread of its own reads the last snapshot, as HTTP's does: the broker's is never asked. Time is the broker's uptime,
which no clock can set back; ``began`` is when that was 0, of the wall clock. Counters are kept, not rates: who draws
takes differences, over as long as there is use for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from streampack.core.stats.data_wait import CAUSES as STARVED_BY
from streampack.core.stats.padding import CAUSES
from streampack_services.broker.status import BrokerStatus, FeedStatus, RankStatus
from streampack_services.http.metric_rows import Labels, rank_labels
from streampack_services.http.timeline import TIERS, Row, Timeline

EVERY_S = 1.0
COLUMNS = (
    "second", "tokens", "delivered", *(f"waste_{cause}" for cause in CAUSES), "formed", "returned", "ranks",
    *(f"starved_{cause}" for cause in STARVED_BY), "window", "held", "live",
)  # fmt: skip
"""Of a row. ``tokens``, ``delivered`` (wasted ones too), ``waste_*``: tokens formed since the start; ``formed``,
``returned``: steps; ``starved_*``: seconds that ranks have waited here, added up, by cause; ``window``, ``held`` (of
the feed), ``live`` (of all feeds): tokens now."""
MOST_ROWS = sum(tier.rows for tier in TIERS)
"""Of an answer: 1 MB."""


class Timelines:
    """A timeline of each feed of ``snapshot()``, from ``start`` to ``close``."""

    def __init__(self, snapshot: Callable[[], BrokerStatus]) -> None:
        self._snapshot = snapshot
        self._timelines: dict[str, Timeline] = {}
        self._starved: dict[str, Starved] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="streampack-history", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Note no more."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def since(self, second: float, feed: str | None = None) -> bytes | None:
        """JSON: ``columns``, ``epoch`` and ``began`` of the broker, and by feed the rows after ``second``: those of one
        ``feed``, or the last ones of each, all together no more than one has. None where there is no such feed.
        """
        now = self._snapshot()
        if feed is not None and feed not in now.feeds:
            return None
        with self._lock:
            wanted = {name: each for name, each in self._timelines.items() if feed in (None, name)}
            rows = {name: timeline.since(second)[-(MOST_ROWS // len(wanted)) :] for name, timeline in wanted.items()}
        began = now.taken_at - now.uptime_s
        # Row by row: days of them at once would keep the broker's thread from running for as long as that takes.
        feeds = {name: [msgspec.Raw(msgspec.json.encode(list(row))) for row in rows[name]] for name in rows}
        return msgspec.json.encode({"columns": COLUMNS, "epoch": str(now.epoch), "began": began, "feeds": feeds})

    def note(self, now: BrokerStatus) -> None:
        """Add a row of each feed."""
        for name, feed in now.feeds.items():
            starved = self._starved.setdefault(name, Starved()).add(now.uptime_s, feed.readers)
            row = row_of(now, feed, starved)
            with self._lock:
                self._timelines.setdefault(name, Timeline()).add(row)

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            self.note(self._snapshot())


class Starved:
    """What the ranks of a feed have waited here, added up by cause: it never falls when one of them leaves, and what
    one that comes has waited elsewhere is no part of it.
    """

    def __init__(self) -> None:
        self._sums = dict.fromkeys(STARVED_BY, 0.0)
        self._ranks: dict[Labels, tuple[float, dict[str, float] | None]] = {}
        """By process and rank: when it was first there, and the seconds that it reported last."""

    def add(self, second: float, readers: list[RankStatus]) -> dict[str, float]:
        """The sums by now. Of what a rank says first, no more counts than the time that it was there."""
        before, self._ranks = self._ranks, {}
        for row in readers:
            who = rank_labels(row.where, row)
            came, last = before.get(who, (second, None))
            said = row.starved_s if row.has_reported else None
            self._ranks[who] = came, said or last
            if said is None:
                continue
            share = 1.0 if last is not None else min(1.0, (second - came) / max(sum(said.values()), 1e-9))
            for cause, seconds in said.items():
                self._sums[cause] += share * max(seconds - (last or {}).get(cause, 0.0), 0.0)
        return dict(self._sums)


def row_of(now: BrokerStatus, feed: FeedStatus, starved: dict[str, float]) -> Row:
    """Return the ``COLUMNS`` of a feed."""
    return (
        now.uptime_s, feed.totals.tokens, feed.delivered_tokens, *(feed.waste_tokens[cause] for cause in CAUSES),
        feed.steps.formed, feed.steps.returned, len(feed.readers), *starved.values(), feed.window.tokens,
        feed.held_tokens, now.memory.live_tokens,
    )  # fmt: skip
