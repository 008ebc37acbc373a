"""Sockets: the only module that knows ZeroMQ, but for ``curve``, which keeps them to those who have keys.

A ``Router`` serves many ``Dealer``s; both are used by one thread, never block, and never promise
that a message arrives: a full queue, a peer that is gone or a broker that restarts lose messages,
and the state machines ask again. What they see to is what ZeroMQ leaves open: an address that
another process serves already (``ipc://`` would be stolen silently), sockets inherited through a
fork (they would swallow messages), and lingering at exit. With keys, whose a message is stands before its peer's id. On
``ipc://`` large frames go through shared memory (``links``).
"""

from __future__ import annotations

import ctypes
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
from streampack.transport.curve import Door, Gate, HandshakeMonitor, by_key, show_key
from streampack.transport.endpoints import check_endpoint
from streampack.transport.keys import Key
from streampack.transport.links import Links
from streampack.transport.shared_memory import FEW_SLOTS, NUM_SLOTS
from streampack.transport.unread import Connection, CutConnection, Unread, frame_bytes
from streampack.transport.waker import Waker

HEARTBEAT_MS = 5000
HEARTBEAT_TIMEOUT_MS = 15_000
HANDSHAKE_MS = 5000
_MAPPED = re.compile(r"\[::ffff:([0-9.]+)\]")
"""How ZeroMQ writes an IPv4 address that it serves through IPv6: hosts without IPv6 cannot connect to it so."""
CONNECT_MS = 200
"""How long a new socket waits for a peer that is there; on one machine that takes less than one."""
BACKLOG = 4096
"""Peers that connect at the same moment; of more each tries again after some time."""
HIGH_WATER = 1000
"""Messages that wait to be sent to a peer; credits and prefetching keep queues far below it."""
MOST_FRAMES = 64
"""Of a message; what a peer sends more in one is dropped unread, and the message is none then."""
AT_ONCE = 256
"""Frames that are dropped, and words about shared memory that are heard, before whoever receives has its turn again:
a peer may send any number of them."""
LOOK_S = 0.02
"""Between two looks at the connections of a router, where nothing else happens."""
SAY_S = 2.0
"""Between two words of a dealer that it knows shared memory: a router that was started again knows it no more."""


def _configure(sock: zmq.Socket[bytes], max_message_bytes: int) -> None:
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
    """What Router and Dealer share; made, used and closed by one thread of one process."""

    def __init__(self, kind: int, max_message_bytes: int) -> None:
        self._pid = os.getpid()
        self._context = zmq.Context()
        self.raw: zmq.Socket[bytes] = self._context.socket(kind)
        self.dropped = 0
        """Messages that could not be sent now, and were not."""
        self._gate: Gate | None = None
        self._links: Links | None = None
        """None: not with processes of this host."""
        self._surplus = False
        """The last message had too many frames, and more of them are there."""
        self._unread: Unread | None = None
        """None: what this socket reads ahead is not bounded."""
        self._taking: Connection | None = None
        """Where the last message came from."""
        _configure(self.raw, max_message_bytes)

    def receive(self) -> list[Any] | None:
        """The frames of one message, as buffers, or None when there is none now; or later, where a peer floods us.

        Of a message of more than ``MOST_FRAMES`` those and one more, so that nobody takes it for one.
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
                    self._links.tell()
                return None
            if self._key_digits and not by_key(frames):
                continue
            if self._unread is not None:
                self._count(self._unread, frames)
                if self._unread.was_cut(frames[0].bytes):
                    continue
            if self._links is None:
                return frames
            at = self._peer_frames
            whole = self._links.received(frames[0].bytes if at else b"", frames[at:])
            if whole is not None:
                return [*frames[:at], *whole]
        return None

    def _next_frames(self) -> list[Any]:
        """The next message's, at most one more than there may be. Raises zmq.Again."""
        frame = self.raw.recv(zmq.NOBLOCK, copy=False)
        frames = [frame]
        while frame.more and len(frames) <= MOST_FRAMES:  # a message comes whole: none of it has to be waited for
            frame = self.raw.recv(zmq.NOBLOCK, copy=False)
            frames.append(frame)
        self._surplus = frame.more
        return frames

    def _count(self, unread: Unread, frames: list[Any]) -> None:
        """Note that a message was taken."""
        peer = frames[0].bytes
        self._taking = unread.of(peer) or unread.joined(peer, frames[1].get(zmq.SRCFD))
        if self._taking is not None:
            secured = self._key_digits > 0
            self._taking.messages += 1
            self._taking.taken += sum(frame_bytes(len(frame), secured) for frame in frames[1:])

    def _drop_surplus(self) -> bool:
        """Frames of the message that had too many; whether that was the last of them. Raises zmq.Again."""
        for _ in range(AT_ONCE):
            frame = self.raw.recv(zmq.NOBLOCK, copy=False)
            if self._taking is not None:
                self._taking.taken += frame_bytes(len(frame), self._key_digits > 0)
            self._surplus = frame.more
            if not self._surplus:
                return True
        return False

    _peer_frames = 0
    """Frames before the message's own, which say whose it is."""
    _key_digits = 0
    """Of a peer's key, which stands before ZeroMQ's id of it."""

    def _raw_send(self, peer: bytes, frames: Sequence[Any]) -> bool:
        try:
            frames = [peer[self._key_digits :], *frames] if self._peer_frames else frames
            self.raw.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH and self._links is not None:
                self._links.forget(peer)
            return False
        return True

    def _send(self, peer: bytes, frames: Sequence[Any]) -> bool:
        self._check_pid()
        sent = self._raw_send(peer, frames) if self._links is None else self._links.send(peer, frames)
        self.dropped += not sent
        return sent

    def _check_pid(self) -> None:
        if os.getpid() != self._pid:
            raise PeerError("got a socket of the parent process, expected one made after the fork: connect there")

    def close(self) -> None:
        """Idempotent; what is still queued is dropped."""
        if os.getpid() == self._pid and not self.raw.closed:
            self.raw.close()
            if self._gate is not None:
                self._gate.close()
            self._context.term()
            if self._links is not None:
                self._links.close()


