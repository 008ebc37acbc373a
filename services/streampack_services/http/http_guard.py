"""Access control of the broker's HTTP side: ASGI middleware around the application.

With a token, a request without it gets 401, except for the probes ``/livez`` and ``/readyz``, which tell nothing about
the run. Programs send ``Authorization: Bearer TOKEN``. A browser asks its user for a name and a password: the name is
ignored, the password is the token.

Without a token, on loopback, the danger is a web page of another site in a browser on this machine. Such a page can let
a name of its own point to this machine (DNS rebinding). So requests for a host name other than this machine's are
rejected. A page of another site cannot send JSON without permission, which this server never gives. So POST requests
must have the content type JSON.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import json
import os
import re
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from streampack.errors import ConfigError, UserError
from streampack.transport.secret_files import read_secret

LEAST_TOKEN = 16
"""Least characters of a token, so that it cannot be guessed over a network."""
MAX_HEAD_BYTES = 1 << 16
"""Most bytes of a request's target and headers. The bound of uvicorn, ``h11_max_incomplete_event_size``, has the same
value, but applies only to a head that arrives in several parts."""
OPEN = ("/livez", "/readyz")
"""Paths of the probes, which need no token and accept any host name."""
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*", re.ASCII)
"""Syntax of a token: RFC 6750, section 2.1."""
_HEADERS = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def find_token(file: str | None = None) -> str | None:
    """Return the HTTP token, or None if there is none.

    It is in ``file``, else in STREAMPACK_HTTP_TOKEN, else in the file that STREAMPACK_HTTP_TOKEN_FILE names.

    Raises:
        UserError: The token is not valid, or other users can read its file.
    """
    text, where = os.environ.get("STREAMPACK_HTTP_TOKEN"), "STREAMPACK_HTTP_TOKEN"
    file = file or (None if text else os.environ.get("STREAMPACK_HTTP_TOKEN_FILE"))
    if file:
        text, where = read_secret(Path(file)).strip(), file
    if not text:
        if file:
            raise UserError(f"{file} is empty. Make a token with 'streampack keys token'")
        return None
    if len(text) < LEAST_TOKEN or not _TOKEN.fullmatch(text):
        raise UserError(
            f"{where}: got a token of {len(text)} characters, expected at least {LEAST_TOKEN}, all of them letters, "
            f"digits or -._~+/. Make one with 'streampack keys token'"
        )
    return text


class Guard:
    """ASGI application that passes allowed requests on to ``app``.

    Args:
        app: The application.
        token: Token that requests must have; None for no token.
        on_loopback: The server listens on loopback, so without a token the host name must be this machine's.
    """

    def __init__(self, app: App, token: str | None, on_loopback: bool) -> None:
        self._app, self._token, self._on_loopback = app, token, on_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI). The application itself rejects other protocols than HTTP."""
        refusal = None
        if scope["type"] == "http":
            refusal = _too_large(scope) or (self._refusal(scope) if scope["path"] not in OPEN else None)
        if refusal is None:
            await self._app(scope, receive, _with_headers(send))
            return
        status, error, headers = refusal
        body = json.dumps({"error": error}).encode()
        headers = [*headers, (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await _with_headers(send)({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _refusal(self, scope: Scope) -> tuple[int, str, list[tuple[bytes, bytes]]] | None:
        """Return (HTTP status, error, headers) for a request that is not allowed, else None."""
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if self._token is not None and not hmac.compare_digest(
            _token_of(headers.get(b"authorization", "")).encode("latin-1", "replace"), self._token.encode()
        ):
            ask = [(b"www-authenticate", b'%s realm="streampack"' % kind) for kind in (b"Basic", b"Bearer")]
            got = "another token" if b"authorization" in headers else "no token"
            error = f"got {got}. Send 'Authorization: Bearer TOKEN' with the token of the broker's listen.token_file"
            return 401, error, ask
        host = headers.get(b"host", "localhost")
        if self._token is None and self._on_loopback and not _is_this_machine(host):
            error = (
                f"got a request for host {host[:100]!r}. Use a name of this machine such as localhost, or set a token"
            )
            return 421, error, []
        kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        if scope["method"] not in ("GET", "HEAD") and kind != "application/json":
            return 415, f"got content type {kind[:100]!r}, expected application/json. With curl use --json", []
        return None


def _too_large(scope: Scope) -> tuple[int, str, list[tuple[bytes, bytes]]] | None:
    """Return (HTTP status, error, headers) if target and headers are larger than ``MAX_HEAD_BYTES``, else None."""
    size = sum(len(name) + len(value) for name, value in scope["headers"])
    size += len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
    if size <= MAX_HEAD_BYTES:
        return None
    return 431, f"got a request with {size} bytes of target and headers, expected at most {MAX_HEAD_BYTES} bytes", []


def _token_of(authorization: str) -> str:
    """Return the token in an ``Authorization`` header (Bearer, or the password of Basic); empty if there is none."""
    kind, _, value = authorization.partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    if kind.lower() != "basic":
        return ""
    try:
        return base64.b64decode(value.strip(), validate=True).decode("latin-1").partition(":")[2]
    except (binascii.Error, ValueError):
        return ""


def _is_this_machine(host: str) -> bool:
    """Return True if this ``Host`` header names the machine itself: localhost or a loopback address."""
    name = host.rpartition(":")[0] if re.search(r":\d*\Z", host) and not host.endswith("]") else host
    name = name.removeprefix("[").removesuffix("]").rstrip(".").lower()
    return name == "localhost" or name.endswith(".localhost") or is_loopback(name)


def parse_address(address: str) -> tuple[str, int]:
    """Return ``("127.0.0.1", 7400)`` for ``127.0.0.1:7400``. Raise ConfigError for any other form."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(
            f"listen.http: got {address!r}, expected host:port such as 127.0.0.1:7400. Port 0 takes any free port"
        )
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Return True if ``host`` is a loopback address; an IPv4 address may be written as an IPv6 one."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _with_headers(send: Send) -> Send:
    """Return ``send`` with the security headers added to every response."""

    async def sent(message: MutableMapping[str, Any]) -> None:
        """Send a message of the response, with the security headers in its first message."""
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *_HEADERS]}
        await send(message)

    return sent
