"""Keeps the hours that ranks spend on training and on waiting, in a thread that writes them to the state_dir."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from streampack.errors import UserError
from streampack_services.broker.status import BrokerStatus
from streampack_services.ledger.run_hours import FeedHours, StepTimes, read_hours, write_hours

log = logging.getLogger("streampack.broker")

EVERY_S = 10.0
"""Time between two writes, in seconds: a killed broker loses the hours since the last one."""


class KeptHours:
    """Writes the hours of ``snapshot()``, added to those of earlier brokers, every ``EVERY_S`` and in ``close``.

    ``times`` returns the times of the last steps by feed.
    """

    def __init__(
        self, state_dir: Path, snapshot: Callable[[], BrokerStatus], times: Callable[[], dict[str, StepTimes]] = dict
    ) -> None:  # fmt: skip
        self._where, self._snapshot, self._times = state_dir, snapshot, times
        self._before: dict[str, FeedHours] = {}
        self._failed = ""
        self._stop = threading.Event()
        try:
            self._before = read_hours(state_dir)
        except UserError as error:
            log.warning("cannot go on counting hours: %s", error)
            self._stop.set()
        self._thread = threading.Thread(target=self._run, name="streampack-hours", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the hours for the last time, and stop the thread; idempotent."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            self._write()

    def _run(self) -> None:
        """Write the hours every ``EVERY_S`` until ``close``."""
        while not self._stop.wait(EVERY_S):
            self._write()

    def _write(self) -> None:
        """Write the hours, unless nothing was delivered; log the first of several equal errors."""
        times, hours = self._times(), {}
        for name, now in hours_of(self._snapshot()).items():
            now = replace(now, step_times=times.get(name, now.step_times))
            hours[name] = self._before.get(name, FeedHours()).plus(now)
        try:
            if any(hour.delivered_tokens for hour in hours.values()):
                write_hours(self._where, hours)
            self._failed = ""
        except OSError as error:
            if self._failed != (failed := str(error)):
                log.warning("cannot write the hours of this run: %s", error)
            self._failed = failed


def hours_of(status: BrokerStatus) -> dict[str, FeedHours]:
    """Return the hours of each feed since the broker began."""
    return {
        name: FeedHours(
            delivered_tokens=feed.delivered_tokens, waste_tokens=feed.waste_tokens,
            trained_s=feed.ranks.trainer_s, starved_s=feed.ranks.starved_s, useful_s=round(feed.ranks.useful_s, 3),
            timed_s=round(feed.ranks.timed_s, 3),
        )
        for name, feed in status.feeds.items()
    }  # fmt: skip