class Router(_Socket):
    """A bound socket that knows its peers by the opaque ids that ZeroMQ gives them, a frame before each message; with
    a ``door`` each of these begins with the peer's key.

    Args:
        endpoint: Where to listen, ``tcp://`` or ``ipc://``.
        max_message_bytes: Bytes of a frame; a connection that sends a larger one ends.
        door: Which keys are let in; None for all peers, without a key.
        unread: Bounds what is read ahead of this process; ``ipc://`` has no use for it, as only the same user can
            connect there.

    Raises:
        UserError: The address is taken; the message says by whom as far as that can be known.
    """

    def __init__(
        self, endpoint: str, max_message_bytes: int, door: Door | None = None, unread: Unread | None = None
    ) -> None:
        check_endpoint(endpoint)
        self._lock: TextIO | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        if endpoint.startswith("ipc://"):
            self._lock = ipc_files.lock(endpoint)
        if self._lock is None:  # else its peers are its own user's, and so may be the process: a trainer's
            _begin_ids_anywhere()
        super().__init__(zmq.ROUTER, max_message_bytes)
        self.raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._links = Links(self._raw_send, NUM_SLOTS) if self._lock is not None else None
        self.raw.setsockopt(zmq.BACKLOG, BACKLOG)
        if unread is not None and self._lock is None:
            self._unread, self._monitor = unread, _monitored(self._context, self.raw)
        if door is not None or self._unread is not None:
            self._gate = Gate(self._context, self.raw, door)
        self._key_digits = KEY_DIGITS if door is not None else 0
        try:
            with ipc_files.for_its_user_alone():
                self.raw.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            what = "an address in use" if error.errno == zmq.EADDRINUSE else f"{error.strerror or error}".lower()
            raise UserError(
                f"cannot listen on {endpoint}: got {what}, expected a free one: "
                f"stop the other process or choose another address"
            ) from None
        self.endpoint = _MAPPED.sub(r"\1", self.raw.getsockopt_string(zmq.LAST_ENDPOINT))

    _peer_frames = 1

    def room(self, peer: bytes, num_bytes: int) -> NDArray[np.uint8] | None:
        """Memory that the peer can read, uint8 [num_bytes], for a frame of the next message to it: one that lies there
        is not copied any more. None where there is none.
        """
        return self._links.room(peer, num_bytes) if self._links is not None else None

    def send(self, peer: bytes, frames: Sequence[Any]) -> bool:
        """Queue a message for a peer; False if it was dropped instead."""
        return self._send(peer, frames)

    def admit(self) -> None:
        """Let peers in that wait for it, and look after the connections of those that are in."""
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
        if self._gate is not None and (at_most := self._unread.admissions()):
            self._unread.admitted(self._gate.answer(at_most))
        self._unread.check()

    def note_damaged(self, peer: bytes) -> None:
        """A message of this peer could not be decoded."""
        if self._unread is not None:
            self._unread.note_damaged(peer)

    def take_cuts(self) -> list[CutConnection]:
        """Connections that were cut since this was last asked."""
        return self._unread.take_cuts() if self._unread is not None else []

    @property
    def wake_s(self) -> float:
        """``admit`` wants to be called this often."""
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
    """A socket connected to one router, to which it shows its ``key`` if it has one; it reconnects for ever, and what
    it could not send is dropped.

    Raises UserError for an address that nobody can connect to.
    """

    def __init__(self, endpoint: str, max_message_bytes: int, linger_ms: int = 0, key: Key | None = None) -> None:
        check_endpoint(endpoint, connects=True)
        super().__init__(zmq.DEALER, max_message_bytes)
        self._watch = HandshakeMonitor(self.raw, "" if key is None else key.name)
        if key is not None:
            show_key(self.raw, key.secret, key.broker)
        self.raw.setsockopt(zmq.IMMEDIATE, 1)
        self._links = Links(self._raw_send, FEW_SLOTS, [b""]) if endpoint.startswith("ipc://") else None
        self._said_at = -SAY_S
        self.raw.setsockopt(zmq.LINGER, linger_ms)
        try:
            self.raw.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise UserError(
                f"cannot connect to {endpoint!r}: got {error.strerror or error}, expected tcp://host:port or "
                f"ipc:///path/of/a/socket: correct the address"
            ) from None
        # What is sent before there is a connection is dropped, and the first word asked for again much later.
        self.raw.poll(CONNECT_MS, zmq.POLLOUT)
        self.endpoint = endpoint

    def send(self, frames: Sequence[Any]) -> bool:
        """Queue a message; False if it was dropped instead."""
        if self._links is not None and time.monotonic() - self._said_at > SAY_S:
            self._said_at = time.monotonic()
            self._raw_send(b"", [shared_memory.SPEAKS])
        return self._send(b"", frames)

    def check(self) -> None:
        """Raises Rejected if the broker does not let this process in; from time to time, as it may never."""
        if why := self._watch.refusal(self.endpoint):
            raise Rejected("key", f"{self.endpoint}: {why}")

    def close(self) -> None:
        if os.getpid() == self._pid and not self.raw.closed:
            self._watch.close()
        super().close()


