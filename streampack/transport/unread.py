"""Unread bytes: bytes that ZeroMQ has read from TCP connections and this process has not taken yet.

ZeroMQ reads ahead of the process. With a receive high-water mark it stops reading a connection. A connection that
breaks in that state can abort the whole process (libzmq 4.3.5, ``stream_engine_base.cpp``: ``!_io_error``). So sockets
have no high-water mark, and this module bounds what is read ahead instead. The kernel counts the bytes of each
connection that were read (``tcp_info``, tcp(7)); the socket's thread counts those that it takes; the difference is
unread. A connection whose peer has sent no valid message yet is a *stranger*.

A connection is cut where its peer sends more than a peer of streampack does:

- Strangers have more than ``STRANGERS_BYTES`` unread together: the largest.
- All connections have more than ``limit`` unread together: the largest of the key that has most.
- A key has more than ``AHEAD_BYTES`` and its credit unread, and for ``UNDRAINED_S`` more came than was taken, or
  messages that came were dropped: all of its connections with much unread.
- The process's memory grows by more than what is unread and what the owner of the socket holds: the largest. One-byte
  frames take 20 to 50 times their bytes of memory.
- ``MAX_DAMAGED`` of its messages could not be decoded.
- ``MAX_DROPPED`` of its messages, or of the answers to it, were dropped in ``DROPPED_S``, because too many of them
  wait.

New connections are let in by ``admissions``: a few, until all that they sent was taken. The module knows file
descriptors and bytes, but no messages. Only the socket's thread uses it.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import functools
import os
import socket
import struct
import termios
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

STRANGERS_BYTES = 256 << 10
MAX_DAMAGED = 16
AHEAD_BYTES = 4 << 20
UNDRAINED_S, UNDRAINED_LOOKS = 0.3, 8
"""Seconds, and looks in this time, for which a socket always has messages before connections are cut for that."""
MAX_DROPPED, DROPPED_S = 1000, 1.0
"""Messages of a connection, or answers to it, that may be dropped in so many seconds. Peers repeat a message after a
second, so only one that does not wait for answers has more."""
MESSAGES_WAIT = "of its messages were dropped in a second, because too many messages of its key wait"
ANSWERS_WAIT = "answers to it were dropped in a second, because connections of its key do not read theirs"
COMMANDS_A_SECOND = 64
"""Bytes of heartbeats on a connection per second. ZeroMQ answers heartbeats itself, and never passes them on."""
HANDSHAKE_BYTES = 2048
LEAST_BLAMED = 64 << 10
"""A connection with fewer unread bytes is not blamed for the process's memory."""
MEMORY_SLACK = 32 << 20
"""Bytes by which memory may grow for unknown reasons before connections are cut."""
ADMITTED = 64
"""Connections to accept before the socket has to be drained again."""
ADMIT_S = 1.0
"""Seconds between accepted connections on a socket that is never drained, while memory allows them."""
SWEEP_S = 0.01
SWEEPS_SHARE = 0.02
"""Sweeps take at most this share of the thread's time, unless memory grows."""
LEFT_BYTES = 224 << 20
"""Bytes that ended connections may still occupy. No open connection is cut for these bytes."""
GROWN_BYTES = 8 << 20
"""Growth of memory after which a sweep does not wait for its time."""
_BYTES_ACKED, _BYTES_RECEIVED = 120, 128
"""Offsets of ``tcpi_bytes_acked`` and ``tcpi_bytes_received``, uint64, in ``struct tcp_info`` (Linux 4.1 and later)."""
_SO_COOKIE = 57
"""Gives a number that no other socket of this host has, uint64 (Linux 4.12 and later); not among Python's names."""
_UNSPEC = struct.pack("H14x", socket.AF_UNSPEC)
_PAGE = os.sysconf("SC_PAGE_SIZE")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class CutConnection:
    """A connection that was cut; ``peer`` is empty if the peer had sent no message."""

    address: str
    peer: bytes
    why: str


