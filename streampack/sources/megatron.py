"""Megatron's indexed datasets: PREFIX.bin holds token ids end to end, PREFIX.idx says where each sequence lies.

Theory of operation. The index (megatron/core/datasets/indexed_dataset.py, version 1) is, little-endian:

    b"MMIDIDX\\0\\0", version u64 = 1, dtype code u8, number of sequences u64, number of document bounds u64,
    sizes int32 [sequences], pointers int64 [sequences] (bytes into .bin), document bounds int64, perhaps modes int8

A sequence is a sample. A shard is a run of sequences, 64 or so a pair of files, so that one pair serves many
partitions and no more than 65,536 entries are held; a shard's part of the index is read and checked when its turn
comes. Sequences must lie in the .bin in their order, apart from each other and within it. Fields there are none.
"""

import contextlib
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streampack.core.fields import Field
from streampack.errors import SourceError
from streampack.sources.arrays import as_samples, fitting
from streampack.sources.files import File, ShardFile, find, measure, open_file
from streampack.sources.records import AnyShard, Format, OpenShard, Samples
from streampack.sources.rows import FieldReader
from streampack.sources.settings import SourceSettings
from streampack.sources.sharded import pieces
from streampack.sources.tokenizers import Tokenizer

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


class Pair(NamedTuple):
    """PREFIX.bin and PREFIX.idx, the dtype of the ids and the number of sequences."""

    data: File
    idx: File
    dtype: np.dtype[np.int64]
    sequences: int


def open_format(settings: SourceSettings, tokenizer: Tokenizer) -> Format:
    """What open_source calls. Reads the head of each index."""
    prefixes = list(dict.fromkeys(_prefix(path) for path in find(settings.shards, settings.path)))
    files = measure([prefix + suffix for prefix in prefixes for suffix in (".bin", ".idx")])
    pairs = [_open_pair(data, index) for data, index in zip(files[::2], files[1::2], strict=True)]
    runs = [pieces(pair.sequences) for pair in pairs]
    ends = list(accumulate(map(len, runs)))

    def reader(fields: Sequence[Field]) -> OpenShard:
        FieldReader(settings, fields)  # refuses a field that the run does not declare

        @contextlib.contextmanager
        def open_shard(number: int) -> Iterator[AnyShard]:
            at = bisect_right(ends, number)
            pair, run = pairs[at], runs[at][number - ends[at]]
            with open_file(pair.idx, range(0)) as index:
                sizes, pointers = _read_index(index, pair, run)
            end = int(pointers[-1] + sizes[-1] * pair.dtype.itemsize)
            with open_file(pair.data, range(int(pointers[0]), end)) as data:
                yield SequenceShard(data, pair, run, sizes, pointers)

        return open_shard

    return Format(files, ends[-1], reader)


class SequenceShard:
    """A run of sequences; 16 bytes are held for each."""

    blocks = ()

    def __init__(
        self, file: ShardFile, pair: Pair, run: range, sizes: NDArray[np.int64], pointers: NDArray[np.int64]
    ) -> None:
        self._file, self._dtype, self._begin = file, pair.dtype, run.start
        self._sizes, self._pointers = sizes, pointers

    def __len__(self) -> int:
        return len(self._sizes)

    def gather(self, samples: NDArray[np.int64], tokens: int) -> Samples:
        lengths = self._sizes[samples]
        samples, lengths = samples[: (count := fitting(lengths, tokens))], lengths[:count]
        data = self._file.gather(lengths * self._dtype.itemsize, self._pointers[samples])
        return as_samples(np.frombuffer(data, self._dtype), lengths)

    def where(self, sample: int) -> str:
        return f"{self._file.name}:sequence {self._begin + sample}"


def _prefix(path: str) -> str:
    return path.removesuffix(".bin").removesuffix(".idx")


def _open_pair(data: File, index: File) -> Pair:
    """What the head of an index says. Raises SourceError where the file has not the size that follows from it."""
    with open_file(index, range(0)) as file:
        if index.size < _HEADER.size:
            raise _broken(index, f"got {index.size} bytes, expected {_HEADER.size} at least")
        magic, version, code, sequences, bounds = _HEADER.unpack(file.pread(_HEADER.size, 0))
        if magic != _MAGIC or version != 1:
            raise _broken(index, f"got the head {magic!r}, version {version}, expected {_MAGIC!r}, version 1")
        if code not in _DTYPES:
            raise _broken(index, f"got the dtype code {code}, expected 1..8")
        dtype = np.dtype(_DTYPES[code])
        if dtype.kind == "f":
            raise SourceError(f"{index.path}: got {dtype} data, expected token ids: integers")
        size = _HEADER.size + 12 * sequences + 8 * bounds
        if index.size not in (size, size + sequences):  # the modes, of multimodal data
            raise _broken(index, f"got {index.size} bytes, expected {size} for {sequences} sequences")
        if bounds:
            last = struct.unpack("<q", file.pread(8, size - 8))[0]
            if last != sequences:
                raise _broken(index, f"got documents up to sequence {last}, expected {sequences}")
    return Pair(data, index, dtype, sequences)


def _read_index(file: ShardFile, pair: Pair, run: range) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(sizes in ids, pointers in bytes) of a run of sequences, and of what comes after it checked too."""
    more = min(len(run) + 1, pair.sequences - run.start)  # the next run's first must not begin within our last
    sizes = np.frombuffer(file.pread(4 * more, _HEADER.size + 4 * run.start), "<i4")
    at = _HEADER.size + 4 * pair.sequences + 8 * run.start
    pointers = np.frombuffer(file.pread(8 * more, at), "<i8")
    ends = pointers + sizes.astype(np.int64) * pair.dtype.itemsize
    limits = np.append(pointers[1:], pair.data.size)
    bad = np.flatnonzero((sizes < 0) | (pointers < 0) | (ends > limits) | (ends > pair.data.size) | (ends < pointers))
    if len(bad):
        sample = int(bad[0])
        raise SourceError(
            f"{pair.data.path}: got {pair.data.size} bytes, but its .idx puts sequence {run.start + sample} of "
            f"{sizes[sample]} ids at byte {pointers[sample]}, before byte {limits[sample]}: "
            "one of the two is cut short, damaged or another's: copy or write both again"
        )
    return sizes[: len(run)].astype(np.int64), pointers[: len(run)].astype(np.int64, copy=False)


def _broken(index: File, got: str) -> SourceError:
    return SourceError(f"{index.path}: {got}; the file is cut short, damaged or no index: copy or write it again")
