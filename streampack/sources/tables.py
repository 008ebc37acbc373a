"""Refuses tables, columns, splits and loaders where rows are expected, and says what to write.

Iterating over a table yields the names of its columns, or the columns, and not rows. Types are known by their names,
because none of these libraries is imported.
"""

from collections.abc import Callable, Mapping
from typing import Any

from streampack.errors import UserError
from streampack.sources.row_keys import KNOWN

_OF_TABLES = {
    *KNOWN, "text", "tokens", "input_ids", "messages", "tools", "prompt", "completion", "response", "conversations",
    "instruction", "input", "output", "question", "answer", "chosen", "rejected", "id", "label", "length",
    "special_tokens_mask", "offset_mapping", "overflow_to_sample_mapping", "prompt_ids", "completion_ids",
}  # fmt: skip
"""Usual names of columns. A dict of streams with such a name says what it is by ``{"source": rows}``."""
_ALONE = ("text", "tokens", "input_ids")
_ROWS_OF_DICT = (
    "Pass rows: datasets.Dataset.from_dict(dict(columns)), or [dict(zip(columns, row)) for row in "
    "zip(*columns.values())]. For a slice of a dataset, pass the dataset itself"
)


def refuse_tables(value: Any) -> None:
    """Raise UserError for a table, a column, the splits of a dataset or a torch DataLoader, where rows are expected."""
    classes = {base.__name__ for base in type(value).__mro__}
    kind = type(value).__name__
    if classes & {"DatasetDict", "IterableDatasetDict"}:
        raise UserError(
            f"got a {kind} with the splits {', '.join(map(str, value))}, expected one split. Pass one, such as "
            f"dataset[{next(iter(value), 'train')!r}]"
        )
    if "DataLoader" in classes and hasattr(value, "dataset"):
        raise UserError(f"got a {kind}, which yields batches, expected samples. Pass its dataset: loader.dataset")
    if hasattr(value, "iloc"):
        advice = "df.to_dict('records')" if hasattr(value, "columns") else "series.tolist()"
    elif hasattr(value, "to_dicts"):
        advice = "df.to_dicts()"
    elif type(value).__module__.split(".")[0] == "pyarrow":
        advice = "table.to_pylist()"
    else:
        return
    raise UserError(f"got a {kind}, expected rows: a list, a dataset or another iterable. Pass {advice}")


def refuse_columns(columns: Mapping[Any, Any]) -> None:
    """Raise UserError for a dict where rows are expected."""
    refuse_tables(columns)
    shown = ", ".join(map(str, columns))[:200]
    raise UserError(f"got a dict with the keys {shown}, expected rows. {_ROWS_OF_DICT}")


def refuse_columns_as_streams(columns: Mapping[Any, Any], is_files: Callable[[Any], bool]) -> None:
    """Raise UserError for a dict of columns where a dict of streams is expected.

    A column has a usual name and is in memory. A single column of texts or ids has the same samples as a stream.
    ``is_files``: predicate on a value that names files.
    """
    refuse_tables(columns)
    names = [str(name) for name, value in columns.items() if name in _OF_TABLES and _is_column(value, is_files)]
    if names and not (len(columns) == 1 and names[0] in _ALONE):
        raise UserError(
            f"got a dict of columns ({', '.join(names)}), which would become a stream each, expected rows or streams. "
            f"{_ROWS_OF_DICT}. For streams with these names, pass {{{names[0]!r}: {{'source': rows}}, ...}}"
        )


def _is_column(value: object, is_files: Callable[[Any], bool]) -> bool:
    """Return whether a dict's value may be a column: it is in memory, and neither a dataset nor names of files."""
    if isinstance(value, Mapping):  # a column by row number, as DataFrame.to_dict() has them
        return bool(value) and not isinstance(next(iter(value)), str)
    in_memory = isinstance(value, list | tuple) or hasattr(value, "__array__") or type(value).__name__ == "Column"
    return in_memory and not is_files(value)
