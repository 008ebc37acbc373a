"""The shards of TransformerEngine, as its kernel computes them."""

from __future__ import annotations


def te_indices(cu: list[int], cp: int, rank: int) -> list[int]:
    """``thd_partition_indices_kernel`` of TransformerEngine's context_parallel.cu, token by token.

    It divides the boundaries first: a local index t lies in the sample whose local range holds it.
    """
    local = [boundary // cp for boundary in cu]
    indices = []
    for t in range(cu[-1] // cp):
        j = next(j for j in range(len(cu) - 1) if local[j] <= t < local[j + 1])
        half = (local[j + 1] - local[j]) // 2
        i = t - local[j]
        turn = rank if i < half else 2 * cp - 2 - rank
        indices.append(i + cu[j] + half * turn)
    return indices
