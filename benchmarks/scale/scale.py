"""Measure the limits of one broker: the pure broker without payload, for 8 to 4,096 data-parallel ranks.

The real ``core.Broker``, a ``ClientSession`` for every rank and ``ProducerSession``s, in one process and in virtual
time: no sockets, no arena, and chunks whose tokens nobody reads. What is timed is the broker's own work, CPU time,
event by event; the others run beside it and are not counted. Ranks read in lock step, with two steps ahead of the one
in use; lengths are drawn as in ``throughput.py``. With G = 8 packs a rank, then 1.

- *forming*: the packer's choice, in a daemon on a thread of its own; *steps*: what is made of it (digests, records,
  figures); *dealing* alone, which is in *serving*: all GETs, and the steps that go out; *intake*: chunks, and merging
  them; *wire*: headers and metas, in and out (checksums and copies of the payload are left out, and all of sockets);
- *idle*: milliseconds a second for ticks, a ping of every rank, and the rows of ``/status``;
- *attached*, *restarted*: until all ranks are in, at first, and when each is replaced in a run that goes on;
- *memory*: what the broker's objects hold, in a run of its own (tracemalloc); the arena for it holds four steps.

The whole adds meshes with cp and pp, and ``scale_sockets.py``: real clients of a real broker.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
from streampack_services.broker.reporter import EVERY_S, ROW_S

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.report import arguments, head, say
from benchmarks.scale.scale_job import Job, Shape
from benchmarks.scale.scale_sockets import run_sockets
from streampack.core.deal.deal import deal

NEEDED_TOKENS_PER_S = 100e6
"""What 10,000 H100s eat that train a model of 8B parameters."""
IDLE_S = 3
QUICK_TOKENS = 1 << 26
SOCKETS, SOCKETS_S = (16, 64), 5.0


def main() -> None:
    args = arguments(__doc__, "dp alone, two steps each, no processes: under a minute").parse_args()
    shapes = [Shape(dp, packs) for packs in (8, 1) for dp in (8, 64, 512, 4096)]
    if not args.quick:
        shapes += [Shape(2048, 8, cp=2), Shape(2048, 8, pp=2), Shape(1024, 8, cp=2, pp=2)]
    report = head("scale")
    measure(Shape(8, 8), 1, False)  # compiles
    rows = []
    print(HEADINGS)
    for shape in shapes:
        rows.append(
            row := measure(
                shape, max(2 if args.quick else 6, min(32, QUICK_TOKENS // shape.step_tokens)), not args.quick
            )
        )
        print(_line(row), flush=True)
    print("\n" + MORE_HEADINGS)
    for row in rows:
        print(_more(row))
    print("\n" + LOADED)
    for row in rows:
        print(_loaded(row))
    if not args.quick:
        report["sockets"] = sockets = [run_sockets(ranks, SOCKETS_S) for ranks in SOCKETS]
        for found in sockets:
            print(
                f"\n{found['ranks']} clients over ipc, a pack of {found['budget']} tokens each: "
                f"{found['steps_per_s']} steps/s; CPU ms a step: {found['cpu_ms']}"
            )
    say(report | {"rows": rows}, args.json)


def measure(shape: Shape, steps: int, whole: bool) -> dict[str, Any]:
    """One shape's figures: of ``steps`` steps, the mean; what is held only where that is fast, or ``whole``."""
    job = Job(shape)
    row: dict[str, Any] = {"shape": str(shape), "ranks": shape.ranks, "step_tokens": shape.step_tokens}
    job.attach()
    row["attach_ms"] = _ms(sum(job.seconds.values()))
    job.produce()
    job.step()
    job.clear()
    for _ in range(steps):
        job.step()
    ms = {name: 1000 * seconds / steps for name, seconds in job.seconds.items()}
    serving, made = ms["Get"], ms["Formed"] + ms["Safe"] + ms["log"]
    of_step = sum(ms.values()) - ms["choose"]
    row |= {"forming_ms": _round(ms["choose"]), "steps_ms": _round(made), "dealing_ms": _round(_dealing_ms(shape))}
    row |= {
        "serving_ms": _round(serving),
        "intake_ms": _round(ms.get("Samples", 0.0) + ms["merge"]),
        "wire_ms": _round(ms["wire"]),
    }
    row |= {"cpu_ms": _round(of_step), "rank_us": _round(1000 * (serving + ms["wire"]) / shape.ranks)}
    row |= _traffic(job, steps)
    row["steps_per_s"] = _round(1000 / max(of_step, ms["choose"]))
    row["tokens_per_s"] = round(row["steps_per_s"] * shape.step_tokens)
    job.clear()
    job.tick(IDLE_S)
    row["idle_ms"] = {name: _round(1000 * seconds / IDLE_S) for name, seconds in job.seconds.items()}
    row["idle_ms"]["rows"] = _round(job.rows_ms() / max(EVERY_S, shape.ranks * ROW_S))
    job.clear()
    job.attach(life=1)
    row |= {"restart_ms": _ms(sum(job.seconds.values())), "restart_longest_ms": _ms(max(job.longest.values()))}
    row["rank_bytes"], row["arena_bytes"] = _rank_bytes(shape), job.arena_bytes
    row["held_bytes"] = _held_bytes(shape) if whole or shape.step_tokens <= QUICK_TOKENS else 0
    return row


