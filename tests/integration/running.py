"""Real processes for the integration tests: started on loopback, ended by their ids, outputs in files."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from streampack_services.cli import main

from streampack.producer.chunk import BatchSource
from streampack.producer.loop import ProducerLoop
from streampack.sources import Source
from tests.integration.forked import Command

STREAMPACK = (sys.executable, "-m", "streampack")
PATIENCE_S = 200.0
"""How long something is waited for that comes by an event: no test may fail because a machine is slow."""
_LOG_LINE = re.compile(r"^\d\d:\d\d:\d\d (DEBUG|INFO|WARNING|ERROR) ")


def _executed(arguments: Sequence[str], stdout: int, stderr: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*STREAMPACK, *arguments], stdout=stdout, stderr=stderr)


_start: Callable[[Sequence[str], int, int], Command | subprocess.Popen[bytes]] = Command


@contextmanager
def executed() -> Iterator[None]:
    """Commands that are started in the block are so as a shell does: a fork begins with memory of its parent's, which
    counts where a test looks at how much a process has.
    """
    global _start
    before, _start = _start, _executed
    try:
        yield
    finally:
        _start = before


def streampack(*arguments: str | Path, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return _ended(lambda out, err: _start([*map(str, arguments)], out, err), timeout_s)


def forked(
    program: str, *arguments: str | Path, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run another program of ``tests.integration.forked`` to its end."""
    words = [*map(str, arguments)]
    return _ended(lambda out, err: Command(words, out, err, program, environment, folder), PATIENCE_S)


def _ended(
    start: Callable[[int, int], Command | subprocess.Popen[bytes]], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = start(out.fileno(), err.fileno())
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        said = (Path(f"/proc/self/fd/{each.fileno()}").read_text() for each in (out, err))
        return subprocess.CompletedProcess(process.args, code, *said)


def in_process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The same within this process, for a command that starts nothing: no second spent on a new one."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["streampack", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main.main()
    finally:
        sys.argv = before
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def the_error(result: subprocess.CompletedProcess[str], exit_code: int) -> str:
    """The one line that a command has failed with, beside what it logged; no traceback."""
    assert result.returncode == exit_code, result.stderr
    said = [line for line in result.stderr.splitlines() if not _LOG_LINE.match(line)]
    assert len(said) == 1, result.stderr
    assert said[0].startswith("streampack: ")
    return said[0]


class Stopwatch:
    """Seconds that something took, without those in which a process was ready to run and waited for a processor.

    The process is this one, or the one with ``pid``; the main thread stands for it. On a machine that has a free
    processor, these are the seconds of the clock.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._waited_s = self._waits(os.getpid())

    def seconds(self, pid: int | None = None) -> float:
        """Seconds since the start, by the waits of this process since then, or of another that began meanwhile."""
        waited_s = self._waits(os.getpid()) - self._waited_s if pid is None else self._waits(pid)
        return time.monotonic() - self._began - waited_s

    @staticmethod
    def _waits(pid: int) -> float:
        """Seconds that a process has waited for a processor, as Linux counts them; 0 without its counts."""
        with contextlib.suppress(FileNotFoundError):
            _, waited_ns, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
            return int(waited_ns) / 1e9
        return 0.0


class Daemon:
    """A command that runs on; standard output and error go to ``<folder>/<name>.log``."""

    def __init__(self, folder: Path, name: str, *arguments: str | Path) -> None:
        self.log = folder / f"{name}.log"
        with self.log.open("w") as out:
            self.process = _start([*map(str, arguments)], out.fileno(), out.fileno())

    @property
    def said(self) -> str:
        return self.log.read_text()

    def wait_for(self, text: str, timeout_s: float = PATIENCE_S) -> None:
        """Until the log holds ``text``."""
        until(lambda: text in self.said or self.process.poll() is not None, timeout_s)
        assert text in self.said, self.said

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, timeout_s: float = PATIENCE_S) -> int:
        """Its exit code, when it has ended by itself."""
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class RunningBroker(Daemon):
    """``streampack broker`` on free ports, ready; ``settings`` are broker.yaml's."""

    num_steps = 0
    chain = ""
    data_wait = -1.0
    mfu = -1.0
    stats: dict[str, float]
    """For a test to note how many it read, their digest, and the share of time in which it waited."""

    def __init__(self, folder: Path, settings: dict[str, Any], *arguments: str) -> None:
        self.rendezvous = folder / "streampack.json"
        tree = {
            "listen": {"producers": "tcp://127.0.0.1:*", "trainers": "tcp://127.0.0.1:*", "http": "127.0.0.1:0"},
            "rendezvous": str(self.rendezvous),
            "memory": "32MiB",
            "limits": {"sample_tokens": 4096, "chunk": "16KiB"},
            **settings,
        }
        super().__init__(folder, "broker", "broker", "-c", write(folder / "broker.yaml", tree), *arguments)
        try:
            self.wait_for('"text": "ready"' if "--log-json" in arguments else " broker: ready\n")
            where = json.loads(self.rendezvous.read_text())
        except BaseException:
            self.kill()
            raise
        self.producers, self.trainers, self.http = where["producers"], where["trainers"], where["http"]

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.http + path, timeout=PATIENCE_S) as answer:
            text: str = answer.read().decode()
            return text

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.get("/status"))
        return found

    def feed(self, name: str = "train") -> dict[str, Any]:
        """What the status says of a feed."""
        found: dict[str, Any] = self.status()["feeds"][name]
        return found


@contextmanager
def running_broker(settings: dict[str, Any], *arguments: str) -> Iterator[RunningBroker]:
    with folder() as path:
        broker = RunningBroker(path, settings, *arguments)
        try:
            yield broker
        finally:
            broker.kill()


@contextmanager
def running(name: str, *arguments: str | Path) -> Iterator[Daemon]:
    with folder() as path:
        daemon = Daemon(path, name, *arguments)
        try:
            yield daemon
        finally:
            daemon.kill()


@contextmanager
def producing_here(endpoint: str, sources: Mapping[str, Source | BatchSource]) -> Iterator[None]:
    """A producer of these sources in a thread of this process, stopped in the end."""
    loop = ProducerLoop(endpoint, sources)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield
    finally:
        loop.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def post(url: str, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    """Post JSON, or bytes, to a broker over HTTP; return the answer."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)
    try:
        headers = {"Content-Type": "application/json"} | headers
        connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


@contextmanager
def folder() -> Iterator[Path]:
    """A short path: a unix socket's may have 100 bytes."""
    with tempfile.TemporaryDirectory(prefix="sp", dir="/tmp") as path:
        yield Path(path)


def write(path: Path, tree: dict[str, Any]) -> Path:
    """A YAML file; JSON is YAML."""
    path.write_text(json.dumps(tree))
    return path


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"nothing came in {timeout_s} s"
        time.sleep(0.05)
