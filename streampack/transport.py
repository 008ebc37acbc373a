"""Sockets: the only module that knows ZeroMQ, but for ``curve``, which keeps them to those who have keys.

A ``Router`` serves many ``Dealer``s; both are used by one thread, never block, and never promise
that a message arrives: a full queue, a peer that is gone or a broker that restarts lose messages,
and the state machines ask again. What they see to is what ZeroMQ leaves open: an address that
another process serves already (``ipc://`` would be stolen silently), sockets inherited through a
fork (they would swallow messages), and lingering at exit. With keys, whose a message is stands before its peer's id. On
``ipc://`` large frames go through ``shared_memory``.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TextIO
from weakref import WeakValueDictionary

import numpy as np
import zmq
from numpy.typing import NDArray

from streampack import ipc_files, shared_memory
from streampack.core.rights import KEY_DIGITS
from streampack.curve import Gate, Watch, show_key
from streampack.errors import PeerError, Rejected, UserError
from streampack.keys import Key
from streampack.shared_memory import FEW_SLOTS, NUM_SLOTS, Known, Link

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
"""Messages: bounds what waits for a peer; credits and prefetching keep queues far below it."""
MOST_LINKS = 256
"""Peers of this host that memory is shared with; the others' frames go over the socket."""
MOST_FRAMES = 64
"""Of a message; what a peer sends more in one is dropped unread, and the message is none then."""
AT_ONCE = 256
"""Frames that are dropped, and words about shared memory that are heard, before whoever receives has its turn again:
a peer may send any number of them."""
PROBED = 2
"""Links that are looked at whenever one is made: more than are made, so that those of peers that are gone stay few."""
SAY_S = 2.0
"""Between two words of a dealer that it knows shared memory: a router that was started again knows it no more."""


def _configure(sock: zmq.Socket[bytes], max_message_bytes: int) -> None:
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, HIGH_WATER)
    sock.setsockopt(zmq.RCVHWM, HIGH_WATER)
    sock.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    sock.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    sock.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)
    sock.setsockopt(zmq.IPV6, 1)


def check_endpoint(endpoint: str, *, connects: bool = False) -> None:
    """Raises UserError for an endpoint that is not ``tcp://host:port`` or ``ipc://path`` of 100 bytes at most.

    Only a socket that binds may leave the host (``*``) or the port (``*``, 0) open; for one that ``connects``, both
    must be known.
    """
    kind, _, rest = endpoint.partition("://")
    if kind == "tcp":
        host, _, port = rest.rpartition(":")
        known = port.isascii() and port.isdigit() and int(port) < 65536
        if host and host.isprintable() and " " not in host and (known or port == "*"):
            if connects and (host == "*" or not known or int(port) == 0):
                raise UserError(
                    f"got endpoint {endpoint!r} to connect to, expected a host and the port that the broker listens "
                    f"on: take the address from its log or rendezvous file"
                )
            return
    elif kind == "ipc" and rest:
        if len(rest.encode()) <= 100:
            return
        raise UserError(f"got an ipc path of {len(rest.encode())} bytes, expected at most 100: take a shorter folder")
    raise UserError(f"got endpoint {endpoint!r}, expected tcp://host:port or ipc:///path/of/a/socket")


class _Socket:
    """What Router and Dealer share; made, used and closed by one thread of one process."""

    def __init__(self, kind: int, max_message_bytes: int) -> None:
        self._pid = os.getpid()
        self._context = zmq.Context()
        self.raw: zmq.Socket[bytes] = self._context.socket(kind)
        self.dropped = 0
        """Messages that could not be sent now, and were not."""
        self._gate: Gate | None = None
        self._links: OrderedDict[bytes, Link] | None = None
        """By peer that knows shared memory, the last one heard last: what is lent to processes of this host; None:
        nothing is."""
        self._known: Known = WeakValueDictionary()
        self._surplus = False
        """The last message had too many frames, and more of them are there."""
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
                self._tell()
                return None
            if self._gate is not None and not _by_key(frames):
                continue
            whole = self._resolved(frames) if self._links is not None else frames
            if whole is not None:
                return whole
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

    def _drop_surplus(self) -> bool:
        """Frames of the message that had too many; whether that was the last of them. Raises zmq.Again."""
        for _ in range(AT_ONCE):
            self._surplus = self.raw.recv(zmq.NOBLOCK, copy=False).more
            if not self._surplus:
                return True
        return False

    _peer_frames = 0
    """Frames before the message's own, which say whose it is."""
    _key_digits = 0
    """Of a peer's key, which stands before ZeroMQ's id of it."""

    def _resolved(self, frames: list[Any]) -> list[Any] | None:
        """The frames of a message, those that lie in shared memory put in their places; None where it was about that
        memory, or is lost."""
        at = self._peer_frames
        head = frames[at].buffer if len(frames) > at else memoryview(b"")
        if head[: len(shared_memory.MAGIC)] != shared_memory.MAGIC:
            return frames
        peer = frames[0].bytes if at else b""
        link = self._link(peer)
        if link is None:
            whole, answer = None, shared_memory.refusal(head)
        else:
            whole, answer = link.incoming(head, frames[at + 1 :], self._known)
            answer = answer or link.news()
        if answer is not None:
            self._raw_send(peer, [answer])
        return [*frames[:at], *whole] if whole is not None else None

    def _link(self, peer: bytes) -> Link | None:
        """Of a peer that has said that it knows shared memory; None where there are as many already as may be."""
        assert self._links is not None
        if peer not in self._links:
            self._forget_gone()
            if len(self._links) >= MOST_LINKS:
                return None
            self._links[peer] = Link(NUM_SLOTS)
        self._links.move_to_end(peer)
        return self._links[peer]

    def _forget_gone(self) -> None:
        """Nothing says that a peer is gone but a message to it; one that was heard lately need not be asked."""
        assert self._links is not None
        for peer in list(itertools.islice(self._links, PROBED)):
            self._raw_send(peer, [shared_memory.SPEAKS])
            if peer in self._links:
                self._links.move_to_end(peer)

    def _tell(self) -> None:
        """Say what has come free here: where nothing has come, as it costs by how many peers there are."""
        for peer, link in list(self._links.items()) if self._links else ():
            if (news := link.news()) is not None:
                self._raw_send(peer, [news])

    def _raw_send(self, peer: bytes, frames: Sequence[Any]) -> bool:
        try:
            frames = [peer[self._key_digits :], *frames] if self._peer_frames else frames
            self.raw.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH and self._links is not None and peer in self._links:
                self._links.pop(peer).close()
            return False
        return True

    def _send(self, peer: bytes, frames: Sequence[Any]) -> bool:
        self._check_pid()
        taken: list[int] = []
        link = self._links.get(peer) if self._links else None
        if link is not None:
            if (question := link.question(frames, time.monotonic())) is not None:
                self._raw_send(peer, [question])
            frames, taken = link.outgoing(frames)
        if self._raw_send(peer, frames):
            return True
        self.dropped += 1
        if link is not None:
            link.give_back(taken)
        return False

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
            while self._links:
                self._links.popitem()[1].close()


