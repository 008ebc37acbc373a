"""Measure the bytes and the CPU time that monitoring costs a broker with many ranks.

The ranks are simulated, 8 on each node: the real core receives their messages, without sockets. The HTTP thread makes
``/metrics``, ``/status`` and pages of ranks on request. The broker's thread takes a snapshot every half second:
``take_ms`` is the mean and ``longest_take_ms`` the longest of a whole pass over all ranks.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from streampack_services.broker.ranks.rank_table import RANKS_A_TURN
from streampack_services.http.history import Timelines
from streampack_services.http.metrics import METRICS, exposition

from benchmarks.report import arguments, head, say
from tests.integration.simulated_ranks import SimulatedRanks

PING_S, PINGS = 10.0, 3
TURN_S = 0.5
EVERY_S = 2.1
"""Time after which the rows of 1,024 ranks are made again, in seconds."""


def milliseconds(work: Callable[[], object], times: int) -> float:
    """Return the mean CPU time of one call, after a first call."""
    work()
    began = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began) / times * 1000


def main() -> None:
    parser = arguments(__doc__, "fewer repetitions")
    parser.add_argument("--ranks", type=int, default=512)
    given = parser.parse_args()
    report = head("scrape", ranks=given.ranks)
    times = 3 if given.quick else 20
    simulated = SimulatedRanks(given.ranks)
    try:
        simulated.attach()
        simulated.deal()
        for _ in range(PINGS):
            simulated.ping(PING_S)
        report |= measured(simulated, times)
    finally:
        simulated.close()
    for name, figure in report.items():
        if name.endswith(("series", "bytes", "_ms")):
            print(f"{name:18} {figure:>12,}")
    say(report, given.json)


def measured(simulated: SimulatedRanks, times: int) -> dict[str, float]:
    """Return the figures of a broker whose ranks have reported theirs."""
    reporter, now, takes = simulated.service._reporter, simulated.now, []
    gc.collect()
    for _ in range(3):  # passes over all ranks
        for turn in range(1 + simulated.ranks // RANKS_A_TURN):
            now += TURN_S if turn else EVERY_S
            began = time.process_time()
            snapshot = reporter.take(now)
            takes.append(1000 * (time.process_time() - began))
    text, status = exposition(snapshot), msgspec.json.encode(snapshot)
    page = msgspec.json.encode(reporter.rank_page("train", None, 0))
    node = msgspec.json.encode(reporter.rank_page("train", "node0000.cluster", 0))
    history = Timelines(lambda: snapshot)
    history.add(snapshot)
    poll = status + (history.since(snapshot.uptime_s - 1) or b"")
    return {
        "series": sum(not line.startswith(b"#") for line in text.splitlines()),
        "metrics": len(METRICS),
        "metrics_bytes": len(text),
        "metrics_ms": round(milliseconds(lambda: exposition(snapshot), times), 2),
        "status_bytes": len(status),
        "status_ms": round(milliseconds(lambda: msgspec.json.encode(snapshot), times), 2),
        "poll_bytes": len(poll),
        "ranks_page_bytes": len(page),
        "ranks_page_ms": round(milliseconds(lambda: reporter.rank_page("train", None, 0), times), 2),
        "node_page_bytes": len(node),
        "node_page_ms": round(milliseconds(lambda: reporter.rank_page("train", "node0000", 0), times), 2),
        "history_row_ms": round(milliseconds(lambda: history.add(snapshot), times), 2),
        "take_ms": round(sum(takes) / len(takes), 2),
        "longest_take_ms": round(max(takes), 2),
    }


if __name__ == "__main__":
    main()
