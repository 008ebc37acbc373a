"""Kinds of files, by their first bytes: compressed files, and files that are no text.

A name says little about a file: ``a.jsonl`` may be compressed, and ``a.txt`` may hold UTF-16. Read as lines, bytes of
such a file would be trained on where a line happens to be valid text. So a source refuses the file, with the command
that converts it.
"""

import re
from typing import NamedTuple

from streampack.errors import SourceError
from streampack.sources.files.byte_source import ShardFile

GZIP, ZSTD = "gzip", "Zstandard"
"""The kinds of compression that sources read."""
FIRST_BYTES = 4096
"""Bytes at the start of a file that show its kind."""

_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18", re.DOTALL)
_MOST_BINARY = 0.1
"""Share of bytes that text in UTF-8 does not have, above which a file is no text."""
_FEW_BYTES = 64
"""A text may have up to this number of such bytes; the samples with them are rejected."""
_CONTROL = bytes({*range(32), 127} - set(b"\b\t\n\v\f\r\x1b"))


class _Kind(NamedTuple):
    """A kind of files: a pattern of their first bytes, the name for messages, and what to do."""

    pattern: re.Pattern[bytes]
    name: str
    advice: str


def _kind(pattern: bytes, name: str, advice: str) -> _Kind:
    return _Kind(re.compile(pattern, re.DOTALL), name, advice)


_COMPRESSED = (
    _kind(rb"\x1f\x8b", GZIP, "gunzip"),
    _kind(rb"\x28\xb5\x2f\xfd", ZSTD, "zstd -d"),
    _kind(rb"[\x1e\x22-\x27]\xb5\x2f\xfd", "an old version of Zstandard", "zstd -d"),
    _kind(rb"\xfd7zXZ\0", "xz", "xz -d"),
    _kind(rb"\x5d\0\0.{3}", "lzma", "xz -d --format=lzma"),
    _kind(rb"BZh[1-9]", "bzip2", "bzip2 -d"),
    _kind(rb"\x04\x22\x4d\x18|\x02\x21\x4c\x18", "lz4", "lz4 -d"),
    _kind(rb"\xff\x06\0\0sNaPpY", "snappy", "snzip -d"),
    _kind(rb"\x1f[\x9d\xa0\x1e]", "compress (.Z)", "gzip -d"),
    _kind(rb"PK(\x03\x04|\x05\x06|\x07\x08)", "zip", "unzip"),
    _kind(rb"7z\xbc\xaf\x27\x1c", "7z", "7z x"),
    _kind(rb"Rar!\x1a\x07", "rar", "unrar x"),
    _kind(rb"LZIP[\x00\x01]", "lzip", "lzip -d"),
    _kind(rb"\x89LZO\0", "lzop", "lzop -d"),
)
_ICONV = "Convert the file: iconv -f {} -t UTF-8"
_NO_TEXT = (
    _kind(rb"\xff\xfe\0\0|\0\0\xfe\xff", "text in UTF-32", _ICONV.format("UTF-32")),
    _kind(rb"\xff\xfe|\xfe\xff", "text in UTF-16", _ICONV.format("UTF-16")),
    _kind(rb"([\t\n\r -~]\0){8}", "text in UTF-16", _ICONV.format("UTF-16LE")),
    _kind(rb"(\0[\t\n\r -~]){8}", "text in UTF-16", _ICONV.format("UTF-16BE")),
    _kind(rb"PAR1\x15", "a Parquet file", "Set `source: parquet`"),
    _kind(rb"ARROW1\0|\xff\xff\xff\xff..\0\0", "an Arrow file", "For a saved dataset, set `source: "
          "huggingface` and its folder as `path`. Else write the rows as Parquet"),
    _kind(rb".{257}ustar", "a tar archive", "Set `source: webdataset`"),
    _kind(rb"MMIDIDX\0", "an index of Megatron data", "Set `source: megatron`"),
    _kind(rb"\x93NUMPY", "a NumPy array", "Write its ids as rows, or put it into a tar file for `source: webdataset`"),
    _kind(rb"%PDF-", "a PDF document", "Extract its text first"),
    _kind(rb"\x89PNG|\xff\xd8\xff|GIF8[79]a|RIFF.{4}WEBP", "an image", "Remove the file from `shards`"),
    _kind(rb"\x7fELF", "a program", "Remove the file from `shards`"),
    _kind(rb"\x89HDF", "an HDF5 file", "Write its rows as Parquet or JSON lines"),
    _kind(rb"SQLite format 3\0", "an SQLite database", "Write its rows as Parquet or JSON lines"),
    _kind(rb"Obj\x01", "an Avro file", "Write its rows as Parquet or JSON lines"),
)  # fmt: skip


def compression_of(file: ShardFile) -> str | None:
    """Return the kind of compression of a file that can be read, ``GZIP`` or ``ZSTD``; None for other contents.

    Skippable frames before the first frame of data are Zstandard, as pzstd writes them; LZ4 may have them, too. Raises
    SourceError, with the command that decompresses the file, for other kinds.
    """
    at, first = 0, file.pread(min(file.size, 16), 0)
    while _SKIPPABLE.match(first) and len(first) >= 8:
        at += 8 + int.from_bytes(first[4:8], "little")
        first = file.pread(min(max(file.size - at, 0), 16), at) if at < file.size else b""
    kind = _find(_COMPRESSED, first)
    if file.path.lower().endswith(".br"):  # Brotli has no mark in its bytes
        kind = _Kind(re.compile(b""), "Brotli", "brotli -d")
    if kind is not None and kind.name not in (GZIP, ZSTD):
        raise SourceError(
            f"{file.path}: got a file compressed with {kind.name}, expected a plain, gzip or Zstandard file. "
            f"Decompress the file: {kind.advice}"
        )
    return kind.name if kind else ZSTD if at else None


def refuse_no_text(file: ShardFile) -> None:
    """Raise SourceError, with what to do, if the first bytes of a file show that it is no text in UTF-8."""
    first = file.pread(min(file.size, FIRST_BYTES), 0)
    kind = _find(_NO_TEXT, first)
    if kind is None and _is_binary(first):
        kind = _find(_COMPRESSED, first) or _Kind(re.compile(b""), "", _ICONV.format("ENCODING"))
        name = f"a file compressed twice, with {kind.name} inside" if kind.name else "bytes that are no text in UTF-8"
        kind = kind._replace(
            name=name, advice=kind.advice if not kind.pattern.pattern else f"Decompress it: {kind.advice}"
        )
    if kind is not None:
        raise SourceError(f"{file.path}: got {kind.name}, expected text in UTF-8. {kind.advice}")


def _find(kinds: tuple[_Kind, ...], first: bytes) -> _Kind | None:
    """Return the kind of the file with these ``first`` bytes; None if it is none of ``kinds``."""
    return next((kind for kind in kinds if kind.pattern.match(first)), None)


def _is_binary(first: bytes) -> bool:
    """Return whether too many bytes cannot be in a text: control characters, NUL, and bytes that are not UTF-8."""
    most = _MOST_BINARY * len(first)
    if first.count(0) > max(most, 1):
        return True
    control = len(first) - len(first.translate(None, _CONTROL))
    not_utf8 = (
        0
        if first.isascii()
        else sum("\udc80" <= letter <= "\udcff" for letter in first.decode("utf-8", "surrogateescape"))
    )
    return control + not_utf8 > max(most, _FEW_BYTES)
