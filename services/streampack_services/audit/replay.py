"""``streampack replay``: one step of a run again, bit for bit, and all that each rank got of it.

The step is looked up in the ledger, of whichever lineage; ``rerun`` has a broker form it again. Here is what is wanted,
and what comes of it: digest and chain next to the recorded ones, and every rank's packs as arrays.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from streampack.config.config_files import read_broker, read_producer
from streampack.errors import UserError
from streampack.packs.step import Step
from streampack_services.audit import why
from streampack_services.audit.rerun import Rerun, Wanted
from streampack_services.ledger.ledger import Ledger
from streampack_services.ledger.state_dir import open_ledger, state_folder

Tree = dict[str, Any]


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
    pp: int = 1
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
    folder = state_folder(options.state_dir, None if options.state_dir is not None else options.config)
    if options.out is not None and not options.out.absolute().parent.is_dir():
        raise UserError(f"--out: {options.out}: got a folder that is not there, expected a file in one that is")
    with _quiet(), open_ledger(folder) as ledger, contextlib.ExitStack() as stack:
        wanted = _wanted(ledger, options)
        work = Path(stack.enter_context(_folder()))
        mesh = {"dp": options.dp, "cp": options.cp, "pp": options.pp}
        rerun = Rerun(config, producers, wanted, ledger, folder, mesh, options.timeout_s)
        ranks = rerun.steps(stack, work)
        found = _compared(wanted, ranks) | {"mesh": mesh, "out": None, "seconds": 0.0}
        if options.out is not None:
            _save(options.out, wanted, ranks)
            found["out"] = str(options.out)
    return found | {"seconds": round(time.monotonic() - began, 3)}


# What is wanted


def _wanted(ledger: Ledger, options: ReplayOptions) -> Wanted:
    feed = why.feed_of(ledger, options.feed)
    if options.lineage is None:
        rows = why.recorded(ledger, feed, options.step)
    else:
        found = ledger.step(feed.name, options.step, options.lineage)
        if found is None:
            why.raise_if_damaged(ledger, "steps")
            known = ledger.lineages_of(feed.name, options.step)
            raise UserError(
                f"got --lineage {options.lineage}, expected one in which step {options.step} of feed {feed.name!r} is "
                f"recorded: {', '.join(map(str, known)) or 'there is none'}"
            )
        rows = found
    effective = feed.effective(rows.step) == rows.lineage
    streams = [stream.name for stream in feed.rules_at(rows.step, rows.lsn).streams]
    return Wanted(ledger.state.run, feed, rows, streams, effective, why.is_skipped(feed, rows.step))


# What comes of it


def _compared(wanted: Wanted, ranks: list[Step]) -> Tree:
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


def _save(path: Path, wanted: Wanted, ranks: list[Step]) -> None:
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
