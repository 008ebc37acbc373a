"""The table of samples that the broker holds; a sample's id is (stream, index, part).

The core knows a sample's identity, length and checksum, never its tokens. A sample lives in one row of the
``SampleTable``. Queues, windows and packs hold its row number, the *handle*, so the arena may move the payload
unnoticed. The column ``keep`` marks that the next sample belongs to the same group. The column ``shared`` counts the
tokens at a sample's beginning that it shares with the sample before it (``core.trees``). Four columns count a sample's
media (``core.media``). Records and snapshots contain these columns only if there are groups, trees or media
(``EXTRAS``). Columns are numpy arrays because a broker at 100M tokens/s admits some 200,000 samples each second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from msgspec import UNSET, Struct, UnsetType
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U32 = NDArray[np.uint32]

ROW = np.dtype(
    [
        ("stream", "<i4"), ("index", "<i8"), ("part", "<i4"), ("length", "<i4"), ("loss_tokens", "<i4"), ("crc", "<u4"),
    ]
)  # fmt: skip
"""A sample's row outside the table: a reference with a checksum, 28 bytes, never the tokens."""

MEDIA_ROW = np.dtype([("items", "<i4"), ("patches", "<i4"), ("extra_bytes", "<i8"), ("extra_cost", "<i8")])
"""The columns that count a sample's media: its items, patches, bytes, and cost by the rules."""

EXTRAS: Mapping[str, np.dtype[np.void]] = {
    "keeps": np.dtype([("keep", "u1")]), "shares": np.dtype([("shared", "<u4")]), "media": MEDIA_ROW
}  # fmt: skip
"""Columns that not every sample has, as ``ExtraColumns`` has them: name there, and the columns of the table.

New columns stand at the end, because the ledger stores all columns up to the last that a step needs.
"""
EXTRA_ROW = np.dtype([(name, dtype[name]) for dtype in EXTRAS.values() for name in dtype.names or ()])
"""All columns of ``EXTRAS`` of a sample."""

Keep = Literal["pack", "step"]
"""A group of samples stays in one pack, or in one step."""
Share = Literal["prefix"]
"""Samples of a group share the tokens at their beginning: see ``core.trees``."""
PACK, STEP = 1, 2
KEEPS: dict[Keep, int] = {"pack": PACK, "step": STEP}
"""Values of a sample's column ``keep``: the next sample in merge order belongs to the same pack or step.

0: the sample is alone, or the last of its group.
"""

MANY_HANDLES, MARKS_PER_HANDLE = 4096, 32
"""From this many handles on, in a table of at most this many rows for each, handles are ordered by marking rows.

That is eight times as fast as a sort for 100,000 handles of 262,144 rows. Fewer handles are sorted.
"""

IGNORE_INDEX = -100
"""The label that losses ignore: that of a sample's last real token and of all padding."""


class ExtraColumns(Struct, frozen=True, kw_only=True):
    """Base of records and snapshots of n samples, with the columns of ``EXTRAS``: [n] as bytes.

    A column is absent if its first number is 0 for every sample.

    Attributes:
        keeps: How each sample stays together with the next sample (``KEEPS``), uint8.
        shares: Tokens that each sample shares with the sample before it, uint32.
        media: Items, patches, bytes and cost of each sample's media, ``MEDIA_ROW``.
    """

    keeps: bytes | UnsetType = UNSET
    shares: bytes | UnsetType = UNSET
    media: bytes | UnsetType = UNSET

    def extra_rows(self, count: int) -> NDArray[np.void]:
        """Return the columns of ``count`` samples, ``EXTRA_ROW`` [count]; 0 where a column is absent.

        Raises ValueError for a column of another size.
        """
        return extra_rows({name: getattr(self, name) for name in EXTRAS}, count)


def extra_rows(extras: Mapping[str, bytes | UnsetType], count: int) -> NDArray[np.void]:
    """Return the columns of ``ExtraColumns``, by name, as ``ExtraColumns.extra_rows`` does."""
    rows = np.zeros(count, EXTRA_ROW)
    for name, column in extras.items():
        dtype = EXTRAS[name]
        if not column:
            continue
        if len(column) != dtype.itemsize * count:
            raise ValueError(
                f"got {len(column)} bytes in the field {name}, expected {dtype.itemsize * count} bytes or an empty "
                f"field"
            )
        values = np.frombuffer(column, dtype)
        for number in dtype.names or ():
            rows[number] = values[number]
    return rows


def index_of(seq: int | I64, partition: int, partitions: int) -> int | I64:
    """Return the index in the stream of sample number ``seq`` of a ``partition``.

    Partitions take turns, so index order is merge order. The inverse is ``partition = index % partitions`` and
    ``seq = index // partitions``. Indices of a partition that ended before its peers are skipped, never reused.
    """
    return seq * partitions + partition


