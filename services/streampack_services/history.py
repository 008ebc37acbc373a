"""What the live page draws over time: figures of each feed, noted once a second beside the broker, for ``/history``.

A thread of its own reads the last snapshot, as HTTP's does: the broker's is never asked. Time is the broker's uptime,
which no clock can set back; ``began`` is when that was 0, of the wall clock. Counters are kept, not rates: who draws
takes differences, over as long as there is use for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec

from streampack.core.starvation import CAUSES as STARVED_BY
from streampack.core.waste import CAUSES
from streampack_services.status import Snapshot
from streampack_services.timeline import Row, Timeline

EVERY_S = 1.0
COLUMNS = (
    "second", "tokens", "delivered", *(f"waste_{cause}" for cause in CAUSES), "formed", "returned", "ranks",
    *(f"starved_{cause}" for cause in STARVED_BY), "window", "held", "live",
)  # fmt: skip
"""Of a row. ``tokens``, ``delivered`` (wasted ones too), ``waste_*``: tokens formed since the start; ``formed``,
``returned``: steps; ``starved_*``: seconds that all ranks attached have waited, added up, by cause; ``window``,
``held`` (of the feed), ``live`` (of all feeds): tokens now."""


class History:
    """A timeline of each feed of ``snapshot()``, from ``start`` to ``close``."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot
        self._timelines: dict[str, Timeline] = {}
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

    def since(self, second: float) -> bytes:
        """JSON: ``columns``, ``epoch`` and ``began`` of the broker, and by feed the rows after ``second``."""
        now = self._snapshot()
        with self._lock:
            rows = {name: timeline.since(second) for name, timeline in self._timelines.items()}
        began = now["taken_at"] - now["uptime_s"]
        # Row by row: days of them at once would keep the broker's thread from running for as long as that takes.
        feeds = {name: [msgspec.Raw(msgspec.json.encode(list(row))) for row in rows[name]] for name in rows}
        return msgspec.json.encode({"columns": COLUMNS, "epoch": str(now["epoch"]), "began": began, "feeds": feeds})

    def note(self, now: Snapshot) -> None:
        """Add a row of each feed."""
        for name, feed in now["feeds"].items():
            row = row_of(now, feed)
            with self._lock:
                self._timelines.setdefault(name, Timeline()).add(row)

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            self.note(self._snapshot())


def row_of(now: Snapshot, feed: dict[str, Any]) -> Row:
    """The ``COLUMNS`` of a feed of a snapshot."""
    starved = dict.fromkeys(STARVED_BY, 0.0)
    for reader in feed["readers"]:
        for cause, seconds in reader["starved_s"].items():
            starved[cause] += seconds
    return (
        now["uptime_s"], feed["totals"]["tokens"], feed["delivered_tokens"],
        *(feed["waste_tokens"][cause] for cause in CAUSES),
        feed["steps"]["formed"], feed["steps"]["returned"], len(feed["readers"]),
        *starved.values(), feed["window"]["tokens"], feed["held_tokens"], now["memory"]["live_tokens"],
    )  # fmt: skip
