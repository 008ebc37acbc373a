"""Boundaries, positions and labels that a client derives, compiled: one pass over memory, without the GIL.

``boundaries.layouts`` and ``labels.derive`` are the same in numpy, which runs until these are compiled; tests compare
both (``streampack.packs.kernel_loader``). Arguments that a kernel only reads may be read-only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.jit import kernel, key_of
from streampack.core.model.samples import I32, I64, IGNORE_INDEX

_I64 = np.zeros(1, np.int64)
_BOUNDS = np.zeros(1, np.int32)
_TOKENS, _SHORT_TOKENS, _EDGES, _COUNTED = (np.frombuffer(bytes(4), kind) for kind in ("<i4", "<u2", "<i4", "u1"))


@kernel(keys=[key_of(*10 * [_I64], _BOUNDS, _BOUNDS)])
def lay_out(
    lengths: I64,
    counts: I64,
    aligns: I64,
    widths: I64,
    real: I64,
    start: I64,
    stop: I64,
    first_sample: I64,
    first_segment: I64,
    widest: I64,
    cu_seqlens: I32,
    cu_seqlens_padded: I32,
) -> int:
    """Compute the boundaries of packs, as ``boundaries.layouts`` does; write them to the arguments after ``widths``.

    The arguments have the shapes of ``Layouts``, with room for [samples + packs] segments. ``widest`` int64 [packs] are
    the tokens of each pack's widest segment. ``cu_seqlens`` and ``cu_seqlens_padded`` int32 [samples + 2 * packs] are
    as ``Layouts.boundaries`` returns them. Returns the number of segments, or -1 for packs that cannot be laid out.
    """
    sample = segment = 0
    first_sample[0] = first_segment[0] = 0
    for pack in range(len(counts)):
        to = segment + pack
        cu_seqlens[to] = cu_seqlens_padded[to] = at = real_tokens = widest[pack] = 0
        for i in range(counts[pack] + 1):
            if i < counts[pack]:
                length = lengths[sample]
                slot = -(-length // aligns[pack]) * aligns[pack]
                sample += 1
                if length <= 0:
                    return -1
            else:  # tail padding is a segment of its own
                length, slot = 0, widths[pack] - at
                if slot == 0:
                    continue
            if slot > widths[pack] - at or slot < 0:
                return -1
            real[segment], start[segment], stop[segment] = length, at, at + slot
            at += slot
            real_tokens += length
            widest[pack] = max(widest[pack], slot)
            segment += 1
            to += 1
            cu_seqlens[to], cu_seqlens_padded[to] = real_tokens, at
        first_sample[pack + 1], first_segment[pack + 1] = sample, segment
    return segment


@kernel(
    keys=[
        key_of(tokens, _EDGES, _COUNTED, *3 * [_I64], True, *3 * [_I64], np.zeros(1, np.bool_))
        for tokens in (_TOKENS, _SHORT_TOKENS)
    ]
)
def derive(
    tokens: NDArray[Any],
    edges: I32,
    counted: NDArray[np.uint8],
    offset: I64,
    size: I64,
    real: I64,
    labeled: bool,
    input_ids: I64,
    labels: I64,
    position_ids: I64,
    padding_mask: NDArray[np.bool_],
) -> None:
    """Fill in ``input_ids``, ``labels``, ``position_ids`` and ``padding_mask``, [N] each, for slices.

    Arguments are those of ``labels.derive``.
    """
    at = 0
    for i in range(len(size)):
        first, count = offset[i], size[i]
        num_real = min(max(real[i] - first, 0), count)
        # Views that begin at 0: loops over them are vectorized, over ``at + j`` they are not.
        token, following = tokens[at : at + count], tokens[at + 1 : at + count]
        ids, label = input_ids[at : at + count], labels[at : at + count]
        position, padding = position_ids[at : at + count], padding_mask[at : at + count]
        for j in range(count):
            ids[j] = token[j]
        for j in range(count):
            position[j] = first + j
        for j in range(num_real):
            padding[j] = False
        for j in range(num_real, count):
            padding[j] = True
            label[j] = IGNORE_INDEX
        if not labeled and num_real > 0:
            for j in range(num_real - 1):
                label[j] = following[j]
            label[num_real - 1] = IGNORE_INDEX if first + num_real == real[i] else edges[i]
        if len(counted):
            count_it = counted[at : at + count]
            for j in range(num_real):
                if count_it[j] == 0:
                    label[j] = IGNORE_INDEX
        at += count
