"""Records per CPU second of each source, one thread, against the plain loop of its format's own library.

Both give every sample as an int32 array. The loop reads a file from its start to its end; streampack reads it in its
shuffled order, index included, with every id checked. So the ratio is what shuffling, seeking and checking cost. CPU
seconds, since a shared machine's clock says little about one thread; files are in the page cache.
"""

from __future__ import annotations

import io
import itertools
import json
import statistics
import struct
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import arguments, head, say
from streampack.sources import SourceSettings, TokenizerSettings, open_source, open_tokenizer

QUICK_SAMPLES, FULL_SAMPLES = 10_000, 50_000
ROUNDS = 5
ROW_GROUP = 10_000
EOS = np.array([256], np.int32)
Loop = Callable[[Path], Iterator[Any]]
items: list[Any] = []


def main() -> None:
    args = arguments(__doc__, f"{QUICK_SAMPLES} samples, not {FULL_SAMPLES}").parse_args()
    samples = QUICK_SAMPLES if args.quick else FULL_SAMPLES
    report = head("sources", samples=samples) | {"results": {}}
    print(f"{'source':22} {'records/s':>10} {'MB/s':>8} {'plain loop':>11} {'ratio':>6}")
    with tempfile.TemporaryDirectory() as folder:
        for name, (write, kind, plain) in FORMATS.items():
            found = compare(Path(folder) / name.replace(" ", "-"), samples, write, kind, plain)
            report["results"][name] = found
            print(
                f"{name:22} {found['records_per_s']:10,.0f} {found['mb_per_s']:8.1f} {found['plain_per_s']:11,.0f} "
                f"{found['ratio']:6.2f}"
            )
    say(report, args.json)


def compare(
    path: Path, samples: int, write: Callable[[Path, list[Any]], None], kind: dict[str, Any], plain: Loop
) -> dict[str, float]:
    """Medians of ROUNDS turns each, alternating; every turn must give every sample and token."""
    rng = np.random.default_rng(7)
    lengths = rng.integers(100, 200, samples)
    data = [rng.integers(97, 122, length).astype(np.int32) for length in lengths]
    write(path, data)
    settings = SourceSettings(**{"path": str(path), **kind})
    tokenizer = open_tokenizer(TokenizerSettings())
    turns: dict[str, list[float]] = {"ours": [], "plain": []}
    for turn in range(2 * ROUNDS):
        name = ("ours", "plain")[turn % 2]
        began = time.process_time()
        found: Any = plain(path) if name == "plain" else map(_tokens, _read(settings, tokenizer))
        count = sum(1 for tokens in found if len(tokens) >= 100)
        turns[name].append(time.process_time() - began)
        assert count == samples, f"got {count} samples of {name}, expected {samples}"
    ours, theirs = statistics.median(turns["ours"]), statistics.median(turns["plain"])
    size = sum(file.stat().st_size for file in path.parent.glob(path.name + "*") if file.is_file())
    size += sum(file.stat().st_size for file in path.glob("*.arrow")) if path.is_dir() else 0
    return {
        "records_per_s": samples / ours, "mb_per_s": size / ours / 1e6, "plain_per_s": samples / theirs,
        "ratio": theirs / ours,
    }  # fmt: skip


def _read(settings: SourceSettings, tokenizer: Any) -> Iterator[Any]:
    return open_source(settings, tokenizer).read(0, 1, seed=3, passes=1)


def _tokens(record: Any) -> Any:
    return record.tokens


# What writes a file of each format, and the loop that its library's documentation shows.


def write_jsonl_text(path: Path, data: list[Any]) -> None:
    path.write_text("".join(json.dumps({"text": _text(ids)}) + "\n" for ids in data))


def write_jsonl_ids(path: Path, data: list[Any]) -> None:
    path.write_text("".join(json.dumps({"input_ids": ids.tolist()}) + "\n" for ids in data))


def write_text(path: Path, data: list[Any]) -> None:
    path.write_text("".join(_text(ids) + "\n" for ids in data))


def write_tar_text(path: Path, data: list[Any]) -> None:
    _write_tar(path, ((f"{i}.txt", _text(ids).encode()) for i, ids in enumerate(data)))


def write_tar_npy(path: Path, data: list[Any]) -> None:
    def npy(ids: Any) -> bytes:
        buffer = io.BytesIO()
        np.save(buffer, ids)
        return buffer.getvalue()

    _write_tar(path, ((f"{i}.npy", npy(ids)) for i, ids in enumerate(data)))


def _write_tar(path: Path, members: Iterator[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, raw in members:
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))


def write_parquet_ids(path: Path, data: list[Any]) -> None:
    pq.write_table(pa.table({"input_ids": pa.array(data, pa.list_(pa.int32()))}), path, row_group_size=ROW_GROUP)


def write_parquet_text(path: Path, data: list[Any]) -> None:
    pq.write_table(pa.table({"text": [_text(ids) for ids in data]}), path, row_group_size=ROW_GROUP)


