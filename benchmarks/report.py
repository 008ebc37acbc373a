"""Options and output that all benchmarks share: ``--quick``, ``--json``, and the head of a report.

A figure without its command, machine and date says nothing a month later; no host name is among them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import zmq

HERE = Path(__file__).resolve().parent


def arguments(doc: str | None, quick: str) -> argparse.ArgumentParser:
    """A parser that shows a module's ``doc``; ``quick``: what ``--quick`` leaves of the whole."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="How results are recorded: benchmarks/RESULTS.md.",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line of stdout")
    return parser


def script_of(benchmark: str) -> Path:
    """The file of a benchmark in the folder of its question."""
    return next(HERE.glob(f"*/{benchmark}.py"), HERE / f"{benchmark}.py")


def head(benchmark: str, **settings: Any) -> dict[str, Any]:
    """What is to be known of a run before its figures; ``settings`` are the benchmark's own."""
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", script_of(benchmark).relative_to(HERE.parent).as_posix(), *sys.argv[1:]]),
        **settings,
        "machine": machine_facts(),
        "load_before": round(os.getloadavg()[0], 2),  # of the last minute: runs just before this one count, too
    }


def say(report: dict[str, Any], as_json: bool) -> None:
    """The last line of stdout, where it was asked for."""
    if as_json:
        print(json.dumps(report))


def machine_facts() -> dict[str, object]:
    """What a figure depends on."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "pyzmq": zmq.pyzmq_version(),
        "libzmq": zmq.zmq_version(),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
