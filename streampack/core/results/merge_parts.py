"""Merge the parts in which ranks have reported the values of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streampack.core.journal.log_records import ValuesReported
from streampack.core.model.samples import I64


class MergedValues(NamedTuple):
    """Values of n samples: stream number, index and part of each, int64 [n, 3], and float64 [n] for each name."""

    ids: I64
    values: list[NDArray[np.float64]]


def merge_parts(parts: Sequence[ValuesReported]) -> MergedValues:
    """Return the values of all parts, ordered by id; the values of a sample in several parts are summed.

    Context-parallel ranks hold parts of the same samples, and other ranks hold other samples.

    Args:
        parts: Parts of one step, with the same names.
    """
    ids = np.concatenate([ids_of(part) for part in parts])
    ids, place = np.unique(ids, axis=0, return_inverse=True)
    values: list[NDArray[np.float64]] = []
    for number in range(len(parts[0].names)):
        column = np.concatenate([np.frombuffer(part.values[number], "<f8") for part in parts])
        values.append(np.bincount(place.ravel(), weights=column, minlength=len(ids)).astype(np.float64))
    return MergedValues(ids, values)


def ids_of(part: Any) -> I64:
    """Return the ids of the samples in a part, int64 [n, 3]; the part is a record or a message."""
    columns = (part.streams_u32, "<u4"), (part.indices_u64, "<u8"), (part.parts_u32, "<u4")
    return np.stack([np.frombuffer(column, kind).astype(np.int64) for column, kind in columns], axis=1)
