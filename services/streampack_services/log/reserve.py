"""Space that is held back on the log's disk, and lent when something must be written so that old segments can go.

A commit of a checkpoint can free space only after the log has its record and the ledger has the old records. On a full
disk, ``reserve.tmp`` has the space for both. While it is lent, the log makes no segment ahead, which would take it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from streampack_services.descriptors import open_file


class Reserve:
    """The file ``reserve.tmp`` of ``num_bytes`` in ``folder``; 0 for none. Two threads use it."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self._path, self._num_bytes = folder / "reserve.tmp", num_bytes
        self._is_held = False
        self.is_lent = False
        self.lock = threading.Lock()
        """Held while the log takes space or the reserve is given up."""
        if not num_bytes:  # a process that was killed may have left it
            self._path.unlink(missing_ok=True)

    def hold(self, free_bytes: int) -> None:
        """Make the file, unless it is there, lent, or larger than the free space."""
        with self.lock:
            if self._is_held or self.is_lent or not 0 < self._num_bytes <= free_bytes:
                return
            try:
                fd = open_file(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    os.posix_fallocate(fd, 0, self._num_bytes)
                finally:
                    os.close(fd)
                self._is_held = True
            except OSError:  # another process has taken the space, or a quota has no room for the file
                self._path.unlink(missing_ok=True)

    def give_up(self) -> None:
        """Free the space."""
        with self.lock:
            self._is_held = False
            self._path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def lend(self) -> Iterator[None]:
        """Free the space for the block; the log takes none of it ahead."""
        with self.lock:
            self.is_lent = True
        self.give_up()
        try:
            yield
        finally:
            self.is_lent = False
