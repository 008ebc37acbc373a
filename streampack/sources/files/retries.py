"""Requests to stores, tried again after failures: which failures are final, how long to wait, and for what cause.

Theory of operation. A store answers a failed request with an HTTP status, or the connection breaks. fsspec raises many
classes for that. Its HTTP file system turns any failure of a size request into FileNotFoundError. So the status comes
from the chain of causes (``status_of``), whatever class stands at its head.

There are three kinds of failures:

- final: 403, 404 and 410, and errors of the same meaning without a status. They are raised at once.
- brief: failures that waiting seldom mends, such as other answers 4xx, an unknown host or a wrong number of bytes. They
  are tried ``FEW_TRIES`` times, within 4 s.
- long: answers 5xx, 408, 409, 425 and 429, broken connections, timeouts. They are tried again for ``MOST_S`` seconds.

A wait lasts as long as the store asks for (``Retry-After``, or ``RateLimit`` as hubs send it), within ``MOST_S``. Else
waits grow from 0.1 s to 30 s. The log names the cause, and ``waiting`` returns it while a wait lasts, for the status.
"""

from __future__ import annotations

import email.utils
import errno
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any, Literal

WAITS_S = (0.1, 0.4, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0)
"""Seconds before each further try; the last number repeats."""
MOST_S = 900.0
"""Seconds for which a request is tried again."""
FEW_TRIES = 5
"""Tries of a request whose failure waiting seldom mends."""
LOG_EVERY_S = 10.0
"""Least seconds between two log lines about the same host."""

_FINAL = frozenset({403, 404, 410})
_PASSING = frozenset({408, 409, 425, 429})
_FINAL_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError, NotImplementedError)
_NETWORK_ERRNOS = frozenset({
    errno.EAGAIN, errno.EBUSY, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EIO, errno.ENETDOWN, errno.ENETRESET,
    errno.ENETUNREACH, errno.EREMOTEIO, errno.ETIMEDOUT,
})  # fmt: skip
"""Numbers of system errors of a connection, or of a busy store (s3fs: EBUSY for SlowDown)."""
_NETWORK_PACKAGES = frozenset({"aiohttp", "httpx", "httpx2", "httpcore", "requests", "urllib3"})
_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_RESET_AFTER = re.compile(r"\br\s*=\s*0\s*;\s*t\s*=\s*(\d+)")

_log = logging.getLogger(__name__)
_said: dict[str, float] = {}
"""Time of the last log line about each host."""
_waits: dict[int, str] = {}
"""The cause of each thread's current wait."""


def waiting(thread: int) -> str:
    """Return what a request of the thread with this identifier waits for; empty if it does not wait."""
    return _waits.get(thread, "")


class Retries:
    """The tries of one request: call ``again`` after each failure.

    Args:
        what: URL and place, for messages, without a query.
        stop: If set, a wait ends at once, and no further try follows.
        most_s: Seconds for which the request is tried again; by default ``MOST_S``.
    """

    def __init__(self, subject: str, stop: threading.Event | None = None, most_s: float | None = None) -> None:
        self._what = subject
        self._stop = stop or threading.Event()
        self.most_s = MOST_S if most_s is None else most_s
        self.tries = 0
        """Number of failures so far."""
        self._began = 0.0

    def again(self, error: Exception) -> bool:
        """Wait until the request may be tried again, and return True; return False if no try may follow."""
        now = time.monotonic()
        self._began = self._began if self.tries else now
        self.tries += 1
        left_s = self._began + self.most_s - now
        kind = kind_of(error)
        if kind == "final" or left_s <= 0 or (kind == "brief" and self.tries >= FEW_TRIES):
            return False
        usual_s = WAITS_S[min(self.tries, len(WAITS_S)) - 1]
        self._wait(min(max(usual_s, asked_s(error)), left_s), text_of(error))
        return not self._stop.is_set()

    def _wait(self, seconds: float, cause: str) -> None:
        """Wait, and say so in the log and in ``waiting``."""
        text = f"{self._what}: {cause}; try {self.tries + 1} follows after {seconds:.1f} s"
        host, now = self._what.partition("://")[2].partition("/")[0], time.monotonic()
        if now - _said.get(host, -LOG_EVERY_S) >= LOG_EVERY_S:
            _said[host] = now
            _log.warning("a request failed: %s; it is tried again for at most %.0f s", text, self.most_s)
        _waits[threading.get_ident()] = text
        try:
            self._stop.wait(seconds)
        finally:
            del _waits[threading.get_ident()]


