"""The hot loops of merging, compiled by numba where it is installed.

Each loop is plain Python over numpy arrays. Tests compare a kernel with its ``kernel.py_func``, or use the function
itself where numba is missing. The kernels do not hold the GIL and allocate nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.jit import kernel
from streampack.core.merge.entries import HANDLE, LENGTH, NO_BLOCK, PART, Entries
from streampack.core.model.samples import I64


@kernel
def push_entries(queues: Entries, partition: int, handles: I64, lengths: I64, parts: I64) -> None:
    """Append entries (all arrays int64 [n]) to a partition's queue, which must have room for the entries."""
    size = queues.entry.shape[1]
    tail = queues.tail[partition]
    block = queues.last[partition]
    for i in range(len(handles)):
        row = (tail + i) & (size - 1)
        if row == 0:
            before, block = block, queues.free[0]
            queues.free[0] = queues.after[block]
            queues.free[1] -= 1
            queues.after[block] = NO_BLOCK
            if queues.first[partition] == NO_BLOCK:
                queues.first[partition] = block
            else:
                queues.after[before] = block
            queues.last[partition] = block
        queues.entry[block, row, HANDLE] = handles[i]
        queues.entry[block, row, LENGTH] = lengths[i]
        queues.entry[block, row, PART] = parts[i]
    queues.tail[partition] = tail + len(handles)


@kernel
def of_first(queues: Entries, partition: int, column: int) -> Any:
    """Return a ``column`` (HANDLE, LENGTH or PART) of the first entry in a partition's non-empty queue."""
    row = queues.head[partition] & (queues.entry.shape[1] - 1)
    return np.int64(queues.entry[queues.first[partition], row, column])


@kernel
def drop_first(queues: Entries, partition: int) -> None:
    """Remove the first entry from the queue of a partition; the queue must not be empty."""
    queues.head[partition] += 1
    if queues.head[partition] & (queues.entry.shape[1] - 1) == 0:
        block = queues.first[partition]
        queues.first[partition] = queues.after[block]
        queues.after[block] = queues.free[0]
        queues.free[0] = block
        queues.free[1] += 1


@kernel
def drop_all(queues: Entries, partition: int, out: I64) -> tuple[int, int]:
    """Remove all entries of a partition, and write the handles of those with a length above 0 to ``out``.

    Returns the number of handles, and the number of entries with a length below 0 (barriers).
    """
    count = negative = 0
    while queues.head[partition] < queues.tail[partition]:
        length = of_first(queues, partition, LENGTH)
        if length > 0:
            out[count] = of_first(queues, partition, HANDLE)
            count += 1
        negative += length < 0
        drop_first(queues, partition)
    return count, negative


