"""Measure the log against plain files: the same bytes by write and fdatasync, in the same run.

The log appends records of one size as fast as it can, with at most 64 MB in flight, as the broker's credits bound
them. Plain is a preallocated file, one buffer a write of 1 MiB and an fdatasync after each (``os``), or none
(``process``). They take turns on the same disk; the clock stops when all is safe. Reading is ``Log.open`` (every record
checked), from the page cache.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "services"))

from streampack_services.log.log import Log

from benchmarks.report import arguments, head, say

RECORD_BYTES = (200, 4 << 10, 64 << 10, 1 << 20)
ON_THE_WAY = 64 << 20
GROUP = 1 << 20
Durability = Literal["os", "process"]


def main() -> None:
    parser = arguments(__doc__, "an eighth of the bytes, three times")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; default: the temporary folder")
    given = parser.parse_args()
    report = head("log")
    rows = [
        measure(given.folder, durability, size, (32 << 20) if given.quick else (256 << 20), 3 if given.quick else 5)
        for durability in ("os", "process")
        for size in RECORD_BYTES
    ]
    for row in rows:
        print(
            f"{row['durability']:8} {row['record_bytes']:>8} B  {row['records_per_s']:>10,.0f} records/s "
            f"{row['mb_per_s']:>7,.0f} MB/s  plain {row['plain_mb_per_s']:>7,.0f} MB/s  ratio {row['ratio']:.2f}  "
            f"read {row['read_mb_per_s']:>7,.0f} MB/s"
        )
    say(report | {"results": rows}, given.json)


def measure(disk: Path | None, durability: Durability, size: int, num_bytes: int, turns: int) -> dict[str, float | str]:
    """Medians over ``turns``; the ratio is of each turn's own two."""
    count = min(num_bytes // size, 200_000)
    logs: list[float] = []
    plains: list[float] = []
    reads: list[float] = []
    for turn in range(turns):
        with tempfile.TemporaryDirectory(dir=disk) as made:
            folder = Path(made)
            for way, seconds in ((append, logs), (plain, plains))[:: 1 if turn % 2 else -1]:
                os.sync()
                seconds.append(way(folder, durability, size, count))
            begin = time.perf_counter()
            with contextlib.closing(open_log(folder, durability, lambda: None)) as log:
                reads.append(time.perf_counter() - begin)
                if log.next_lsn != count:
                    raise SystemExit(f"got {log.next_lsn} records back, expected {count}")
    middle = statistics.median(logs)
    return {
        "durability": durability,
        "record_bytes": size,
        "records_per_s": count / middle,
        "mb_per_s": size * count / middle / 1e6,
        "plain_mb_per_s": size * count / statistics.median(plains) / 1e6,
        "ratio": statistics.median(theirs / ours for ours, theirs in zip(logs, plains, strict=True)),
        "read_mb_per_s": size * count / statistics.median(reads) / 1e6,
    }


def open_log(folder: Path, durability: Durability, on_safe: Callable[[], None]) -> Log:
    return Log.open(folder / "log", durability=durability, on_safe=on_safe)


def append(folder: Path, durability: Durability, size: int, count: int) -> float:
    """Seconds until ``count`` records are safe."""
    body = os.urandom(size)
    moved = threading.Event()
    with contextlib.closing(open_log(folder, durability, moved.set)) as log:
        time.sleep(0.2)  # the first segment is preallocated, as the plain file is
        most = ON_THE_WAY // size
        a_turn = max(GROUP // 16 // size, 1)
        begin = time.perf_counter()
        for number in range(count):
            log.append(1, [body])
            if number % a_turn == 0:
                log.flush()
                while log.next_lsn - log.safe_upto > most:
                    moved.wait(0.1)
                    moved.clear()
        log.flush()
        while log.safe_upto < count:
            moved.wait(0.1)
            moved.clear()
        return time.perf_counter() - begin


def plain(folder: Path, durability: Durability, size: int, count: int) -> float:
    """Seconds for as many bytes in one file."""
    num_bytes = size * count
    data = os.urandom(GROUP)
    fd = os.open(folder / "plain", os.O_WRONLY | os.O_CREAT)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        begin = time.perf_counter()
        for at in range(0, num_bytes, GROUP):
            os.pwrite(fd, data[: num_bytes - at], at)
            if durability == "os":
                os.fdatasync(fd)
        return time.perf_counter() - begin
    finally:
        os.close(fd)


if __name__ == "__main__":
    main()
