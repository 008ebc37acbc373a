"""The broker's host is lost: its network and its disk are gone at once, while ranks train. A standby takes over.

Three network namespaces stand for three hosts: ``a`` of the active broker, ``b`` of the standby, and ``c`` with the
trainers, the producers and a program that pushes samples. ``c`` forwards between the others. Needs root and ``ip``.

``python -m tests.soak.host_loss COUNT [SEED] [without | stages]`` prints the figures; ``without``: without a standby;
``stages``: the rules change in runs without pushed samples.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.integration.running import folder, until, write
from tests.soak.accounts import settle
from tests.soak.arrived import broken_promises, pack_as_it_came
from tests.soak.golden import pack_offline
from tests.soak.job import Job, make_job
from tests.soak.members import Member, lines_of, members_of, reach, tell_trainer

TAKEOVER_S = 5.0
ADDRESSES = {"a": "10.213.81.1", "b": "10.213.82.1"}
MESH_OF_4 = 2
"""Number of a soak's job with four data-parallel ranks, over TCP."""


@dataclass
class Loss:
    """The outcome of one loss: the longest pause of a rank after it, in seconds, and everything that is wrong."""

    pause_s: float
    steps: int
    wrong: list[str] = field(default_factory=list)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


@contextmanager
def three_hosts() -> Iterator[dict[str, str] | None]:
    """The names of three namespaces; None where this machine does not allow them."""
    names = {host: f"sp{os.getpid()}{host}" for host in "abc"}
    made = False
    try:
        if shutil.which("ip"):
            with contextlib.suppress(subprocess.CalledProcessError):
                _connect(names)
                made = True
        yield names if made else None
    finally:
        for each in names.values():
            with contextlib.suppress(subprocess.CalledProcessError, FileNotFoundError):
                _ip("netns", "del", each)


def _connect(names: dict[str, str]) -> None:
    for each in names.values():
        _ip("netns", "add", each)
        _ip("-n", each, "link", "set", "lo", "up")
    for host, address in ADDRESSES.items():
        gate = address[:-1] + "2"
        _ip("-n", names[host], "link", "add", "v0", "type", "veth", "peer", "name", f"v{host}", "netns", names["c"])
        _ip("-n", names[host], "addr", "add", f"{address}/30", "dev", "v0")
        _ip("-n", names["c"], "addr", "add", f"{gate}/30", "dev", f"v{host}")
        _ip("-n", names[host], "link", "set", "v0", "up")
        _ip("-n", names["c"], "link", "set", f"v{host}", "up")
        _ip("-n", names[host], "route", "add", "default", "via", gate)
    _ip("netns", "exec", names["c"], "sysctl", "-qw", "net.ipv4.ip_forward=1")


def lose_host(
    seed: int, names: dict[str, str], *, pushed: bool, on_loss: str | None = "stall", staged: bool = False
) -> Loss:  # fmt: skip
    """Lose host ``a`` while four ranks train, and look at what they had; with ``pushed``, one stream is pushed.

    With ``staged``, the rules change by stages.

    If ``on_loss`` is None there is no standby: a broker without a log is started on host ``b`` after ``TAKEOVER_S``.
    """
    with folder() as path:
        rows = (240, 260) if staged else (120, 130)
        job = make_job(seed, path, number=MESH_OF_4, rows=rows, pushers=1 if pushed else 0, staged=staged)
        job.settings.pop("rendezvous")
        job = replace(job, pushed=200 if pushed else 0, step_s=0.15)
        run = _Run(job, names, on_loss)
        try:
            lost_at = run.lose()
            run.finish()
        finally:
            run.end()
        return run.look(lost_at)


