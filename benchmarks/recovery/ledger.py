"""Measure the ledger's speed and its bytes per sample, against plain rows in SQLite.

Both read the same records (``StepFormed``, as a log gives them) and are then asked for samples. Plain: one row a sample
by ``executemany``, its identity the primary key, without any checksum of its own. CPU seconds of one thread.
"""

from __future__ import annotations

import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from streampack_services.audit.verify import verify
from streampack_services.ledger.ledger import Ledger
from streampack_services.ledger.step_rows import rows_of
from streampack_services.log.log import LogEntry

from benchmarks.report import arguments, head, say
from streampack.core.journal.log_records import Base, FeedFacts, Record, StepFormed
from streampack.core.model.rules import Rules, StreamRules
from streampack.core.model.samples import I64, ROW
from streampack.core.model.steps import FIRST_CHAIN, chain_digest, pack_digests, step_digest
from streampack.wire.record_frames import decode_record, encode_record

QUICK_SAMPLES, FULL_SAMPLES = 300_000, 3_000_000
ROUNDS = 3
QUESTIONS = 100
RULES = Rules(streams=(StreamRules("web", 0.7), StreamRules("code", 0.3)))
SIZES = {"64 packs of 12": (64, 12), "8 packs of 8": (8, 8)}


def main() -> None:
    args = arguments(__doc__, f"{QUICK_SAMPLES} samples, not {FULL_SAMPLES}").parse_args()
    samples = QUICK_SAMPLES if args.quick else FULL_SAMPLES
    report = head("ledger", samples=samples) | {"results": {}}
    print(f"{'steps of':16} {'':8} {'samples/s':>11} {'bytes/sample':>13} {'ms a question':>14}")
    for name, (packs, each) in SIZES.items():
        found = compare(recorded(samples, packs, each))
        report["results"][name] = found
        for who in ("ledger", "plain"):
            row = found[who]
            print(
                f"{name:16} {who:8} {row['samples_per_s']:11,.0f} {row['bytes_per_sample']:13.1f} "
                f"{row['question_ms']:14.2f}"
            )
        print(f"{'':16} verify   {found['verify_samples_per_s']:11,.0f}")
    say(report, args.json)


