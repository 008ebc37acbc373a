"""Positions, padding masks and labels of the tokens that a rank holds, derived from lengths and token ids."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.samples import I32, I64, IGNORE_INDEX


def positions_of(starts: I64, stops: I64) -> I64:
    """Return the integers in [start, stop) of every slice, concatenated, int64 [sum of sizes]."""
    sizes = stops - starts
    some = sizes > 0
    positions = np.empty(int(sizes.sum()), np.int64)
    _count_up(starts[some], sizes[some], positions)
    return positions


def _count_up(starts: I64, sizes: I64, out: I64) -> None:
    """Fill ``out`` with starts[i], starts[i] + 1, ... for each slice; every slice has a size of at least 1."""
    if len(out):
        out.fill(1)
        out[np.cumsum(sizes[:-1])] = starts[1:] - (starts + sizes)[:-1] + 1
        out[0] = starts[0]
        np.cumsum(out, out=out)


def derive_positions(offset: I64, size: I64, real: I64, position_ids: I64, padding_mask: NDArray[np.bool_]) -> I64:
    """Fill in the positions and the padding mask of slices that lie one after another.

    Slice i has ``size[i]`` tokens and begins ``offset[i]`` tokens into its segment, which holds ``real[i]`` real
    tokens; all int64 [k]. Positions, int64 [N], restart at 0 in each segment; the mask, [N], is True at padding.

    Returns the indices of the padding tokens, int64 [pads].
    """
    ends = np.cumsum(size)
    _count_up(offset, size, position_ids)
    padding = positions_of(ends - size + np.clip(real - offset, 0, size), ends)  # behind the real tokens
    padding_mask[:] = False
    padding_mask[padding] = True
    return padding


def derive_labels(
    input_ids: I64, offset: I64, size: I64, real: I64, edges: I32 | None, padding: I64, labels: I64
) -> None:
    """Fill in ``labels`` int64 [N]: ``input_ids`` shifted inside each sample, and -100 where there is no next token.

    Slices are given as in ``derive_positions``, and ``padding`` is its result. ``edges`` int32 [k] holds the token
    that follows each slice in its sample (-100 if none does), since another rank may hold that token. None means that
    slices are whole segments.
    """
    ends = np.cumsum(size)
    kept = np.clip(real - offset, 0, size)
    labels[:-1] = input_ids[1:]
    labels[-1:] = IGNORE_INDEX
    if edges is not None:
        labels[ends - 1] = edges
    last = (kept > 0) & (offset + kept == real)
    labels[(ends - size + kept - 1)[last]] = IGNORE_INDEX
    labels[padding] = IGNORE_INDEX


def derive(
    tokens: NDArray[Any], edges: I32, counted: NDArray[np.uint8], offset: I64, size: I64, real: I64, labeled: bool,
    input_ids: I64, labels: I64, position_ids: I64, padding_mask: NDArray[np.bool_],
) -> None:  # fmt: skip
    """Fill in ``input_ids``, ``labels``, ``position_ids`` and ``padding_mask``, [N] each, for slices.

    - ``tokens`` int32 or uint16 [N]: token ids of the slices, one slice after another.
    - ``edges`` int32 [k]: the token after each slice; empty if slices are whole segments.
    - ``counted`` uint8 [N]: 0 where a label does not count; empty if all count.
    - ``offset``, ``size`` and ``real`` int64 [k]: see ``derive_positions``.
    - ``labeled``: if True, ``labels`` holds the labels that were sent, and is only masked.

    The kernel ``layout_kernels.derive`` does the same.
    """
    padding = derive_positions(offset, size, real, position_ids, padding_mask)
    input_ids[:] = tokens
    if labeled:
        labels[padding] = IGNORE_INDEX
    else:
        derive_labels(input_ids, offset, size, real, edges if len(edges) else None, padding, labels)
    if len(counted):
        labels[counted == 0] = IGNORE_INDEX
