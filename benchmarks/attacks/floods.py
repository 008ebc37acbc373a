"""Flood a broker with one valid key, and measure its memory and how fast the ranks beside the attacker go on.

Real processes on loopback: `streampack broker` with keys, a log and `memory: 128MiB`, `streampack produce`, two ranks,
and one attacker with one valid key (`flooder.py` has the floods). Ranks take a step every 50 ms (paced) or as fast as
they can (unpaced).

Two cores are shared, so each flood runs twice: once at the broker, and once, as baseline, at a second broker beside it
that serves no rank. Both brokers run on one core, and the attacker on another.

    steps/s   of a rank in the flood, and in the baseline
    worst     longest wait for a step in the flood, and in the baseline, in ms
    memory    most that the broker's process held in the flood, and what it held at the end, less what it held before
    named     lines of the broker's log that name the attacker's key
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.attacks.attack import Rank, Service
from benchmarks.attacks.flooder import ROLES, flood
from benchmarks.report import arguments, head, say

PACED_S = 0.05
SETTLED_S = 4.0
CONNECTIONS = 8
SETTINGS: dict[str, Any] = {
    "memory": "128MiB",
    "rules": {"budget": 2048, "window": {"samples": 2048}, "step": {"packs": 8}},
    "streams": {"web": {"repeat": True, "partitions": 2}, "other": {"repeat": True, "partitions": 1}},
    "feeds": {"train": {"streams": ["web"]}, "spare": {"streams": ["other"]}},
}


@contextlib.contextmanager
def serving(kind: str, cores: Collection[int] = ()) -> Iterator[Service]:
    """A broker on some cores, and a producer on any; the attacker has a key."""
    with tempfile.TemporaryDirectory(prefix="sp") as folder:
        path = Path(folder)
        settings = SETTINGS | {"state_dir": str(path / "state")}
        service = Service(path, True, settings=settings, roles={"attacker": ROLES[kind]}, cores=cores)
        try:
            yield service
        finally:
            service.close()


def measured(kind: str, paced: bool, seconds: float, after: float, connections: int) -> dict[str, Any]:
    """One flood, with its baseline."""
    cores = sorted(os.sched_getaffinity(0))
    row: dict[str, Any] = {"flood": kind, "ranks": "paced" if paced else "unpaced"}
    for case in ("baseline", "flood"):
        with serving(kind, cores[:1]) as broker, contextlib.ExitStack() as opened:
            target = opened.enter_context(serving(kind, cores[:1])) if case == "baseline" else broker
            ranks = [Rank(broker, PACED_S if paced else 0.0, {"dp": 2, "dp_rank": rank}) for rank in range(2)]
            try:
                row[case] = _attacked(broker, target, ranks, kind, seconds, after, connections, cores[-1])
            except BaseException:
                os._exit(_tell(broker))  # the ranks' threads would wait for another broker
            for rank in ranks:
                rank.over = True
            for rank in ranks:
                rank.close()
    row["share"] = round(row["flood"]["steps_a_second"] / row["baseline"]["steps_a_second"], 3)
    return row


def _attacked(
    broker: Service, target: Service, ranks: list[Rank], kind: str, seconds: float, after: float, connections: int,
    core: int,
) -> dict[str, Any]:  # fmt: skip
    """Figures of the broker and its ranks while an attacker floods ``target``."""
    context = multiprocessing.get_context("spawn")
    begun, done = context.Event(), context.SimpleQueue()
    key = target.folder / "keys" / "attacker.key"
    attacker = context.Process(
        target=flood, args=(target.where, key, kind, connections, seconds, core, begun, done), daemon=True
    )
    while any(len(rank.waits) < 50 for rank in ranks):
        time.sleep(0.05)
    time.sleep(SETTLED_S)
    attacker.start()
    while not begun.wait(0.05):
        assert attacker.is_alive(), "the attacker did not begin"
    before, began = broker.resident_bytes, time.monotonic()
    for rank in ranks:
        rank.take()
    most = before
    while time.monotonic() < began + seconds:
        most = max(most, broker.resident_bytes)
        time.sleep(0.05)
    waits = [[*rank.take(), rank.waiting_s] for rank in ranks]
    attacker.join()
    assert not attacker.exitcode, "the attacker has failed"
    sent = done.get()
    end = time.monotonic() + after
    while time.monotonic() < end and broker.resident_bytes > before + (8 << 20):
        time.sleep(0.5)
    log = (broker.folder / "broker.log").read_text()
    return {
        "sent": sent,
        "steps_a_second": round(min(len(each) - 1 for each in waits) / seconds, 2),
        "worst_wait_ms": round(1e3 * max(map(max, waits))),
        "memory_mb": round((most - before) / 2**20, 1),
        "memory_after_mb": round((broker.resident_bytes - before) / 2**20, 1),
        "named": sum("'attacker'" in line for line in log.splitlines()),
    }


def _tell(broker: Service) -> int:
    """Print the error and the end of the broker's log."""
    import traceback

    traceback.print_exc()
    print((broker.folder / "broker.log").read_text()[-2000:], flush=True)
    return 1


def main() -> None:
    parser = arguments(__doc__, quick="3 s of each flood")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each flood (default 60)")
    parser.add_argument("--after", type=float, default=60.0, help="most seconds until the memory is back (default 60)")
    parser.add_argument("--flood", nargs="+", choices=ROLES, default=list(ROLES), help="floods (default: all)")
    parser.add_argument("--ranks", choices=("both", "paced", "unpaced"), default="both")
    parser.add_argument("--connections", type=int, default=CONNECTIONS, help=f"of the attacker (default {CONNECTIONS})")
    options = parser.parse_args()
    report = head("floods")
    seconds, after = (3.0, 3.0) if options.quick else (options.seconds, options.after)
    report["floods"] = []
    print("| flood | ranks | steps/s | baseline | share | worst ms | baseline | memory MB | after | messages | named |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for kind in options.flood:
        for paced in {"both": (True, False), "paced": (True,), "unpaced": (False,)}[options.ranks]:
            row = measured(kind, paced, seconds, after, options.connections)
            report["floods"].append(row)
            flooded, calm = row["flood"], row["baseline"]
            print(
                f"| {kind} | {row['ranks']} | {flooded['steps_a_second']} | {calm['steps_a_second']} | "
                f"{row['share']:.0%} | {flooded['worst_wait_ms']} | {calm['worst_wait_ms']} | "
                f"{flooded['memory_mb']:+} | {flooded['memory_after_mb']:+} | {flooded['sent']:,} | "
                f"{flooded['named']} |",
                flush=True,
            )
    say(report, options.json)


if __name__ == "__main__":
    main()