def kind_of(error: BaseException) -> Literal["final", "brief", "long"]:
    """Return whether a failure is final, or for how long the request is tried again."""
    status = status_of(error)
    if status in _FINAL or isinstance(error, PermissionError):
        return "final"
    if status is not None:
        passes = status >= 500 or status in _PASSING or asked_s(error) or isinstance(error, TimeoutError)
        return "long" if passes else "brief"
    chain = list(_chain(error))
    if any(isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME for cause in chain):
        return "brief"
    if any(map(_is_of_network, chain)):
        return "long"
    return "final" if isinstance(error, _FINAL_ERRORS) else "brief"


def _is_of_network(error: BaseException) -> bool:
    """Return whether an error without a status is one of the connection, or of a store that is busy."""
    if isinstance(error, ValueError | EOFError):  # an invalid URL; a wrong number of bytes
        return False
    if isinstance(error, ConnectionError | TimeoutError) or getattr(error, "errno", None) in _NETWORK_ERRNOS:
        return True
    kinds = [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__]
    return any(package in _NETWORK_PACKAGES or name == "HTTPClientError" for package, name in kinds)


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that an error or one of its causes carries; None if there is none.

    aiohttp has it as ``status``, httpx and requests in ``response``, azure as ``status_code``, gcsfs as ``code``, and
    botocore in a dict.
    """
    for cause in _chain(error):
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            of_gcs = cause if type(cause).__module__.startswith("gcsfs") else None  # others: numbers of other sorts
            holders = ((cause, "status"), (response, "status_code"), (cause, "status_code"), (of_gcs, "code"))
            status = next(
                (value for holder, name in holders if (value := getattr(holder, name, None)) is not None), None
            )
        if isinstance(status, int | str) and str(status).isdigit() and 400 <= int(status) < 600:
            return int(status)
    return None


def asked_s(error: BaseException) -> float:
    """Return the seconds that a store asks to wait, at least 0; 0 if it asks for none."""
    for cause in _chain(error):
        headers = _headers(cause)
        if not headers:
            continue
        if "retry-after" in headers:
            return _retry_after_s(headers["retry-after"], headers.get("date", ""))
        reset = _RESET_AFTER.search(headers.get("ratelimit", ""))
        return float(reset[1]) if reset else 0.0
    return 0.0


def _headers(error: BaseException) -> dict[str, str]:
    """Return the headers of the answer that an error carries, with names in lower case; empty if there are none."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        headers: Any = response.get("ResponseMetadata", {}).get("HTTPHeaders")
    else:
        headers = getattr(error, "headers", None) or getattr(response, "headers", None)
    return {str(name).lower(): str(value) for name, value in headers.items()} if isinstance(headers, Mapping) else {}


def _retry_after_s(value: str, date: str) -> float:
    """Return the seconds of a ``Retry-After`` header, a number or a date, at least 0. ``date``: the store's clock."""
    try:
        return max(0.0, float(value)) if value.strip().isdigit() else max(0.0, _epoch_s(value) - _epoch_s(date))
    except ValueError:
        return 0.0


def _epoch_s(date: str) -> float:
    """Return the seconds since 1970 of an HTTP date; of now if it is empty. Raises ValueError."""
    return email.utils.parsedate_to_datetime(date).timestamp() if date else time.time()


def text_of(error: BaseException) -> str:
    """Return a failure as one line: the HTTP status where there is one, and the text of the cause where it says more.

    It has at most 200 characters, and no queries of URLs, which may hold secrets.
    """
    status = status_of(error)
    chain = list(_chain(error))
    cause = next((cause for cause in chain if _is_of_network(cause)), error)
    text = " ".join(str(cause).split()) or type(cause).__name__
    if any(type(cause).__module__.startswith("aiohttp.") and status_of(cause) for cause in chain):
        text = ""  # it repeats the status and the URL
    elif isinstance(cause, FileNotFoundError) and " " not in text:
        text = "not found"  # it is the path alone
    if status is not None:
        name = f"HTTP {status} {_PHRASES.get(status, '')}".strip()
        text = f"{name}: {text}" if text else name
    return without_queries(text)[:200]


def without_queries(text: str) -> str:
    """Return a text without the queries of its URLs."""
    return " ".join(word.partition("?")[0] if "://" in word else word for word in text.split(" "))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors that caused it, the last one first."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
