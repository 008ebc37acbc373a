"""Tar shards whose samples are .npy members and nothing else: many are read at once.

Theory of operation. The header that numpy writes before an array of one dimension has 128 bytes and says, beside the
dtype, but its length, which the size of the member says, too. So the headers of many members are made anew and
compared with what is there in one call, where to take one apart costs ten times what reading its array does. What
compares equal is read with them; any other member (of another dtype or writer, with two dimensions, damaged, missing)
ends the run before it and is read by itself, as members of all kinds are.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.sources.arrays import as_samples, fitting, one_sample
from streampack.sources.files import ShardFile
from streampack.sources.npy import parse_header
from streampack.sources.records import Sample, Samples

_HEADER = 128
_MAGIC = b"\x93NUMPY\1\0" + (_HEADER - 10).to_bytes(2, "little")
_SHAPE = b"'shape': ("


class NpyShard:
    """The samples of an indexed tar: ``sizes``, ``offsets`` int64 [n], a size below 0 where there is no member.

    ``load`` reads one by itself, or says why there is none.
    """

    blocks = ()

    def __init__(
        self, file: ShardFile, sizes: NDArray[np.int64], offsets: NDArray[np.int64],
        load: Callable[[int], Sample | str], where: Callable[[int], str],
    ) -> None:  # fmt: skip
        self._file, self._sizes, self._offsets, self._load, self.where = file, sizes, offsets, load, where

    def __len__(self) -> int:
        return len(self._sizes)

    def gather(self, samples: NDArray[np.int64], tokens: int) -> Samples:
        found = self._alike(self._sizes[samples], self._offsets[samples], tokens)
        return one_sample(self._load(int(samples[0])), ()) if found is None else found

    def _alike(self, sizes: NDArray[np.int64], offsets: NDArray[np.int64], tokens: int) -> Samples | None:
        """The first that are vectors of ids of one dtype; None where the very first is not."""
        if sizes[0] < _HEADER:
            return None
        first = self._file.pread(_HEADER, int(offsets[0]))
        dtype = _vector_of(first)
        if dtype is None or dtype.kind not in "iu":
            return None
        lengths = (sizes - _HEADER) // dtype.itemsize
        other = np.flatnonzero((sizes < _HEADER) | (lengths * dtype.itemsize != sizes - _HEADER))
        count = min(fitting(lengths, tokens), int(other[0]) if len(other) else len(lengths))
        found = self._file.gather(np.full(count, _HEADER), offsets[:count])
        expected = _headers(first, lengths[:count].tolist())
        if found != expected:
            rows = np.frombuffer(found, np.uint8) != np.frombuffer(expected, np.uint8)
            count = int(rows.reshape(-1, _HEADER).any(axis=1).argmax())
        if not count:
            return None
        data = self._file.gather(sizes[:count] - _HEADER, offsets[:count] + _HEADER)
        return as_samples(np.frombuffer(data, dtype), lengths[:count])


def _vector_of(header: bytes) -> np.dtype[Any] | None:
    """The dtype that 128 bytes say, if they are the header of a vector as numpy writes it."""
    found = parse_header(header) if header.startswith(_MAGIC) else "npy"
    if isinstance(found, str) or len(found[1]) != 1 or _headers(header, found[1]) != header:
        return None
    return found[0]


def _headers(like: bytes, lengths: Sequence[int]) -> bytes:
    """``like`` for vectors of these lengths, end to end."""
    form = like.partition(_SHAPE)[0].replace(b"%", b"%%") + _SHAPE + b"%d,), }"
    return b"".join([(form % length).ljust(_HEADER - 1) + b"\n" for length in lengths])
