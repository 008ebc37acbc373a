"""An HTTP store that fails by plan: at any kind of request, before the answer or in the middle of it."""

from __future__ import annotations

import email.utils
import random
import re
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

KINDS = ("listing", "HEAD", "GET", "range")
"""Kinds of requests: of a folder, of a file's size (HEAD, or the start of GET), and of a range of bytes."""
BUSY = {"Retry-After": "1"}


class FaultyStore(ThreadingHTTPServer):
    """Files of a folder. ``faults``: by kind of request, what the next ones get in place of the answer."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.faults: dict[str, deque[Any]] = {kind: deque() for kind in KINDS}
        self.always: dict[str, Any] = {}
        """Path to the fault of every request for it."""
        self.failed = Counter[str]()
        self.times: list[float] = []
        """When each request came."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: the client has gone, as it may."""


class _Handler(BaseHTTPRequestHandler):
    server: FaultyStore
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None: ...

    def do_HEAD(self) -> None:
        self._serve("HEAD")

    def do_GET(self) -> None:
        path = self.server.folder / self.path.partition("?")[0].lstrip("/")
        self._serve("listing" if path.is_dir() else "range" if self.headers.get("Range") else "GET")

    def _serve(self, kind: str) -> None:
        self.server.times.append(time.monotonic())
        name = self.path.partition("?")[0].lstrip("/")
        path, faults = self.server.folder / name, self.server.faults[kind]
        fault = self.server.always.get(name) or (faults.popleft() if faults else None)
        if fault is not None:
            self.server.failed[kind] += 1
            return self._fail(fault, path)
        if path.is_dir():
            return self._send(200, "".join(f'<a href="{each.name}">x</a>\n' for each in path.iterdir()).encode(), {
                "Content-Type": "text/html"})  # fmt: skip
        if not path.is_file():
            return self._send(404, b"", {})
        return self._send(*self._file(path))

    def _file(self, path: Path) -> tuple[int, bytes, dict[str, str]]:
        data = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None:
            return 200, data, {"Accept-Ranges": "bytes"}
        begin, end = int(asked[1]), min(int(asked[2]) + 1, len(data))
        return 206, data[begin:end], {"Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}

    def _fail(self, fault: Any, path: Path) -> None:
        if fault == "reset":
            return self._reset()
        if fault == "cut":  # half of the answer
            status, data, headers = self._file(path) if path.is_file() else (200, b"<html>", {})
            self._send(status, data, headers, upto=len(data) // 2)
            return self._reset()
        status, headers = fault if isinstance(fault, tuple) else (fault, {})
        return self._send(status, b"the store is busy", headers)

    def _send(self, status: int, data: bytes, headers: dict[str, str], upto: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:upto])
            self.wfile.flush()

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def in_a_second() -> dict[str, str]:
    """The header of a store that asks for a date two seconds from now, as dates have whole seconds."""
    return {"Retry-After": email.utils.formatdate(time.time() + 2, usegmt=True)}


def plan(store: FaultyStore, seed: int) -> None:
    """Faults of every sort for every kind of request, at the start and between answers."""
    chance = random.Random(seed)
    for faults in store.faults.values():
        for _ in range(40):
            faults.append(chance.choice([None, None, None, 503, 429, 500, 408, "reset", "cut", (429, {})]))
        faults[chance.randrange(3)] = (chance.choice([429, 503]), BUSY)
        faults[chance.randrange(3, 6)] = 503


@contextmanager
def faulty_store(folder: Path) -> Iterator[FaultyStore]:
    store = FaultyStore(folder)
    thread = threading.Thread(target=store.serve_forever, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        store.shutdown()
        store.server_close()
        thread.join()
