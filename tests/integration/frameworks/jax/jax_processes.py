"""Runs of ``examples/jax_train.py``: forks of one process that has imported jax and orbax.

Its argument is JSON, a list of [folder, steps, dies_at, processes, devices, output]: the step behind whose line all
processes are killed (null: the run goes to its end), and the number of CPU devices of each process. Prints as JSON how
the first process of each run ended.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
from pathlib import Path

import jax
import orbax.checkpoint  # noqa: F401  # forks have it

from streampack.integrations import jax as adapter  # noqa: F401
from tests.integration import forks

EXAMPLE = Path(__file__).parents[4] / "examples" / "jax_train.py"
Job = tuple[str, int, int | None, int, int, str]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def ended(job: Job) -> int:
    """How the run's first process ended: with its exit code, or minus its signal; the others are killed with it."""
    folder, steps, dies_at, processes, devices, output = job
    told = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "WORLD_SIZE": str(processes)}

    def as_process(number: int) -> None:
        jax.config.update("jax_num_cpu_devices", devices)
        jax.config.update("jax_enable_x64", True)  # sums of other orders agree to the last digits
        os.environ.update(told | {"RANK": str(number)} if processes > 1 else {})
        forks.run(str(EXAMPLE), [folder, str(steps)], None if number else dies_at, output)

    pids = [forks.forked(lambda number=number: as_process(number)) for number in range(processes)]  # type: ignore[misc]
    code = os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1])
    for pid in pids[1:]:
        if code:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return code


if __name__ == "__main__":
    gc.freeze()
    print(json.dumps([ended(job) for job in json.loads(sys.argv[1])]))
