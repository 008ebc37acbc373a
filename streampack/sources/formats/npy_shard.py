"""Tar shards whose samples and fields are .npy members: many samples are read at once.

Theory of operation. Numpy's header of a one-dimensional array has 128 bytes and holds the dtype and the length. The
length also follows from the member's size. So the expected headers of many members are generated, and compared with the
real ones in one call. Parsing one header takes ten times as long as reading its array. Members with the expected header
are read together. Any other member (another dtype or writer, two dimensions, damaged, missing) ends the run before it,
and its sample is read alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.fields import Field
from streampack.sources.arrays import as_samples, fitting, one_sample
from streampack.sources.files.byte_source import ShardFile
from streampack.sources.files.joined_file import JoinedFile
from streampack.sources.formats.npy import parse_header
from streampack.sources.joining import Joined
from streampack.sources.records import RawSamples, Sample

_HEADER = 128
_MAGIC = b"\x93NUMPY\1\0" + (_HEADER - 10).to_bytes(2, "little")
_SHAPE = b"'shape': ("


class Members(NamedTuple):
    """One tar member of each of n samples: its size and offset in bytes, int64 [n]; size -1 if a sample has none."""

    file: ShardFile
    sizes: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def dtype(self, sample: int) -> np.dtype[Any] | None:
        """Return the dtype of a sample's member; None unless it is a one-dimensional .npy array as numpy writes it."""
        if self.sizes[sample] < _HEADER:
            return None
        return _array_dtype(self.file.pread(_HEADER, int(self.offsets[sample])))

    def lengths(self, samples: NDArray[np.int64], dtype: np.dtype[Any]) -> NDArray[np.int64]:
        """Return the array lengths that the members' sizes imply for this dtype; -1 where a size does not fit."""
        sizes = self.sizes[samples] - _HEADER
        return np.where((sizes < 0) | (sizes % dtype.itemsize != 0), -1, sizes // dtype.itemsize)

    def count_alike(self, samples: NDArray[np.int64], lengths: NDArray[np.int64]) -> int:
        """Return how many leading members of ``samples`` are arrays of the first one's dtype and of these lengths."""
        offsets = self.offsets[samples]
        headers = self.file.gather(np.full(len(samples), _HEADER), offsets)
        expected = _headers(headers[:_HEADER], lengths.tolist())
        if headers == expected:
            return len(samples)
        differ = np.frombuffer(headers, np.uint8) != np.frombuffer(expected, np.uint8)
        return int(differ.reshape(-1, _HEADER).any(axis=1).argmax())

    def values(self, samples: NDArray[np.int64], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return the values of these samples' arrays, joined."""
        sizes, offsets = self.sizes[samples] - _HEADER, self.offsets[samples] + _HEADER
        return np.frombuffer(self.file.gather(sizes, offsets), dtype)


class NpyShard:
    """An ArrayShard of .npy members: reads the ids and fields of many samples at once.

    - ``ids``: members that hold the ids.
    - ``fields``: declared fields with one value per token, and their members.
    - ``load``: reads one sample alone, or returns the reason why it is rejected.
    - ``where``: returns file and key of a sample, for messages.
    """

    blocks = ()

    def __init__(
        self, ids: Members, fields: dict[Field, Members], load: Callable[[int], Sample | str],
        where: Callable[[int], str],
    ) -> None:  # fmt: skip
        self._ids, self._load, self.where = ids, load, where
        self._fields = list(fields.items())

    @classmethod
    def join(cls, shards: Sequence["NpyShard"]) -> "NpyShard | None":
        """Return the samples of several shards as one shard; None if they have other fields."""
        names = [[field for field, _ in shard._fields] for shard in shards]
        if any(other != names[0] for other in names):
            return None
        file = JoinedFile([shard._ids.file for shard in shards])

        def joined(members: Sequence[Members]) -> Members:
            """Return the members of the shards, in the joined file."""
            offsets = [member.offsets + start for member, start in zip(members, file.starts, strict=True)]
            return Members(file, np.concatenate([member.sizes for member in members]), np.concatenate(offsets))

        fields = {field: joined([shard._fields[at][1] for shard in shards]) for at, field in enumerate(names[0])}
        whole = Joined(shards)
        return cls(joined([shard._ids for shard in shards]), fields, whole.load, whole.where)

    def load(self, sample: int) -> Sample | str:
        """Read one sample alone, or return the reason why it is rejected."""
        return self._load(sample)

    def __len__(self) -> int:
        return len(self._ids.sizes)

    def gather(self, samples: NDArray[np.int64], tokens: int) -> RawSamples:
        """Read the leading samples that are alike and fit into ``tokens`` ids, at least one."""
        alike = self._read_alike(samples, tokens)
        return one_sample(self._load(int(samples[0])), ()) if alike is None else alike

    def _read_alike(self, samples: NDArray[np.int64], tokens: int) -> RawSamples | None:
        """Read the leading samples whose members have the expected headers; None if the first has other members."""
        dtype = self._ids.dtype(int(samples[0]))
        if dtype is None or dtype.kind not in "iu":
            return None
        lengths = self._ids.lengths(samples, dtype)
        count = min(fitting(np.maximum(lengths, 0), tokens), _count_before(lengths < 0))
        for field, members in self._fields:
            wanted = given_dtype(field)
            if members.dtype(int(samples[0])) != wanted:
                return None
            count = min(count, _count_before(members.lengths(samples[:count], wanted) != lengths[:count]))
        for members in (self._ids, *(members for _, members in self._fields)):
            count = count and members.count_alike(samples[:count], lengths[:count])
        if not count:
            return None
        samples, lengths = samples[:count], lengths[:count]
        fields = {field.name: members.values(samples, given_dtype(field)) for field, members in self._fields}
        return as_samples(self._ids.values(samples, dtype), lengths, fields=fields)


def _count_before(odd: NDArray[np.bool_]) -> int:
    """Return how many entries come before the first True; all if there is none."""
    return int(np.append(odd, True).argmax())


def _array_dtype(header: bytes) -> np.dtype[Any] | None:
    """Return the dtype of a 128-byte .npy header; None unless numpy would write it so for a one-dimensional array."""
    parsed = parse_header(header) if header.startswith(_MAGIC) else "npy"
    if isinstance(parsed, str) or len(parsed[1]) != 1 or _headers(header, parsed[1]) != header:
        return None
    return parsed[0]


def _headers(like: bytes, lengths: Sequence[int]) -> bytes:
    """Return .npy headers of one-dimensional arrays of these lengths, joined; the dtype is that of header ``like``."""
    form = like.partition(_SHAPE)[0].replace(b"%", b"%%") + _SHAPE + b"%d,), }"
    return b"".join([(form % length).ljust(_HEADER - 1) + b"\n" for length in lengths])


def given_dtype(field: Field) -> np.dtype[Any]:
    """Return the dtype in which a field's values are read without conversion."""
    return np.dtype(np.float32) if field.dtype == "bfloat16" else field.storage