class Connection:
    """One accepted connection, known by ZeroMQ's file descriptor ``fd``, which only ZeroMQ closes."""

    def __init__(self, fd: int, now: float) -> None:
        self.fd = fd
        self.peer = b""
        self.taken = self.sent = 0
        """Bytes of messages that this process has taken from the connection, and queued for it."""
        self.unread = 0
        self.messages = 0
        self.damaged = 0
        self.dropped = Counter[str]()
        """Messages that were dropped since ``dropped_since``, by the reason."""
        self.dropped_since = now
        self.is_cut = False
        self.lacks_answer = False
        """True after an answer was dropped, until the connections of the key have read much of what waits for them."""
        self._cookie = _cookie_of(fd)
        self._since = now

    @property
    def is_stranger(self) -> bool:
        """True if the peer has sent no valid message."""
        return self.messages == self.damaged

    def look(self, now: float) -> None:
        """Measure the unread bytes of the connection; ``now`` is in seconds, monotonic."""
        allowance = self.taken + HANDSHAKE_BYTES + COMMANDS_A_SECOND * int(now - self._since)
        self.unread = max(bytes_read(self.fd) - allowance, 0)

    @property
    def unsent(self) -> int:
        """Bytes that were queued for the peer, and that its kernel has not received; 0 if the connection has ended."""
        received = _counter(self.fd, _BYTES_ACKED)
        if received is None or self.is_cut or _cookie_of(self.fd) != self._cookie:
            return 0
        return max(self.sent - received, 0)

    def cut(self) -> str:
        """End the connection, and drop what the kernel has received of it.

        Connecting to no address does both (connect(2), ``AF_UNSPEC``); a shutdown would leave ZeroMQ megabytes to read.
        ZeroMQ may close ``fd`` at any moment, and another connection may get the same number. A duplicate of ``fd``
        stays with one socket, so its cookie is checked and the socket is ended without such a race.

        Returns:
            The peer's address; empty if the connection had already ended.
        """
        self.is_cut = True
        if not self._cookie:
            return ""
        same, nothing = _spare_descriptors()
        try:
            os.dup2(self.fd, same)
            if _cookie_of(same) != self._cookie:
                return ""
            borrowed = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=same)
            try:
                host, port, *_ = borrowed.getpeername()
            finally:
                borrowed.detach()
            _libc.connect(same, _UNSPEC, len(_UNSPEC))
        except OSError:
            return ""
        finally:
            os.dup2(nothing, same)
        return f"{str(host).removeprefix('::ffff:')}:{port}"


@functools.cache
def _opened_by(pid: int) -> tuple[int, int, int]:
    """Return descriptors of /dev/null, of a copy of it, and of the memory figures of process ``pid``.

    They stay open, because connections may take all others.
    """
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    return os.dup(nothing), nothing, os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)


def _spare_descriptors() -> tuple[int, int]:
    """Return a descriptor to replace for a moment, and one of /dev/null to put in its place."""
    return _opened_by(os.getpid())[:2]


def _option(fd: int, level: int, name: int, size: int) -> bytes:
    """Return a socket's option (getsockopt(2)); empty if there is none."""
    value, length = ctypes.create_string_buffer(size), ctypes.c_uint32(size)
    if _libc.getsockopt(fd, level, name, value, ctypes.byref(length)):
        return b""
    return value.raw[: length.value]


def _cookie_of(fd: int) -> bytes:
    """Return the kernel's number of a socket, which no other socket has; empty if ``fd`` is not a socket."""
    return _option(fd, socket.SOL_SOCKET, _SO_COOKIE, 8)


def _counter(fd: int, offset: int) -> int | None:
    """Return a counter of ``struct tcp_info``; None if the kernel does not say."""
    info = _option(fd, socket.IPPROTO_TCP, socket.TCP_INFO, offset + 8)
    return int(struct.unpack_from("Q", info, offset)[0]) if len(info) >= offset + 8 else None


def bytes_read(fd: int) -> int:
    """Return the bytes read from a TCP connection since it began; 0 if the kernel does not say."""
    waiting = array.array("i", [0])
    try:
        fcntl.ioctl(fd, termios.FIONREAD, waiting)
    except OSError:
        return 0
    return max((_counter(fd, _BYTES_RECEIVED) or 0) - waiting[0], 0)


