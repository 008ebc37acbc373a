"""Measure the speed of this machine's sockets and memory, as an upper bound for the bare pipe.

The bare pipe is what streampack is compared with, so a bare pipe made slow would flatter streampack. Here are the
same bytes over the same kind of socket, without ZeroMQ, in two threads that hold no GIL while they copy: a message is
sent and received once, and copied twice by ``memcpy``, as the bare pipe copies it into its arena and out again. The
bare pipe sends each token through two sockets. It knows nothing of either pipe.
"""

from __future__ import annotations

import ctypes
import os
import socket
import tempfile
import threading
import time

MESSAGE_BYTES = 1 << 20
RING_BYTES = 64 << 20


def socket_bytes_per_second(transport: str, seconds: float = 0.5) -> float:
    """Bytes a second through one socket (``ipc``: AF_UNIX, ``tcp``: 127.0.0.1) with two copies in memory.

    One thread sends 1 MiB messages and the other receives and copies them, for ``seconds``.
    """
    near, far = _connected(transport)
    message = memoryview(bytearray(os.urandom(1 << 16) * (MESSAGE_BYTES >> 16)))
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            try:
                near.sendall(message)
            except OSError:
                return

    sender = threading.Thread(target=send)
    sender.start()
    try:
        return _receive(far, seconds)
    finally:
        stop.set()
        far.close()  # wakes a sender that waits for room
        near.close()
        sender.join()


def _receive(far: socket.socket, seconds: float) -> float:
    ring, into, out = bytearray(RING_BYTES), bytearray(MESSAGE_BYTES), ctypes.create_string_buffer(MESSAGE_BYTES)
    places = (ctypes.c_char * RING_BYTES).from_buffer(ring)
    source = (ctypes.c_char * MESSAGE_BYTES).from_buffer(into)
    view, at, total = memoryview(into), 0, 0
    address = ctypes.addressof(places)
    started, now = 0.0, time.perf_counter()
    for number in range(1 << 60):
        filled = 0
        while filled < MESSAGE_BYTES:
            filled += far.recv_into(view[filled:])
        ctypes.memmove(address + at, source, MESSAGE_BYTES)
        ctypes.memmove(out, address + at, MESSAGE_BYTES)
        at = (at + MESSAGE_BYTES) % RING_BYTES
        now = time.perf_counter()
        if number == RING_BYTES // MESSAGE_BYTES:  # the ring's pages are there
            started, total = now, 0
        elif started:
            total += MESSAGE_BYTES
            if now - started >= seconds:
                break
    return total / (now - started)


def _connected(transport: str) -> tuple[socket.socket, socket.socket]:
    """Both ends of one connection."""
    if transport == "tcp":
        listener = socket.create_server(("127.0.0.1", 0))
    else:
        listener = socket.socket(socket.AF_UNIX)
        with tempfile.TemporaryDirectory(prefix="floor-") as folder:
            listener.bind(f"{folder}/s")
            listener.listen()
            return _pair(listener)
    return _pair(listener)


def _pair(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    near = socket.socket(listener.family)
    near.connect(listener.getsockname())
    far, _ = listener.accept()
    listener.close()
    return near, far
