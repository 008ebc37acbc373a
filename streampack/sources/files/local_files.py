"""Files of this machine.

A single piece is read by a system call, not through a memory mapping: if a mapped file is truncated, reading it kills
the process. Many small pieces are copied out of a mapping, in a fifth of the time of one system call for each. The
size is checked before and after, so a truncated file nearly always raises SourceError. If the file is truncated during
the copy itself, the process is killed; another producer takes over its leases and raises the error.
"""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np
from numpy.typing import NDArray

from streampack.errors import SourceError
from streampack.sources.files.byte_source import File, changed_size_error, join_pieces


class LocalFile:
    """An open local file: a ShardFile with one descriptor. ``need``: range of bytes to fetch ahead."""

    def __init__(self, file: File, need: range) -> None:
        self.path, self.name, self.size, self.location = file.path, file.name, file.size, file.path
        self._mapped = memoryview(b"")
        try:
            self._fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(
                f"{file.path}: the file cannot be opened ({error.strerror}), although it existed when the run began. "
                "Restore the file"
            ) from error
        try:
            self.check_size()
            if os.fstat(self._fd).st_mtime_ns != file.mtime_ns:
                raise SourceError(
                    f"{file.path}: got a file that was written after the producer listed it, expected an unchanged "
                    "file. Restore the file. If its contents are the same, restart the producers"
                )
        except BaseException:
            self.close()
            raise
        if need and hasattr(os, "posix_fadvise"):  # samples are read in any order: fetch the range now
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, need.start, len(need), os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        self._mapped.release()
        os.close(self._fd)

    def check_size(self) -> None:
        """Raise SourceError if the file's size has changed since it was listed."""
        size = os.lseek(self._fd, 0, os.SEEK_END)  # a third of fstat's cost; pread does not use the position
        if size != self.size:
            raise changed_size_error(self.path, size, self.size)

    def pread(self, size: int, offset: int) -> bytes:
        """Return exactly ``size`` bytes from byte ``offset``, by a system call. Raises SourceError."""
        try:
            data = os.pread(self._fd, size, offset)
            self.check_size()
            while len(data) < size:  # one call reads 2 GiB at most, some network file systems less
                more = os.pread(self._fd, size - len(data), offset + len(data))
                if not more:
                    raise SourceError(
                        f"{self.path}: the file ends at byte {offset + len(data)}, expected at least {offset + size} "
                        "bytes. Restore the file"
                    )
                data += more
        except OSError as error:
            raise SourceError(
                f"{self.path}: the file cannot be read at byte {offset} ({error.strerror}). Check the disk or the "
                "network file system"
            ) from error
        return data

    def gather(self, sizes: NDArray[np.int64], offsets: NDArray[np.int64]) -> bytes:
        """Return the pieces at ``offsets`` of ``sizes`` bytes, joined, out of a mapping. Raises SourceError."""
        mapped = self.mapped()
        if mapped is None:
            return b"".join(map(self.pread, sizes.tolist(), offsets.tolist()))
        data = join_pieces(mapped, offsets, offsets + sizes)
        self.check_size()
        return data

    def mapped(self) -> memoryview | None:
        """Return the mapping of the file after a check of its size; None if the file cannot be mapped."""
        self.check_size()
        if not self._mapped and self.size:
            try:
                self._mapped = memoryview(mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ))
            except OSError:  # some file systems do not support it, and a limit on address space may forbid it
                return None
        return self._mapped
