"""The ZeroMQ sockets: a ``Router``, which many ``Dealer``s connect to, and a ``Poller``.

Each socket is used by one thread and never blocks. It does not promise that a message arrives. A full queue, a peer
that is gone or a broker that restarts lose messages, and the state machines ask again. The sockets handle three things
that ZeroMQ does not. An address that another process serves is rejected (``ipc://`` would be stolen silently). Sockets
inherited through a fork raise an error (they would swallow messages). Sockets do not linger at exit.

With keys, the peer's public key stands before its id in a received message. On ``ipc://`` large frames go through
shared memory (``links``).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import numpy as np
import zmq
from numpy.typing import NDArray
from zmq.utils.monitor import recv_monitor_message

from streampack.core.protocol.rights import KEY_DIGITS
from streampack.errors import PeerError, Rejected, UserError
from streampack.transport import ipc_files, shared_memory
from streampack.transport.curve import Door, Gate, HandshakeMonitor, prepend_key, show_key
from streampack.transport.endpoints import (
    QUICK_HEARTBEAT_MS,
    QUICK_HEARTBEAT_TIMEOUT_MS,
    Addresses,
    check_endpoint,
    split_endpoints,
)
from streampack.transport.keys import Key
from streampack.transport.links import Links
from streampack.transport.slots import FEW_SLOTS, NUM_SLOTS
from streampack.transport.unread import Connection, CutConnection, Unread, frame_bytes
from streampack.transport.waker import Waker

log = logging.getLogger("streampack.transport")

HEARTBEAT_MS = 5000
HEARTBEAT_TIMEOUT_MS = 15_000
HANDSHAKE_MS = 5000
_MAPPED = re.compile(r"\[::ffff:([0-9.]+)\]")
"""ZeroMQ's form of an IPv4 address that is served through IPv6; hosts without IPv6 cannot connect to this form."""
CONNECT_MS = 200
"""Milliseconds that a new socket waits for its connection; on one machine it takes less than one."""
BACKLOG = 4096
"""Peers that may connect at the same moment; more of them try again after some time."""
HIGH_WATER = 1000
"""The most messages that wait to be sent to a peer; credits and prefetching keep queues far below it."""
MOST_FRAMES = 64
"""The most frames of a message; frames beyond are dropped unread, and the message is rejected."""
AT_ONCE = 256
"""The most dropped frames or messages about shared memory that one ``receive`` handles before it returns.

A peer may send any number of them.
"""
LOOK_S = 0.02
"""Seconds between two looks at the connections of a router when no message comes."""
SAY_S = 2.0
"""Seconds between two announcements of a dealer that it knows shared memory, since the router may have restarted."""
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)  # an int: flags of zmq are slow to combine


def _configure(sock: zmq.Socket[bytes], max_message_bytes: int) -> None:
    """Set the options that all sockets share."""
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, HIGH_WATER)
    sock.setsockopt(zmq.RCVHWM, 0)  # ``unread`` says why
    sock.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    sock.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    sock.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)
    sock.setsockopt(zmq.IPV6, 1)


