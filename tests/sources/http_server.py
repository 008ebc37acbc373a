"""A server of files, which may misbehave."""

from __future__ import annotations

import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class FileServer(ThreadingHTTPServer):
    """Files of a folder with ranges; ``failures`` requests are answered 503, ``plain``: ranges are not known."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), FileHandler)
        self.folder = folder
        self.failures = 0
        self.plain = self.sizeless = False
        self.ranges: list[tuple[int, int]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class FileHandler(BaseHTTPRequestHandler):
    server: FileServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.server.folder / self.path.partition("?")[0].lstrip("/")
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if self.server.failures and asked:
            self.server.failures -= 1
            return self._answer(503, b"")
        if not path.is_file():
            return self._answer(404, b"")
        data = path.read_bytes()
        if self.server.sizeless:
            self.close_connection = True
            self.send_response(200)
            self.end_headers()
            return None
        if asked is None or self.server.plain:
            return self._answer(200, data)
        begin, end = int(asked[1]), min(int(asked[2]) + 1, len(data))
        self.server.ranges.append((begin, end))
        return self._answer(206, data[begin:end], f"bytes {begin}-{end - 1}/{len(data)}")

    def _answer(self, status: int, body: bytes, of: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Accept-Ranges", "none" if self.server.plain else "bytes")
        if of:
            self.send_header("Content-Range", of)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
