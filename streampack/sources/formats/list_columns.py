"""Shards of Parquet and Arrow files: rows in groups, of which columns of lists of ids are read many rows at once.

Theory of operation. Arrow stores the lists of a column in one array, with the offsets where each list begins. So the
rows of a window of groups (row groups or record batches) are copied like pieces of a file. The ids are copied, and each
declared field that is a list of numbers or one number per row. Labels and masks (``row_keys``) are applied to all rows
of a group at once. Irregular rows (null, a null in a list, a field of another length than its ids) are read one by one.
So are the rows of a group in which one has padding, or labels and masks that reject it.
"""

import contextlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from streampack.core.model.fields import LABELS, LOSS_MASK, Field
from streampack.core.stats.sample_warnings import SEVERAL_KEYS
from streampack.errors import DamagedFile
from streampack.sources.arrays import as_samples, fitting, one_sample
from streampack.sources.files.byte_source import ShardFile, join_pieces
from streampack.sources.formats.arrow import ArrowRows, is_number, is_plain_list, need_pyarrow
from streampack.sources.formats.rows import MISSING, RowReader, as_field, missing_from
from streampack.sources.joining import Joined
from streampack.sources.records import AnyShard, RawSamples, Sample
from streampack.sources.row_keys import BY_TOKEN, KNOWN, Applied, of_ids


class ColumnPlan(NamedTuple):
    """The columns to read: ``ids`` names the ids' column, ``fields`` pairs fields with their columns.

    - ``by_sample``: names of the fields that have one value per sample.
    - ``masks``: columns of labels and masks that no field reads.
    - ``mask_field``: the declared field ``loss_mask``; None if the run does not declare it.
    - ``warnings``: words of ``core.stats.sample_warnings`` for all rows.
    """

    ids: str
    fields: tuple[tuple[Field, str], ...]
    by_sample: frozenset[str]
    masks: tuple[str, ...]
    mask_field: Field | None
    warnings: tuple[str, ...]


def plan_of(schema: Any, reader: RowReader) -> ColumnPlan | None:
    """Return the columns to read from a file with this pyarrow schema; None if rows are not ids and numbers."""
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
    if any(key in schema.names for _, key in reader.fields.media_keys):
        return None
    fields = tuple((field, key) for field, key in reader.fields.keys if key in schema.names)
    for field, key in fields:
        kind = schema.field(key).type
        fits = is_number(kind, pa) if field.axis == "sample" else is_plain_list(kind, pa)
        if field.shape or not fits or (field.axis != "sample" and not is_number(kind.value_type, pa)):
            return None
    masks = _mask_columns(schema, reader)
    mask_field = next((field for field, _ in reader.fields.keys if field.name == LOSS_MASK), None)
    declares_labels = any(field.name == LABELS for field, _ in reader.fields.keys)
    if masks is None or (masks and (declares_labels or any(field.name == LOSS_MASK for field, _ in fields))):
        return None  # the keys are applied to each row's own labels or mask
    by_sample = frozenset(field.name for field, _ in fields if field.axis == "sample")
    return ColumnPlan(
        ids, fields, by_sample, masks, mask_field, (SEVERAL_KEYS,) if reader.has_several(schema.names) else ()
    )


def _mask_columns(schema: Any, reader: RowReader) -> tuple[str, ...] | None:
    """Return the columns with labels and masks for each token; None if a known key needs to be read row by row."""
    pa, masks = need_pyarrow(), list[str]()
    for key in (key for key in schema.names if key in reader.fields.known.names):
        kind = schema.field(key).type
        if KNOWN[key] in BY_TOKEN and is_plain_list(kind, pa) and is_number(kind.value_type, pa):
            masks.append(key)
        elif pa.types.is_nested(kind):
            return None
    return tuple(masks)


