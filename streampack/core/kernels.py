"""The hot loops of merging, compiled by numba where it is installed.

Each is plain Python over numpy arrays, so that ``kernel.py_func`` (or the function itself where
numba is missing) is the twin that the tests compare with. They hold no GIL and allocate nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.samples import I64

try:
    from streampack.core.jit import njit as njit
except ImportError:  # a trainer's machine: nothing hot runs there

    def njit(*_: Any, **__: Any) -> Callable[[Callable[..., Any]], Any]:
        return lambda function: function


@njit(nogil=True, cache=True)
def sift_down(order: I64, size: int, clock: I64) -> None:
    """Restore the heap ``order[:size]`` after its root's clock has run on or its root was replaced.

    ``order`` int64 [streams] holds streams by (clock, number): the root is the stream whose turn is next.
    """
    at = 0
    moving = order[0]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size:
            left, right = order[child], order[child + 1]
            if clock[right] < clock[left] or (clock[right] == clock[left] and right < left):
                child += 1
        below = order[child]
        if clock[moving] < clock[below] or (clock[moving] == clock[below] and moving < below):
            break
        order[at] = below
        at = child
    order[at] = moving


@njit(nogil=True, cache=True)
def merge_take(
    order: I64,
    num_ordered: I64,
    now: I64,
    clock: I64,
    stride: I64,
    first: I64,
    turn: I64,
    live: NDArray[np.bool_],
    paused: NDArray[np.bool_],
    stops: NDArray[np.bool_],
    head: I64,
    tail: I64,
    ended: NDArray[np.bool_],
    ring_handle: I64,
    ring_length: I64,
    ring_part: I64,
    merged_samples: I64,
    merged_tokens: I64,
    by_sample: bool,
    max_tokens: int,
    max_samples: int,
    out_handle: I64,
    out_length: I64,
) -> tuple[int, int]:
    """Take samples in merge order until one is missing or ``max_tokens`` or ``max_samples`` are taken.

    ``order[: num_ordered[0]]`` is a heap of the streams that are live and not paused, by (clock, number), so a sample
    costs the logarithm of their number. Stream ``s`` owns partitions ``first[s]:first[s + 1]``; partition ``p`` holds
    entries ``head[p]:tail[p]`` of row ``p`` of the rings, modulo their width. ``out`` has room for all. Updates
    ``order``, ``clock``, ``turn``, ``live``, ``paused``, ``head`` and the counts by partition in place. An entry of
    length 0 is a tombstone: it takes its turn and gives nothing. An entry of length -1 is a barrier: it stays, and a
    stream all of whose open partitions are at one is paused. Clocks run by tokens, or one for each sample with
    ``by_sample``; ``now`` int64 [1] is the clock of the last stream taken from, before its sample.
    Returns (samples taken, partition waited for, or -1, or -2 if a stream of ``stops`` has ended).
    """
    width = ring_handle.shape[1]
    taken = 0
    tokens = 0
    samples = 0
    while tokens < max_tokens and samples < max_samples:
        if num_ordered[0] == 0:
            return taken, -1
        stream = order[0]
        count = first[stream + 1] - first[stream]
        partition = -1
        for step in range(count):
            p = first[stream] + (turn[stream] + step) % count
            if head[p] < tail[p] and ring_length[p, head[p] % width] < 0:
                paused[stream] = True
            elif head[p] < tail[p] or not ended[p]:
                partition = p
                break
        if partition < 0 and not paused[stream]:
            if stops[stream]:
                return taken, -2
            live[stream] = False
        if partition < 0:
            num_ordered[0] -= 1
            order[0] = order[num_ordered[0]]
            sift_down(order, num_ordered[0], clock)
            continue
        paused[stream] = False
        at = head[partition]
        if at == tail[partition]:
            return taken, partition
        pieces = 1
        while at + pieces < tail[partition] and ring_part[partition, (at + pieces) % width] > 0:
            pieces += 1
        before = taken
        now[0] = clock[stream]
        for piece in range(pieces):
            slot = (at + piece) % width
            length = ring_length[partition, slot]
            if length > 0:
                out_handle[taken] = ring_handle[partition, slot]
                out_length[taken] = length
                taken += 1
                tokens += length
                merged_tokens[partition] += length
                if not by_sample:
                    clock[stream] += stride[stream] * length
        if by_sample and taken > before:
            clock[stream] += stride[stream]
        merged_samples[partition] += 1
        samples += 1
        head[partition] = at + pieces
        turn[stream] = (partition - first[stream] + 1) % count
        sift_down(order, num_ordered[0], clock)
    return taken, -1


@njit(nogil=True, cache=True)
def arrival_take(
    base: int,
    stop: I64,
    after: I64,
    current: I64,
    head: I64,
    tail: I64,
    ended: NDArray[np.bool_],
    ring_handle: I64,
    ring_length: I64,
    ring_part: I64,
    merged_samples: I64,
    merged_tokens: I64,
    max_tokens: int,
    max_samples: int,
    out_handle: I64,
    out_length: I64,
) -> tuple[int, int]:
    """Take samples in the order of a script until one is missing or ``max_tokens`` or ``max_samples`` are taken.

    Run ``r`` is in slot ``r - base``: it ends before its partition's sample ``stop``, and ``after`` is that partition's
    next run, -1 if it has none; ``current`` is each one's first, also of partitions yet to come. Rings and counts are
    as in ``merge_take``, and ``out`` has room for all entries. Updates ``current``, ``head`` and the counts in place.
    A partition at a barrier is passed over, and one that has ended and is empty.
    Returns (samples taken, the partition whose sample is missing, or -1, or -2 at the script's end).
    """
    width = ring_handle.shape[1]
    taken = 0
    tokens = 0
    left = max_samples
    while tokens < max_tokens and left > 0:
        partition = -1
        for p in range(len(head)):
            while current[p] >= 0 and stop[current[p] - base] <= merged_samples[p]:
                current[p] = after[current[p] - base]
            if current[p] < 0 or (partition >= 0 and current[p] > current[partition]):
                continue
            if head[p] == tail[p]:
                if ended[p]:
                    continue
            elif ring_length[p, head[p] % width] < 0:
                continue
            partition = p
        if partition < 0:
            return taken, -2
        if head[partition] == tail[partition]:
            return taken, partition
        count = min(stop[current[partition] - base] - merged_samples[partition], left)
        left -= count
        at = head[partition]
        while count > 0 and tokens < max_tokens and at < tail[partition] and ring_length[partition, at % width] >= 0:
            slot = at % width
            whole = False
            while not whole:
                length = ring_length[partition, slot]
                if length > 0:
                    out_handle[taken] = ring_handle[partition, slot]
                    out_length[taken] = length
                    taken += 1
                    tokens += length
                    merged_tokens[partition] += length
                at += 1
                slot = at % width
                whole = at == tail[partition] or ring_part[partition, slot] == 0
            merged_samples[partition] += 1
            count -= 1
        left += count
        head[partition] = at
    return taken, -1
