"""The active broker's side of a standby: a thin shell around ``core.standby.log_shipper``.

The broker's thread owns the socket, and calls ``turn`` in each turn of its loop.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from collections.abc import Callable

from streampack.config.service_settings import StandbySettings
from streampack.core.protocol.events import Effect, Event, Report, Tick
from streampack.core.protocol.message import Envelope, Reject
from streampack.core.protocol.rights import Rights
from streampack.core.protocol.standby_messages import MOST_RECORDS, Follow, LogRecords
from streampack.core.standby.arbiter_entries import CreateEntry, Entry, ReadNewest
from streampack.core.standby.log_shipper import LogShipper
from streampack.core.standby.standby_events import FromPeer, LogState, Over, SendPeer, Ship, Shipped
from streampack.errors import UserError, WireError
from streampack.transport.curve import Door
from streampack.transport.sockets import Router, drain
from streampack.transport.unread import CutConnection, Unread
from streampack.version import __version__
from streampack.wire import frames as wire
from streampack_services.descriptors import num_free
from streampack_services.log.log import Log
from streampack_services.standby.arbiter import Arbiter
from streampack_services.standby.questions import Questions

log = logging.getLogger("streampack.standby")

BATCH_BYTES = 1 << 20
"""Bytes of records in one message, unless a single record is larger."""
SAY_S = 10.0
"""Least seconds between two log lines about cut connections."""
LINGER_MS = 500
"""Milliseconds that the last message may take to leave."""
GOODBYE_S = 1.0
"""Seconds from the last message to the end of the connection. A standby that has not read the message by then loses it:
ZeroMQ drops what is unread when a connection ends (``ZMQ_IMMEDIATE``)."""
MAX_MESSAGE_BYTES = 1 << 20
"""Most bytes of a message of the standby, which sends no payload."""
UNREAD_BYTES = 8 << 20
"""Most unread bytes of all connections of standbys."""


class Shipping:
    """Ships the log of the active broker to its standby.

    Args:
        settings: The ``standby`` settings of broker.yaml.
        run: The run.
        entry: The entry with which this broker is active.
        source: The broker's log.
        arbiter: The arbiter.
        config_digest: Digest of the settings that decide the steps.
        wake: Called in another thread when ``turn`` has something to do.
        door: The keys that are admitted; None without keys.
        rights: Returns the rights of a connection's key; None without keys.

    Raises:
        UserError: The address cannot be used.
    """

    def __init__(
        self, settings: StandbySettings, run: int, entry: Entry, source: Log, arbiter: Arbiter, config_digest: bytes,
        wake: Callable[[], None], door: Door | None = None, rights: Callable[[bytes], Rights] | None = None,
    ) -> None:  # fmt: skip
        unread = Unread(UNREAD_BYTES, slack=1 << 40, most_strangers=max(num_free() // 4, 1))
        self.router = Router(settings.listen, MAX_MESSAGE_BYTES, door, unread, linger_ms=LINGER_MS)
        self._rights = rights
        self._log = source
        self._questions = Questions(arbiter, wake)
        self.shipper = LogShipper(
            run, entry, source.next_lsn, goes_on=settings.on_loss == "go_on", lost_s=settings.takeover_s,
            config_digest=config_digest,
        )  # fmt: skip
        self._run = run
        self.over = ""
        """The reason to end the broker, because another one is active; empty if there is none."""
        self._cuts: list[CutConnection] = []
        self._say_cuts_at = 0.0
        self.follower: Follow | None = None
        """The last message of the standby, with its addresses."""
        self._handle(LogState(source.first_lsn, source.next_lsn, source.safe_upto))

    @property
    def safe_upto(self) -> int:
        """Every record before this one is safe on all hosts that may take over."""
        return self.shipper.safe_upto

    @property
    def waits(self) -> str:
        """The reason why records wait for the standby; empty if they do not."""
        return self.shipper.waits

    @property
    def standby_addresses(self) -> dict[str, str]:
        """Addresses at which the standby would serve, by ``producers`` and ``trainers``; empty before it has come."""
        if self.follower is None:
            return {}
        return {"producers": self.follower.producers, "trainers": self.follower.trainers}

    def turn(self, now: float | None) -> None:
        """Handle the standby's messages and the arbiter's answers; ``now`` is the time in seconds once a tick."""
        for frames in drain(self.router, 64):
            peer = frames[0].bytes
            if self._rights is not None and (role := self._rights(peer).role) not in ("standby", "any"):
                self._refuse(peer, f"got a key of role {role}, expected a key of role standby")
                continue
            try:
                envelope = wire.decode(frames[1:])
            except wire.OtherVersion as error:
                self._refuse(
                    peer, f"got a standby of another version, expected streampack {__version__}", error.version
                )
                continue
            except WireError:
                self.router.note_damaged(peer)
                continue
            if isinstance(envelope.message, Follow):
                self.follower = envelope.message
            self._handle(FromPeer(envelope, peer))
        for answer in self._questions.take():
            self._handle(answer)
        self._tell_cuts(self.router.take_cuts())
        if now is not None:
            self._handle(Tick(now))
        self._handle(LogState(self._log.first_lsn, self._log.next_lsn, self._log.safe_upto))

    def _tell_cuts(self, cuts: list[CutConnection]) -> None:
        """Log the last of the cut connections and their number, at most every SAY_S: anyone may cause many."""
        self._cuts += cuts
        if self._cuts and time.monotonic() >= self._say_cuts_at:
            self._say_cuts_at = time.monotonic() + SAY_S
            last, others = self._cuts[-1], len(self._cuts) - 1
            more = f" (and {others} others since the last such line)" if others else ""
            log.warning("cut the connection of %s to the standby's port: %s%s", last.address, last.why, more)
            self._cuts = []

    def _refuse(self, peer: bytes, why: str, version: int | None = None) -> None:
        """Tell a peer why it may not copy the log; ``version`` is its protocol version, if that is another one."""
        reject = Envelope(
            run=self._run, epoch=self.shipper.entry.epoch, fence=0, message=Reject(code="standby", detail=why)
        )
        self.router.send(peer, wire.encode(reject, version))

    @property
    def may_hand_over(self) -> bool:
        """True if the standby may take over at once."""
        return not self.over and self.shipper.may_hand_over

    @property
    def lets_in(self) -> bool:
        """True if the standby copies the log, and may take over soon."""
        return not self.over and self.shipper.lets_in

    def leave(self, finished: bool) -> None:
        """Tell the standby that this broker ends, and give it time to read that; ``finished``: and the run with it."""
        effects = self.shipper.leave(finished)
        for effect in effects:
            self._perform(effect)
        if effects:
            time.sleep(GOODBYE_S)

    def close(self) -> None:
        """Close the socket, and end the thread; idempotent."""
        self.router.close()
        self._questions.close()

    def _handle(self, event: Event) -> None:
        """Hand an event to the state machine, and perform its effects and those of the events that they cause."""
        waiting = deque([event])
        while waiting:
            for effect in self.shipper.handle(waiting.popleft()):
                if isinstance(effect, Ship):
                    waiting.append(self._ship(effect))
                else:
                    self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        """Perform an effect."""
        if isinstance(effect, SendPeer):
            self.router.send(effect.peer, wire.encode(effect.envelope))
        elif isinstance(effect, CreateEntry | ReadNewest):
            self._questions.ask(effect)
        elif isinstance(effect, Over):
            self.over = effect.why
        elif isinstance(effect, Report):
            log.log(logging.getLevelName(effect.level.upper()), effect.text, extra={"about": effect.about})

    def _ship(self, effect: Ship) -> Shipped:
        """Send the next records in one message."""
        kinds, sizes, bodies, total = bytearray(), bytearray(), [], 0
        for record in self._log.entries(effect.first, effect.first + MOST_RECORDS):
            if kinds and total + len(record.body) > BATCH_BYTES:
                break
            kinds.append(record.kind)
            sizes += len(record.body).to_bytes(4, "little")
            bodies.append(record.body)
            total += len(record.body)
        if kinds:
            message = LogRecords(first=effect.first, kinds=bytes(kinds), sizes_u32=bytes(sizes))
            epoch = self.shipper.entry.epoch
            envelope = Envelope(run=self._run, epoch=epoch, fence=0, message=message, payload=(b"".join(bodies),))
            self.router.send(effect.peer, wire.encode(envelope))
        return Shipped(effect.first + len(kinds))


def advertised(settings: StandbySettings) -> str:
    """Return the address at which a standby reaches this host. Raises UserError if the port is not fixed."""
    if settings.address is not None:
        return settings.address.replace("{name}", settings.host)
    port = settings.listen.rpartition(":")[2]
    if settings.listen.startswith("tcp://") and port in ("*", "0"):
        raise UserError(
            f"standby.listen: got {settings.listen}, expected a fixed port, because the arbiter's entry names it"
        )
    host = socket.gethostname()
    return settings.listen.replace("0.0.0.0", host).replace("[::]", host).replace("//*:", f"//{host}:")
