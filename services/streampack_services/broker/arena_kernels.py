"""The hot loops of the arena, compiled by numba: which slices a shard is made of, copying them, and letting samples go.

Each is plain Python over numpy arrays, so that ``kernel.py_func`` is the twin that the tests compare with. They hold
no GIL and allocate nothing. What a shard holds is ``core.layout``'s to say: ``slices_of`` is ``layouts`` and ``cut``
in one pass over the samples, which for a message of one pack is the difference between 5 and 100 us.
"""

from __future__ import annotations

from typing import Any

import numba  # noqa: F401  # without it the broker must not start: plain Python would copy token by token
from numpy.typing import NDArray

from streampack.core.jit import njit
from streampack.core.model.samples import I32, I64

WHOLE, ZIGZAG, ZIGZAG_PACK, CONTIGUOUS = range(4)
KINDS = {"whole": WHOLE, "zigzag": ZIGZAG, "zigzag_pack": ZIGZAG_PACK, "contiguous": CONTIGUOUS}


@njit(nogil=True, cache=True)
def slices_of(
    handles: I64,
    counts: I64,
    widths: I64,
    aligns: I64,
    places: I64,
    lengths: I64,
    cp: int,
    rank: int,
    kind: int,
    address: I64,
    real: I64,
    offset: I64,
    size: I64,
) -> tuple[int, int]:
    """The slices that rank ``rank`` of ``cp`` holds of packs, in its order, by a layout of ``KINDS``.

    Packs are as in ``core.layout.Packs``; ``places`` and ``lengths`` are the arena's, by handle. Of each slice, int64
    [at least 2 * (samples + packs)]: where its segment begins (``address``), how many ``real`` tokens that holds, and
    the slice's own ``offset`` into it and ``size``. Returns (slices, their tokens together); (-1, pack) for one that
    cannot be laid out or cut so.
    """
    found = tokens = first = 0
    whole = cp == 1 or kind == WHOLE
    for pack in range(len(counts)):
        stop, align, width = first + counts[pack], aligns[pack], widths[pack]
        parts = 1 if whole else cp if kind == CONTIGUOUS else 2 * cp
        cuts_pack = not whole and kind != ZIGZAG
        if cuts_pack and width % parts:
            return -1, pack
        chunk = width // parts
        for turn in range(2 if cuts_pack and kind == ZIGZAG_PACK else 1):
            begin = (rank if turn == 0 else 2 * cp - 1 - rank) * chunk
            at = 0
            for i in range(first, stop + 1):
                if i < stop:
                    if not 0 <= handles[i] < len(lengths):  # a sample that never was here
                        return -1, pack
                    held, where = lengths[handles[i]], places[handles[i]]
                    slot = -(-held // align) * align
                    if held <= 0 or at + slot > width:
                        return -1, pack
                else:  # tail padding is a segment of its own
                    held, where, slot = 0, 0, width - at
                    if slot == 0:
                        continue
                if cuts_pack:
                    start, end = max(at, begin), min(at + slot, begin + chunk)
                    pieces, step = (1 if start < end else 0), 0
                    start, length = start - at, end - start
                elif whole:
                    pieces, start, length, step = 1, 0, slot, 0
                else:
                    if slot % parts:
                        return -1, pack
                    length = slot // parts
                    pieces, start, step = 2, rank * length, (2 * cp - 1 - 2 * rank) * length
                for piece in range(pieces):
                    address[found], real[found] = where, held
                    offset[found], size[found] = start + piece * step, length
                    found += 1
                    tokens += length
                at += slot
        first = stop
    return found, tokens


@njit(nogil=True, cache=True)
def copy_slices(
    column: NDArray[Any],
    address: I64,
    real: I64,
    offset: I64,
    size: I64,
    width: int,
    shift: int,
    pad: Any,
    out: NDArray[Any],
    edges: I32,
) -> int:
    """Copy slices of segments out of a column of the arena, one after another; ``pad`` stands behind what is real.

    The column [N * width] holds ``width`` numbers a token. Slice i is of a segment that begins at token ``address[i]``
    and holds ``real[i]``; it is ``size[i]`` tokens from ``offset[i]`` of that on, and ``shift`` further: 1 gives each
    place what belongs to the next token. ``out`` [sum of sizes * width] is filled whole. Where ``edges`` int32 [slices]
    is not empty it takes what follows each slice in its segment, -100 where nothing does.

    Returns -1, or the first slice that ``out`` or the column has no room for.
    A loop over two views is what numba makes the fastest copy of: it asks of a slice assignment
    first whether the two overlap, and of an index that is added up whether it is negative.
    """
    to = 0
    for i in range(len(size)):
        count = size[i] * width
        begin = (offset[i] + shift) * width
        held = max(min(begin + count, real[i] * width) - begin, 0)
        start = address[i] * width + begin
        if size[i] < 0 or to + count > len(out) or (held > 0 and (start < 0 or start + held > len(column))):
            return i
        into, piece = out[to : to + count], column[start : start + held]
        for k in range(held):
            into[k] = piece[k]
        for k in range(held, count):
            into[k] = pad
        if len(edges) > 0:
            after = offset[i] + size[i]
            edges[i] = column[address[i] + after] if after < real[i] else -100
        to += count
    return -1


@njit(nogil=True, cache=True)
def let_go(handles: I64, places: I64, lengths: I64, block_tokens: int, live: I64, emptied: I64) -> int:
    """Take samples out of the count of each block's ``live`` tokens, int64 [blocks]; their ``lengths`` become 0.

    ``places`` and ``lengths`` are by handle. Returns how many blocks hold nothing any more: the first of ``emptied``,
    which has room for as many as there are handles.
    """
    count = 0
    for i in range(len(handles)):
        length = lengths[handles[i]]
        if length > 0:
            block = places[handles[i]] // block_tokens
            live[block] -= length
            lengths[handles[i]] = 0
            if live[block] == 0:
                emptied[count] = block
                count += 1
    return count
