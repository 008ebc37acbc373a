"""Compressed shards: a gzip or Zstandard file, read as the plain file in it.

Theory of operation. Samples are read at byte offsets, in a shuffled order, and a compressed file has no such offsets.
So opening a shard decompresses all of it into an unnamed temporary file. The kernel deletes that file when its
descriptor is closed, so a killed process leaves nothing behind. Then the shard is read like a plain file, in the same
order. Each process holds the decompressed shards that it reads at a time, in the folder that TMPDIR names.

The alternatives cost more. An index into a gzip file needs a first pass over the whole file, and 32 KiB of memory for
each entry point. Each sample then costs megabytes of decompression. Zstandard files with a seek table are rare.

The kind of a file follows from its contents (``contents``), and other kinds of compression are refused. Both formats
mark their end, so a file that is cut short or damaged raises DamagedFile. Decompressing Zstandard takes the memory that
the file was written for: 8 MiB usually, and 2 GiB with ``zstd --long=31``.
"""

import contextlib
import gzip
import importlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, Any

from streampack.errors import ConfigError, DamagedFile, SourceError
from streampack.sources.files.byte_source import PositionedFile, ShardFile
from streampack.sources.files.contents import GZIP, compression_of
from streampack.sources.files.local_files import LocalFile

_BLOCK_BYTES = 1 << 20


@contextlib.contextmanager
def decompressed(file: ShardFile) -> Iterator[ShardFile]:
    """Yield ``file`` itself, or its decompressed contents if it is a gzip or Zstandard file.

    Raises DamagedFile for a file that is cut short or damaged, and ConfigError where a package is missing. Raises
    SourceError for another kind of compression, or where the temporary file cannot be written.
    """
    kind = compression_of(file)
    if kind is None:
        yield file
        return
    plain_file = Decompressed(file, _open_gzip if kind == GZIP else _zstd_reader())
    try:
        yield plain_file
    finally:
        plain_file.close()


class Decompressed(LocalFile):
    """The decompressed contents of a file, in a temporary file; ``path`` and ``name`` are the compressed file's."""

    def __init__(self, file: ShardFile, open_stream: Callable[..., Any]) -> None:
        self.path, self.name, self.location = file.path, file.name, file.location
        self._mapped = memoryview(b"")
        try:
            with tempfile.TemporaryFile(prefix="streampack-") as temporary:
                self.size = _decompress(file, open_stream, temporary)
                self._fd = os.dup(temporary.fileno())
        except OSError as error:
            raise SourceError(
                f"{file.path}: the file cannot be decompressed into {tempfile.gettempdir()} ({error.strerror}). Free "
                "space in that folder, or decompress the files first. Or set TMPDIR to a folder with space for the "
                "decompressed shards that are read at a time, or set fewer with `open_shards` in producer.yaml"
            ) from error


def _decompress(file: ShardFile, open_stream: Callable[..., Any], to: IO[bytes]) -> int:
    """Write the decompressed contents of ``file`` to ``to``; return their size in bytes."""
    size = 0
    with io.BufferedReader(PositionedFile(file), _BLOCK_BYTES) as raw, open_stream(raw) as stream:
        while block := _read_block(file, stream):
            size += to.write(block)
    to.flush()
    return size


def _read_block(file: ShardFile, stream: IO[bytes]) -> bytes:
    """Return the next decompressed block, empty at the end. Raises DamagedFile naming ``file``."""
    try:
        return stream.read(_BLOCK_BYTES)
    except SourceError:
        raise
    except Exception as error:  # EOFError, BadGzipFile (an OSError), zlib.error, ZstdError
        reason = " ".join(str(error).split())[:200].rstrip(".")
        if "ictionary" in reason:
            raise SourceError(
                f"{file.path}: got a Zstandard file that needs a dictionary, expected a file without one. Decompress "
                "the file: zstd -d -D DICTIONARY"
            ) from error
        if "memory" in reason:
            raise SourceError(
                f"{file.path}: decompressing the file needs more memory than there is ({reason}). Free memory, or "
                "compress the file again without --long and --ultra"
            ) from error
        raise DamagedFile(
            f"{file.path}: the file is cut short or damaged ({reason}). Copy or write the file again"
        ) from error


def _open_gzip(raw: io.BufferedReader) -> IO[bytes]:
    """Return a stream of the decompressed bytes of a gzip file."""
    return gzip.GzipFile(fileobj=raw, mode="rb")  # type: ignore[return-value]


def _zstd_reader() -> Callable[..., Any]:
    """Return the class ZstdFile: the standard library's (Python 3.14 on) or the package's. Raises ConfigError.

    It reads files of any window, as ``zstd --long=31`` writes them.
    """
    for module in ("compression.zstd", "backports.zstd"):
        with contextlib.suppress(ImportError):
            zstd = importlib.import_module(module)
            window = zstd.DecompressionParameter.window_log_max
            return partial(zstd.ZstdFile, options={window: window.bounds()[1]})
    raise ConfigError(
        "shards: got a Zstandard file, which this Python cannot read. Run `pip install 'streampack[zstd]'`, or use "
        "Python 3.14"
    )
