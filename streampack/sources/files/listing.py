"""Files, here or anywhere: their names and sizes, and exact reads at an offset.

Theory of operation. A path is local, or a URL that fsspec opens (``remote``, an extra). Both become a File, with
the size that it must keep; a local one its time of writing too, looked at when it is opened. A ShardFile is an
open one: ``pread`` gives exactly the bytes asked for, or raises SourceError; ``gather`` many pieces in one call.

Local files are read, not mapped, where one piece is asked for: a mapped file that is cut kills the process that reads
it, and the page cache serves either. Many small pieces are copied out of a mapping, at a fifth of what a system call
for each costs. The size is looked at before and after, so nearly always an error says that a file was cut; if it is
cut in that very millisecond the process ends, and its leases go to another, which says so.
"""

import contextlib
import glob
import io
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from streampack.errors import ConfigError, SourceError
from streampack.sources.files.braces import expand_braces


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


@contextlib.contextmanager
def open_file(file: File, need: range | None = None) -> Iterator[ShardFile]:
    """``need``: the bytes that will be read, None for all.

    Raises SourceError when it is gone or is not what it was when the source was opened.
    """
    if is_url(file.path):
        from streampack.sources.files.remote import RemoteFile

        found: ShardFile = RemoteFile(file)
    else:
        found = LocalFile(file, range(file.size) if need is None else need)
    try:
        yield found
    finally:
        found.close()


def read_file(file: File) -> bytes:
    """All of a small one."""
    with open_file(file) as opened:
        return opened.pread(file.size, 0)


class LocalFile:
    """See ShardFile; one descriptor."""

    def __init__(self, file: File, need: range) -> None:
        self.path, self.name, self.size = file.path, file.name, file.size
        self._mapped = memoryview(b"")
        try:
            self._fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(
                f"{file.path}: cannot be opened ({error.strerror}); was there when the run began"
            ) from error
        try:
            self._check_size()
            if os.fstat(self._fd).st_mtime_ns != file.mtime_ns:
                raise SourceError(
                    f"{file.path}: got a file written since it was opened, expected the same one; "
                    "files must not change under a run: restore it, or start the producers again if it is equal"
                )
        except BaseException:
            self.close()
            raise
        if need and hasattr(os, "posix_fadvise"):  # samples come in any order: have the kernel fetch them as a whole
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, need.start, len(need), os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        self._mapped.release()
        os.close(self._fd)

    def _check_size(self) -> None:
        size = os.lseek(self._fd, 0, os.SEEK_END)  # a third of fstat's cost; pread does not use the position
        if size != self.size:
            raise changed(self.path, size, self.size)

    def pread(self, size: int, offset: int) -> bytes:
        try:
            data = os.pread(self._fd, size, offset)
            self._check_size()
            while len(data) < size:  # one call reads 2 GiB at most, some network file systems less
                more = os.pread(self._fd, size - len(data), offset + len(data))
                if not more:
                    raise SourceError(f"{self.path}: ends at byte {offset + len(data)}, expected {offset + size}")
                data += more
        except OSError as error:
            raise SourceError(f"{self.path}: cannot be read at byte {offset} ({error.strerror})") from error
        return data

    def gather(self, sizes: NDArray[np.int64], offsets: NDArray[np.int64]) -> bytes:
        if not self.size:
            return b""
        self._check_size()
        if not self._mapped:
            try:
                self._mapped = memoryview(mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ))
            except OSError:  # some file systems map nothing, and a process may be held to too little address space
                return b"".join(map(self.pread, sizes.tolist(), offsets.tolist()))
        data = join_pieces(self._mapped, offsets, offsets + sizes)
        self._check_size()
        return data


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


class Stream(io.RawIOBase):
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


# Names


def find(shards: str | Sequence[str] | None, path: str | None) -> list[str]:
    """The paths and URLs that ``shards`` (patterns) or ``path`` (one, as it is) name."""
    return [path] if path is not None else expand(shards or ())


def expand(shards: str | Sequence[str]) -> list[str]:
    """Paths, brace patterns and globs as paths, in the order given, each glob's matches sorted by code point.

    Raises SourceError for a glob that matches nothing or a path that comes twice, ConfigError for a pattern that
    is none.

    >>> expand("web-{00..02}.tar")
    ['web-00.tar', 'web-01.tar', 'web-02.tar']
    """
    patterns = [shards] if isinstance(shards, str) else list(shards)
    if not patterns:
        raise ConfigError("shards: got an empty list, expected at least one path or pattern")
    paths: list[str] = []
    for pattern in patterns:
        for path in _expand_braces(pattern):
            paths.extend(_expand_glob(path))
    seen: set[str] = set()
    for path in (path if is_url(path) else os.path.abspath(path) for path in paths):
        if path in seen:
            raise SourceError(f"shards: {path} comes more than once: make the patterns disjoint")
        seen.add(path)
    return paths


def _expand_braces(pattern: str) -> list[str]:
    if pattern.startswith("pipe:"):
        raise ConfigError(f"shards: got {pattern!r}, expected files: a pipe has no offsets to seek to; give its URL")
    if "{" not in pattern or (not is_url(pattern) and os.path.exists(pattern)):
        return [pattern]
    try:
        return expand_braces(pattern)
    except ValueError as error:
        raise ConfigError(
            f"shards: the braces of {pattern!r} do not match; expected e.g. web-{{000..511}}.tar"
        ) from error


def _expand_glob(path: str) -> list[str]:
    if is_url(path):
        if "*" not in path and "[" not in path:  # "?" begins the query of a URL
            return [path]
        from streampack.sources.files.remote import list_urls

        found = list_urls(path)
    elif not glob.has_magic(path) or os.path.exists(path):
        return [path]
    else:
        found = sorted(glob.glob(path, recursive=True))
        path = os.path.abspath(path)
    if not found:
        raise SourceError(f"{path}: got no file, expected at least one to match: mend the pattern")
    return found


def measure(paths: Sequence[str]) -> list[File]:
    """Each path or URL with its size in bytes, and its name under the folder common to all; paths made absolute.

    Raises SourceError for what is not there or is no file.
    """
    urls = [path for path in paths if is_url(path)]
    sizes: dict[str, int] = {}
    if urls:
        from streampack.sources.files.remote import size_urls

        sizes = size_urls(urls)
    places = [_place(path) for path in paths]
    folder = os.path.commonpath([os.path.dirname(place) for place in places])
    files = []
    for path, place in zip(paths, places, strict=True):
        name = os.fsencode(os.path.relpath(place, folder)).decode("utf-8", "backslashreplace")
        if is_url(path):
            files.append(File(path, name, sizes[path], None))
        else:
            status = _stat(path)
            files.append(File(place, name, status.st_size, status.st_mtime_ns))
    return files


def _place(path: str) -> str:
    """A path as if all were in one tree; without a URL's query, which may hold a secret that changes."""
    scheme, url, rest = path.partition("://")
    return os.path.normpath(f"/{scheme}/{rest.partition('?')[0]}") if url else os.path.abspath(path)


def _stat(path: str) -> os.stat_result:
    try:
        status = os.stat(path)
    except OSError as error:
        raise SourceError(
            f"{path}: cannot be read ({error.strerror}); expected a file: make it, or mend the path"
        ) from error
    if not os.path.isfile(path):
        raise SourceError(f"{path}: is no regular file; expected one: a folder is written as {path}/*")
    return status
