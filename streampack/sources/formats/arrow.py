"""Converts Arrow columns to rows, for Parquet and saved datasets. Needs ``pip install 'streampack[parquet]'``.

Lists of numbers become numpy arrays that share the record batch's memory. Lists of equally long lists become arrays
with more dimensions. Texts and chats become Python objects. A struct's keys that are null are left out, because a
table gives each message every key that any message has. Only the keys ``content`` and ``value`` stay when null.

An image may be a binary, or a struct of ``bytes`` and ``path`` as Hugging Face stores it. Either becomes a reference:
to the path, if there are no bytes in the table (``core.media.references``).
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from streampack.errors import ConfigError, SourceError
from streampack.sources.reasons import advice_on


def need_pyarrow(module: str = "pyarrow") -> Any:
    """Import and return a module of pyarrow. Raises ConfigError that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            "source: the formats parquet and huggingface need pyarrow. Run `pip install 'streampack[parquet]'`"
        ) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, at most 200 characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(". ")


def choose_columns(path: str, names: Sequence[str], wanted: Sequence[str], any_of: Sequence[str]) -> list[str]:
    """Return the names of the columns to read: those of ``names`` that are in ``wanted``, in the file's order.

    ``any_of``: columns that may hold the sample. Raises SourceError if the file at ``path`` has none of them.
    """
    if not set(any_of) & set(names):
        shown = ", ".join(names)[:200] or "none"
        raise SourceError(
            f"{path}: got the columns {shown}, expected at least one of {', '.join(any_of)}. {advice_on(shown)}"
        )
    return [name for name in names if name in set(wanted)]


class ArrowRows:
    """Columns of equal length, read row by row: ``rows[i]`` is a dict from column name to value.

    Indexing raises UnicodeDecodeError if a text is not valid UTF-8.
    """

    def __init__(self, columns: dict[str, Any]) -> None:
        """``columns``: name to a pyarrow Array or ChunkedArray."""
        pa = need_pyarrow()
        self.columns = {
            name: column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
            for name, column in columns.items()
        }
        self._readers = [(name, _reader(column, pa)) for name, column in self.columns.items()]

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {name: read(row) for name, read in self._readers}


def _reader(column: Any, pa: Any) -> Callable[[int], Any]:
    """Return a function from a row number to the value of ``column`` in that row, None for null."""
    kind = column.type
    if isinstance(column, pa.ChunkedArray):  # too large to be one array
        return lambda row: _value(column[row], pa)
    if is_plain_list(kind, pa) and is_number(kind.value_type, pa):
        values = column.values
        if values.null_count == 0:  # a null in one row would convert the ints of all rows to floats
            offsets, flat = column.offsets.to_numpy(), values.to_numpy(zero_copy_only=False)
            valid = column.is_valid().to_numpy(zero_copy_only=False) if column.null_count else None

            def read(row: int) -> Any:
                """Return the list of a row as an array that shares the column's memory; None for null."""
                return flat[offsets[row] : offsets[row + 1]] if valid is None or valid[row] else None

            return read
    return lambda row: _value(column[row], pa)


def is_plain_list(kind: Any, pa: Any) -> bool:
    """Return whether the Arrow type ``kind`` is a list of variable length, with 32-bit or 64-bit offsets."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def is_number(kind: Any, pa: Any) -> bool:
    """Return whether the Arrow type ``kind`` is an integer, a float or a bool."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _value(scalar: Any, pa: Any) -> Any:
    """Convert a pyarrow scalar to a Python object or a numpy array; None for null."""
    if not scalar.is_valid:
        return None
    if isinstance(scalar, pa.ListScalar):
        return _list(scalar.values, pa)
    return _without_nulls(scalar.as_py())


def _list(values: Any, pa: Any) -> Any:
    """Convert a pyarrow array to a numpy array if it holds numbers, or equally long lists of them; else to a list."""
    if is_number(values.type, pa):
        return values.to_numpy(zero_copy_only=False)
    is_list = is_plain_list(values.type, pa) or pa.types.is_fixed_size_list(values.type)
    if is_list and len(values) and values.null_count == 0:
        inner = _list(values.flatten(), pa)
        lengths = values.value_lengths().to_numpy(zero_copy_only=False)
        if isinstance(inner, np.ndarray) and lengths.min() == lengths.max() > 0:
            return inner.reshape(len(values), int(lengths[0]), *inner.shape[1:])
    return _without_nulls(values.to_pylist())


def _without_nulls(value: Any) -> Any:
    """Return ``value`` without the null entries of its dicts, at any depth, except ``content`` and ``value``."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {
            key: _without_nulls(item) for key, item in value.items() if item is not None or key in ("content", "value")
        }
    return value
