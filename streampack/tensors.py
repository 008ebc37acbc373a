"""The columns of a message as torch tensors: one is made of each, and what its packs get are cuts of it.

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

from streampack.columns import Column, Columns
from streampack.core.samples import I32, IGNORE_INDEX
from streampack.slabs import Slabs

Rows = dict[str, list[Any]]
"""By name what each pack has."""


def thd(columns: Columns, halves: frozenset[str]) -> Rows:
    """What packs have, tensors for arrays; the fields ``halves`` are bfloat16."""
    found = {}
    for name, column in {**columns.attributes, **columns.fields}.items():
        if isinstance(column, Column):
            found[name] = cut(tensor(column.values, name in halves), column.bounds)
        elif column[0] is not None:  # the middle stages of a pipeline have no tokens
            found[name] = [tensor(value) if isinstance(value, np.ndarray) else value for value in column]
    return found


def hf(columns: Columns, of_packs: Rows, shifted: bool, slabs: Slabs) -> Rows:
    """The flattening collator's keys and dtypes, beside what ``thd`` gives. Its boundaries are the padded ones; padding
    behind a sample goes on with its positions and ``seq_idx``, the tail is a sequence of its own, and no label counts
    there."""
    bounds = columns.attributes["cu_seqlens_padded"]
    assert isinstance(bounds, Column)
    found: Rows = {}
    if "input_ids" in of_packs:
        ids, labels = columns.attributes["input_ids"], columns.attributes["labels"]
        assert isinstance(ids, Column)
        assert isinstance(labels, Column)
        # What a model shifts back: the label of token i at i + 1; -100, which every pack ends with, at its first.
        unshifted = np.frombuffer(slabs.take(labels.values.nbytes), np.int64)
        unshifted[0], unshifted[1:] = IGNORE_INDEX, labels.values[:-1]
        found["input_ids"] = cut(tensor(ids.values), ids.bounds, rows=1)
        found["labels"] = cut(torch.from_numpy(unshifted), labels.bounds, rows=1)
        if shifted:
            found["shift_labels"] = cut(tensor(labels.values), labels.bounds, rows=1)
    widths = [0, *np.cumsum(bounds.values[np.array(bounds.bounds[1:]) - 1], dtype=np.int64).tolist()]
    numbers = np.frombuffer(slabs.take(4 * widths[-1]), np.int32)
    _number(bounds, numbers)
    return {
        **found,
        "position_ids": [positions.unsqueeze(-2) for positions in of_packs["position_ids"]],
        "seq_idx": cut(torch.from_numpy(numbers), widths, rows=1),
        "cu_seq_lens_q": of_packs["cu_seqlens_padded"],
        "cu_seq_lens_k": of_packs["cu_seqlens_padded"],
        "max_length_q": of_packs["max_seqlen"],
        "max_length_k": of_packs["max_seqlen"],
    }


def tensor(values: NDArray[Any], half: bool = False) -> torch.Tensor:
    """Of an array, in its memory; only read-only ones, and bfloat16, are copied."""
    found = torch.from_numpy(values if values.flags.writeable else values.copy())
    return found.to(torch.bfloat16) if half else found


def cut(whole: torch.Tensor, bounds: Sequence[int], rows: int = 0) -> list[torch.Tensor]:
    """Each pack's part of ``whole``, [T', ...]; [1, T', ...] with ``rows=1``."""
    sizes = [end - begin for begin, end in pairwise(bounds)]
    whole = whole[None] if rows else whole
    return list(torch.unsafe_split_with_sizes(whole, sizes, rows))


def _number(bounds: Column, numbers: I32) -> None:
    """Fill in of each token, [N], which slot of its pack it lies in; ``bounds`` are the slots'."""
    ends = np.array(bounds.bounds[1:]) - 1
    counts, widths = np.diff(bounds.bounds) - 1, bounds.values[ends].astype(np.int64)
    begins = np.delete(bounds.values + np.repeat(np.cumsum(widths) - widths, counts + 1), ends)
    steps = np.ones(len(begins), np.int32)
    steps[np.cumsum(counts)[:-1]] -= counts[:-1]
    steps[0] = 0
    numbers.fill(0)
    numbers[begins] = steps
    np.cumsum(numbers, out=numbers)
