"""Measure the broker's CPU time per request of the live page, by the number of ranks attached.

A broker process and real client sessions in this one, all waiting for samples that never come: whatever the broker
takes beside what it takes without looks is theirs. Looks come twice a second, so that each finds another snapshot.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.report import arguments, head, say
from tests.integration.many_ranks import many_ranks
from tests.integration.running import RunningBroker, running_broker, until

RANKS = (4, 64, 512)
GAP_S = 0.5


def main() -> None:
    """Measure and report."""
    options = arguments(__doc__, "fewer looks").parse_args()
    looks = 10 if options.quick else 40
    report = head("page", looks=looks) | {"rows": [measured(ranks, looks) for ranks in RANKS]}
    for row in report["rows"]:
        print(f"{row['ranks']:5} ranks: {row['look_ms']:.1f} ms of CPU a look, {row['bytes']:,} bytes")
    say(report, options.json)


def measured(ranks: int, looks: int) -> dict[str, Any]:
    """Of one broker: without looks, with them, without."""
    settings = {"rules": {"budget": 1024, "step": {"packs": ranks}}, "streams": {"web": {}}}
    with running_broker(settings) as broker, many_ranks(broker.trainers, {"dp": ranks}, lambda _: 1.0):
        until(lambda: broker.feed()["all_ranks_attached"])
        since = broker.status()["uptime_s"]
        paths = ("/status", f"/history?since={since}", "/events?since=500")
        before = _share(broker, looks, ())
        looked_at = _share(broker, looks, paths)
        after = _share(broker, looks, ())
        size = sum(len(broker.get(path)) for path in paths)
    return {"ranks": ranks, "look_ms": 1000 * (looked_at - (before + after) / 2), "bytes": size}


def _share(broker: RunningBroker, looks: int, paths: tuple[str, ...]) -> float:
    """CPU seconds of the broker's process for each ``GAP_S``."""
    process = psutil.Process(broker.process.pid)
    began, times = time.monotonic(), process.cpu_times()
    for look in range(1, looks + 1):
        for path in paths:
            broker.get(path)
        time.sleep(max(0.0, began + look * GAP_S - time.monotonic()))
    now = process.cpu_times()
    return float(now.user + now.system - times.user - times.system) / looks


if __name__ == "__main__":
    main()
