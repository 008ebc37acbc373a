"""Images in a store that fails now and then, and samples that refer to them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import numpy as np

import streampack

WIDTH = 8
FIELDS = {"pixel_values": {"dtype": "reference", "axis": "item"}}


def image(number: int) -> bytes:
    """An image of up to six patches, each of ``WIDTH`` bytes."""
    draw = np.random.default_rng(number)
    return draw.integers(0, 256, int(draw.integers(1, 7)) * WIDTH, dtype=np.uint8).tobytes()


def decode(data: bytes, reference: streampack.Reference) -> np.ndarray:
    return np.frombuffer(data, np.uint8).reshape(-1, WIDTH)


class ImageStore(BaseHTTPRequestHandler):
    """Serves images by their number; the first tries of some fail in one of three ways."""

    asked: ClassVar[Counter[str]] = Counter()
    faulty = True

    def do_GET(self) -> None:
        self.asked[self.path] += 1
        number, tries = int(self.path.strip("/")), self.asked[self.path]
        data = image(number)
        if self.faulty and tries == 1 and number % 4 == 1:
            self.close_connection = True  # dropped
            return
        if self.faulty and tries == 1 and number % 4 == 2:
            time.sleep(0.3)
        if self.faulty and tries == 1 and number % 4 == 3:
            data = bytes([data[0] ^ 1]) + data[1:]
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def store(**attributes: Any) -> Iterator[str]:
    handler = type("OneStore", (ImageStore,), {"asked": Counter(), **attributes})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
    store.asked = handler.asked  # type: ignore[attr-defined]
