"""Files at URLs, read through fsspec: ranged reads, a bounded cache of blocks, and retries.

Theory of operation. Reads come from blocks of 4 MiB; each open file caches the 64 blocks used last (256 MiB). A shard
up to that size crosses the network once, in whatever order its samples are read. A larger shuffled shard is fetched
again and again, so keep remote shards below 256 MiB. Neighboring missing blocks are one request. A request that fails,
or returns the wrong number of bytes, is retried up to four times within 4 s.

The store must report a file's size, which is compared when the file is opened. A replacement of the same size is not
noticed. Credentials and endpoints come from fsspec: its configuration file and environment.
"""

import importlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from streampack.errors import ConfigError, SourceError
from streampack.sources.files.byte_source import File, changed_size_error

_BLOCK_BYTES = 4 << 20
_BLOCKS = 64
_WAITS_S = (0.1, 0.4, 1.0, 2.5)
_LISTERS = 16

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


def without_query(url: str) -> str:
    """Return a URL for messages: without its query, which may hold a secret."""
    return url.partition("?")[0]


def list_urls(pattern: str) -> list[str]:
    """Return the URLs that match a glob, sorted. Raises SourceError if the store cannot list them."""
    fs, path = _filesystem(pattern)
    if "::" in pattern:
        raise ConfigError(
            f"shards: got the glob {pattern!r}, expected no glob in a URL with '::'. List the files one by one"
        )
    return sorted(fs.unstrip_protocol(found) for found in _retry(without_query(pattern), lambda: fs.glob(path)))


def size_urls(urls: Sequence[str]) -> dict[str, int]:
    """Return the size in bytes of the file at each URL. Raises SourceError if one is missing or has no known size."""
    for url in urls:
        _filesystem(url)  # a failing import or name raises here, not in a thread
    with ThreadPoolExecutor(min(_LISTERS, len(urls))) as pool:
        return dict(zip(urls, pool.map(_size, urls), strict=True))


def _size(url: str) -> int:
    """Return the size in bytes of the file at a URL. Raises SourceError."""
    fs, path = _filesystem(url)
    name = without_query(url)
    info = _retry(name, lambda: fs.info(path))
    if info.get("type") == "directory":
        raise SourceError(f"{name}: the path is not a file. To read the files of a folder, write {name}/*")
    size = info.get("size")
    if not isinstance(size, int):
        raise SourceError(
            f"{name}: the store does not report the file's size. Copy the file to a store that reports sizes"
        )
    return size


class RemoteFile:
    """An open file at a URL: a ShardFile with a cache of blocks. One thread at a time may read from it."""

    def __init__(self, file: File) -> None:
        self.path, self.name, self.size = without_query(file.path), file.name, file.size
        self.location = file.path
        self._fs, self._at = _filesystem(file.path)
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        size = _size(file.path)
        if size != file.size:
            raise changed_size_error(self.path, size, file.size)

    def close(self) -> None:
        self._blocks.clear()

    def pread(self, size: int, offset: int) -> bytes:
        """Return exactly ``size`` bytes from byte ``offset``, from cached blocks if possible. Raises SourceError."""
        if offset + size > self.size:
            raise SourceError(
                f"{self.path}: the file ends at byte {self.size}, expected at least {offset + size} bytes. Restore "
                "the file"
            )
        if size == 0:
            return b""
        first, last = offset // _BLOCK_BYTES, (offset + size - 1) // _BLOCK_BYTES
        if last - first >= _BLOCKS:
            return self._fetch(offset, offset + size)
        blocks = self._cached_blocks(first, last)
        begin = offset - first * _BLOCK_BYTES
        if first == last:
            return blocks[0][begin : begin + size]
        return b"".join(blocks)[begin : begin + size]

    def gather(self, sizes: NDArray[np.int64], offsets: NDArray[np.int64]) -> bytes:
        """Return the pieces at ``offsets`` of ``sizes`` bytes, joined. Raises SourceError."""
        return b"".join(map(self.pread, sizes.tolist(), offsets.tolist()))

    def _cached_blocks(self, first: int, last: int) -> list[bytes]:
        """Return the blocks number ``first`` to ``last``; fetch those that are not in the cache."""
        missing = [block for block in range(first, last + 1) if block not in self._blocks]
        if missing:
            begin, end = missing[0] * _BLOCK_BYTES, min(self.size, (missing[-1] + 1) * _BLOCK_BYTES)
            data = self._fetch(begin, end)
            for block in range(missing[0], missing[-1] + 1):
                at = block * _BLOCK_BYTES - begin
                self._blocks[block] = data[at : at + _BLOCK_BYTES]
        for block in range(first, last + 1):
            self._blocks.move_to_end(block)
        while len(self._blocks) > _BLOCKS:
            self._blocks.popitem(last=False)
        return [self._blocks[block] for block in range(first, last + 1)]

    def _fetch(self, begin: int, end: int) -> bytes:
        """Request bytes ``begin`` to ``end`` of the file, with retries."""

        def fetch() -> bytes:
            """Request the bytes once. Raises if the store returns another number of bytes."""
            data: bytes = self._fs.cat_file(self._at, start=begin, end=end)
            if len(data) != end - begin:
                raise EOFError(
                    f"got {len(data)} bytes, expected {end - begin}: the file was replaced, or the store does not "
                    "support range requests"
                )
            return data

        return _retry(f"{self.path}: at byte {begin}", fetch)


def _filesystem(url: str) -> tuple[Any, str]:
    """Return (fsspec file system for a URL, path in that file system). Raises ConfigError."""
    try:
        fsspec = importlib.import_module("fsspec.core")
    except ImportError as error:
        raise ConfigError(
            f"{without_query(url)}: got a URL, but the package that reads URLs is not installed. Run `pip install "
            "'streampack[remote]'`"
        ) from error
    try:
        fs, path = fsspec.url_to_fs(url)
    except ImportError as error:  # s3fs, gcsfs, ...: fsspec says which
        raise ConfigError(f"{without_query(url)}: {' '.join(str(error).split())}") from error
    except ValueError as error:
        text = " ".join(str(error).split())
        raise ConfigError(
            f"{without_query(url)}: got a URL that fsspec cannot open ({text}). Correct the URL"
        ) from error
    return fs, path


def _retry(what: str, call: Callable[[], _T]) -> _T:
    """Return ``call()``; repeat the call after an exception, five tries in all. ``what`` names the URL in errors.

    Raises SourceError after the last try, or at once if the file is missing or must not be read.
    """
    waits = list(_WAITS_S)
    while True:
        try:
            return call()
        except (FileNotFoundError, PermissionError, IsADirectoryError, NotImplementedError) as error:
            raise SourceError(
                f"{what}: the file cannot be read ({_error_text(error)}). Correct the path or its permissions"
            ) from error
        except Exception as error:
            if not waits:
                raise SourceError(
                    f"{what}: the file cannot be read in {len(_WAITS_S) + 1} tries ({_error_text(error)}). Check the "
                    "store"
                ) from error
            if len(waits) == len(_WAITS_S):
                _log.warning("a read failed: %s: %s; trying again", what, _error_text(error))
            time.sleep(waits.pop(0))


def _error_text(error: Exception) -> str:
    """Return the text of an exception in one line, at most 200 characters, without the queries of URLs."""
    text = " ".join(str(error).split()) or type(error).__name__
    return " ".join(without_query(word) if "://" in word else word for word in text.split(" "))[:200]
