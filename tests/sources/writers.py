"""The same texts as files of every format, and as objects of Python; rows as files."""

import io
import itertools
import json
import struct
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from streampack.sources import SourceSettings, TokenizerSettings, open_tokenizer

SIZES = (5, 0, 70, 1, 12)  # samples a file; the second has none
number = 7
rows_here: list[Any] = []


PLAIN = open_tokenizer(TokenizerSettings("bytes", append_eos=False))


def texts_of(count: int, file: int) -> list[str]:
    return [f"{file}.{sample}" for sample in range(count)]


EVERY = sorted(itertools.chain(*(texts_of(count, file) for file, count in enumerate(SIZES))))


def write_jsonl(folder: Path) -> SourceSettings:
    for file, count in enumerate(SIZES):
        lines = [json.dumps({"text": text}) + "\n" for text in texts_of(count, file)]
        (folder / f"{file}.jsonl").write_text("".join(lines))
    return SourceSettings("jsonl", f"{folder}/*.jsonl")


def write_tar(folder: Path) -> SourceSettings:
    for file, count in enumerate(SIZES):
        with tarfile.open(folder / f"{file}.tar", "w") as archive:
            for sample, text in enumerate(texts_of(count, file)):
                info = tarfile.TarInfo(f"{sample}.txt")
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text.encode()))
    return SourceSettings("webdataset", f"{folder}/*.tar")


def write_parquet(folder: Path) -> SourceSettings:
    for file, count in enumerate(SIZES):
        table = pa.table({"id": list(range(count)), "text": pa.array(texts_of(count, file), pa.string())})
        pq.write_table(table, folder / f"{file}.parquet", row_group_size=4)
    return SourceSettings("parquet", f"{folder}/*.parquet")


def write_text(folder: Path) -> SourceSettings:
    for file, count in enumerate(SIZES):
        (folder / f"{file}.txt").write_text("\n".join(texts_of(count, file)))
    return SourceSettings("text", f"{folder}/*.txt")


def write_paragraphs(folder: Path) -> SourceSettings:
    for file, count in enumerate(SIZES):
        (folder / f"{file}.txt").write_text("\n\n\r\n\n".join(texts_of(count, file)) + "\n")
    return SourceSettings("text", f"{folder}/*.txt", unit="paragraph")


def write_files(folder: Path) -> SourceSettings:
    for text in EVERY:
        (folder / f"{text}.txt").write_text(text)
    return SourceSettings("text", f"{folder}/*.txt", unit="file")


def megatron(prefix: Path, sequences: list[bytes], code: int = 1) -> Path:
    """The bytes of version 1, by hand; ``code`` 1 is uint8."""
    item = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}[code]
    Path(f"{prefix}.bin").write_bytes(b"".join(sequences))
    pointers = [0, *itertools.accumulate(map(len, sequences))]
    count = len(sequences)
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, code, count, count + 1)
        + b"".join(struct.pack("<i", len(sequence) // item) for sequence in sequences)
        + b"".join(struct.pack("<q", pointer) for pointer in pointers[:-1])
        + b"".join(struct.pack("<q", document) for document in range(count + 1))
    )
    return prefix


def write_megatron(folder: Path) -> SourceSettings:
    for file, count in enumerate(SIZES):
        megatron(folder / f"{file}", [text.encode() for text in texts_of(count, file)])
    return SourceSettings("megatron", f"{folder}/*")


def arrow_stream(path: Path, table: pa.Table, batch: int = 4) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)


def write_saved(folder: Path) -> SourceSettings:
    names = [f"data-{file:05d}-of-{len(SIZES):05d}.arrow" for file in range(len(SIZES))]
    for file, count in enumerate(SIZES):
        arrow_stream(folder / names[file], pa.table({"text": pa.array(texts_of(count, file), pa.string())}))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return SourceSettings("huggingface", path=str(folder))


THINGS = {"list": EVERY}


class Thing:
    """What the import paths of these tests name."""

    items = EVERY

    def __getitem__(self, index: int) -> str:
        return EVERY[index]

    def __len__(self) -> int:
        return len(EVERY)


class Again:
    def __iter__(self) -> Iterator[str]:
        return iter(EVERY)


thing = Thing()


again = Again()


once = iter(EVERY)


def divided(partition: int, partitions: int) -> Iterator[str]:
    yield from EVERY[partition::partitions]


def generated() -> Iterator[str]:
    yield from EVERY


def made() -> list[str]:
    return EVERY


def wants(much: int) -> list[int]:
    return [much]


def failing() -> Iterator[str]:
    yield "first"
    raise RuntimeError("the store\nis down")


def mixed() -> list[object]:
    return ["a", {"text": "b"}, {"input_ids": [1, 2]}, [3, 4], np.array([5], np.uint16), 7, None, [1.5], {"x": 1}, []]


def imported(name: str) -> Callable[[Path], SourceSettings]:
    return lambda folder: SourceSettings("python", path=f"{__name__}:{name}")


WRITERS: dict[str, Callable[[Path], SourceSettings]] = {
    "jsonl": write_jsonl,
    "webdataset": write_tar,
    "parquet": write_parquet,
    "text": write_text,
    "paragraph": write_paragraphs,
    "file": write_files,
    "megatron": write_megatron,
    "huggingface": write_saved,
    "python object": imported("thing"),
    "python list": imported("made"),
    "python generator": imported("generated"),
    "python iterable": imported("again"),
    "python divided": imported("divided"),
}


def write_rows(kind: str, folder: Path, rows: list[dict[str, Any]], **more: Any) -> SourceSettings:
    """The rows as a source of this kind, in their order."""
    path = folder / "a"
    keys = {key for row in rows for key in row}
    table = [{key: row.get(key) for key in keys} for row in rows]  # its columns are the first row's
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(table), path)
    elif kind == "huggingface":
        path.mkdir()
        arrow_stream(path / "d.arrow", pa.Table.from_pylist(table))
        (path / "state.json").write_text('{"_data_files": [{"filename": "d.arrow"}]}')
    elif kind == "webdataset":
        write_members(path, [(f"{i}.json", json.dumps(row).encode()) for i, row in enumerate(rows)])
    else:
        rows_here[:] = rows
        return SourceSettings("python", path=f"{__name__}:rows_here", shuffle=False, **more)
    return SourceSettings(kind, path=str(path), shuffle=False, **more)  # type: ignore[arg-type]


def write_members(path: Path, members: list[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def npy(values: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(values))
    return buffer.getvalue()
