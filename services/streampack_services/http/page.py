"""The live page: the static files of ``web/`` at ``/`` and ``/web/``, and the rows that it draws at ``/history``.

Files are read once and served from memory, each with its digest as ``ETag``, so that an unchanged file is not sent
again. Nothing else is served from a disk. The header Content-Security-Policy makes the browser load nothing from other
servers. The page consists of plain JavaScript modules without a build step.
"""

from __future__ import annotations

import hashlib
import mimetypes
from importlib import resources
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

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

    files = [_route(path, file) for path, file in _files(resources.files("streampack_services") / "web", "/web/")]
    index = next(Route("/", each.endpoint) for each in files if each.path == "/web/index.html")
    return [index, *files, Route("/history", since)]


def _files(folder: Traversable, path: str) -> list[tuple[str, Traversable]]:
    """Return (path in the URL, file) for all files below a folder; ``path`` is the folder's, with a slash."""
    files = []
    for each in sorted(folder.iterdir(), key=lambda each: each.name):
        files += [(path + each.name, each)] if each.is_file() else _files(each, f"{path}{each.name}/")
    return files


def _route(path: str, file: Traversable) -> Route:
    """Read a file, and return a route that serves it from memory."""
    content = file.read_bytes()
    kind = mimetypes.guess_type(path)[0] or "text/plain"
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'

    def serve(request: Request) -> Response:
        """Answer with the file, or with 304 if the browser has the same version of the file."""
        headers = HEADERS | {"etag": etag}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    return Route(path, serve)
