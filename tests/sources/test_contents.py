"""Kinds of files by their bytes: compressed ones are read or refused by name, and what is no text is never trained."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import random
import sqlite3
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pyarrow import feather, parquet

import streampack
from streampack.errors import SourceError
from streampack.sources import SourceSettings, open_source

LINES = [f"line {number} of the file, {number * 37 % 101}" for number in range(400)]
PLAIN = "".join(f"{line}\n" for line in LINES).encode()
NOISE = random.Random(7).randbytes(3000)
Unit = Any


def skippable(data: bytes, number: int = 0) -> bytes:
    return bytes([0x50 + number]) + b"\x2a\x4d\x18" + len(data).to_bytes(4, "little") + data


def texts(source: str, path: Any, **more: Any) -> list[str | None]:
    settings = SourceSettings(source, path=str(path), shuffle=False, **more)  # type: ignore[arg-type]
    records = open_source(settings).read(0, 1, seed=0, passes=1)
    return [None if each.reason else bytes(each.tokens[:-1].tolist()).decode() for each in records]


@given(st.lists(st.tuples(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1, max_size=9),
                          st.booleans(), st.binary(max_size=9), st.integers(0, 15)), max_size=8),
       st.binary(max_size=5))  # fmt: skip
def test_frames_and_skippable_frames_are_read_as_the_text_in_them(
    tmp_path_factory: pytest.TempPathFactory, frames: list[tuple[str, bool, bytes, int]], last: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "frames.zst"
    data, lines = skippable(b"a number of bytes, as pzstd writes it"), []
    for text, ends, skipped, number in frames:
        data += zstd.compress(f"x{text}{chr(10) * ends}".encode()) + skippable(skipped, number)
        lines.append(f"x{text}{chr(10) * ends}")
    path.write_bytes(data + (skippable(last) if last else b""))
    assert texts("text", path) == [line for line in "".join(lines).split("\n") if line]


def long_window() -> bytes:
    window, matching = zstd.CompressionParameter.window_log, zstd.CompressionParameter.enable_long_distance_matching
    options = {int(window): 31, int(matching): 1}
    compressor = zstd.ZstdCompressor(options=options)
    return compressor.compress(PLAIN) + compressor.flush()


def test_a_file_written_with_the_longest_window_is_read(tmp_path: Path) -> None:
    path = tmp_path / "long.zst"
    path.write_bytes(long_window())
    assert texts("text", path) == LINES


def test_a_file_that_needs_a_dictionary_says_so(tmp_path: Path) -> None:
    dictionary = zstd.train_dict([line.encode() * 3 for line in LINES], 2000)
    (tmp_path / "a.zst").write_bytes(zstd.compress(PLAIN, zstd_dict=dictionary))
    with pytest.raises(SourceError, match=r"a\.zst: got a Zstandard file that needs a dictionary.*zstd -d -D DICTION"):
        texts("text", tmp_path / "a.zst")


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", PLAIN)
    return file.getvalue()


REFUSED: dict[str, tuple[bytes, str]] = {
    "xz": (lzma.compress(PLAIN), "xz -d"),
    "lzma": (lzma.compress(PLAIN, format=lzma.FORMAT_ALONE), "xz -d --format=lzma"),
    "bzip2": (bz2.compress(PLAIN), "bzip2 -d"),
    "zip": (zipped(), "unzip"),
    "lz4": (b"\x04\x22\x4d\x18" + NOISE, "lz4 -d"),
    "snappy": (b"\xff\x06\0\0sNaPpY" + NOISE, "snzip -d"),
    "compress (.Z)": (b"\x1f\x9d\x90" + NOISE, "gzip -d"),
    "7z": (b"7z\xbc\xaf\x27\x1c" + NOISE, "7z x"),
    "rar": (b"Rar!\x1a\x07\x01\x00" + NOISE, "unrar x"),
    "lzip": (b"LZIP\x01" + NOISE, "lzip -d"),
    "an old version of Zstandard": (b"\x27\xb5\x2f\xfd" + NOISE, "zstd -d"),
}
SKIPPED_LZ4 = skippable(b"1234") + b"\x04\x22\x4d\x18" + NOISE


@pytest.mark.parametrize("source", ["text", "jsonl", "webdataset"])
@pytest.mark.parametrize("kind", REFUSED)
def test_other_compressed_files_are_refused_by_name_with_the_command(kind: str, source: str, tmp_path: Path) -> None:
    data, command = REFUSED[kind]
    path = tmp_path / "part.txt"
    path.write_bytes(data)
    with pytest.raises(SourceError) as error:
        texts(source, path)
    assert str(error.value) == (
        f"{path}: got a file compressed with {kind}, expected a plain, gzip or Zstandard file. "
        f"Decompress the file: {command}"
    )


def test_lz4_after_a_skippable_frame_and_brotli_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(SKIPPED_LZ4)
    with pytest.raises(SourceError, match="compressed with lz4"):
        texts("text", tmp_path / "a.txt")
    (tmp_path / "a.txt.br").write_bytes(NOISE)
    with pytest.raises(SourceError, match="compressed with Brotli"):
        texts("text", tmp_path / "a.txt.br")


def parquet_file(path: Path) -> None:
    parquet.write_table(pa.table({"text": LINES}), path, compression="none")


def arrow_stream(path: Path) -> None:
    table = pa.table({"text": LINES})
    with path.open("wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


def database(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("create table rows (text)")
    connection.commit()
    connection.close()


def as_npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("a.txt")
        info.size = len(PLAIN)
        archive.addfile(info, io.BytesIO(PLAIN))


NO_TEXT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "utf-16": (lambda path: path.write_bytes(PLAIN.decode().encode("utf-16")), "UTF-16. .*iconv -f UTF-16 -t UTF-8"),
    "utf-16le": (lambda path: path.write_bytes(PLAIN.decode().encode("utf-16-le")), "UTF-16. .*iconv -f UTF-16LE"),
    "utf-16be": (lambda path: path.write_bytes(PLAIN.decode().encode("utf-16-be")), "UTF-16. .*iconv -f UTF-16BE"),
    "utf-32": (lambda path: path.write_bytes(PLAIN.decode().encode("utf-32")), "UTF-32. .*iconv -f UTF-32 -t UTF-8"),
    "short utf-16": (lambda path: path.write_bytes("hi\nyou".encode("utf-16-le")), "iconv -f ENCODING"),
    "cp1251": (lambda path: path.write_bytes(("привет мир " * 99).encode("cp1251")), "no text in UTF-8. .*iconv"),
    "parquet": (parquet_file, "a Parquet file.*Set `source: parquet`"),
    "arrow": (arrow_stream, "an Arrow file.*source: huggingface"),
    "feather": (lambda path: feather.write_feather(pa.table({"a": LINES}), str(path), "uncompressed"), "an Arrow file"),
    "npy": (lambda path: path.write_bytes(as_npy(np.arange(999))), "a NumPy array"),
    "png": (lambda path: Image.new("RGB", (64, 64)).save(path, "PNG"), "an image"),
    "program": (lambda path: path.write_bytes(Path(sys.executable).resolve().read_bytes()[:9000]), "a program"),
    "sqlite": (database, "an SQLite database"),
    "tar": (tar, "a tar archive.*Set `source: webdataset`"),
    "pdf": (lambda path: path.write_bytes(b"%PDF-1.7\n1 0 obj\n<< /Type /Catalog >>\nendobj\n"), "a PDF document"),
    "zlib": (lambda path: path.write_bytes(zlib.compress(PLAIN)), "no text in UTF-8"),
    "noise": (lambda path: path.write_bytes(NOISE), "no text in UTF-8"),
    "gzip twice": (lambda path: path.write_bytes(gzip.compress(gzip.compress(PLAIN))), "compressed twice, with gzip"),
}


@pytest.mark.parametrize("unit", ["line", "paragraph", "file", "jsonl"])
@pytest.mark.parametrize("kind", NO_TEXT)
def test_a_file_that_is_no_text_is_refused_by_name(kind: str, unit: Unit, tmp_path: Path) -> None:
    path = tmp_path / "part"
    write, expected = NO_TEXT[kind]
    write(path)
    with pytest.raises(SourceError, match=expected) as error:
        texts("jsonl", path) if unit == "jsonl" else texts("text", path, unit=unit)
    assert str(error.value).startswith(f"{path}: got ")


@pytest.mark.parametrize("data", [skippable(b"1234") + zstd.compress(PLAIN), bz2.compress(PLAIN), NOISE])
def test_no_byte_of_a_later_file_that_is_no_text_is_trained(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "0.txt").write_text("first\nsecond\n")
    (tmp_path / "1.txt").write_bytes(data)
    options: Any = {"poison": "drop", "format": "numpy", "shuffle": False, "budget": 256, "tail": "pad"}
    trained = []
    is_read = data.startswith(b"\x50")
    with (
        contextlib.nullcontext() if is_read else pytest.raises(SourceError, match=r"1\.txt: got"),
        streampack.local(str(tmp_path / "*.txt"), **options) as loader,
    ):
        for pack in loader:
            for sample in range(len(pack.sample_ids)):
                start, size = pack.cu_seqlens_padded[sample], np.diff(pack.cu_seqlens)[sample]
                trained.append(bytes(pack.input_ids[start : start + size - 1].tolist()).decode())
    assert set(trained) <= {"first", "second", *(LINES if is_read else ())}
    assert len(trained) == 402 or not is_read


@given(st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Z", "M")), min_size=1, max_size=300))
def test_no_text_in_utf8_is_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.txt"
    path.write_bytes(b"\xef\xbb\xbfx" + text.encode())
    assert texts("text", path, unit="file") == [f"x{text}"]


@given(st.binary(min_size=1500, max_size=6000))
def test_deflated_noise_is_never_a_sample(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.txt"
    path.write_bytes(zlib.compress(NOISE + data)[2:])
    with pytest.raises(SourceError, match="no text in UTF-8"):
        texts("text", path)
