"""Requests to the broker's HTTP side, below the server that parses them: none is answered with an error of ours."""

from __future__ import annotations

import asyncio
import functools
from concurrent.futures import Future
from typing import Any

from streampack_services.broker.status import BrokerStatus
from streampack_services.http.history import Timelines
from streampack_services.http.http_guard import App, Guard
from streampack_services.http.server import make_app
from streampack_services.logs import Ring

from streampack.core.protocol.effects import Answer
from tests.blank import blank
from tests.fuzz.engine import Target
from tests.fuzz.forms import JSON, MSGPACK, packed, unpacked
from tests.fuzz.machines import CONTROL

GET = ("/", "/status", "/livez", "/readyz", "/events", "/events?since=5", "/history?since=1.5", "/web/index.html")
HEADERS = [["host", "127.0.0.1:7400"], ["content-type", "application/json"]]
UNFIT = range(500, 503)
"""What no answer may be: an error of ours."""


def _asked(_feed: str, _ask: object, _at_step: int | None, _note: str) -> Future[Answer]:
    future: Future[Answer] = Future()
    future.set_result(Answer(0, "train", 1))
    return future


@functools.cache
def _apps() -> tuple[App, ...]:
    """Open, and for those who bring a token."""
    status = blank(BrokerStatus, run="x", state="serving", taken_at=1.0, uptime_s=1.0, epoch=1, version="0")
    app = make_app(lambda: status, Timelines(lambda: status), _asked, ring=Ring())
    return Guard(app, None, True), Guard(app, "0123456789abcdef", False)


def _seeds() -> list[bytes]:
    asks = [packed(["GET", target, HEADERS[:1], b""]) for target in GET]
    asks += [packed(["POST", path, HEADERS, JSON.write(body)]) for path, body in CONTROL]
    token = ["authorization", "Bearer 0123456789abcdef"]
    return [*asks, packed(["GET", "/events", [*HEADERS, token, ["authorization", "Basic YTpi"]], b""])]


def _run(data: bytes) -> None:
    tree = unpacked(data)
    if not isinstance(tree, list) or len(tree) != 4 or not isinstance(tree[2], list):
        return
    method, target, headers, body = tree
    path, _, query = str(target).partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": str(method), "scheme": "http",
        "path": path, "raw_path": _bytes(path), "query_string": _bytes(query), "root_path": "",
        "headers": [tuple(map(_bytes, each)) for each in headers[:50] if isinstance(each, list) and len(each) == 2],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 7400), "state": {},
    }  # fmt: skip
    for app in _apps():
        status = asyncio.run(_ask(app, dict(scope), _bytes(body)))
        assert status not in UNFIT, status


async def _ask(app: App, scope: dict[str, Any], body: bytes) -> int:
    found: list[int] = []
    parts: list[dict[str, Any]] = [
        {"type": "http.request", "body": body[:7], "more_body": True},
        {"type": "http.request", "body": body[7:]},
    ]

    async def receive() -> dict[str, Any]:
        return parts.pop(0) if parts else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            found.append(message["status"])

    await app(scope, receive, send)
    (status,) = found
    return status


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("latin-1", "replace")


TARGETS = (Target("http", MSGPACK, _seeds, _run),)
