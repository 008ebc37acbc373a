"""The live page: the static files of ``web/`` at ``/`` and ``/web/``, and the rows that it draws at ``/history``.

``/web/declared.js`` has what ``broker.status`` declares: words for causes, and the figures that are ``shown``. Each
figure has its path in ``/status``, its label and its unit.

Files are read once and served from memory, each with its digest as ``ETag``, so that an unchanged file is not sent
again. Nothing else is served from a disk. The header Content-Security-Policy makes the browser load nothing from other
servers. The page consists of plain JavaScript modules without a build step.
"""

from __future__ import annotations

import hashlib
import json
import mimetypes
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from streampack.core.stats.data_wait import CAUSES as STARVED_BY
from streampack.core.stats.padding import CAUSES
from streampack_services.broker.status import BAD_MESSAGES, PADDING_LABELS, BrokerStatus, FeedStatus, StreamStatus
from streampack_services.figure import shown_in
from streampack_services.http.history import Timelines

HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
}


def routes(history: Timelines) -> list[Route]:
    """Return the routes of the page's files and of ``/history``."""

    def since(request: Request) -> Response:
        """Answer ``/history`` with the rows after uptime ``since``, of one ``feed`` or of all."""
        try:
            second = float(request.query_params.get("since", "-1"))
        except ValueError as error:
            return PlainTextResponse(f"since: {error}. Pass seconds of the broker's uptime\n", 400)
        feed = request.query_params.get("feed")
        rows = history.since(second, feed)
        if rows is None:
            return PlainTextResponse(f"feed: got {str(feed)[:100]!r}, expected the name of a feed in /status\n", 404)
        return Response(rows, media_type="application/json", headers={"cache-control": "no-store"})

    files = dict(_files(resources.files("streampack_services") / "web", "/web/"))
    files |= {"/web/declared.js": declared().encode(), "/": files["/web/index.html"]}
    return [*(_route(path, content) for path, content in files.items()), Route("/history", since)]


def declared() -> str:
    """Return the JavaScript module with the declared figures."""
    kinds = {"broker": BrokerStatus, "feed": FeedStatus, "stream": StreamStatus}
    figures = {key: [(path, row.label, row.unit) for path, row in shown_in(kind)] for key, kind in kinds.items()}
    padding = [(cause, PADDING_LABELS.get(cause, cause)) for cause in CAUSES]
    words = {"PADDING": padding, "WAITS": STARVED_BY, "FIGURES": figures, "BAD_MESSAGES": BAD_MESSAGES}
    return "".join(f"export const {name} = {json.dumps(value)};\n" for name, value in words.items())


def _files(folder: Traversable, path: str) -> Iterator[tuple[str, bytes]]:
    """Yield (path in the URL, content) of all files below a folder; ``path`` is the folder's, with a slash."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_file():
            yield path + entry.name, entry.read_bytes()
        else:
            yield from _files(entry, f"{path}{entry.name}/")


def _route(path: str, content: bytes) -> Route:
    """Return a route that serves a file's content from memory."""
    kind = mimetypes.guess_type("index.html" if path == "/" else path)[0] or "text/plain"
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'

    def serve(request: Request) -> Response:
        """Answer with the file, or with 304 if the browser has the same version of the file."""
        headers = HEADERS | {"etag": etag}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    return Route(path, serve)
