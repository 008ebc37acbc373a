"""The loops of admission, once over a chunk's samples each; twins as in ``merge_kernels``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.jit import njit
from streampack.core.model.samples import I32, I64, U32, SampleTable


@njit(nogil=True, cache=True)
def measure(lengths: U32, loss_tokens: U32) -> tuple[int, int, int, int]:
    """Of samples' lengths and labels that count, uint32 [n]: all tokens, the most of one sample, samples of none, and
    those with as many labels as tokens, which cannot be.
    """
    tokens = longest = num_empty = wrong_loss = 0
    for i in range(len(lengths)):
        length: Any = np.int64(lengths[i])
        tokens += length
        longest = max(longest, length)
        num_empty += length == 0
        wrong_loss += np.int64(loss_tokens[i]) > length - (length > 0)
    return tokens, longest, num_empty, wrong_loss


@njit(nogil=True, cache=True)
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
    """Write the pieces of a chunk's samples from the ``skip``-th on into the table, a row of ``handles`` each.

    ``source``, ``offset``, ``length`` and ``part`` int64 [m] are the pieces, in the samples' order; ``lengths``,
    ``crcs`` and ``loss_tokens`` [n] the samples, whose first has ``first_index``, each next one ``partitions`` more.
    ``entries`` int64 [m] takes each piece's handle, -1 where it is of no length; ``stored`` int64 [3, m] where each
    that has one begins in the chunk, its length and its sample's number. A piece that was cut gets all of its
    sample's ``loss_tokens``. Returns how many were cut, and the tokens of all.
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
    """Compile or load both, for columns that may not be written to: they lie in a message."""
    table, one, said = SampleTable(1), np.ones(1, np.int64), np.frombuffer(bytes(4), "<u4")
    measure(said, said)
    enter(
        one[:0], one[:0], one[:0], one[:0], one, said, said, 0, 0, 1, 0, 0, one[:0], table.stream, table.index,
        table.part, table.length, table.loss_tokens, table.crc, table.keep, one[:0], np.zeros((3, 0), np.int64),
    )  # fmt: skip
