"""Files at URLs, read through fsspec: ranged reads, a bounded cache of blocks, and retries.

Theory of operation. Reads come from blocks of 4 MiB; each open file caches the 64 blocks used last (256 MiB). A shard
up to that size crosses the network once, in whatever order its samples are read. A larger shuffled shard is fetched
again and again, so keep remote shards below 256 MiB. Neighboring missing blocks are one request. A request that fails,
or returns the wrong number of bytes, is tried again at the same offset: see ``retries``.

Folders are listed one by one, because fsspec's own glob leaves out a folder whose listing fails.

The store must report a file's size, which is compared when the file is opened. A replacement of the same size is not
noticed. Credentials and endpoints come from fsspec: its configuration file and environment.
"""

import importlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from streampack.errors import ConfigError, SourceError
from streampack.sources.files.byte_source import File, MissingFile, changed_size_error
from streampack.sources.files.retries import Retries, kind_of, text_of

_BLOCK_BYTES = 4 << 20
_BLOCKS = 64
_LISTERS = 16
_MAGIC = re.compile(r"[*?[]")

_T = TypeVar("_T")


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
    folder = path[: _MAGIC.search(path).start()].rpartition("/")[0] + "/"  # type: ignore[union-attr]
    levels = None if "**" in path else path.count("/") - folder.count("/") + 1
    matches = re.compile(importlib.import_module("fsspec.utils").glob_translate(path)).match
    names = [name for name in _walk(fs, fs._strip_protocol(folder), levels) if matches(name)]
    return sorted(map(fs.unstrip_protocol, names))


def _walk(fs: Any, folder: str, levels: int | None) -> list[str]:
    """Return the paths of files and folders in a folder, ``levels`` deep, or all; empty if there is no such folder."""
    try:
        listing = _request(without_query(fs.unstrip_protocol(folder)), lambda: fs.ls(folder, detail=True))
    except MissingFile:
        return []
    names = []
    for info in listing:
        name = info["name"].rstrip("/")
        names.append(name)
        if info["type"] == "directory" and name != folder.rstrip("/") and levels != 1:
            names += _walk(fs, name, levels and levels - 1)
    return names


def size_urls(urls: Sequence[str]) -> dict[str, int]:
    """Return the size in bytes of the file at each URL. Raises SourceError if one is missing or has no known size.

    The first error ends all requests, also those that wait for their next try.
    """
    for url in urls:
        _filesystem(url)  # a failing import or name raises here, not in a thread
    stop = threading.Event()
    pool = ThreadPoolExecutor(min(_LISTERS, len(urls)))
    try:
        futures = {pool.submit(_size, url, stop): url for url in urls}
        return {futures[done]: done.result() for done in as_completed(futures)}
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _size(url: str, stop: threading.Event | None = None) -> int:
    """Return the size in bytes of the file at a URL. Raises SourceError."""
    fs, path = _filesystem(url)
    name = without_query(url)
    info = _request(name, lambda: fs.info(path), stop)
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

        return _request(f"{self.path}: at byte {begin}", fetch)


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


def _request(subject: str, call: Callable[[], _T], stop: threading.Event | None = None) -> _T:
    """Return ``call()``; repeat the call after a failure, as ``Retries`` says. ``subject`` names the URL in errors.

    Raises SourceError after the last try, or at once if the file is missing or must not be read.
    """
    retries = Retries(subject, stop)
    while True:
        try:
            return call()
        except Exception as error:
            if retries.again(error):
                continue
            if kind_of(error) != "final":
                raise SourceError(
                    f"{subject}: the file cannot be read in {retries.tries} tries ({text_of(error)}). Check the store"
                ) from error
            kind = MissingFile if isinstance(error, FileNotFoundError) else SourceError
            raise kind(
                f"{subject}: the file cannot be read ({text_of(error)}). Correct the path or its permissions"
            ) from error
