"""Measure what relays save the broker: messages, CPU time and memory for 512 to 30,000 ranks, direct and behind relays.

*Simulated ranks* (the default): the real ``core.Broker``, a real ``ClientSession`` for every rank and a real
``RelaySession`` for every host, in one process and in virtual time (``relay_job.py``). Payload is zero bytes that
nobody copies, so that 30,000 ranks fit. Each rank reads one pack of 8,192 tokens a step, or shares it with the other
tensor-parallel ranks of its host. Only the broker's work is timed, as CPU time. Cyclic garbage collection is off.

- *core*: requests of ranks or relays, and the steps that go out; *wire*: messages and bundles, encoded and decoded;
  *other*: forming, records and intake, which do not depend on relays.
- *rank-steps/s*: ranks / (core + wire), the limit of one core without sockets; *with other*: all of it.
- *idle*: CPU time a second while all ranks work on a step and only ping.
- *join*: all ranks come to a new broker. *restart*: all processes end without a word, and others begin at a checkpoint
  whose snapshot has a window of 65,536 samples.
- *memory*: what the core holds for each rank (tracemalloc), in a run of its own.

``--only`` chooses parts. *table* is the above; the others use real brokers, relays and sockets:

- *crowd*: the broker's CPU time over TCP; simulated ranks and relays have real sockets (``relay_sockets.py``).
- *hosts*: bytes between two network namespaces for a node of 8 tensor-parallel ranks (``two_hosts.py``); needs root.
- *local*: 4 ranks on one host, through a relay and directly: CPU time a million tokens.
- *latency*: how long ``next()`` takes for a rank behind a relay and for a direct one of the same run, which work 20 ms
  on each pack.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.report import arguments, head, say
from benchmarks.scale.relay_job import RelayJob
from benchmarks.scale.relay_sockets import Setup, run_crowd, run_ranks
from benchmarks.scale.scale_job import Shape
from benchmarks.scale.two_hosts import measure as two_hosts_measure
from benchmarks.scale.two_hosts import two_hosts

PARTS = ("table", "crowd", "hosts", "local", "latency")
TRANSPORTS: tuple[Literal["ipc", "tcp"], ...] = ("ipc", "tcp")
WORK_S = 0.02
RANKS = (512, 4096, 16_384, 30_000)
NODE_RANKS = 8
WINDOW = 65_536
STEPS = 3
MOST_TRACED = 4096
"""Most ranks for which memory is traced, which takes several times as long; it grows with the ranks."""
REQUESTS = ("Get", "NodeGet", "merge")
"""What the broker does for requests of steps; "merge" is the request that also frees a step."""


def main() -> None:
    parser = arguments(__doc__, "512 and 4,096 ranks")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help=f"default: {' '.join(map(str, RANKS))}")
    parser.add_argument("--only", action="append", choices=PARTS, help="one part; may be repeated. Default: table")
    parser.add_argument("--brief", action="store_true", help="table: leave out idle and restart, which take longest")
    parser.add_argument("--seconds", type=float, metavar="S", help="time of each run of the parts with sockets")
    args = parser.parse_args()
    for ranks in args.ranks or ():
        if ranks < NODE_RANKS or ranks % NODE_RANKS:
            parser.error(f"--ranks: got {ranks}, expected a multiple of {NODE_RANKS}")
    report = head("relays", node_ranks=NODE_RANKS, window=WINDOW, steps=STEPS)
    parts: dict[str, Callable[[argparse.Namespace], Any]] = {
        "table": _table, "crowd": _crowd, "hosts": _hosts, "local": _local, "latency": _latency
    }  # fmt: skip
    for part in args.only or PARTS[:1]:
        report[part] = parts[part](args)
    say(report, args.json)


def _table(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Simulated ranks, by number of ranks, mesh and way of reading."""
    measure(Shape(NODE_RANKS, 1), NODE_RANKS, window=64)  # compiles
    print(HEADINGS + "\n\n" + MORE_HEADINGS)
    rows = []
    for ranks in args.ranks or (RANKS[:2] if args.quick else RANKS):
        for shape in (Shape(ranks, 1), Shape(ranks // NODE_RANKS, 1, tp=NODE_RANKS)):
            for node_ranks in (0, NODE_RANKS):
                rows.append(measure(shape, node_ranks, brief=args.brief))
                print(_line(rows[-1]), flush=True)
                if not args.brief:
                    print(_more(rows[-1]), flush=True)
    return rows


def _crowd(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Simulated ranks with real sockets."""
    rows = []
    for ranks in args.ranks or RANKS[:1]:
        for tp in (1, NODE_RANKS):
            for node_ranks in (0, NODE_RANKS):
                rows.append(row := run_crowd(ranks, node_ranks, tp, args.seconds or (3.0 if args.quick else 10.0)))
                print(
                    f"{_name(row)}  broker over TCP: {row['broker_us_a_rank']} us a rank and step, "
                    f"{row['rank_steps_per_s']} rank-steps/s a core",
                    flush=True,
                )
    return rows


def _hosts(args: argparse.Namespace) -> dict[str, Any]:
    """Bytes between two hosts."""
    found: dict[str, Any] = {}
    with two_hosts() as hosts:
        for relay in (False, True):
            run = two_hosts_measure(hosts, NODE_RANKS, 50 if args.quick else 400, relay)
            found["relay" if relay else "direct"] = asdict(run) | {"ratio": round(run.ratio, 4)}
            print(
                f"{'behind a relay' if relay else 'directly':<15} {run.ratio:.3f} bytes sent for each unique byte; "
                f"CPU ms a step: {run.cpu_ms}",
                flush=True,
            )
    return found


def _local(args: argparse.Namespace) -> dict[str, Any]:
    """Four ranks of one host, in turns through a relay and directly."""
    found: dict[str, Any] = {}
    for tp in (1, 4):
        for transport in TRANSPORTS:
            for relay in (False, True) * (1 if args.quick else 3):
                setup = Setup((relay,) * 4, tp, transport)
                run = run_ranks(setup, args.seconds or (3.0 if args.quick else 5.0))
                name = f"{transport} {'tp' if tp > 1 else 'dp'}=4 {'relay' if relay else 'direct'}"
                found.setdefault(name, []).append(run)
                print(f"{name:<18} CPU ms/M tokens: {run['cpu_ms_per_million_tokens']}", flush=True)
    return found


def _latency(args: argparse.Namespace) -> dict[str, Any]:
    """Two ranks of one mesh and one broker: the first reads directly, the second through a relay."""
    setup = Setup((False, True), work_s=WORK_S)
    run = run_ranks(setup, args.seconds or (5.0 if args.quick else 60.0))
    direct, relay = run["next_ms"]
    print(f"next() in ms, {1000 * WORK_S:.0f} ms of work a pack: direct {direct}, behind a relay {relay}")
    return {"direct": direct, "relay": relay, "p99_ratio": round(relay["p99"] / direct["p99"], 3)}


def measure(shape: Shape, node_ranks: int, window: int = WINDOW, brief: bool = False) -> dict[str, Any]:
    """Return the figures of one mesh: ranks read directly (0), or through relays of ``node_ranks`` ranks."""
    row: dict[str, Any] = {"ranks": shape.ranks, "tp": shape.tp, "relays_of": node_ranks}
    row["rank_bytes"] = _rank_bytes(shape, node_ranks) if shape.ranks <= MOST_TRACED and not brief else 0
    gc.collect()
    gc.disable()
    try:
        job = RelayJob(shape, node_ranks, window)
        row["join"] = {"virtual_s": round(job.join(), 1)} | _totals(job)
        job.produce()
        job.step()
        job.clear()
        for _ in range(STEPS):
            job.step()
        row["step"] = _of_step(job, shape.ranks)
        job.clear()
        if brief:
            return row
        idle_s = max(1.0, min(shape.ranks / 1000, 10.0))
        job.tick(idle_s)
        row["idle"] = {name: round(value / idle_s, 2) for name, value in _totals(job).items()}
        while (place := job.checkpoint()).snapshot is None:  # it is before the first snapshot
            job.step()
        job.clear()
        row["restart"] = {"virtual_s": round(job.join(1, place), 1)} | _totals(job)
        row["restart"]["brought"] = job.messages["in Brought"] + job.events["Brought"]
    finally:
        gc.enable()
    return row


def _totals(job: RelayJob) -> dict[str, float]:
    """Return CPU milliseconds, messages and bytes of everything since the last ``clear``."""
    core = sum(seconds for name, seconds in job.seconds.items() if name not in ("wire", "choose", "log"))
    found: dict[str, float] = {"core_ms": round(1000 * core, 2), "wire_ms": round(1000 * job.seconds["wire"], 2)}
    for way in ("in", "out"):
        found[f"messages_{way}"] = sum(n for name, n in job.messages.items() if name.startswith(f"{way} "))
        found[f"bytes_{way}"] = sum(n for name, n in job.bytes.items() if name.startswith(f"{way} "))
    return found


def _of_step(job: RelayJob, ranks: int) -> dict[str, float]:
    """Return the figures of one step."""
    ms = {name: 1000 * seconds / STEPS for name, seconds in job.seconds.items()}
    core, wire = sum(ms.get(name, 0.0) for name in REQUESTS), ms["wire"]
    other = sum(ms.values()) - core - wire - ms.get("choose", 0.0)
    totals = _totals(job)
    return {
        "core_ms": round(core, 2), "wire_ms": round(wire, 2), "other_ms": round(other, 2),
        "core_us_a_rank": round(1000 * core / ranks, 2), "wire_us_a_rank": round(1000 * wire / ranks, 2),
        "rank_steps_per_s": round(1000 * ranks / (core + wire)),
        "rank_steps_per_s_with_other": round(1000 * ranks / (core + wire + other)),
        "messages_in": round(totals["messages_in"] / STEPS), "messages_out": round(totals["messages_out"] / STEPS),
        "meta_bytes_out": round(totals["bytes_out"] / STEPS),
        "payload_bytes_out": round(job.bytes["payload out"] / STEPS),
    }  # fmt: skip


def _rank_bytes(shape: Shape, node_ranks: int) -> int:
    """Return the bytes that the core holds for each rank that takes part."""
    tracemalloc.start()
    job = RelayJob(shape, node_ranks)
    before = tracemalloc.get_traced_memory()[0] - job.zero_bytes
    job.join()
    job.forget_others()
    after = tracemalloc.get_traced_memory()[0] - job.zero_bytes
    tracemalloc.stop()
    return round((after - before) / shape.ranks)


HEADINGS = """\
                        of one step                                                          limit, rank-steps/s
ranks            reads  messages in  out   core ms  wire ms  other ms  us a rank  MiB sent   alone  with other"""


def _line(row: dict[str, Any]) -> str:
    step = row["step"]
    return (
        f"{_name(row)}{step['messages_in']:>13}{step['messages_out']:>7}{step['core_ms']:>8.1f}{step['wire_ms']:>9.1f}"
        f"{step['other_ms']:>10.1f}{step['core_us_a_rank'] + step['wire_us_a_rank']:>11.1f}"
        f"{(step['payload_bytes_out'] + step['meta_bytes_out']) / 2**20:>10.0f}{step['rank_steps_per_s']:>8}"
        f"{step['rank_steps_per_s_with_other']:>12}"
    )


def _name(row: dict[str, Any]) -> str:
    shape = f"{row['ranks']}{' tp=8' if row['tp'] > 1 else ''}"
    reads = f"relays of {row['relays_of']}" if row["relays_of"] else "directly"
    return f"{shape:<14}{reads:>12}"


MORE_HEADINGS = """\
                             idle, a second           join                         restart                      KiB
ranks            reads  messages  CPU ms   messages  CPU ms    MiB   messages  CPU ms    MiB  snapshots   a rank"""


def _more(row: dict[str, Any]) -> str:
    idle = row["idle"]
    line = f"{_name(row)}{idle['messages_in'] + idle['messages_out']:>10.0f}{idle['core_ms'] + idle['wire_ms']:>8.1f}"
    for name in ("join", "restart"):
        found = row[name]
        line += (
            f"{found['messages_in'] + found['messages_out']:>11}{found['core_ms'] + found['wire_ms']:>8.0f}"
            f"{(found['bytes_in'] + found['bytes_out']) / 2**20:>7.1f}"
        )
    return line + f"{row['restart']['brought']:>11}{row['rank_bytes'] / 1024 or '-':>9.3}"


if __name__ == "__main__":
    main()