class Door(NamedTuple):
    """Who a router is, and whether it lets a peer in: by public key and network address, both as text."""

    secret: str
    admits: Callable[[str, str], bool]


class Router(_Socket):
    """A bound socket that knows its peers by the opaque ids that ZeroMQ gives them, a frame before each message; with
    a ``door`` each of these begins with the peer's key.

    It holds ``arriving`` messages of each peer before they are received; others wait where they were made.
    Raises UserError if the address is taken, saying by whom as far as that can be known.
    """

    def __init__(
        self, endpoint: str, max_message_bytes: int, arriving: int = HIGH_WATER, door: Door | None = None
    ) -> None:
        check_endpoint(endpoint)
        self._lock: TextIO | None = None
        if endpoint.startswith("ipc://"):
            self._lock = ipc_files.lock(endpoint)
        _begin_ids_anywhere()
        super().__init__(zmq.ROUTER, max_message_bytes)
        self.raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._links = OrderedDict() if self._lock is not None else None
        self.raw.setsockopt(zmq.RCVHWM, arriving)
        self.raw.setsockopt(zmq.BACKLOG, BACKLOG)
        if door is not None:
            self._gate, self._key_digits = Gate(self._context, self.raw, *door), KEY_DIGITS
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
        is not copied any more. None where there is none."""
        link = self._links.get(peer) if self._links else None
        return link.room(num_bytes) if link is not None else None

    def send(self, peer: bytes, frames: Sequence[Any]) -> bool:
        """Queue a message for a peer; False if it was dropped instead."""
        return self._send(peer, frames)

    def close(self) -> None:
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
        self._watch = Watch(self.raw, "" if key is None else key.name)
        if key is not None:
            show_key(self.raw, key.secret, key.broker)
        self.raw.setsockopt(zmq.IMMEDIATE, 1)
        self._links = OrderedDict({b"": Link(FEW_SLOTS)}) if endpoint.startswith("ipc://") else None
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


class Waker:
    """Wakes a poll from another thread; ``wake`` may be called by any."""

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)

    def fileno(self) -> int:
        return self._near.fileno()

    def wake(self) -> None:
        try:
            self._far.send(b"\0")
        except (BlockingIOError, OSError):
            return  # a full pipe wakes as well; a closed one has nobody to wake

    def clear(self) -> None:
        """Forget all wakes so far."""
        try:
            while self._near.recv(4096):
                continue
        except BlockingIOError:
            return

    def close(self) -> None:
        self._near.close()
        self._far.close()


class Poller:
    """Waits on sockets and a waker together, and lets in who may come."""

    def __init__(self, sockets: Sequence[_Socket], waker: Waker | None = None) -> None:
        self._poller = zmq.Poller()
        self._waker = waker
        self._gates = [sock._gate for sock in sockets if sock._gate is not None]
        for raw in [sock.raw for sock in sockets] + [gate.raw for gate in self._gates]:
            self._poller.register(raw, zmq.POLLIN)
        if waker is not None:
            self._poller.register(waker.fileno(), zmq.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Until something came or the time is up; sockets are to be drained after every wait."""
        ready = self._poller.poll(max(0, int(timeout_s * 1000)))
        if self._waker is not None and any(source == self._waker.fileno() for source, _ in ready):
            self._waker.clear()
        for gate in self._gates:
            gate.answer()


def drain(sock: _Socket, at_most: int) -> Iterator[list[Any]]:
    """Messages that have come, up to a bound so that no socket starves another."""
    for _ in range(at_most):
        frames = sock.receive()
        if frames is None:
            return
        yield frames


def _begin_ids_anywhere() -> None:
    """Have the next router give ids to its peers that nobody can foretell.

    ZeroMQ counts them from a ``rand()`` that it never seeds. A peer may choose its own id, and where one has chosen
    that which is given next, ZeroMQ ends the process.
    """
    ctypes.CDLL(None).srand(ctypes.c_uint(int.from_bytes(os.urandom(4), "little")))


def _by_key(frames: list[Any]) -> bool:
    """Put its peer's key before the id of a message's peer. False where nobody was asked who it is."""
    try:
        key = frames[0].get("User-Id").encode()
    except zmq.ZMQError:
        return False
    frames[0] = zmq.Frame(key + frames[0].bytes)
    return len(key) == KEY_DIGITS
