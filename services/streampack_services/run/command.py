"""``streampack run``: a broker and producers around one command, started, watched and ended together.

The daemons are the commands ``broker`` and ``produce`` as processes of their own, with the user's files but for the
addresses: ports that the file does not name are free ones, so that two runs on a machine never meet. On several
hosts the rendezvous file joins them: rank 0 starts the broker; the others wait for a file whose broker is of this
attempt and answers, so that an earlier run's is not believed. Where the broker has keys, whatever runs beside it has
the broker's own, unless the environment or a producer.yaml names another. ``orphans`` sees to it that nothing is left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from streampack.config.config_files import read_broker, read_producer
from streampack.config.typed_yaml import read_tree
from streampack.errors import ConfigError, StreampackError, Unreachable, UserError
from streampack.transport.keys import KEY_FILE, find_key
from streampack_services.daemons import rendezvous
from streampack_services.run import child
from streampack_services.run.orphans import ASKED_BY_CTRL_C, exit_code, guarded

log = logging.getLogger("streampack.run")

POLL_S = 0.05
SAY_S = 5.0
STOP_S = 10.0
_LONGEST_FOLDER = 80
"""Bytes: a unix socket's whole path may have 100."""
_RANKS = ("SLURM_PROCID", "SLURM_NODEID", "GROUP_RANK", "NODE_RANK")
_HOSTS = ("SLURM_JOB_NUM_NODES", "GROUP_WORLD_SIZE", "NNODES")
_ATTEMPT = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID")


class DaemonEnded(StreampackError):
    """A daemon has ended while the command needed it."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What ``streampack run`` takes."""

    command: list[str]
    broker: Path
    producers: list[Path]
    node_rank: int | None
    log_dir: Path | None
    timeout_s: float


def run(options: RunOptions) -> int:
    """The command's exit code; 128 + n if a signal ended it. Raises StreampackError if a daemon ends before it."""
    read_broker(options.broker)  # what is wrong is said once, before anything is started
    for path in options.producers:
        read_producer(path)
    if shutil.which(options.command[0]) is None:
        raise UserError(f"{options.command[0]}: got no such command, expected a program that can be run")
    if options.log_dir is not None:
        try:
            options.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--log-dir: {options.log_dir}: got {error.strerror}, expected a folder") from None
    folder = Path(tempfile.mkdtemp(prefix="streampack-run-"))
    return guarded(lambda: _Run(options, folder, os.environ).work(), lambda: shutil.rmtree(folder, ignore_errors=True))


def node_rank(given: int | None, env: Mapping[str, str]) -> int:
    """This host's number: the one given, else the environment's; 0 starts the broker."""
    if given is not None:
        return given
    return next((int(env[name]) for name in _RANKS if env.get(name, "").isdigit()), 0)


def attempt(env: Mapping[str, str]) -> str:
    """A word that all hosts of one attempt share, as far as the environment has one."""
    return env.get("STREAMPACK_ATTEMPT") or ".".join(env[name] for name in _ATTEMPT if env.get(name))


def with_secrets(listen: Mapping[str, str], env: Mapping[str, str]) -> Mapping[str, str]:
    """What is started beside a broker that wants keys, or a token, has the broker's own as a rule."""
    found = dict(env)
    if "keys" in listen:
        found.setdefault(KEY_FILE, str((Path(listen["keys"]) / "broker.key").absolute()))
    if "token_file" in listen and "STREAMPACK_HTTP_TOKEN" not in env:
        found.setdefault("STREAMPACK_HTTP_TOKEN_FILE", str(Path(listen["token_file"]).absolute()))
    return found


