"""JSON lines: one object a line, holding a text or token ids.

Theory of operation. The index is the offset, length and number of every line, found by scanning the file for
newline bytes once, 1 MiB at a time; no JSON is parsed for it. So a line that does not parse still has its place.
Lines that are empty are no records (a file may end with or without a newline, lines may end in CR LF); a line of
blanks is one, and rejected. A byte-order mark at the very beginning is passed over. A file of 0 bytes is an
empty shard. A field that is null counts as absent. Format: https://jsonlines.org and RFC 8259.

Fields that are not asked for are skipped without being built. ``open_row`` is also what reads the .json members
of tar shards.
"""

import codecs
from array import array
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
import numpy as np

from streampack.sources import Shard, ShardFile, refuse_compressed
from streampack.sources.tokenizers import Encoded, Tokenizer, Tokens, as_tokens

Load: TypeAlias = Callable[[bytes], Tokens | str]

_BLOCK_BYTES = 1 << 20
_NEWLINE, _RETURN = 10, 13


def format_(text_key: str | None, tokens_key: str | None, tokenizer: Tokenizer) -> Callable[[ShardFile], Shard]:
    """What open_source calls: a function from an open file to its index."""
    load = open_row(text_key, tokens_key, tokenizer)
    return lambda file: JsonlShard(file, load)


class JsonlShard:
    """An indexed file of JSON lines; 24 bytes are held for each."""

    def __init__(self, file: ShardFile, load: Load) -> None:
        self._file, self._load = file, load
        self._offsets, self._sizes, self._lines = index_lines(file)

    def __len__(self) -> int:
        return len(self._offsets)

    def load(self, sample: int) -> Tokens | str:
        return self._load(self._file.pread(self._sizes[sample], self._offsets[sample]))

    def where(self, sample: int) -> str:
        return f"{self._file.name}:line {self._lines[sample]}"


def index_lines(file: ShardFile) -> tuple["array[int]", "array[int]", "array[int]"]:
    """(offsets, sizes without the line's end, numbers from 1) of the lines that are not empty; three of int64.

    Raises SourceError when the file is compressed, or changes meanwhile.
    """
    first = file.pread(min(file.size, 8), 0)
    refuse_compressed(file, first)
    offsets, sizes, lines = array("q"), array("q"), array("q")
    begin = len(codecs.BOM_UTF8) if first.startswith(codecs.BOM_UTF8) else 0
    number, before = 1, 0  # of the line that begins at `begin`; the byte before the block
    for offset in range(0, file.size, _BLOCK_BYTES):
        block = np.frombuffer(file.pread(min(_BLOCK_BYTES, file.size - offset), offset), np.uint8)
        found = np.flatnonzero(block == _NEWLINE)
        if offset + len(block) == file.size and block[-1] != _NEWLINE:
            found = np.append(found, len(block))  # the last line needs no newline
        if len(found):
            ends = found + offset
            begins = np.concatenate(([begin], ends[:-1] + 1))
            previous = np.where(found > 0, block[found - 1], before)
            length = ends - begins - ((previous == _RETURN) & (ends > begins))
            kept = length > 0
            offsets.frombytes(begins[kept].astype(np.int64).tobytes())
            sizes.frombytes(length[kept].astype(np.int64).tobytes())
            lines.frombytes((np.flatnonzero(kept) + number).astype(np.int64).tobytes())
            begin, number = int(ends[-1]) + 1, number + len(ends)
        before = int(block[-1])
    return offsets, sizes, lines


def open_row(text_key: str | None, tokens_key: str | None, tokenizer: Tokenizer) -> Load:
    """A function from the bytes of one JSON object to token ids [T] int32, or to the reason why there are none.

    It looks at the field ``text_key``, or ``tokens_key``; with neither at ``text``, ``tokens``, ``input_ids``: the
    first that is there. Reasons: ``json`` (does not parse, or is no object), ``encoding``, ``missing``, those of
    as_tokens, and the tokenizer's own.

    >>> from streampack.sources import BytesTokenizer
    >>> open_row(None, None, BytesTokenizer())(b'{"text": "hi", "id": 7}')
    array([104, 105, 256], dtype=int32)
    """
    if text_key is not None:
        is_text = {text_key: True}
    elif tokens_key is not None:
        is_text = {tokens_key: False}
    else:
        is_text = {"text": True, "tokens": False, "input_ids": False}
    fields = {f"field_{i}": key for i, key in enumerate(is_text)}  # a key may be no Python name
    types: list[tuple[str, Any, None]] = [
        (field, str | None if is_text[key] else list[int] | None, None) for field, key in fields.items()
    ]
    decode = msgspec.json.Decoder(msgspec.defstruct("Row", types, rename=fields, gc=False)).decode
    looks = [(field, is_text[key]) for field, key in fields.items()]

    def load(line: bytes) -> Tokens | str:
        try:
            row = decode(line)
        except msgspec.ValidationError:
            return _load_slowly(line, is_text, tokenizer)
        except UnicodeDecodeError:
            return "encoding"
        except (ValueError, RecursionError):
            return "json"
        for field, text in looks:
            value = getattr(row, field)
            if value is not None:
                return ids_of(tokenizer.encode(value)) if text else as_tokens(value)
        return "missing"

    return load


def _load_slowly(line: bytes, is_text: dict[str, bool], tokenizer: Tokenizer) -> Tokens | str:
    """For a line with a field that is not of the type expected: maybe not the one that is wanted."""
    try:
        row = msgspec.json.decode(line)
    except UnicodeDecodeError:
        return "encoding"
    except (ValueError, RecursionError):
        return "json"
    if not isinstance(row, dict):
        return "json"
    for key, text in is_text.items():
        value = row.get(key)
        if value is not None:
            return _check(value, text, tokenizer)
    return "missing"


def _check(value: object, text: bool, tokenizer: Tokenizer) -> Tokens | str:
    if text:
        return ids_of(tokenizer.encode(value)) if isinstance(value, str) else "dtype"
    if not isinstance(value, list):
        return "dtype"
    if any(isinstance(item, list) for item in value):
        return "ragged"
    return as_tokens(value) if all(type(item) is int for item in value) else "dtype"


def ids_of(encoded: Encoded | str) -> Tokens | str:
    return encoded if isinstance(encoded, str) else encoded.tokens
