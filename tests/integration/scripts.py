"""``python SCRIPT ARGUMENTS``, as a program of ``tests.integration.forked``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tests.integration.forks import import_what_it_does


def prepare(arguments: list[str]) -> None:
    import_what_it_does(arguments[0])


def main() -> None:
    """Run the script; an error of it ends the process with a traceback, as python does."""
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
