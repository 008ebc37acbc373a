"""Since when each feed waits, and for what; the log lines about long waits. The broker's thread calls it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from streampack.core.feed.feed import Feed
from streampack.core.stats.data_wait import Missing
from streampack_services.broker.causes.waiting_for import WaitingFor
from streampack_services.figure import filled

log = logging.getLogger("streampack.broker")

LOG_AFTER_S = 5.0
"""A wait for a step is logged after this time, in seconds."""
LOG_BUSY_AFTER_S = 60.0
"""A wait for training, which is normal while every rank is attached, is logged after this time, in seconds."""
LOG_AT_MOST_EVERY_S = 30.0
"""Longest time between two lines about the same wait, in seconds."""
LOG_IDLE_EVERY_S = 3600.0
"""Time between two lines about a feed that no rank waits for, in seconds."""
STALLED_AFTER_S = 5.0
"""A feed that a rank waits for is stalled after this time without a step."""
BUSY = ("peers", "memory")
"""Reasons that are normal while every rank trains."""


@dataclass(slots=True)
class _Watch:
    """Times of a feed's last progress and last log line, in seconds of the monotonic clock."""

    steps: int = -1
    """Steps formed and returned, at the last progress."""
    since: float = 0.0
    """Time of the last progress."""
    logged: float = 0.0
    """Time of the last log line."""
    every: float = LOG_AFTER_S
    """Seconds until the next log line."""
    starved: bool = False
    """True if a rank waited for the feed at the last look."""


class FeedWaits:
    """The waits of all feeds of a broker."""

    def __init__(self, feeds: Mapping[str, Feed]) -> None:
        self._feeds = feeds
        self._watches = {name: _Watch() for name in feeds}

    def still_s(self, now: float, feed: Feed) -> float:
        """Return the seconds since a step of the feed was formed or returned; 0 before the first ``note``."""
        watch = self._watches[feed.name]
        return 0.0 if watch.steps < 0 else now - watch.since

    def stalled_s(self, now: float, feed: Feed, reasons: Missing | None) -> float | None:
        """Return the seconds since the feed's last step; None if no rank waits for data, for these ``reasons``."""
        still_s, steps = self.still_s(now, feed), feed.readers.steps
        if still_s < STALLED_AFTER_S or steps.end is not None or reasons is None or not steps.any_starved:
            return None
        return None if reasons.reason in BUSY and not reasons.lost else still_s

    def note(self, now: float, draining: bool) -> None:
        """Note progress, and log the feeds without any: at least every 30 s while a rank waits for data, else hourly.

        Args:
            now: Seconds of the monotonic clock.
            draining: True while the broker drains.
        """
        for name, feed in self._feeds.items():
            moved = feed.figures.totals.steps + feed.readers.steps.released_upto
            if moved != self._watches[name].steps or draining:
                self._watches[name] = _Watch(moved, now, now)
        all_still = now - max(watch.since for watch in self._watches.values())
        for name, feed in self._feeds.items():
            self._log(now, feed, self._watches[name], all_still)

    def _log(self, now: float, feed: Feed, watch: _Watch, all_still_s: float) -> None:
        """Log the wait of one feed if a log line is due; ``all_still_s``: seconds since any feed made progress."""
        reasons = waiting_for(feed)
        if now - watch.since < LOG_AFTER_S:
            return
        if (starved := feed.readers.steps.any_starved) != watch.starved:
            watch.starved, watch.every = starved, LOG_AFTER_S
        if reasons is None or now - watch.logged < watch.every:
            return
        ready_s = all_still_s if reasons.reason in BUSY else LOG_BUSY_AFTER_S
        if ready_s < (LOG_BUSY_AFTER_S if feed.readers.steps.all_there else LOG_AFTER_S):
            return  # normal: trainers read another feed
        watch.logged = now
        watch.every = min(2 * watch.every, LOG_AT_MOST_EVERY_S) if starved else LOG_IDLE_EVERY_S
        prefix = f"feed {feed.name!r}: " if len(self._watches) > 1 else ""
        about = {"about": {"feed": feed.name, "step": feed.readers.steps.formed_upto}}
        wanted = feed.readers.steps.all_there and reasons.reason in ("stream", "memory", "log") and not reasons.batch
        level = logging.WARNING if wanted else logging.INFO
        text = filled(WaitingFor, reasons).text
        log.log(level, "%sno step for %.0f s: %s", prefix, now - watch.since, text, extra=about)


def waiting_for(feed: Feed) -> Missing | None:
    """Return the reason why the feed's next step is not formed or read; None at the end and while the feed drains."""
    readers = feed.readers
    if readers.steps.draining:
        return None
    if readers.num_readers and not readers.steps.joined:
        return Missing("join", readers.absent or f"all {readers.num_ranks} ranks are connected, but some are not ready")
    if readers.steps.end is not None:
        left = readers.steps.end.num_steps - readers.steps.released_upto
        return readers.steps.wait_for_ranks("peers", f"{left} last steps are not returned: ") if left else None
    return feed.waiting_for()
