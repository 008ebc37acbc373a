"""A pipe that wakes the thread that waits for messages. Other threads may use only this pipe."""

from __future__ import annotations

import socket


class Waker:
    """Wakes a poll from another thread; any thread may call ``wake``."""

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)

    def fileno(self) -> int:
        """Return the file descriptor to poll; it is readable after a wake."""
        return self._near.fileno()

    def wake(self) -> None:
        """Wake the thread that polls ``fileno``. It never blocks."""
        try:
            self._far.send(b"\0")
        except (BlockingIOError, OSError):
            return  # a full pipe wakes as well; nothing waits on a closed one

    def clear(self) -> None:
        """Discard all wakes so far."""
        try:
            while self._near.recv(4096):
                continue
        except BlockingIOError:
            return

    def close(self) -> None:
        self._near.close()
        self._far.close()
