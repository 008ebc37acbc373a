"""``streampack produce``: start processes that read, tokenize and send samples, and watch them from the parent.

Each process runs a ``ProducerLoop`` over sources of its own. The broker decides which partitions it reads, so the
number of processes changes the speed and nothing else. The parent adds up the progress that the processes report, twice
a second. It ends all of them when one fails or when it gets SIGTERM.

A process that a signal kills is started again under its name, and the broker lets it
continue at the same place. A process whose parent is gone stops by itself.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType

from streampack.config.daemon_settings import ProducerConfig
from streampack.errors import StreampackError
from streampack.producer.first_rows import refuse_chats
from streampack.producer.loop import ProducerLoop, ProducerProgress, StreamProgress
from streampack.sources import OpenedSource, Tokenizer, open_source, open_tokenizer
from streampack.transport.keys import find_key
from streampack.transport.rendezvous import read_rendezvous
from streampack_services import logs
from streampack_services.daemons.progress import Overall, figures, line, summary, table
from streampack_services.daemons.signals import on_ending_signals
from streampack_services.daemons.systemd import Systemd

log = logging.getLogger("streampack.producer")

NO_TOKENIZERS: Mapping[str, Tokenizer] = MappingProxyType({})
SAY_S = 5.0
"""Seconds between two log lines about the progress."""
OVER_S = 2.0
"""Seconds to wait for the other processes once the broker has told one that the run is over or stopping.

