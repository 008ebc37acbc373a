"""Several packs of one message as columns: one long array per attribute, cut into packs and tensors.

Work on a column is done once for many packs; each pack then costs only a view of the array.
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
    """One attribute of several packs as one array: ``values[bounds[i] : bounds[i + 1]]`` belongs to pack i."""

    values: NDArray[Any]
    bounds: Sequence[int]

    def rows(self) -> list[NDArray[Any]]:
        """Return the array of each pack, a view of ``values``."""
        return [self.values[begin:end] for begin, end in pairwise(self.bounds)]


@dataclass(frozen=True, slots=True)
class Columns:
    """Attributes and declared fields of ``count`` packs by name, each a column or a list with a value per pack."""

    count: int
    attributes: Mapping[str, Column | list[Any]]
    fields: Mapping[str, Column | list[Any]]

    @classmethod
    def of(cls, attributes: Mapping[str, Any], fields: Mapping[str, Any]) -> Columns:
        """Return the columns of a single pack, from its values by name; ``fields`` are the declared ones."""
        return cls(
            1, {k: _one(v) for k, v in attributes.items() if k not in fields}, {k: _one(v) for k, v in fields.items()}
        )


def _one(value: Any) -> Column | list[Any]:
    """Return the value of a single pack as a column."""
    return Column(value, (0, len(value))) if isinstance(value, np.ndarray) else [value]


def rebased(bounds: Sequence[int], first: int, stop: int) -> list[int]:
    """Return the bounds of packs [first, stop), shifted to begin at 0.

    >>> rebased([0, 4, 9, 12], 1, 3)
    [0, 5, 8]
    """
    begin = bounds[first]
    return [bound - begin for bound in bounds[first : stop + 1]]


# A column gives a column; a list gives a list.
@overload
def part(column: Column, first: int, stop: int) -> Column: ...
@overload
def part(column: Column | list[Any], first: int, stop: int) -> Column | list[Any]: ...
def part(column: Column | list[Any], first: int, stop: int) -> Column | list[Any]:
    """Return the part of a column that belongs to packs [first, stop)."""
    if not isinstance(column, Column):
        return column[first:stop]
    values = column.values[column.bounds[first] : column.bounds[stop]]
    return Column(values, rebased(column.bounds, first, stop))


def rows(column: Column | list[Any]) -> list[Any]:
    """Return the value of each pack."""
    return column.rows() if isinstance(column, Column) else column
