"""The processes of one run: real ones, in groups of their own, ended and started by their ids alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.integration.running import STREAMPACK, write
from tests.soak.job import PACKS, Job
from tests.soak.trainer import OWN_PLACE

PREFETCH = 2
ROLES = {
    "producer": "producer", "pusher": "producer", "scorer": "producer", "trainer": "trainer", "subscriber": "trainer",
    "relay": "relay",
}  # fmt: skip
"""Role of the key, by kind of member."""


@dataclass(eq=False)
class Member:
    """A place for one process after another; what they say goes to ``<name>.log``."""

    kind: str
    name: str
    folder: Path
    command: list[str]
    key_file: Path | None = None
    """Its key, if the broker requires keys."""
    process: subprocess.Popen[bytes] | None = None
    continue_at: float | None = None
    """When it is let go on, while it is stopped."""
    start_at: float | None = 0.0
    """When it is started, while it is not there; None for never again."""
    starts: int = 0
    codes: list[int] = field(default_factory=list)
    """Exit codes so far; negative ones are signals."""

    def start(self) -> None:
        self.start_at = self.continue_at = None
        self.starts += 1
        key = {} if self.key_file is None else {"STREAMPACK_KEY_FILE": str(self.key_file)}
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, start_new_session=True, env=os.environ | key
            )

    @property
    def alive(self) -> bool:
        return self.process is not None

    def ended(self) -> int | None:
        """Its exit code, once, when it has ended."""
        code = self.process.poll() if self.process is not None else None
        if code is not None:
            self._end_group()
            self.process = self.continue_at = None
            self.codes.append(code)
        return code

    def signal(self, number: signal.Signals, child: int = -1) -> None:
        """To the process, or to one of its children. A process that has just ended is left alone."""
        assert self.process is not None
        if child < 0:
            self.process.send_signal(number)
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            workers = [c for c in psutil.Process(self.process.pid).children() if "spawn_main" in " ".join(c.cmdline())]
            if workers:
                workers[child % len(workers)].send_signal(number)

    def kill(self) -> None:
        """With all its children, and wait for it."""
        if self.process is not None:
            self._end_group()
            self.process.wait(20)

    def _end_group(self) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its own session: a producer's orphans, too

    def said(self, num_bytes: int = 3000) -> str:
        log = self.folder / f"{self.name}.log"
        return log.read_text(errors="replace")[-num_bytes:] if log.exists() else ""


def members_of(job: Job, producers: int) -> list[Member]:
    """Return a broker, producers, relays, trainers and all other programs of a run, none of them started."""
    streampack = list(STREAMPACK)
    found = [Member("broker", "broker", job.folder, [*streampack, "broker", "-c", str(job.broker_config)])]
    for number in range(producers):
        config = write(job.folder / f"producer-{number}.yaml", json.loads(job.producer_config.read_text()))
        command = [*streampack, "produce", "-c", str(config), "--timeout", "300"]
        found.append(Member("producer", f"producer-{number}", job.folder, command))
    for host in range(job.relays):
        address = ("--broker", job.settings["listen"]["trainers"], "--listen", job.relay_address(host))
        found.append(Member("relay", f"relay-{host}", job.folder, [*streampack, "relay", *address]))
    for rank in range(len(job.meshes)):
        command = [sys.executable, "-m", "tests.soak.trainer", str(job.folder / f"trainer-{rank}.json")]
        found.append(Member("trainer", f"trainer-{rank}", job.folder, command))
    for partition in range(job.pushers):
        settings = write(
            job.folder / f"pusher-{partition}.json",
            {"endpoint": job.settings["listen"]["producers"], "partition": partition, "total": job.pushed,
             "trees": job.trees, "late": job.late, "media": job.media, "seed": job.seed, "folder": str(job.folder)},
        )  # fmt: skip
        command = [sys.executable, "-m", "tests.soak.pusher", str(settings)]
        found.append(Member("pusher", f"pusher-{partition}", job.folder, command))
    for kind, side in (("scorer", "producers"), ("subscriber", "trainers")) if job.late else ():
        settings = write(
            job.folder / f"{kind}.json",
            {"endpoint": job.settings["listen"][side], "partitions": job.pushers, "total": job.pushed,
             "seed": job.seed, "folder": str(job.folder)},
        )  # fmt: skip
        found.append(Member(kind, kind, job.folder, [sys.executable, "-m", "tests.soak.values", kind, str(settings)]))
    if job.flooded:
        for member in found:
            role = ROLES.get(member.kind)
            member.key_file = None if role is None else job.keys / f"{role}.key"
        settings = write(
            job.folder / "flood.json",
            {"keys": str(job.keys), "rendezvous": job.settings["rendezvous"], "folder": str(job.folder),
             "seed": job.seed},
        )  # fmt: skip
        found.append(Member("flood", "flood", job.folder, [sys.executable, "-m", "tests.soak.flood", str(settings)]))
    if job.staged:
        settings = write(
            job.folder / "changer.json",
            {"config": str(job.broker_config), "folder": str(job.folder), "seed": job.seed, "packs": PACKS},
        )  # fmt: skip
        command = [sys.executable, "-m", "tests.soak.changer", str(settings)]
        found.append(Member("changer", "changer", job.folder, command))
    return found


def reach(job: Job, member: Member, endpoint: str) -> None:
    """Have a producer, pusher or relay reach the broker at ``endpoint``."""
    name = member.name
    if member.kind == "relay":
        member.command[member.command.index("--broker") + 1] = endpoint
    elif name.startswith("producer"):
        tree = json.loads(job.producer_config.read_text()) | {"broker": endpoint}
        write(job.folder / f"{name}.yaml", tree)
    elif member.kind in ("pusher", "scorer", "subscriber"):
        path = job.folder / f"{name}.json"
        write(path, json.loads(path.read_text()) | {"endpoint": endpoint})


def tell_trainer(job: Job, rank: int, resume: int, endpoint: str = "") -> None:
    """Write what a rank is started with: ``resume`` is a checkpoint's step, -1 for none, OWN_PLACE; ``endpoint``: where
    it reaches the broker, by default where that listens.
    """
    settings: dict[str, Any] = {
        "endpoint": endpoint or job.settings["listen"]["trainers"], "mesh": job.meshes[rank], "folder": str(job.folder),
        "rank": rank, "ranks": len(job.meshes), "every": job.checkpoint_every, "step_s": job.step_s,
        "prefetch": PREFETCH, "resume": resume,
        "relay": job.relay_address(job.host_of(rank)) if job.relays else "off", "reports": job.late, "media": job.media,
    }  # fmt: skip
    write(job.folder / f"trainer-{rank}.json", settings)


def last_checkpoint(job: Job) -> int:
    """The last step whose checkpoint every rank has, or -1."""
    found: dict[int, int] = {}
    for path in job.folder.glob("checkpoint-*.json"):
        step = int(path.stem.split("-")[1])
        found[step] = found.get(step, 0) + 1
    return max((step for step, count in found.items() if count == len(job.meshes)), default=-1)


def lines_of(job: Job, rank: int) -> list[dict[str, Any]]:
    """What a rank wrote down."""
    path = job.folder / f"trainer-{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


__all__ = ["OWN_PLACE", "PREFETCH", "Member", "last_checkpoint", "lines_of", "members_of", "reach", "tell_trainer"]
