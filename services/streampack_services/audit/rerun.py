"""Run a broker, producers and clients in threads of this process, on a copy of a run's log, to form one step again.

A restarted broker forms recorded steps again from its log and the sources. So this module copies the log up to the
step's own record, and starts a broker on the copy. Producers read the files again, and a client for every rank of a
mesh begins at that step. The run is then as it was when the step was formed, in any lineage. The original broker may
still run and is not disturbed.

The broker compares every sample by checksum, and every step with its record.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from streampack.client import state
from streampack.client.connect import Client, connect
from streampack.config.daemon_settings import BrokerConfig, ProducerConfig
from streampack.config.service_settings import Retain
from streampack.core.model.mesh import Mesh
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
from streampack_services.terminal import progress_line

LOOK_S = 0.2
"""Seconds between two looks at the broker's progress."""
COPY_AGAIN = 5
"""Attempts to copy the log while its broker cuts it."""
_STEPS_TO_SEARCH = 64
"""Steps to search for a sample that has changed."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The recorded step to form again. ``effective``: True if no later lineage has replaced the step."""

    run: str
    feed: FeedHistory
    rows: StepRows
    streams: list[str]
    """Names of the streams, by their number at this step."""
    effective: bool
    skipped: bool

    @property
    def step(self) -> int:
        return self.rows.step


