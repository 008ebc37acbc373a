"""Limits for clients of the HTTP side: slow requests and many connections cost a bounded amount.

A request, body included, must be complete ``WHOLE_S`` after its connection was made or the previous answer was sent.
Otherwise the server closes the connection. At ``MOST_CONNECTIONS`` a new connection replaces the one that has waited
longest for a complete request. So idle connections cannot keep probes out. ``http_guard`` bounds the head of a request,
and the handler that reads a body bounds the body.

The settings of uvicorn do not suffice. Its ``timeout_keep_alive`` ends with the first byte of the next request, so it
does not bound a request that has begun. Its ``limit_concurrency`` answers 503 to the newest connection, so 256 idle
connections would make ``/livez`` fail. Therefore ``Bounded`` extends uvicorn's protocol. It relies on the attributes
``connections``, ``transport``, ``loop``, ``cycle`` and ``on_response_complete``. The bound on uvicorn in
pyproject.toml admits versions that passed ``test_http_limits``; run it before you raise the bound.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

WHOLE_S = 10.0
"""Time for a complete request, in seconds."""
MOST_CONNECTIONS = 256
"""Most connections at once, also within a burst of new ones."""
BACKLOG = 8
"""Connections that are accepted at once; asyncio accepts no more of them before it has looked at others."""
_BURST = 4 * BACKLOG
"""Connections that may be accepted before an aborted one is closed: asyncio takes up to four turns for that."""


class Bounded(H11Protocol):
    """A connection of uvicorn with a deadline for each request."""

    _deadline: asyncio.TimerHandle | None = None
    since = 0.0
    """Time at which the wait for a whole request began, on the event loop's clock, in seconds."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline; close the oldest connection if there are too many."""
        super().connection_made(transport)
        others = [each for each in self.connections if isinstance(each, Bounded) and each is not self]
        if len(others) >= max(MOST_CONNECTIONS - _BURST, min(MOST_CONNECTIONS, _BURST)):
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
        """Give the next request ``WHOLE_S`` from now."""
        if self._deadline is not None:
            self._deadline.cancel()
        self.since = self.loop.time()
        self._deadline = self.loop.call_later(WHOLE_S, self._too_slow)

    def _too_slow(self) -> None:
        """Close the connection at its deadline, unless the server is answering a complete request."""
        cycle: Any = self.cycle
        answering = cycle is not None and not cycle.response_complete and not cycle.more_body
        if not answering:
            self.give_way()
