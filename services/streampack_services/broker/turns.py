"""Fair turns of keys, and of the connections of each key.

ZeroMQ hands over one message of each connection in turn. A message may take a microsecond or a hundredth of a second,
and a key may have any number of connections. Where more comes than the broker handles at once, messages line up by
connection. The broker measures the time that each message takes. The key that was given the least time is next; its
connection that was given the least time is handled. This is start-time fair queuing (Goyal, Vin and Cheng, 1996). A
key that was idle gains nothing by it. Without keys, each connection has its own turn.

The messages of a key that wait have a limit in bytes. Messages of all keys have one, too: without keys, anyone may open
many connections. While more bytes wait than that, each key may have its share of them. Beyond a limit the newest
message is dropped: peers repeat messages without an answer.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

MESSAGE_BYTES = 2048
"""Memory of a message that waits, beside the bytes of its frames: 1,760 measured for one of three small frames."""
REMEMBERED = 1024
"""Connections or keys whose time is remembered before idle ones without a debt are forgotten."""


class _Order:
    """Names that wait, ordered by the time that each has used, in seconds."""

    def __init__(self) -> None:
        self.waiting: list[tuple[float, int, bytes]] = []
        """The names that wait, as a heap of (time at the turn, number, name)."""
        self._time_used: dict[bytes, float] = {}
        self._number = itertools.count()
        self._now = 0.0
        """Time of the name that had the last turn: no name that waits has had less."""
        self._most = REMEMBERED
        """Names after which those without a debt are forgotten."""

    def wait(self, name: bytes) -> None:
        """Add a name that does not wait yet."""
        turn = self._time_used[name] = max(self._time_used.get(name, 0.0), self._now)
        heappush(self.waiting, (turn, next(self._number), name))

    def take(self) -> bytes:
        """Remove the name that has used the least time, and return it."""
        self._now, _, name = heappop(self.waiting)
        return name

    def add_time(self, name: bytes, seconds: float) -> None:
        """Add time that a name has used; forget the time of names that neither wait nor have used much."""
        self._time_used[name] += seconds
        if len(self._time_used) > self._most:  # names that wait are kept: their time is never below ``_now``
            self._time_used = {name: time for name, time in self._time_used.items() if time >= self._now}
            self._most = REMEMBERED + 2 * len(self._time_used)


class Turns:
    """Messages that have come and are not handled yet.

    Args:
        key_digits: Length of the key at the beginning of each peer; 0 without keys.

    Example:
        >>> turns = Turns(key_digits=1)
        >>> for peer in (b"a1", b"a1", b"a2", b"b1"):
        ...     turns.put(peer, peer.decode(), num_bytes=100, most_bytes=8192)
        True
        True
        True
        True
        >>> turns.put(b"a1", "one more", num_bytes=3000, most_bytes=8192)
        False
        >>> order = []
        >>> while turns.waiting:
        ...     order.append(turns.take())
        ...     turns.give(0.001)
        >>> order
        ['a1', 'b1', 'a2', 'a1']
    """

    def __init__(self, key_digits: int) -> None:
        self._digits = key_digits
        self._keys = _Order()
        self._peers: dict[bytes, _Order] = {}
        """The connections that wait, by key; empty without keys, where each connection is a key of its own."""
        self._lines: dict[bytes, deque[tuple[Any, int]]] = {}
        """Messages of each connection that waits, and their bytes."""
        self._waiting: dict[bytes, int] = {}
        """Bytes of the messages that wait, by key."""
        self.num_bytes = 0
        """Bytes of all messages that wait."""
        self.waiting: Sequence[object] = self._keys.waiting
        """The keys that wait; empty once there is no turn to take."""
        self._turn = b"", b""
        """Key and connection of the message that was taken last."""

    def put(self, peer: bytes, message: Any, num_bytes: int, most_bytes: int, most_of_all: float = math.inf) -> bool:
        """Add a message of a connection; return False if it is dropped, because too many wait.

        Args:
            peer: The connection.
            message: The message.
            num_bytes: Bytes of its frames.
            most_bytes: Most bytes of messages of the key that wait, with ``MESSAGE_BYTES`` for each. A message that
                waits alone may be larger.
            most_of_all: Bytes of messages of all keys. While more wait, each key that waits may have an equal share of
                so many bytes.
        """
        key, size = peer[: self._digits] or peer, num_bytes + MESSAGE_BYTES
        waits = self._waiting.get(key, 0)
        if self.num_bytes + size > most_of_all:
            most_bytes = min(most_bytes, int(most_of_all / max(len(self._waiting), 1)))
        if waits and waits + size > most_bytes:
            return False
        self._count(key, size)
        if (line := self._lines.get(peer)) is not None:
            line.append((message, size))
            return True
        self._lines[peer] = deque([(message, size)])
        if not self._digits:
            self._keys.wait(peer)
            return True
        if key not in self._peers:
            self._peers[key] = _Order()
            self._keys.wait(key)
        self._peers[key].wait(peer)
        return True

    def take(self) -> Any:
        """Return the next message, None if it was dropped; then call ``give`` with the time that it took."""
        key = self._keys.take()
        peer = self._peers[key].take() if self._digits else key
        self._turn = key, peer
        line = self._lines[peer]
        if not line:
            return None
        message, size = line.popleft()
        self._count(key, -size)
        return message

    def give(self, seconds: float) -> None:
        """Count the time that the last message took for its connection and key, in seconds."""
        key, peer = self._turn
        self._keys.add_time(key, seconds)
        peer_waits = bool(self._lines[peer])
        if not peer_waits:
            del self._lines[peer]
        if self._digits:
            peers = self._peers[key]
            peers.add_time(peer, seconds)
            if peer_waits:
                peers.wait(peer)
            if not peers.waiting:
                del self._peers[key]
                return
        elif not peer_waits:
            return
        self._keys.wait(key)

    def drop(self, peer: bytes) -> None:
        """Drop the messages of a connection that was cut."""
        if (line := self._lines.get(peer)) is not None:
            self._count(peer[: self._digits] or peer, -sum(size for _, size in line))
            line.clear()

    def _count(self, key: bytes, num_bytes: int) -> None:
        """Add ``num_bytes`` to the bytes of a key's waiting messages; drop the entry at 0."""
        self.num_bytes += num_bytes
        waits = self._waiting.get(key, 0) + num_bytes
        if waits:
            self._waiting[key] = waits
        else:
            self._waiting.pop(key, None)
