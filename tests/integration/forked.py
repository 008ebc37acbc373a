"""``streampack``, and programs that import torch, as processes of their own, without the seconds that imports take.

Each is a fork of a server, which has the imports and runs nothing itself. It has its own arguments, environment,
folder, output, limits and end, as if it had been executed; only the command line that ``ps`` shows is the server's.

A server serves one process of tests, from its first command on, and ends with it. No thread may be in it: a fork would
inherit locks that nobody gives back. ``streampack`` has a server of its own, which has no torch.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from streampack_services.broker.memory_plan import plan

from streampack.__main__ import main
from streampack.config.daemon_settings import BrokerConfig
from streampack.config.stream_settings import StreamSettings

_NUMBER = struct.Struct("<i")


class Command:
    """``streampack ARGUMENTS`` that runs, or has ended; its output goes to two file numbers.

    Of ``subprocess.Popen``, what tests use. Another ``program`` is a module with the functions ``prepare(arguments)``,
    which the server calls before the fork, and ``main()``. ``environment`` is added to that of this process.
    """

    def __init__(
        self, arguments: Sequence[str], stdout: int, stderr: int, program: str = "streampack",
        environment: Mapping[str, str] | None = None, folder: Path | None = None,
    ) -> None:  # fmt: skip
        self.args = list(arguments)
        self.returncode: int | None = None
        self._says, says = os.pipe()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = {
            "program": program, "arguments": self.args, "environment": os.environ | (environment or {}),
            "folder": str(folder or Path.cwd()), "files": limits,
        }  # fmt: skip
        try:
            socket.send_fds(_server(program == "streampack"), [json.dumps(wanted).encode()], [stdout, stderr, says])
        finally:
            os.close(says)
        self.pid = self._heard()

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._says], [], [], 0)[0]:
            self.returncode = self._heard()
            os.close(self._says)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._says], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.poll()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _heard(self) -> int:
        """First the process's id, then its exit code."""
        (number,) = _NUMBER.unpack(os.read(self._says, _NUMBER.size))
        return int(number)


@functools.cache
def _server(lean: bool) -> socket.socket:
    """Where commands are asked for; a ``lean`` server runs only ``streampack``."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    words = [sys.executable, "-m", "tests.integration.forked", str(theirs.fileno())]
    root = Path(__file__).parents[2]
    process = subprocess.Popen(words, cwd=root, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


# The server


def serve(requests: socket.socket) -> Callable[[], int | None] | None:
    """Until nobody can ask any more. Returns in each fork, too, with the function of the program that it is to be."""
    running: dict[int, tuple[int, int]] = {}
    """Of each command's pidfd: its id, and where its end is said."""
    while True:
        for ready in select.select([requests.fileno(), *running], [], [])[0]:
            if ready in running:
                os.close(ready)
                _say_its_end(*running.pop(ready))
                continue
            data, files, _, _ = socket.recv_fds(requests, 1 << 20, 3)
            if not data:
                return None
            wanted = json.loads(data)
            prepare, run = _program(wanted["program"])
            prepare(wanted["arguments"])
            pid = os.fork()
            if pid == 0:
                requests.detach()
                _become(wanted, *files[:2])
                return run
            os.write(files[2], _NUMBER.pack(pid))
            os.close(files[0])
            os.close(files[1])
            running[os.pidfd_open(pid)] = pid, files[2]


def _program(name: str) -> tuple[Callable[[list[str]], object], Callable[[], int | None]]:
    """Return the program's functions before the fork and in it."""
    if name == "streampack":
        return lambda _: _import_all(), main
    module = import_module(name)
    return module.prepare, module.main


def _say_its_end(pid: int, says: int) -> None:
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):  # nobody waits
        os.write(says, _NUMBER.pack(os.waitstatus_to_exitcode(status)))
    os.close(says)


def _become(wanted: dict[str, Any], stdout: int, stderr: int) -> None:
    """Make this process as if it had been executed so."""
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.closerange(3, 1 << 16)
    os.environ.clear()
    os.environ.update(wanted["environment"])
    os.chdir(wanted["folder"])
    resource.setrlimit(resource.RLIMIT_NOFILE, wanted["files"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    given = wanted["environment"].get("PYTHONPATH", "")
    sys.path[:1] = [wanted["folder"], *filter(None, given.split(os.pathsep))]
    sys.argv = [wanted["program"], *wanted["arguments"]]


@functools.cache
def _import_all() -> None:
    """What commands import, and the kernels of a broker."""
    for name in ("cli.main", "daemons.producer"):
        import_module(f"streampack_services.{name}")
    service = import_module("streampack_services.daemons.broker").BrokerService
    config = BrokerConfig(streams={"any": StreamSettings()}, memory="64MiB")
    service.warm_up(SimpleNamespace(plan=plan(config)))  # of a service, which would have sockets, all that is needed
    gc.freeze()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all
    run = serve(socket.socket(fileno=int(sys.argv[1])))
    if run is not None:
        sys.exit(run())
