"""``streampack relay``: reads from the broker once for all ranks of a host, and serves them through shared memory.

A thin shell around ``core.sessions.relaying``, which makes all decisions. One thread owns both sockets. On
SIGTERM, SIGINT or SIGHUP the relay sends its ranks to the broker and exits with 0.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from streampack.core.protocol.events import Effect, FromBroker, Report, Send, Tick, Unsent
from streampack.core.protocol.message import Envelope, Reject
from streampack.core.sessions.relaying.relay_events import (
    ForReaders,
    FromReader,
    Moved,
    NotDelivered,
    SendFor,
    SendReader,
    Stop,
)
from streampack.core.sessions.relaying.relay_session import RelaySession
from streampack.errors import InternalError, Rejected, UserError, WireError
from streampack.transport import relay_socket
from streampack.transport.keys import Key
from streampack.transport.rendezvous import read_rendezvous
from streampack.transport.sockets import Dealer, Poller, Router, drain
from streampack.transport.waker import Waker
from streampack.version import __version__
from streampack.wire import bundles
from streampack.wire import frames as wire
from streampack_services.amounts import counted
from streampack_services.daemons.signals import on_ending_signals
from streampack_services.daemons.systemd import Systemd
from streampack_services.descriptors import hold_back

log = logging.getLogger("streampack.relay")

TICK_S = 0.2
SAY_S = 5.0
"""Seconds between two log lines about the same kind of trouble."""
MAX_MESSAGE_BYTES = 1 << 30
DRAIN_AT_MOST = 64
"""Messages that are read from one socket before the other has its turn."""
LINGER_MS = 500
GOODBYE_S = 1.0
"""Seconds from the relay's last messages to the end of its connections. A rank that has not read a message by then
loses it: ZeroMQ drops what is unread when a connection ends (``ZMQ_IMMEDIATE``)."""


class RelayService:
    """One relay; ``run`` serves in the calling thread until ``stop``.

    Args:
        broker: The broker's address for trainers.
        listen: The relay's address for the ranks of this host, ``ipc://``.
        memory_bytes: Most bytes of steps that the relay keeps.
        key: The key that the broker requires; None for no key.

    Raises:
        UserError: An address cannot be used, e.g. because another relay serves it.
    """

    def __init__(self, broker: str, listen: str, memory_bytes: int = 1 << 30, key: Key | None = None) -> None:
        self.broker, self.listen = broker, listen
        self.session = RelaySession(f"{socket.gethostname()}:{os.getpid()}", memory_bytes)
        self.received_bytes = self.sent_bytes = 0
        """Bytes that came from the broker, and that the ranks were given."""
        self._stopping = threading.Event()
        self._bundled: list[tuple[str, Envelope]] = []
        self._damaged = 0
        self._say_at = 0.0
        self._connected = False
        relay_socket.check_address(listen, "--listen")
        relay_socket.make_folder(listen)
        self._router = Router(listen, MAX_MESSAGE_BYTES, linger_ms=LINGER_MS)
        try:
            self._dealer = Dealer(broker, MAX_MESSAGE_BYTES, linger_ms=LINGER_MS, key=key)
        except BaseException:
            self._router.close()
            raise
        self._waker = Waker()
        relay_socket.note_broker(listen, broker)

    def stop(self) -> None:
        """End ``run``; safe in any thread and in signal handlers."""
        self._stopping.set()
        self._waker.wake()

    def run(self) -> None:
        """Serve until ``stop``, then send the ranks to the broker. Raises Rejected if the broker refuses the relay."""
        poller = Poller([self._router, self._dealer], self._waker)
        systemd, ticked = Systemd(), 0.0
        try:
            while not self._stopping.is_set():
                poller.wait(TICK_S)
                for frames in drain(self._dealer, DRAIN_AT_MOST):
                    self._from_broker(frames)
                for frames in drain(self._router, DRAIN_AT_MOST):
                    self._from_reader(frames)
                now = time.monotonic()
                if now - ticked >= TICK_S:
                    ticked = now
                    if self._dealer.check():
                        self._perform(self.session.handle(Moved()))
                    self._perform(self.session.handle(Tick(now)))
                    self._say(now)
                    systemd.tell(ready=True, status=f"{counted(len(self.session.readers), 'rank')} of {self.broker}")
                self._send_bundles()
            systemd.tell(stopping=True)
        finally:
            readers = len(self.session.readers)
            self._perform(self.session.handle(Stop()))
            self._send_bundles()
            if readers:
                time.sleep(GOODBYE_S)
            self.close()

    def close(self) -> None:
        """Close the sockets; idempotent."""
        self._router.close()
        self._dealer.close()
        self._waker.close()

    def _say(self, now: float) -> None:
        """Log that the broker answers, or does not answer any more."""
        connected = self.session.relay.is_connected
        if connected == self._connected or now < self._say_at or not self.session.readers:
            return
        self._connected, self._say_at = connected, now + SAY_S
        if connected:
            log.info(
                "the broker at %s answers; reading for %s", self.broker, counted(len(self.session.readers), "rank")
            )
        else:
            log.warning("the broker at %s has not answered for %.0f s", self.broker, self.session.relay.silent_s)

    def _from_broker(self, frames: list[object]) -> None:
        """Decode a message of the broker, for the relay or for its readers."""
        self.received_bytes += _size(frames)
        try:
            if bundles.is_bundle(frames):
                items = tuple(bundles.decode_bundle(frames))
                self._leave_if_foreign([envelope for _, envelope in items])
                self._perform(self.session.handle(ForReaders(items)))
                return
            envelope = wire.decode(frames)
            self._leave_if_foreign([envelope])
            if isinstance(envelope.message, Reject) and envelope.message.code == "version":
                raise Rejected("version", f"{self.broker}: {envelope.message.detail}")
            self._perform(self.session.handle(FromBroker(envelope)))
        except WireError as error:
            self._note_damaged("the broker", error)

    def _leave_if_foreign(self, envelopes: list[Envelope]) -> None:
        """Try another address if a broker that is not the newest has sent one of these messages."""
        if any(envelope.is_foreign(self.session.relay.run, self.session.relay.epoch) for envelope in envelopes):
            self._dealer.leave()

    def _from_reader(self, frames: list[object]) -> None:
        """Decode a message of a local reader."""
        peer: bytes = frames[0].bytes  # type: ignore[attr-defined]
        try:
            self._perform(self.session.handle(FromReader(peer, wire.decode(frames[1:]))))
        except WireError as error:
            self._note_damaged("a rank", error)
            if isinstance(error, wire.OtherVersion):
                self._refuse_version(peer, error.version)

    def _refuse_version(self, peer: bytes, version: int) -> None:
        """Send a rank of another protocol version to the broker, in a message whose header has the rank's version."""
        detail = (
            f"this process uses protocol version {version}, but the relay at {self.listen} (streampack {__version__}) "
            f"uses version {wire.VERSION}. Install the same version of streampack everywhere, and start the relay again"
        )
        reject = Envelope(run=0, epoch=0, fence=0, message=Reject(code="version", detail=detail))
        self._router.send(peer, wire.encode(reject, version))

    def _note_damaged(self, sender: str, error: WireError) -> None:
        """Count a message that cannot be decoded, and log it at most every few seconds."""
        self._damaged += 1
        if time.monotonic() >= self._say_at:
            self._say_at = time.monotonic() + SAY_S
            log.warning("dropped a message of %s that cannot be decoded (%d so far): %s", sender, self._damaged, error)

    def _perform(self, effects: list[Effect]) -> None:
        """Carry out the session's effects: send messages, and write log lines."""
        for effect in effects:
            if isinstance(effect, SendReader):
                if effect.group:
                    self._router.share(effect.peer, effect.group)
                frames = wire.encode(effect.envelope)
                if self._router.send(effect.peer, frames):
                    self.sent_bytes += _size(frames)
                else:
                    self._perform(self.session.handle(NotDelivered(effect.peer, effect.envelope)))
            elif isinstance(effect, SendFor):
                self._bundled.append((effect.reader, effect.envelope))
            elif isinstance(effect, Send):
                self._send_bundles()  # connections keep the order of messages
                if not self._dealer.send(wire.encode(effect.envelope)):
                    self._perform(self.session.handle(Unsent(effect.envelope)))
            elif isinstance(effect, Report):
                log.log(logging.getLevelName(effect.level.upper()), effect.text, extra={"about": effect.about})
            else:
                raise InternalError(f"the relay cannot perform effect {type(effect).__name__}")

    def _send_bundles(self) -> None:
        """Send the messages of the readers that wait; a lost one does no harm, because readers repeat themselves."""
        waiting, self._bundled = self._bundled, []
        for frames in bundles.encode_bundles(waiting):
            self._dealer.send(frames)


