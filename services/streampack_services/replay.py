"""``streampack replay``: one step of a run again, bit for bit, and all that each rank got of it.

Nothing here is another way of forming a step. A broker that is started again goes to a step by itself, from its log
and the sources: so one is started in this process, on a copy of the log that ends with the step's own record, with
producers that read the files again and a client for every rank of a mesh, which begin at that step. So the run is
what it was when the step was formed, of whichever lineage; its broker may be running, and hears nothing of it.
Every sample that the log names is compared by checksum, every step on the way with what is recorded of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from msgspec.structs import replace

import streampack
from streampack import checkpoint
from streampack.config import BrokerConfig, ProducerConfig, Retain
from streampack.config_files import read_broker, read_producer
from streampack.core.messages import State
from streampack.errors import DataStall, InternalError, Rejected, SourceError, StreampackError, UserError
from streampack.packs import Step
from streampack.producer import ProducerLoop
from streampack_services import audit
from streampack_services.broker import BrokerService
from streampack_services.ledger import Ledger
from streampack_services.local import endpoints_in, start_thread
from streampack_services.producer import open_sources
from streampack_services.run_history import FeedHistory
from streampack_services.segments import copy_records, segment_files
from streampack_services.step_rows import StepRows

Tree = dict[str, Any]
LOOK_S = 0.2
COPY_AGAIN = 5
"""Times that the log may be cut while it is copied."""
_NAMES_LOOKED_OVER = 64
"""Steps among which the sample is looked for that has changed."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What ``streampack replay`` takes; ``timeout_s``: how long nothing may move."""

    step: int
    config: Path
    producers: list[Path]
    feed: str | None = None
    lineage: int | None = None
    state_dir: Path | None = None
    dp: int = 1
    cp: int = 1
    out: Path | None = None
    timeout_s: float = 60.0


def replay(options: ReplayOptions) -> Tree:
    """Form the step again and say how it came out; ``equal`` is whether digest and chain are the recorded ones.

    Raises UserError for what cannot be replayed, SourceError where the data are not what they were, DataStall where
    nothing moves, and what brokers, producers and clients raise.
    """
    began = time.monotonic()
    config = read_broker(options.config)
    producers = [read_producer(path) for path in options.producers]
    folder = audit.state_folder(options.state_dir, None if options.state_dir is not None else options.config)
    if options.out is not None and not options.out.absolute().parent.is_dir():
        raise UserError(f"--out: {options.out}: got a folder that is not there, expected a file in one that is")
    with _quiet(), audit.open_ledger(folder) as ledger, contextlib.ExitStack() as stack:
        wanted = _wanted(ledger, options)
        work = Path(stack.enter_context(_folder()))
        again = _Again(config, producers, options, wanted, ledger, folder)
        ranks = again.steps(stack, work)
        found = _compared(wanted, ranks) | {"out": None, "seconds": 0.0}
        if options.out is not None:
            _save(options.out, wanted, ranks)
            found["out"] = str(options.out)
    return found | {"seconds": round(time.monotonic() - began, 3)}


# What is wanted


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The step as it is recorded."""

    run: str
    feed: FeedHistory
    rows: StepRows
    streams: list[str]
    """By their number then."""
    effective: bool
    skipped: bool

    @property
    def step(self) -> int:
        return self.rows.step


def _wanted(ledger: Ledger, options: ReplayOptions) -> _Wanted:
    feed = audit.feed_of(ledger, options.feed)
    if options.lineage is None:
        rows = audit.recorded(ledger, feed, options.step)
    else:
        found = ledger.step(feed.name, options.step, options.lineage)
        if found is None:
            audit.raise_if_damaged(ledger, "steps")
            known = ledger.lineages_of(feed.name, options.step)
            raise UserError(
                f"got --lineage {options.lineage}, expected one in which step {options.step} of feed {feed.name!r} is "
                f"recorded: {', '.join(map(str, known)) or 'there is none'}"
            )
        rows = found
    effective = feed.effective(rows.step) == rows.lineage
    streams = [stream.name for stream in feed.rules_at(rows.step, rows.lsn).streams]
    return _Wanted(ledger.state.run, feed, rows, streams, effective, audit.is_skipped(feed, rows.step))


def _copy(folder: Path, into: Path, wanted: _Wanted) -> None:
    """The log up to the step's own record; all of it where that is not there any more and only the ledger has it."""
    for _ in range(COPY_AGAIN):
        is_gone = wanted.rows.lsn < segment_files(folder)[0][0]
        if is_gone and not wanted.effective:
            raise UserError(
                f"got step {wanted.step} of lineage {wanted.rows.lineage}, which counts no more, expected a step that "
                f"the log still has"
            )
        into.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):  # its broker has cut it meanwhile
            copy_records(folder, into, sys.maxsize if is_gone else wanted.rows.lsn + 1)
            return
        shutil.rmtree(into)
    raise DataStall(f"{folder}: its broker cuts the log faster than it can be copied: try again")


# The run again