class _Socket:
    """Base of ``Router`` and ``Dealer``; made, used and closed by one thread of one process."""

    def __init__(self, kind: int, max_message_bytes: int) -> None:
        self._pid = os.getpid()
        self._context = zmq.Context()
        self._kind, self._max_message_bytes = kind, max_message_bytes
        self.raw = self._new_raw()
        self.dropped = 0
        """Number of messages that could not be queued and were dropped."""
        self._gate: Gate | None = None
        self._links: Links | None = None
        """Shared memory with peers; None where it is not used."""
        self._surplus = False
        """True if the last message had too many frames, and some of them are still to be dropped."""
        self._unread: Unread | None = None
        """Bounds the bytes that are read ahead; None: not bounded."""
        self._taking: Connection | None = None
        """The connection of the last message."""

    def _new_raw(self) -> zmq.Socket[bytes]:
        """Return a new ZeroMQ socket, which is not bound or connected yet."""
        raw: zmq.Socket[bytes] = self._context.socket(self._kind)
        _configure(raw, self._max_message_bytes)
        return raw

    def receive(self) -> list[Any] | None:
        """Return the frames of the next message as buffers, or None if there is none now.

        The method also returns None after ``AT_ONCE`` messages that are not for the caller. A message of too many
        frames is cut to ``MOST_FRAMES`` + 1 frames, so that it cannot be decoded.
        """
        for _ in range(AT_ONCE):
            try:
                if self._surplus and not self._drop_surplus():
                    return None
                frames = self._next_frames()
            except zmq.Again:
                if self._unread is not None:
                    self._unread.drained()
                if self._links is not None:
                    self._links.send_news()
                return None
            if self._key_digits and not prepend_key(frames):
                continue
            if self._unread is not None:
                self._count_message(self._unread, frames)
                if self._unread.was_cut(frames[0].bytes):
                    continue
            if self._links is None:
                return frames
            at = self._peer_frames
            whole = self._links.receive(frames[0].bytes if at else b"", frames[at:])
            if whole is not None:
                return [*frames[:at], *whole]
        return None

    def _next_frames(self) -> list[Any]:
        """Return the frames of the next message, at most ``MOST_FRAMES`` + 1. Raises zmq.Again if no message came."""
        frame = self.raw.recv(zmq.NOBLOCK, copy=False)
        frames = [frame]
        while frame.more and len(frames) <= MOST_FRAMES:  # ZeroMQ hands over whole messages: no frame is missing
            frame = self.raw.recv(zmq.NOBLOCK, copy=False)
            frames.append(frame)
        self._surplus = frame.more
        return frames

    def _count_message(self, unread: Unread, frames: list[Any]) -> None:
        """Count a received message and its bytes for its connection."""
        peer = frames[0].bytes
        self._taking = unread.connection_of(peer) or unread.add_peer(peer, frames[1].get(zmq.SRCFD))
        if self._taking is not None:
            self._taking.messages += 1
            self._taking.taken += self._num_bytes(frames[1:])

    def _num_bytes(self, frames: Sequence[Any]) -> int:
        """Return the bytes that a message's frames take on a connection."""
        total, secured = 0, self._key_digits > 0
        for frame in frames:
            total += frame_bytes(memoryview(frame).nbytes, secured)
        return total

    def _drop_surplus(self) -> bool:
        """Drop the surplus frames of a message; return True after the last frame. Raises zmq.Again if no frame came."""
        for _ in range(AT_ONCE):
            frame = self.raw.recv(zmq.NOBLOCK, copy=False)
            if self._taking is not None:
                self._taking.taken += frame_bytes(len(frame), self._key_digits > 0)
            self._surplus = frame.more
            if not self._surplus:
                return True
        return False

    _peer_frames = 0
    """Number of frames before the message's own, which identify the peer."""
    _key_digits = 0
    """Length of the peer's key, which stands before its ZeroMQ id; 0 without keys."""

    def _raw_send(self, peer: bytes, frames: Sequence[Any]) -> bool:
        """Queue frames for a peer on the socket; return False if they were dropped. Forget the link of a lost peer."""
        try:
            send = self.raw.send
            if self._peer_frames:
                send(peer[self._key_digits :], _MORE, copy=False)
            for frame in frames[:-1]:
                send(frame, _MORE, copy=False)
            send(frames[-1], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH and self._links is not None:
                self._links.forget(peer)
            return False
        return True

    def _send(self, peer: bytes, frames: Sequence[Any]) -> bool:
        """Queue a message for a peer, through shared memory if linked; if it is dropped, count it and return False."""
        self._check_pid()
        sent = self._raw_send(peer, frames) if self._links is None else self._links.send(peer, frames)
        self.dropped += not sent
        return sent

    def _check_pid(self) -> None:
        """Raise PeerError if this process inherited the socket through a fork."""
        if os.getpid() != self._pid:
            raise PeerError(
                "got a socket of the parent process, expected a socket made after the fork. Connect in the child "
                "process"
            )

    def close(self) -> None:
        """Close the socket, and drop messages still queued. Idempotent."""
        if os.getpid() == self._pid and not self.raw.closed:
            self.raw.close()
            if self._gate is not None:
                self._gate.close()
            self._context.term()
            if self._links is not None:
                self._links.close()


class Router(_Socket):
    """A bound socket for many peers. The frame before each message is the peer's id, which ZeroMQ assigns.

    With a ``door`` the id begins with the peer's public key.

    Args:
        endpoint: The address to listen on, ``tcp://`` or ``ipc://``.
        max_message_bytes: The most bytes of a frame; a connection that sends a larger one ends.
        door: The keys that are admitted; None admits all peers, without a key.
        unread: Bounds the bytes that are read ahead of this process. It is not used on ``ipc://``, where only the
            same user can connect.
        linger_ms: Milliseconds that messages may still be sent after the socket is closed.

    Raises:
        UserError: The address cannot be used, e.g. because another process serves it.
    """

    def __init__(
        self, endpoint: str, max_message_bytes: int, door: Door | None = None, unread: Unread | None = None,
        linger_ms: int = 0,
    ) -> None:  # fmt: skip
        check_endpoint(endpoint)
        self._lock: TextIO | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        if endpoint.startswith("ipc://"):
            self._lock = ipc_files.lock(endpoint)
        if self._lock is None:  # on ipc:// peers are of the same user, and the process may be a trainer's own
            _randomize_ids()
        super().__init__(zmq.ROUTER, max_message_bytes)
        self.raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.raw.setsockopt(zmq.LINGER, linger_ms)
        self._links = Links(self._raw_send, NUM_SLOTS) if self._lock is not None else None
        self.raw.setsockopt(zmq.BACKLOG, BACKLOG)
        if unread is not None and self._lock is None:
            self._unread, self._monitor = unread, _monitored(self._context, self.raw)
        if door is not None or self._unread is not None:
            self._gate = Gate(self._context, self.raw, door)
        self._key_digits = KEY_DIGITS if door is not None else 0
        if unread is not None:
            unread.key_digits = self._key_digits
        try:
            with ipc_files.private_files():
                self.raw.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            problem = "an address in use" if error.errno == zmq.EADDRINUSE else f"{error.strerror or error}".lower()
            if error.errno in (zmq.EADDRNOTAVAIL, errno.ENODEV):
                raise UserError(
                    f"cannot listen on {endpoint}: got an address of no interface of this machine, expected one of "
                    f"its own addresses. Use 0.0.0.0 for all of them, as in tcp://0.0.0.0:7401"
                ) from None
            raise UserError(
                f"cannot listen on {endpoint}: got {problem}, expected a free address. Stop the other process, or "
                f"choose another address"
            ) from None
        self.endpoint = _MAPPED.sub(r"\1", self.raw.getsockopt_string(zmq.LAST_ENDPOINT))

    _peer_frames = 1

    def share(self, peer: bytes, group: bytes) -> bool:
        """Put a peer into a group of peers that get the same frames, through one copy in shared memory.

        A frame is copied once as long as a peer of the group holds it. The frame must be the same memory in each
        ``send``, and read-only. The router cannot see changes to memory that may be written to, and copies such a frame
        each time. The router keeps the frame until all peers have given it back.

        A peer that was in another group leaves it. Call this again for a peer that has connected again, as it has a new
        id. Returns False if the peer has not announced that it knows shared memory, or cannot read it. It then gets the
        same messages, without the group.
        """
        return self._links is not None and self._links.share(peer, group)

    def room(self, peer: bytes, num_bytes: int) -> NDArray[np.uint8] | None:
        """Return memory that the peer can read, uint8 [num_bytes], for a frame of the next message to the peer.

        A frame in this memory is not copied again. None if there is no shared memory, or none is free, or the peer is
        in a group.
        """
        return self._links.room(peer, num_bytes) if self._links is not None else None

    def send(self, peer: bytes, frames: Sequence[Any]) -> bool:
        """Queue a message for a peer; return False if it was dropped instead.

        A message is dropped, too, while its peer or others of the same key do not read what waits for them.
        """
        if self._unread is None:
            return self._send(peer, frames)
        num_bytes = self._num_bytes(frames)
        if not self._unread.may_send(peer, num_bytes):
            self.dropped += 1
            return False
        if not (sent := self._send(peer, frames)):
            self._unread.not_queued(peer, num_bytes)
        return sent

    def admit(self) -> None:
        """Admit waiting peers, and check the connections of admitted peers."""
        if self._unread is None or self._monitor is None:
            if self._gate is not None:
                self._gate.answer()
            return
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._unread.opened(int(event["value"]))
            else:
                self._unread.closed(int(event["value"]))
        self._unread.cut_surplus()
        if self._gate is not None and (at_most := self._unread.admissions()):
            self._unread.admitted(self._gate.answer(at_most))
        self._unread.check()

    def note_damaged(self, peer: bytes) -> None:
        """Count a message of this peer that could not be decoded."""
        if self._unread is not None:
            self._unread.note_damaged(peer)

    def note_dropped(self, peer: bytes, count: int, why: str) -> None:
        """Count messages of this peer that the caller has dropped; ``why`` is a reason of ``unread``."""
        if self._unread is not None:
            self._unread.note_dropped(peer, count, why)

    def takes_answers(self, peer: bytes) -> bool:
        """Return False while a peer, or others of its key, do not read the answers that wait for them."""
        return self._unread is None or self._unread.takes_answers(peer)

    def cut_key(self, key: bytes) -> None:
        """Cut the connections of a key that was revoked. On ``ipc://`` they stay, and their messages are rejected."""
        if self._unread is not None:
            self._unread.cut_key(key)

    def take_cuts(self) -> list[CutConnection]:
        """Return the connections that were cut since the last call."""
        return self._unread.take_cuts() if self._unread is not None else []

    @property
    def wake_s(self) -> float:
        """The most seconds between two calls of ``admit``."""
        return LOOK_S if self._unread is not None and self._unread.connections else math.inf

    def close(self) -> None:
        if os.getpid() == self._pid and self._monitor is not None and not self._monitor.closed:
            self.raw.disable_monitor()
            self._monitor.close()
        super().close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None


class Dealer(_Socket):
    """A socket connected to one router. It reconnects forever, and drops messages that it cannot send.

    If it has several addresses, it is connected to one at a time, and moves to the next one while that does not answer
    (``endpoints``). Each address gets a ZeroMQ socket of its own, so nothing is read from an address that was left.

    Args:
        endpoint: The router's address, or several addresses of a broker and its standby, separated by commas.
        max_message_bytes: The most bytes of a frame.
        linger_ms: Milliseconds that messages may still be sent after the socket is closed.
        key: The key that authenticates this process; None for no key.

    Attributes:
        endpoint: The address that the socket is connected to, or tries.

    Raises:
        UserError: An address cannot be connected to.
    """

    def __init__(self, endpoint: str, max_message_bytes: int, linger_ms: int = 0, key: Key | None = None) -> None:
        self._addresses = Addresses(split_endpoints(endpoint), time.monotonic())
        self._key, self._linger_ms = key, linger_ms
        super().__init__(zmq.DEALER, max_message_bytes)
        self._came = False
        self._check_others()
        self._connect()
        # Messages sent before there is a connection are dropped, and repeated only much later.
        self.raw.poll(CONNECT_MS, zmq.POLLOUT)

    @property
    def endpoint(self) -> str:
        """The address that the socket is connected to, or tries."""
        return self._addresses.current

    def _check_others(self) -> None:
        """Raise UserError if ZeroMQ does not take one of the later addresses, which are not used until much later."""
        for endpoint in self._addresses.given[1:]:
            raw = self._new_raw()
            try:
                _connect(raw, endpoint)
            except UserError:
                self.raw.close()
                self._context.destroy(0)
                raise
            finally:
                raw.close()

    def _connect(self) -> None:
        """Connect the new ZeroMQ socket to the present address."""
        self._watch = HandshakeMonitor(self.raw, "" if self._key is None else self._key.name, self._on_event)
        if self._key is not None:
            show_key(self.raw, self._key.secret, self._key.broker)
        self.raw.setsockopt(zmq.IMMEDIATE, 1)
        if self._addresses.several:
            self.raw.setsockopt(zmq.HEARTBEAT_IVL, QUICK_HEARTBEAT_MS)
            self.raw.setsockopt(zmq.HEARTBEAT_TIMEOUT, QUICK_HEARTBEAT_TIMEOUT_MS)
        self._links = Links(self._raw_send, FEW_SLOTS, [b""]) if self.endpoint.startswith("ipc://") else None
        self._said_at = -SAY_S
        self.raw.setsockopt(zmq.LINGER, self._linger_ms)
        try:
            _connect(self.raw, self.endpoint)
        except UserError:
            self.close()
            raise

    def receive(self) -> list[Any] | None:
        frames = super().receive()
        if frames is not None and self._addresses.several:
            self._addresses.heard(time.monotonic())
        return frames

    def send(self, frames: Sequence[Any]) -> bool:
        """Queue a message; return False if it was dropped instead."""
        if self._links is not None and time.monotonic() - self._said_at > SAY_S:
            self._said_at = time.monotonic()
            self._raw_send(b"", [shared_memory.SPEAKS])
        return self._send(b"", frames)

    def check(self, hangs: bool = False) -> bool:
        """Notice a refusal, and move to another address if that is due; call it a few times a second.

        Returns True once after the first connection at another address. ``hangs``: the broker owes an answer for so
        long that another address should be tried. Raises Rejected if the broker does not admit this process.
        """
        if why := self._watch.refusal(self.endpoint):
            raise Rejected("key", f"{self.endpoint}: {why}")
        has_moved, self._came = self._came, False
        if has_moved and self.endpoint != self._addresses.settled:
            log.info("connected to %s, as %s does not answer", self.endpoint, self._addresses.settled)
            self._addresses.settled = self.endpoint
        now = time.monotonic()
        if hangs:
            self._addresses.hangs(now)
        if self._addresses.is_move_due(now):
            self._move()
        return has_moved

    def leave(self) -> None:
        """Move to the next address at the next ``check``: the broker at this address is not the newest."""
        self._addresses.leave()

    @property
    def may_move(self) -> bool:
        """True if there are several addresses."""
        return self._addresses.several

    @property
    def seeks(self) -> str:
        """End of a sentence that names the addresses tried in turn; empty with one address, or while connected."""
        tried = self._addresses
        return "" if tried.connected or not tried.several else f"; no connection to {' or '.join(tried.given)}"

    @property
    def disconnects(self) -> int:
        """Number of connections to the present address that have ended, as of the last ``check``."""
        return self._watch.disconnects

    def _on_event(self, event: int) -> None:
        """Take an event of the connection."""
        if event == zmq.EVENT_CONNECTED:
            self._addresses.accepted()
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._came = self._addresses.came(time.monotonic()) or self._came
        else:
            self._addresses.ended(time.monotonic())

    def _move(self) -> None:
        """Connect to the next address, and drop all messages from and to the present one."""
        self._watch.close()
        self.raw.setsockopt(zmq.LINGER, 0)
        self.raw.close()
        if self._links is not None:
            self._links.close()
        self._came = self._surplus = False
        self._addresses.move(time.monotonic())
        self.raw = self._new_raw()
        self._connect()

    def close(self) -> None:
        if os.getpid() == self._pid and not self.raw.closed:
            self._watch.close()
        super().close()


class Poller:
    """Waits on sockets and a waker together, and admits new peers of routers."""

    def __init__(self, sockets: Sequence[_Socket], waker: Waker | None = None) -> None:
        self._poller = zmq.Poller()
        self._waker = waker
        self._routers = [sock for sock in sockets if isinstance(sock, Router)]
        self._moving = {sock: sock.raw for sock in sockets if isinstance(sock, Dealer) and sock.may_move}
        """The ZeroMQ socket that is polled, by dealer with several addresses."""
        gates = [sock._gate for sock in sockets if sock._gate is not None]
        for raw in [sock.raw for sock in sockets] + [gate.raw for gate in gates]:
            self._poller.register(raw, zmq.POLLIN)
        if waker is not None:
            self._poller.register(waker.fileno(), zmq.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Wait until something came or ``timeout_s`` has passed. Drain the sockets after every wait."""
        for dealer, raw in self._moving.items():
            if dealer.raw is not raw:
                self._poller.unregister(raw)
                self._poller.register(dealer.raw, zmq.POLLIN)
                self._moving[dealer] = dealer.raw
        timeout_s = min([timeout_s, *(router.wake_s for router in self._routers)])
        ready = self._poller.poll(max(0, int(timeout_s * 1000)))
        if self._waker is not None and any(source == self._waker.fileno() for source, _ in ready):
            self._waker.clear()
        for router in self._routers:
            router.admit()


def drain(sock: _Socket, at_most: int) -> Iterator[list[Any]]:
    """Yield messages that have come, at most ``at_most``, so that other sockets have their turn."""
    for _ in range(at_most):
        frames = sock.receive()
        if frames is None:
            return
        yield frames


def _connect(raw: zmq.Socket[bytes], endpoint: str) -> None:
    """Connect a ZeroMQ socket. Raises UserError for an address that ZeroMQ does not take."""
    try:
        raw.connect(endpoint)
    except zmq.ZMQError as error:
        raise UserError(
            f"cannot connect to {endpoint!r}: got {error.strerror or error}, expected tcp://host:port or "
            f"ipc:///path/of/a/socket. Correct the address"
        ) from None


def _monitored(context: zmq.Context[Any], sock: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """Return a socket that reports the connections that ``sock`` accepts, and those that end.

    Its queue has no limit: with a full queue ZeroMQ's thread would wait for this process.
    """
    address = f"inproc://monitor-{id(sock)}"
    sock.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
    monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.connect(address)
    return monitor


def _randomize_ids() -> None:
    """Make the peer ids that the next router assigns unpredictable.

    ZeroMQ counts ids from a ``rand()`` that it never seeds. A peer may choose its own id. If ZeroMQ then assigns the
    same id to another peer, ZeroMQ ends the process.
    """
    ctypes.CDLL(None).srand(ctypes.c_uint(int.from_bytes(os.urandom(4), "little")))
