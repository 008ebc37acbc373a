"""Count the classes in a pack of 64 samples whose files are sorted by class, and the memory of their producer.

"Before" is the order of runs that began before sources had groups: shards and row groups one after the other. Both
orders are read from the same files by the same code, since a cursor tells its order. The partitions of a stream take
turns, as in the merge. Memory is the peak of a process that reads all samples into chunks, as a producer does.
"""

from __future__ import annotations

import io
import itertools
import json
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.report import arguments, head, say
from streampack.core.protocol.producer_messages import Lease
from streampack.producer.chunks import batches
from streampack.sources import Cursor, SourceSettings, open_source

CLASSES, PACK, PARTITIONS = 8, 64, 4
SAMPLES, QUICK_SAMPLES = 32_768, 8192
GROUP_ROWS, TOKENS = 10_000, 256


def main() -> None:
    parser = arguments(__doc__, f"{QUICK_SAMPLES} samples, not {SAMPLES}")
    parser.add_argument("--read", nargs=3, help="used by the benchmark itself", metavar=("SOURCE", "FILE", "ORDER"))
    args = parser.parse_args()
    if args.read:
        read_all(*args.read)
        return
    samples = QUICK_SAMPLES if args.quick else SAMPLES
    report = head("sorted_data", samples=samples) | {"classes": {}, "memory": {}}
    print(f"{'files, sorted by class':44} {'before':>7} {'now':>7}   classes of {CLASSES} in {PACK} samples")
    for name, (write, settings, partitions) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), samples)
            by_order = {order: classes(settings(folder), partitions, order) for order in ("before", "now")}
        report["classes"][name] = by_order
        print(f"{name:44} {by_order['before']:7.2f} {by_order['now']:7.2f}")
    print(f"\n{'memory of the reading process':44} {'before':>7} {'now':>7}   MiB at the peak; {'idle':>7}; seconds")
    with tempfile.TemporaryDirectory() as folder:
        for name, files, groups in (("1 Parquet file, 24 row groups of 10 MB", 1, 24), ("8 of 3 row groups", 8, 3)):
            peak = measure(Path(folder) / name.replace(" ", "-"), files, groups if not args.quick else 2)
            report["memory"][name] = peak
            (before, was_s), (now, now_s), (idle, _) = peak["before"], peak["now"], peak["idle"]
            print(f"{name:44} {before:7.0f} {now:7.0f}   {idle:25.0f}; {was_s:.2f} and {now_s:.2f}")
    say(report, args.json)


def start_of(source: Any, order: str) -> Cursor:
    return source.begin if order == "now" else Cursor(0, 0, 0)


def classes(settings: SourceSettings, partitions: int, order: str) -> float:
    """Mean number of classes in a pack; a sample's first token is its class."""
    source = open_source(settings)
    parts = [
        [int(r.tokens[0]) for r in source.read(p, partitions, seed=5, passes=1, start=start_of(source, order))]
        for p in range(partitions)
    ]
    labels = [c for turn in itertools.zip_longest(*parts) for c in turn if c is not None]
    return float(np.mean([len(set(labels[at : at + PACK])) for at in range(0, len(labels) - PACK + 1, PACK)]))


def measure(path: Path, files: int, groups: int) -> dict[str, tuple[float, float]]:
    """Peak memory in MiB and seconds of a process for each order, and of one that has only opened the source."""
    path.mkdir()
    rng, rows = np.random.default_rng(3), GROUP_ROWS * groups
    for number in range(files):
        flat = pa.array(rng.integers(0, 2**31 - 1, rows * TOKENS, dtype=np.int32))
        offsets = pa.array(np.arange(0, (rows + 1) * TOKENS, TOKENS, dtype=np.int32))
        table = pa.table({"input_ids": pa.ListArray.from_arrays(offsets, flat)})
        pq.write_table(table, path / f"{number}.parquet", row_group_size=GROUP_ROWS)
    peaks: dict[str, tuple[float, float]] = {}
    for order in ("idle", "before", "now"):
        command = [sys.executable, __file__, "--read", "parquet", f"{path}/*.parquet", order]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        peaks[order] = json.loads(lines)
    return peaks