@kernel
def sift_down(order: I64, size: int, clock: I64) -> None:
    """Restore the heap ``order[:size]`` after its root's clock advanced or its root was replaced.

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


@kernel
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
    queues: Entries,
    ended: NDArray[np.bool_],
    merged_samples: I64,
    merged_tokens: I64,
    by_sample: bool,
    max_tokens: int,
    max_samples: int,
    max_entries: int,
    out_handle: I64,
    out_length: I64,
) -> tuple[int, int]:
    """Take samples in merge order until one is missing, or one of the limits is reached.

    The streams that are live and not paused are the heap ``order[: num_ordered[0]]``, by (clock, number), so a sample
    takes time O(log streams). Stream ``s`` owns partitions ``first[s]:first[s + 1]``, whose entries wait in ``queues``.
    ``out_handle`` and ``out_length`` have room for all entries. The kernel updates ``order``, ``clock``, ``turn``,
    ``live``, ``paused``, ``queues`` and the counts by partition in place.

    An entry of length 0 is a tombstone: it takes its turn and gives nothing. An entry of length -1 is a barrier: it
    stays in its queue, and a stream whose open partitions are all at barriers is paused. Clocks advance by tokens, or
    with ``by_sample`` by samples. ``now`` int64 [1] is the clock that the stream of the last taken sample had before
    that sample.

    Returns (entries taken, partition whose sample is missing, or -1, or -2 if a stream of ``stops`` has ended).
    """
    taken = 0
    tokens = 0
    samples = 0
    while tokens < max_tokens and samples < max_samples and taken < max_entries:
        if num_ordered[0] == 0:
            return taken, -1
        stream = order[0]
        count = first[stream + 1] - first[stream]
        partition = -1
        for step in range(count):
            p = first[stream] + (turn[stream] + step) % count
            waits = queues.head[p] < queues.tail[p]
            if waits and of_first(queues, p, LENGTH) < 0:
                paused[stream] = True
            elif waits or not ended[p]:
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
        if queues.head[partition] == queues.tail[partition]:
            return taken, partition
        now[0] = clock[stream]
        before = taken
        whole = False
        while not whole:
            length = of_first(queues, partition, LENGTH)
            if length > 0:
                out_handle[taken] = of_first(queues, partition, HANDLE)
                out_length[taken] = length
                taken += 1
                tokens += length
                merged_tokens[partition] += length
                if not by_sample:
                    clock[stream] += stride[stream] * length
            drop_first(queues, partition)
            whole = queues.head[partition] == queues.tail[partition] or of_first(queues, partition, PART) == 0
        if by_sample and taken > before:
            clock[stream] += stride[stream]
        merged_samples[partition] += 1
        samples += 1
        turn[stream] = (partition - first[stream] + 1) % count
        sift_down(order, num_ordered[0], clock)
    return taken, -1


@kernel
def arrival_take(
    base: int,
    stop: I64,
    after: I64,
    current: I64,
    queues: Entries,
    ended: NDArray[np.bool_],
    merged_samples: I64,
    merged_tokens: I64,
    max_tokens: int,
    max_samples: int,
    max_entries: int,
    out_handle: I64,
    out_length: I64,
) -> tuple[int, int]:
    """Take samples in the order of a script until one is missing, or one of the limits is reached.

    ``base``, ``stop``, ``after`` and ``current`` are those of ``arrival.Script``; queues, counts and ``out`` are as in
    ``merge_take``. The kernel updates ``current``, ``queues`` and the counts in place. It skips partitions that are at
    a barrier, or have ended and are empty.

    Returns (entries taken, the partition whose sample is missing, or -1, or -2 at the script's end).
    """
    taken = 0
    tokens = 0
    left = max_samples
    while tokens < max_tokens and left > 0 and taken < max_entries:
        partition = -1
        for p in range(len(queues.head)):
            while current[p] >= 0 and stop[current[p] - base] <= merged_samples[p]:
                current[p] = after[current[p] - base]
            if current[p] < 0 or (partition >= 0 and current[p] > current[partition]):
                continue
            if queues.head[p] == queues.tail[p]:
                if ended[p]:
                    continue
            elif of_first(queues, p, LENGTH) < 0:
                continue
            partition = p
        if partition < 0:
            return taken, -2
        if queues.head[partition] == queues.tail[partition]:
            return taken, partition
        count = min(stop[current[partition] - base] - merged_samples[partition], left)
        left -= count
        waits = True
        while (
            count > 0
            and tokens < max_tokens
            and taken < max_entries
            and waits
            and of_first(queues, partition, LENGTH) >= 0
        ):
            whole = False
            while not whole:
                length = of_first(queues, partition, LENGTH)
                if length > 0:
                    out_handle[taken] = of_first(queues, partition, HANDLE)
                    out_length[taken] = length
                    taken += 1
                    tokens += length
                    merged_tokens[partition] += length
                drop_first(queues, partition)
                waits = queues.head[partition] < queues.tail[partition]
                whole = not waits or of_first(queues, partition, PART) == 0
            merged_samples[partition] += 1
            count -= 1
        left += count
    return taken, -1
