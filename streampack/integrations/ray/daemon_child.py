"""A command of streampack as a child process that ends with the process that started it.

The child asks Linux for a SIGKILL when its parent ends (``PR_SET_PDEATHSIG``), before it becomes the command. Linux
means the parent's *thread*. So a thread of its own starts the child and waits for its end. An actor that is killed
therefore leaves no broker behind that would keep the log locked.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger("streampack.ray")

AGAIN_S, MOST_AGAIN_S = 0.5, 15.0
"""Seconds before a child is started again: first, and at most. Each delay is twice the last."""
LASTING_S = 60.0
"""A child that ran for so many seconds is started again after the first delay."""
STOP_S = 40.0
"""Seconds that a child has to end after SIGTERM, before SIGKILL; longer than a broker's default drain."""
_KEPT_LINES = 20
_GUARD = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.executable, [sys.executable, "-P", "-m", "streampack", *sys.argv[2:]])
"""


class SupervisedChild:
    """A command that runs until it succeeds or is stopped; it is started again if it fails.

    Args:
        words: Returns the command's arguments, each time before it is started.
        folder: Working folder of the command.
        over: Text of the command's last log lines if it has done all its work; any other end is followed by a start.
    """

    def __init__(self, words: Callable[[], list[str]], folder: Path, over: str) -> None:
        self._words, self._folder, self._over = words, folder, over
        self.failures = 0
        """Number of times that the command has failed."""
        self.last_failure = ""
        """The way in which the command ended last, with its last log line."""
        self.is_done = False
        """True once the command has succeeded, or was stopped."""
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._stopping = threading.Event()
        self._restarting = False
        self._thread = threading.Thread(target=self._run, name="streampack-child", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Process id of the command; None while it does not run."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def restart(self) -> None:
        """End the command, so that it is started again with other arguments."""
        self._restarting = True
        if (process := self._process) is not None and process.poll() is None:
            process.terminate()

    def stop(self) -> None:
        """End the command: SIGTERM, then SIGKILL after ``STOP_S`` seconds. Return once it has ended."""
        self._stopping.set()
        self.restart()
        self._thread.join(STOP_S)
        if (process := self._process) is not None and process.poll() is None:
            process.kill()
            self._thread.join(STOP_S)

    def _run(self) -> None:
        """Body of the thread: start the command, wait for its end, and start it again if it failed."""
        delay_s = AGAIN_S
        while not self._stopping.is_set():
            began, self._restarting = time.monotonic(), False
            try:
                code = self._run_once()
            except Exception as error:  # such as no memory for a process, or no answer about the command's addresses
                code, self._lines = 1, deque([repr(error)], maxlen=_KEPT_LINES)
            if self._stopping.is_set() or (code == 0 and self._over in "".join(self._lines)):
                break
            if self._restarting or code == 0:  # such as a producer whose broker has stopped: another will come
                self._stopping.wait(delay_s)
                continue
            lasted_s = time.monotonic() - began
            delay_s = AGAIN_S if lasted_s > LASTING_S else delay_s
            self.failures += 1
            self.last_failure = _failure(code, self._lines)
            log.warning("%s; starting it again in %.1f s", self.last_failure, delay_s)
            self._stopping.wait(delay_s)
            delay_s = min(2 * delay_s, MOST_AGAIN_S)
        self.is_done = True

    def _run_once(self) -> int:
        """Start the command, copy its log to standard error, and return its exit code."""
        words = [sys.executable, "-P", "-c", _GUARD, str(os.getpid()), *self._words()]
        folder = self._folder if self._folder.is_dir() else None
        self._lines.clear()
        process = subprocess.Popen(
            words, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self._process = process
        assert process.stdout is not None
        for raw in process.stdout:
            line = raw.decode(errors="replace").rstrip()
            self._lines.append(line)
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
        return process.wait()


def _failure(code: int, lines: deque[str]) -> str:
    """Return in words how a command has ended."""
    last = next((line for line in reversed(lines) if line.strip()), "(no log line)").removeprefix("streampack: ")
    if code < 0:
        return f"it was killed by {signal.Signals(-code).name}; its last log line: {last}"
    return f"it exited with {code}: {last}"


def write_config(tree: dict[str, Any], path: Path) -> Path:
    """Write the settings of a command to a file, and return the file's path."""
    path.write_text(json.dumps(tree))  # JSON is YAML
    return path
