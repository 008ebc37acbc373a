r"""Megatron's indexed datasets: PREFIX.bin holds token ids, PREFIX.idx says where each sequence lies.

Theory of operation. The index (megatron/core/datasets/indexed_dataset.py, version 1) is, little-endian::

    b"MMIDIDX\0\0", version u64 = 1, dtype code u8, number of sequences u64, number of document bounds u64,
    sizes int32 [sequences], pointers int64 [sequences] (bytes into .bin), document bounds int64 [bounds],
    and in multimodal data modes int8 [sequences]

A sequence is a sample. Each pair of files is divided into about 64 shards, runs of sequences. So several partitions
share one pair, and at most 65,536 index entries are in memory. A shard's part of the index is read and checked when
the shard is opened.

The sequences must cover the .bin exactly once, in any order. Each shard checks that its sequences lie end to end;
that is all that Megatron's own writer produces, and it costs no further reads. Where they do not, the whole index is
read once and checked. So a damaged size or pointer is found, and an index in another order is read.

Multimodal data holds ids of other kinds beside text, such as image patches, told apart by a mode per sequence. Such
an index needs the setting ``modes``; sequences of other modes are left out. There are no fields.
"""

import contextlib
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.fields import Field
from streampack.errors import ConfigError, SourceError
from streampack.sources.arrays import as_samples, fitting
from streampack.sources.files.byte_source import File, ShardFile
from streampack.sources.files.joined_file import JoinedFile
from streampack.sources.files.listing import find, measure, open_file
from streampack.sources.formats.rows import FieldReader
from streampack.sources.joining import Joined
from streampack.sources.records import AnyShard, Format, OpenShard, RawSamples
from streampack.sources.settings import SourceSettings
from streampack.sources.walk import pieces
from streampack.tokenizers.base import Tokenizer

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


_INDEX_BLOCK = 1 << 16
"""Entries of an index that are read at once."""


class Pair(NamedTuple):
    """The files PREFIX.bin and PREFIX.idx, with facts from the head of the index.

    - ``dtype``: dtype of the ids in the .bin.
    - ``sequences``: number of sequences.
    - ``modes_at``: byte offset of the modes in the .idx; 0 if it has none.
    """

    data: File
    idx: File
    dtype: np.dtype[np.int64]
    sequences: int
    modes_at: int


def open_format(settings: SourceSettings, tokenizer: Tokenizer) -> Format:
    """Open Megatron datasets: read the head of each index, and return the files with a reader for their shards."""
    prefixes = dict.fromkeys(_with_suffix(path, "") for path in find(settings.shards, settings.path))
    files = measure([_with_suffix(prefix, suffix) for prefix in prefixes for suffix in (".bin", ".idx")])
    pairs = [_open_pair(data, index) for data, index in zip(files[::2], files[1::2], strict=True)]
    for pair in pairs:
        if pair.modes_at and settings.modes is None:
            raise ConfigError(
                f"modes: got no modes for {pair.idx.path}, which is multimodal, so some of its sequences may not be "
                "text. Set the modes to read; for text, set `modes: [0]`"
            )
    runs = [pieces(pair.sequences) for pair in pairs]
    ends = list(accumulate(map(len, runs)))
    checked: set[int] = set()
    """Numbers of the pairs whose whole index was checked, because it lists sequences in another order than the data."""

    def reader(fields: Sequence[Field]) -> OpenShard:
        """Return a function that opens a shard by its number. Raises ConfigError for an undeclared field."""
        FieldReader(settings, fields)  # raises for a field that the run does not declare

        @contextlib.contextmanager
        def open_shard(number: int) -> Iterator[AnyShard]:
            """Open shard ``number``: read and check its part of the index, and open the .bin."""
            at = bisect_right(ends, number)
            pair, run = pairs[at], runs[at][number - ends[at]]
            with open_file(pair.idx, range(0)) as index:
                sizes, pointers, apart = _read_index(index, pair, run)
                if apart is not None and at not in checked:
                    if not _cover_once(index, pair):
                        raise apart
                    checked.add(at)
                numbers = _of_modes(index, pair, run, settings.modes)
            sizes, pointers = sizes[numbers], pointers[numbers]
            ends_at = pointers + sizes * pair.dtype.itemsize
            need = range(int(pointers.min(initial=pair.data.size)), int(ends_at.max(initial=0)))
            with open_file(pair.data, need) as data:
                yield SequenceShard(data, pair.dtype, numbers + run.start, sizes, pointers)

        return open_shard

    return Format(files, ends[-1], reader, pieces=tuple(map(len, runs)))


