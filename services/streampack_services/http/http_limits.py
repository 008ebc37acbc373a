"""Limits for one client of the HTTP side: slow clients, and many connections at once, cost a bounded amount.

The server closes a connection whose request, body included, is not whole ``WHOLE_S`` after the connection was made or
the previous answer was given. At ``MOST_CONNECTIONS`` a new connection replaces the one that has been at its request
the longest, so that idle connections cannot keep probes out. ``http_guard`` bounds the head of a request; the handler
that reads a body bounds the body.

uvicorn's settings cannot say this. It has no time limit for a request that has begun (``timeout_keep_alive`` ends with
the next request's first byte), and ``limit_concurrency`` answers 503 to the newest connection: 256 idle connections
would make ``/livez`` fail. ``Bounded`` therefore extends uvicorn's protocol and relies on its ``connections``,
``transport``, ``loop``, ``cycle`` and ``on_response_complete``. pyproject.toml admits the versions of uvicorn that the
tests of ``test_http_limits`` passed with; run them before you raise the bound.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

WHOLE_S = 10.0
MOST_CONNECTIONS = 256


class Bounded(H11Protocol):
    """A connection of uvicorn with a deadline for each request."""

    _deadline: asyncio.TimerHandle | None = None
    since = 0.0
    """Time at which the wait for a whole request began, on the event loop's clock, in seconds."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline; close the oldest connection if there are too many."""
        super().connection_made(transport)
        others = [each for each in self.connections if isinstance(each, Bounded) and each is not self]
        if len(others) >= MOST_CONNECTIONS:
            min(others, key=lambda each: each.since).give_way()
        self._restart_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Start the deadline of the next request."""
        self._restart_deadline()
        super().on_response_complete()

    def give_way(self) -> None:
        """Close the connection at once and discard unsent bytes."""
        self.connections.discard(self)
        self.transport.abort()

    def _restart_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self.since = self.loop.time()
        self._deadline = self.loop.call_later(WHOLE_S, self._too_slow)

    def _too_slow(self) -> None:
        cycle: Any = self.cycle
        answering = cycle is not None and not cycle.response_complete and not cycle.more_body
        if not answering:
            self.give_way()
