"""Measure samples per CPU second of each source, in one thread, against a plain loop of the format's own library.

Both give every sample as int32. The loop reads a file from its start to its end, an array a sample; streampack reads it
in its shuffled order, index included, with every id checked, into the batches that a producer sends. So the ratio is
what shuffling, seeking and checking cost, or what reading many at once gains. CPU seconds, since a shared machine's
clock says little about one thread; files are in the page cache. Beside what is mapped stands ``np.copy`` of as many
ids out of a mapping: the ceiling.
"""

from __future__ import annotations

import itertools
import json
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import webdataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.report import arguments, head, say
from streampack.core.protocol.producer_messages import Lease
from streampack.producer.chunks import batches
from streampack.sources import SourceSettings, TokenizerSettings, open_source, open_tokenizer

QUICK_SAMPLES, FULL_SAMPLES = 10_000, 50_000
ROUNDS = 5
MEAN = 150
LEASE = Lease(
    stream="s", partition=0, partitions=1, first_seq=0, cursor=None, seed=3, passes=1, dtype="int32", fields=(),
    overlong="error", poison="error", max_sample_tokens=8192, max_chunk_bytes=1 << 20,
)  # fmt: skip
ROW_GROUP = 10_000
EOS = np.array([256], np.int32)
Loop = Callable[[Path], Iterator[Any]]
items: list[Any] = []


