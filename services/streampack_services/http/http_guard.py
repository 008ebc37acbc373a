"""Who may ask the broker's HTTP side: a layer around the application, which knows nothing of it.

With a token, whoever does not bring it is answered 401, but for the probes (``/livez``, ``/readyz``), which say nothing
of the run. Programs send it as ``Authorization: Bearer TOKEN``; a browser asks its user for a password (any name), and
sends that with everything of the page.

Without one, on loopback, the danger is a page of some other site in a browser of this machine, which may ask for any
address under a name of its own that it lets point here (DNS rebinding): what is asked for under a name that is not
this machine's is refused. Such a page cannot bring the token. It cannot send JSON to another site either without being
allowed to, which nobody is: what is posted must say that it is JSON.
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
"""Characters: what nobody guesses over a network."""
MAX_HEAD_BYTES = 1 << 16
"""Most bytes of a request's target and headers. uvicorn's own bound (``h11_max_incomplete_event_size``, set to the
same) applies only to a head that arrives in several parts."""
OPEN = ("/livez", "/readyz")
"""Probes bring no token, and name a broker as they like."""
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*", re.ASCII)
"""RFC 6750, section 2.1."""
_HEADERS = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def find_token(file: str | None = None) -> str | None:
    """The token: that of ``file``, else STREAMPACK_HTTP_TOKEN, else that of the file STREAMPACK_HTTP_TOKEN_FILE; None
    where none of them is. Raises UserError for what is no token, or for a file that others can read.
    """
    text, where = os.environ.get("STREAMPACK_HTTP_TOKEN"), "STREAMPACK_HTTP_TOKEN"
    file = file or (None if text else os.environ.get("STREAMPACK_HTTP_TOKEN_FILE"))
    if file:
        text, where = read_secret(Path(file)).strip(), file
    if not text:
        if file:
            raise UserError(f"{file}: got nothing, expected a token: make one with 'streampack keys token'")
        return None
    if len(text) < LEAST_TOKEN or not _TOKEN.fullmatch(text):
        raise UserError(
            f"{where}: got {len(text)} characters that are no token, expected at least {LEAST_TOKEN} letters, digits "
            f"or -._~+/: make one with 'streampack keys token'"
        )
    return text


class Guard:
    """``app`` for those who bring ``token``; without one for those who ask for this machine, where ``on_loopback``."""

    def __init__(self, app: App, token: str | None, on_loopback: bool) -> None:
        self._app, self._token, self._on_loopback = app, token, on_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI; everything but HTTP is refused by what follows."""
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
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if self._token is not None and not hmac.compare_digest(
            _brought(headers.get(b"authorization", "")).encode("latin-1", "replace"), self._token.encode()
        ):
            ask = [(b"www-authenticate", b'%s realm="streampack"' % kind) for kind in (b"Basic", b"Bearer")]
            got = "another token than the broker's" if b"authorization" in headers else "no token"
            return 401, f"got {got}, expected Authorization: Bearer and the one that its listen.token_file holds", ask
        host = headers.get(b"host", "localhost")
        if self._token is None and self._on_loopback and not _is_here(host):
            return 421, f"got a request for {host[:100]!r}, expected one for this machine, such as localhost", []
        kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        if scope["method"] not in ("GET", "HEAD") and kind != "application/json":
            return 415, f"got content of type {kind[:100]!r}, expected application/json: curl --json sends it so", []
        return None


def _too_large(scope: Scope) -> tuple[int, str, list[tuple[bytes, bytes]]] | None:
    size = sum(len(name) + len(value) for name, value in scope["headers"])
    size += len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
    if size <= MAX_HEAD_BYTES:
        return None
    return 431, f"got {size} bytes of target and headers, expected at most {MAX_HEAD_BYTES}", []


def _brought(authorization: str) -> str:
    """The token of an ``Authorization`` header: the password, where it is a browser's; empty where there is none."""
    kind, _, value = authorization.partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    if kind.lower() != "basic":
        return ""
    try:
        return base64.b64decode(value.strip(), validate=True).decode("latin-1").partition(":")[2]
    except (binascii.Error, ValueError):
        return ""


def _is_here(host: str) -> bool:
    """Is this ``Host`` header one of a machine itself?"""
    name = host.rpartition(":")[0] if re.search(r":\d*\Z", host) and not host.endswith("]") else host
    name = name.removeprefix("[").removesuffix("]").rstrip(".").lower()
    return name == "localhost" or name.endswith(".localhost") or is_loopback(name)


def parse_address(address: str) -> tuple[str, int]:
    """``("127.0.0.1", 7400)`` of ``127.0.0.1:7400``. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"listen.http: got {address!r}, expected host:port such as 127.0.0.1:7400; port 0 is any")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Is it an address of the machine itself? An IPv4 address may come as an IPv6 one."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _with_headers(send: Send) -> Send:
    async def sent(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *_HEADERS]}
        await send(message)

    return sent