@dataclass(slots=True)
class Rerun:
    """The broker, producers and clients that form one step again, as threads of this process."""

    config: BrokerConfig
    producers: list[ProducerConfig]
    wanted: Wanted
    ledger: Ledger
    folder: Path
    """The state_dir."""
    mesh: dict[str, int]
    """Sizes of dp, cp and pp. Only the first pipeline stage reads, because it gets all data of the others."""
    timeout_s: float
    """Seconds without progress after which to give up."""
    clients: list[Client] = field(default_factory=list)
    failure: StreampackError | None = None

    def steps(self, stack: contextlib.ExitStack, work: Path) -> list[Step]:
        """Run the broker until every rank has the step; return the step of each rank, ordered by (dp, cp).

        Raises UserError if the log cannot form the step again, SourceError if a sample has changed, DataStall after
        ``timeout_s`` seconds without progress.
        """
        step, name = self.wanted.step, self.wanted.feed.name
        _copy(self.folder, work / "state", self.wanted)
        service = self._broker(work)
        stack.callback(service.close)
        history = service.core.feeds[name].history
        if history.oldest_step > step:
            raise UserError(
                f"Step {step} of feed {name!r} cannot be formed again, because the log no longer has the samples "
                f"of earlier steps. Pass step {self._oldest(work / 'whole')} or a later step."
            )
        chain = (history.chain_after(step - 1) if step else None) or b""
        history.revisit(step)
        sources = self._sources()
        start_thread(stack, self._reporting(service.run), lambda: _stop(service), "streampack-broker")
        self._connect(stack, service.endpoints["trainers"], chain, history.lineage)
        iterators = [client.steps() for client in self.clients]
        if sources:
            loop = ProducerLoop(service.endpoints["producers"], sources)
            start_thread(stack, self._reporting(loop.run), loop.stop, "streampack-producer")
        over = threading.Event()
        start_thread(stack, self._reporting(lambda: self._watch(service, over)), over.set, "streampack-watch")
        try:
            handed_out = [next(iterator, None) for iterator in iterators]
        except Rejected as error:
            raise self._explain(service, error) from None
        steps = [other for other in handed_out if other is not None and other.index == step]
        if len(steps) < len(iterators):
            raise InternalError(f"got {len(steps)} of {len(iterators)} ranks' step {step}, expected all")
        return steps

    def _oldest(self, work: Path) -> int:
        """Return the first step that the log can form again; ``work``: a folder for a copy of the log."""
        work.mkdir()
        (work / "state").mkdir(mode=0o700)
        copy_records(self.folder, work / "state", sys.maxsize)
        with contextlib.closing(self._broker(work)) as service:
            return service.core.feeds[self.wanted.feed.name].history.oldest_step

    def _broker(self, work: Path) -> BrokerService:
        """Return a broker on the copy of the log in ``work``, with its sockets in ``work`` and no rendezvous file."""
        listen = replace(self.config.listen, keys=None, **endpoints_in(str(work)))
        return BrokerService(
            replace(
                self.config, listen=listen, state_dir=str(work / "state"),
                durability="process", steps_ahead=1, retain=Retain(bytes=1 << 61), rendezvous=None,
            ),
            recorded={name: feed.first_rules for name, feed in self.ledger.history.feeds.items()},
        )  # fmt: skip

    def _sources(self) -> Mapping[str, Any]:
        """Open the sources of all streams that the feed reads. Raises UserError if no producer.yaml names one."""
        streams = self.wanted.feed.rules_at(self.wanted.step, self.wanted.rows.lsn).streams
        needed = {stream.name for stream in streams if not stream.pushed and stream.weight}
        sources: dict[str, Any] = {}
        for config in self.producers:
            wanted = {name: stream for name, stream in config.streams.items() if name in needed - set(sources)}
            if wanted:
                sources |= open_sources(replace(config, streams=wanted))
        missing = sorted(needed - set(sources))
        if missing:
            raise UserError(
                f"No producer.yaml has stream {', '.join(missing)}, but a replay reads the samples again. Pass the "
                f"producer.yaml of this stream with -p."
            )
        return sources

    def _connect(self, stack: contextlib.ExitStack, endpoint: str, chain: bytes, lineage: int) -> None:
        """Connect a client for each rank; each client begins at the step to form again."""
        name = self.wanted.feed.name
        for dp_rank, cp_rank in product(range(self.mesh["dp"]), range(self.mesh["cp"])):
            client = connect(
                endpoint, feed=name, mesh=Mesh(**self.mesh, dp_rank=dp_rank, cp_rank=cp_rank), format="numpy",
                readers={"pp": [0]}, prefetch=1, verify=True, variable_lengths=True, key_file="",
            )  # fmt: skip
            stack.callback(client.close)
            self.clients.append(client)
            origin = state.Origin(self.config.run_id, name, client.rules)
            place = State(feed=name, lineage=lineage, step=self.wanted.step, chain=chain, snapshot=None)
            client.load_state_dict(state.save(origin, 0, place))
            if self.failure is not None:
                raise self.failure

    def _reporting(self, body: Callable[[], None]) -> Callable[[], None]:
        """Return a function that calls ``body`` and makes the clients raise the errors of ``body``."""

        def run() -> None:
            """Call ``body``, and make the clients raise its error."""
            try:
                body()
            except StreampackError as error:
                self._fail(error)
            except Exception as error:
                bug = InternalError(f"A thread of the replay failed: {error!r}")
                bug.__cause__ = error
                self._fail(bug)

        return run

    def _fail(self, error: StreampackError) -> None:
        """Keep the first error that a thread raises, and make all clients raise that error."""
        self.failure = self.failure or error
        for client in self.clients:
            client.fail(self.failure)

    def _watch(self, service: BrokerService, over: threading.Event) -> None:
        """Show the progress of ``service`` until ``over`` is set; raise DataStall if it stops for ``timeout_s``."""
        moved, before = time.monotonic(), (0, 0)
        with progress_line("reading the log") as show:
            while not over.wait(LOOK_S):
                status = service.snapshot
                feed = status.feeds[self.wanted.feed.name]
                samples = sum(row.samples for row in status.streams if row.feed == self.wanted.feed.name)
                now = (feed.totals.steps, samples)
                if now != before:
                    moved, before = time.monotonic(), now
                show(f"step {self.wanted.step:,}: {samples:,} samples read again, {now[0]:,} steps formed")
                if time.monotonic() - moved > self.timeout_s:
                    why = feed.waiting_for.text if feed.waiting_for is not None else "waiting for samples"
                    raise DataStall(f"step {self.wanted.step}: no progress for {self.timeout_s:g} s: {why}")

    def _explain(self, service: BrokerService, error: Rejected) -> StreampackError:
        """Return the error to raise for a rejection; if a step differs, an error that names the changed sample."""
        if error.code != "diverged":
            return error
        feed, core = self.wanted.feed, service.core
        table, first = core.table, max(core.feeds[feed.name].next_step - 1, 0)
        columns = (table.stream, table.index, table.part, table.crc)
        read = {tuple(key): crc for *key, crc in zip(*(column.tolist() for column in columns), strict=True)}
        for step in range(first, first + _STEPS_TO_SEARCH):
            recorded = self.ledger.step(feed.name, step, feed.effective(step))
            for row in recorded.rows if recorded is not None else ():
                crc = read.get((int(row["stream"]), int(row["index"]), int(row["part"])))
                if recorded is not None and crc not in (None, int(row["crc"])):
                    stream = feed.stream_name(int(row["stream"]), step, recorded.lsn)
                    return SourceError(
                        f"{stream}:{row['index']}: got crc32c {crc:08x}, expected {row['crc']:08x}, as recorded in "
                        f"step {step}. The sample's file or tokenizer has changed. Restore the original."
                    )
        return error


def _stop(service: BrokerService) -> None:
    """Stop a broker at once: a second drain ends it without delivering its steps."""
    service.drain()
    service.drain()


def _copy(folder: Path, into: Path, wanted: Wanted) -> None:
    """Copy the log up to the step's own record, or the whole log if only the ledger still has that record.

    Raises UserError if the record of a replaced step is gone, DataStall if the broker deletes records of
    the log during every attempt.
    """
    for _ in range(COPY_AGAIN):
        is_gone = wanted.rows.lsn < segment_files(folder)[0][0]
        if is_gone and not wanted.effective:
            raise UserError(
                f"Step {wanted.step} of lineage {wanted.rows.lineage} no longer counts, and its record is no longer "
                f"in the log. Pass a step that the log still has."
            )
        into.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):  # the run's broker has cut the log meanwhile
            copy_records(folder, into, sys.maxsize if is_gone else wanted.rows.lsn + 1)
            return
        shutil.rmtree(into)
    raise DataStall(f"The log in {folder} cannot be copied, because the broker keeps removing old records. Try again.")
