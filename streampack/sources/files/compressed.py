"""Compressed shards: a gzip or Zstandard file as the plain file in it.

Theory of operation. Samples are read at their offsets, in a shuffled order, and a compressed file has none to seek to.
So a shard is decompressed as a whole when it is opened, into a temporary file that has no name and goes with its
descriptor: a process that is killed leaves nothing behind. From there on it is read as any other, in the same order as
the plain file would be. A process holds one shard at a time; TMPDIR says where.

The alternatives cost more: an index into a gzip file takes a first pass over all of it anyway, then 32 KiB of memory
for each place to begin at, and decompresses megabytes for each sample; Zstandard files with a seek table are rare.

A file that is cut short or damaged is refused, since both formats say where they end.
"""

import contextlib
import gzip
import importlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any

from streampack.errors import ConfigError, DamagedFile, SourceError
from streampack.sources.files.byte_source import PositionedFile, ShardFile
from streampack.sources.files.local_files import LocalFile

_BLOCK_BYTES = 1 << 20
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


@contextlib.contextmanager
def plain(file: ShardFile) -> Iterator[ShardFile]:
    """``file`` itself, or what a compressed one holds.

    Raises DamagedFile for a file that is cut short or damaged, ConfigError where a package is missing, SourceError
    where the temporary file cannot be written.
    """
    first = file.pread(min(file.size, 4), 0)
    open_stream = _gzip if first.startswith(_GZIP) else _zstd() if first == _ZSTD else None
    if open_stream is None:
        yield file
        return
    found = _Decompressed(file, open_stream)
    try:
        yield found
    finally:
        found.close()


class _Decompressed(LocalFile):
    """The contents of a compressed file, under its path and name."""

    def __init__(self, file: ShardFile, open_stream: Callable[..., Any]) -> None:
        self.path, self.name = file.path, file.name
        self._mapped = memoryview(b"")
        try:
            with tempfile.TemporaryFile(prefix="streampack-") as temporary:
                self.size = _decompress(file, open_stream, temporary)
                self._fd = os.dup(temporary.fileno())
        except OSError as error:
            raise SourceError(
                f"{file.path}: cannot be decompressed into {tempfile.gettempdir()} ({error.strerror}): make room "
                "there, set TMPDIR to a folder with room for one shard a process, or decompress the files first"
            ) from error


def _decompress(file: ShardFile, open_stream: Callable[..., Any], to: IO[bytes]) -> int:
    """Write what ``file`` holds to ``to``; its size in bytes."""
    size = 0
    with io.BufferedReader(PositionedFile(file), _BLOCK_BYTES) as raw, open_stream(raw) as stream:
        while block := _read(file, stream):
            size += to.write(block)
    to.flush()
    return size


def _read(file: ShardFile, stream: IO[bytes]) -> bytes:
    try:
        return stream.read(_BLOCK_BYTES)
    except SourceError:
        raise
    except Exception as error:  # EOFError, BadGzipFile (an OSError), zlib.error, ZstdError
        said = " ".join(str(error).split())[:200].rstrip(".")
        raise DamagedFile(f"{file.path}: is cut short or damaged ({said}): copy or write it again") from error


def _gzip(raw: io.BufferedReader) -> IO[bytes]:
    return gzip.GzipFile(fileobj=raw, mode="rb")  # type: ignore[return-value]


def _zstd() -> Callable[..., Any]:
    """The standard library's from Python 3.14 on, else the same as a package."""
    for module in ("compression.zstd", "backports.zstd"):
        with contextlib.suppress(ImportError):
            opened: Callable[..., Any] = importlib.import_module(module).ZstdFile
            return opened
    raise ConfigError("shards: Zstandard files need `pip install 'streampack[zstd]'`, or Python 3.14")
