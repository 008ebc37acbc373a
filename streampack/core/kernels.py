"""The hot loops of merging and of cutting shards, compiled by numba where it is installed.

Each is plain Python over numpy arrays, so that ``kernel.py_func`` (or the function itself where
numba is missing) is the twin that the tests compare with. They hold no GIL and allocate nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.samples import I32, I64

try:
    from numba import njit
except ImportError:  # a trainer's machine: nothing hot runs there

    def njit(**_: Any) -> Callable[[Any], Any]:  # type: ignore[no-redef]
        return lambda function: function


@njit(nogil=True, cache=True)
def merge_take(
    clock: I64,
    stride: I64,
    first: I64,
    turn: I64,
    live: NDArray[np.bool_],
    head: I64,
    tail: I64,
    ended: NDArray[np.bool_],
    ring_handle: I64,
    ring_length: I64,
    ring_part: I64,
    merged_samples: I64,
    merged_tokens: I64,
    max_tokens: int,
    out_handle: I64,
    out_length: I64,
) -> tuple[int, int]:
    """Take samples in merge order until one is missing, ``max_tokens`` are taken or the output is full.

    Streams ``s`` own partitions ``first[s]:first[s + 1]``; partition ``p`` holds entries
    ``head[p]:tail[p]`` of row ``p`` of the rings, modulo their width. Updates ``clock``,
    ``turn``, ``live``, ``head`` and the counts by partition in place. An entry of length 0 is a tombstone: it takes its
    turn and gives nothing. Returns (samples taken, partition waited for or -1).
    """
    width = ring_handle.shape[1]
    taken = 0
    tokens = 0
    while tokens < max_tokens:
        stream = -1
        for s in range(len(clock)):
            if live[s] and (stream < 0 or clock[s] < clock[stream]):
                stream = s
        if stream < 0:
            return taken, -1
        count = first[stream + 1] - first[stream]
        partition = -1
        for step in range(count):
            p = first[stream] + (turn[stream] + step) % count
            if head[p] < tail[p] or not ended[p]:
                partition = p
                break
        if partition < 0:
            live[stream] = False
            continue
        at = head[partition]
        if at == tail[partition]:
            return taken, partition
        pieces = 1
        while at + pieces < tail[partition] and ring_part[partition, (at + pieces) % width] > 0:
            pieces += 1
        if taken + pieces > len(out_handle):
            return taken, -1
        for piece in range(pieces):
            slot = (at + piece) % width
            length = ring_length[partition, slot]
            if length > 0:
                out_handle[taken] = ring_handle[partition, slot]
                out_length[taken] = length
                taken += 1
                tokens += length
                merged_tokens[partition] += length
                clock[stream] += stride[stream] * length
        merged_samples[partition] += 1
        head[partition] = at + pieces
        turn[stream] = (partition - first[stream] + 1) % count
    return taken, -1


@njit(nogil=True, cache=True)
def gather(
    arena: NDArray[Any],
    offset: I64,
    length: I64,
    handles: I64,
    bounds: I64,
    align: int,
    cp: int,
    rank: int,
    out: NDArray[Any],
    edges: I32,
) -> int:
    """Copy the shards of packs for ``rank`` of ``cp`` out of the arena; padding becomes 0.

    Pack i is samples ``handles[bounds[i]:bounds[i + 1]]``; a sample lies at ``offset[handle]`` of
    ``arena``, ``length[handle]`` tokens, padded to ``align``. ``out`` [packs, T / cp] is filled
    whole. With cp > 1 a sample is cut in 2 * cp chunks, of which the rank has two, and ``edges``
    int32 [len(handles), 2] takes the token after each, -100 where the sample has none.

    Returns -1, or the first pack that does not fit or holds a sample of no tokens: then ``out`` is not whole.
    A loop over two views is what numba makes the fastest copy of: it asks of a slice assignment
    first whether the two overlap, and of an index that is added up whether it is negative.
    """
    width = out.shape[1]
    for row in range(len(bounds) - 1):
        to = 0
        for i in range(bounds[row], bounds[row + 1]):
            at, real = offset[handles[i]], length[handles[i]]
            slot = (real + align - 1) // align * align
            if real < 1 or to + slot // cp > width:
                return row
            chunk = slot if cp == 1 else slot // (2 * cp)
            for half in range(1 if cp == 1 else 2):
                start = rank * chunk if half == 0 else slot - (rank + 1) * chunk
                held = max(min(start + chunk, real) - start, 0)
                into, piece = out[row, to : to + chunk], arena[at + start : at + start + held]
                for k in range(held):
                    into[k] = piece[k]
                for k in range(held, chunk):
                    into[k] = 0
                if cp > 1:
                    edges[i, half] = arena[at + start + chunk] if start + chunk < real else -100
                to += chunk
        out[row, to:] = 0
    return -1
