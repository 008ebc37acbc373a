"""Measure the merge with many streams and many partitions: CPU time a sample, and bytes a partition.

One ``Merge`` alone, filled and taken again and again, as the broker's thread does it. Memory is what numpy and Python
allocated for it (tracemalloc) once every partition has held ``WAITING`` samples; with ``--burst`` one of them has held
16,384, as many as one may.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.report import arguments, head, say
from streampack.core.intake.intake import MAX_UNMERGED
from streampack.core.merge.schedule import Merge

WAITING = 64
CASES = ((1, 1), (8, 1), (64, 1), (512, 1), (4096, 1), (1, 64), (1, 4096))
MEAN_TOKENS = 500


def main() -> None:
    parser = arguments(__doc__, "three rounds a case (else ten)")
    parser.add_argument("--burst", action="store_true", help="one partition has held as many samples as it may")
    args = parser.parse_args()
    report = head("merge", burst=args.burst)
    rows = []
    for streams, partitions in CASES:
        push_us, take_us = measure(streams, partitions, 3 if args.quick else 10)
        mib = memory_mib(streams, partitions, args.burst)
        rows.append({"streams": streams, "partitions": partitions, "push_us": push_us, "take_us": take_us, "mib": mib})
        print(
            f"{streams:>5} streams x {partitions:>5} partitions: take {take_us:.3f} us a sample, "
            f"push {push_us:.3f}, {mib:.1f} MiB",
            flush=True,
        )
    say(report | {"cases": rows}, args.json)


def measure(streams: int, partitions: int, rounds: int) -> tuple[float, float]:
    """Least CPU time of a round, in us a sample: pushing, in chunks of ``WAITING`` samples; taking."""
    merge, draw = _merge(streams, partitions), np.random.default_rng(0)
    push_s, take_s = [], []
    repeat = -(-4096 // (streams * partitions))
    for _ in range(rounds + 1):
        chunks = [draw.integers(1, 2 * MEAN_TOKENS, WAITING) for _ in range(streams * partitions)]
        push = take = 0.0
        pushed = taken = 0
        for _ in range(repeat):
            began = time.thread_time()
            pushed += _fill(merge, chunks)
            push += time.thread_time() - began
            began = time.thread_time()
            taken += len(merge.take(2**60).handles)
            take += time.thread_time() - began
        push_s.append(push / pushed)
        take_s.append(take / taken)
    return 1e6 * min(push_s[1:]), 1e6 * min(take_s[1:])


def memory_mib(streams: int, partitions: int, burst: bool) -> float:
    """Memory that a merge holds, in bytes."""
    tracemalloc.start()
    merge = _merge(streams, partitions)
    _fill(merge, [np.ones(WAITING, np.int64)] * (streams * partitions))
    if burst:
        _fill(merge, [np.ones(MAX_UNMERGED - WAITING, np.int64)])
    merge.take(2**60)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held / 2**20


def _merge(streams: int, partitions: int) -> Merge:
    return Merge([1.0 + number % 7 for number in range(streams)], [partitions] * streams, 0)


def _fill(merge: Merge, chunks: list[np.ndarray[tuple[int], np.dtype[np.int64]]]) -> int:
    """Push one chunk to each of the first partitions."""
    for partition, lengths in enumerate(chunks):
        merge.push(partition, np.arange(len(lengths)), lengths, np.zeros(len(lengths), np.int64))
    return sum(map(len, chunks))


if __name__ == "__main__":
    main()