def _traffic(job: Job, steps: int) -> dict[str, Any]:
    """Messages and bytes a step, and what the log holds of it."""
    logged = job.bytes["StepFormed"] / job.messages["StepFormed"] + job.bytes["SnapshotTaken"] / steps
    row: dict[str, Any] = {"log_bytes": round(logged), "log_bytes_sample": _round(logged / job.samples_of_step)}
    for way in ("in", "out"):
        row[f"messages_{way}"] = _round(sum(n for name, n in job.messages.items() if name.startswith(way)) / steps)
        row[f"meta_bytes_{way}"] = round(sum(n for name, n in job.bytes.items() if name.startswith(way)) / steps)
        row[f"payload_bytes_{way}"] = round(job.bytes[f"payload {way}"] / steps)
    return row | {"samples": job.samples_of_step, "snapshot_bytes": round(job.bytes["SnapshotTaken"] / steps)}


def _dealing_ms(shape: Shape) -> float:
    """CPU time of DEAL of a step of the shape's packs, median of some."""
    costs = np.random.default_rng(0).integers(1 << 20, 1 << 24, shape.dp * shape.packs)
    taken = []
    for _ in range(9):
        began = time.thread_time()
        deal(costs, shape.dp, "deal")
        taken.append(1000 * (time.thread_time() - began))
    return float(np.median(taken))


def _rank_bytes(shape: Shape) -> int:
    """What a broker holds more for each rank that is attached."""
    tracemalloc.start()
    job = Job(shape)
    before = tracemalloc.get_traced_memory()[0]
    job.attach()
    job.forget_others()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return round((after - before) / shape.ranks)


def _held_bytes(shape: Shape) -> int:
    """What a broker's objects hold while it serves."""
    tracemalloc.start()
    job = Job(shape)
    job.attach()
    job.produce()
    job.forget_others()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held


HEADINGS = """\
                            ms of CPU a step                       us   messages  KiB of meta  log, B
shape          forming  steps dealing serving intake  wire   all a rank   in  out   in    out a sample steps/s Mtok/s"""


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['shape']:<15}{row['forming_ms']:>7}{row['steps_ms']:>7}{row['dealing_ms']:>8}{row['serving_ms']:>8}"
        f"{row['intake_ms']:>7}{row['wire_ms']:>6}{row['cpu_ms']:>6}{row['rank_us']:>7}{row['messages_in']:>5.0f}"
        f"{row['messages_out']:>5.0f}{row['meta_bytes_in'] / 1024:>5.0f}{row['meta_bytes_out'] / 1024:>7.0f}"
        f"{row['log_bytes_sample']:>9}{row['steps_per_s']:>8}{row['tokens_per_s'] / 1e6:>8.0f}"
    )


MORE_HEADINGS = """\
                       ms until all are in   longest    idle, ms a second           KiB        MiB
shape                 attached   restarted     event  ticks  pings   wire status  a rank  in all  arena"""


def _more(row: dict[str, Any]) -> str:
    idle = row["idle_ms"]
    return (
        f"{row['shape']:<21}{row['attach_ms']:>9}{row['restart_ms']:>12}{row['restart_longest_ms']:>10}"
        f"{idle['tick']:>7}{idle['ReaderPing']:>7}{idle['wire']:>7}{idle['rows']:>7}{row['rank_bytes'] / 1024:>8.1f}"
        f"{round(row['held_bytes'] / 2**20) or '-':>8}{row['arena_bytes'] / 2**20:>7.0f}"
    )


LOADED = f"""\
                        at {NEEDED_TOKENS_PER_S / 1e6:.0f}M tokens/s
shape                 steps/s  cores: core  forming  messages/s  Gbit/s out  log, GB a day"""


def _loaded(row: dict[str, Any]) -> str:
    """What a broker has to do so that as many tokens are eaten as the accelerators can."""
    steps_per_s = NEEDED_TOKENS_PER_S / row["step_tokens"]
    return (
        f"{row['shape']:<22}{_round(steps_per_s):>7}{_round(steps_per_s * row['cpu_ms'] / 1000):>13}"
        f"{_round(steps_per_s * row['forming_ms'] / 1000):>9}"
        f"{steps_per_s * (row['messages_in'] + row['messages_out']):>12.0f}"
        f"{8 * steps_per_s * row['payload_bytes_out'] / 1e9:>12.1f}"
        f"{86400 * steps_per_s * row['log_bytes_sample'] * row['samples'] / 1e9:>15.0f}"
    )


def _round(value: float) -> float:
    """Three digits, two places at most."""
    rounded = round(float(f"{value:.3g}"), 2)
    return int(rounded) if rounded >= 100 else rounded


def _ms(seconds: float) -> float:
    return _round(1000 * seconds)


if __name__ == "__main__":
    main()
