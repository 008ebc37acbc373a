"""Turn columns of packs into torch tensors: one tensor for each column, cut into packs.

A tensor shares the column's memory and keeps that memory alive. The cuts are made by ``unsafe_split_with_sizes``, so
they share memory and no version counter. With ordinary views, changing the labels of one pack in place would fail the
backward pass of another pack that has saved its labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from streampack.packs.columns import Column, Columns

ValuesByName = dict[str, list[Any]]
"""Values of several packs: name -> a list with one value for each pack."""


def thd(columns: Columns, halves: frozenset[str]) -> ValuesByName:
    """Return all values of some packs by name, tensors for arrays; the fields named in ``halves`` become bfloat16."""
    by_name = {}
    for name, column in {**columns.attributes, **columns.fields}.items():
        if isinstance(column, Column):
            by_name[name] = cut(tensor(column.values, name in halves), column.bounds)
        elif column[0] is not None:  # the middle stages of a pipeline have no tokens
            by_name[name] = [tensor(value) if isinstance(value, np.ndarray) else value for value in column]
    return by_name


def tensor(values: NDArray[Any], half: bool = False) -> torch.Tensor:
    """Return an array as a tensor that shares its memory; copy a read-only array. With ``half``, copy to bfloat16."""
    as_tensor = torch.from_numpy(values if values.flags.writeable else values.copy())
    return as_tensor.to(torch.bfloat16) if half else as_tensor


def cut(whole: torch.Tensor, bounds: Sequence[int], rows: int = 0) -> list[torch.Tensor]:
    """Split a tensor at ``bounds`` into one tensor for each pack, [tokens, ...]; [1, tokens, ...] with ``rows=1``."""
    sizes = [end - begin for begin, end in pairwise(bounds)]
    whole = whole[None] if rows else whole
    return list(torch.unsafe_split_with_sizes(whole, sizes, rows))


def column_of(columns: Columns, name: str) -> Column:
    """Return an attribute of some packs whose values are arrays."""
    column = columns.attributes[name]
    assert isinstance(column, Column)
    return column


def rows_of(columns: Columns, name: str) -> list[Any]:
    """Return an attribute of some packs as tensors [1, tokens]."""
    column = column_of(columns, name)
    return cut(tensor(column.values), column.bounds, rows=1)


def positions_of(of_packs: ValuesByName) -> list[Any]:
    """Return the position ids of packs as rows, [1, T] or [3, 1, T]."""
    return [positions.unsqueeze(-2) for positions in of_packs["position_ids"]]


def other_values(of_packs: ValuesByName, *names: str) -> ValuesByName:
    """Return the packs' values without ``names``, which are also keys and would be copied to a device twice."""
    return {name: values for name, values in of_packs.items() if name not in names}
