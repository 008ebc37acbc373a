"""A daemon as a child process: started with a configuration of its own, its lines shown or kept, its end explained.

The daemon is the command that a user would start (``broker``, ``produce``), in a session of its own: what a terminal
sends is for the command that runs beside it. Its lines go to a file, or to standard error, its name before each. The
last one is remembered, since that is where a daemon says why it ended. Who ends it, and when, is for others.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any


@dataclass(slots=True)
class Child:
    """A daemon that runs, or has ended."""

    name: str
    process: subprocess.Popen[bytes]
    last_line: Callable[[], str]
    """Once the process has ended."""

    def failure(self) -> str:
        """How it ended, in words."""
        code, line = self.process.returncode, self.last_line()
        if code < 0:
            memory = ", perhaps for its memory" if -code == signal.SIGKILL else ""
            return f"{self.name} was killed by {signal.Signals(-code).name}{memory}; the last that it said: {line}"
        return f"{self.name} ended with {code}: {line.removeprefix('streampack: ')}"


def start(
    name: str, command: str, tree: dict[str, Any], *, folder: Path, log_dir: Path | None, env: Mapping[str, str]
) -> Child:
    """``streampack COMMAND -c FILE`` with ``tree`` as its file, in ``folder``; its lines go to ``log_dir`` if there is
    one. The working folder is not before the standard library (``-P``): a user's http.py there would break the daemon.
    """
    word = name.replace(" ", "-")
    config = folder / f"{word}.yaml"
    config.write_text(json.dumps(tree))  # JSON is YAML
    words = [sys.executable, "-P", "-m", "streampack", command, "-c", str(config)]
    into = (log_dir / f"{word}.log").open("wb") if log_dir else None
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=into or subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, env=env,
    )  # fmt: skip
    if into is not None:
        into.close()
        last = Path(into.name)
        return Child(name, process, lambda: last_line(last))
    assert process.stdout is not None
    return Child(name, process, _Pump(name, process.stdout).last_line)


class _Pump:
    """Copies a daemon's lines to standard error, each with its name before it."""

    def __init__(self, name: str, pipe: IO[bytes]) -> None:
        self._name, self._pipe, self._last = name, pipe, ""
        self._thread = threading.Thread(target=self._copy, name="streampack-log", daemon=True)
        self._thread.start()

    def last_line(self) -> str:
        self._thread.join(1.0)
        return self._last or "it said nothing"

    def _copy(self) -> None:
        for raw in self._pipe:
            line = raw.decode(errors="replace").rstrip()
            self._last = line or self._last
            sys.stderr.write(f"{self._name} | {line}\n")
            sys.stderr.flush()


def last_line(file: Path) -> str:
    """The last line of a log that says something."""
    lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
