"""``streampack run``: start a broker, producers and one command, watch them, and end them together.

The broker and the producers are child processes that run ``streampack broker`` and ``streampack produce`` with the
user's files. Addresses that broker.yaml does not name are free ones, so that two runs on a machine never meet.

On several hosts, host 0 starts the broker. The others read its address from the rendezvous file. They accept the file
only if it is of this attempt and its broker answers, since an earlier run may have left it.

``host_relay`` starts a relay for the ranks of this host, where it saves bytes.

If the broker has keys, the other processes use the broker's own key, unless the environment or a producer.yaml names
another. ``orphans`` makes sure that no process is left over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from msgspec.structs import replace

from streampack.config.config_files import read_broker, read_producer
from streampack.config.typed_yaml import read_tree
from streampack.errors import ConfigError, StreampackError, Unreachable, UserError
from streampack.producer.first_rows import check_rows
from streampack.transport.keys import KEY_FILE, find_key
from streampack.transport.relay_socket import ENVIRONMENT, OFF
from streampack.transport.rendezvous import RENDEZVOUS
from streampack_services import own_runs
from streampack_services.check.compare import RunFiles, compare
from streampack_services.daemons import rendezvous
from streampack_services.daemons.producer import import_from_here
from streampack_services.http.http_guard import parse_address
from streampack_services.run import child
from streampack_services.run.host_relay import HostRelay, wants_relay
from streampack_services.run.orphans import ASKED_BY_CTRL_C, exit_code, guarded

log = logging.getLogger("streampack.run")

POLL_S = 0.05
"""Seconds between two looks at the processes."""
SAY_S = 5.0
"""Seconds between two log lines while waiting for the broker of host 0."""
STOP_S = 10.0
"""Seconds that a process has to end after SIGTERM, before SIGKILL."""
DEFAULT_HTTP = "127.0.0.1:7400"
"""HTTP address of the broker if it is free and broker.yaml names none."""
_LONGEST_FOLDER = 80
"""Bytes of the longest folder for Unix sockets, whose whole path may have 100."""
_RANKS = ("SLURM_PROCID", "SLURM_NODEID", "GROUP_RANK", "NODE_RANK")
_HOSTS = ("SLURM_JOB_NUM_NODES", "GROUP_WORLD_SIZE", "NNODES")
_ATTEMPT = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID")


class DaemonEnded(StreampackError):
    """The broker or a producer has ended before the command."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of ``streampack run``; ``timeout_s``: seconds to wait for the broker of host 0."""

    command: list[str]
    broker: Path
    producers: list[Path]
    node_rank: int | None
    log_dir: Path | None
    timeout_s: float
    relay: bool | None = None
    """Start a relay on this host; None: if several of its ranks read from a broker on another host."""


def run(options: RunOptions) -> int:
    """Run the command with its broker and producers; return its exit code, 128 + n if signal n ended it.

    Raises UserError or ConfigError for wrong options or files, StreampackError if the broker or a producer fails.
    """
    if node_rank(options.node_rank, os.environ):
        read_broker(options.broker)
        for path in options.producers:
            read_producer(path)
    else:
        _check_files(options)
    if shutil.which(options.command[0]) is None:
        raise UserError(f"The command {options.command[0]!r} was not found. Check its name and your PATH.")
    if options.log_dir is not None:
        try:
            options.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--log-dir {options.log_dir} cannot be made: {error.strerror}. Pass a folder.") from None
    folder = Path(tempfile.mkdtemp(prefix="streampack-run-"))
    return guarded(lambda: _Run(options, folder, os.environ).work(), lambda: shutil.rmtree(folder, ignore_errors=True))


def _check_files(options: RunOptions) -> None:
    """Find errors in the files, and between them, before anything is started; log warnings."""
    import_from_here()
    broker, producers = read_broker(options.broker), [(path, read_producer(path)) for path in options.producers]
    for _, producer in producers:
        quick = {name: stream for name, stream in producer.streams.items() if stream.source != "python"}
        check_rows(replace(producer, streams=quick), order=False)
    for warning in compare(RunFiles(options.broker, broker, producers)) if producers else ():
        log.warning("%s", warning)


def node_rank(number: int | None, env: Mapping[str, str]) -> int:
    """Return this host's number, from 0: the one given, else that in the environment, else 0."""
    if number is not None:
        return number
    return next((int(env[name]) for name in _RANKS if env.get(name, "").isdigit()), 0)