class Poller:
    """Waits on sockets and a waker together, and lets new peers of routers in."""

    def __init__(self, sockets: Sequence[_Socket], waker: Waker | None = None) -> None:
        self._poller = zmq.Poller()
        self._waker = waker
        self._routers = [sock for sock in sockets if isinstance(sock, Router)]
        gates = [sock._gate for sock in sockets if sock._gate is not None]
        for raw in [sock.raw for sock in sockets] + [gate.raw for gate in gates]:
            self._poller.register(raw, zmq.POLLIN)
        if waker is not None:
            self._poller.register(waker.fileno(), zmq.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Until something came or the time is up; sockets are to be drained after every wait."""
        timeout_s = min([timeout_s, *(router.wake_s for router in self._routers)])
        ready = self._poller.poll(max(0, int(timeout_s * 1000)))
        if self._waker is not None and any(source == self._waker.fileno() for source, _ in ready):
            self._waker.clear()
        for router in self._routers:
            router.admit()


def drain(sock: _Socket, at_most: int) -> Iterator[list[Any]]:
    """Messages that have come, up to a bound so that no socket starves another."""
    for _ in range(at_most):
        frames = sock.receive()
        if frames is None:
            return
        yield frames


def _monitored(context: zmq.Context[Any], sock: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """A socket that says which connections ``sock`` accepts, and which end. Its queue has no limit: where it is full,
    ZeroMQ's thread would wait for us.
    """
    address = f"inproc://monitor-{id(sock)}"
    sock.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
    found: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    found.setsockopt(zmq.RCVHWM, 0)
    found.setsockopt(zmq.LINGER, 0)
    found.connect(address)
    return found


def _begin_ids_anywhere() -> None:
    """Have the next router give ids to its peers that nobody can foretell.

    ZeroMQ counts them from a ``rand()`` that it never seeds. A peer may choose its own id, and where one has chosen
    that which is given next, ZeroMQ ends the process.
    """
    ctypes.CDLL(None).srand(ctypes.c_uint(int.from_bytes(os.urandom(4), "little")))
