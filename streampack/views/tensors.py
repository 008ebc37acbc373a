"""Columns of packs as torch tensors: one is made of each, and what its packs get are cuts of it.

A tensor lies in the column's memory and keeps it alive. The cuts are torch's unsafe ones, which share memory and
nothing else: cut any other way, all packs' labels would count as one tensor's, and to change those of one would fail
the backward pass of another, which has kept its own.
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
"""By name what each pack has."""


def thd(columns: Columns, halves: frozenset[str]) -> ValuesByName:
    """What packs have, tensors for arrays; the fields ``halves`` are bfloat16."""
    found = {}
    for name, column in {**columns.attributes, **columns.fields}.items():
        if isinstance(column, Column):
            found[name] = cut(tensor(column.values, name in halves), column.bounds)
        elif column[0] is not None:  # the middle stages of a pipeline have no tokens
            found[name] = [tensor(value) if isinstance(value, np.ndarray) else value for value in column]
    return found


def tensor(values: NDArray[Any], half: bool = False) -> torch.Tensor:
    """Of an array, in its memory; only read-only ones, and bfloat16, are copied."""
    found = torch.from_numpy(values if values.flags.writeable else values.copy())
    return found.to(torch.bfloat16) if half else found


def cut(whole: torch.Tensor, bounds: Sequence[int], rows: int = 0) -> list[torch.Tensor]:
    """Each pack's part of ``whole``, [T', ...]; [1, T', ...] with ``rows=1``."""
    sizes = [end - begin for begin, end in pairwise(bounds)]
    whole = whole[None] if rows else whole
    return list(torch.unsafe_split_with_sizes(whole, sizes, rows))


def beside(of_packs: ValuesByName, *names: str) -> ValuesByName:
    """What packs have, but for ``names``, which are keys in another form: else their memory would move twice."""
    return {name: values for name, values in of_packs.items() if name not in names}