def _is_free(address: str) -> bool:
    """Return whether a server may listen at ``host:port``."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(parse_address(address))
        except OSError:
            return False
    return True


def attempt(env: Mapping[str, str]) -> str:
    """Return a name that all hosts of one attempt of a job share, from the environment; empty if it has none."""
    return env.get("STREAMPACK_ATTEMPT") or ".".join(env[name] for name in _ATTEMPT if env.get(name))


def with_secrets(listen: Mapping[str, str], env: Mapping[str, str]) -> Mapping[str, str]:
    """Return ``env`` with the paths of the broker's own key and HTTP token that ``listen`` names.

    Variables that ``env`` already has stay unchanged.
    """
    secrets = dict(env)
    if "keys" in listen:
        secrets.setdefault(KEY_FILE, str((Path(listen["keys"]) / "broker.key").absolute()))
    if "token_file" in listen and "STREAMPACK_HTTP_TOKEN" not in env:
        secrets.setdefault("STREAMPACK_HTTP_TOKEN_FILE", str(Path(listen["token_file"]).absolute()))
    return secrets


@dataclass(slots=True)
class _Run:
    """The processes of one ``streampack run`` on this host; ``signals``: those to pass on to the command."""

    options: RunOptions
    folder: Path
    env: Mapping[str, str]
    daemons: list[child.Child] = field(default_factory=list)
    relay: HostRelay | None = None
    signals: list[int] = field(default_factory=list)
    guard: int = field(default_factory=os.getppid)
    port: contextlib.ExitStack | None = None
    """Holds the claim on the port of ``DEFAULT_HTTP``."""

    def work(self) -> int:
        """Start everything, wait for the command, end everything; return the exit code. ``guarded`` calls it."""
        for number in (signal.SIGTERM, signal.SIGHUP, ASKED_BY_CTRL_C):
            signal.signal(number, self._record_signal)
        signal.signal(signal.SIGINT, lambda *_: None)  # a terminal sends it to the command, too, which decides
        rank, good, why = node_rank(self.options.node_rank, self.env), False, ""
        config = read_tree(self.options.broker)
        state = config.get("state_dir")
        path = Path(config.get("rendezvous") or Path(state or self.folder) / RENDEZVOUS)
        self.env = with_secrets(config.get("listen") or {}, self.env)
        if rank and "rendezvous" not in config:
            raise ConfigError(
                f"{self.options.broker} has no `rendezvous`, so host {rank} cannot find the broker. Set `rendezvous` "
                f"to a file that all hosts can read."
            )
        addresses: dict[str, Any] = {}
        try:
            addresses = self._start_broker(config, path) if rank == 0 else self._find_broker(path)
            self._start_producers(addresses, rank)
            if wants_relay(self.options.relay, self.options.command, self.env, rank, addresses["trainers"]):
                self._start_relay(addresses["trainers"])
            code = self._command(addresses, path if rank else None)
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
                rendezvous.write_failure(path, addresses, why or "the command failed there")

    def _record_signal(self, number: int, _: FrameType | None) -> None:
        """Handle a signal: add SIGINT or SIGTERM to ``signals``, the signals to pass on to the command."""
        self.signals.append(signal.SIGINT if number == ASKED_BY_CTRL_C else signal.SIGTERM)

    # The broker

    def _start_broker(self, config: dict[str, Any], path: Path) -> dict[str, Any]:
        """Start the broker, wait until it is ready, and return the content of its rendezvous file."""
        listen = self._free_addresses(has_rendezvous="rendezvous" in config) | (config.get("listen") or {})
        before = rendezvous.read(path)
        self._start("broker", "broker", config | {"listen": listen, "rendezvous": str(path)})
        (broker,) = self.daemons
        while (addresses := rendezvous.read(path)) is None or addresses == before or "failed" in addresses:
            self._pause()
            if broker.process.poll() is not None:
                raise DaemonEnded(broker.failure())
        return addresses

    def _free_addresses(self, has_rendezvous: bool) -> dict[str, str]:
        """Return free addresses for the broker: TCP ports for several hosts, else Unix sockets if their path fits.

        ``has_rendezvous``: broker.yaml names a rendezvous file, so other hosts may connect.
        """
        hosts = next((int(self.env[name]) for name in _HOSTS if self.env.get(name, "").isdigit()), 1)
        any_port = "tcp://0.0.0.0:*" if hosts > 1 else "tcp://127.0.0.1:*"
        files = hosts == 1 and not has_rendezvous and len(os.fsencode(self.folder)) < _LONGEST_FOLDER
        sides = {side: f"ipc://{self.folder}/{side}" if files else any_port for side in ("producers", "trainers")}
        self.port = own_runs.claim_port(parse_address(DEFAULT_HTTP)[1])
        return {**sides, "http": DEFAULT_HTTP if self.port is not None and _is_free(DEFAULT_HTTP) else "127.0.0.1:0"}

    def _find_broker(self, path: Path) -> dict[str, Any]:
        """Wait until the broker of this attempt answers; return the content of its rendezvous file.

        Raises Unreachable after ``timeout_s`` seconds.
        """
        began = said_at = time.monotonic()
        why = "the file does not exist"
        while True:
            addresses = rendezvous.read(path)
            if addresses is not None:
                why = rendezvous.rejection(addresses, attempt(self.env), find_key(self.env.get(KEY_FILE, "")))
                if not why:
                    return addresses
            now = time.monotonic()
            if now - began > self.options.timeout_s:
                raise Unreachable(
                    f"Found no broker through the rendezvous file {path} within {self.options.timeout_s:g} s: {why}. "
                    f"Check that 'streampack run' runs on host 0, and that both hosts can read the file."
                )
            if now - said_at > SAY_S:
                said_at = now
                log.info("waiting for the broker of host 0 (rendezvous file %s): %s", path, why)
            self._pause()

    def _start_producers(self, addresses: dict[str, Any], rank: int) -> None:
        """Start a producer for each producer.yaml; ``addresses``: content of the rendezvous file."""
        for number, path in enumerate(self.options.producers):
            name = "producer" if len(self.options.producers) == 1 else f"producer {number}"
            self._start(f"{name} of host {rank}" if rank else name, "produce",
                        read_tree(path) | {"broker": addresses["producers"]})  # fmt: skip

    def _start(self, name: str, command: str, config: dict[str, Any]) -> None:
        """Start ``streampack COMMAND`` as a child process called ``name``, with ``config`` as its configuration."""
        env = {**self.env, "STREAMPACK_ATTEMPT": attempt(self.env)}
        self.daemons.append(
            child.start(name, command, config, folder=self.folder, log_dir=self.options.log_dir, env=env)
        )

    def _start_relay(self, broker: str) -> None:
        """Start a relay for the ranks of this host; without one, they read from the broker itself."""

        def start(words: list[str]) -> child.Child:
            env = {name: value for name, value in self.env.items() if name != ENVIRONMENT}
            return child.start_words("relay", words, log_dir=self.options.log_dir, env=env)

        self.relay = HostRelay(broker, self.folder, start)
        self.env = {**self.env, ENVIRONMENT: self.relay.listen if self.relay.start(self._pause) else OFF}

    # The command

    def _command(self, addresses: dict[str, Any], watched: Path | None) -> int:
        """Run the command to its end and return its exit code; pass signals on to it and watch the other processes.

        ``watched``: on hosts other than 0 the rendezvous file, in which host 0 reports a failure. Raises DaemonEnded.
        """
        env = {
            **self.env, "STREAMPACK_ENDPOINT": addresses["trainers"], "STREAMPACK_PRODUCERS": addresses["producers"],
            "STREAMPACK_HTTP": addresses["http"],
        }  # fmt: skip
        if watched is None:
            top = f"streampack top -c {self.options.broker}" if len(own_runs.own_runs()) > 1 else "streampack top"
            log.info("status page: %s; in another terminal, '%s' watches this run", addresses["http"], top)
        else:
            log.info("this host uses the broker at %s", addresses["trainers"])
        try:
            command = subprocess.Popen(self.options.command, env=env)
        except OSError as error:
            raise UserError(f"The command {self.options.command[0]!r} cannot be run: {error.strerror}.") from None
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
                if self.relay is not None and env[ENVIRONMENT] != OFF:
                    self.relay.look()
                if watched is not None and time.monotonic() - looked > 1:
                    looked = time.monotonic()
                    now = rendezvous.read(watched) or {}
                    if now.get("epoch") == addresses["epoch"] and "failed" in now:
                        raise DaemonEnded(f"Host 0 has ended: {now['failed']}")
        finally:
            _end(command)
        return exit_code(command.returncode)

    def _check_daemons(self) -> None:
        """Raise DaemonEnded if the broker has ended or a producer has failed."""
        for daemon in self.daemons:
            code = daemon.process.poll()
            if code is not None and (code or daemon.name == "broker"):
                raise DaemonEnded(f"{daemon.failure()}; the command was terminated")

    def _pause(self) -> None:
        """Sleep a little; raise _Stopped if a signal has come or the guard process is gone."""
        time.sleep(POLL_S)
        if self.signals:
            raise _Stopped(self.signals[0])
        if os.getppid() != self.guard:
            raise _Stopped(signal.SIGTERM)

    def _stop(self, good: bool) -> None:
        """End the relay, the producers, then the broker; after a good end, the broker may first serve other hosts.

        Unless the end is ``good``, a second SIGTERM ends the broker at once.
        """
        relay = self.relay.child if self.relay is not None else None
        for daemon in ([relay] if relay is not None else []) + self.daemons[::-1]:
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
            daemon.last_line()  # wait until all of its lines are shown


class _Stopped(Exception):
    """A signal asked to stop before the command was started."""

    def __init__(self, number: int) -> None:
        self.number = number


def _end(command: subprocess.Popen[bytes]) -> None:
    """End the command's process: SIGTERM, then SIGKILL after STOP_S seconds."""
    if command.poll() is None:
        command.terminate()
    try:
        command.wait(STOP_S)
    except subprocess.TimeoutExpired:
        command.kill()
        command.wait()
