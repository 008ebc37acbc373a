"""Limits for clients of the HTTP side: slow requests and many connections cost a bounded amount.

A request, body included, must be complete ``WHOLE_S`` after its connection was made or the previous answer was sent.
Otherwise the server closes the connection. At ``MOST_CONNECTIONS`` a new connection replaces the one that has waited
longest for a complete request, an idle one if there is one. So idle connections cannot keep probes out. If many come at
once, ``Listening`` keeps only the newest. ``http_guard`` bounds the head of a request, and the handler that reads a
body bounds the body.

The settings of uvicorn do not suffice. Its ``timeout_keep_alive`` ends with the first byte of the next request, so it
does not bound a request that has begun. Its ``limit_concurrency`` answers 503 to the newest connection, so 256 idle
connections would make ``/livez`` fail. Therefore ``Bounded`` extends uvicorn's protocol. It relies on the attributes
``connections``, ``transport``, ``loop``, ``cycle`` and ``on_response_complete``. The bound on uvicorn in
pyproject.toml admits versions that passed ``test_http_limits``; run it before you raise the bound.
"""

from __future__ import annotations

import array
import asyncio
import errno
import fcntl
import itertools
import socket
import termios
import time
from collections import deque
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

WHOLE_S = 10.0
"""Time for a complete request, in seconds."""
MOST_CONNECTIONS = 256
"""Most connections at once, also within a burst of new ones."""
QUEUE = 1024
"""Connections that the kernel holds until they are accepted."""
FULL_S = 0.01
"""Seconds until a connection is accepted again after there was no descriptor for it."""
_TURNS = 4
"""Most turns of asyncio between an accepted connection and the end of the one that it replaces."""


def accepted_at_once() -> int:
    """Return the most connections that asyncio may accept in a turn."""
    return max(MOST_CONNECTIONS // 32, 2)


class Listening(socket.socket):
    """A listening socket that accepts all that wait, and keeps the newest ``accepted_at_once``; the others are closed.

    asyncio would accept all at once, and then there may be no descriptor left. Or it would accept a few in each turn,
    and a newcomer would wait behind thousands. Idle ones are closed first, but not the newest: its request may
    be on the way.
    """

    _kept: deque[tuple[socket.socket, Any]]
    _gave_all: bool
    """True if the last connection that was kept has just been returned."""

    def listen(self, _backlog: int = 0, /) -> None:
        """Listen with a queue of ``QUEUE``; asyncio passes the number that it accepts in a turn."""
        self._kept, self._gave_all = deque(), False
        super().listen(QUEUE)

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection that is kept. Raises BlockingIOError if none waits, and once after the last one.

        asyncio calls this ``accepted_at_once`` times, and again when the system says that connections wait. So it must
        never leave one that is kept: the system does not know of it.
        """
        if not self._kept:
            if self._gave_all:
                self._gave_all = False
                raise BlockingIOError
            self._accept_all()
        connection = self._kept.popleft()
        self._gave_all = not self._kept
        return connection

    def _accept_all(self) -> None:
        """Accept the connections that wait. Raises BlockingIOError if there are none."""
        try:
            for _ in range(QUEUE):
                self._kept.append(super().accept())
                if len(self._kept) > accepted_at_once():
                    waited = itertools.islice(self._kept, len(self._kept) - 1)
                    idle = next((kept for kept in waited if is_idle(kept[0].fileno())), self._kept[0])
                    self._kept.remove(idle)
                    idle[0].close()
        except OSError as error:
            if error.errno == errno.EMFILE:  # the broker soon ends strangers' connections; asyncio would wait for 1 s
                time.sleep(FULL_S)
            elif not (self._kept or isinstance(error, BlockingIOError)):
                raise
            if not self._kept:
                raise BlockingIOError from None


def is_idle(fd: int) -> bool:
    """Return whether nothing waits to be read from the connection with file descriptor ``fd``."""
    waiting = array.array("i", [0])
    try:
        fcntl.ioctl(fd, termios.FIONREAD, waiting)
    except OSError:
        return True
    return not waiting[0]


class Bounded(H11Protocol):
    """A connection of uvicorn with a deadline for each request."""

    _deadline: asyncio.TimerHandle | None = None
    since = 0.0
    """Time at which the wait for a whole request began, on the event loop's clock, in seconds."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline; close the oldest connection if there are too many."""
        super().connection_made(transport)
        others = [other for other in self.connections if isinstance(other, Bounded) and other is not self]
        if len(others) >= max(MOST_CONNECTIONS - _TURNS * accepted_at_once(), -(-MOST_CONNECTIONS // 2), 2):
            min(others, key=lambda other: (other.is_busy, other.since)).give_way()
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

    @property
    def is_busy(self) -> bool:
        """True if the connection has an unread request, or one that is being answered."""
        fd = self.transport.get_extra_info("socket").fileno()
        return self._answering or (fd >= 0 and not is_idle(fd))

    @property
    def _answering(self) -> bool:
        """True if the server is answering a complete request."""
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete and not cycle.more_body

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
        if not self._answering:
            self.give_way()
