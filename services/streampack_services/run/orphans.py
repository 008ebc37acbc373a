"""No orphans: a guard around a process that starts others, so that none of them outlives it, not even a kill -9.

The process forks. The first one, the guard, only passes signals on and waits; the second does the work. Each adopts
what its descendants leave behind (Linux's subreaper), the work hears of the guard's death (PDEATHSIG), and whichever
of the two is left ends everything below it. Relies on Linux and /proc; to be called before any thread is started.
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
"""What the work is sent for a SIGINT that somebody has sent to the guard: a terminal's own goes to the whole group."""
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LAST_WORDS_S = 3.0


def guarded(work: Callable[[], int], clean_up: Callable[[], None]) -> int:
    """The exit code of ``work``, which a second process does; ``clean_up`` is called when all is over, whoever is left.

    ``work`` is asked to end by SIGTERM, also when the guard is gone: ``os.getppid`` has then changed.
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
    """As a shell tells it: 128 + n for a process that signal n has ended."""
    return 128 - returned if returned < 0 else returned


def end_descendants() -> None:
    """SIGTERM to every process below this one, SIGKILL to those that are there a little later; all are reaped."""
    deadline = time.monotonic() + LAST_WORDS_S
    number = signal.SIGTERM
    told: set[int] = set()
    while below := descendants(os.getpid()):
        if time.monotonic() > deadline:
            number = signal.SIGKILL
        for pid in below:
            if number == signal.SIGKILL or pid not in told:
                told.add(pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        if time.monotonic() > deadline + LAST_WORDS_S:
            return  # one that not even SIGKILL ends hangs in the kernel
        time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    """Every living process below ``pid``; ended ones that are this process's to reap are reaped."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(path.parent.name))
    found, at = list(children.get(pid, [])), 0
    while at < len(found):
        found += children.get(found[at], [])
        at += 1
    return found


def _adopt_orphans() -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
