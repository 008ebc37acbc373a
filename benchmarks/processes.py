"""Starts, measures and ends the processes of one benchmark run, and receives their reports.

Functions run in fresh interpreters and report on a pipe of their own; commands are what a user types. Leaving the
block kills all of them, by pid; should the benchmark itself be killed, they end by themselves.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

START_TIMEOUT_S = 300.0  # the first start on a machine compiles
_PR_SET_PDEATHSIG = 1


class Processes:
    """The children of one run, by name."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._running: dict[str, BaseProcess | subprocess.Popen[bytes]] = {}
        self._said: dict[str, Path] = {}
        self._ends: dict[str, int] = {}  # file descriptors, readable once the process has ended

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, RuntimeError):
            for name, said in self._said.items():
                print(f"{name} said:", said.read_text(), sep="\n", file=sys.stderr)
        for process in self._running.values():
            _kill(process)
        for process in self._running.values():
            process.join() if isinstance(process, BaseProcess) else process.wait()
        for end in self._ends.values():
            os.close(end)

    def start(self, name: str, target: Callable[..., None], *args: object) -> Connection:
        """Run `target(report, *args)` in a fresh process; the other end of its pipe is returned."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_child, args=(target, theirs, *args), name=name)
        process.start()
        theirs.close()
        self._add(name, process)
        return ours

    def command(self, name: str, arguments: Sequence[str], said: Path) -> None:
        """Run a command; what it says goes to the file `said`."""
        libc = ctypes.CDLL(None)
        with said.open("w") as out:
            process = subprocess.Popen(
                arguments, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
            )  # fmt: skip
        self._said[name] = said
        self._add(name, process)

    def _add(self, name: str, process: Any) -> None:
        self._running[name] = process
        self._ends[name] = os.pidfd_open(process.pid)

    def receive(self, reports: Connection, timeout_s: float) -> Any:
        """The next report; RuntimeError when a child ends, or the time is up, before it."""
        names = {end: name for name, end in self._ends.items()}
        ready = wait([reports, *names], timeout_s)
        if not ready:
            raise RuntimeError(f"the pipe stalled: no report within {timeout_s:.0f} s")
        dead = [name for end, name in names.items() if end in ready]
        if dead:
            raise RuntimeError(f"{' and '.join(dead)} ended early; the traceback, if it had one, is above")
        try:
            return reports.recv()
        except EOFError:
            raise RuntimeError("a process closed its reports and gave none: it is ending") from None

    def check_alive(self) -> None:
        """Raise RuntimeError if a child has ended."""
        if ended := wait(list(self._ends.values()), 0):
            names = [name for name, end in self._ends.items() if end in ended]
            raise RuntimeError(f"{' and '.join(names)} ended early")

    def cpu_seconds(self) -> dict[str, float]:
        """User and system, of each process so far."""
        times = {name: psutil.Process(process.pid).cpu_times() for name, process in self._running.items()}
        return {name: t.user + t.system for name, t in times.items()}

    def peak_bytes(self) -> dict[str, int]:
        """The most memory that each process has had resident so far (VmHWM)."""
        return {name: _peak(process.pid) for name, process in self._running.items()}


def _kill(process: BaseProcess | subprocess.Popen[bytes]) -> None:
    """With what it has started: a loader's workers."""
    try:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
    except psutil.NoSuchProcess:
        pass
    process.kill()


def _peak(pid: int | None) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def _child(target: Callable[..., None], report: Connection, *args: object) -> None:
    """Run `target`; leave Ctrl-C to the parent, and end when the parent does, however that was."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    target(report, *args)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
    os._exit(1)
