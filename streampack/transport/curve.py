"""CURVE: each end of a connection knows who the other is, and nobody between them reads or changes a word.

Beside ``sockets`` the only module that knows ZeroMQ (RFC 26, CurveZMQ; RFC 27, ZAP). A secret is 32 bytes, as are the
public keys; both are written as 64 hexadecimal digits, which need quotes nowhere.

A broker's sockets have a ``Gate`` that is asked about every peer before it is let in, by whoever serves the sockets, in
the same loop: there is no other thread that could end and leave the door open, and without an answer nobody comes in
(``ZAP_ENFORCE_DOMAIN``; without that option ZeroMQ takes the absence of an answer for consent). What comes in carries
the peer's key, which nobody else can have put there.

A peer that is not let in hears nothing by itself: its socket would go on trying for ever. Its ``HandshakeMonitor``
says in words why: the handshakes' events tell a refused key, and the first bytes of any ZeroMQ peer (RFC 37) whether
it has keys.
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
"""Settable in libzmq since 4.3, and not yet among pyzmq's names."""
_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = "streampack"
AT_ONCE = 256
"""Peers that are let in before the messages of the others have their turn."""
_UNCLEAR = 5
UNCLEAR_S = 2.0
QUICK_S = 3.0
"""So many handshakes that failed, over so long, each quickly: a broker of other keys refuses at once; one that is busy,
or starts, says nothing until a handshake has taken too long."""
LOOK_S = 0.2
"""Between two looks at how handshakes went."""
_GREETING_S = 1.0
_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00"
"""Signature and version of ZMTP 3.0: a peer answers with its own and then its mechanism, 20 bytes padded with zeros."""
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


def new_secret() -> str:
    """A secret key that nobody has. Raises UserError where ZeroMQ was built without CURVE."""
    if not zmq.has("curve"):
        raise UserError("got a pyzmq without CURVE, expected one with it: install pyzmq from PyPI")
    return z85.decode(zmq.curve_keypair()[1]).hex()


def public_of(secret: str) -> str:
    """The public key of a secret one."""
    return z85.decode(zmq.curve_public(z85.encode(bytes.fromhex(secret)))).hex()


def show_key(sock: zmq.Socket[bytes], secret: str, server: str) -> None:
    """Have a socket that connects show its key, and talk to the owner of ``server`` alone."""
    sock.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(server))
    sock.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(public_of(secret)))
    sock.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(secret))


class Door(NamedTuple):
    """Who a router is, and whether it lets a peer in: by public key and network address, both as text."""

    secret: str
    admits: Callable[[str, str], bool]


class Gate:
    """Asked about every peer of ``sock``, which is to be bound later: a peer is let in once this has answered.

    Args:
        context: The socket's.
        sock: A router.
        door: Which keys are let in; None lets in every peer, without a key.
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
        """Decide about peers that wait, up to so many; how many were let in."""
        let_in = 0
        while let_in < at_most:
            try:
                asked = self.raw.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            version, request, _, address, _, mechanism, *credentials = [*asked, *([b""] * 6)][: max(7, len(asked))]
            key = credentials[0].hex()
            good = version == b"1.0" and self._admits(mechanism, key, address)
            let_in += good
            said = [b"200", b"", key.encode(), b""] if good else [b"400", b"not allowed", b"", b""]
            self.raw.send_multipart([b"1.0", request, *said])
        return let_in

    def _admits(self, mechanism: bytes, key: str, address: bytes) -> bool:
        if self._door is None:
            return mechanism == b"NULL"
        where = address.decode(errors="replace").removeprefix("::ffff:")
        return mechanism == b"CURVE" and len(key) == 64 and self._door.admits(key, where)

    def close(self) -> None:
        """Nobody is let in any more."""
        self.raw.close()


def by_key(frames: list[Any]) -> bool:
    """Put its peer's key before the id of a message's peer. False where nobody was asked who it is."""
    try:
        key = frames[0].get("User-Id").encode()
    except zmq.ZMQError:
        return False
    frames[0] = zmq.Frame(key + frames[0].bytes)
    return len(key) == KEY_DIGITS


class HandshakeMonitor:
    """Why ``sock``, which is to connect later, is not let in; ``key``: whose it shows, empty for none."""

    def __init__(self, sock: zmq.Socket[bytes], key: str) -> None:
        self._sock, self._key = sock, key
        self._monitor: zmq.Socket[bytes] = sock.get_monitor_socket(_EVENTS)
        self._failed = 0
        """Handshakes, one soon after the other, since one succeeded."""
        self._first_at = self._last_at = self._looked_at = 0.0
        self._said = ""

    def refusal(self, endpoint: str) -> str:
        """Why the peer at ``endpoint`` does not let us in, in words; empty while it may yet. Waits, at most for the
        first bytes of a peer that has just failed.
        """
        if time.monotonic() - self._looked_at < LOOK_S:
            return self._said
        now = self._looked_at = time.monotonic()
        failed = self._failed
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._said = (
                    f"got a broker that does not let key {self._key!r} in, expected one whose allowed.yaml has it: "
                    f"was it taken out, or made anew?"
                )
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._failed = failed = 0
            else:
                if now - self._last_at > QUICK_S:
                    self._failed, failed, self._first_at = 0, 0, now
                self._last_at = now
                self._failed += 1
        if self._failed > failed and not self._said:
            self._said = self._mismatch(_mechanism(endpoint))
        return self._said

    def _mismatch(self, theirs: str) -> str:
        if theirs == "CURVE" and not self._key:
            return (
                "got a broker that lets nobody in without a key, expected to bring one: give its file with key_file, "
                "or STREAMPACK_KEY_FILE of the environment"
            )
        if theirs == "NULL" and self._key:
            return (
                f"got a broker without keys for key {self._key!r}, expected one that can show its own: give it "
                f"listen.keys, or connect without a key"
            )
        if theirs == "CURVE" and self._failed >= _UNCLEAR and self._last_at - self._first_at >= UNCLEAR_S:
            return (
                f"got a broker with other keys than those that key {self._key!r} was made with, expected that one: is "
                f"the address another broker's, or were its keys made anew?"
            )
        return ""

    def close(self) -> None:
        """Before its socket is."""
        self._sock.disable_monitor()
        self._monitor.close()


def _mechanism(endpoint: str) -> str:
    """How a ZeroMQ peer wants to know who we are, ``NULL`` or ``CURVE``; empty if it does not say."""
    said = b""
    try:
        with _connected(endpoint) as sock:
            sock.sendall(_GREETING)
            while len(said) < 32 and (more := sock.recv(64)):
                said += more
    except OSError:
        pass
    return said[12:32].rstrip(b"\0").decode("ascii", "replace") if len(said) >= 32 else ""


def _connected(endpoint: str) -> socket.socket:
    """A plain connection. Raises OSError."""
    if not endpoint.startswith("ipc://"):
        found = urlsplit(endpoint)
        return socket.create_connection((found.hostname or "", found.port or 0), _GREETING_S)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(_GREETING_S)
        sock.connect(endpoint.removeprefix("ipc://"))
    except OSError:
        sock.close()  # a broker that is away leaves the address, or not
        raise
    return sock
