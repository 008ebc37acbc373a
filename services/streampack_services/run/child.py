"""Start a broker or producer as a child process, and show or store its log lines.

The child is the command that a user would start (``broker``, ``produce``). It has a session of its own, so that a
terminal's signals reach only the command that runs beside it. Its log lines go to a file, or to standard error with the
child's name in front. The last line is remembered, because it says why the child ended. The caller ends the child.
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
    """A broker or producer as a child process, running or ended."""

    name: str
    process: subprocess.Popen[bytes]
    last_line: Callable[[], str]
    """Returns the last log line of the process, once it has ended."""

    def failure(self) -> str:
        """Return in words how the process ended, with its last log line."""
        code, line = self.process.returncode, self.last_line()
        if code < 0:
            memory = ", perhaps because memory was short" if -code == signal.SIGKILL else ""
            return f"{self.name} was killed by {signal.Signals(-code).name}{memory}; its last log line: {line}"
        return f"{self.name} exited with {code}: {line.removeprefix('streampack: ')}"


def start(
    name: str, command: str, content: dict[str, Any], *, folder: Path, log_dir: Path | None, env: Mapping[str, str]
) -> Child:
    """Start ``streampack COMMAND -c FILE``, with ``content`` written to FILE in ``folder``."""
    config = folder / f"{name.replace(' ', '-')}.yaml"
    config.write_text(json.dumps(content))  # JSON is YAML
    return start_words(name, [command, "-c", str(config)], log_dir=log_dir, env=env)


def start_words(name: str, arguments: list[str], *, log_dir: Path | None, env: Mapping[str, str]) -> Child:
    """Start ``streampack ARGUMENTS``.

    Log lines go to the end of a file in ``log_dir``, or to standard error if it is None. With ``-P`` the child does not
    import from the working folder, where a user's http.py would replace the standard library's.
    """
    word = name.replace(" ", "-")
    words = [sys.executable, "-P", "-m", "streampack", *arguments]
    into = (log_dir / f"{word}.log").open("ab") if log_dir else None
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
    """A thread that copies a child's lines to standard error, with its name in front, and keeps the last one."""

    def __init__(self, name: str, pipe: IO[bytes]) -> None:
        self._name, self._pipe, self._last = name, pipe, ""
        self._thread = threading.Thread(target=self._copy, name="streampack-log", daemon=True)
        self._thread.start()

    def last_line(self) -> str:
        """Wait up to a second for the end of the output; return its last line with text."""
        self._thread.join(1.0)
        return self._last or "(none)"

    def _copy(self) -> None:
        """The thread's body: copy every line of the pipe to standard error, and remember the last one."""
        for raw in self._pipe:
            line = raw.decode(errors="replace").rstrip()
            self._last = line or self._last
            sys.stderr.write(f"{self._name} | {line}\n")
            sys.stderr.flush()


def last_line(file: Path) -> str:
    """Return the last line with text of a log file, ``(none)`` if there is none."""
    lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "(none)"
