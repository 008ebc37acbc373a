"""Compiled loops of ``chunk_check`` and ``admission``; each loop passes once over the samples of a chunk."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.jit import kernel
from streampack.core.model.samples import I32, I64, U32, SampleTable


@kernel
def measure(lengths: U32, loss_tokens: U32) -> tuple[int, int, int, int]:
    """Return totals of a chunk's samples.

    Args:
        lengths: uint32 [n], tokens of each sample.
        loss_tokens: uint32 [n], labels of each sample that count in the loss.

    Returns:
        Tokens of all samples, tokens of the longest, number of empty samples, and number of samples with too many loss
        tokens: at least as many as its tokens.
    """
    tokens = longest = num_empty = wrong_loss = 0
    for i in range(len(lengths)):
        length: Any = np.int64(lengths[i])
        tokens += length
        longest = max(longest, length)
        num_empty += length == 0
        wrong_loss += np.int64(loss_tokens[i]) > length - (length > 0)
    return tokens, longest, num_empty, wrong_loss


@kernel
def enter(
    source: I64,
    offset: I64,
    length: I64,
    part: I64,
    lengths: I64,
    crcs: U32,
    loss_tokens: U32,
    skip: int,
    first_index: int,
    partitions: int,
    stream: int,
    keep: int,
    handles: I64,
    to_stream: I32,
    to_index: I64,
    to_part: I32,
    to_length: I32,
    to_loss_tokens: I32,
    to_crc: U32,
    to_keep: NDArray[np.uint8],
    entries: I64,
    stored: I64,
) -> tuple[int, int]:
    """Write the pieces of a chunk's samples, from the ``skip``-th sample on, into the table rows ``handles``.

    Columns of ``samples.EXTRAS``, except ``keep``, are left to ``SampleTable.put``.

    Args:
        source: int64 [m], position in the chunk, from ``skip`` on, of the sample of each piece.
        offset: int64 [m], tokens of the sample before each piece.
        length: int64 [m], tokens of each piece.
        part: int64 [m], number of each piece in its sample.
        lengths: int64 [n], tokens of each sample of the chunk.
        crcs: uint32 [n], checksum of each sample.
        loss_tokens: uint32 [n], loss tokens of each sample.
        skip: Samples at the chunk's beginning that have no pieces.
        first_index: Index in the stream of the chunk's first sample; each next index is ``partitions`` higher.
        partitions: Partitions of the stream.
        stream: Value of every row: number of the stream.
        keep: Value of every row but the last: how the samples stay together.
        handles: int64 [k], rows for the pieces of at least a token.
        to_stream: Column ``stream`` of the table, written.
        to_index: Column ``index``.
        to_part: Column ``part``.
        to_length: Column ``length``.
        to_loss_tokens: Column ``loss_tokens``.
        to_crc: Column ``crc``.
        to_keep: Column ``keep``.
        entries: int64 [m], written: handle of each piece, -1 for a piece of length 0.
        stored: int64 [3, m], written for each piece with a handle: tokens of the chunk before it, its length, and
            position of its sample.

    Returns:
        Number of pieces that are shorter than their sample, and tokens of all pieces. The ``loss_tokens`` of a cut
        piece are those of its whole sample.
    """
    sample, begin, kept, cut, tokens = 0, 0, 0, 0, 0
    for i in range(len(source)):
        while sample < skip + source[i]:
            begin += lengths[sample]
            sample += 1
        if length[i] == 0:
            entries[i] = -1
            continue
        row = handles[kept]
        to_stream[row] = stream
        to_index[row] = first_index + sample * partitions
        to_part[row] = part[i]
        to_length[row] = length[i]
        to_loss_tokens[row] = loss_tokens[sample]
        to_crc[row] = crcs[sample]
        to_keep[row] = keep
        entries[i] = row
        stored[0, kept], stored[1, kept], stored[2, kept] = begin + offset[i], length[i], sample
        cut += length[i] != lengths[sample]
        tokens += length[i]
        kept += 1
    if kept:
        to_keep[handles[kept - 1]] = 0  # nothing of the group follows
    return cut, tokens


def warm_up() -> None:
    """Compile or load both kernels for read-only columns, as messages have them."""
    table, one, sent = SampleTable(1), np.ones(1, np.int64), np.frombuffer(bytes(4), "<u4")
    measure(sent, sent)
    enter(
        one[:0], one[:0], one[:0], one[:0], one, sent, sent, 0, 0, 1, 0, 0, one[:0], table.stream, table.index,
        table.part, table.length, table.loss_tokens, table.crc, table.keep, one[:0], np.zeros((3, 0), np.int64),
    )  # fmt: skip
