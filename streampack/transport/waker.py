"""A pipe that wakes whoever waits for messages: the one thing about a socket's thread that others may touch."""

from __future__ import annotations

import socket


class Waker:
    """Wakes a poll from another thread; ``wake`` may be called by any."""

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)

    def fileno(self) -> int:
        return self._near.fileno()

    def wake(self) -> None:
        try:
            self._far.send(b"\0")
        except (BlockingIOError, OSError):
            return  # a full pipe wakes as well; a closed one has nobody to wake

    def clear(self) -> None:
        """Forget all wakes so far."""
        try:
            while self._near.recv(4096):
                continue
        except BlockingIOError:
            return

    def close(self) -> None:
        self._near.close()
        self._far.close()
