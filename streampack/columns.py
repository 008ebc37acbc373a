"""The packs of one message, attribute by attribute: long arrays that are cut into packs, and into tensors.

What is done to a column is done once for many packs: a view of each is all that a pack costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Column:
    """An array of every pack: ``values[bounds[i] : bounds[i + 1]]`` is pack i's."""

    values: NDArray[Any]
    bounds: Sequence[int]

    def part(self, first: int, stop: int) -> Column:
        """That of packs [first, stop)."""
        values = self.values[self.bounds[first] : self.bounds[stop]]
        return Column(values, rebased(self.bounds, first, stop))

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

    def part(self, first: int, stop: int) -> Columns:
        """Those of packs [first, stop)."""
        attributes, fields = (
            {name: v.part(first, stop) if isinstance(v, Column) else v[first:stop] for name, v in held.items()}
            for held in (self.attributes, self.fields)
        )
        return Columns(stop - first, attributes, fields)

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


def rows(column: Column | list[Any]) -> list[Any]:
    """A value for each pack."""
    return column.rows() if isinstance(column, Column) else column