class SequenceShard:
    """A shard of consecutive sequences of one .bin file, with 24 bytes of index per sequence.

    ``numbers``: number of each sequence in the index. ``sizes``: ids of each. ``pointers``: byte offset of each.
    """

    blocks = ()

    def __init__(
        self, file: ShardFile, dtype: np.dtype[np.int64], numbers: NDArray[np.int64], sizes: NDArray[np.int64],
        pointers: NDArray[np.int64],
    ) -> None:  # fmt: skip
        self._file, self._dtype, self._numbers = file, dtype, numbers
        self._sizes, self._pointers = sizes, pointers

    @classmethod
    def join(cls, shards: Sequence["SequenceShard"]) -> "SequenceShard | None":
        """Return the sequences of several shards as one shard; None if their ids have several types."""
        if len({shard._dtype for shard in shards}) > 1:
            return None
        file = JoinedFile([shard._file for shard in shards])
        at = [shard._pointers + start for shard, start in zip(shards, file.starts, strict=True)]
        numbers = np.concatenate([shard._numbers for shard in shards])
        sizes = np.concatenate([shard._sizes for shard in shards])
        joined = cls(file, shards[0]._dtype, numbers, sizes, np.concatenate(at))
        joined.where = Joined(shards).where  # type: ignore[method-assign]
        return joined

    def __len__(self) -> int:
        return len(self._sizes)

    def gather(self, samples: NDArray[np.int64], tokens: int) -> RawSamples:
        """Read the leading sequences of ``samples`` that fit into ``tokens`` ids, at least one."""
        lengths = self._sizes[samples]
        samples, lengths = samples[: (count := fitting(lengths, tokens))], lengths[:count]
        data = self._file.gather(lengths * self._dtype.itemsize, self._pointers[samples])
        return as_samples(np.frombuffer(data, self._dtype), lengths)

    def where(self, sample: int) -> str:
        """Return the file and sequence number of a sample, for messages."""
        return f"{self._file.name}:sequence {self._numbers[sample]}"


def _with_suffix(path: str, suffix: str) -> str:
    """Return a path with another suffix in place of .bin or .idx, before the query of a URL."""
    has_query = path.startswith(("http://", "https://"))
    path, mark, query = path.partition("?") if has_query else (path, "", "")
    return path.removesuffix(".bin").removesuffix(".idx") + suffix + mark + query


def _open_pair(data: File, index: File) -> Pair:
    """Read the head of an index. Raises SourceError if the head or the file's size is wrong."""
    with open_file(index, range(0)) as file:
        if index.size < _HEADER.size:
            raise _broken(index, f"got {index.size} bytes, expected at least {_HEADER.size}")
        magic, version, code, sequences, bounds = _HEADER.unpack(file.pread(_HEADER.size, 0))
        if magic != _MAGIC or version != 1:
            raise _broken(
                index, f"got the file signature {magic!r} with version {version}, expected {_MAGIC!r} with version 1"
            )
        if code not in _DTYPES:
            raise _broken(index, f"got the dtype code {code}, expected a code from 1 to 8")
        dtype = np.dtype(_DTYPES[code])
        if dtype.kind == "f":
            raise SourceError(f"{index.path}: got {dtype} data, expected integer token ids")
        size = _HEADER.size + 12 * sequences + 8 * bounds
        if index.size not in (size, size + sequences):
            raise _broken(index, f"got {index.size} bytes, expected {size} for {sequences} sequences")
        if bounds:
            last = struct.unpack("<q", file.pread(8, size - 8))[0]
            if last != sequences:
                raise _broken(index, f"got documents that end at sequence {last}, expected sequence {sequences}")
    return Pair(data, index, dtype, sequences, size if index.size > size else 0)


