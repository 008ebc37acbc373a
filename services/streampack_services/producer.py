"""``streampack produce``: N processes that read, tokenize and send, and one that watches over them.

Each process is a ``ProducerLoop`` over sources of its own; which partitions it reads is the
broker's business, so N changes speed and nothing else. The parent only adds up what they tell it,
twice a second, and ends all of them when one fails or when it is told to stop. A process whose
parent is gone stops by itself.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from streampack.client import read_rendezvous
from streampack.config import ProducerConfig
from streampack.errors import StreampackError
from streampack.producer import ProducerLoop, Progress
from streampack.sources import Source, open_source, open_tokenizer
from streampack_services import logs

log = logging.getLogger("streampack.producer")

SAY_S = 5.0
STOP_S = 5.0
"""What processes have to say goodbye."""
Sent = dict[str, tuple[int, int]]


class ProcessFailed(StreampackError):
    """A producer process ended with an error, which is the message; with its exit code."""

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    pipe: Connection
    sent: Sent = field(default_factory=dict)
    waiting: str = ""
    said_last: bool = False
    broker_stopped: bool = False


def open_sources(config: ProducerConfig) -> dict[str, Source]:
    """The sources of a configuration, by stream. Raises ConfigError or SourceError naming the stream."""
    sources = {}
    for name, settings in config.streams.items():
        try:
            sources[name] = open_source(settings, open_tokenizer(settings.tokenizer or config.tokenizer))
        except StreampackError as error:
            raise type(error)(f"streams.{name}: {error}") from None
    return sources


def produce(config: ProducerConfig, *, timeout_s: float, level: logs.Level = "info", as_json: bool = False) -> None:
    """Run the processes until all is delivered or SIGTERM. Raises ProcessFailed with the first error of any."""
    open_sources(config)  # what is missing is said once, before anything is started
    endpoint = _endpoint(config.broker, timeout_s)
    log.info("%d processes for the broker at %s", config.processes, endpoint)
    context = multiprocessing.get_context("spawn")
    workers = []
    on_terminal = sys.stderr.isatty() and not as_json
    with _asked_to_stop() as asked, _show(on_terminal) as show:
        try:
            for number in range(config.processes):
                near, far = context.Pipe(duplex=False)
                arguments = (config, endpoint, timeout_s, far, level, as_json)
                process = context.Process(target=_work, args=arguments, name=f"streampack-produce-{number}")
                process.start()
                far.close()
                workers.append(_Worker(process, near))
            _watch(workers, asked, show, SAY_S / 10 if on_terminal else SAY_S)
        finally:
            _stop(workers)
    samples, tokens = map(sum, zip((0, 0), *_add_up(workers).values(), strict=True))
    if asked():
        how = "stopped"
    else:
        how = "the broker is stopping" if any(worker.broker_stopped for worker in workers) else "all delivered"
    log.info("%s: read %d samples, %d tokens", how, samples, tokens)


def _endpoint(broker: str, timeout_s: float) -> str:
    if not broker.startswith("file://"):
        return broker
    path = Path(broker.removeprefix("file://"))
    if not path.exists():
        log.info("waiting up to %.0f s for the broker's rendezvous file %s", timeout_s, path)
    return read_rendezvous(path, "producers", timeout_s)


# The parent


def _watch(workers: list[_Worker], asked: Callable[[], bool], show: Callable[[str], None], every_s: float) -> None:
    """Until every process has ended well, or a stop was asked for. Raises ProcessFailed."""
    said, before = time.monotonic(), 0
    while not asked():
        open_ = {worker.pipe: worker for worker in workers if not worker.said_last}
        if not open_:
            return
        for pipe in wait(list(open_), timeout=0.5):
            assert isinstance(pipe, Connection)
            _hear(open_[pipe])
        now = time.monotonic()
        if now - said > every_s:
            sent = _add_up(workers)
            tokens = sum(tokens for _, tokens in sent.values())
            show(progress_line(sent, (tokens - before) / (now - said), [worker.waiting for worker in workers]))
            said, before = now, tokens


def _hear(worker: _Worker) -> None:
    try:
        kind, *rest = worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join(STOP_S)
        code = worker.process.exitcode
        hint = ": killed, perhaps for its memory" if code == -signal.SIGKILL else ""
        raise ProcessFailed(f"a producer process ended with {code}{hint}, expected it to finish") from None
    if kind == "failed":
        raise ProcessFailed(*rest)
    worker.sent, worker.waiting = rest
    worker.said_last = kind != "progress"
    worker.broker_stopped = kind == "stopped"


def _add_up(workers: list[_Worker]) -> Sent:
    total: Sent = {}
    for worker in workers:
        for stream, (samples, tokens) in worker.sent.items():
            before = total.get(stream, (0, 0))
            total[stream] = (before[0] + samples, before[1] + tokens)
    return total


def progress_line(sent: Sent, tokens_per_s: float, waiting: list[str]) -> str:
    """``web 1200 samples 48000 tokens; 9600 tokens/s; 2 of 4 wait for credit: ...``, for a person."""
    parts = [f"{stream} {samples} samples {tokens} tokens" for stream, (samples, tokens) in sent.items()]
    line = "; ".join([", ".join(parts) or "nothing read yet", f"{tokens_per_s:.0f} tokens/s"])
    reasons = [reason for reason in waiting if reason]
    if not reasons:
        return line
    count = f"{len(reasons)} of {len(waiting)} wait" if len(waiting) > 1 else "waits"
    return f"{line}; {count} for {max(set(reasons), key=reasons.count)}"


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
def _show(on_terminal: bool) -> Iterator[Callable[[str], None]]:
    """Where the progress line goes: the bottom of the terminal, else the log."""
    if not on_terminal:
        yield lambda line: log.info("%s", line)
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status("starting") as status:
        yield lambda line: status.update(Text(line))  # plain: streams may have brackets in their names


# A process


def _work(
    config: ProducerConfig, endpoint: str, timeout_s: float, pipe: Connection, level: logs.Level, as_json: bool
) -> None:
    """The body of a process: says how it goes, and at last how it went."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    logs.set_up("warning" if level == "info" else level, as_json=as_json)  # the parent says what they all do
    try:

        def tell(progress: Progress) -> None:
            try:
                pipe.send(("progress", progress.sent, progress.waiting))
            except OSError:  # nobody is left to tell
                loop.stop()

        loop = ProducerLoop(endpoint, open_sources(config), timeout_s=timeout_s, on_progress=tell)
        signal.signal(signal.SIGTERM, lambda *_: loop.stop())
        loop.run()
        last: tuple[object, ...] = ("stopped" if loop.broker_stopped else "done", loop.progress.sent, "")
    except StreampackError as error:
        last = ("failed", str(error), error.exit_code)
    except Exception as error:  # our bug: its traceback is wanted
        log.exception("a producer process (pid %d) failed; please report this", os.getpid())
        last = ("failed", f"{type(error).__name__}: {error}", 1)
    with contextlib.suppress(OSError):
        pipe.send(last)
