"""Files at URLs, through fsspec: ranged reads, a bounded cache of blocks, and a few tries for each.

Theory of operation. A read is served from blocks of 4 MiB, of which each open file keeps the 64 last used (256
MiB): a shard up to that size crosses the network once, however its samples are shuffled; a larger one that is
shuffled is fetched again and again, so keep remote shards below it. Blocks that are missing side by side are one
request. A request that fails, or gives another number of bytes, is tried again up to four times within 4 s.

A file's size must be known, and is compared when it is opened; an object that is replaced by one of the same size
goes unnoticed. Credentials and endpoints are fsspec's own business: its configuration file and environment.
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
from streampack.sources.files.byte_source import File, changed

_BLOCK_BYTES = 4 << 20
_BLOCKS = 64
_WAITS_S = (0.1, 0.4, 1.0, 2.5)
_LISTERS = 16

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


def shown(url: str) -> str:
    """A URL for messages: without its query, which may hold a secret."""
    return url.partition("?")[0]


def list_urls(pattern: str) -> list[str]:
    """The URLs that match a glob, sorted. Raises SourceError when it cannot be listed."""
    fs, path = _filesystem(pattern)
    if "::" in pattern:
        raise ConfigError(f"shards: got {pattern!r}, expected no glob in a chain of file systems: list the files")
    return sorted(fs.unstrip_protocol(found) for found in _try(shown(pattern), lambda: fs.glob(path)))


def size_urls(urls: Sequence[str]) -> dict[str, int]:
    """The size in bytes of each. Raises SourceError for one that is not there, or does not say."""
    for url in urls:
        _filesystem(url)  # an import or a name that fails does so here, not in a thread
    with ThreadPoolExecutor(min(_LISTERS, len(urls))) as pool:
        return dict(zip(urls, pool.map(_size, urls), strict=True))


def _size(url: str) -> int:
    fs, path = _filesystem(url)
    info = _try(shown(url), lambda: fs.info(path))
    if info.get("type") == "directory":
        raise SourceError(f"{shown(url)}: is no file; expected one: a folder is written as {shown(url)}/*")
    size = info.get("size")
    if not isinstance(size, int):
        raise SourceError(f"{shown(url)}: does not say its size, expected it to: copy it to a store that does")
    return size


class RemoteFile:
    """See files.ShardFile. Reads from one thread at a time."""

    def __init__(self, file: File) -> None:
        self.path, self.name, self.size = shown(file.path), file.name, file.size
        self._fs, self._at = _filesystem(file.path)
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        size = _size(file.path)
        if size != file.size:
            raise changed(self.path, size, file.size)

    def close(self) -> None:
        self._blocks.clear()

    def pread(self, size: int, offset: int) -> bytes:
        if offset + size > self.size:
            raise SourceError(f"{self.path}: ends at byte {self.size}, expected {offset + size}")
        if size == 0:
            return b""
        first, last = offset // _BLOCK_BYTES, (offset + size - 1) // _BLOCK_BYTES
        if last - first >= _BLOCKS:
            return self._fetch(offset, offset + size)
        blocks = self._held(first, last)
        begin = offset - first * _BLOCK_BYTES
        if first == last:
            return blocks[0][begin : begin + size]
        return b"".join(blocks)[begin : begin + size]

    def gather(self, sizes: NDArray[np.int64], offsets: NDArray[np.int64]) -> bytes:
        return b"".join(map(self.pread, sizes.tolist(), offsets.tolist()))

    def _held(self, first: int, last: int) -> list[bytes]:
        """The blocks first..last, fetched where they are not held."""
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
        def fetch() -> bytes:
            data: bytes = self._fs.cat_file(self._at, start=begin, end=end)
            if len(data) != end - begin:
                raise EOFError(f"got {len(data)} bytes of {end - begin}: was it replaced, or answers it no ranges")
            return data

        return _try(f"{self.path}: at byte {begin}", fetch)


def _filesystem(url: str) -> tuple[Any, str]:
    """Fsspec's file system for a URL, and the path in it."""
    try:
        fsspec = importlib.import_module("fsspec.core")
    except ImportError as error:
        raise ConfigError(f"{shown(url)}: URLs need `pip install 'streampack[remote]'`") from error
    try:
        fs, path = fsspec.url_to_fs(url)
    except ImportError as error:  # s3fs, gcsfs, ...: fsspec says which
        raise ConfigError(f"{shown(url)}: {' '.join(str(error).split())}") from error
    except ValueError as error:
        raise ConfigError(f"{shown(url)}: {' '.join(str(error).split())}; expected a URL that fsspec knows") from error
    return fs, path


def _try(what: str, call: Callable[[], _T]) -> _T:
    """``call()``, some times over if need be: stores fail now and then, each with exceptions of its own."""
    waits = list(_WAITS_S)
    while True:
        try:
            return call()
        except (FileNotFoundError, PermissionError, IsADirectoryError, NotImplementedError) as error:
            raise SourceError(f"{what}: cannot be read ({_said(error)}); expected a file: mend the path") from error
        except Exception as error:
            if not waits:
                raise SourceError(
                    f"{what}: cannot be read in {len(_WAITS_S) + 1} tries ({_said(error)}); is the store up?"
                ) from error
            if len(waits) == len(_WAITS_S):
                _log.warning("%s: %s; trying again", what, _said(error))
            time.sleep(waits.pop(0))


def _said(error: Exception) -> str:
    """In one line, whoever wrote it, and with no query in it."""
    text = " ".join(str(error).split()) or type(error).__name__
    return " ".join(shown(word) if "://" in word else word for word in text.split(" "))[:200]