def recorded(samples: int, packs: int, each: int) -> list[LogEntry]:
    """The log of a run over two streams, ``each`` samples a pack, out of order within a window of 1024."""
    rng = np.random.default_rng(1)
    per_step = packs * each
    order = np.argsort(np.arange(samples) + rng.integers(0, 1024, samples), kind="stable")
    rows = np.zeros(samples, ROW)
    rows["stream"] = rng.random(samples) < 0.3
    for stream in (0, 1):
        rows["index"][rows["stream"] == stream] = np.arange(int((rows["stream"] == stream).sum()))
    rows["length"] = np.clip(rng.lognormal(6, 1, samples), 8, 8192)
    rows["loss_tokens"], rows["crc"] = rows["length"] - 1, rng.integers(0, 2**32, samples)
    rows = rows[order]
    feeds = {"train": FeedFacts(rules=RULES)}
    records: list[Record] = [Base(run=1, run_name="benchmark", epoch=1, feeds=feeds, streams={})]
    counts, chain = np.full(packs, each, "<u4"), FIRST_CHAIN
    bounds: I64 = np.arange(packs + 1, dtype=np.int64) * each
    for step in range(samples // per_step):
        mine = rows[step * per_step : (step + 1) * per_step]
        loss = int(mine["loss_tokens"].sum())
        digest = step_digest(step, loss, per_step, pack_digests(mine, bounds))
        chain = chain_digest(chain, digest)
        records.append(
            StepFormed(
                feed="train", lineage=0, step=step, digest=digest, chain=chain, num_loss_tokens=loss,
                num_samples=per_step, counts_u32=counts.tobytes(), rows=mine.tobytes(), released=0,
            )
        )  # fmt: skip
    bodies = [memoryview(b"".join(map(bytes, encode_record(record)))) for record in records]
    return [LogEntry(lsn, record.TYPE, body) for lsn, (record, body) in enumerate(zip(records, bodies, strict=True))]


def compare(entries: list[LogEntry]) -> dict[str, Any]:
    """Medians of ROUNDS turns each, alternating."""
    turns: dict[str, list[dict[str, float]]] = {"ledger": [], "plain": []}
    verified = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            for who, take in (("ledger", ledger_takes), ("plain", plain_takes)):
                path = Path(folder) / "file.sqlite"
                turns[who].append(take(path, entries))
                if who == "ledger":
                    verified.append(timed(partial(check, path)))
                path.unlink()
    samples = samples_of(entries)
    found: dict[str, Any] = {
        who: {key: statistics.median(turn[key] for turn in each) for key in each[0]} for who, each in turns.items()
    }
    return found | {
        "verify_samples_per_s": samples / statistics.median(verified),
        "ledger_to_plain": found["ledger"]["samples_per_s"] / found["plain"]["samples_per_s"],
    }


def samples_of(entries: list[LogEntry]) -> int:
    last = decode_record(entries[-1].kind, entries[-1].body)[0]
    assert isinstance(last, StepFormed)
    return last.num_samples * (len(entries) - 1)


def ledger_takes(path: Path, entries: list[LogEntry]) -> dict[str, float]:
    with Ledger(path) as ledger:
        taking = timed(lambda: ledger.update(entries))
        asking = timed(lambda: [len(ledger.find("web", index)) for index in asked(entries)])
    return figures(path, entries, taking, asking)


def check(path: Path) -> None:
    with Ledger(path) as ledger:
        assert not verify(ledger)["findings"].get("digests")


def plain_takes(path: Path, entries: list[LogEntry]) -> dict[str, float]:
    db = sqlite3.connect(path)
    db.execute(
        "CREATE TABLE samples (stream INTEGER, idx INTEGER, part INTEGER, lineage INTEGER, step INTEGER, pack INTEGER, "
        "offset INTEGER, length INTEGER, loss_tokens INTEGER, crc INTEGER, PRIMARY KEY (stream, idx, part, lineage)) "
        "WITHOUT ROWID"
    )

    def take() -> None:
        for entry in entries:
            record = decode_record(entry.kind, entry.body)[0]
            if isinstance(record, StepFormed):
                db.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", plain_rows(record))
            if entry.lsn % 300 == 0:
                db.commit()
        db.commit()

    taking = timed(take)
    query = "SELECT step, pack, offset FROM samples WHERE stream = 0 AND idx = ?"
    asking = timed(lambda: [db.execute(query, (index,)).fetchall() for index in asked(entries)])
    db.close()
    return figures(path, entries, taking, asking)


def plain_rows(record: StepFormed) -> Any:
    step = rows_of(record, 0)
    rows, same = step.rows, np.ones(len(step.rows), np.int64)
    columns = (
        rows["stream"], rows["index"], rows["part"], same * record.lineage, same * record.step, step.packs,
        step.offsets(RULES.align.sample), rows["length"], rows["loss_tokens"], rows["crc"],
    )  # fmt: skip
    return zip(*(column.tolist() for column in columns), strict=True)


def asked(entries: list[LogEntry]) -> list[int]:
    """Indices of the first stream, from its whole length."""
    most = int(samples_of(entries) * 0.65)
    return list(map(int, np.linspace(0, most, QUESTIONS)))


def figures(path: Path, entries: list[LogEntry], taking: float, asking: float) -> dict[str, float]:
    samples = samples_of(entries)
    return {
        "samples_per_s": samples / taking,
        "bytes_per_sample": path.stat().st_size / samples,
        "question_ms": 1000 * asking / QUESTIONS,
    }


def timed(work: Callable[[], Any]) -> float:
    """CPU seconds of this process."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


if __name__ == "__main__":
    main()
