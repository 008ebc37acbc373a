"""Measure tokens per second end to end on this machine: streampack, the bare pipe, and other projects' loaders.

``pipes``: streampack against the bare pipe (bare_pipe.py), which moves the same bytes by the same sockets and promises
nothing; streampack's figure means something only next to it. Rounds alternate which goes first, so that a machine that
warms up or is shared favors neither. The bare pipe itself is held against plain sockets (socket_floor.py).
``loaders``: other projects' (loaders.py), and streampack with torch tensors as they give them.
``latency``: how long a trainer that works 20 ms on each pack waits for the next, on a rank that reads 8 packs a step.
``start``: from the start of `streampack broker` to a trainer's first pack (first_pack.py).
``sweep``: steps of 8 to 1,024 packs; only where it is asked for.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.report import arguments, head, say
from benchmarks.throughput.bare_pipe import run_bare_pipe
from benchmarks.throughput.first_pack import first_pack
from benchmarks.throughput.loaders import NUM_SAMPLES, measure
from benchmarks.throughput.socket_floor import socket_bytes_per_second
from benchmarks.throughput.streampack_pipe import Service, run_streampack
from benchmarks.traffic import LENGTHS, PipeResult, Traffic

Runner = Callable[[float], PipeResult]

PARTS = ("pipes", "loaders", "latency", "start")
SWEEP = (8, 32, 64, 256, 1024)
WORK_S = 0.02
PACKS_OF_A_RANK = 8  # of a step of 256 packs on 32 data-parallel ranks
BARE_TO_SOCKET = 0.25
"""The least that the bare pipe may move of what one plain socket does, in its best round; `make bench` fails below."""


def main() -> None:
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the processes of a run end, too
    service = Service(packs=args.packs, memory=args.memory, format=args.format, keys=args.keys)
    traffic = Traffic(args.transport or "ipc", args.tokens, args.lengths)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # what a start compiles is there at the next, as at a user's
    report = head("throughput", traffic=asdict(traffic), service=asdict(service), seconds=args.seconds)
    for part in args.only or PARTS:
        report[part] = {"pipes": _pipes, "loaders": _loaders, "latency": _latency, "start": _start, "sweep": _sweep}[
            part
        ](args, traffic, service)
    if "loaders" in report and report["loaders"]["multiprocess"]:
        ratio = report["loaders"]["streampack"] / max(report["loaders"]["multiprocess"].values())
        report["streampack_to_fastest_peer"] = round(ratio, 2)
        print(f"streampack moves {ratio:.1f} times what the fastest loader of several processes does")
    say(report, args.json)


def _pipes(args: argparse.Namespace, traffic: Traffic, service: Service) -> dict[str, Any]:
    """By transport, both pipes in turns."""
    found: dict[str, Any] = {}
    both: tuple[Literal["ipc", "tcp"], ...] = ("ipc", "tcp")
    for transport in [args.transport] if args.transport else both:
        here = replace(traffic, transport=transport)
        runners: dict[str, Runner] = {
            "bare_pipe": partial(run_bare_pipe, traffic=here),
            "streampack": partial(run_streampack, traffic=here, service=service),
        }
        rounds = args.rounds if transport == (args.transport or "ipc") else max(1, args.rounds // 2)
        sockets, results = compare(runners, rounds, args.seconds, transport)
        bare = _median(results["bare_pipe"])
        shares = [
            run.tokens_per_second * here.token_bytes / socket
            for run, socket in zip(results["bare_pipe"], sockets, strict=True)
        ]
        found[transport] = {name: summary(runs) for name, runs in results.items()} | {
            "streampack_to_bare": round(_median(results["streampack"]) / bare, 3),
            "bare_to_socket": round(max(shares), 3),
        }
        print(
            f"{transport}: streampack moves {found[transport]['streampack_to_bare']} of what the bare pipe moves, "
            f"which is {found[transport]['bare_to_socket']} of the bytes of a plain socket at best"
        )
        if found[transport]["bare_to_socket"] < BARE_TO_SOCKET:
            print(
                f"that is too slow to compare with, expected {BARE_TO_SOCKET} at least: others compute, or it is slow"
            )
    return found


def compare(
    pipes: dict[str, Runner], rounds: int, seconds: float, transport: str
) -> tuple[list[float], dict[str, list[PipeResult]]]:
    """Run every pipe once a round, the order turned round each time: plain sockets' bytes a second, and all results."""
    results: dict[str, list[PipeResult]] = {name: [] for name in pipes}
    sockets = []
    for i in range(rounds):
        sockets.append(socket_bytes_per_second(transport))
        for name in list(pipes)[:: -1 if i % 2 else 1]:
            results[name].append(pipes[name](seconds))
            _show(f"{name} {transport}", results[name][-1])
    return sockets, results


