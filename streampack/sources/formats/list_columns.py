"""Columns of lists of ids, in Parquet and Arrow files: many rows are read at once.

Theory of operation. Arrow keeps the lists of a column end to end, with the places where each begins. So the rows of
one group (a row group, a record batch) are gathered like pieces of a file: the ids, and each declared field that is a
list of numbers beside them, or one number a row. Rows that are anything else (null, a null in a list, a field longer
than its ids) are found for the whole group at once, and read by themselves, as rows of all kinds are.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from streampack.core.model.fields import LOSS_MASK, Field
from streampack.sources.arrays import as_samples, fitting, one_sample
from streampack.sources.files.byte_source import join_pieces
from streampack.sources.formats.arrow import ArrowRows, is_number, is_plain_list, need_pyarrow
from streampack.sources.formats.rows import RowReader, as_field
from streampack.sources.records import RawSamples, Sample


class ColumnPlan(NamedTuple):
    """The columns: of the ids, and of the declared fields that are there."""

    ids: str
    fields: tuple[tuple[Field, str], ...]
    by_sample: frozenset[str]


def plan_of(schema: Any, reader: RowReader) -> ColumnPlan | None:
    """How the rows of this pyarrow schema are read many at once; None where they are not ids and numbers."""
    pa = need_pyarrow()
    ids = reader.only_ids(schema.names)
    if ids is None or not is_plain_list(schema.field(ids).type, pa):
        return None
    if not pa.types.is_integer(schema.field(ids).type.value_type):
        return None
    if reader.fields.needs_mask and not any(
        field.name == LOSS_MASK and key in schema.names for field, key in reader.fields.keys
    ):
        return None
    fields = tuple((field, key) for field, key in reader.fields.keys if key in schema.names)
    for field, key in fields:
        kind = schema.field(key).type
        fits = is_number(kind, pa) if field.axis == "sample" else is_plain_list(kind, pa)
        if field.shape or not fits or (field.axis != "sample" and not is_number(kind.value_type, pa)):
            return None
    return ColumnPlan(ids, fields, frozenset(field.name for field, _ in fields if field.axis == "sample"))


class Grouped(Protocol):
    """A shard of groups of rows."""

    @property
    def blocks(self) -> Sequence[int]: ...
    def __len__(self) -> int: ...
    def load(self, sample: int) -> Sample | str: ...
    def where(self, sample: int) -> str: ...
    def rows_of(self, sample: int) -> tuple[ArrowRows, range]:
        """The group that holds a sample, and the samples that it holds."""


class ListShard:
    """See ArrayShard."""

    def __init__(self, shard: Grouped, plan: ColumnPlan) -> None:
        self._shard, self._plan = shard, plan
        self._run = range(0)
        self._lists: _Lists | None = None
        self.blocks, self.where = shard.blocks, shard.where

    def __len__(self) -> int:
        return len(self._shard)

    def gather(self, samples: NDArray[np.int64], tokens: int) -> RawSamples:
        if samples[0] not in self._run:
            self._run, self._lists = range(0), None  # two are never held
            rows, self._run = self._shard.rows_of(int(samples[0]))
            self._lists = _open_lists(rows.columns, self._plan)
        if self._lists is not None:
            outside = np.flatnonzero((samples < self._run.start) | (samples >= self._run.stop))
            found = self._lists.gather(samples[: outside[0] if len(outside) else None] - self._run.start, tokens)
            if found is not None:
                return found
        return one_sample(self._shard.load(int(samples[0])), self._plan.by_sample)


class _ListColumn(NamedTuple):
    """Lists end to end: bytes of the values, and where in ``dtype`` values each begins and ends, int64 [rows]."""

    data: memoryview
    dtype: np.dtype[Any]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]

    def gather(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        size = self.dtype.itemsize
        return np.frombuffer(join_pieces(self.data, self.begins[rows] * size, self.ends[rows] * size), self.dtype)


class _Lists(NamedTuple):
    """One group: its ids, its fields by name as lists or as one value a row, and which rows are to be read alone."""

    ids: _ListColumn
    lists: dict[str, _ListColumn]
    values: dict[str, NDArray[Any]]
    odd: NDArray[np.bool_]

    def gather(self, rows: NDArray[np.int64], tokens: int) -> RawSamples | None:
        """The first of ``rows``, as many as have ``tokens`` ids; None where the very first is odd."""
        odd = np.flatnonzero(self.odd[rows])
        lengths = self.ids.ends[rows] - self.ids.begins[rows]
        count = min(fitting(lengths, tokens), int(odd[0]) if len(odd) else len(rows))
        if not count:
            return None
        rows = rows[:count]
        fields = {name: column.gather(rows) for name, column in self.lists.items()}
        fields |= {name: values[rows] for name, values in self.values.items()}
        return as_samples(self.ids.gather(rows), lengths[:count], fields=fields, by_sample=frozenset(self.values))


def _open_lists(columns: dict[str, Any], plan: ColumnPlan) -> _Lists | None:
    """None where a column is too large to be one array, or values do not fit the declared field: rows say which."""
    if any(
        isinstance(columns[key], need_pyarrow().ChunkedArray) for key in (plan.ids, *(key for _, key in plan.fields))
    ):
        return None
    ids, _, odd = _open_column(columns[plan.ids])
    lists, values = {}, {}
    for field, key in plan.fields:
        if field.axis == "sample":
            flat, null = _numbers(columns[key])
            stored = as_field(flat, msgspec.structs.replace(field, axis="token"), len(flat))
            if isinstance(stored, str):
                return None
            values[field.name], odd = stored, odd | null
            continue
        column, flat, null = _open_column(columns[key])
        stored = as_field(flat, field, len(flat))
        if isinstance(stored, str):
            return None
        lists[field.name] = column._replace(data=_bytes(stored), dtype=stored.dtype)
        odd |= null | (column.ends - column.begins != ids.ends - ids.begins)
    return _Lists(ids, lists, values, odd)


def _open_column(array: Any) -> tuple[_ListColumn, NDArray[Any], NDArray[np.bool_]]:
    """(the lists of a pyarrow array, their values end to end, which of them are or hold a null)."""
    flat, null_values = _numbers(array.values)
    offsets = array.offsets.to_numpy().astype(np.int64)
    odd = array.is_null().to_numpy(zero_copy_only=False)
    if null_values.any():
        before = np.concatenate([[0], np.cumsum(null_values)])
        odd = odd | (before[offsets[1:]] > before[offsets[:-1]])
    return _ListColumn(_bytes(flat), flat.dtype, offsets[:-1], offsets[1:]), flat, odd


def _numbers(array: Any) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """(values, which are null) of a pyarrow array of numbers; nulls are 0."""
    null = array.is_null().to_numpy(zero_copy_only=False)
    return (array.fill_null(0) if array.null_count else array).to_numpy(zero_copy_only=False), null


def _bytes(values: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(values).view(np.uint8).data
