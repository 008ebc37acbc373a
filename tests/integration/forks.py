"""``python forks.py SCRIPT JOBS``: an example several times, one after another, each in a process of its own.

JOBS is JSON, a list of [arguments, dies_at, output]: the script's arguments, the step behind whose line it is killed
(null: it runs to its end), and the file its output goes to. Prints as JSON how each has ended. The processes are forks
of this one, which has imported what the script imports and done nothing with it: that takes longer than all steps.
"""

from __future__ import annotations

import ast
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

from tests.integration.dying import die_at


def import_what_it_does(script: str) -> None:
    """The modules that the script's top level imports."""
    tree = ast.parse(Path(script).read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(tree, script, "exec"), {})


def run(script: str, arguments: list[str], dies_at: int | None, output: str) -> None:
    """The script in this process, to its end."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if dies_at is not None:
        die_at(dies_at)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def ended(script: str, job: tuple[list[str], int | None, str]) -> int:
    """How a process that does the job ends: its exit code, or minus the signal."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        run(script, *job)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    import_what_it_does(sys.argv[1])
    print(json.dumps([ended(sys.argv[1], job) for job in json.loads(sys.argv[2])]))
