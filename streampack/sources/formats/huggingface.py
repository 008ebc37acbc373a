"""Datasets of Hugging Face as ``Dataset.save_to_disk`` writes them: a row is a sample.

Theory of operation. The folder holds state.json, which names the files. Each file is an Arrow IPC stream: a schema,
record batches of 1000 rows, an end marker. The index holds the offset, size and number of rows of each batch. It comes
from the headers of the messages (https://arrow.apache.org/docs/format/Columnar.html, "Encapsulated message format"; a
header is a flatbuffer of Message.fbs). A batch is read as a whole, and a window of batches is held at a time. So the
order shuffles the rows of a window. A batch is validated before its rows are used, because damaged offsets would crash
the process.

The package ``datasets`` is not needed, only pyarrow. Call ``flatten_indices()`` on a shuffled or selected dataset
before saving it.
"""

import json
import posixpath
import struct
from typing import Any, NamedTuple

from streampack.errors import DamagedFile, SourceError
from streampack.sources.files.byte_source import MissingFile, ShardFile
from streampack.sources.files.listing import find, measure, read_file
from streampack.sources.formats.arrow import ArrowRows, choose_columns, first_line, need_pyarrow
from streampack.sources.formats.list_columns import GroupedShard
from streampack.sources.formats.rows import RowReader, open_rows
from streampack.sources.records import Format
from streampack.sources.settings import SourceSettings
from streampack.tokenizers.base import Tokenizer

_CONTINUATION = 0xFFFFFFFF
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_MAX_HEADER_BYTES = 1 << 28
_INDICES = ("_indices_data_files", "_indices_files")


def open_format(settings: SourceSettings, tokenizer: Tokenizer) -> Format:
    """Open saved datasets: list their data files, and return how to open each as a shard."""
    need_pyarrow()
    files = [path for folder in find(settings.shards, settings.path) for path in _files(folder.rstrip("/"))]
    return open_rows(settings, tokenizer, lambda file, reader: ArrowShard(file, reader).as_arrays(), files)


def _files(folder: str) -> list[str]:
    """Return the paths of a saved dataset's data files, in its order. Raises SourceError if it is not a dataset."""
    try:
        (state_file,) = measure([posixpath.join(folder, "state.json")])
    except MissingFile as error:
        raise SourceError(f"{folder}: {_why_no_dataset(folder)}") from error
    try:
        state = json.loads(read_file(state_file))
        names = [entry["filename"] for entry in state["_data_files"]]
        moved = any(state.get(key) for key in _INDICES)
        if not all(isinstance(name, str) and name == posixpath.basename(name) for name in names):
            raise ValueError("a file name contains a folder")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"{state_file.path}: the file is damaged ({error!r}). Save the dataset again") from error
    if moved:
        raise SourceError(
            f"{folder}: got a dataset whose rows are selected by indices, expected all rows in order. Save "
            "dataset.flatten_indices() instead"
        )
    if not names:
        raise SourceError(
            f"{folder}: got a dataset without data files, expected at least one file. Save the dataset again"
        )
    return [posixpath.join(folder, name) for name in names]


def _why_no_dataset(folder: str) -> str:
    """Return the error text for a folder without state.json; it names the splits if the folder holds some."""
    try:
        (splits_file,) = measure([posixpath.join(folder, "dataset_dict.json")])
        splits = [str(split) for split in json.loads(read_file(splits_file))["splits"]]
        names = ", ".join(splits)
        return f"got a folder with the splits {names}, expected a single split. Give its folder, {folder}/{splits[0]}"
    except (SourceError, ValueError, KeyError, TypeError, IndexError):
        return "got a folder without state.json, expected a folder that Dataset.save_to_disk wrote"


class _Message(NamedTuple):
    """A message of an Arrow stream: byte offset, size in bytes with its header, and rows (0 for a schema)."""

    offset: int
    size: int
    rows: int


