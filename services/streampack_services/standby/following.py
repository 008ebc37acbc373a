"""The standby's side: copies the log of the active broker until it takes over.

This is a thin shell around ``core.standby.log_follower``.

Every broker with a standby starts here, the active one too: it becomes active by an entry of the arbiter.
"""

from __future__ import annotations

import logging
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from msgspec import Struct

from streampack.config.daemon_settings import BrokerConfig
from streampack.config.service_settings import StandbySettings
from streampack.core.protocol.events import Effect, Event, Report, Tick
from streampack.core.standby.arbiter_entries import CreateEntry, Entry, ReadNewest
from streampack.core.standby.log_follower import FollowerPhase, LogFollower
from streampack.core.standby.standby_events import (
    CutBelow,
    Discard,
    FromPeer,
    LogState,
    Over,
    SendPeer,
    TakeOver,
    WriteRecords,
)
from streampack.errors import Rejected, UserError, WireError
from streampack.transport.keys import Key
from streampack.transport.sockets import Dealer, Poller, drain
from streampack.transport.waker import Waker
from streampack.wire import frames as wire
from streampack_services.figure import filled, gauge
from streampack_services.ledger.state_dir import LEDGER, indexed_upto
from streampack_services.log.log import Log
from streampack_services.standby.arbiter import Arbiter
from streampack_services.standby.copy_state import NOTE, CopyState, read_state, write_state
from streampack_services.standby.questions import Questions
from streampack_services.standby.shipping import advertised

log = logging.getLogger("streampack.standby")

TICK_S = 0.2
SAY_S = 10.0
"""Seconds between two log lines about what the standby waits for."""


class FollowingStatus(Struct, frozen=True, kw_only=True):
    """The state of a standby that is not active."""

    name: str
    """The standby's own name."""
    phase: str
    waits_for: str
    active: str
    """Name of the active broker; empty if it is not known."""
    is_member: Annotated[bool, gauge(
        "standby_member", "1 if this standby has every safe record, so that it may take over.")]  # fmt: skip
    records: Annotated[int, gauge("standby_records", "Records in the standby's copy of the log.")]
    first_record: int
    unsafe_records: int
    """Records that are not safe on this host's disk yet."""


