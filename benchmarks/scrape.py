"""Measure the CPU time that monitoring costs a broker with many ranks: a scrape, ``/status``, and the rows of ranks.

The ranks are made up, with a value in every field, beside a broker that serves no rank. The HTTP thread makes
``/metrics`` and ``/status`` on request. The broker's thread makes the rows, at most every 2 ms times the ranks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from streampack_services.broker import reporter
from streampack_services.broker.service import BrokerService
from streampack_services.http.metrics import METRICS, exposition

from benchmarks.report import arguments, head, say
from streampack.client.reading_stats import ReadingFigures
from streampack.config.daemon_settings import BrokerConfig
from streampack.config.typed_yaml import convert
from streampack.core.feed.feed import Feed
from streampack.core.model.mesh import Mesh, ReadBy
from streampack.core.serve.rank_reader import Reader, ReaderPhase, Receiver
from streampack.core.stats.data_wait import CAUSES, WAIT_BOUNDS_S, Starvation

STREAMS = ("web", "code", "math")
MICRO_BATCHES = 8


def seat(feed: Feed, ranks: int) -> None:
    """Ranks that have something to say of everything."""
    costs = np.random.default_rng(1).integers(1, 100, ranks * MICRO_BATCHES)
    feed.readers.steps.dealt.add(costs, costs, np.arange(len(costs)).reshape(-1, ranks))
    for rank in range(ranks):
        mesh, where = Mesh(dp=ranks, dp_rank=rank), f"node{rank // 8:03d}.cluster:{1000 + rank}"
        reader = Reader(f"r{rank}", b"%d" % rank, Receiver(b"%d" % rank), where, mesh, ReadBy(), 0.0, 0.0)
        reader.phases.go(ReaderPhase.CLAIMS)
        reader.take_rank()
        reader.stats = ReadingFigures().counts(0)
        reader.starvation = Starvation(
            causes_s=dict.fromkeys(CAUSES, rank + 0.123456), streams_s=dict.fromkeys(STREAMS, rank + 0.041),
            waits=[5] * (len(WAIT_BOUNDS_S) + 1), trainer_s=100.5, step_s=0.51,
        )  # fmt: skip
        feed.readers.registry.held[mesh.ranks] = reader


def milliseconds(work: Callable[[], object], times: int) -> float:
    """CPU time of one, mean, after a first."""
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
    tree = {
        "listen": {"producers": "tcp://127.0.0.1:*", "trainers": "tcp://127.0.0.1:*"},
        "memory": "1GiB",
        "rules": {"budget": 1024, "step": {"packs": given.ranks * MICRO_BATCHES}},
        "streams": {name: {} for name in STREAMS},
    }
    service = BrokerService(convert(tree, BrokerConfig))
    try:
        feed, times = service.core.feeds["train"], 3 if given.quick else 20
        seat(feed, given.ranks)
        snapshot = service._reporter.take(time.monotonic())
        text = exposition(snapshot)
        report |= {
            "series": sum(not line.startswith(b"#") for line in text.splitlines()),
            "metrics": len(METRICS),
            "metrics_bytes": len(text),
            "metrics_ms": round(milliseconds(lambda: exposition(snapshot), times), 2),
            "status_bytes": len(msgspec.json.encode(snapshot)),
            "status_ms": round(milliseconds(lambda: msgspec.json.encode(snapshot), times), 2),
            "rows_ms": round(milliseconds(lambda: reporter.rank_rows(feed), times), 2),
        }
    finally:
        service.close()
    for name in ("series", "metrics_bytes", "metrics_ms", "status_bytes", "status_ms", "rows_ms"):
        print(f"{name:14} {report[name]:>12,}")
    say(report, given.json)


if __name__ == "__main__":
    main()
