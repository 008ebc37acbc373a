"""Addresses that sockets listen on, or connect to: ``tcp://host:port`` and ``ipc://path``.

A process that connects may be given several addresses, separated by commas, for a broker and its standby. ``Addresses``
is the rule by which its dealer moves from one to the next.

A dealer is connected to one address at a time. It moves on if that address takes no connection for ``CONNECT_S``. A
process that takes the connection gets ``HANDSHAKE_S``, because a broker that is busy admits peers slowly. A frozen
process never admits any.

A connection that has ended has ``CONNECT_S`` to come back. A host that is dead says nothing, and the connection ends
because heartbeats have no answer. The dealer then moves on at once, since it has waited for seconds already. ZeroMQ's
own thread answers heartbeats, so a broker that is busy or has nothing to say is not left.

The caller leaves an address whose broker is not the newest, such as one that was frozen while another took over. It may
also leave one whose broker owes an answer and hangs.
"""

from __future__ import annotations

from collections.abc import Sequence

from streampack.errors import UserError

CONNECT_S = 1.0
"""Seconds without a connection after which a dealer moves on."""
HANDSHAKE_S = 5.0
"""Seconds that a process which takes connections may need to admit a peer."""
QUICK_HEARTBEAT_MS = 1500
QUICK_HEARTBEAT_TIMEOUT_MS = 3500
"""Heartbeats of a dealer with several addresses; the connection to a dead host ends after 3.5 to 5 seconds."""
SILENT_S = 3.0
"""A connection that ends after so many seconds without a message may have ended because a host is dead."""


def split_endpoints(text: str) -> list[str]:
    """Return the addresses of a list that is separated by commas, to connect to one of them at a time.

    Raises UserError for an address that cannot be connected to, an empty one, or one that is given twice.

    >>> split_endpoints("tcp://node0:7402,tcp://node1:7402")
    ['tcp://node0:7402', 'tcp://node1:7402']
    """
    endpoints = [part.strip() for part in text.split(",")]
    if len(endpoints) == 1:
        check_endpoint(text, connects=True)
        return [text]
    for number, endpoint in enumerate(endpoints):
        if not endpoint:
            raise UserError(
                f"got endpoints {text!r}, of which number {number + 1} is empty, expected an address on both sides "
                f"of each comma. Remove the comma"
            )
        if endpoint in endpoints[:number]:
            raise UserError(
                f"got endpoints {text!r}, which name {endpoint} twice, expected different addresses. Name each "
                f"address once"
            )
        check_endpoint(endpoint, connects=True)
    return endpoints


def check_endpoint(endpoint: str, *, connects: bool = False) -> None:
    """Raise UserError for an endpoint that is not ``tcp://host:port`` or ``ipc://path`` of 100 bytes at most.

    A socket that binds may leave the host (``*``) or the port (``*``, 0) open; one that ``connects`` may not.
    """
    if "," in endpoint:
        raise UserError(
            f"got endpoint {endpoint!r}, expected one address without a comma. Only a process that connects to a "
            f"broker may have several addresses"
        )
    kind, _, rest = endpoint.partition("://")
    if kind == "tcp":
        host, _, port = rest.rpartition(":")
        is_port = port.isascii() and port.isdigit() and int(port) < 65536
        if host and host.isprintable() and " " not in host and (is_port or port == "*"):
            if connects and (host == "*" or not is_port or int(port) == 0):
                raise UserError(
                    f"got endpoint {endpoint!r} to connect to, expected a host and the port that the broker listens "
                    f"on. Take the address from its log or rendezvous file"
                )
            return
    elif kind == "ipc" and rest:
        if len(rest.encode()) <= 100:
            return
        raise UserError(
            f"got an ipc path of {len(rest.encode())} bytes, expected at most 100 bytes. Choose a shorter path"
        )
    raise UserError(f"got endpoint {endpoint!r}, expected tcp://host:port or ipc:///path/of/a/socket")


class Addresses:
    """The address that one dealer is connected to, and when it should move on; times are in seconds.

    Args:
        given: The addresses, in the order in which they are tried.
        now: The present time.

    Attributes:
        current: The address that the dealer is connected to, or tries.
        settled: The last address with a connection; the first address before any.
    """

    def __init__(self, endpoints: Sequence[str], now: float) -> None:
        self.given = tuple(endpoints)
        self.current = self.settled = self.given[0]
        self._connected = self._accepted = self._leave = self._moved = False
        self._since = self._heard_at = self._came_at = now

    @property
    def several(self) -> bool:
        """True if there is another address to move to."""
        return len(self.given) > 1

    @property
    def connected(self) -> bool:
        """True while there is a connection."""
        return self._connected

    def heard(self, now: float) -> None:
        """Take a message that has come."""
        self._heard_at = now

    def accepted(self) -> None:
        """Take the news that a process at the current address takes connections; it may not be a broker."""
        self._accepted = True

    def came(self, now: float) -> bool:
        """Take the news of a connection that can be used; return True if it is the first one after a move."""
        moved, self._moved = self._moved, False
        self._connected, self._heard_at, self._came_at = True, now, now
        return moved

    def ended(self, now: float) -> None:
        """Take the end of a connection, or of an attempt to connect."""
        if not self._connected:
            return
        self._connected = self._accepted = False
        self._since = now
        self._leave = self._leave or now - self._heard_at > SILENT_S

    def leave(self) -> None:
        """Take the caller's word that the broker at the current address is not the newest."""
        self._leave = self._connected

    def hangs(self, now: float) -> None:
        """Take the caller's word that the broker owes an answer; one that has just been found has time to answer."""
        self._leave = self._leave or (self._connected and now - self._came_at > HANDSHAKE_S)

    def is_move_due(self, now: float) -> bool:
        """Return whether the dealer should move to the next address."""
        if not self.several:
            return False
        limit = HANDSHAKE_S if self._accepted else CONNECT_S
        return self._leave or (not self._connected and now - self._since > limit)

    def move(self, now: float) -> str:
        """Move to the next address and return it."""
        self.current = self.given[(self.given.index(self.current) + 1) % len(self.given)]
        self._connected = self._accepted = self._leave = False
        self._moved, self._since = True, now
        return self.current
