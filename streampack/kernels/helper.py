"""The process that compiles kernels, so that the process that needs them goes on.

It reads a kernel and its types from each line of its input. It compiles the kernel into numba's folder on disk. It
answers with a line, empty or an error, to the descriptor that its only argument names. It ends with its input.

The ranks of a host may each have such a process. One of them compiles at a time, and the others find its result on
disk.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

NICE = 5
"""Added to the process's niceness, since trainers and brokers come first."""


def main() -> None:
    """Compile what the input asks for."""
    os.nice(NICE)
    with open(int(sys.argv[1]), "w", buffering=1) as answers:
        _answer(answers)
    os._exit(0)


def _answer(answers: TextIO) -> None:
    for line in sys.stdin:
        module, name, text = json.loads(line)
        try:
            kernel, key = getattr(importlib.import_module(module), name), ast.literal_eval(text)
            with alone():
                if not kernel.is_cached(key):
                    kernel.compile(key)
            answer = ""
        except Exception as error:
            answer = repr(error).replace("\n", " ")[:500]
        with contextlib.suppress(OSError):  # the process that asked has ended, and another will need the kernel
            answers.write(f"{answer}\n")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold the lock of the user's processes that compile; do without it if there is no place for it.

    Two processes that write numba's index of a kernel at the same time would damage it.
    """
    path = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"streampack-{os.getuid()}-kernels.lock"
    with contextlib.ExitStack() as resources:
        with contextlib.suppress(OSError):
            lock = resources.enter_context(open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