@dataclass(slots=True)
class _Again:
    """A broker, producers and clients in threads, which an ``ExitStack`` ends."""

    config: BrokerConfig
    producers: list[ProducerConfig]
    options: ReplayOptions
    wanted: _Wanted
    ledger: Ledger
    folder: Path
    clients: list[streampack.Client] = field(default_factory=list)
    failure: StreampackError | None = None

    def steps(self, stack: contextlib.ExitStack, work: Path) -> list[Step]:
        """The step as each rank gets it, dp by dp, cp by cp."""
        step, name = self.wanted.step, self.wanted.feed.name
        _copy(self.folder, work / "state", self.wanted)
        service = self._broker(work)
        stack.callback(service.close)
        history = service.core.feeds[name].history
        if history.oldest_step > step:
            raise UserError(
                f"got step {step} of feed {name!r}, expected {self._oldest(work / 'whole')} or later: the log has lost "
                f"the samples of those before, or the order in which they came"
            )
        chain = (history.chain_after(step - 1) if step else None) or b""
        history.revisit(step)
        sources = self._sources()
        start_thread(stack, self._told(service.run), lambda: _stop(service), "streampack-broker")
        self._connect(stack, service.endpoints["trainers"], chain, history.lineage)
        iterators = [client.steps() for client in self.clients]
        if sources:
            loop = ProducerLoop(service.endpoints["producers"], sources)
            start_thread(stack, self._told(loop.run), loop.stop, "streampack-producer")
        over = threading.Event()
        start_thread(stack, self._told(lambda: self._watch(service, over)), over.set, "streampack-watch")
        try:
            found = [next(iterator, None) for iterator in iterators]
        except Rejected as error:
            raise self._explained(service, error) from None
        steps = [each for each in found if each is not None and each.index == step]
        if len(steps) < len(iterators):
            raise InternalError(f"got {len(steps)} of {len(iterators)} ranks' step {step}, expected all")
        return steps

    def _oldest(self, work: Path) -> int:
        """The first step that can be formed again: the log up to one that cannot does not tell."""
        work.mkdir()
        (work / "state").mkdir(mode=0o700)
        copy_records(self.folder, work / "state", sys.maxsize)
        with contextlib.closing(self._broker(work)) as service:
            return service.core.feeds[self.wanted.feed.name].history.oldest_step

    def _broker(self, work: Path) -> BrokerService:
        sides = endpoints_in(str(work))
        return BrokerService(
            replace(
                self.config, listen=replace(self.config.listen, **sides), state_dir=str(work / "state"),
                durability="process", steps_ahead=1, retain=Retain(bytes=1 << 61), rendezvous=None,
            )
        )  # fmt: skip

    def _sources(self) -> Mapping[str, Any]:
        """Of the streams that the feed reads. Raises UserError for one that no producer.yaml names."""
        known = self.wanted.feed.rules_at(self.wanted.step, self.wanted.rows.lsn).streams
        needed = {stream.name for stream in known if not stream.pushed and stream.weight}
        sources: dict[str, Any] = {}
        for config in self.producers:
            mine = {name: stream for name, stream in config.streams.items() if name in needed - set(sources)}
            if mine:
                sources |= open_sources(replace(config, streams=mine))
        missing = sorted(needed - set(sources))
        if missing:
            raise UserError(
                f"got no producer.yaml with stream {', '.join(missing)}, expected its source, to read it again: name "
                f"one with -p"
            )
        return sources

    def _connect(self, stack: contextlib.ExitStack, endpoint: str, chain: bytes, lineage: int) -> None:
        """A client for each rank, that begins at the step."""
        name, sizes = self.wanted.feed.name, {"dp": self.options.dp, "cp": self.options.cp}
        for dp_rank in range(self.options.dp):
            for cp_rank in range(self.options.cp):
                client = streampack.connect(
                    endpoint, feed=name, mesh={**sizes, "dp_rank": dp_rank, "cp_rank": cp_rank}, format="numpy",
                    prefetch=1, verify=True,
                )  # fmt: skip
                stack.callback(client.close)
                self.clients.append(client)
                origin = checkpoint.Origin(self.config.run_id, name, client.rules)
                place = State(feed=name, lineage=lineage, step=self.wanted.step, chain=chain, snapshot=None)
                client.load_state_dict(checkpoint.save(origin, 0, place, 0))
                if self.failure is not None:
                    raise self.failure

    def _told(self, body: Callable[[], None]) -> Callable[[], None]:
        """The same, with what it raises raised where the steps are waited for."""

        def run() -> None:
            try:
                body()
            except StreampackError as error:
                self._fail(error)
            except Exception as error:
                bug = InternalError(f"a thread of the replay failed: {error!r}")
                bug.__cause__ = error
                self._fail(bug)

        return run

    def _fail(self, error: StreampackError) -> None:
        self.failure = self.failure or error
        for client in self.clients:
            client.fail(self.failure)

    def _watch(self, service: BrokerService, over: threading.Event) -> None:
        """Show how it goes, and give up when nothing moves any more."""
        moved, before = time.monotonic(), (0, 0)
        with _progress() as show:
            while not over.wait(LOOK_S):
                status = service.snapshot
                feed = status["feeds"][self.wanted.feed.name]
                samples = sum(row["samples"] for row in status["streams"] if row["feed"] == self.wanted.feed.name)
                now = (feed["totals"]["steps"], samples)
                if now != before:
                    moved, before = time.monotonic(), now
                show(f"step {self.wanted.step:,}: {now[0]:,} steps formed of {samples:,} samples read again")
                if time.monotonic() - moved > self.options.timeout_s:
                    why = feed["waiting_for"] or {"reason": "stream", "detail": "nothing is known"}
                    raise DataStall(
                        f"step {self.wanted.step}: nothing has moved for {self.options.timeout_s:g} s: waiting for "
                        f"{why['reason']}: {why['detail']}"
                    )

    def _explained(self, service: BrokerService, error: Rejected) -> StreampackError:
        """Why the broker refused: where a step came out otherwise, the first sample that is another, if one is."""
        if error.code != "diverged":
            return error
        feed, core = self.wanted.feed, service.core
        table, first = core.table, max(core.feeds[feed.name].former.next_step - 1, 0)
        columns = (table.stream, table.index, table.part, table.crc)
        read = {tuple(key): crc for *key, crc in zip(*(column.tolist() for column in columns), strict=True)}
        for step in range(first, first + _NAMES_LOOKED_OVER):
            recorded = self.ledger.step(feed.name, step, feed.effective(step))
            for row in recorded.rows if recorded is not None else ():
                crc = read.get((int(row["stream"]), int(row["index"]), int(row["part"])))
                if recorded is not None and crc not in (None, int(row["crc"])):
                    stream = feed.stream_name(int(row["stream"]), step, recorded.lsn)
                    return SourceError(
                        f"{stream}:{row['index']}: got a sample of crc32c {crc:08x}, expected {row['crc']:08x}, which "
                        f"step {step} had: its file or tokenizer has changed: put it back"
                    )
        return error


