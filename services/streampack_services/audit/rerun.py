"""A run again, up to one step: a broker, producers and clients in threads of this process, on a copy of its log.

Nothing here is another way of forming a step. A broker that is started again goes to a step by itself, from its log
and the sources: so one is started in this process, on a copy of the log that ends with the step's own record, with
producers that read the files again and a client for every rank of a mesh, which begin at that step. So the run is
what it was when the step was formed, of whichever lineage; its broker may be running, and hears nothing of it.
Every sample that the log names is compared by checksum, every step on the way with what is recorded of it.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from streampack.client import state
from streampack.client.connect import Client, connect
from streampack.config.daemon_settings import BrokerConfig, ProducerConfig, Retain
from streampack.core.protocol.trainer_messages import State
from streampack.errors import DataStall, InternalError, Rejected, SourceError, StreampackError, UserError
from streampack.packs.step import Step
from streampack.producer.loop import ProducerLoop
from streampack_services.broker.service import BrokerService
from streampack_services.daemons.producer import open_sources
from streampack_services.ledger.ledger import Ledger
from streampack_services.ledger.run_history import FeedHistory
from streampack_services.ledger.step_rows import StepRows
from streampack_services.log.segments import copy_records, segment_files
from streampack_services.run.local import endpoints_in, start_thread

LOOK_S = 0.2
COPY_AGAIN = 5
"""Times that the log may be cut while it is copied."""
_NAMES_LOOKED_OVER = 64
"""Steps among which the sample is looked for that has changed."""


@dataclass(frozen=True, slots=True)
class Wanted:
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


@dataclass(slots=True)
class Rerun:
    """A broker, producers and clients in threads, which an ``ExitStack`` ends."""

    config: BrokerConfig
    producers: list[ProducerConfig]
    wanted: Wanted
    ledger: Ledger
    folder: Path
    """The state_dir."""
    mesh: dict[str, int]
    """Its sizes: dp, cp and pp. Of a pipeline the first stage reads, which gets all that others do."""
    timeout_s: float
    """How long nothing may move."""
    clients: list[Client] = field(default_factory=list)
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
        listen = replace(self.config.listen, keys=None, **endpoints_in(str(work)))
        return BrokerService(
            replace(
                self.config, listen=listen, state_dir=str(work / "state"),
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
        name = self.wanted.feed.name
        for dp_rank, cp_rank in product(range(self.mesh["dp"]), range(self.mesh["cp"])):
            client = connect(
                endpoint, feed=name, mesh={**self.mesh, "dp_rank": dp_rank, "cp_rank": cp_rank}, format="numpy",
                readers={"pp": [0]}, prefetch=1, verify=True, variable_lengths=True, key_file="",
            )  # fmt: skip
            stack.callback(client.close)
            self.clients.append(client)
            origin = state.Origin(self.config.run_id, name, client.rules)
            place = State(feed=name, lineage=lineage, step=self.wanted.step, chain=chain, snapshot=None)
            client.load_state_dict(state.save(origin, 0, place))
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
                feed = status.feeds[self.wanted.feed.name]
                samples = sum(row.samples for row in status.streams if row.feed == self.wanted.feed.name)
                now = (feed.totals.steps, samples)
                if now != before:
                    moved, before = time.monotonic(), now
                show(f"step {self.wanted.step:,}: {now[0]:,} steps formed of {samples:,} samples read again")
                if time.monotonic() - moved > self.timeout_s:
                    why = feed.waiting_for.text if feed.waiting_for is not None else "waiting for samples"
                    raise DataStall(f"step {self.wanted.step}: nothing has moved for {self.timeout_s:g} s: {why}")

    def _explained(self, service: BrokerService, error: Rejected) -> StreampackError:
        """Why the broker refused: where a step came out otherwise, the first sample that is another, if one is."""
        if error.code != "diverged":
            return error
        feed, core = self.wanted.feed, service.core
        table, first = core.table, max(core.feeds[feed.name].next_step - 1, 0)
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


def _copy(folder: Path, into: Path, wanted: Wanted) -> None:
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


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Where progress is shown: a line at the bottom of a terminal, else nowhere."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True, highlight=False, markup=False).status("reading the log") as status:
        yield status.update
