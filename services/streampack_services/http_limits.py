"""What one client of the HTTP side may take of it: slow ones and many at once cost a bounded amount.

A request must be whole, with its body, ``WHOLE_S`` after the connection was made or the answer before it was given,
or the connection is closed. Of ``MOST_CONNECTIONS`` the one that has been at its request the longest gives way to
another, so that whoever opens any number of them and says nothing keeps nobody out. ``http_guard`` bounds the
head of a request, whoever reads a body bounds that.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

WHOLE_S = 10.0
MOST_CONNECTIONS = 256


class Bounded(H11Protocol):
    """A connection."""

    _deadline: asyncio.TimerHandle | None = None
    since = 0.0
    """When it began to be at its request, of the loop's clock."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """One more; the oldest goes where there are too many."""
        super().connection_made(transport)
        others = [each for each in self.connections if isinstance(each, Bounded) and each is not self]
        if len(others) >= MOST_CONNECTIONS:
            min(others, key=lambda each: each.since).give_way()
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """The next request may come."""
        self._expect()
        super().on_response_complete()

    def give_way(self) -> None:
        """Close at once, whatever was on its way."""
        self.connections.discard(self)
        self.transport.abort()

    def _expect(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self.since = self.loop.time()
        self._deadline = self.loop.call_later(WHOLE_S, self._too_slow)

    def _too_slow(self) -> None:
        cycle: Any = self.cycle
        answering = cycle is not None and not cycle.response_complete and not cycle.more_body
        if not answering:
            self.give_way()