class SampleTable:
    """The samples held, as columns indexed by handle. It grows when full, and reuses freed handles first in, first out.

    The columns are those of ``ROW``, ``keep`` (see ``KEEPS``), ``shared`` and those of ``MEDIA_ROW``. A sample with
    ``shared`` tokens follows the sample that it shares them with, and stays in its pack. So it adds ``length - shared``
    tokens to the pack.
    """

    stream: I32
    index: I64
    part: I32
    length: I32
    loss_tokens: I32
    crc: U32
    keep: NDArray[np.uint8]
    shared: U32
    items: I32
    patches: I32
    extra_bytes: I64
    extra_cost: I64

    def __init__(self, capacity: int = 4096) -> None:
        for dtype in (ROW, EXTRA_ROW):
            for name in dtype.names or ():
                setattr(self, name, np.zeros(capacity, dtype[name]))
        self._columns_set = set[str]()  # columns of EXTRAS that were set for a sample, except keep
        self._free: I64 = np.arange(capacity, dtype=np.int64)
        self._head, self._num_free = 0, capacity
        self._marks = np.zeros(capacity, np.bool_)

    @property
    def capacity(self) -> int:
        """Number of rows; handles are below it."""
        return len(self.length)

    def __len__(self) -> int:
        return self.capacity - self._num_free

    def take(self, count: int) -> I64:
        """Reserve the ``count`` handles that have been free for longest; return them, int64 [count]."""
        while self._num_free < count:
            self._grow()
        handles = self._first_free(count)
        self._head = (self._head + count) % self.capacity
        self._num_free -= count
        return handles

    def free(self, handles: I64) -> None:
        """Free handles; their rows may be overwritten.

        Handles that are freed together are reserved again in ascending order. So samples that come together have
        adjacent rows, and the samples of a step lie in a few cache lines of each column.
        """
        at = (self._head + self._num_free) % self.capacity
        in_order = self._in_order(handles)
        room = self.capacity - at
        self._free[at : at + len(handles)] = in_order[:room]
        self._free[: max(len(handles) - room, 0)] = in_order[room:]
        self._num_free += len(handles)

    def _in_order(self, handles: I64) -> I64:
        """Return ``handles`` sorted; all handles must be different."""
        if len(handles) < MANY_HANDLES or self.capacity > MARKS_PER_HANDLE * len(handles):
            return np.sort(handles)
        self._marks[handles] = True
        in_order = np.flatnonzero(self._marks)
        self._marks[in_order] = False
        return in_order

    def _first_free(self, count: int) -> I64:
        """Return a copy of the first ``count`` handles of the ring of free handles."""
        room = len(self._free) - self._head
        if count <= room:
            return self._free[self._head : self._head + count].copy()
        return np.concatenate([self._free[self._head :], self._free[: count - room]])

    def rows(self, handles: I64) -> NDArray[np.void]:
        """Return the rows of these samples, ``ROW`` [n]."""
        rows = np.empty(len(handles), ROW)
        for name in ROW.names or ():
            rows[name] = getattr(self, name)[handles]
        return rows

    def column(self, name: str, handles: I64) -> I64:
        """Return a column of these samples, int64 [n]."""
        column: I64 = getattr(self, name)[handles].astype(np.int64)
        return column

    def has(self, name: str) -> bool:
        """Return whether ``put`` ever set a column of ``EXTRAS``; if not, the column need not be read."""
        return name in self._columns_set

    def column_or_0(self, name: str, handles: I64) -> I64 | int:
        """Return a column of ``EXTRAS`` of these samples, int64 [n]; 0 if no sample ever had it."""
        return self.column(name, handles) if name in self._columns_set else 0

    def extra(self, name: str, handles: I64) -> bytes | UnsetType:
        """Return the columns ``EXTRAS[name]`` of these samples, [n] as bytes; UNSET if the first is 0 for all."""
        dtype = EXTRAS[name]
        first, *_ = names = dtype.names or ()
        if (first != "keep" and first not in self._columns_set) or not getattr(self, first)[handles].any():
            return UNSET
        rows = np.empty(len(handles), dtype)
        for column in names:
            rows[column] = getattr(self, column)[handles]
        return rows.tobytes()

    def extras(self, handles: I64) -> dict[str, bytes | UnsetType]:
        """Return all columns of ``EXTRAS`` of these samples, by name, for a record or a snapshot."""
        return {name: self.extra(name, handles) for name in EXTRAS}

    def own_lengths(self, handles: I64) -> I64:
        """Return the tokens that each sample adds to its pack, int64 [n]: its length without shared tokens."""
        return self.column("length", handles) - self.shared[handles]

    def enter(self, rows: NDArray[np.void], **extras: bytes | UnsetType) -> I64:
        """Add samples with these ``rows``, ``ROW`` [n], and the columns that ``extras`` returns.

        Returns the new handles, int64 [n].
        """
        handles = self.take(len(rows))
        for name in ROW.names or ():
            getattr(self, name)[handles] = rows[name]
        extra = extra_rows(extras, len(rows))
        self.keep[handles] = extra["keep"]
        self.put(handles, {name: extra[name] for name in _PUT if extra[name].any()})
        return handles

    def put(self, handles: I64, columns: Mapping[str, NDArray[Any]]) -> None:
        """Set the columns of ``EXTRAS`` of samples: these ``columns``, by name, and 0 in all others except ``keep``."""
        self._columns_set.update(columns)
        for name in self._columns_set:
            getattr(self, name)[handles] = columns.get(name, 0)

    def _grow(self) -> None:
        """Double the number of rows."""
        old = self.capacity
        for name in _COLUMNS:
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(old, column.dtype)]))
        self._marks = np.zeros(2 * old, np.bool_)
        free = np.zeros(2 * old, np.int64)
        free[: self._num_free] = self._first_free(self._num_free)
        free[self._num_free : self._num_free + old] = np.arange(old, 2 * old)
        self._free, self._head = free, 0
        self._num_free += old


_COLUMNS = [*(ROW.names or ()), *(EXTRA_ROW.names or ())]
_PUT = [name for name in EXTRA_ROW.names or () if name != "keep"]