def main() -> None:
    args = arguments(__doc__, f"{QUICK_SAMPLES} samples, not {FULL_SAMPLES}").parse_args()
    samples = QUICK_SAMPLES if args.quick else FULL_SAMPLES
    report = head("sources", samples=samples) | {"results": {}}
    print(f"{'source':28} {'samples/s':>10} {'M tokens/s':>10} {'plain loop':>10} {'ratio':>6} {'np.copy':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for name, (write, kind, plain, mean) in CASES.items():
            found = compare(Path(folder) / name.replace(" ", "-"), samples, write, kind, plain, mean)
            report["results"][name] = found
            copy = f"{found['copy_tokens_per_s'] / 1e6:8,.0f}" if "copy_tokens_per_s" in found else ""
            print(
                f"{name:28} {found['samples_per_s']:10,.0f} {found['tokens_per_s'] / 1e6:10.1f} "
                f"{found['plain_per_s']:10,.0f} {found['ratio']:6.2f} {copy}"
            )
    say(report, args.json)


def compare(
    path: Path, samples: int, write: Callable[[Path, list[Any]], None], kind: dict[str, Any], plain: Loop, mean: int
) -> dict[str, float]:
    """Medians of ROUNDS turns each, alternating; every turn must give every sample and token."""
    rng = np.random.default_rng(7)
    data = [
        rng.integers(97, 122, length).astype(np.int32) for length in rng.integers(mean // 2, mean * 3 // 2, samples)
    ]
    write(path, data)
    tokens = sum(map(len, data))
    turns: dict[str, list[float]] = {"ours": [], "plain": [], "copy": []}
    ours = partial(_ours, SourceSettings(**{"path": str(path), **kind}))
    loops: dict[str, Callable[[], tuple[int, int]]] = {"ours": ours, "plain": lambda: _plain(plain(path))}
    if kind["source"] == "megatron":
        loops["copy"] = lambda: _copy(path, samples)
    for _ in range(ROUNDS):
        for name, loop in loops.items():
            began = time.process_time()
            found = loop()
            turns[name].append(time.process_time() - began)
            ends = found[1] - tokens  # texts end in an id of their own
            assert (found[0], ends) in ((samples, 0), (samples, samples)), f"got {found} samples, tokens of {name}"
    seconds = {name: statistics.median(times) for name, times in turns.items() if times}
    rates = {
        "samples_per_s": samples / seconds["ours"], "tokens_per_s": tokens / seconds["ours"],
        "plain_per_s": samples / seconds["plain"], "ratio": seconds["plain"] / seconds["ours"],
    }  # fmt: skip
    return rates | ({"copy_tokens_per_s": tokens / seconds["copy"]} if "copy" in seconds else {})


def _ours(settings: SourceSettings) -> tuple[int, int]:
    """(samples, tokens) of the batches that a producer makes chunks of."""
    found = batches(open_source(settings, open_tokenizer(TokenizerSettings())), LEASE)
    counts = [(len(batch.lengths), len(batch.tokens)) for batch in found]
    return sum(count for count, _ in counts), sum(tokens for _, tokens in counts)


def _plain(arrays: Iterator[Any]) -> tuple[int, int]:
    samples = tokens = 0
    for array in arrays:
        samples += 1
        tokens += len(array)
    return samples, tokens


def _copy(path: Path, samples: int) -> tuple[int, int]:
    return samples, len(np.copy(np.memmap(f"{path}.bin", "<u2", "r")))


# What writes a file of each format, and the loop that its library's documentation shows.


def write_jsonl_text(path: Path, data: list[Any]) -> None:
    path.write_text("".join(json.dumps({"text": _text(ids)}) + "\n" for ids in data))


def write_jsonl_ids(path: Path, data: list[Any]) -> None:
    path.write_text("".join(json.dumps({"input_ids": ids.tolist()}) + "\n" for ids in data))


def write_text(path: Path, data: list[Any]) -> None:
    path.write_text("".join(_text(ids) + "\n" for ids in data))


def write_tar_text(path: Path, data: list[Any]) -> None:
    _write_tar(path, "txt", map(_text, data))


def write_tar_npy(path: Path, data: list[Any]) -> None:
    _write_tar(path, "npy", iter(data))


def _write_tar(path: Path, suffix: str, values: Iterator[Any]) -> None:
    with webdataset.TarWriter(str(path)) as archive:
        for i, value in enumerate(values):
            archive.write({"__key__": f"{i:06d}", suffix: value})


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
    for sample in webdataset.WebDataset(str(path), shardshuffle=False).decode():
        yield _ids(sample["txt"])


def loop_tar_npy(path: Path) -> Iterator[Any]:
    for sample in webdataset.WebDataset(str(path), shardshuffle=False).decode():
        yield sample["npy"]


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


CASES: dict[str, tuple[Callable[[Path, list[Any]], None], dict[str, Any], Loop, int]] = {
    "jsonl, text": (write_jsonl_text, {"source": "jsonl"}, loop_jsonl_text, MEAN),
    "jsonl, ids": (write_jsonl_ids, {"source": "jsonl"}, loop_jsonl_ids, MEAN),
    "text, lines": (write_text, {"source": "text"}, loop_text, MEAN),
    "webdataset, .txt": (write_tar_text, {"source": "webdataset"}, loop_tar_text, MEAN),
    "webdataset, .npy": (write_tar_npy, {"source": "webdataset"}, loop_tar_npy, MEAN),
    "webdataset, .npy, mean 500": (write_tar_npy, {"source": "webdataset"}, loop_tar_npy, 500),
    "parquet, text": (write_parquet_text, {"source": "parquet"}, loop_parquet_text, MEAN),
    "parquet, ids": (write_parquet_ids, {"source": "parquet"}, loop_parquet_ids, MEAN),
    "huggingface, ids": (write_saved, {"source": "huggingface"}, loop_saved, MEAN),
    "megatron, mean 100": (write_megatron, {"source": "megatron"}, loop_megatron, 100),
    "megatron, mean 500": (write_megatron, {"source": "megatron"}, loop_megatron, 500),
    "python, list of ids": (
        write_items,
        {"source": "python", "path": "benchmarks.throughput.sources:items"},
        loop_items,
        MEAN,
    ),
}


if __name__ == "__main__":
    # The import path of the Python source is that of the module, not of the program.
    from benchmarks.throughput import sources

    sources.main()
