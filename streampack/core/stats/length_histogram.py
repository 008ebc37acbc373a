"""A histogram of samples' lengths in bounded memory: exact up to 64 tokens, and within 1/32 above.

Bucket edges are those of a histogram of high dynamic range: every power of two is cut into ``PER_OCTAVE`` equal
buckets. Each bucket counts both tokens and samples, so that its mean length is exact.
"""

from __future__ import annotations

import numpy as np

from streampack.core.model.samples import I64

PER_OCTAVE = 32
OCTAVES = 26
"""Powers of two from 64 tokens on; the last is longer than any message may be."""
BUCKETS = (2 + OCTAVES) * PER_OCTAVE


def bucket_of(lengths: I64) -> I64:
    """Return the bucket of each of ``lengths``, int64 [n]; lengths above the last bucket count in the last bucket.

    >>> bucket_of(np.array([1, 63, 64, 65, 66, 128])).tolist()
    [1, 63, 64, 64, 65, 96]
    """
    if len(lengths) and int(lengths.max()) < len(_TABLE):
        return np.take(_TABLE, lengths)
    return _computed(np.asarray(lengths, np.int64))


def _computed(lengths: I64) -> I64:
    """Compute the bucket of each length, without the table."""
    octave = np.maximum(np.frexp(lengths.astype(np.float64))[1] - 6, 0)  # halvings until it is below 64
    bucket: I64 = np.minimum(octave * PER_OCTAVE + (lengths >> octave), BUCKETS - 1)
    return bucket


_TABLE = _computed(np.arange(1 << 14))
"""Buckets of short lengths, looked up for speed: a broker counts each of its samples."""


def least_of(bucket: int) -> int:
    """Return the least length that is counted in ``bucket``.

    >>> [least_of(bucket) for bucket in (1, 63, 64, 65, 96)]
    [1, 63, 64, 66, 128]
    """
    octave = max(bucket // PER_OCTAVE - 1, 0)
    return (bucket - octave * PER_OCTAVE) << octave


class LengthCounts:
    """A histogram of lengths: ``samples`` and ``tokens`` int64 [BUCKETS] of each bucket."""

    def __init__(self) -> None:
        self.samples: I64 = np.zeros(BUCKETS, np.int64)
        self.tokens: I64 = np.zeros(BUCKETS, np.int64)

    def add(self, lengths: I64) -> None:
        """Count samples of ``lengths`` tokens, int64 [n]."""
        buckets = bucket_of(lengths)
        self.samples += np.bincount(buckets, minlength=BUCKETS)
        self.tokens += np.bincount(buckets, lengths, BUCKETS).astype(np.int64)

    def rows(self) -> list[tuple[int, int]]:
        """Return (samples, tokens) of each bucket that is not empty, shortest first."""
        filled = np.flatnonzero(self.samples)
        return list(zip(self.samples[filled].tolist(), self.tokens[filled].tolist(), strict=True))
