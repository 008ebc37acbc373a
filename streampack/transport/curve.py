"""CURVE: encryption of connections, and authentication of both ends by key.

Only this module and ``sockets`` know ZeroMQ (RFC 26, CurveZMQ; RFC 27, ZAP). A secret key is 32 bytes, as is a public
key. Both are written as 64 hexadecimal digits, which need quotes nowhere.

The socket of a broker has a ``Gate``, which decides about every peer before it is admitted. The thread that serves the
socket also answers for the gate. Without an answer no peer is admitted (``ZAP_ENFORCE_DOMAIN``; without that option
ZeroMQ admits peers when there is no answer). Each received message carries the peer's key, which no peer can forge.

A rejected peer gets no reason from ZeroMQ: its socket would try forever. Its ``HandshakeMonitor`` finds the reason. The
events of handshakes show a rejected key. The first bytes that any ZeroMQ peer sends (RFC 37) show if it has keys.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from streampack.core.protocol.rights import KEY_DIGITS
from streampack.errors import UserError

_ZAP_ENFORCE_DOMAIN = 93
"""An option of libzmq since 4.3 that pyzmq does not name yet."""
_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = "streampack"
AT_ONCE = 256
"""The most peers that are admitted before the other peers' messages are read."""
_UNCLEAR = 5
UNCLEAR_S = 2.0
QUICK_S = 3.0
"""A broker has other keys if _UNCLEAR handshakes failed over UNCLEAR_S seconds, each less than QUICK_S after the last.
A broker must answer there after each of them.

Such a broker rejects at once. A broker that is busy or starting does not answer until a handshake times out.
"""
LOOK_S = 0.2
"""Seconds between two looks at the handshakes' events."""
_GREETING_S = 1.0
_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00"
"""Signature and version of ZMTP 3.0. A peer answers with its own, and its mechanism, 20 bytes padded with zeros."""
_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_DISCONNECTED
)


def new_secret() -> str:
    """Return a new random secret key, 64 hexadecimal digits. Raises UserError if ZeroMQ was built without CURVE."""
    if not zmq.has("curve"):
        raise UserError("got a pyzmq without CURVE support, expected one with CURVE support. Install pyzmq from PyPI")
    return z85.decode(zmq.curve_keypair()[1]).hex()


def public_of(secret: str) -> str:
    """Return the public key of a secret key; both are 64 hexadecimal digits."""
    return z85.decode(zmq.curve_public(z85.encode(bytes.fromhex(secret)))).hex()


def show_key(sock: zmq.Socket[bytes], secret: str, server: str) -> None:
    """Set the secret key of a socket that will connect, and the public key ``server`` that the other end must have."""
    sock.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(server))
    sock.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(public_of(secret)))
    sock.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(secret))


class Door(NamedTuple):
    """A router's ``secret`` key, and ``admits(public key, network address)``, which decides about a peer."""

    secret: str
    admits: Callable[[str, str], bool]


class Gate:
    """Decides which peers of a router are admitted; a peer waits until ``answer`` was called.

    Args:
        context: The router's context.
        sock: The router; it must not be bound yet.
        door: The router's key and the keys that it admits; None admits every peer, without a key.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], sock: zmq.Socket[bytes], door: Door | None) -> None:
        self._door = door
        self.raw: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.raw.setsockopt(zmq.LINGER, 0)
        self.raw.bind(_ZAP)
        if door is not None:
            sock.setsockopt(zmq.CURVE_SERVER, 1)
            sock.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(door.secret))
        sock.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        sock.setsockopt(_ZAP_ENFORCE_DOMAIN, 1)

    def answer(self, at_most: int = AT_ONCE) -> int:
        """Decide about waiting peers until ``at_most`` are admitted; return the number of admitted peers."""
        let_in = 0
        while let_in < at_most:
            try:
                frames = self.raw.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            version, request, _, address, _, mechanism, *credentials = [*frames, *([b""] * 6)][: max(7, len(frames))]
            key = credentials[0].hex()
            good = version == b"1.0" and self._admits(mechanism, key, address)
            let_in += good
            reply = [b"200", b"", key.encode(), b""] if good else [b"400", b"not allowed", b"", b""]
            self.raw.send_multipart([b"1.0", request, *reply])
        return let_in

    def _admits(self, mechanism: bytes, key: str, address: bytes) -> bool:
        """Return True if a peer with this mechanism, public key and network address is admitted."""
        if self._door is None:
            return mechanism == b"NULL"
        where = address.decode(errors="replace").removeprefix("::ffff:")
        return mechanism == b"CURVE" and len(key) == 64 and self._door.admits(key, where)

    def close(self) -> None:
        """Admit no more peers."""
        self.raw.close()


def prepend_key(frames: list[Any]) -> bool:
    """Put the peer's public key before its id in the first frame, in place; return False if the peer has no key."""
    try:
        key = frames[0].get("User-Id").encode()
    except zmq.ZMQError:
        return False
    frames[0] = zmq.Frame(key + frames[0].bytes)
    return len(key) == KEY_DIGITS