def _stop(service: BrokerService) -> None:
    service.drain()
    service.drain()


# What comes of it


def _compared(wanted: _Wanted, ranks: list[Step]) -> Tree:
    rows, said = wanted.rows, {(step.digest, step.chain) for step in ranks}
    recorded = (rows.digest.hex(), rows.chain.hex())
    got = next((each for each in said if each != recorded), recorded)
    packs = {pack.pack: pack for step in ranks for pack in step}
    return {
        "run": wanted.run,
        "feed": wanted.feed.name,
        "step": rows.step,
        "lineage": rows.lineage,
        "counts": wanted.effective,
        "skipped": wanted.skipped,
        "equal": got == recorded,
        "digest": got[0],
        "chain": got[1],
        "recorded": {"digest": recorded[0], "chain": recorded[1]},
        "num_loss_tokens": ranks[0].num_loss_tokens,
        "num_samples": ranks[0].num_samples,
        "num_tokens": rows.num_tokens,
        "mesh": {"dp": len({pack.dp_rank for pack in packs.values()}), "cp": ranks[0][0].cp},
        "packs": [
            {
                "pack": number,
                "dp_rank": pack.dp_rank,
                "micro_batch": pack.micro_batch,
                "num_samples": pack.num_samples,
                "num_tokens": int(np.diff(pack.cu_seqlens)[: pack.num_samples].sum()),
                "num_loss_tokens": pack.num_loss_tokens,
            }
            for number, pack in sorted(packs.items())
        ],
    }


def _save(path: Path, wanted: _Wanted, ranks: list[Step]) -> None:
    """Every rank's packs as ``dp0.cp0.0.input_ids``: rank, micro-batch, a pack's attribute or declared field."""
    arrays: dict[str, Any] = {
        "step": wanted.step, "lineage": wanted.rows.lineage, "digest": ranks[0].digest, "chain": ranks[0].chain,
        "num_loss_tokens": ranks[0].num_loss_tokens, "num_samples": ranks[0].num_samples, "streams": wanted.streams,
    }  # fmt: skip
    for step in ranks:
        for pack in step:
            prefix = f"dp{pack.dp_rank}.cp{pack.cp_rank}.{pack.micro_batch}"
            arrays |= {f"{prefix}.{key}": np.asarray(value) for key, value in pack.items()}
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("wb") as file:
            np.savez_compressed(file, **arrays)
        part.replace(path)
    except OSError as error:
        raise UserError(f"--out: {path}: cannot be written: {error.strerror}: choose another file") from None
    finally:
        part.unlink(missing_ok=True)


# Around it


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """A folder of its own, which goes in any case; SIGTERM ends what is in it as Ctrl-C does."""

    def end(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, end) if main else None
    folder = tempfile.mkdtemp(prefix="streampack-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if main:
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What threads of a broker log is of no interest here: errors are raised."""
    logger = logging.getLogger("streampack")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Where progress is shown: a line at the bottom of a terminal, else nowhere."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True, highlight=False, markup=False).status("reading the log") as status:
        yield status.update