class GroupedShard(ABC):
    """A shard of a table whose rows are read a group at a time: a row group or a record batch.

    ``blocks``: number of rows of each group. ``columns``: the columns to read. ``block_bytes``: bytes of the largest
    group in memory. One group is held at a time, or those of ``hold``.
    """

    def __init__(
        self, file: ShardFile, reader: RowReader, schema: Any, blocks: list[int], columns: Sequence[str],
        block_bytes: int,
    ) -> None:  # fmt: skip
        self._file, self._reader, self._schema = file, reader, schema
        self.blocks, self._columns, self.block_bytes = blocks, columns, block_bytes
        self._ends = list(accumulate(blocks))
        self._held: Sequence[int] = ()
        self._rows: dict[int, ArrowRows] = {}
        """Rows of the groups in memory, by group."""

    @abstractmethod
    def _read_group(self, group: int) -> ArrowRows:
        """Read the columns of one group. Raises DamagedFile."""

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def as_arrays(self) -> AnyShard:
        """Return a ListShard over this shard if its rows are ids and numbers; else the shard itself."""
        plan = plan_of(self._schema, self._reader)
        return self if plan is None else ListShard([self], plan)

    def rows_of(self, sample: int) -> tuple[ArrowRows, range]:
        """Return the rows of the group that holds a sample, and the range of sample numbers in that group."""
        group = bisect_right(self._ends, sample)
        if (rows := self._rows.get(group)) is None:
            if group not in self._held:
                self._rows.clear()  # free the last group before reading the next
            rows = self._rows[group] = self._read_group(group)
        return rows, range(self._ends[group] - self.blocks[group], self._ends[group])

    def hold(self, blocks: Sequence[int]) -> None:
        """Keep these groups in memory once they are read, and free all others."""
        self._held = blocks
        self._rows = {group: rows for group, rows in self._rows.items() if group in blocks}

    def load(self, sample: int) -> Sample | str:
        """Read one row as a sample, or return the reason why it is rejected."""
        rows, run = self.rows_of(sample)
        try:
            row = rows[sample - run.start]
        except UnicodeDecodeError:
            return "encoding"
        read = self._reader(row)
        return missing_from(self._schema.names) if read == MISSING else read

    def where(self, sample: int) -> str:
        """Return the file and row number of a sample, for messages."""
        return f"{self._file.name}:row {sample}"


class ListShard:
    """An ArrayShard over shards of row groups: reads many rows of ids and numbers at once, also of several groups."""

    def __init__(self, shards: Sequence[GroupedShard], plan: ColumnPlan) -> None:
        self._shards, self._plan = shards, plan
        self._whole = whole = Joined(shards)
        self.blocks, self.block_bytes, self.where, self.load = whole.blocks, whole.block_bytes, whole.where, whole.load
        self._ends = np.cumsum(np.array(self.blocks, np.int64))
        self._held: Sequence[int] = ()
        self._opened: Sequence[int] = ()
        self._lists: _Lists | None = None
        """The groups ``_opened``; None if none of them can be read many rows at once."""
        self._begins = np.zeros(len(self.blocks), np.int64)
        """Number in ``_lists`` of the first row of each group; -1 for a group that is not there."""

    @classmethod
    def join(cls, shards: Sequence["ListShard"]) -> "ListShard | None":
        """Return the rows of several shards as one shard; None if their files have other columns."""
        plans = [shard._plan for shard in shards]
        same = all(plan == plans[0] for plan in plans)
        return cls([part for shard in shards for part in shard._shards], plans[0]) if same else None

    def __len__(self) -> int:
        return len(self._whole)

    def hold(self, blocks: Sequence[int]) -> None:
        """Keep these groups in memory once they are read, and free all others."""
        self._held, self._opened, self._lists = blocks, (), None
        self._whole.hold(blocks)

    def gather(self, samples: NDArray[np.int64], tokens: int) -> RawSamples:
        """Read the leading rows of ``samples`` that lie in groups in memory and fit into ``tokens`` ids, at least one.

        If the first row's group is not held, only rows of that group are read.
        """
        groups = np.searchsorted(self._ends, samples, "right")
        first = int(groups[0])
        if first not in self._opened:
            self._opened, self._lists = (), None  # free the last groups before reading the next
            self._open(self._held if first in self._held else (first,))
        begins = self._begins[groups]
        outside = np.flatnonzero(begins < 0)
        count = int(outside[0]) if len(outside) else len(samples)
        if count and self._lists is not None:
            rows = begins + samples - (self._ends[groups] - np.array(self.blocks)[groups])
            at_once = self._lists.gather(rows[:count], tokens)
            if at_once is not None:
                return at_once._replace(warnings=self._plan.warnings)
        return one_sample(self.load(int(samples[0])), self._plan.by_sample)

    def _open(self, groups: Sequence[int]) -> None:
        """Read these groups, and open their columns. Groups that are damaged or differ are left to ``load``."""
        opened, at = list[_Lists](), 0
        self._begins[:] = -1
        for group in groups:
            begin = int(self._ends[group]) - self.blocks[group]
            shard = self._whole.shard_of(begin)
            lists = None
            if self.blocks[group]:
                with contextlib.suppress(DamagedFile):
                    rows, _ = self._shards[shard].rows_of(begin - self._whole.starts[shard])
                    lists = _open_lists(rows.columns, self._plan)
            if lists is not None and (not opened or lists.types == opened[0].types):
                opened.append(lists)
                self._begins[group], at = at, at + self.blocks[group]
        self._opened, self._lists = groups, _joined(opened) if opened else None


