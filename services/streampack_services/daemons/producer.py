"""``streampack produce``: N processes that read, tokenize and send, and one that watches over them.

Each process is a ``ProducerLoop`` over sources of its own; which partitions it reads is the
broker's business, so N changes speed and nothing else. The parent only adds up what they tell it,
twice a second, and ends all of them when one fails or when it is told to stop. One that a signal
kills (for its memory, perhaps) is started again, under its name: the broker has it go on where the
dead one was. A process whose parent is gone stops by itself.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import multiprocessing
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from streampack.config.daemon_settings import ProducerConfig
from streampack.errors import StreampackError
from streampack.producer.first_rows import refuse_chats
from streampack.producer.loop import ProducerLoop, ProducerProgress, StreamProgress
from streampack.sources import OpenedSource, open_source, open_tokenizer
from streampack.transport.keys import find_key
from streampack.transport.rendezvous import read_rendezvous
from streampack_services import logs
from streampack_services.daemons.progress import Overall, figures, line, summary, table
from streampack_services.daemons.systemd import Systemd

log = logging.getLogger("streampack.producer")

SAY_S = 5.0
OVER_S = 2.0
"""What the broker tells one process it tells all; one that was not there yet would wait for a broker that is gone."""
STOP_S = 5.0
"""What processes have to say goodbye."""
RESTARTS_A_MINUTE = 5
"""Processes killed more often than this are given up."""


class ProcessFailed(StreampackError):
    """A producer process ended with an error, which is the message; with its exit code."""

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(slots=True)
class _Worker:
    """A place for one process after another; each says hello under the same ``name``, and so goes on at once."""

    name: str
    start: Callable[[str], tuple[BaseProcess, Connection]]
    process: BaseProcess = field(init=False)
    pipe: Connection = field(init=False)
    read: dict[str, StreamProgress] = field(default_factory=dict)
    read_before: list[dict[str, StreamProgress]] = field(default_factory=list)
    """What each killed one had read."""
    waiting: str = ""
    said_last: bool = False

    def __post_init__(self) -> None:
        self.process, self.pipe = self.start(self.name)

    def start_again(self) -> None:
        """Another process in the place of one that was killed."""
        self.pipe.close()
        self.read_before.append(self.read)
        self.read, self.waiting = {}, ""
        self.process, self.pipe = self.start(self.name)


def import_from_here() -> None:
    """Let a tokenizer be a module of the current folder, also in processes that this one spawns.

    The folder comes last in the search path: a user's http.py does not replace the standard library's.
    """
    with contextlib.suppress(OSError):  # a folder that is gone has no modules
        here = os.getcwd()
        if here not in sys.path:
            sys.path.append(here)


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Processes started within do not have the current folder before the standard library."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def open_sources(config: ProducerConfig) -> dict[str, OpenedSource]:
    """The sources of a configuration, by stream. Raises ConfigError or SourceError naming the stream."""
    sources = {}
    for name, settings in config.streams.items():
        with _named(name):
            sources[name] = open_source(settings, open_tokenizer(settings.tokenizer or config.tokenizer))
    return sources


@contextlib.contextmanager
def _named(stream: str) -> Iterator[None]:
    """Errors within name the stream."""
    try:
        yield
    except StreampackError as error:
        raise type(error)(f"streams.{stream}: {error}") from None


def produce(config: ProducerConfig, *, timeout_s: float, level: logs.Level = "info", as_json: bool = False) -> None:
    """Run the processes until all is delivered or SIGTERM. Raises ProcessFailed with the first error of any."""
    find_key(config.key_file)
    sources = open_sources(config)  # what is missing is said once, before anything is started
    for name, stream in config.streams.items():
        tokenizer = stream.tokenizer or config.tokenizer
        if tokenizer.name is None and tokenizer.file is None:
            with _named(name):
                refuse_chats(stream, open_tokenizer(tokenizer))
    overall = Overall({name: source.num_shards for name, source in sources.items()})
    endpoint, broker_run = _endpoint(config.broker, timeout_s)
    if broker_run:
        logs.set_up(level, as_json=as_json, run=broker_run)
    log.info("%d processes for the broker at %s", config.processes, endpoint)
    context = multiprocessing.get_context("spawn")

    theirs = "warning" if level == "info" else level  # the parent says what they all do
    set_up_log = functools.partial(logs.set_up, theirs, as_json=as_json, run=broker_run)

    def start(name: str) -> tuple[BaseProcess, Connection]:
        near, far = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(config, endpoint, timeout_s, name, far, set_up_log))
        with _safe_path():
            process.start()
        far.close()
        return process, near

    run = uuid.uuid4().hex
    watch = _Supervisor(overall)
    on_terminal = sys.stderr.isatty() and not as_json
    with _asked_to_stop() as asked, _show(on_terminal) as show:
        try:
            for number in range(config.processes):
                watch.workers.append(_Worker(f"{run}-{number}", start))
            watch.until_done(asked, show, SAY_S / 10 if on_terminal else SAY_S)
        finally:
            watch.systemd.tell(stopping=True, status="stopping")
            _stop(watch.workers)
    watch.add_up(time.monotonic())
    if asked():
        how = "stopped"
    else:
        how = "the broker is stopping" if watch.over is not None and watch.over[0] == "stopped" else "all delivered"
    log.info("%s: %s", how, summary(overall), extra={"figures": figures(overall)})


def _endpoint(broker: str, timeout_s: float) -> tuple[str, str]:
    """The address, and the run's name where it is known."""
    if not broker.startswith("file://"):
        return broker, ""
    path = Path(broker.removeprefix("file://"))
    if not path.exists():
        log.info("waiting up to %.0f s for the broker's rendezvous file %s", timeout_s, path)
    return read_rendezvous(path, "producers", timeout_s), read_rendezvous(path, "run", timeout_s)