The broker tells all connected processes. A process that was not connected yet would wait for a broker that is gone.
"""
STOP_S = 5.0
"""Seconds that a process has to end."""
RESTARTS_A_MINUTE = 5
"""Restarts within a minute after which the next killed process is an error."""


class ProcessFailed(StreampackError):
    """A producer process has failed; the text is its error, and ``exit_code`` the exit code for the parent."""

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(slots=True)
class _Worker:
    """One producer process. If it is killed, a new process with the same ``name`` continues at the same place.

    ``read``: progress of the current process by stream. ``waiting``: the reason why the process waits, or ``""``.
    """

    name: str
    start: Callable[[str], tuple[BaseProcess, Connection]]
    process: BaseProcess = field(init=False)
    pipe: Connection = field(init=False)
    read: dict[str, StreamProgress] = field(default_factory=dict)
    read_before: list[dict[str, StreamProgress]] = field(default_factory=list)
    """Progress of each killed process, by stream."""
    waiting: str = ""
    said_last: bool = False
    """The process has sent its last message and ends."""

    def __post_init__(self) -> None:
        self.process, self.pipe = self.start(self.name)

    def start_again(self) -> None:
        """Start another process in place of one that was killed."""
        self.pipe.close()
        self.read_before.append(self.read)
        self.read, self.waiting = {}, ""
        self.process, self.pipe = self.start(self.name)


def import_from_here() -> None:
    """Allow imports from the current folder, for a user's tokenizer, also in processes that this one spawns.

    The folder comes last in the search path, so that a user's http.py does not replace the standard library's.
    """
    with contextlib.suppress(OSError):  # the folder may be gone
        here = os.getcwd()
        if here not in sys.path:
            sys.path.append(here)


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Set PYTHONSAFEPATH for processes started in the block: they do not import from the current folder first."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def open_sources(
    config: ProducerConfig, tokenizers: Mapping[str, Tokenizer] = NO_TOKENIZERS
) -> dict[str, OpenedSource]:
    """Open the sources of a producer.yaml, by stream; ``tokenizers``: those to use in place of the configured ones.

    Raises ConfigError or SourceError that names the stream.
    """
    sources = {}
    for name, settings in config.streams.items():
        with _named(name):
            tokenizer = tokenizers.get(name) or open_tokenizer(settings.tokenizer or config.tokenizer)
            sources[name] = open_source(settings, tokenizer)
    return sources


@contextlib.contextmanager
def _named(stream: str) -> Iterator[None]:
    """Put ``streams.NAME:`` in front of the text of a streampack error raised in the block."""
    try:
        yield
    except StreampackError as error:
        raise type(error)(f"streams.{stream}: {error}") from None


def produce(config: ProducerConfig, *, timeout_s: float, level: logs.Level = "info", as_json: bool = False) -> None:
    """Run the producer processes until all samples are delivered, the broker stops, or SIGTERM comes.

    ``timeout_s``: seconds to wait for the broker's first answer. Raises ProcessFailed with the first error of a
    process, and ConfigError or SourceError before any process is started.
    """
    find_key(config.key_file)
    sources = open_sources(config)  # find errors before any process is started
    for name, stream in config.streams.items():
        tokenizer = stream.tokenizer or config.tokenizer
        if tokenizer.name is None and tokenizer.file is None:
            with _named(name):
                refuse_chats(stream, open_tokenizer(tokenizer))
    overall = Overall({name: source.num_shards for name, source in sources.items()})
    endpoint, broker_run = _endpoint(config.broker, timeout_s)
    if broker_run:
        logs.set_up(level, as_json=as_json, run=broker_run)
    log.info(
        "starting %s for the broker at %s", f"{config.processes} process{'es' * (config.processes != 1)}", endpoint
    )
    context = multiprocessing.get_context("spawn")

    child_level = "warning" if level == "info" else level  # the parent logs the progress of all
    set_up_log = functools.partial(logs.set_up, child_level, as_json=as_json, run=broker_run)

    def start(name: str) -> tuple[BaseProcess, Connection]:
        """Start a producer process under this name; return the process and the pipe for its messages."""
        near, far = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(config, endpoint, timeout_s, name, far, set_up_log))
        with _safe_path():
            process.start()
        far.close()
        return process, near

    run = uuid.uuid4().hex
    watch = _Supervisor(overall)
    on_terminal = sys.stderr.isatty() and not as_json
    caught: list[int] = []  # SIGINT still raises KeyboardInterrupt
    with on_ending_signals(caught.append, without=[signal.SIGINT]), _show(on_terminal) as show:
        try:
            for number in range(config.processes):
                watch.workers.append(_Worker(f"{run}-{number}", start))
            watch.until_done(lambda: bool(caught), show, SAY_S / 10 if on_terminal else SAY_S)
        finally:
            watch.systemd.tell(stopping=True, status="stopping")
            _stop(watch.workers)
    watch.add_up(time.monotonic())
    if caught:
        how = "stopped"
    else:
        how = "the broker is stopping" if watch.over is not None and watch.over[0] == "stopped" else "all delivered"
    log.info("%s: %s", how, summary(overall), extra={"figures": figures(overall)})


def _endpoint(broker: str, timeout_s: float) -> tuple[str, str]:
    """Return the broker's address for producers, and its run's name (empty if the address is not from a file)."""
    if not broker.startswith("file://"):
        return broker, ""
    path = Path(broker.removeprefix("file://"))
    if not path.exists():
        log.info("waiting up to %.0f s for the broker's rendezvous file %s", timeout_s, path)
    return read_rendezvous(path, "producers", timeout_s), read_rendezvous(path, "run", timeout_s)


# The parent


@dataclass(slots=True)
class _Supervisor:
    """The parent's view of its processes: reads their messages, restarts killed ones, adds up their progress."""

    overall: Overall
    workers: list[_Worker] = field(default_factory=list)
    restarted_at: list[float] = field(default_factory=list)
    heard: bool = False
    """A process has reported progress; it may still wait for the broker."""
    shown: set[tuple[str, str]] = field(default_factory=set)
    """(stream, reason or error) of the rejected samples that were logged."""
    systemd: Systemd = field(default_factory=Systemd)
    over: tuple[str, float] | None = None
    """(reason, time) of the first process whose work is over, ``done`` or ``stopped``; None before."""

    def until_done(self, must_stop: Callable[[], bool], show: Callable[[Overall], None], every_s: float) -> None:
        """Watch the processes until all have ended well or ``must_stop`` returns True. Raises ProcessFailed.

        ``show`` is called with the progress every ``every_s`` seconds.
        """
        shown_at = time.monotonic()
        self.add_up(shown_at)
        while not must_stop():
            open_ = {worker.pipe: worker for worker in self.workers if not worker.said_last}
            if not open_ or (self.over is not None and time.monotonic() - self.over[1] > OVER_S):
                return
            for pipe in wait(list(open_), timeout=min(every_s, 0.5)):
                assert isinstance(pipe, Connection)
                self._hear(open_[pipe], must_stop)
            self.systemd.tell(ready=self.heard, status=line(self.overall))
            now = time.monotonic()
            if now - shown_at >= every_s:
                shown_at = now
                self.add_up(now)
                show(self.overall)

    def add_up(self, now: float) -> None:
        """Update ``overall`` with the progress of all processes at the time ``now``."""
        parts = [part for worker in self.workers for part in (*worker.read_before, worker.read)]
        self.overall.update(now, parts, [worker.waiting for worker in self.workers], len(self.restarted_at))

    def _hear(self, worker: _Worker, must_stop: Callable[[], bool]) -> None:
        """Receive one message from a process; restart the process if it was killed. Raises ProcessFailed."""
        try:
            kind, *rest = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join(STOP_S)
            if not must_stop():
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
        """Restart a process that a signal has ended. Raises ProcessFailed for any other end and too many restarts."""
        pid, code, now = worker.process.pid, worker.process.exitcode, time.monotonic()
        if code is None or code >= 0:
            raise ProcessFailed(
                f"A producer process exited with code {code} before its work was finished. Find the cause in its log."
            )
        why = "killed, perhaps because memory was short" if code == -signal.SIGKILL else f"ended by signal {-code}"
        if sum(now - then < 60 for then in self.restarted_at) >= RESTARTS_A_MINUTE:
            raise ProcessFailed(
                f"A producer process was {why}, after {RESTARTS_A_MINUTE} restarts within a minute. Find out what "
                f"ends the processes. If memory is short, set fewer processes."
            )
        self.restarted_at.append(now)
        worker.start_again()
        log.warning("a producer process (pid %d) was %s; process %d continues its work", pid, why, worker.process.pid)


