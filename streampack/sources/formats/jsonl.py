"""JSON lines: each line is a JSON object, which is a row.

Theory of operation. The index holds the offset, length and number of every line. Building it scans the file once for
newline bytes, 256 KiB at a time, since larger blocks do not stay in a processor's cache. No JSON is parsed, so a line
that does not parse keeps its place. Empty lines are not samples; a line of blanks is a rejected sample. Lines may end
in LF or CR LF, the last line in neither. A byte-order mark at the beginning is skipped. A file of 0 bytes is an empty
shard. A null value counts as absent. The format is that of https://jsonlines.org and RFC 8259.

Unwanted keys are skipped without building their values. The function ``open_row`` also reads the .json members of tar
shards, and ``index_lines`` also finds the lines of plain text.
"""

import codecs
import re
from array import array
from collections.abc import Callable
from functools import cache
from typing import Any, TypedDict

import msgspec
import numpy as np

from streampack.sources.files.byte_source import ShardFile
from streampack.sources.files.contents import refuse_no_text
from streampack.sources.formats.rows import MISSING, RowReader, missing_from, open_rows
from streampack.sources.records import Format, Sample
from streampack.sources.settings import SourceSettings
from streampack.tokenizers.base import Tokenizer
from streampack.tokenizers.token_ids import Because

_BLOCK_BYTES = 1 << 18
_NEWLINE, _RETURN = 10, 13
_AT = re.compile(r"\(byte (\d+)\)")
_NOT_JSON = re.compile(rb"NaN|Infinity")


def open_format(settings: SourceSettings, tokenizer: Tokenizer) -> Format:
    """Open JSON lines files: list them, and return how to open each as a shard."""
    return open_rows(settings, tokenizer, JsonlShard, from_start=True)


class JsonlShard:
    """A shard of one JSON lines file; its index takes 24 bytes per line."""

    blocks = ()

    def __init__(self, file: ShardFile, reader: RowReader) -> None:
        self._file, self._reader, self._decode = file, reader, open_row(tuple(reader.keys))
        self._offsets, self._sizes, self._lines = index_lines(file)

    def __len__(self) -> int:
        return len(self._offsets)

    def load(self, sample: int) -> Sample | str:
        """Read one line as a sample, or return the reason why it is rejected."""
        line = self._file.pread(self._sizes[sample], self._offsets[sample])
        row = self._decode(line)
        read = row if isinstance(row, str) else self._reader(row)
        return missing_in(line) if read == MISSING else read

    def where(self, sample: int) -> str:
        """Return the file and line number of a sample, for messages."""
        return f"{self._file.name}:line {self._lines[sample]}"


def index_lines(file: ShardFile) -> tuple["array[int]", "array[int]", "array[int]"]:
    """Return (offsets, sizes without line ends, line numbers from 1) of the lines that are not empty, as int64 arrays.

    Offsets and sizes are in bytes. Raises SourceError if the file is no text, or changes during the scan.
    """
    refuse_no_text(file)
    first = file.pread(min(file.size, 8), 0)
    offsets, sizes, lines = array("q"), array("q"), array("q")
    begin = len(codecs.BOM_UTF8) if first.startswith(codecs.BOM_UTF8) else 0
    number, before = 1, 0  # number of the line that begins at `begin`; last byte of the previous block
    for offset in range(0, file.size, _BLOCK_BYTES):
        block = np.frombuffer(file.pread(min(_BLOCK_BYTES, file.size - offset), offset), np.uint8)
        newlines = np.flatnonzero(block == _NEWLINE)
        if offset + len(block) == file.size and block[-1] != _NEWLINE:
            newlines = np.append(newlines, len(block))  # the last line needs no newline
        if len(newlines):
            ends = newlines + offset
            begins = np.concatenate(([begin], ends[:-1] + 1))
            previous = np.where(newlines > 0, block[newlines - 1], before)
            length = ends - begins - ((previous == _RETURN) & (ends > begins))
            kept = length > 0
            offsets.frombytes(begins[kept].astype(np.int64).tobytes())
            sizes.frombytes(length[kept].astype(np.int64).tobytes())
            lines.frombytes((np.flatnonzero(kept) + number).astype(np.int64).tobytes())
            begin, number = int(ends[-1]) + 1, number + len(ends)
        before = int(block[-1])
    return offsets, sizes, lines


@cache
def open_row(keys: tuple[str, ...]) -> Callable[[bytes], dict[str, Any] | str]:
    """Return a function that decodes the bytes of one JSON object to a dict of those ``keys`` that it has.

    For bytes that cannot be decoded the function returns a reason, ``encoding`` or ``json``. The reason ``json`` (not
    valid JSON, or not an object) is a Because with the parser's message.

    >>> open_row(("text",))(b'{"text": "hi", "id": 7}'), open_row(("text",))(b"[]")
    ({'text': 'hi'}, 'json')
    """
    row = TypedDict("row", dict.fromkeys(keys, Any), total=False)  # type: ignore[misc]
    decode = msgspec.json.Decoder(row).decode

    def load(line: bytes) -> dict[str, Any] | str:
        """Decode one line to a dict of the wanted keys, or return a reason."""
        try:
            return decode(line)  # type: ignore[return-value]
        except UnicodeDecodeError:
            return "encoding"
        except (ValueError, RecursionError) as error:
            return Because("json", _json_error(line, error))

    return load


def missing_in(line: bytes) -> Because:
    """Return the reason ``missing`` for a JSON object without a sample, with the keys that the object has."""
    try:
        row = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except ValueError:  # a key that is not UTF-8
        return Because(MISSING, "")
    return missing_from(key for key, value in row.items() if bytes(value) != b"null")


def _json_error(line: bytes, error: Exception) -> str:
    """Return a readable message for the parser's ``error`` on a line that is not a JSON object."""
    if not line.strip():
        return "the line is blank"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    words = str(error).removeprefix("JSON is malformed: ")
    at = _AT.search(words)
    number = _NOT_JSON.match(line, int(at[1])) if at else None
    return words if number is None else f"{words}: {number[0].decode()} is not JSON"
