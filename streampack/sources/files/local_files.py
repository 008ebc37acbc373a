"""Files of this machine.

They are read, not mapped, where one piece is asked for: a mapped file that is cut kills the process that reads it, and
the page cache serves either. Many small pieces are copied out of a mapping, at a fifth of what a system call for each
costs. The size is looked at before and after, so nearly always an error says that a file was cut; if it is cut in that
very millisecond the process ends, and its leases go to another, which says so.
"""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np
from numpy.typing import NDArray

from streampack.errors import SourceError
from streampack.sources.files.byte_source import File, changed, join_pieces


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
