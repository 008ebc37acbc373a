"""Plain text in UTF-8: a sample is a line, a paragraph or a file.

Lines are found as in JSON lines files, and a byte-order mark at the beginning is skipped. A paragraph is a run of lines
that are not empty, with the line ends between them. A file of 0 bytes has no lines and no paragraphs. With ``unit:
file`` it is a rejected sample (``empty``). Text has no fields.
"""

import codecs
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from streampack.core.model.fields import Field
from streampack.sources.files.byte_source import ShardFile
from streampack.sources.files.contents import refuse_no_text
from streampack.sources.files.listing import find
from streampack.sources.formats.jsonl import index_lines
from streampack.sources.formats.rows import FieldReader
from streampack.sources.records import Format, Sample, Shard
from streampack.sources.settings import SourceSettings
from streampack.sources.walk import one_shard_a_file
from streampack.tokenizers.base import Tokenizer
from streampack.tokenizers.token_ids import Encoded


def open_format(settings: SourceSettings, tokenizer: Tokenizer) -> Format:
    """Open text files: list them, and return how to open each as a shard."""
    unit = settings.unit or "line"

    def index(fields: Sequence[Field]) -> Callable[[ShardFile], Shard]:
        """Return a function that indexes an open file as a shard, for the ``fields`` of a run."""
        return partial(TextShard, unit=unit, tokenizer=tokenizer, reader=FieldReader(settings, fields))

    return one_shard_a_file(find(settings.shards, settings.path), index)


class TextShard:
    """A shard of one text file; its index takes 24 bytes per line or paragraph."""

    blocks = ()

    def __init__(self, file: ShardFile, unit: str, tokenizer: Tokenizer, reader: FieldReader) -> None:
        self._file, self._tokenizer, self._reader = file, tokenizer, reader
        if unit == "file":
            refuse_no_text(file)
            head = file.pread(min(file.size, 8), 0)
            begin = len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0
            self._offsets, self._sizes, self._lines = np.array([begin]), np.array([file.size - begin]), np.array([1])
            return
        offsets, sizes, lines = (np.frombuffer(column, np.int64) for column in index_lines(file))
        if unit == "paragraph" and len(lines):
            first = np.append(True, np.diff(lines) > 1)
            last = np.append(first[1:], True)
            offsets, sizes, lines = offsets[first], (offsets + sizes)[last] - offsets[first], lines[first]
        self._offsets, self._sizes, self._lines = offsets, sizes, lines

    def __len__(self) -> int:
        return len(self._offsets)

    def load(self, sample: int) -> Sample | str:
        """Read one line, paragraph or file as a sample, or return the reason why it is rejected."""
        encoded = encode(self._file.pread(int(self._sizes[sample]), int(self._offsets[sample])), self._tokenizer)
        return encoded if isinstance(encoded, str) else self._reader.add(encoded, {})

    def where(self, sample: int) -> str:
        """Return the file and first line number of a sample, for messages."""
        return f"{self._file.name}:line {self._lines[sample]}"


def encode(raw: bytes, tokenizer: Tokenizer) -> Encoded | str:
    """Decode UTF-8 bytes and tokenize the text; return the reason instead if the sample is rejected."""
    try:
        return tokenizer.encode(raw.decode())
    except UnicodeDecodeError:
        return "encoding"