class _Run:
    """One run; its processes are started at once."""

    def __init__(self, job: Job, names: dict[str, str], on_loss: str | None) -> None:
        self.job, self._names, self._has_standby = job, names, on_loss is not None
        configs = {host: self._config(host, on_loss) for host in ADDRESSES}
        members = [member for member in members_of(job, producers=1) if member.kind != "changer"]
        self._trainers = [member for member in members if member.kind == "trainer"]
        (job.folder / "fire").touch()
        both = {side: ",".join(self._listen(host)[side] for host in ADDRESSES) for side in ("producers", "trainers")}
        for rank in range(len(self._trainers)):
            tell_trainer(job, rank, -1, both["trainers"])
        for member in members:
            if member.kind in ("producer", "pusher"):
                reach(job, member, both["producers"])
        broker = next(member for member in members if member.kind == "broker")
        command = broker.command[: broker.command.index("-c") + 1]
        self._brokers = {
            host: Member("broker", f"broker-{host}", job.folder, [*command, str(config)])
            for host, config in configs.items()
        }
        self._brokers["b"].command += ["--standby"] if self._has_standby else []
        self._others = [member for member in members if member.kind != "broker"]
        for host, member in self._brokers.items():
            if host == "a" or self._has_standby:
                self._start(member, host)
        for member in self._others:
            self._start(member, "c")

    def _listen(self, host: str) -> dict[str, str]:
        address = ADDRESSES[host]
        return {
            "producers": f"tcp://{address}:7401", "trainers": f"tcp://{address}:7402", "http": "127.0.0.1:7400",
        }  # fmt: skip

    def _config(self, host: str, on_loss: str | None) -> Path:
        standby = {
            "arbiter": str(self.job.folder / "arbiter"), "listen": f"tcp://{ADDRESSES[host]}:7403", "name": host,
            "on_loss": on_loss, "takeover_s": TAKEOVER_S,
        }  # fmt: skip
        own = {
            "listen": self._listen(host),
            "state_dir": str(self.job.folder / host),
            "standby": standby if on_loss else None,
        }
        return write(self.job.folder / f"broker-{host}.yaml", self.job.settings | own)

    def _start(self, member: Member, host: str) -> None:
        member.command = ["ip", "netns", "exec", self._names[host], *member.command]
        member.start()

    def lose(self) -> float:
        """Wait until the standby has the log and ranks train; take the host away, and return the time."""
        if self._has_standby:
            until(lambda: "has every safe record" in self._brokers["b"].said())
        until(lambda: all(len(lines_of(self.job, rank)) > 8 for rank in range(len(self._trainers))))
        _ip("-n", self._names["c"], "link", "del", "va")
        lost_at = time.monotonic()
        self._brokers["a"].kill()
        shutil.rmtree(self.job.folder / "a")
        return lost_at

    def finish(self) -> None:
        """Wait until every rank has read everything."""
        if not self._has_standby:
            time.sleep(TAKEOVER_S)
            self._start(self._brokers["b"], "b")
        until(lambda: " broker: ready" in self._brokers["b"].said())
        time.sleep(2.0)
        (self.job.folder / "fire").unlink()
        until(lambda: all(member.process is None or member.ended() is not None for member in self._trainers))

    def end(self) -> None:
        """End all processes."""
        for member in [*self._others, *self._brokers.values()]:
            if member.process is not None:
                member.signal(signal.SIGTERM)
        for member in [*self._others, *self._brokers.values()]:
            member.kill()
        _rebuild_link(self._names)

    def look(self, lost_at: float) -> Loss:
        """Compare what the ranks had with an offline run."""
        job = replace(self.job, settings=self.job.settings | {"state_dir": str(self.job.folder / "b")})
        wrong: list[str] = []
        pauses = []
        for rank, member in enumerate(self._trainers):
            lines = lines_of(job, rank)
            if member.codes != [0]:
                wrong.append(f"rank {rank} ended with {member.codes}: {member.said()}")
            if len({line["pid"] for line in lines}) != 1:
                wrong.append(f"rank {rank} was restarted")
            steps = [line["at"] for line in lines if line["kind"] == "step"]
            pauses += [after - before for before, after in itertools.pairwise(steps) if after > lost_at]
        golden = pack_as_it_came(job) if job.pushers else pack_offline(job)
        account = settle(job, golden, [])
        wrong += account.wrong
        if job.pushers:
            wrong += broken_promises(job)
        return Loss(max(pauses, default=0.0), len(golden.steps), wrong)


def _rebuild_link(names: dict[str, str]) -> None:
    """Give host ``a`` a network again, for the next run."""
    with contextlib.suppress(subprocess.CalledProcessError):
        _ip("-n", names["a"], "link", "del", "v0")
    address = ADDRESSES["a"]
    gate = address[:-1] + "2"
    _ip("-n", names["a"], "link", "add", "v0", "type", "veth", "peer", "name", "va", "netns", names["c"])
    _ip("-n", names["a"], "addr", "add", f"{address}/30", "dev", "v0")
    _ip("-n", names["c"], "addr", "add", f"{gate}/30", "dev", "va")
    _ip("-n", names["a"], "link", "set", "v0", "up")
    _ip("-n", names["c"], "link", "set", "va", "up")
    _ip("-n", names["a"], "route", "add", "default", "via", gate)


def told(losses: list[Loss]) -> dict[str, Any]:
    """Figures of several losses."""
    pauses = sorted(loss.pause_s for loss in losses)
    at = min(int(0.95 * len(pauses)), len(pauses) - 1)
    return {
        "losses": len(losses),
        "pause_s": {"median": pauses[len(pauses) // 2], "p95": pauses[at], "most": pauses[-1]},
        "steps": sum(loss.steps for loss in losses),
        "wrong": [line for loss in losses for line in loss.wrong],
    }


def main(count: int, seed: int, standby: bool, staged: bool) -> None:
    """Lose a host ``count`` times; with a ``standby``, every second time with a pushed stream, or ``staged``."""
    losses: list[Loss] = []
    with three_hosts() as names:
        assert names is not None, "this machine allows no network namespaces"
        for number in range(count):
            on_loss = ("stall", "go_on")[number // 2 % 2] if standby else None
            pushed = standby and number % 2 == 1 and not staged
            loss = lose_host(seed + number, names, pushed=pushed, on_loss=on_loss, staged=staged)
            losses.append(loss)
            print(f"{number}: {loss.pause_s:.2f} s, {loss.steps} steps, {loss.wrong[:3]}", flush=True)
    print(json.dumps(told(losses)))


if __name__ == "__main__":
    import sys

    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    main(int(sys.argv[1]), seed, "without" not in sys.argv, "stages" in sys.argv)
