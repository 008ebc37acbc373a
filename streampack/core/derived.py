"""What a client derives for every token of a message, compiled: one pass over memory, and no GIL meanwhile.

``layout.derive_positions`` and ``derive_labels`` say the same in numpy, for machines without numba, and are what the
tests compare with. Kept apart from ``kernels``, which broker and producers import: a trainer's process imports this
one, and numba with it, in a thread of its own (``streampack.compiled``). The types are given, so that importing is
compiling; numba keeps the result on disk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from streampack.core.samples import I32, I64, IGNORE_INDEX


def _read(kind: Any) -> Any:
    return types.Array(kind, 1, "C", readonly=True)


_I64 = types.int64[::1]
_TYPES = [
    types.void(
        _read(token),
        _read(types.int32),
        _read(types.uint8),
        *[_I64] * 3,
        types.boolean,
        *[_I64] * 3,
        types.boolean[::1],
    )
    for token in (types.int32, types.uint16)
]


@njit(_TYPES, nogil=True, cache=True)
def derive(
    tokens: NDArray[Any],
    edges: I32,
    counted: NDArray[np.uint8],
    offset: I64,
    size: I64,
    real: I64,
    labelled: bool,
    input_ids: I64,
    labels: I64,
    position_ids: I64,
    padding_mask: NDArray[np.bool_],
) -> None:
    """Fill in the last four, [N] each, for slices one after another, as ``layout.derive_positions`` has them.

    ``tokens`` int32 or uint16 [N]. ``edges`` int32 [slices], the token after each; empty where slices are whole
    segments. ``counted`` uint8 [N]: 0 where a label does not count; empty where all do. ``labelled``: ``labels`` holds
    those that were sent, and is only masked.
    """
    at = 0
    for i in range(len(size)):
        first, count = offset[i], size[i]
        held = min(max(real[i] - first, 0), count)
        # Views that begin at 0: loops over them are vectorized, over ``at + j`` they are not.
        token, following = tokens[at : at + count], tokens[at + 1 : at + count]
        ids, label = input_ids[at : at + count], labels[at : at + count]
        position, padding = position_ids[at : at + count], padding_mask[at : at + count]
        for j in range(count):
            ids[j] = token[j]
        for j in range(count):
            position[j] = first + j
        for j in range(held):
            padding[j] = False
        for j in range(held, count):
            padding[j] = True
            label[j] = IGNORE_INDEX
        if not labelled and held > 0:
            for j in range(held - 1):
                label[j] = following[j]
            label[held - 1] = IGNORE_INDEX if first + held == real[i] else edges[i]
        if len(counted):
            count_it = counted[at : at + count]
            for j in range(held):
                if count_it[j] == 0:
                    label[j] = IGNORE_INDEX
        at += count