def _loaders(args: argparse.Namespace, traffic: Traffic, service: Service) -> dict[str, Any]:
    """Peers, and streampack as they are: torch tensors, the same lengths."""
    ours = run_streampack(args.seconds, Traffic("ipc", traffic.tokens), replace(service, format="thd"))
    _show("streampack, torch tensors", ours)
    found, missing = measure(*((1.0, NUM_SAMPLES // 2) if args.quick else (30.0, NUM_SAMPLES)))
    print(*missing, sep="\n", end="\n" * bool(missing))
    several = {name: each["tokens_per_second"] for name, each in found.items() if "workers" in name}
    return {
        "streampack": round(ours.tokens_per_second), "run": asdict(ours), "peers": found, "multiprocess": several,
        "missing": missing,
    }  # fmt: skip


def _latency(args: argparse.Namespace, traffic: Traffic, service: Service) -> dict[str, Any]:
    result = run_streampack(
        4.0 if args.quick else 60.0, traffic, replace(service, packs=PACKS_OF_A_RANK, work_s=WORK_S)
    )
    print(f"next(), {WORK_S * 1000:.0f} ms of work a pack: {_waits(result)}", flush=True)
    return {"work_s": WORK_S, "packs_a_step": PACKS_OF_A_RANK, "next_ms": result.next_ms}


def _start(args: argparse.Namespace, traffic: Traffic, service: Service) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for how in ("waiting", "together"):
        times = [first_pack(how, traffic, service) for _ in range(1 if args.quick else 5)]
        found[how] = {name: statistics.median(each[name] for each in times) for name in times[0]}
        print(f"first pack, the others {how}: {found[how]['first_pack']:.2f} s after the broker's start", flush=True)
    return found


def _sweep(args: argparse.Namespace, traffic: Traffic, service: Service) -> dict[str, Any]:
    found: dict[int, list[PipeResult]] = {packs: [] for packs in SWEEP}
    memory = service.memory if service.memory != Service.memory else "1GiB"  # 1,024 packs are 32 MiB, three of them
    for i in range(args.rounds):
        for packs in SWEEP[:: -1 if i % 2 else 1]:
            found[packs].append(run_streampack(args.seconds, traffic, replace(service, packs=packs, memory=memory)))
            _show(f"steps of {packs} packs", found[packs][-1])
    return {str(packs): summary(runs) for packs, runs in found.items()}


def summary(runs: list[PipeResult]) -> dict[str, object]:
    """Of several runs of one pipe: medians; CPU by process in ms a million tokens; peaks in MiB."""
    speeds = [run.tokens_per_second for run in runs]
    names = runs[0].cpu_seconds
    return {
        "tokens_per_second": {"median": round(_median(runs)), "min": round(min(speeds)), "max": round(max(speeds))},
        "cpu_ms_per_million_tokens": {
            name: round(statistics.median(run.cpu_seconds[name] / run.tokens * 1e9 for run in runs), 2)
            for name in names
        },
        "peak_mib": {name: round(max(run.peak_bytes[name] for run in runs) / 2**20) for name in names},
        "runs": [asdict(run) for run in runs],
    }


def _show(what: str, run: PipeResult) -> None:
    cpu = ", ".join(f"{name} {used / run.tokens * 1e9:.2f}" for name, used in run.cpu_seconds.items())
    peaks = ", ".join(f"{name} {peak >> 20}" for name, peak in run.peak_bytes.items())
    print(f"{what:<26} {run.tokens_per_second / 1e6:7.1f}M tokens/s; CPU ms/M tokens: {cpu}; peak MiB: {peaks}")
    if run.next_ms:
        print(f"{'':<26} next(): {_waits(run)}", flush=True)


def _waits(run: PipeResult) -> str:
    return ", ".join(f"{name} {wait:.3f} ms" for name, wait in run.next_ms.items())


def _median(runs: list[PipeResult]) -> float:
    return statistics.median(run.tokens_per_second for run in runs)


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__, "2 rounds of 1.5 s, under a minute in all on a quiet machine (else 5 of 10 s)")
    parser.add_argument("--only", action="append", choices=(*PARTS, "sweep"), help="one part; may be repeated")
    parser.add_argument("--transport", choices=("ipc", "tcp"), help="default: both")
    parser.add_argument("--tokens", choices=("int32", "uint16"), default="int32", help="default: %(default)s")
    parser.add_argument("--lengths", choices=LENGTHS, default="lognormal", help="default: %(default)s, mean 500")
    parser.add_argument("--packs", type=int, default=Service.packs, help="of a step; default: %(default)s")
    parser.add_argument("--memory", default=Service.memory, help="the broker's; default: %(default)s")
    parser.add_argument("--format", default=Service.format, help="of the client's packs; default: %(default)s")
    parser.add_argument("--keys", action="store_true", help="streampack's processes show keys: all is encrypted")
    parser.add_argument("--rounds", type=int, metavar="N", help="of each pipe")
    parser.add_argument("--seconds", type=_positive, metavar="S", help="time each run for S seconds instead")
    args = parser.parse_args()
    args.seconds = args.seconds or (1.5 if args.quick else 10.0)
    args.rounds = args.rounds or (2 if args.quick else 5)
    return args


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


if __name__ == "__main__":
    main()