def broker_address(option: str | None, timeout_s: float) -> str:
    """Return the broker's address for trainers, from the option, the environment or a rendezvous file.

    Raises UserError if there is none, and Unreachable if the rendezvous file does not come within ``timeout_s``.
    """
    address = option or os.environ.get("STREAMPACK_ENDPOINT", "")
    if not address:
        raise UserError(
            "got no broker, expected its address for trainers. Pass --broker tcp://host:port, or set "
            "STREAMPACK_ENDPOINT"
        )
    if address.startswith("file://"):
        return read_rendezvous(Path(address.removeprefix("file://")), "trainers", timeout_s)
    return address


def serve(broker: str, listen: str, memory_bytes: int, key: Key | None) -> None:
    """Run a relay until SIGTERM, SIGINT or SIGHUP. Raises UserError for an address that cannot be used."""
    hold_back()
    service = RelayService(broker, listen, memory_bytes, key)
    with on_ending_signals(lambda _: service.stop()):
        log.info("reading from %s for the ranks of this host; ranks connect to %s", broker, listen)
        service.run()
        figures = {"received_bytes": service.received_bytes, "sent_bytes": service.sent_bytes}
        log.info(
            "stopped after receiving %.1f MB and giving %.1f MB to ranks; they continue with the broker",
            figures["received_bytes"] / 1e6, figures["sent_bytes"] / 1e6, extra={"figures": figures},
        )  # fmt: skip


def _size(frames: Iterable[Any]) -> int:
    """Return the bytes of all frames of a message."""
    return sum(memoryview(frame).nbytes for frame in frames)
