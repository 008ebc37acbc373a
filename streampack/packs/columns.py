"""Some packs of one message, attribute by attribute: long arrays that are cut into packs, and into tensors.

What is done to a column is done once for many packs: a view of each is all that a pack costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Column:
    """An array of every pack: ``values[bounds[i] : bounds[i + 1]]`` is pack i's."""

    values: NDArray[Any]
    bounds: Sequence[int]

    def rows(self) -> list[NDArray[Any]]:
        """Each pack's, a view."""
        return [self.values[begin:end] for begin, end in pairwise(self.bounds)]


@dataclass(frozen=True, slots=True)
class Columns:
    """Attributes of ``count`` packs by name, in a pack's order: columns, or a list with a value for each pack.

    ``fields`` are the declared ones.
    """

    count: int
    attributes: Mapping[str, Column | list[Any]]
    fields: Mapping[str, Column | list[Any]]

    @classmethod
    def of(cls, attributes: Mapping[str, Any], fields: Mapping[str, Any]) -> Columns:
        """Those of one pack."""
        return cls(
            1, {k: _one(v) for k, v in attributes.items() if k not in fields}, {k: _one(v) for k, v in fields.items()}
        )


def _one(value: Any) -> Column | list[Any]:
    return Column(value, (0, len(value))) if isinstance(value, np.ndarray) else [value]


def rebased(bounds: Sequence[int], first: int, stop: int) -> list[int]:
    """Of packs [first, stop) alone, from 0 on.

    >>> rebased([0, 4, 9, 12], 1, 3)
    [0, 5, 8]
    """
    begin = bounds[first]
    return [bound - begin for bound in bounds[first : stop + 1]]


@overload
def part(column: Column, first: int, stop: int) -> Column: ...
@overload
def part(column: Column | list[Any], first: int, stop: int) -> Column | list[Any]: ...
def part(column: Column | list[Any], first: int, stop: int) -> Column | list[Any]:
    """That of packs [first, stop)."""
    if not isinstance(column, Column):
        return column[first:stop]
    values = column.values[column.bounds[first] : column.bounds[stop]]
    return Column(values, rebased(column.bounds, first, stop))


def rows(column: Column | list[Any]) -> list[Any]:
    """A value for each pack."""
    return column.rows() if isinstance(column, Column) else column
