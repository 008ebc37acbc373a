"""The HTTP server of a broker: the live page, metrics, probes and status, and changes of a running broker.

The server runs in a thread of its own and reads the broker's last snapshot; only ``control`` passes requests to the
broker. The probe ``/livez`` is good while the broker's loop turns. The probe ``/readyz`` is good while the broker
serves: not while it starts or drains. The server binds its port when it is made, so a port in use is an error at once.
The module ``http_guard`` decides which requests are allowed.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import uvicorn
from msgspec.structs import asdict
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from streampack.errors import UserError
from streampack_services.broker.ranks.rank_status import RankPage
from streampack_services.broker.status import BrokerStatus
from streampack_services.http import control, page
from streampack_services.http.control import AskBroker
from streampack_services.http.history import Timelines
from streampack_services.http.http_guard import MAX_HEAD_BYTES, Guard, is_loopback, parse_address
from streampack_services.http.http_limits import Bounded, Listening, accepted_at_once
from streampack_services.http.metrics import CONTENT_TYPE, STANDBY_METRICS, exposition, series
from streampack_services.logs import Ring
from streampack_services.standby.following import FollowingStatus

RankPages = Callable[[str, str | None, int], RankPage | None]
"""Returns ranks of a feed, all or those of one node, from a number on; None if no rank was on the node."""
STUCK_AFTER_S = 30.0
"""``/livez`` fails after this time without a new snapshot, in seconds."""


def make_app(
    snapshot: Callable[[], BrokerStatus], history: Timelines, ask_broker: AskBroker | None = None,
    any_host: bool = False,
    ring: Ring | None = None, rank_page: RankPages | None = None,
) -> Starlette:  # fmt: skip
    """Return the ASGI application.

    Args:
        snapshot: Returns the broker's last snapshot, in any thread.
        history: Rows for ``/history``.
        ask_broker: Asks the broker for a change; None: changes over HTTP are off.
        any_host: Accept changes from other machines, too.
        ring: The last log events, for ``/events``.
        rank_page: Returns some ranks, for ``/status?node=`` and ``/status?ranks=``; None: there are no such answers.
    """

    def metrics(_: Request) -> Response:
        """Answer ``/metrics`` in Prometheus' text format."""
        return Response(exposition(snapshot()), media_type=CONTENT_TYPE)

    def livez(_: Request) -> Response:
        """Answer ``/livez``: 200 while the broker's main loop turns, else 503."""
        now = snapshot()
        age = time.time() - now.taken_at
        if now.ready and age > STUCK_AFTER_S:
            return PlainTextResponse(f"stuck: the broker's main loop has not run for {age:.0f} s\n", 503)
        return PlainTextResponse("alive\n")

    def readyz(_: Request) -> Response:
        """Answer ``/readyz``: 200 while the broker serves, else 503."""
        now = snapshot()
        return PlainTextResponse("ready\n") if now.ready else PlainTextResponse(f"not ready: {now.state}\n", 503)

    encoded: tuple[BrokerStatus | None, bytes] = (None, b"")

    def status(request: Request) -> Response:
        """Answer ``/status`` with the last snapshot as JSON, or with some ranks if ``node`` or ``ranks`` is given."""
        nonlocal encoded
        now = snapshot()
        if rank_page is not None and {"node", "ranks"} & request.query_params.keys():
            return _ranks(now, request, rank_page)
        if now is not encoded[0]:  # encode each snapshot once for all clients
            encoded = now, msgspec.json.encode(now)
        return Response(encoded[1], media_type="application/json")

    def events(request: Request) -> Response:
        """Answer ``/events`` with the log events after number ``since`` as JSON."""
        since = request.query_params.get("since", "0")
        if not since.isascii() or not since.isdigit() or len(since) > 18:
            error = f"since: got {since[:40]!r}, expected the number (seq) of the last event that you have"
            return JSONResponse({"error": error}, 400)
        return JSONResponse(ring.since(int(since)) if ring is not None else [])

    handlers = {"/metrics": metrics, "/livez": livez, "/readyz": readyz, "/status": status, "/events": events}
    routes = [Route(path, handler) for path, handler in handlers.items()] + page.routes(history)
    if ask_broker is not None:
        routes += [
            Route(path, control.handler(path, ask_broker, any_host), methods=["POST"]) for path in control.BODIES
        ]
    return Starlette(routes=routes)


