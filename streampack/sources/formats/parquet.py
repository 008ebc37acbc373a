"""Parquet files: a row is a sample.

Theory of operation. The index is the file's footer. A row group is read as a whole, only the needed columns. So the
order shuffles the rows of a window of row groups, which memory holds decoded. Write row groups of about ten thousand
rows, and at least as many files as there are partitions. With images in the rows, write row groups of about a hundred
megabytes.

A truncated file has no footer and raises DamagedFile. So does a file of 0 bytes, or one whose pages do not decode.
"""

from collections.abc import Sequence
from typing import Any

from streampack.errors import DamagedFile, SourceError
from streampack.sources.files.byte_source import PositionedFile, ShardFile
from streampack.sources.formats.arrow import ArrowRows, choose_columns, first_line, need_pyarrow
from streampack.sources.formats.list_columns import GroupedShard
from streampack.sources.formats.rows import RowReader, open_rows
from streampack.sources.records import Format
from streampack.sources.settings import SourceSettings
from streampack.tokenizers.base import Tokenizer

_SIZES = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4}
"""Bytes of a value in memory, by the type in the file; 8 for other types."""


def open_format(settings: SourceSettings, tokenizer: Tokenizer) -> Format:
    """Open Parquet files: list them, and return how to open each as a shard."""
    need_pyarrow()
    return open_rows(settings, tokenizer, lambda file, reader: ParquetShard(file, reader).as_arrays())


class ParquetShard(GroupedShard):
    """A shard of one Parquet file: its footer, and the rows of the row group read last."""

    def __init__(self, file: ShardFile, reader: RowReader) -> None:
        pq, pa = need_pyarrow("pyarrow.parquet"), need_pyarrow()
        if file.size == 0:
            raise DamagedFile(f"{file.path}: got 0 bytes, expected a Parquet file. Write the file again")
        try:
            self._parquet = pq.ParquetFile(
                pa.PythonFile(PositionedFile(file), mode="r"), page_checksum_verification=True, pre_buffer=False
            )
            footer = self._parquet.metadata
            groups = [footer.row_group(group) for group in range(footer.num_row_groups)]
            if any(not 0 <= group.num_rows <= group.column(0).num_values for group in groups):
                raise ValueError("a row group has more rows than values")
            if any(group.num_columns != footer.num_columns for group in groups):
                raise ValueError("a row group has another number of columns than the schema")
            schema = self._parquet.schema_arrow
            names = list(schema.names)
            read = set(choose_columns(file.path, names, reader.keys, reader.sample_keys) if groups else [])
            paths = [self._parquet.schema.column(number).path for number in range(footer.num_columns)]
            numbers = [number for number, path in enumerate(paths) if path.partition(".")[0] in read]
            most = max((_bytes_of(group, numbers) for group in groups), default=0)
        except SourceError:
            raise
        except Exception as error:  # ArrowInvalid, OSError, and any other for a damaged footer
            raise _broken(file, error) from error
        columns = [name for name in names if name in read]
        super().__init__(file, reader, schema, [group.num_rows for group in groups], columns, most)

    def _read_group(self, group: int) -> ArrowRows:
        """Read the columns of one row group. Raises DamagedFile."""
        try:
            table = self._parquet.read_row_group(group, columns=self._columns, use_threads=False)
            if table.num_rows != self.blocks[group]:
                raise ValueError(f"{table.num_rows} rows instead of {self.blocks[group]}")
            return ArrowRows({name: table.column(name) for name in self._columns})
        except SourceError:
            raise
        except Exception as error:
            raise _broken(self._file, error, f" in row group {group}") from error


def _bytes_of(group: Any, columns: Sequence[int]) -> int:
    """Return about how many bytes the columns with these numbers of a row group take in memory, from the footer."""
    parts = [group.column(number) for number in columns]
    return sum(max(part.total_uncompressed_size, part.num_values * _SIZES.get(part.physical_type, 8)) for part in parts)


def _broken(file: ShardFile, error: Any, where: str = "") -> DamagedFile:
    """Return the error for a damaged Parquet file; ``where`` names the row group, if known."""
    return DamagedFile(
        f"{file.path}: the file is cut short, damaged or not a Parquet file{where} ({first_line(error)}). Copy or "
        "write the file again"
    )