def read_all(kind: Any, shards: str, order: str) -> None:
    """Read all partitions in turn into chunks, and print [peak MiB, seconds]."""
    source, began = open_source(SourceSettings(kind, shards)), time.perf_counter()
    leases = [
        Lease(
            stream="s", partition=p, partitions=PARTITIONS, first_seq=0, cursor=start_of(source, order), seed=3,
            passes=1, dtype="int32", fields=(), overlong="error", poison="error", max_sample_tokens=8192,
            max_chunk_bytes=1 << 20,
        )
        for p in range(PARTITIONS)
    ]  # fmt: skip
    for turn in itertools.zip_longest(*(batches(source, lease) for lease in leases if order != "idle")):
        del turn
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(json.dumps([int(peak.split()[1]) / 1024, time.perf_counter() - began]))


def ids(samples: int) -> list[list[int]]:
    return [[CLASSES * i // samples, i] for i in range(samples)]


def write_parquet(folder: Path, samples: int) -> None:
    table = pa.table({"input_ids": pa.array(ids(samples), pa.list_(pa.int32()))})
    pq.write_table(table, folder / "a.parquet", row_group_size=samples // 64)


def write_one_group(folder: Path, samples: int) -> None:
    pq.write_table(pa.table({"input_ids": pa.array(ids(samples), pa.list_(pa.int32()))}), folder / "a.parquet")


def write_saved(folder: Path, samples: int) -> None:
    table = pa.table({"input_ids": pa.array(ids(samples), pa.list_(pa.int32()))})
    with pa.OSFile(str(folder / "d.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=samples // 64)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "d.arrow"}]}')


def write_jsonl(folder: Path, samples: int, files: int = 8) -> None:
    for number, part in enumerate(np.array_split(np.array(ids(samples)), files)):
        (folder / f"{number}.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in part.tolist()))


def write_tar(folder: Path, samples: int) -> None:
    for number, part in enumerate(np.array_split(np.array(ids(samples), np.int32), 8)):
        with tarfile.open(folder / f"{number}.tar", "w") as archive:
            for i, row in enumerate(part):
                buffer = io.BytesIO()
                np.save(buffer, row)
                info = tarfile.TarInfo(f"{i}.npy")
                info.size = buffer.tell()
                buffer.seek(0)
                archive.addfile(info, buffer)


def write_megatron(folder: Path, samples: int) -> None:
    data = np.array(ids(samples), "<i4")
    (folder / "a.bin").write_bytes(data.tobytes())
    head_ = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, samples, 0)
    sizes, pointers = np.full(samples, 2, "<i4"), np.arange(0, 8 * samples, 8, dtype="<i8")
    (folder / "a.idx").write_bytes(head_ + sizes.tobytes() + pointers.tobytes())


def of(kind: Any, pattern: str) -> Callable[[str], SourceSettings]:
    return lambda folder: SourceSettings(kind, f"{folder}/{pattern}" if pattern else folder)


CASES: dict[str, tuple[Callable[[Path, int], None], Callable[[str], SourceSettings], int]] = {
    "1 Parquet file, 64 row groups": (write_parquet, of("parquet", "*.parquet"), PARTITIONS),
    "1 Parquet file, 1 row group": (write_one_group, of("parquet", "*.parquet"), PARTITIONS),
    "1 Hugging Face file, 64 record batches": (write_saved, of("huggingface", ""), PARTITIONS),
    "8 JSON lines files": (write_jsonl, of("jsonl", "*.jsonl"), PARTITIONS),
    "8 JSON lines files, 1 partition": (write_jsonl, of("jsonl", "*.jsonl"), 1),
    "64 JSON lines files": (
        partial(write_jsonl, files=64),
        of("jsonl", "*.jsonl"),
        PARTITIONS,
    ),
    "8 tar files of .npy": (write_tar, of("webdataset", "*.tar"), PARTITIONS),
    "1 Megatron dataset": (write_megatron, of("megatron", "a.bin"), PARTITIONS),
    "1 Megatron dataset, 1 partition": (write_megatron, of("megatron", "a.bin"), 1),
}


if __name__ == "__main__":
    main()
