"""The broker's HTTP side: the live page (``page``), metrics, probes and status, from its last snapshot; and what is
asked of it (``control``).

Runs in a thread of its own beside the broker and only reads, but for what it passes on. ``/livez`` says whether the
broker's loop still turns and depends on nobody else; ``/readyz`` whether it serves: not while it
starts, not while it drains. Binds before it starts, so that a taken port is known at once. Who may ask at all is
``http_guard``'s.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from streampack.errors import UserError
from streampack_services.broker.status import BrokerStatus
from streampack_services.http import control, page
from streampack_services.http.control import Asking
from streampack_services.http.history import Timelines
from streampack_services.http.http_guard import MAX_HEAD_BYTES, Guard, is_loopback, parse_address
from streampack_services.http.http_limits import Bounded
from streampack_services.http.metrics import CONTENT_TYPE, exposition
from streampack_services.logs import Ring

STUCK_AFTER_S = 30.0
"""A loop that has taken no snapshot for so long is stuck."""


def make_app(
    snapshot: Callable[[], BrokerStatus], history: Timelines, asking: Asking | None = None, anybody: bool = False,
    ring: Ring | None = None,
) -> Starlette:  # fmt: skip
    """The application; ``snapshot()`` is the last one taken, and may come from any thread.

    With ``asking`` changes may be asked for, from other hosts too with ``anybody``. The last events are those of
    ``ring``.
    """

    def metrics(_: Request) -> Response:
        return Response(exposition(snapshot()), media_type=CONTENT_TYPE)

    def livez(_: Request) -> Response:
        now = snapshot()
        age = time.time() - now.taken_at
        if now.ready and age > STUCK_AFTER_S:
            return PlainTextResponse(f"stuck: the broker's loop has not turned for {age:.0f} s\n", 503)
        return PlainTextResponse("alive\n")

    def readyz(_: Request) -> Response:
        now = snapshot()
        return PlainTextResponse("ready\n") if now.ready else PlainTextResponse(f"not ready: {now.state}\n", 503)

    said: tuple[BrokerStatus | None, bytes] = (None, b"")

    def status(_: Request) -> Response:
        nonlocal said
        now = snapshot()
        if now is not said[0]:  # each snapshot is encoded once, however many ask
            said = now, msgspec.json.encode(now)
        return Response(said[1], media_type="application/json")

    def events(request: Request) -> Response:
        since = request.query_params.get("since", "0")
        if not since.isascii() or not since.isdigit() or len(since) > 18:
            error = f"since: got {since[:40]!r}, expected the number (seq) of the last event that is known"
            return JSONResponse({"error": error}, 400)
        return JSONResponse(ring.since(int(since)) if ring is not None else [])

    handlers = {"/metrics": metrics, "/livez": livez, "/readyz": readyz, "/status": status, "/events": events}
    routes = [Route(path, each) for path, each in handlers.items()] + page.routes(history)
    if asking is not None:
        routes += [Route(path, control.handler(path, asking, anybody), methods=["POST"]) for path in control.BODIES]
    return Starlette(routes=routes)


class HttpServer:
    """Serves ``make_app`` on ``host:port`` (port 0: any free one) in a thread; ``url`` says where. With a ``token``
    only to those who bring it.
    """

    def __init__(
        self, address: str, snapshot: Callable[[], BrokerStatus], asking: Asking | None = None, anybody: bool = False,
        ring: Ring | None = None, token: str | None = None,
    ) -> None:  # fmt: skip
        host, port = parse_address(address)
        self._socket = _listen(host, port, address)
        bound_to, bound = self._socket.getsockname()[:2]
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{bound}"
        self._history = Timelines(snapshot)
        self._server = uvicorn.Server(
            uvicorn.Config(
                Guard(make_app(snapshot, self._history, asking, anybody, ring), token, is_loopback(bound_to)),
                log_config=None,
                log_level="error",  # a warning is of what a client sends: it may send any number
                http=Bounded,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                ws="none",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(target=self._serve, name="streampack-http", daemon=True)

    def start(self) -> None:
        self._history.start()
        self._thread.start()

    def close(self) -> None:
        """Stop listening; waits a little for answers under way."""
        self._history.close()
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(timeout=3)
        self._socket.close()

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])


def _listen(host: str, port: int, address: str) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=64)
    except OSError as error:
        what = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        raise UserError(
            f"cannot listen on {address} for HTTP: got {what.lower()}, expected a free one: "
            f"stop the other process, or give another with listen.http or --http, port 0 for any"
        ) from None