class Unread:
    """The TCP connections of one bound socket.

    Args:
        limit: Limit of the unread bytes of all connections together.
        strangers: Limit of the unread bytes of all new connections together, before their first valid message.
        known_bytes: Returns the bytes of memory that the process uses for other data.
        slack: Bytes of memory that the process may use in addition.
        most_strangers: Most connections of strangers; beyond it the oldest are cut.
        most_unsent: Most bytes that wait to be sent to the connections of a key, or without keys to one connection.
        credit: Returns the bytes that the peers of a key, or without keys a peer, may send ahead.
    """

    def __init__(
        self, limit: int, strangers: int = STRANGERS_BYTES, known_bytes: Callable[[], int] = lambda: 0, slack: int = 0,
        most_strangers: int = 1 << 20, most_unsent: int = 1 << 40,
        credit: Callable[[bytes], int] = lambda _: 1 << 40,
    ) -> None:  # fmt: skip
        _opened_by(os.getpid())
        self.key_digits = 0
        """Length of the key at the beginning of each peer; 0 without keys."""
        self._most_unsent, self._credit = most_unsent, credit
        self._undrained_since, self._undrained_looks = 0.0, 0
        self._overflowed = False
        """Messages that came were dropped since the socket was drained, because too many of a key wait."""
        self._unsent: dict[bytes, int] = {}
        """Bytes that wait to be sent at most, by key: those measured last, and those queued since."""
        self._most_strangers = most_strangers
        self._limit, self._strangers, self._known_bytes = limit, strangers, known_bytes
        self._slack = slack + MEMORY_SLACK
        self._by_fd: dict[int, Connection] = {}
        self._by_peer: dict[bytes, Connection] = {}
        self._cut_peers: set[bytes] = set()
        """Peers whose messages are dropped until the socket is drained."""
        self._ended: set[bytes] = set()
        """Peers whose connections have ended since the socket was drained, and may have left messages."""
        self._cuts: list[CutConnection] = []
        self._drained = self._swept_empty = True
        """True if the socket was drained since connections were admitted, and since the last sweep."""
        self._memory_over = False
        self._resident = self._floor = 0
        """Memory, and memory beside ``known_bytes`` when nothing was unread; 0 before the first sweep."""
        self._blamed = 0
        self._look_at = self._sweep_at = self._refilled_at = 0.0
        self._admissions = ADMITTED

    @property
    def connections(self) -> Collection[Connection]:
        """Accepted connections that have not ended."""
        return self._by_fd.values()

    def opened(self, fd: int) -> None:
        """Add the accepted connection with file descriptor ``fd``."""
        self.closed(fd)
        self._by_fd[fd] = Connection(fd, time.monotonic())

    def closed(self, fd: int) -> None:
        """Remove the ended connection with file descriptor ``fd``."""
        connection = self._by_fd.pop(fd, None)
        if connection is not None:
            self._by_peer.pop(connection.peer, None)
            self._unsent.pop(connection.peer, None)
            self._ended.add(connection.peer)

    def connection_of(self, peer: bytes) -> Connection | None:
        """Return the connection of a peer; None if it is unknown."""
        return self._by_peer.get(peer)

    def add_peer(self, peer: bytes, fd: int) -> Connection | None:
        """Record that ``peer`` sent its first message on connection ``fd``; return the connection, None if it ended.

        A message may be left of a connection that has ended, and a newer connection may have its ``fd``. If such a
        message of an unknown peer comes first, the connection counts as this peer's until its own peer's next message.
        """
        connection = self._by_fd.get(fd)
        if connection is None or peer in self._ended:
            return None
        self._by_peer.pop(connection.peer, None)
        self._unsent.pop(connection.peer, None)
        connection.peer = peer
        self._by_peer[peer] = connection
        return connection

    def may_send(self, peer: bytes, num_bytes: int) -> bool:
        """Count a message that is queued for a peer; return False if it is to be dropped instead.

        It is dropped if too much waits for the connections of the peer's key. If nothing waits, any message is queued.
        """
        to, key = self._by_peer.get(peer), self._key_of(peer)
        if to is None:
            return True
        waits = self._unsent.get(key, 0)
        if waits and waits + num_bytes > self._most_unsent:
            waits = self._measure_unsent(key)
            if waits and waits + num_bytes > self._most_unsent:
                to.lacks_answer = True
                self.note_dropped(peer, 1, ANSWERS_WAIT)
                return False
        to.sent += num_bytes
        self._unsent[key] = waits + num_bytes
        return True

    def not_queued(self, peer: bytes, num_bytes: int) -> None:
        """Take back a message that ``may_send`` has counted, because ZeroMQ did not queue it."""
        if (to := self._by_peer.get(peer)) is not None:
            to.sent -= num_bytes
            self._unsent[self._key_of(peer)] -= num_bytes

    def takes_answers(self, peer: bytes) -> bool:
        """Return False if a connection has ended, or lacks an answer while much waits for the key's connections."""
        to = self._by_peer.get(peer)
        if to is None:
            return False
        if to.lacks_answer:
            to.lacks_answer = self._measure_unsent(self._key_of(peer)) > self._most_unsent // 2
        return not to.lacks_answer

    def _measure_unsent(self, key: bytes) -> int:
        """Return the bytes that wait to be sent to the connections of a key, and remember them."""
        self._unsent[key] = sum(conn.unsent for conn in self._by_peer.values() if conn.peer.startswith(key))
        return self._unsent[key]

    def note_damaged(self, peer: bytes) -> None:
        """Count a message of this peer that could not be decoded; cut the connection at the limit."""
        connection = self._by_peer.get(peer)
        if connection is not None:
            connection.damaged += 1
            if connection.damaged == MAX_DAMAGED:
                self._cut(connection, f"{MAX_DAMAGED} of the peer's messages could not be decoded")

    def note_dropped(self, peer: bytes, count: int, why: str) -> None:
        """Count messages of this peer, or answers to it, that were dropped; cut the connection at the limit."""
        if (connection := self._by_peer.get(peer)) is None or connection.is_cut:
            return
        self._overflowed |= why == MESSAGES_WAIT
        if (now := time.monotonic()) > connection.dropped_since + DROPPED_S:
            connection.dropped_since = now
            connection.dropped.clear()
        connection.dropped[why] += count
        if connection.dropped[why] >= MAX_DROPPED:
            self._cut(connection, f"{connection.dropped[why]} {why}")

    def drained(self) -> None:
        """Reset the state that lasts until the socket is drained; call this when ZeroMQ has no message left."""
        self._drained = self._swept_empty = True
        self._undrained_looks = 0
        self._overflowed = False
        self._ended.clear()
        self._cut_peers.clear()

    def was_cut(self, peer: bytes) -> bool:
        """Return True if the peer was cut, so that its remaining messages are dropped."""
        return peer in self._cut_peers

    def admissions(self) -> int:
        """Return how many connections may be accepted now; report accepted ones with ``admitted``."""
        now = time.monotonic()
        if self._drained or (now - self._refilled_at >= ADMIT_S and not self._memory_over):
            self._drained, self._refilled_at, self._admissions = False, now, ADMITTED
        return self._admissions

    def admitted(self, count: int) -> None:
        """Note that ``count`` connections were accepted."""
        self._admissions -= count

    def cut_key(self, key: bytes) -> None:
        """Cut the connections of a key that was revoked, and those whose peer has sent nothing: their key is unknown.

        A peer of another key that has sent nothing connects again by itself.
        """
        for conn in list(self._by_fd.values()):
            if not conn.peer or conn.peer.startswith(key):
                self._cut(conn, "its key was revoked" if conn.peer else "it had sent nothing when a key was revoked")

    def take_cuts(self) -> list[CutConnection]:
        """Return the connections cut since the last call."""
        cuts, self._cuts = self._cuts, []
        return cuts

    def cut_surplus(self) -> None:
        """Cut the oldest connections of strangers beyond their number, so that others find a free descriptor."""
        if len(self._by_fd) <= self._most_strangers:
            return
        strangers = [conn for conn in self._by_fd.values() if conn.is_stranger and not conn.is_cut]
        surplus = strangers[: max(len(strangers) - self._most_strangers, 0)]
        addresses = [address for conn in surplus if (address := conn.cut())]
        if addresses:
            why = (
                f"it and {len(addresses) - 1} others had sent no message, and more than {self._most_strangers} such "
                f"connections were open"
            )
            self._cuts.append(CutConnection(addresses[0], b"", why))

    def check(self) -> None:
        """Cut connections with too many unread bytes. Cheap; call it often."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + SWEEP_S
        if not self._undrained_looks:
            self._undrained_since = now
        self._undrained_looks += 1
        resident = resident_bytes()
        if now < self._sweep_at and resident < self._resident + GROWN_BYTES:
            return
        self._resident = resident
        self._sweep(now, resident)
        spent = time.monotonic() - now
        self._sweep_at = now + max(SWEEP_S, spent / SWEEPS_SHARE)

    def _sweep(self, now: float, resident: int) -> None:
        """Measure all connections, and cut those that are over a limit; ``resident``: memory of the process, bytes."""
        for conn in self._by_fd.values():
            conn.look(now)
        by_size = self._by_size()
        of_all = sum(conn.unread for conn in by_size)
        of_strangers = sum(conn.unread for conn in by_size if conn.is_stranger)
        for conn in by_size:
            if conn.is_stranger and of_strangers > self._strangers:
                self._cut(conn, f"the peer sent {conn.unread} bytes, but no message that could be decoded")
            elif of_all > self._limit:
                self._cut(conn, f"{conn.unread} unread bytes from the peer are more than any peer may send ahead")
            else:
                continue
            of_strangers -= conn.unread if conn.is_stranger else 0
            of_all -= conn.unread
        undrained = self._undrained_looks > UNDRAINED_LOOKS and now > self._undrained_since + UNDRAINED_S
        if undrained or self._overflowed:
            self._cut_fastest([conn for conn in by_size if not conn.is_cut])
        beside, room = resident - self._known_bytes(), of_all + self._slack
        if not self._floor or (self._swept_empty and of_all < LEAST_BLAMED):
            self._floor = beside
        self._swept_empty = False
        self._memory_over = beside > self._floor + room
        room += LEFT_BYTES if self._ended else 0  # messages of connections that have ended are soon taken
        blame = beside > max(self._floor, self._blamed) + room
        if blame and by_size and by_size[0].unread >= LEAST_BLAMED:
            self._blamed = beside
            self._cut(
                by_size[0], f"{by_size[0].unread} unread bytes from the peer, in tiny frames, take too much memory"
            )

    def _cut_fastest(self, connections: list[Connection]) -> None:
        """Cut the connections of the key that has most unread beyond its credit, if this is more than it may send."""
        unread = Counter[bytes]()
        for conn in connections:
            unread[self._key_of(conn.peer)] += conn.unread
        beyond = {key: size - self._credit(key) for key, size in unread.items() if size > AHEAD_BYTES}
        key = max(beyond, key=lambda key: beyond[key], default=b"")
        if beyond.get(key, 0) <= AHEAD_BYTES:
            return
        for conn in connections:
            if conn.unread >= LEAST_BLAMED and self._key_of(conn.peer) == key:
                self._cut(
                    conn, f"the connections of its key have sent {unread[key]} bytes faster than the broker reads"
                )

    def _by_size(self) -> list[Connection]:
        """Return the connections: the largest of the key with the most unread bytes first."""
        unread = Counter[bytes]()
        for conn in self._by_fd.values():
            unread[self._key_of(conn.peer)] += conn.unread
        return sorted(
            self._by_fd.values(), key=lambda conn: (unread[self._key_of(conn.peer)], conn.unread), reverse=True
        )

    def _key_of(self, peer: bytes) -> bytes:
        """Return the key of a peer, without keys the peer itself."""
        return peer[: self.key_digits] if self.key_digits else peer

    def _cut(self, connection: Connection, why: str) -> None:
        """Cut a connection, and record it for ``take_cuts`` unless it had ended already."""
        if address := connection.cut():
            self._cut_peers.add(connection.peer)
            self._cuts.append(CutConnection(address, connection.peer, why))


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes (proc(5), ``statm``)."""
    return int(os.pread(_opened_by(os.getpid())[2], 256, 0).split()[1]) * _PAGE


def frame_bytes(size: int, secured: bool) -> int:
    """Return the bytes that a frame of ``size`` bytes takes on a connection; ``secured`` is True with keys.

    See RFC 37 (ZMTP) and RFC 26 (CurveZMQ).
    """
    size += 33 if secured else 0
    return size + (2 if size < 256 else 9)