class ArrowShard(GroupedShard):
    """A shard of one Arrow stream: the index of its record batches, and the rows of the batch read last."""

    def __init__(self, file: ShardFile, reader: RowReader) -> None:
        self._pa = need_pyarrow()
        message, self._batches = _index(file)
        try:
            schema = self._pa.ipc.read_schema(self._pa.py_buffer(file.pread(message.size, message.offset)))
            self._names = list(schema.names)
        except Exception as error:
            raise _broken(file, message.offset, first_line(error)) from error
        columns = choose_columns(file.path, self._names, reader.keys, reader.sample_keys)
        largest = max((batch.size for batch in self._batches), default=0)
        super().__init__(file, reader, schema, [batch.rows for batch in self._batches], columns, largest)

    def _read_group(self, group: int) -> ArrowRows:
        """Read and validate the columns of one record batch. Raises DamagedFile."""
        batch = self._batches[group]
        data = self._pa.py_buffer(self._file.pread(batch.size, batch.offset))
        try:
            read = self._pa.ipc.read_record_batch(self._pa.ipc.read_message(data), self._schema)
            if read.num_rows != batch.rows:
                raise ValueError(f"{read.num_rows} rows instead of {batch.rows}")
            columns = {name: read.column(self._names.index(name)) for name in self._columns}
            for column in columns.values():
                column.validate(full=True)
            return ArrowRows(columns)
        except Exception as error:
            raise _broken(self._file, batch.offset, first_line(error)) from error


def _index(file: ShardFile) -> tuple[_Message, list[_Message]]:
    """Return (schema message, record batch messages) of an Arrow stream. Raises SourceError if it is incomplete."""
    schema: _Message | None = None
    batches: list[_Message] = []
    at = 0
    if file.size == 0:
        raise DamagedFile(f"{file.path}: got 0 bytes, expected an Arrow stream. Save the dataset again")
    while True:
        if at + 8 > file.size:
            raise _broken(file, at, "the stream ends without its end marker")
        mark, size = struct.unpack("<II", file.pread(8, at))
        if mark != _CONTINUATION:
            raise _broken(file, at, "no message begins there")
        if size == 0:
            break
        if size > min(_MAX_HEADER_BYTES, file.size - at - 8):
            raise _broken(file, at, f"a header has {size} bytes, but the file has only {file.size - at - 8} bytes left")
        kind, rows, body = _read_header(file, at, file.pread(size, at + 8))
        if body > file.size - at - 8 - size:
            left = file.size - at - 8 - size
            raise _broken(file, at, f"a batch has {body} bytes, but the file has only {left} bytes left")
        message = _Message(at, 8 + size + body, rows)
        if kind == _SCHEMA and schema is None:
            schema = message
        elif kind == _BATCH and schema is not None:
            batches.append(message)
        elif kind == _DICTIONARY:
            raise SourceError(
                f"{file.path}: got dictionary-encoded columns, expected plain columns. Cast the columns and save the "
                "dataset again"
            )
        else:
            raise _broken(file, at, f"got an unexpected message of kind {kind}")
        at += message.size
    if schema is None:
        raise _broken(file, at, "the stream has no schema")
    if at + 8 != file.size:
        raise _broken(file, at + 8, "got data after the end marker")
    return schema, batches


def _read_header(file: ShardFile, at: int, header: bytes) -> tuple[int, int, int]:
    """Return (kind, rows, bytes of the body) from the flatbuffer of a message at offset ``at``. Raises DamagedFile."""
    try:
        message = struct.unpack_from("<I", header)[0]
        kind_at, inner_at, body_at = (_slot(header, message, slot) for slot in (1, 2, 3))
        kind = header[kind_at] if kind_at else 0
        body = struct.unpack_from("<q", header, body_at)[0] if body_at else 0
        rows = 0
        if kind == _BATCH:
            batch = inner_at + struct.unpack_from("<I", header, inner_at)[0]
            rows_at = _slot(header, batch, 0)
            rows = struct.unpack_from("<q", header, rows_at)[0] if rows_at else 0
        if body < 0 or not 0 <= rows <= 8 * body:  # a column takes at least one bit per row
            raise ValueError("impossible sizes")
    except (struct.error, IndexError, ValueError) as error:
        raise _broken(file, at, "a header cannot be decoded") from error
    return kind, rows, body


def _slot(buffer: bytes, table: int, slot: int) -> int:
    """Return the offset of field number ``slot`` of the flatbuffer table at ``table``; 0 if the field is absent."""
    vtable = table - struct.unpack_from("<i", buffer, table)[0]
    if vtable < 0:
        raise ValueError("a table lies outside the buffer")
    if 4 + 2 * slot >= struct.unpack_from("<H", buffer, vtable)[0]:
        return 0
    offset = struct.unpack_from("<H", buffer, vtable + 4 + 2 * slot)[0]
    return table + offset if offset else 0


def _broken(file: ShardFile, offset: int, got: Any) -> DamagedFile:
    """Return the error for an Arrow stream that is damaged at byte ``offset``; ``got`` says what is wrong."""
    return DamagedFile(
        f"{file.path}: at byte {offset}: {got}. The file is cut short, damaged or not an Arrow stream. Save the "
        "dataset again"
    )
