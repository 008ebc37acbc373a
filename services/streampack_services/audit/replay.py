"""``streampack replay``: form one step of a run again, compare it with its record, and write each rank's packs.

This module looks the step up in the ledger, of any lineage. ``rerun`` lets a broker form it again. Then this module
compares digest and chain with the recorded ones, and writes every rank's packs as arrays.
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
from streampack.config.daemon_settings import BrokerConfig
from streampack.core.model.mesh import DynamicCp
from streampack.errors import UserError
from streampack.packs.step import Step
from streampack_services.audit import why
from streampack_services.audit.rerun import Rerun, Wanted
from streampack_services.ledger.ledger import Ledger
from streampack_services.ledger.state_dir import read_ledger, state_folder

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Options of ``streampack replay``; ``timeout_s``: seconds without progress after which to give up."""

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
    """Form a recorded step again; return a tree for JSON, with ``equal`` if digest and chain are the recorded ones.

    Raises UserError for a step that cannot be replayed, SourceError if the data has changed, and DataStall if there is
    no progress. Errors of the broker, the producers and the clients are raised, too.
    """
    began = time.monotonic()
    config = read_broker(options.config)
    producers = [read_producer(path) for path in options.producers]
    folder = state_folder(options.state_dir, None if options.state_dir is not None else options.config)
    if options.out is not None and not options.out.absolute().parent.is_dir():
        raise UserError(f"The folder of --out {options.out} does not exist. Create the folder first.")
    with _quiet(), read_ledger(folder) as ledger, contextlib.ExitStack() as stack:
        wanted = _wanted(ledger, options)
        layout = _layout_of(config, wanted, options)
        work = Path(stack.enter_context(_temporary_folder()))
        mesh = {"dp": options.dp, "cp": options.cp, "pp": options.pp}
        rerun = Rerun(config, producers, wanted, ledger, folder, mesh, options.timeout_s)
        ranks = rerun.steps(stack, work)
        report = _compared(wanted, ranks, layout) | {"mesh": mesh, "out": None, "seconds": 0.0}
        if options.out is not None:
            _save(options.out, wanted, ranks)
            report["out"] = str(options.out)
    return report | {"seconds": round(time.monotonic() - began, 3)}


# The recorded step


def _wanted(ledger: Ledger, options: ReplayOptions) -> Wanted:
    """Find the recorded step that the options ask for. Raises UserError if it is not in the ledger."""
    feed = why.feed_of(ledger, options.feed)
    if options.lineage is None:
        rows = why.recorded(ledger, feed, options.step)
    elif (step := ledger.step(feed.name, options.step, options.lineage)) is not None:
        rows = step
    else:
        why.raise_if_damaged(ledger, "steps")
        lineages = [str(other.lineage) for other in ledger.records_of(feed.name, options.step)]
        raise UserError(
            f"Step {options.step} of feed {feed.name!r} is not recorded in lineage {options.lineage}. Lineages "
            f"with this step: {', '.join(lineages) or 'none'}."
        )
    effective = feed.effective(rows.step) == rows.lineage
    streams = [stream.name for stream in feed.rules_at(rows.step, rows.lsn).streams]
    return Wanted(ledger.state.run, feed, rows, streams, effective, feed.is_skipped(rows.step))


def _layout_of(config: BrokerConfig, wanted: Wanted, options: ReplayOptions) -> str:
    """Return the feed's layout. Raises UserError if its packs need groups of more ranks than the mesh has."""
    feed = config.feeds.get(wanted.feed.name)
    layout = "" if feed is None else feed.layout
    budget = wanted.feed.rules_at(wanted.step, wanted.rows.lsn).budget_at(wanted.step)
    dynamic = DynamicCp.of(layout or "zigzag")
    if dynamic is not None and dynamic.rank_tokens * dynamic.largest_group(options.dp * options.cp) < budget:
        raise UserError(
            f"Feed {wanted.feed.name!r} has `cp: dynamic`, and a mesh of dp={options.dp} and cp={options.cp} is too "
            f"small for its packs. Pass the mesh of the run as --dp and --cp."
        )
    return layout


# The result


def _compared(wanted: Wanted, ranks: list[Step], layout: str) -> Tree:
    """Compare the step that the ``ranks`` got with its record; return both and its packs, as a tree for JSON."""
    rows, answers = wanted.rows, {(step.digest, step.chain) for step in ranks}
    recorded = (rows.digest.hex(), rows.chain.hex())
    got = next((answer for answer in answers if answer != recorded), recorded)
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
        "num_loss_tokens": sum(pack.num_loss_tokens for pack in packs.values()),
        "num_samples": ranks[0].num_samples,
        "dealt_by": why.groups_of(layout),
        "num_tokens": rows.num_tokens,
        "packs": [
            {
                "pack": number,
                **(
                    {"dp_rank": pack.dp_rank}
                    if pack.cp_ranks is None
                    else {"first_rank": pack.cp_ranks[0], "num_ranks": pack.cp_ranks[1]}
                ),
                "micro_batch": pack.micro_batch,
                "num_samples": pack.num_samples,
                "num_tokens": int(np.diff(pack.cu_seqlens)[: pack.num_samples].sum()),
                "num_loss_tokens": pack.num_loss_tokens,
            }
            for number, pack in sorted(packs.items())
        ],
    }


def _save(path: Path, wanted: Wanted, ranks: list[Step]) -> None:
    """Write every rank's packs as a .npz file; ``dp0.cp0.0.input_ids`` is rank, micro-batch and field of a pack."""
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
        raise UserError(f"--out {path} cannot be written: {error.strerror}. Choose another file.") from None
    finally:
        part.unlink(missing_ok=True)


# Surroundings


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    """Make a temporary folder, and remove it at the end of the block, even after SIGTERM."""

    def end(number: int, _: FrameType | None) -> None:
        """Handle SIGTERM: exit, so that the folder is removed."""
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
    """Silence streampack's logs below CRITICAL: the threads of a replay raise their errors."""
    logger = logging.getLogger("streampack")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