def _stop(workers: list[_Worker]) -> None:
    """End all processes: SIGTERM, then SIGKILL after STOP_S seconds."""
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
def _show(on_terminal: bool) -> Iterator[Callable[[Overall], None]]:
    """Yield a function that shows the progress: as a table on a terminal, else as a line in the log."""
    if not on_terminal:
        yield _log_progress()
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        yield lambda overall: live.update(table(overall), refresh=True)


def _log_progress() -> Callable[[Overall], None]:
    """Return a function that logs the progress; unchanged progress only at the 1st, 2nd, 4th, 8th ... call."""
    before: tuple[object, ...] = ()
    unchanged = 0

    def show(overall: Overall) -> None:
        """Log the progress, unless it is unchanged and this call is to be skipped."""
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
    """Run one producer process; send its progress through ``pipe``, and in the end its result or error."""
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to all processes; the parent decides
        signal.signal(number, signal.SIG_IGN)
    set_up_log()
    try:

        def tell(progress: ProducerProgress) -> None:
            """Send the progress to the parent; stop if the parent is gone."""
            try:
                pipe.send(("progress", progress.streams, progress.waiting))
            except OSError:  # the parent is gone
                loop.stop()

        loop = ProducerLoop(endpoint, open_sources(config), timeout_s=timeout_s, on_progress=tell, name=name,
                            key=find_key(config.key_file))  # fmt: skip
        signal.signal(signal.SIGTERM, lambda *_: loop.stop())
        loop.run()
        last: tuple[object, ...] = (loop.over or "left", loop.progress.streams, "")
    except StreampackError as error:
        last = ("failed", str(error), error.exit_code)
    except Exception as error:  # a bug of streampack: log its traceback
        log.exception("a producer process (pid %d) failed; please report this error with the traceback", os.getpid())
        last = ("failed", f"{type(error).__name__}: {error}", 1)
    with contextlib.suppress(OSError):
        pipe.send(last)
    gc.freeze()  # a quick exit, as in __main__
