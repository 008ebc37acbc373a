"""The hot loops of the arena, compiled by numba: find the slices of a shard, copy slices, measure and release samples.

Each kernel is plain Python over numpy arrays; tests compare its forms. Compiled kernels run without the GIL and
allocate nothing.

``core.layout`` defines the shards; ``find_slices`` does the work of its ``layouts`` and ``cut`` in one pass. For a
message of one pack that takes 5 us instead of 100 us.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.jit import kernel
from streampack.core.model.samples import I32, I64

WHOLE, ZIGZAG, ZIGZAG_PACK, CONTIGUOUS = range(4)
KINDS = {"whole": WHOLE, "zigzag": ZIGZAG, "zigzag_pack": ZIGZAG_PACK, "contiguous": CONTIGUOUS}


@kernel
def find_slices(
    handles: I64,
    counts: I64,
    widths: I64,
    aligns: I64,
    places: I64,
    lengths: I64,
    sizes: I64,
    ranks: I64,
    kind: int,
    address: I64,
    real: I64,
    offset: I64,
    size: I64,
) -> tuple[int, int]:
    """Find the slices of packs that a context-parallel rank holds, in the order of the rank's shard.

    A segment is one sample with its padding, or the padding at the end of a pack; a slice is a range of a segment.

    Args:
        handles: Handles of the packs' samples, pack by pack, int64 [samples].
        counts: Samples of each pack, int64 [packs].
        widths: Tokens of each pack with padding (T), int64 [packs].
        aligns: For each pack, the multiple of tokens to which its samples are padded, int64 [packs].
        places: Address of each sample's first token in the arena, by handle, int64.
        lengths: Tokens of each sample, by handle, int64; 0 for a handle that is not held.
        sizes: Context-parallel ranks of each pack, int64 [packs], or [1] for all packs.
        ranks: Context-parallel rank in each pack, from 0, of the same size.
        kind: Layout of the shards, one of ``KINDS``.
        address: Output: where the segment of each slice begins in the arena, int64 [2 * (samples + packs)].
        real: Output, of the same size: tokens of the segment without padding.
        offset: Output, of the same size: first token of the slice in its segment.
        size: Output, of the same size: tokens of the slice.

    Returns:
        (number of slices, tokens of all slices), or (-1, pack) if that pack cannot be laid out or cut.
    """
    num_slices = tokens = first = 0
    for pack in range(len(counts)):
        stop, align, width = first + counts[pack], aligns[pack], widths[pack]
        cp, rank = sizes[pack % len(sizes)], ranks[pack % len(ranks)]
        is_whole = cp == 1 or kind == WHOLE
        parts = 1 if is_whole else cp if kind == CONTIGUOUS else 2 * cp
        cuts_pack = not is_whole and kind != ZIGZAG
        if cuts_pack and width % parts:
            return -1, pack
        chunk = width // parts
        for turn in range(2 if cuts_pack and kind == ZIGZAG_PACK else 1):
            begin = (rank if turn == 0 else 2 * cp - 1 - rank) * chunk
            at = 0
            for i in range(first, stop + 1):
                if i < stop:
                    if not 0 <= handles[i] < len(lengths):  # a sample that was never stored
                        return -1, pack
                    num_tokens, where = lengths[handles[i]], places[handles[i]]
                    slot = -(-num_tokens // align) * align
                    if num_tokens <= 0 or at + slot > width:
                        return -1, pack
                else:  # tail padding is a segment of its own
                    num_tokens, where, slot = 0, 0, width - at
                    if slot == 0:
                        continue
                if cuts_pack:
                    start, end = max(at, begin), min(at + slot, begin + chunk)
                    pieces, step = (1 if start < end else 0), 0
                    start, length = start - at, end - start
                elif is_whole:
                    pieces, start, length, step = 1, 0, slot, 0
                else:
                    if slot % parts:
                        return -1, pack
                    length = slot // parts
                    pieces, start, step = 2, rank * length, (2 * cp - 1 - 2 * rank) * length
                for piece in range(pieces):
                    address[num_slices], real[num_slices] = where, num_tokens
                    offset[num_slices], size[num_slices] = start + piece * step, length
                    num_slices += 1
                    tokens += length
                at += slot
        first = stop
    return num_slices, tokens


def _copy_slices_plainly(
    column: NDArray[Any], address: I64, real: I64, offset: I64, size: I64, width: int, shift: int, pad: Any,
    out: NDArray[Any], edges: I32,
) -> int:  # fmt: skip
    """Copy slices as ``copy_slices`` does, a slice at a time."""
    to = 0
    for i, (where, tokens, first, length) in enumerate(
        zip(address.tolist(), real.tolist(), offset.tolist(), size.tolist(), strict=True)
    ):
        count, begin = length * width, (first + shift) * width
        num_copied = max(min(begin + count, tokens * width) - begin, 0)
        start = where * width + begin
        if length < 0 or to + count > len(out) or (num_copied > 0 and (start < 0 or start + num_copied > len(column))):
            return i
        out[to : to + num_copied] = column[start : start + num_copied]
        out[to + num_copied : to + count] = pad
        if len(edges) > 0:
            after = first + length
            edges[i] = column[where + after] if after < tokens else -100
        to += count
    return -1


@kernel(plain=_copy_slices_plainly)
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
    """Copy slices out of a column of the arena, one after another.

    Args:
        column: Values of one field, ``width`` numbers for each token of the arena.
        address: First token of each slice's segment in the arena, int64 [slices].
        real: Tokens of each segment without padding, int64 [slices].
        offset: First token of each slice in its segment, int64 [slices].
        size: Tokens of each slice, int64 [slices].
        width: Numbers for each token.
        shift: Number of tokens to read ahead: with 1, each position gets the value of the next token.
        pad: Number for positions without a real token.
        out: Output, [sum of sizes * width].
        edges: Output, int32 [slices], or empty: the token that follows each slice in its segment, or -100.

    Returns:
        -1, or the index of the first slice that does not fit into ``out`` or lies outside the column.
    """
    to = 0
    for i in range(len(size)):
        count = size[i] * width
        begin = (offset[i] + shift) * width
        num_copied = max(min(begin + count, real[i] * width) - begin, 0)
        start = address[i] * width + begin
        if size[i] < 0 or to + count > len(out) or (num_copied > 0 and (start < 0 or start + num_copied > len(column))):
            return i
        # numba copies fastest with a loop over two views: a slice assignment would check for overlap first
        into, piece = out[to : to + count], column[start : start + num_copied]
        for k in range(num_copied):
            into[k] = piece[k]
        for k in range(num_copied, count):
            into[k] = pad
        if len(edges) > 0:
            after = offset[i] + size[i]
            edges[i] = column[address[i] + after] if after < real[i] else -100
        to += count
    return -1


def _measure_stored_plainly(handles: I64, offsets: I64, lengths: I64, ends: I64) -> tuple[int, int, bool]:
    """Measure samples as ``measure_stored`` does."""
    np.cumsum(lengths, out=ends)
    joined = bool((offsets - offsets[0] == ends - lengths).all())
    return int(lengths.max()), int(handles.max()), joined


@kernel(plain=_measure_stored_plainly)
def measure_stored(handles: I64, offsets: I64, lengths: I64, ends: I64) -> tuple[int, int, bool]:
    """Measure the samples of a chunk that are to be stored.

    Args:
        handles: Handles of the samples, int64 [n], n > 0.
        offsets: First token of each sample in the chunk's tokens, int64 [n].
        lengths: Tokens of each sample, int64 [n].
        ends: Output, int64 [n]: tokens of the samples up to and with each.

    Returns:
        Tokens of the longest sample, the largest handle, and True if the samples follow one another without a gap.
    """
    longest = last = total = 0
    joined = True
    for i in range(len(handles)):
        joined = joined and offsets[i] - offsets[0] == total
        total += lengths[i]
        ends[i] = total
        longest, last = max(longest, lengths[i]), max(last, handles[i])
    return longest, last, joined


@kernel
def release_samples(handles: I64, places: I64, lengths: I64, block_tokens: int, live: I64, emptied: I64) -> int:
    """Subtract released samples from the live tokens of their blocks, and set their lengths to 0.

    Args:
        handles: Handles of the samples, int64 [n].
        places: Address of each sample's first token in the arena, by handle, int64.
        lengths: Tokens of each sample, by handle, int64; changed.
        block_tokens: Tokens of a block.
        live: Live tokens of each block, int64 [blocks]; changed.
        emptied: Output, int64 [n]: numbers of the blocks that have no live tokens any more.

    Returns:
        The number of blocks written to ``emptied``.
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
