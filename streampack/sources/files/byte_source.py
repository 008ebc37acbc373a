"""What a file of samples is: its name, its size, and exact reads at an offset.

A path is local, or a URL that fsspec opens. Both become a File, with the size that it must keep; a local one its time
of writing too, looked at when it is opened. A ShardFile is an open one: ``pread`` gives exactly the bytes asked for, or
raises SourceError; ``gather`` many pieces in one call.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from streampack.errors import SourceError


@dataclass(frozen=True, slots=True)
class File:
    """``path``: absolute, or a URL. ``name``: under the source's common folder, portable. ``size``: bytes.

    ``mtime_ns``: None for a URL.
    """

    path: str
    name: str
    size: int
    mtime_ns: int | None


class ShardFile(Protocol):
    """An open file that must not change. ``path`` and ``name`` are for people, ``size`` in bytes."""

    @property
    def path(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    def pread(self, size: int, offset: int) -> bytes:
        """Exactly ``size`` bytes from ``offset``. Raises SourceError when the file has changed or cannot be read."""

    def gather(self, sizes: NDArray[np.int64], offsets: NDArray[np.int64]) -> bytes:
        """Pieces that all lie within the file, end to end: one copy. Raises as ``pread`` does."""

    def close(self) -> None: ...


def is_url(path: str) -> bool:
    return "://" in path


def join_pieces(data: memoryview, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> bytes:
    """``data[begins[i]:ends[i]]`` of all i, end to end. What lies end to end in the data is copied as one.

    Joining views costs half of what numpy's concatenate of slices does, and a tenth of a take by index.

    >>> join_pieces(memoryview(b"abcdef"), np.array([4, 0, 1]), np.array([6, 1, 3]))
    b'efabc'
    """
    first = np.ones(len(begins), np.bool_)
    first[1:] = begins[1:] != ends[:-1]
    last = np.append(first[1:], True)[: len(first)]
    return b"".join([data[begin:end] for begin, end in zip(begins[first].tolist(), ends[last].tolist(), strict=True)])


class Head:
    """The first ``most`` bytes of an open file, as if they were all of it."""

    def __init__(self, file: ShardFile, most: int) -> None:
        self.path, self.name, self.size = file.path, file.name, min(file.size, most)
        self.pread, self.gather, self.close = file.pread, file.gather, file.close


def changed(path: str, size: int, expected: int) -> SourceError:
    return SourceError(
        f"{path}: got {size} bytes, expected the {expected} it had when opened; "
        "files must not change under a run: restore it, or start the stream's next revision"
    )


class PositionedFile(io.RawIOBase):
    """A ShardFile with a position, for libraries that want one; closing it leaves the file open."""

    def __init__(self, file: ShardFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._file.size - self._at)
        data = self._file.pread(left if size is None or size < 0 else min(size, left), self._at)
        self._at += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


_MAGIC = {b"\xfd7zXZ\x00": "xz", b"BZh": "bzip2"}


def refuse_compressed(file: ShardFile, first: bytes) -> None:
    """SourceError when a file's first bytes say that it is compressed in a way that ``compressed`` does not read."""
    for magic, kind in _MAGIC.items():
        if first.startswith(magic):
            raise SourceError(
                f"{file.path}: is {kind}-compressed, expected a plain, gzip or Zstandard file: decompress it first"
            )