@dataclass(slots=True)
class _Run:
    options: RunOptions
    folder: Path
    env: Mapping[str, str]
    daemons: list[child.Child] = field(default_factory=list)
    signals: list[int] = field(default_factory=list)
    guard: int = field(default_factory=os.getppid)

    def work(self) -> int:
        """In the process that ``guarded`` made."""
        for number in (signal.SIGTERM, signal.SIGHUP, ASKED_BY_CTRL_C):
            signal.signal(number, self._note)
        signal.signal(signal.SIGINT, lambda *_: None)  # a terminal sends it to the command as well, which decides
        rank, good, why = node_rank(self.options.node_rank, self.env), False, ""
        tree = read_tree(self.options.broker)
        path = Path(tree.get("rendezvous") or self.folder / "streampack.json")
        self.env = with_secrets(tree.get("listen") or {}, self.env)
        if rank and "rendezvous" not in tree:
            raise ConfigError(
                f"{self.options.broker}: rendezvous: got none, expected a file on a file system that all hosts share: "
                f"node {rank} finds the broker by it"
            )
        found: dict[str, Any] = {}
        try:
            found = self._start_broker(tree, path) if rank == 0 else self._find_broker(path)
            self._start_producers(found, rank)
            code = self._command(found, path if rank else None)
            good = code == 0
            return code
        except _Stopped as stopped:
            return 128 + stopped.number
        except StreampackError as error:
            why = str(error)
            raise
        finally:
            self._stop(good)
            if rank == 0 and not good:
                rendezvous.leave_word(path, found, why or "the command failed there")

    def _note(self, number: int, _: FrameType | None) -> None:
        self.signals.append(signal.SIGINT if number == ASKED_BY_CTRL_C else signal.SIGTERM)

    # The broker

    def _start_broker(self, tree: dict[str, Any], path: Path) -> dict[str, Any]:
        """Start it, and what its rendezvous file says once it is ready."""
        listen = self._free(shared="rendezvous" in tree) | (tree.get("listen") or {})
        before = rendezvous.read(path)
        self._start("broker", "broker", tree | {"listen": listen, "rendezvous": str(path)})
        (broker,) = self.daemons
        while (found := rendezvous.read(path)) is None or found == before or "failed" in found:
            self._pause()
            if broker.process.poll() is not None:
                raise DaemonEnded(broker.failure())
        return found

    def _free(self, shared: bool) -> dict[str, str]:
        """Addresses that nobody else has: on the network for several hosts, else a socket's file if its path fits."""
        hosts = next((int(self.env[name]) for name in _HOSTS if self.env.get(name, "").isdigit()), 1)
        any_port = "tcp://0.0.0.0:*" if hosts > 1 else "tcp://127.0.0.1:*"
        files = hosts == 1 and not shared and len(os.fsencode(self.folder)) < _LONGEST_FOLDER
        sides = {side: f"ipc://{self.folder}/{side}" if files else any_port for side in ("producers", "trainers")}
        return {**sides, "http": "127.0.0.1:0"}

    def _find_broker(self, path: Path) -> dict[str, Any]:
        """What the rendezvous file of this attempt's broker says, once it is there and the broker answers."""
        began = said = time.monotonic()
        why = "there is no such file"
        while True:
            found = rendezvous.read(path)
            if found is not None:
                why = rendezvous.not_believed(found, attempt(self.env), find_key(self.env.get(KEY_FILE, "")))
                if not why:
                    return found
            now = time.monotonic()
            if now - began > self.options.timeout_s:
                raise Unreachable(
                    f"{path}: got no broker in {self.options.timeout_s:g} s ({why}), expected the one that node 0 "
                    f"starts: is 'streampack run' running there, and the file on a file system that both share?"
                )
            if now - said > SAY_S:
                said = now
                log.info("waiting for node 0's broker: %s: %s", path, why)
            self._pause()

    def _start_producers(self, found: dict[str, Any], rank: int) -> None:
        for number, path in enumerate(self.options.producers):
            name = "producer" if len(self.options.producers) == 1 else f"producer {number}"
            self._start(f"{name} of node {rank}" if rank else name, "produce",
                        read_tree(path) | {"broker": found["producers"]})  # fmt: skip

    def _start(self, name: str, command: str, tree: dict[str, Any]) -> None:
        env = {**self.env, "STREAMPACK_ATTEMPT": attempt(self.env)}
        self.daemons.append(child.start(name, command, tree, folder=self.folder, log_dir=self.options.log_dir, env=env))

    # The command

    def _command(self, found: dict[str, Any], watched: Path | None) -> int:
        env = {
            **self.env, "STREAMPACK_ENDPOINT": found["trainers"], "STREAMPACK_PRODUCERS": found["producers"],
            "STREAMPACK_HTTP": found["http"],
        }  # fmt: skip
        try:
            command = subprocess.Popen(self.options.command, env=env)
        except OSError as error:
            raise UserError(f"{self.options.command[0]}: cannot be run: {error.strerror}") from None
        heard = 0
        looked = time.monotonic()
        try:
            while command.poll() is None:
                time.sleep(POLL_S)
                for number in self.signals[heard:]:
                    heard += 1
                    command.send_signal(number if heard == 1 or number == signal.SIGINT else signal.SIGKILL)
                if os.getppid() != self.guard:
                    break
                self._check_daemons()
                if watched is not None and time.monotonic() - looked > 1:
                    looked = time.monotonic()
                    now = rendezvous.read(watched) or {}
                    if now.get("epoch") == found["epoch"] and "failed" in now:
                        raise DaemonEnded(f"node 0 has ended: {now['failed']}")
        finally:
            _end(command)
        return exit_code(command.returncode)

    def _check_daemons(self) -> None:
        for daemon in self.daemons:
            code = daemon.process.poll()
            if code is not None and (code or daemon.name == "broker"):
                raise DaemonEnded(f"{daemon.failure()}; the command was terminated")

    def _pause(self) -> None:
        time.sleep(POLL_S)
        if self.signals:
            raise _Stopped(self.signals[0])
        if os.getppid() != self.guard:
            raise _Stopped(signal.SIGTERM)

    def _stop(self, good: bool) -> None:
        """Producers first; then the broker, which serves what other hosts still want unless something failed."""
        for daemon in reversed(self.daemons):
            if daemon.process.poll() is None:
                daemon.process.terminate()
                if not good:
                    time.sleep(POLL_S)
                    daemon.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.process.wait(STOP_S + (30.0 if good and daemon.name == "broker" else 0.0))
            if daemon.process.poll() is None:
                daemon.process.kill()
                daemon.process.wait()
            daemon.last_line()  # all that it said has been shown


class _Stopped(Exception):
    def __init__(self, number: int) -> None:
        self.number = number


def _end(command: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL to what does not heed it in time."""
    if command.poll() is None:
        command.terminate()
    try:
        command.wait(STOP_S)
    except subprocess.TimeoutExpired:
        command.kill()
        command.wait()
