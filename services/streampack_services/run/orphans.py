"""Guard a process that starts others, so that no process below it outlives it, not even after a kill -9.

``guarded`` forks. The first process, the guard, only passes signals on and waits. The second process, the worker, does
the work. Each of the two processes adopts the orphans of its descendants (Linux's subreaper). The worker gets a signal
when the guard dies (PDEATHSIG). The last of the two ends all processes below it. It leaves one that compiles
kernels, which the next run needs. That one ends by itself within a minute.

This needs Linux and /proc. Call ``guarded`` before any thread is started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SI_KERNEL = 0x80
ASKED_BY_CTRL_C = signal.SIGUSR1
"""Signal to the worker for a SIGINT that another process sent to the guard; a terminal's SIGINT reaches both."""
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LAST_WORDS_S = 3.0
"""Seconds that descendants have to end after SIGTERM, before SIGKILL."""


def guarded(work: Callable[[], int], clean_up: Callable[[], None]) -> int:
    """Run ``work`` in a second process, end all processes below it, call ``clean_up``; return the exit code.

    ``work`` gets SIGTERM when it must end. It also gets SIGTERM when the guard has died; ``os.getppid`` then differs.
    """
    _adopt_orphans()
    guard = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED_ON, signal.SIGCHLD})
    worker = os.fork()
    if worker == 0:
        _adopt_orphans()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*_PASSED_ON, signal.SIGCHLD})
        if os.getppid() != guard:
            return 1
    try:
        return work() if worker == 0 else _watch(worker)
    finally:
        end_descendants()
        clean_up()


def _watch(worker: int) -> int:
    """Pass signals on to the worker (a process id) until it has ended; return its exit code."""
    while True:
        done, status = os.waitpid(worker, os.WNOHANG)
        if done:
            return exit_code(os.waitstatus_to_exitcode(status))
        heard = signal.sigwaitinfo({*_PASSED_ON, signal.SIGCHLD})
        if heard.si_signo == signal.SIGINT:
            if heard.si_code != _SI_KERNEL:
                os.kill(worker, ASKED_BY_CTRL_C)
        elif heard.si_signo != signal.SIGCHLD:
            os.kill(worker, signal.SIGTERM)


def exit_code(returned: int) -> int:
    """Return the exit code as a shell gives it: 128 + n for a process that signal n has ended."""
    return 128 - returned if returned < 0 else returned


def end_descendants() -> None:
    """End and reap every process below this one: SIGTERM, then SIGKILL after LAST_WORDS_S seconds."""
    deadline = time.monotonic() + LAST_WORDS_S
    number = signal.SIGTERM
    terminated: set[int] = set()
    while below := descendants(os.getpid()):
        if time.monotonic() > deadline:
            number = signal.SIGKILL
        for pid in below:
            if number == signal.SIGKILL or pid not in terminated:
                terminated.add(pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        if time.monotonic() > deadline + LAST_WORDS_S:
            return  # a process that survives SIGKILL hangs in the kernel
        time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    """Return the ids of the living processes below ``pid`` that must end; reap ended children of this process first."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(path.parent.name))
    below, at = list(children.get(pid, [])), 0
    while at < len(below):
        below += children.get(below[at], [])
        at += 1
    return [process for process in below if not _compiles(process)]


def _compiles(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"streampack.kernels.helper" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    """Call prctl(2) of Linux. Raises OSError."""
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