class _ListColumn(NamedTuple):
    """A column of lists of one or more groups of rows.

    - ``data``: bytes of all values of each group, of type ``dtype``.
    - ``begins``, ``ends``: each list's first value and the value after its last, as indices, int64 [rows].
    - ``owners``: index in ``data`` of each row, int64 [rows]; None if all rows are of one group.
    """

    data: tuple[memoryview, ...]
    dtype: np.dtype[Any]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    owners: NDArray[np.int64] | None = None

    def gather(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Return the values of the lists of these rows, joined."""
        size, data = self.dtype.itemsize, self.data
        begins, ends = self.begins[rows] * size, self.ends[rows] * size
        if self.owners is None:
            return np.frombuffer(join_pieces(data[0], begins, ends), self.dtype)
        places = zip(self.owners[rows].tolist(), begins.tolist(), ends.tolist(), strict=True)
        return np.frombuffer(b"".join([data[at][begin:end] for at, begin, end in places]), self.dtype)

    @classmethod
    def join(cls, columns: Sequence["_ListColumn"]) -> "_ListColumn":
        """Return the rows of several columns as one column."""
        owners = np.repeat(np.arange(len(columns)), [len(column.begins) for column in columns])
        begins, ends = (np.concatenate(arrays) for arrays in zip(*((c.begins, c.ends) for c in columns), strict=True))
        return cls(tuple(column.data[0] for column in columns), columns[0].dtype, begins, ends, owners)


class _Lists(NamedTuple):
    """The columns of one group of rows.

    - ``ids``: lists of ids.
    - ``lists``, ``values``: fields by name, with a list or with one value per row.
    - ``odd``: bool [rows], True for rows that must be read one by one.
    """

    ids: _ListColumn
    lists: dict[str, _ListColumn]
    values: dict[str, NDArray[Any]]
    odd: NDArray[np.bool_]

    @property
    def types(self) -> dict[str, np.dtype[Any]]:
        """Types of the ids (with an empty name) and of the fields."""
        lists = {name: column.dtype for name, column in self.lists.items()}
        return {"": self.ids.dtype, **lists, **{name: values.dtype for name, values in self.values.items()}}

    def gather(self, rows: NDArray[np.int64], tokens: int) -> RawSamples | None:
        """Read the leading regular rows of ``rows`` that fit into ``tokens`` ids; None if the first is irregular."""
        odd = np.flatnonzero(self.odd[rows])
        lengths = self.ids.ends[rows] - self.ids.begins[rows]
        count = min(fitting(lengths, tokens), int(odd[0]) if len(odd) else len(rows))
        if not count:
            return None
        rows = rows[:count]
        fields = {name: column.gather(rows) for name, column in self.lists.items()}
        fields |= {name: values[rows] for name, values in self.values.items()}
        return as_samples(self.ids.gather(rows), lengths[:count], fields=fields, by_sample=frozenset(self.values))


def _joined(groups: Sequence[_Lists]) -> _Lists:
    """Return the rows of several groups, whose types are equal, as one group."""
    if len(groups) == 1:
        return groups[0]
    return _Lists(
        _ListColumn.join([group.ids for group in groups]),
        {name: _ListColumn.join([group.lists[name] for group in groups]) for name in groups[0].lists},
        {name: np.concatenate([group.values[name] for group in groups]) for name in groups[0].values},
        np.concatenate([group.odd for group in groups]),
    )


def _open_lists(columns: dict[str, Any], plan: ColumnPlan) -> _Lists | None:
    """Open the columns of one group of rows for reading many rows at once.

    Returns None if a column is too large for one array, or if values do not fit a declared field. The rows are then
    read one by one, so that each bad row gets its reason.
    """
    if any(
        isinstance(columns[key], need_pyarrow().ChunkedArray)
        for key in (plan.ids, *(key for _, key in plan.fields), *plan.masks)
    ):
        return None
    ids, flat_ids, odd = _open_column(columns[plan.ids])
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
        lists[field.name] = column._replace(data=(_bytes(stored),), dtype=stored.dtype)
        odd |= null | (column.ends - column.begins != ids.ends - ids.begins)
    if plan.masks:
        applied = _applied(columns, plan, ids, flat_ids)
        if applied is None:
            return None
        mask = applied.mask
        if mask is not None and (plan.mask_field is not None or not mask.all()):
            stored = mask if plan.mask_field is None else mask.astype(plan.mask_field.storage)
            lists[LOSS_MASK] = ids._replace(data=(_bytes(stored),), dtype=stored.dtype)
    return _Lists(ids, lists, values, odd)


def _applied(columns: dict[str, Any], plan: ColumnPlan, ids: _ListColumn, flat_ids: NDArray[Any]) -> Applied | None:
    """Return what labels and masks say about all ids of a group; None if its rows must be read one by one."""
    values = {}
    for key in sorted(plan.masks, key=list(KNOWN).index):
        column, values[key], null = _open_column(columns[key])
        if null.any() or not (np.array_equal(column.begins, ids.begins) and np.array_equal(column.ends, ids.ends)):
            return None
    applied = of_ids(flat_ids, values)
    return None if isinstance(applied, str) or applied.kept is not None else applied


def _open_column(array: Any) -> tuple[_ListColumn, NDArray[Any], NDArray[np.bool_]]:
    """Return (lists of a pyarrow array, all their values, bool [rows]: lists that are null or hold a null)."""
    flat, null_values = _numbers(array.values)
    offsets = array.offsets.to_numpy().astype(np.int64)
    odd = array.is_null().to_numpy(zero_copy_only=False)
    if null_values.any():
        before = np.concatenate([[0], np.cumsum(null_values)])
        odd = odd | (before[offsets[1:]] > before[offsets[:-1]])
    return _ListColumn((_bytes(flat),), flat.dtype, offsets[:-1], offsets[1:]), flat, odd


def _numbers(array: Any) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return (values of a pyarrow array of numbers with 0 for nulls, bool mask of the nulls)."""
    null = array.is_null().to_numpy(zero_copy_only=False)
    return (array.fill_null(0) if array.null_count else array).to_numpy(zero_copy_only=False), null


def _bytes(values: NDArray[Any]) -> memoryview:
    """Return a view of an array's bytes."""
    return np.ascontiguousarray(values).view(np.uint8).data