# The parent


@dataclass(slots=True)
class _Supervisor:
    """What the parent does while its processes work."""

    overall: Overall
    workers: list[_Worker] = field(default_factory=list)
    restarted_at: list[float] = field(default_factory=list)
    heard: bool = False
    """A process runs: it may still wait for the broker."""
    shown: set[tuple[str, str]] = field(default_factory=set)
    """Of which rejected samples a line was logged: (stream, reason or error)."""
    systemd: Systemd = field(default_factory=Systemd)
    over: tuple[str, float] | None = None
    """What the first process that the broker sent away was told, and when."""

    def until_done(self, asked: Callable[[], bool], show: Callable[[Overall], None], every_s: float) -> None:
        """Until every process has ended well, or a stop was asked for. Raises ProcessFailed."""
        said = time.monotonic()
        self.add_up(said)
        while not asked():
            open_ = {worker.pipe: worker for worker in self.workers if not worker.said_last}
            if not open_ or (self.over is not None and time.monotonic() - self.over[1] > OVER_S):
                return
            for pipe in wait(list(open_), timeout=min(every_s, 0.5)):
                assert isinstance(pipe, Connection)
                self._hear(open_[pipe], asked)
            self.systemd.tell(ready=self.heard, status=line(self.overall))
            now = time.monotonic()
            if now - said >= every_s:
                said = now
                self.add_up(now)
                show(self.overall)

    def add_up(self, now: float) -> None:
        """Tell ``overall`` how it stands."""
        parts = [part for worker in self.workers for part in (*worker.read_before, worker.read)]
        self.overall.update(now, parts, [worker.waiting for worker in self.workers], len(self.restarted_at))

    def _hear(self, worker: _Worker, asked: Callable[[], bool]) -> None:
        try:
            kind, *rest = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join(STOP_S)
            if not asked():
                self._restart(worker)
            return
        if kind == "failed":
            raise ProcessFailed(*rest)
        self.heard = True
        worker.read, worker.waiting = rest
        for name, stream in worker.read.items():
            for key, text in stream.examples.items():
                if (name, key) not in self.shown:
                    self.shown.add((name, key))
                    log.warning("%s", text, extra={"about": {"stream": name}})
        worker.said_last = kind != "progress"
        if kind in ("done", "stopped"):
            self.over = self.over or (kind, time.monotonic())

    def _restart(self, worker: _Worker) -> None:
        """In the place of one that a signal ended. Raises ProcessFailed for any other end, or too many of them."""
        pid, code, now = worker.process.pid, worker.process.exitcode, time.monotonic()
        why = "killed, perhaps for its memory" if code == -signal.SIGKILL else f"ended with {code}"
        if code is None or code >= 0:
            raise ProcessFailed(f"a producer process ended with {code}, expected it to finish")
        if sum(now - then < 60 for then in self.restarted_at) >= RESTARTS_A_MINUTE:
            raise ProcessFailed(
                f"a producer process was {why}, after {RESTARTS_A_MINUTE} restarts within a minute: find out what "
                f"ends them: for memory, set fewer processes"
            )
        self.restarted_at.append(now)
        worker.start_again()
        log.warning("a producer process (pid %d) was %s; process %d goes on where it was", pid, why, worker.process.pid)