def write_saved(path: Path, data: list[Any]) -> None:
    path.mkdir()
    table = pa.table({"input_ids": pa.array(data, pa.list_(pa.int32()))})
    with pa.OSFile(str(path / "d.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    (path / "state.json").write_text('{"_data_files": [{"filename": "d.arrow"}]}')


def write_megatron(path: Path, data: list[Any]) -> None:
    Path(f"{path}.bin").write_bytes(b"".join(ids.astype("<u2").tobytes() for ids in data))
    sizes = np.array([len(ids) for ids in data], "<i4")
    pointers = np.array([0, *itertools.accumulate(2 * sizes.astype("<i8"))][:-1], "<i8")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(data), len(data) + 1)
    documents = np.arange(len(data) + 1, dtype="<i8")
    Path(f"{path}.idx").write_bytes(head + sizes.tobytes() + pointers.tobytes() + documents.tobytes())


def write_items(path: Path, data: list[Any]) -> None:
    items[:] = data


def loop_jsonl_text(path: Path) -> Iterator[Any]:
    with path.open() as lines:
        for line in lines:
            yield _ids(json.loads(line)["text"])


def loop_jsonl_ids(path: Path) -> Iterator[Any]:
    with path.open() as lines:
        for line in lines:
            yield np.array(json.loads(line)["input_ids"], np.int32)


def loop_text(path: Path) -> Iterator[Any]:
    with path.open() as lines:
        for line in lines:
            yield _ids(line.rstrip("\n"))


def loop_tar_text(path: Path) -> Iterator[Any]:
    with tarfile.open(path) as archive:
        for member in archive:
            yield _ids(archive.extractfile(member).read().decode())  # type: ignore[union-attr]


def loop_tar_npy(path: Path) -> Iterator[Any]:
    with tarfile.open(path) as archive:
        for member in archive:
            yield np.load(io.BytesIO(archive.extractfile(member).read()))  # type: ignore[union-attr]


def loop_parquet_ids(path: Path) -> Iterator[Any]:
    for batch in pq.ParquetFile(path).iter_batches(columns=["input_ids"]):
        for value in batch.column(0):
            yield value.values.to_numpy()


def loop_parquet_text(path: Path) -> Iterator[Any]:
    for batch in pq.ParquetFile(path).iter_batches(columns=["text"]):
        for value in batch.column(0):
            yield _ids(value.as_py())


def loop_saved(path: Path) -> Iterator[Any]:
    with pa.memory_map(str(path / "d.arrow")) as raw:
        for batch in pa.ipc.open_stream(raw):
            for value in batch.column(0):
                yield value.values.to_numpy()


def loop_megatron(path: Path) -> Iterator[Any]:
    index = np.memmap(f"{path}.idx", np.uint8, "r")
    count = struct.unpack("<Q", index[18:26].tobytes())[0]
    sizes = index[34 : 34 + 4 * count].view("<i4")
    pointers = index[34 + 4 * count : 34 + 12 * count].view("<i8")
    data = np.memmap(f"{path}.bin", np.uint8, "r")
    for size, pointer in zip(sizes, pointers, strict=True):
        yield np.frombuffer(data, "<u2", int(size), int(pointer)).astype(np.int32)


def loop_items(path: Path) -> Iterator[Any]:
    for item in items:
        yield np.asarray(item, np.int32)


def _text(ids: Any) -> str:
    return bytes(ids.astype(np.uint8)).decode()


def _ids(text: str) -> Any:
    return np.concatenate([np.frombuffer(text.encode(), np.uint8).astype(np.int32), EOS])


FORMATS: dict[str, tuple[Callable[[Path, list[Any]], None], dict[str, Any], Loop]] = {
    "jsonl, text": (write_jsonl_text, {"source": "jsonl"}, loop_jsonl_text),
    "jsonl, ids": (write_jsonl_ids, {"source": "jsonl"}, loop_jsonl_ids),
    "text, lines": (write_text, {"source": "text"}, loop_text),
    "webdataset, .txt": (write_tar_text, {"source": "webdataset"}, loop_tar_text),
    "webdataset, .npy": (write_tar_npy, {"source": "webdataset"}, loop_tar_npy),
    "parquet, text": (write_parquet_text, {"source": "parquet"}, loop_parquet_text),
    "parquet, ids": (write_parquet_ids, {"source": "parquet"}, loop_parquet_ids),
    "huggingface, ids": (write_saved, {"source": "huggingface"}, loop_saved),
    "megatron": (write_megatron, {"source": "megatron"}, loop_megatron),
    "python, list of ids": (write_items, {"source": "python", "path": "benchmarks.sources:items"}, loop_items),
}


if __name__ == "__main__":
    # The import path of the Python source is that of the module, not of the program.
    from benchmarks import sources

    sources.main()
