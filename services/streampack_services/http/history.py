"""Figures of each feed over time, which the live page draws; ``/history`` serves them.

A thread of its own adds a row for each feed every second, from the broker's last snapshot. Time is the broker's uptime,
which never goes back; ``began`` is the wall-clock time at uptime 0. Rows hold counters, not rates: the page takes
differences over the time that it shows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from streampack.core.stats.data_wait import CAUSES as STARVED_BY
from streampack.core.stats.padding import CAUSES
from streampack_services.broker.status import BrokerStatus, FeedStatus
from streampack_services.http.timeline import TIERS, Row, Timeline

EVERY_S = 1.0
COLUMNS = (
    "second", "tokens", "delivered", *(f"waste_{cause}" for cause in CAUSES), "formed", "returned", "ranks",
    *(f"starved_{cause}" for cause in STARVED_BY), "window", "held", "live",
)  # fmt: skip
"""Columns of a row.

- ``second``: uptime of the broker.
- ``tokens``, ``delivered``, ``waste_*``: tokens formed since the start: real, with padding, and padding by cause.
- ``formed``, ``returned``: steps of the current iteration.
- ``ranks``: ranks attached.
- ``starved_*``: seconds that the ranks have waited for data, summed, by cause.
- ``window``, ``held``, ``live``: tokens now in the window, held by the feed, and held by all feeds.
"""
MOST_ROWS = sum(tier.rows for tier in TIERS)
"""Most rows of an answer, about 1 MB."""


class Timelines:
    """The timelines of a broker's feeds, extended from ``snapshot()`` every second from ``start`` to ``close``."""

    def __init__(self, snapshot: Callable[[], BrokerStatus]) -> None:
        self._snapshot = snapshot
        self._timelines: dict[str, Timeline] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="streampack-history", daemon=True)

    def start(self) -> None:
        """Start the thread that adds rows."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def since(self, second: float, feed: str | None = None) -> bytes | None:
        """Return the rows after a time as JSON: ``columns``, ``epoch``, ``began``, and ``feeds`` with the rows of each.

        Args:
            second: Uptime of the broker, in seconds.
            feed: Name of one feed, or None for the last rows of all feeds: ``MOST_ROWS`` of them in total.

        Returns:
            The JSON, or None if there is no such feed.
        """
        now = self._snapshot()
        if feed is not None and feed not in now.feeds:
            return None
        with self._lock:
            wanted = {name: timeline for name, timeline in self._timelines.items() if feed in (None, name)}
            rows = {name: timeline.since(second)[-(MOST_ROWS // len(wanted)) :] for name, timeline in wanted.items()}
        began = now.taken_at - now.uptime_s
        # Encode row by row: encoding days of rows in one call would block the broker's thread (GIL).
        feeds = {name: [msgspec.Raw(msgspec.json.encode(list(row))) for row in rows[name]] for name in rows}
        return msgspec.json.encode({"columns": COLUMNS, "epoch": str(now.epoch), "began": began, "feeds": feeds})

    def add(self, now: BrokerStatus) -> None:
        """Add a row for each feed of a snapshot."""
        for name, feed in now.feeds.items():
            row = row_of(now, feed)
            with self._lock:
                self._timelines.setdefault(name, Timeline()).add(row)

    def _run(self) -> None:
        """Add a row for each feed every ``EVERY_S`` until ``close``."""
        while not self._stop.wait(EVERY_S):
            self.add(self._snapshot())


def row_of(now: BrokerStatus, feed: FeedStatus) -> Row:
    """Return a feed's row of ``COLUMNS``."""
    return (
        now.uptime_s, feed.totals.tokens, feed.delivered_tokens, *(feed.waste_tokens[cause] for cause in CAUSES),
        feed.steps.formed, feed.steps.returned, feed.ranks.attached,
        *(feed.ranks.starved_s[cause] for cause in STARVED_BY), feed.window.tokens, feed.held_tokens,
        now.memory.live_tokens,
    )  # fmt: skip
