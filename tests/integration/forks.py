"""Examples, one after another, each in processes of its own: a program of ``tests.integration.forked``.

Its argument is JSON, a list of [script, arguments, dies_at, ranks, output]: the step behind whose line it is killed
(null: it runs to its end), the number of its ranks under what torchrun tells them (null: it is told nothing), and the
file that their output goes to. Prints as JSON how each has ended.
"""

from __future__ import annotations

import ast
import functools
import gc
import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


@functools.cache
def import_what_it_does(script: str, alone: bool = False) -> None:
    """The modules that the script's top level imports, and what torch's optimizers import when they are made.

    The imports stop at the first module beside the scripts of examples, which may change what later imports do, unless
    this process runs the script ``alone``.
    """
    examples = Path(__file__).parents[2] / "examples"
    beside = set() if alone else {path.stem for path in examples.glob("*.py")}
    for node in ast.parse(Path(script).read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
            if beside & {name.partition(".")[0] for name in names}:
                break
            exec(compile(ast.Module([node], []), script, "exec"), {})
    import_module("torch._dynamo")
    gc.freeze()


def die_at(step: int) -> None:
    """Have this process killed behind the line of ``step``: by its own hand, since a killer outside might come late."""
    write = sys.stdout.write

    def written(text: str) -> int:
        count = write(text)
        if text.startswith("{") and json.loads(text)["step"] == step:
            write("\n")  # ends the line, before the other ranks report their errors in the same file
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return count

    sys.stdout.write = written  # type: ignore[method-assign]


def run(script: str, arguments: list[str], dies_at: int | None, output: str) -> None:
    """The script in this process, to its end."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if dies_at is not None:
        die_at(dies_at)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def forked(function: Callable[[], None]) -> int:
    """The process that calls it, and ends with 0 or 1."""
    if child := os.fork():
        return child
    code = 1
    try:
        function()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def ended(script: str, arguments: list[str], dies_at: int | None, ranks: int | None, output: str) -> int:
    """How the first process of the job ended that failed: with its exit code, or minus its signal. The others are
    killed then, as torchrun does. 0 where none failed.

    No rank begins before all are forked: the thread of the store looks up names for each rank that connects, and a fork
    at that moment would inherit the lock of the resolver, and wait for it forever.
    """
    said, _store = told(ranks) if ranks else ({}, None)
    begin, all_forked = os.pipe()

    def as_rank(rank: int) -> None:
        os.close(all_forked)
        os.read(begin, 1)
        os.close(begin)
        os.environ.update(said | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {}))
        run(script, arguments, dies_at, output)

    left = {forked(lambda rank=rank: as_rank(rank)) for rank in range(ranks or 1)}  # type: ignore[misc]
    os.close(all_forked)
    os.close(begin)
    failed = 0
    while left:
        child, status = os.wait()
        left.discard(child)
        code = os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed = code
            for other in left:
                os.kill(other, signal.SIGKILL)
    return failed


def told(ranks: int) -> tuple[dict[str, str], Any]:
    """What torchrun tells all ranks, and their store, at a port that is free."""
    store = import_module("torch.distributed").TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    size = str(ranks)
    return {
        "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }, store  # fmt: skip


def prepare(arguments: list[str]) -> None:
    for script, *_ in json.loads(arguments[0]):
        import_what_it_does(script)


def main() -> None:
    jobs = json.loads(sys.argv[1])
    if len({script for script, *_ in jobs}) == 1:
        import_what_it_does(jobs[0][0], alone=True)
    print(json.dumps([ended(*job) for job in jobs]))