def _stop(workers: list[_Worker]) -> None:
    for worker in workers:
        if worker.process.is_alive() and not worker.said_last:
            worker.process.terminate()
    deadline = time.monotonic() + STOP_S
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.pipe.close()


@contextlib.contextmanager
def _asked_to_stop() -> Iterator[Callable[[], bool]]:
    """SIGTERM asks once; SIGINT is left to raise KeyboardInterrupt."""
    asked = False

    def on_signal(_: int, __: FrameType | None) -> None:
        nonlocal asked
        asked = True

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _show(on_terminal: bool) -> Iterator[Callable[[Overall], None]]:
    """Where the progress goes: a table at the bottom of the terminal, else a line in the log."""
    if not on_terminal:
        yield _log_progress()
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        yield lambda overall: live.update(table(overall), refresh=True)


def _log_progress() -> Callable[[Overall], None]:
    """A line in the log each time, but while nothing changes after twice as long each time: a wait may take days."""
    before: tuple[object, ...] = ()
    unchanged = 0

    def show(overall: Overall) -> None:
        nonlocal before, unchanged
        now = (overall.samples, overall.restarts, *sorted(overall.waiting))
        unchanged, before = (unchanged + 1 if now == before else 0), now
        if unchanged & (unchanged - 1) == 0:  # 0, 1, 2, 4, 8
            log.info("%s", line(overall), extra={"figures": figures(overall)})

    return show


# A process


def _work(
    config: ProducerConfig, endpoint: str, timeout_s: float, name: str, pipe: Connection, set_up_log: Callable[[], None]
) -> None:
    """The body of a process: says how it goes, and at last how it went."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    set_up_log()
    try:

        def tell(progress: ProducerProgress) -> None:
            try:
                pipe.send(("progress", progress.streams, progress.waiting))
            except OSError:  # nobody is left to tell
                loop.stop()

        loop = ProducerLoop(endpoint, open_sources(config), timeout_s=timeout_s, on_progress=tell, name=name,
                            key=find_key(config.key_file))  # fmt: skip
        signal.signal(signal.SIGTERM, lambda *_: loop.stop())
        loop.run()
        last: tuple[object, ...] = (loop.over or "left", loop.progress.streams, "")
    except StreampackError as error:
        last = ("failed", str(error), error.exit_code)
    except Exception as error:  # our bug: its traceback is wanted
        log.exception("a producer process (pid %d) failed; please report this", os.getpid())
        last = ("failed", f"{type(error).__name__}: {error}", 1)
    with contextlib.suppress(OSError):
        pipe.send(last)
    gc.freeze()  # as __main__ does
