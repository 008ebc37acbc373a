"""The hot loops of DEAL: the columns of a step's messages, and the load of ranks. Compiled where numba is installed.

Each kernel is plain Python over numpy arrays, so tests compare the kernel with its ``py_func``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streampack.core.jit import kernel
from streampack.core.model.samples import I32, I64, U32


@kernel
def lay_out(
    numbers: I64,
    handles: I64,
    bounds: I64,
    length: I32,
    stream: I32,
    index: I64,
    part: I32,
    ends: I64,
    laid: I64,
    lengths: U32,
    streams: U32,
    indices: NDArray,  # type: ignore[type-arg]
    parts: U32,
) -> None:
    """Lay the samples of packs out in the order of ``numbers``; pack i is ``handles[bounds[i]:bounds[i + 1]]``.

    The kernel fills in ``ends`` int64 [packs], the end of each pack in the new order, and ``laid`` int64 [samples], the
    handles. It also fills in the samples' columns: ``indices`` uint64, the others uint32 [samples]. The arguments from
    ``length`` to ``part`` are columns of a ``SampleTable``.
    """
    at = 0
    for i in range(len(numbers)):
        for k in range(bounds[numbers[i]], bounds[numbers[i] + 1]):
            h = handles[k]
            laid[at] = h
            lengths[at] = length[h]
            streams[at] = stream[h]
            indices[at] = index[h]
            parts[at] = part[h]
            at += 1
        ends[i] = at


@kernel
def loads(costs: I64, tokens: I64, dealt: I64, sums: I64, extremes: I64) -> tuple[float, int]:
    """Compute the load of ranks; the m-th pack of rank r is ``dealt[m, r]``, ``costs`` and ``tokens`` int64 [packs].

    The kernel adds to ``sums`` int64 [3, ranks], zeros before: each rank's cost, its tokens, and its tokens with packs
    in the order of their numbers. It fills in ``extremes`` int64 [3, 3] with the least, the greatest and the sum of
    each row of ``sums``.

    Returns a sum over the micro-batches with a cost above 0, and their number. The sum adds the costliest pack's cost
    divided by the mean cost.
    """
    ratios, rows, ranks = 0.0, 0, dealt.shape[1]
    for m in range(len(dealt)):
        total = dearest = 0
        for rank in range(ranks):
            pack = dealt[m, rank]
            cost = costs[pack]
            total += cost
            dearest = max(dearest, cost)
            sums[0, rank] += cost
            sums[1, rank] += tokens[pack]
            sums[2, rank] += tokens[m * ranks + rank]
        if total > 0:
            ratios += dearest / (total / ranks)
            rows += 1
    for i in range(3):
        low, high, total = sums[i, 0], sums[i, 0], 0
        for rank in range(ranks):
            low, high = min(low, sums[i, rank]), max(high, sums[i, rank])
            total += sums[i, rank]
        extremes[i, 0], extremes[i, 1], extremes[i, 2] = low, high, total
    return ratios, rows


def warm_up() -> None:
    """Compile both kernels, or load them from the disk, by calling them without samples."""
    none, few, one = np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros((1, 1), np.int64)
    column = np.zeros(0, np.uint32)
    lay_out(none, none, one[0], few, few, none, few, none, none, column, column, np.zeros(0, np.uint64), column)
    loads(one[0], one[0], one, np.zeros((3, 1), np.int64), np.zeros((3, 3), np.int64))
