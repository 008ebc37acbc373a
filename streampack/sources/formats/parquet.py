"""Parquet files: a row is a sample.

Theory of operation. The index is the file's footer. A row group is read as a whole, only the needed columns, and one
row group is held at a time. So the order shuffles the row groups of a file, and the rows in each. Memory holds one
decoded row group: write row groups of about ten thousand rows, and at least as many files as there are partitions.
With images in the rows, write row groups of about a hundred megabytes.

A truncated file has no footer and raises DamagedFile. So does a file of 0 bytes, or one whose pages do not decode.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from streampack.core.model.fields import Field
from streampack.errors import DamagedFile, SourceError
from streampack.sources.files.byte_source import PositionedFile, ShardFile
from streampack.sources.files.listing import find, measure
from streampack.sources.formats.arrow import ArrowRows, choose_columns, first_line, need_pyarrow
from streampack.sources.formats.list_columns import ListShard, plan_of
from streampack.sources.formats.rows import MISSING, RowReader, missing_from
from streampack.sources.records import AnyShard, Format, Sample
from streampack.sources.settings import SourceSettings
from streampack.sources.walk import one_shard_a_file
from streampack.tokenizers.base import Tokenizer


def open_format(settings: SourceSettings, tokenizer: Tokenizer) -> Format:
    """Open Parquet files: list them, and return how to open each as a shard."""
    need_pyarrow()

    def index(fields: Sequence[Field]) -> Callable[[ShardFile], AnyShard]:
        """Return a function that indexes an open file as a shard, for the ``fields`` of a run."""
        reader = RowReader(settings, tokenizer, fields)
        return lambda file: ParquetShard(file, reader).as_arrays()

    return one_shard_a_file(measure(find(settings.shards, settings.path)), index)


class ParquetShard:
    """A shard of one Parquet file: its footer, and the rows of the row group read last."""

    def __init__(self, file: ShardFile, reader: RowReader) -> None:
        pq, pa = need_pyarrow("pyarrow.parquet"), need_pyarrow()
        self._file, self._reader = file, reader
        if file.size == 0:
            raise DamagedFile(f"{file.path}: got 0 bytes, expected a Parquet file. Write the file again")
        try:
            self._parquet = pq.ParquetFile(
                pa.PythonFile(PositionedFile(file), mode="r"), page_checksum_verification=True, pre_buffer=False
            )
            footer = self._parquet.metadata
            groups = [footer.row_group(group) for group in range(footer.num_row_groups)]
            self.blocks = [group.num_rows for group in groups]
            if any(not 0 <= group.num_rows <= group.column(0).num_values for group in groups):
                raise ValueError("a row group has more rows than values")
            self._schema = self._parquet.schema_arrow
            names = list(self._schema.names)
        except SourceError:
            raise
        except Exception as error:  # ArrowInvalid, OSError, and any other for a damaged footer
            raise _broken(file, error) from error
        self._ends = list(accumulate(self.blocks))
        self._columns = choose_columns(file.path, names, reader.keys, reader.sample_keys) if self._ends else []
        self._group, self._rows = -1, ArrowRows({})

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def as_arrays(self) -> AnyShard:
        """Return a ListShard over this shard if its rows are ids and numbers; else the shard itself."""
        plan = plan_of(self._schema, self._reader)
        return self if plan is None else ListShard(self, plan)

    def rows_of(self, sample: int) -> tuple[ArrowRows, range]:
        """Return the rows of the row group that holds a sample, and the range of sample numbers in that group."""
        group = bisect_right(self._ends, sample)
        if group != self._group:
            self._rows = ArrowRows({})  # free the last row group before reading the next
            self._rows, self._group = self._read_group(group), group
        return self._rows, range(self._ends[group] - self.blocks[group], self._ends[group])

    def load(self, sample: int) -> Sample | str:
        """Read one row as a sample, or return the reason why it is rejected."""
        rows, run = self.rows_of(sample)
        try:
            row = rows[sample - run.start]
        except UnicodeDecodeError:
            return "encoding"
        got = self._reader(row)
        return missing_from(self._schema.names) if got == MISSING else got

    def _read_group(self, group: int) -> ArrowRows:
        """Read the needed columns of one row group. Raises DamagedFile."""
        try:
            table = self._parquet.read_row_group(group, columns=self._columns, use_threads=False)
            if table.num_rows != self.blocks[group]:
                raise ValueError(f"{table.num_rows} rows instead of {self.blocks[group]}")
            return ArrowRows({name: table.column(name) for name in self._columns})
        except SourceError:
            raise
        except Exception as error:
            raise _broken(self._file, error, f" in row group {group}") from error

    def where(self, sample: int) -> str:
        """Return the file and row number of a sample, for messages."""
        return f"{self._file.name}:row {sample}"


def _broken(file: ShardFile, error: Any, where: str = "") -> DamagedFile:
    """Return the error for a damaged Parquet file; ``where`` names the row group, if known."""
    return DamagedFile(
        f"{file.path}: the file is cut short, damaged or not a Parquet file{where} ({first_line(error)}). Copy or "
        "write the file again"
    )