class Following:
    """One broker that is not active yet; ``run`` returns the entry with which it becomes active.

    Args:
        config: The broker's configuration, with ``standby`` and ``state_dir``.
        arbiter: The arbiter.
        waits: True if it does not begin a run.
        key: The key to show to the active broker; None for no key.

    Raises:
        UserError: The log is in use, or an address cannot be used.
        LogDamaged: The log cannot be read.
    """

    def __init__(self, config: BrokerConfig, arbiter: Arbiter, *, waits: bool, key: Key | None = None) -> None:
        assert config.standby is not None
        assert config.state_dir is not None
        settings = config.standby
        self._config, self._key = config, key
        self._where = Path(config.state_dir)
        self._where.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._waker = Waker()
        try:
            is_useless = (self._where / NOTE).exists() and read_state(self._where).epoch == 0
            self._log = self._open(0, discards=is_useless)
        except BaseException:
            self._waker.close()
            raise
        self._state = read_state(self._where)
        self._questions = Questions(arbiter, self._waker.wake)
        self.follower = LogFollower(
            config.run_id, settings.host, f"{socket.gethostname()}-{uuid.uuid4().hex[:12]}", advertised(settings),
            log_epoch=self._state.epoch, log_id=self._state.log_id, least_epoch=time.time_ns(),
            takeover_s=settings.takeover_s, goes_on=settings.on_loss == "go_on",
            config_digest=config.digest, producers=_reachable(config.listen.producers),
            trainers=_reachable(config.listen.trainers), waits=waits,
        )  # fmt: skip
        self._dealer: Dealer | None = None
        self._poller = Poller([], self._waker)
        self._stopped = False
        self._entry: Entry | None = None
        self._ticked = self._clock = 0.0
        self._said, self._said_at = "", 0.0

    def _open(self, first_lsn: int, *, discards: bool) -> Log:
        """Open the log, or delete it first; an empty one begins with record ``first_lsn``."""
        return Log.open(
            self._where, durability=self._config.safely, on_safe=self._waker.wake, first_lsn=first_lsn,
            discards=discards, indexed_upto=lambda: indexed_upto(self._where),
        )  # fmt: skip

    def stop(self) -> None:
        """Make ``run`` return soon. Any thread or signal handler may call it."""
        self._stopped = True
        self._waker.wake()

    def run(self, on_turn: Callable[[], None] = lambda: None) -> Entry | None:
        """Follow the active broker; return the entry of this broker once it is active, or None after ``stop``.

        Args:
            on_turn: Called in each turn of the loop, a few times a second.
        """
        try:
            self._handle(self._log_state())
            while self._entry is None and not self._stopped:
                self._poller.wait(TICK_S)
                self._turn()
                on_turn()
        finally:
            self.close()
        if self._entry is not None:
            write_state(self._where, CopyState(self._entry.epoch, self._state.log_id))
        return self._entry

    def close(self) -> None:
        """Close the socket and the log; idempotent."""
        self._questions.close()
        if self._dealer is not None:
            self._dealer.close()
        self._log.close()
        self._waker.close()

    @property
    def status(self) -> FollowingStatus:
        """The state of this standby, for people and programs."""
        follower = self.follower
        return filled(
            FollowingStatus,
            follower,
            phase=follower.phase.name.lower(),
            active=follower.leader.active if follower.leader is not None else "",
            records=self._log.next_lsn,
            first_record=self._log.first_lsn,
            unsafe_records=self._log.next_lsn - self._log.safe_upto,
        )

    def _turn(self) -> None:
        """Handle messages, answers and the clock."""
        if self._dealer is not None:
            for frames in drain(self._dealer, 64):
                try:
                    self._handle(FromPeer(wire.decode(frames)))
                except wire.OtherVersion as error:
                    self.follower.refused = f"the active broker: {error}"
                except WireError as error:
                    log.warning("dropped a message of the active broker: %s", error)
            try:
                self._dealer.check()
            except Rejected as error:
                self.follower.refused = error.detail
        for answer in self._questions.take():
            self._handle(answer)
        self._log.flush()
        now = time.monotonic()
        if now - self._ticked >= TICK_S:
            self._clock += min(now - self._ticked, 1.0) if self._ticked else 0.0
            self._ticked = now
            self._handle(Tick(self._clock))
            self._say(now)
        self._handle(self._log_state())
        self._connect()

    def _log_state(self) -> LogState:
        """Return the state of the own log."""
        return LogState(self._log.first_lsn, self._log.next_lsn, self._log.safe_upto)

    def _connect(self) -> None:
        """Connect to the active broker, if it is another one than before."""
        leader = self.follower.leader
        address = leader.address if leader is not None and self.follower.phase is FollowerPhase.FOLLOWING else ""
        if address == ("" if self._dealer is None else self._dealer.endpoint):
            return
        if self._dealer is not None:
            self._dealer.close()
            self._dealer = None
        if address:
            self._dealer = Dealer(address, 1 << 30, key=self._key)
        self._poller = Poller([self._dealer] if self._dealer is not None else [], self._waker)

    def _say(self, now: float) -> None:
        """Log what the standby does when that changes, and from time to time while it waits."""
        follower = self.follower
        plain = follower.unreachable or follower.refused or f"{follower.phase} {follower.is_member}"
        if plain != self._said and now - self._said_at > 1.0:
            self._said, self._said_at = plain, now
            trouble = follower.unreachable or follower.refused
            log.log(logging.WARNING if trouble else logging.INFO, "standby: %s", follower.waits_for)

    def _handle(self, event: Event) -> None:
        """Hand an event to the state machine, and perform its effects."""
        waiting = deque([event])
        while waiting and self._entry is None:
            for effect in self.follower.handle(waiting.popleft()):
                self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        """Perform an effect."""
        if isinstance(effect, SendPeer):
            if self._dealer is not None:
                self._dealer.send(wire.encode(effect.envelope))
        elif isinstance(effect, CreateEntry | ReadNewest):
            self._questions.ask(effect)
        elif isinstance(effect, WriteRecords):
            self._write(effect)
        elif isinstance(effect, Discard):
            self._discard(effect)
        elif isinstance(effect, CutBelow):
            self._log.cut(effect.lsn)
        elif isinstance(effect, TakeOver):
            self._entry = effect.entry
        elif isinstance(effect, Over):
            log.info("%s", effect.why)
            self._stopped = True
        elif isinstance(effect, Report):
            log.log(logging.getLevelName(effect.level.upper()), effect.text, extra={"about": effect.about})

    def _write(self, effect: WriteRecords) -> None:
        """Append records to the log."""
        if effect.first != self._log.next_lsn:
            raise UserError(f"got record {effect.first} of the log, expected record {self._log.next_lsn}")
        at = 0
        for kind, size in zip(effect.kinds, effect.sizes, strict=True):
            self._log.append(kind, [bytes(effect.bodies[at : at + size])])
            at += size
        self._log.flush()

    def _discard(self, effect: Discard) -> None:
        """Delete the log, and begin the copy of another one; a crash on the way leaves a log that is of no use."""
        write_state(self._where, CopyState(0, effect.log_id))
        self._log.close()
        for path in self._where.glob(f"{LEDGER}*"):
            path.unlink()
        self._log = self._open(effect.first, discards=True)
        self._state = CopyState(effect.epoch, effect.log_id)
        write_state(self._where, self._state)


def _reachable(address: str) -> str:
    """Return an address of `listen` with this host's name; empty if its port is not fixed."""
    if address.startswith("tcp://") and address.rpartition(":")[2] in ("*", "0"):
        return ""
    host = socket.gethostname()
    return address.replace("0.0.0.0", host).replace("[::]", host).replace("//*:", f"//{host}:")


def standby_settings(config: BrokerConfig) -> StandbySettings:
    """Return the settings of the standby. Raises UserError if there are none."""
    if config.standby is None:
        raise UserError(
            "got --standby, but broker.yaml has no `standby` section. Add one with an `arbiter` that both hosts reach"
        )
    return config.standby