def _entries(file: ShardFile, pair: Pair, begin: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (sizes in ids, pointers in bytes) of ``count`` sequences, the first being number ``begin``."""
    sizes = np.frombuffer(file.pread(4 * count, _HEADER.size + 4 * begin), "<i4").astype(np.int64)
    at = _HEADER.size + 4 * pair.sequences + 8 * begin
    return sizes, np.frombuffer(file.pread(8 * count, at), "<i8").astype(np.int64, copy=False)


def _read_index(
    file: ShardFile, pair: Pair, run: range
) -> tuple[NDArray[np.int64], NDArray[np.int64], SourceError | None]:
    """Return (sizes in ids, pointers in bytes, error) of the sequences of ``run``.

    The error is None if the sequences lie end to end. Otherwise, ignore the error if the whole index covers the .bin
    exactly once, in another order. Raises SourceError for a sequence outside the .bin.
    """
    more = min(len(run) + 1, pair.sequences - run.start)  # the last must end where the next run begins
    sizes, pointers = _entries(file, pair, run.start, more)
    item = pair.dtype.itemsize
    ends = pointers + sizes * item
    limits = np.append(pointers[1:], pair.data.size)
    bad = (sizes < 0) | (pointers < 0) | (ends > pair.data.size) | (ends < pointers) | (pointers % item != 0)
    apart = (ends != limits)[: len(run)]
    if run.start == 0:
        apart[0] |= pointers[0] != 0

    def error(sample: int) -> SourceError:
        """Return the error that names sequence ``sample`` of the run."""
        return SourceError(
            f"{pair.data.path}: got {pair.data.size} bytes, but the .idx file places sequence {run.start + sample} "
            f"({sizes[sample]} ids of {item} bytes) at byte {pointers[sample]} and the next at byte {limits[sample]}. "
            "Expected sequences that cover the file exactly once. One of the two files is cut short, damaged or "
            "belongs to another file. Copy or write both files again"
        )

    if bad.any():
        raise error(int(np.flatnonzero(bad)[0]))
    order_error = error(int(np.flatnonzero(apart)[0])) if apart.any() else None
    return sizes[: len(run)], pointers[: len(run)], order_error


def _cover_once(file: ShardFile, pair: Pair) -> bool:
    """Return whether the sequences, in any order, hold every byte of the .bin exactly once.

    Each sequence adds hash(end) - hash(begin) to a sum modulo 2**64. Where one ends and another begins, the terms
    cancel. If each byte is in one sequence, hash(size) - hash(0) remains; a wrong index gives that sum with a chance
    of 1 in 2**64. So the index is read block by block, and nothing is sorted.
    """
    total = _hash(np.array([0])) - _hash(np.array([pair.data.size]))
    for begin in range(0, pair.sequences, _INDEX_BLOCK):
        sizes, pointers = _entries(file, pair, begin, min(_INDEX_BLOCK, pair.sequences - begin))
        ends = pointers + sizes * pair.dtype.itemsize
        if ((ends < pointers) | (pointers < 0) | (ends > pair.data.size)).any():
            return False
        total += np.sum(_hash(ends) - _hash(pointers), dtype=np.uint64)
    return not total.any()


def _hash(places: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return 64-bit hashes of byte offsets: two rounds of multiply and shift."""
    hashes = (places.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    hashes = (hashes ^ hashes >> np.uint64(32)) * np.uint64(0xD6E8FEB86659FD93)
    return hashes ^ hashes >> np.uint64(32)


def _of_modes(file: ShardFile, pair: Pair, run: range, modes: Sequence[int] | None) -> NDArray[np.int64]:
    """Return the indices in ``run`` of the sequences with these modes. If the index has no modes, all have mode 0."""
    if modes is None:
        return np.arange(len(run))
    if not pair.modes_at:
        return np.arange(len(run) if 0 in modes else 0)
    modes_of_run = np.frombuffer(file.pread(len(run), pair.modes_at + run.start), np.int8)
    return np.flatnonzero(np.isin(modes_of_run, modes))


def _broken(index: File, got: str) -> SourceError:
    """Return the error for an .idx file that is not valid; ``got`` says what is wrong."""
    return SourceError(
        f"{index.path}: {got}. The file is cut short, damaged or not an index. Copy or write the file again"
    )
