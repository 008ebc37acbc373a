"""A peer of a ZeroMQ socket that speaks its wire protocol itself (ZMTP 3, RFC 23), and so may break it."""

from __future__ import annotations

import socket
import struct
import threading
from types import TracebackType

from streampack.transport.sockets import Poller, Router, drain

MORE, LONG, COMMAND = 1, 2, 4
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def frame(body: bytes, flags: int = 0) -> bytes:
    """One frame as it goes over the connection."""
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | LONG]) + struct.pack(">Q", len(body)) + body


READY = frame(b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER", COMMAND)


class RawPeer:
    """A connection to ``tcp://host:port``; with ``shake`` it has said who it is, and has been heard."""

    def __init__(self, endpoint: str, shake: bool = True, timeout_s: float = 60.0) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=timeout_s)
        if shake:
            try:
                self.socket.sendall(GREETING + READY)
                self._read(len(GREETING))
                self._read(1)
                self._read(self._read(1)[0])
            except OSError:
                self.socket.close()
                raise

    def send(self, data: bytes) -> bool:
        """Bytes as they are; False where the other side has closed the connection."""
        try:
            self.socket.sendall(data)
        except OSError:
            return False
        return True

    def is_closed(self) -> bool:
        """Has the other side closed it? Waits until it does, or says something, up to the timeout."""
        try:
            while self.socket.recv(65536):
                continue
        except TimeoutError:
            return False
        except OSError:
            return True
        return True

    def _read(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            piece = self.socket.recv(count - len(found))
            if not piece:
                raise ConnectionError("closed in the handshake")
            found += piece
        return found

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def take_all(poller: Poller, sock: Router) -> int:
    """Take what has come; the number of messages."""
    poller.wait(0.01)
    return sum(1 for _ in drain(sock, 1000))


def shaken(sock: Router, poller: Poller) -> RawPeer:
    """A raw peer that was let in: the router answers its handshake from another thread's turn."""
    found: list[RawPeer] = []
    thread = threading.Thread(target=lambda: found.append(RawPeer(sock.endpoint)))
    thread.start()
    while thread.is_alive():
        take_all(poller, sock)
    return found[0]