def _ranks(now: BrokerStatus, request: Request, rank_page: RankPages) -> Response:
    """Answer with ranks of a feed: from number ``ranks`` on, all or those of ``node``, as JSON."""
    params = request.query_params
    feed, node, first = params.get("feed", next(iter(now.feeds))), params.get("node"), params.get("ranks", "0")
    if feed not in now.feeds:
        return JSONResponse({"error": f"feed: got {feed[:100]!r}, expected the name of a feed in /status"}, 404)
    if not first.isascii() or not first.isdigit() or len(first) > 9:
        error = f"ranks: got {first[:40]!r}, expected the number of ranks to leave out, such as 0 or 256"
        return JSONResponse({"error": error}, 400)
    ranks = rank_page(feed, node, int(first))
    if ranks is None:
        return JSONResponse(
            {"error": f"node: got {str(node)[:100]!r}, expected a part of the name of a host that has a rank"}, 404
        )
    return Response(msgspec.json.encode(ranks), media_type="application/json")


class AppServer:
    """Serves an ASGI application in a thread of its own; ``url`` is the address.

    Args:
        address: ``host:port`` to listen on; port 0 takes any free port.
        app: The application.
        token: Token that requests must have; None for no token.

    Raises:
        UserError: The address cannot be used.
    """

    def __init__(self, address: str, app: Starlette, token: str | None = None) -> None:
        host, port = parse_address(address)
        self._socket = _listen(host, port, address)
        bound_to, bound = self._socket.getsockname()[:2]
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{bound}"
        self._server = uvicorn.Server(
            uvicorn.Config(
                Guard(app, token, is_loopback(bound_to)),
                log_config=None,
                log_level="error",  # clients can cause any number of warnings
                http=Bounded,
                loop="asyncio",  # uvloop would not accept connections by ``Listening``
                backlog=accepted_at_once(),
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                ws="none",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(target=self._serve, name="streampack-http", daemon=True)

    def start(self) -> None:
        """Start to serve."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening; wait up to 3 s for answers under way."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(timeout=3)
        self._socket.close()

    def _serve(self) -> None:
        """Serve requests; import what the first one needs now, since later there may be no descriptor for a file."""
        asyncio.run(run_in_threadpool(int))
        self._server.run(sockets=[self._socket])


class HttpServer(AppServer):
    """Serves ``make_app`` with a history; the arguments are those of ``make_app`` and ``AppServer``."""

    def __init__(
        self, address: str, snapshot: Callable[[], BrokerStatus], ask_broker: AskBroker | None = None,
        any_host: bool = False, ring: Ring | None = None, token: str | None = None,
        rank_page: RankPages | None = None,
    ) -> None:  # fmt: skip
        self._history = Timelines(snapshot)
        super().__init__(address, make_app(snapshot, self._history, ask_broker, any_host, ring, rank_page), token)

    def start(self) -> None:
        self._history.start()
        super().start()

    def close(self) -> None:
        self._history.close()
        super().close()


def standby_app(run: str, status: Callable[[], FollowingStatus]) -> Starlette:
    """Return the ASGI application of a broker that is not active: probes, ``/status`` and ``/metrics``."""

    def livez(_: Request) -> Response:
        """Answer ``/livez``."""
        return PlainTextResponse("alive\n")

    def readyz(request: Request) -> Response:
        """Answer ``/readyz``: 503, because producers and trainers must not connect.

        ``/readyz?standby=1`` is 200 once the standby may take over, so that the active broker may be stopped.
        """
        now = status()
        if "standby" in request.query_params and now.is_member:
            return PlainTextResponse("ready to take over\n")
        return PlainTextResponse(f"not ready: standby: {now.waits_for}\n", 503)

    def state(_: Request) -> Response:
        """Answer ``/status``."""
        return JSONResponse({"run": run, "state": "standby", "ready": False, "standby": asdict(status())})

    def metrics(_: Request) -> Response:
        """Answer ``/metrics`` in Prometheus' text format."""
        return Response(series(STANDBY_METRICS, status()), media_type=CONTENT_TYPE)

    handlers = {"/metrics": metrics, "/livez": livez, "/readyz": readyz, "/status": state}
    return Starlette(routes=[Route(path, handler) for path, handler in handlers.items()])


def _listen(host: str, port: int, address: str) -> socket.socket:
    """Return a listening socket; raise UserError, naming ``address``, if that fails."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.create_server((host, port), family=family)
        return Listening(fileno=bound.detach())
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise UserError(
                f"cannot listen on {address} for HTTP: got an address of no interface of this machine, expected one of "
                f"its own addresses. Use 0.0.0.0 for all of them, as in listen.http: 0.0.0.0:7400"
            ) from None
        problem = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        raise UserError(
            f"cannot listen on {address} for HTTP: {problem.lower()}. Stop the other process, or pass another address "
            f"with listen.http or --http (port 0 takes any free port)"
        ) from None
