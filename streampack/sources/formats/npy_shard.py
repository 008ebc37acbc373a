"""Tar shards whose samples are .npy members, with fields beside them as such: many are read at once.

Theory of operation. The header that numpy writes before an array of one dimension has 128 bytes and says, beside the
dtype, but its length, which the size of the member says, too. So the headers of many members are made anew and
compared with what is there in one call, where to take one apart costs ten times what reading its array does. What
compares equal is read with them; any other member (of another dtype or writer, with two dimensions, damaged, missing)
ends the run before it, and its sample is read by itself, as those of all kinds are.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.fields import Field
from streampack.sources.arrays import as_samples, fitting, one_sample
from streampack.sources.files.byte_source import ShardFile
from streampack.sources.formats.npy import parse_header
from streampack.sources.records import RawSamples, Sample

_HEADER = 128
_MAGIC = b"\x93NUMPY\1\0" + (_HEADER - 10).to_bytes(2, "little")
_SHAPE = b"'shape': ("


class Members(NamedTuple):
    """One member of each sample: bytes and offsets in the tar, int64 [n]; a size below 0 where there is none."""

    file: ShardFile
    sizes: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def dtype(self, sample: int) -> np.dtype[Any] | None:
        """Of the vector that a sample's member is; None where it is anything else."""
        if self.sizes[sample] < _HEADER:
            return None
        return _vector_of(self.file.pread(_HEADER, int(self.offsets[sample])))

    def lengths(self, samples: NDArray[np.int64], dtype: np.dtype[Any]) -> NDArray[np.int64]:
        """What the sizes say, if they are vectors of this dtype; -1 where they cannot be."""
        sizes = self.sizes[samples] - _HEADER
        return np.where((sizes < 0) | (sizes % dtype.itemsize != 0), -1, sizes // dtype.itemsize)

    def alike(self, samples: NDArray[np.int64], lengths: NDArray[np.int64]) -> int:
        """How many of the first are vectors of the very first one's dtype, and of these lengths."""
        offsets = self.offsets[samples]
        found = self.file.gather(np.full(len(samples), _HEADER), offsets)
        expected = _headers(found[:_HEADER], lengths.tolist())
        if found == expected:
            return len(samples)
        differ = np.frombuffer(found, np.uint8) != np.frombuffer(expected, np.uint8)
        return int(differ.reshape(-1, _HEADER).any(axis=1).argmax())

    def values(self, samples: NDArray[np.int64], dtype: np.dtype[Any]) -> NDArray[Any]:
        """The vectors, end to end."""
        sizes, offsets = self.sizes[samples] - _HEADER, self.offsets[samples] + _HEADER
        return np.frombuffer(self.file.gather(sizes, offsets), dtype)


class NpyShard:
    """See ArrayShard. ``fields``: members of declared fields of one value a token, by field.

    ``load`` reads one sample by itself, or says why there is none.
    """

    blocks = ()

    def __init__(
        self, ids: Members, fields: dict[Field, Members], load: Callable[[int], Sample | str],
        where: Callable[[int], str],
    ) -> None:  # fmt: skip
        self._ids, self._load, self.where = ids, load, where
        self._fields = list(fields.items())

    def __len__(self) -> int:
        return len(self._ids.sizes)

    def gather(self, samples: NDArray[np.int64], tokens: int) -> RawSamples:
        found = self._alike(samples, tokens)
        return one_sample(self._load(int(samples[0])), ()) if found is None else found

    def _alike(self, samples: NDArray[np.int64], tokens: int) -> RawSamples | None:
        """The first that are alike in all their members; None where the very first is not as fields are declared."""
        dtype = self._ids.dtype(int(samples[0]))
        if dtype is None or dtype.kind not in "iu":
            return None
        lengths = self._ids.lengths(samples, dtype)
        count = min(fitting(np.maximum(lengths, 0), tokens), _before(lengths < 0))
        for field, members in self._fields:
            wanted = given_dtype(field)
            if members.dtype(int(samples[0])) != wanted:
                return None
            count = min(count, _before(members.lengths(samples[:count], wanted) != lengths[:count]))
        for members in (self._ids, *(members for _, members in self._fields)):
            count = count and members.alike(samples[:count], lengths[:count])
        if not count:
            return None
        samples, lengths = samples[:count], lengths[:count]
        fields = {field.name: members.values(samples, given_dtype(field)) for field, members in self._fields}
        return as_samples(self._ids.values(samples, dtype), lengths, fields=fields)


def _before(odd: NDArray[np.bool_]) -> int:
    """How many there are before the first that is odd."""
    return int(np.append(odd, True).argmax())


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


def given_dtype(field: Field) -> np.dtype[Any]:
    """The dtype that a field's values come in; others are converted one by one, or refused."""
    return np.dtype(np.float32) if field.dtype == "bfloat16" else field.storage