class HandshakeMonitor:
    """Finds the reason that a broker rejects a socket, and reports its connections.

    ``sock`` must not be connected yet; ``key`` is the name of the socket's key, empty without a key. ``on_event`` gets
    each event: CONNECTED, HANDSHAKE_SUCCEEDED, DISCONNECTED, or a failed handshake.
    """

    def __init__(self, sock: zmq.Socket[bytes], key: str, on_event: Callable[[int], None]) -> None:
        self._sock, self._key, self._on_event = sock, key, on_event
        self._monitor: zmq.Socket[bytes] = sock.get_monitor_socket(_EVENTS)
        self._failed = 0
        """Failed handshakes since one succeeded, each soon after the last."""
        self.disconnects = 0
        """Number of connections that have ended."""
        self._first_at = self._last_at = self._looked_at = 0.0
        self._rejection = ""

    def refusal(self, endpoint: str) -> str:
        """Return the reason that the broker at ``endpoint`` rejects the socket; empty while it may still be admitted.

        After a failed handshake it may wait a second for the first bytes of the broker.
        """
        if time.monotonic() - self._looked_at < LOOK_S:
            return self._rejection
        now = self._looked_at = time.monotonic()
        failed = self._failed
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            self._on_event(event)
            if event == zmq.EVENT_CONNECTED:
                continue
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._rejection = (
                    f"got a broker that rejects key {self._key!r}, expected a broker whose allowed.yaml lists this "
                    f"key. Check whether the key was removed or replaced"
                )
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._failed = failed = 0
            elif event == zmq.EVENT_DISCONNECTED:
                self.disconnects += 1
            else:
                if now - self._last_at > QUICK_S:
                    self._failed, failed, self._first_at = 0, 0, now
                self._last_at = now
                self._failed += 1
        if self._failed > failed and not self._rejection:
            mechanism = _mechanism(endpoint)
            if not mechanism:  # no broker answers here, for example because it is dead behind a proxy
                self._failed, self._last_at = 0, -QUICK_S
            self._rejection = self._mismatch(mechanism)
        return self._rejection

    def _mismatch(self, mechanism: str) -> str:
        """Return the reason of the rejection, judged by the broker's ``mechanism``; empty if not found yet."""
        if mechanism == "CURVE" and not self._key:
            return (
                "got no key, expected one, because the broker requires keys. Pass the path of a key file with "
                "key_file, or set STREAMPACK_KEY_FILE"
            )
        if mechanism == "NULL" and self._key:
            return (
                f"got a broker without keys for key {self._key!r}, expected a broker with its own key. Set "
                f"listen.keys of the broker, or connect without a key"
            )
        if mechanism == "CURVE" and self._failed >= _UNCLEAR and self._last_at - self._first_at >= UNCLEAR_S:
            return (
                f"got a broker whose key is not the broker key in the file of key {self._key!r}, expected the same "
                f"key. Check the address, and whether the broker's key was replaced"
            )
        return ""

    def close(self) -> None:
        """Stop monitoring. Call it before the socket is closed."""
        self._sock.disable_monitor()
        self._monitor.close()


def _mechanism(endpoint: str) -> str:
    """Return the security mechanism of the ZeroMQ peer at ``endpoint``: ``NULL``, ``CURVE``, or empty if unknown."""
    greeting = b""
    try:
        with _connected(endpoint) as sock:
            sock.sendall(_GREETING)
            while len(greeting) < 32 and (more := sock.recv(64)):
                greeting += more
    except OSError:
        pass
    return greeting[12:32].rstrip(b"\0").decode("ascii", "replace") if len(greeting) >= 32 else ""


def _connected(endpoint: str) -> socket.socket:
    """Return a plain socket that is connected to ``endpoint``. Raises OSError."""
    if not endpoint.startswith("ipc://"):
        url = urlsplit(endpoint)
        return socket.create_connection((url.hostname or "", url.port or 0), _GREETING_S)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(_GREETING_S)
        sock.connect(endpoint.removeprefix("ipc://"))
    except OSError:
        sock.close()
        raise
    return sock
