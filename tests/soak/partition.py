"""A network that breaks: a broker in one network namespace, producers and trainers in another, a link between.

The namespaces are made for one run and removed with it; nothing outside them is touched. Needs root and ``ip``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.integration.running import folder, until, write
from tests.soak.accounts import settle
from tests.soak.golden import pack_offline
from tests.soak.job import Job, make_job
from tests.soak.members import members_of, tell_trainer

NEAR, FAR = "10.213.77.1", "10.213.77.2"
_NOBODY = "02:00:00:00:00:01"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


@dataclass(frozen=True)
class Link:
    """Between namespaces ``near``, of the broker, and ``far``."""

    near: str
    far: str

    @contextmanager
    def down(self) -> Iterator[None]:
        """Nothing passes, either way."""
        _ip("-n", self.near, "link", "set", "v0", "down")
        yield
        _ip("-n", self.near, "link", "set", "v0", "up")

    @contextmanager
    def one_way(self, deaf: str) -> Iterator[None]:
        """What is sent to the namespace ``deaf`` is lost; what it sends arrives."""
        sender, address = (self.far, NEAR) if deaf == self.near else (self.near, FAR)
        _ip("-n", sender, "neigh", "replace", address, "lladdr", _NOBODY, "nud", "permanent", "dev", "v0")
        yield
        _ip("-n", sender, "neigh", "del", address, "dev", "v0")


@contextmanager
def link() -> Iterator[Link | None]:
    """Two namespaces; None where this machine does not allow them."""
    name = f"sp{os.getpid()}"
    found = Link(f"{name}a", f"{name}b")
    made = False
    try:
        if shutil.which("ip"):
            with contextlib.suppress(subprocess.CalledProcessError):
                _make(found)
                made = True
        yield found if made else None
    finally:
        for each in (found.near, found.far):
            with contextlib.suppress(subprocess.CalledProcessError, FileNotFoundError):
                _ip("netns", "del", each)


def _make(found: Link) -> None:
    for each in (found.near, found.far):
        _ip("netns", "add", each)
    _ip("-n", found.near, "link", "add", "v0", "type", "veth", "peer", "name", "v0", "netns", found.far)
    for each, address in ((found.near, NEAR), (found.far, FAR)):
        _ip("-n", each, "addr", "add", f"{address}/30", "dev", "v0")
        _ip("-n", each, "link", "set", "v0", "up")
        _ip("-n", each, "link", "set", "lo", "up")


def run_apart(job: Job, between: Link, faults: Sequence[Callable[[], Any]], seconds: Sequence[float]) -> None:
    """The job's run with its broker in one namespace and all else in the other; each fault for its seconds, with
    some steps between two. Raises AssertionError if a rank does not end well.
    """
    settings = job.settings | {
        "listen": {"producers": f"tcp://{NEAR}:7401", "trainers": f"tcp://{NEAR}:7402", "http": "127.0.0.1:7400"}
    }
    job = replace(job, settings=settings)
    write(job.broker_config, settings)
    (job.folder / "fire").touch()
    members = members_of(job, producers=1)
    trainers = [member for member in members if member.kind == "trainer"]
    for rank in range(len(trainers)):
        tell_trainer(job, rank, -1)
    written = [job.folder / f"{member.name}.jsonl" for member in trainers]
    try:
        for member in members:
            member.command = ["ip", "netns", "exec", between.near if member.kind == "broker" else between.far,
                              *member.command]  # fmt: skip
            member.start()
        for fault, how_long in zip(faults, seconds, strict=True):
            _some_steps(written)
            with fault():
                time.sleep(how_long)
        _some_steps(written)
        (job.folder / "fire").unlink()
        until(lambda: all(member.process is None or member.ended() is not None for member in trainers))
        assert [member.codes for member in trainers] == [[0]] * len(trainers), [member.said() for member in members]
    finally:
        for member in members:
            if member.process is not None:
                member.signal(signal.SIGTERM)
            member.kill()


def long_partition(seed: int, seconds: float = 60.0) -> list[str] | None:
    """A run whose link is down so long; what is wrong with it, None where there are no namespaces here."""
    with link() as between, folder() as path:
        if between is None:
            return None
        job = make_job(seed, path, number=1, rows=(150, 160))
        try:
            run_apart(job, between, [between.down], [seconds])
        except AssertionError as error:
            return [f"a partition of {seconds:.0f} s: {error}"]
        return settle(job, pack_offline(job), []).wrong


def _some_steps(written: list[Path]) -> None:
    """Until every rank has had five more."""
    begun = [_num_lines(path) for path in written]
    until(lambda: all(_num_lines(path) > before + 5 for path, before in zip(written, begun, strict=True)))


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
