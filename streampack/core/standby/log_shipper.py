"""The active broker's side of a standby, as a pure state machine: ``handle(event) -> effects``.

It ships the log to the standby, and decides which records are safe. Alone, that is what its own disk has. With a
standby that is a member, it is what both disks have.

A standby becomes a member in three steps. It copies the log. Then the active broker begins to call only those records
safe that both have (``gated``). Once the standby has every record that was safe before, the entry with both members is
written. If the entry's fate is unknown, both count as members.

A member that is silent for ``lost_s`` is lost. With ``goes_on``, the active broker writes an entry without it, and then
goes on alone. Otherwise nothing new becomes safe until the standby is back.
"""

from __future__ import annotations

from msgspec import structs

from streampack.core.protocol.events import Effect, Event, Report, Tick
from streampack.core.protocol.handlers import Handlers
from streampack.core.protocol.message import Envelope, Message, Reject
from streampack.core.protocol.standby_messages import Follow, HandOver, Lead, Replaced
from streampack.core.standby.arbiter_entries import CreateEntry, Entry, EntryWritten, Newest, ReadNewest
from streampack.core.standby.standby_events import FromPeer, LogState, Over, SendPeer, Ship, Shipped

LEAD_S = 0.5
"""Seconds between two signs of life for the standby."""
RETRY_S = 1.0
"""Seconds without progress after which records are shipped again, and after which an entry is tried again."""
ANSWER_S = 10.0
"""Seconds after which an entry is written again if the arbiter has not answered."""
LATE_S = 2.0
"""Seconds without progress after which a standby that is alive counts as late."""
HEARD_S = 2.0
"""Seconds of silence after which a standby is not handed over to, since it may have died."""
MOST_SHIPPED = 8
"""Most messages with records that are on their way to the standby."""
TICK_S = 1.0
"""Most seconds that one tick counts: more means that the process was stopped."""


class LogShipper:
    """The state of one active broker towards its standby.

    Args:
        run: The run.
        entry: The entry with which this broker started.
        log_upto: Records that its log had when it started.
        goes_on: True if a lost standby is left behind, False if everything waits for it.
        lost_s: Seconds of silence after which the standby is lost.
        config_digest: Digest of the settings that decide the steps.

    Attributes:
        entry: The newest entry that this broker has written.
        standby: Name of the standby that is connected; empty if there is none.
        acked: Every record before this one is safe on the standby's disk.
    """

    def __init__(
        self, run: int, entry: Entry, log_upto: int, *, goes_on: bool, lost_s: float, config_digest: bytes = b""
    ) -> None:  # fmt: skip
        self.run, self.entry, self._log_upto, self._goes_on, self._lost_s = run, entry, log_upto, goes_on, lost_s
        self._config_digest = config_digest
        self.standby = ""
        self.acked = 0
        self.unreachable = ""
        """Reason why the arbiter cannot be reached; empty if it can."""
        self.over = False
        self._process, self._peer = "", b""
        """The standby's process, and its connection."""
        self._first_lsn = self._next_lsn = self._local_safe = 0
        """The own log's first record and its next one; the records before the last number are safe on its disk."""
        self._safe_upto = 0
        self._sent_upto = self._have_upto = 0
        """Every record before the first number was shipped; the standby has every record before the second."""
        self._copies_from = -1
        """First record of the copy that the standby must begin with; -1 once it has begun."""
        self._shipped: list[int] = []
        """Ends of the messages with records that are on their way."""
        self._gated_at: int | None = None
        """Records that were safe when the standby's copy began to count; None if it does not count."""
        self._pending: Entry | None = None
        """The entry that is being written."""
        self._again_at = 0.0
        """Time at which the pending entry is tried again."""
        self._now = self._led_at = 0.0
        """The time now, and that of the last sign of life for the standby."""
        self._silent_s = 0.0
        """Seconds since the standby's last message."""
        self._stuck_s = 0.0
        """Seconds for which the standby has received none of the records on their way."""
        self._asked_at: float | None = None
        """Time at which the newest entry was asked for, while the standby is silent."""
        self._behind_s = 0.0
        """Seconds for which the standby has confirmed nothing, although it lacks records."""
        self._cut_off_s = 0.0
        """Seconds for which neither the standby nor the arbiter has answered."""

    @property
    def is_member(self) -> bool:
        """True if the newest entry, or one whose fate is unknown, names a standby as a member."""
        return len(self._members) > 1

    @property
    def safe_upto(self) -> int:
        """Every record before this one is safe."""
        return self._safe_upto

    @property
    def waits(self) -> str:
        """The reason why nothing new becomes safe; empty if it does."""
        if self.is_member:
            if self.standby and self._silent_s <= self._lost_s:
                late = self._behind_s > LATE_S
                return f"the standby {self.standby} confirms no records for {self._behind_s:.0f} s" if late else ""
            lost = next(name for name in self._members if name != self.entry.active)
            return f"the standby {lost} is silent for {self._silent_s:.0f} s{self._no_arbiter}"
        if self.entry.alone:
            return ""
        return f"the standby {self.standby} copies the log" if self.standby else "no standby is connected"

    @property
    def _members(self) -> tuple[str, ...]:
        pending = self._pending
        return self.entry.members if pending is None or len(pending.members) == 1 else pending.members

    @property
    def _no_arbiter(self) -> str:
        return f"; the arbiter cannot be reached: {self.unreachable}" if self.unreachable else ""

    @property
    def lag(self) -> int:
        """Records that the standby does not have on its disk yet."""
        return max(self._next_lsn - self.acked, 0) if self.standby else 0

    def handle(self, event: Event) -> list[Effect]:
        """Return the effects of an event, for the shell to perform in order."""
        if self.over:
            return []
        effects = self._events[type(event)](self, event)
        self._count_safe()
        return effects

    _events = Handlers[[], list[Effect]]()
    _events.ignore(Event)

    @_events.of(LogState)
    def _on_log(self, event: LogState) -> list[Effect]:
        """Take the state of the own log, and ship its new records."""
        self._first_lsn, self._next_lsn, self._local_safe = event.first_lsn, event.next_lsn, event.safe_upto
        return self._ship()

    @_events.of(Shipped)
    def _on_shipped(self, event: Shipped) -> list[Effect]:
        """Note records that are on their way, and ship the next ones."""
        if event.upto > self._sent_upto:
            self._sent_upto = event.upto
            self._shipped.append(event.upto)
        return self._ship()

    def _count_safe(self) -> None:
        """Move ``safe_upto`` on, as far as the records are on the disks of all members."""
        if self.is_member or self._gated_at is not None:
            upto = min(self._local_safe, self.acked)
        else:
            upto = self._local_safe if self.entry.alone else 0
        self._safe_upto = max(self._safe_upto, upto)

    @property
    def may_hand_over(self) -> bool:
        """True if the standby may take over at once, and has been heard of in the last two seconds."""
        return self._is_written and self._hears_standby

    @property
    def lets_in(self) -> bool:
        """True if the standby copies the log, and may take over once an entry names it."""
        return not self.over and not self._is_written and self._hears_standby

    @property
    def _is_written(self) -> bool:
        """True if the newest entry names the standby as a member."""
        return len(self.entry.members) > 1 and self._pending is None

    @property
    def _hears_standby(self) -> bool:
        """True if the standby has been heard of in the last two seconds."""
        return bool(self.standby) and self._silent_s <= HEARD_S

    def leave(self, finished: bool) -> list[Effect]:
        """Return the effects of this broker's end: they tell the standby, so that it need not wait."""
        if self.over or not self.standby:
            return []
        return [self._send(self._peer, HandOver(finished=finished))]

    # The standby

    @_events.of(FromPeer)
    def _receive(self, event: FromPeer) -> list[Effect]:
        """Handle a message of a standby."""
        peer, envelope, message = event.peer, event.envelope, event.envelope.message
        if not isinstance(message, Follow) or message.name == self.entry.active:
            return []
        if envelope.run != self.run or message.config_digest != self._config_digest:
            difference = "run" if envelope.run != self.run else "settings (rules, streams, seed or fields)"
            detail = f"got a standby with another {difference}, expected the broker.yaml of the active broker"
            return [self._send(peer, Reject(code="standby", detail=detail))]
        lost = self._silent_s > self._lost_s
        if self.standby and message.process != self._process and not lost:
            return [self._send(peer, Replaced(name=self.standby))]
        if self.is_member and message.name not in self._members:
            return [self._send(peer, Replaced(name=next(n for n in self._members if n != self.entry.active)))]
        effects: list[Effect] = []
        self._silent_s = 0.0
        if message.process != self._process or self.standby != message.name:
            effects += self._greet(message)
        self._peer = peer
        if not self._fits(message):
            return effects + self._begin_copy(message)
        self._copies_from = -1
        if message.have_upto > self._have_upto:
            self._have_upto, self._stuck_s = message.have_upto, 0.0
            self._shipped = [upto for upto in self._shipped if upto > message.have_upto]
            self._sent_upto = max(self._sent_upto, message.have_upto)
        if message.safe_upto > self.acked:
            self.acked, self._behind_s = message.safe_upto, 0.0
        return effects + self._ship() + self._let_in()

    def _greet(self, message: Follow) -> list[Effect]:
        """Take a standby's process, whose log may be a copy of this one already."""
        self.standby, self._process = message.name, message.process
        self._gated_at = self._gated_at if self.is_member else None
        self._copies_from = -1
        self._resume_at(message.have_upto if message.log_epoch == self.entry.epoch else 0)
        self.acked = self.acked if self.is_member else 0
        return [Report("info", f"the standby {message.name} follows this broker", host=message.name)]

    def _resume_at(self, lsn: int) -> None:
        """Ship the records from ``lsn`` on."""
        self._sent_upto = self._have_upto = lsn
        self._shipped, self._stuck_s = [], 0.0

    def _fits(self, message: Follow) -> bool:
        """Return whether the standby's log is a copy of this one, as far as it goes."""
        if message.log_epoch != self.entry.epoch:
            return False
        return self._first_lsn <= message.have_upto <= self._next_lsn and message.safe_upto <= message.have_upto

    def _begin_copy(self, message: Follow) -> list[Effect]:
        """Let the standby discard its log, and copy this one; a member must first be removed by an entry."""
        if self.is_member:
            return [] if self._pending is not None else self._remove_standby(f"{message.name} must copy the log anew")
        if self._copies_from >= self._first_lsn:
            return []  # it was told, and is told again at each sign of life
        self._gated_at = None
        self._copies_from, self.acked = self._first_lsn, 0
        self._resume_at(self._first_lsn)
        return [self._lead()]

    def _ship(self) -> list[Effect]:
        """Ship the next records, unless many are on their way, or the standby must discard its log first."""
        if not self.standby or self._copies_from >= 0 or self._sent_upto >= self._next_lsn:
            return []
        if len(self._shipped) >= MOST_SHIPPED or self._sent_upto < self._first_lsn:
            return []
        return [Ship(self._peer, self._sent_upto)]

    def _let_in(self) -> list[Effect]:
        """Let a standby that has caught up become a member, step by step."""
        if self.is_member or self._pending is not None or not self.standby:
            return []
        if self._gated_at is None:
            if self.acked < min(self._next_lsn, max(self._safe_upto, self._log_upto)):
                return []
            self._gated_at = max(self._safe_upto, self._log_upto)
        if self.acked < self._gated_at:
            return []
        return self._write(structs.replace(
            self.entry, number=self.entry.number + 1, members=(self.entry.active, self.standby), alone=False,
        ))  # fmt: skip

    # Entries

    def _write(self, entry: Entry) -> list[Effect]:
        """Write an entry."""
        self._pending, self._again_at = entry, self._now + ANSWER_S
        return [CreateEntry(entry)]

    def _remove_standby(self, why: str) -> list[Effect]:
        """Write an entry without the standby."""
        text = f"the standby is no member any more: {why}"
        entry = structs.replace(
            self.entry, number=self.entry.number + 1, members=(self.entry.active,), alone=self._goes_on
        )
        return [Report("warning", text), *self._write(entry)]

    @_events.of(EntryWritten)
    def _entry_written(self, event: EntryWritten) -> list[Effect]:
        """Handle the arbiter's answer."""
        if event.entry != self._pending:
            return []
        self.unreachable = event.why
        if event.present is None:
            self._again_at = self._now + RETRY_S
            return []
        if not event.won:
            return self._end(event.present)
        self.entry, self._pending, self._gated_at = event.entry, None, None
        members = " and ".join(self.entry.members)
        return [Report("info", f"entry {self.entry.number} of the arbiter: {members} have every record")]

    @_events.of(Newest)
    def _look_at(self, newest: Newest) -> list[Effect]:
        """Handle the newest entry, which was read because the standby is silent: it may have taken over."""
        self.unreachable = newest.why
        if newest.why:
            return []
        self._cut_off_s = 0.0
        if newest.entry is not None and newest.entry.number > self.entry.number and newest.entry != self._pending:
            return self._end(newest.entry)
        return []

    def _end(self, entry: Entry) -> list[Effect]:
        """End this broker, because another one has written an entry."""
        self.over = True
        return [Over(f"the broker of {entry.active} has taken over (entry {entry.number} of the arbiter)")]

    # Time

    @_events.of(Tick)
    def _tick(self, event: Tick) -> list[Effect]:
        """Send a sign of life, ship lost records again, and deal with a lost standby."""
        now = event.now
        passed, self._now = min(max(now - self._now, 0.0), TICK_S), now
        self._silent_s += passed
        self._behind_s = self._behind_s + passed if self.acked < self._local_safe else 0.0
        effects: list[Effect] = []
        if self._pending is not None and now >= self._again_at:
            effects += self._write(self._pending)
        if self._silent_s > self._lost_s:
            return effects + self._note_lost(passed)
        self._cut_off_s = 0.0
        if self.standby and self._sent_upto > self._have_upto:
            self._stuck_s += passed
            if self._stuck_s > RETRY_S:
                self._resume_at(self._have_upto)
                effects += self._ship()
        if self.standby and now - self._led_at >= LEAD_S:
            self._led_at = now
            effects.append(self._lead())
        return effects

    def _note_lost(self, passed_s: float) -> list[Effect]:
        """Forget a lost standby that is no member; for a lost member, write an entry without it or ask the arbiter.

        ``passed_s``: seconds since the last call. Ends this broker if the arbiter has not answered for long, either.
        """
        self._shipped.clear()
        if not self.is_member:
            lost, self.standby, self._process, self._gated_at = self.standby, "", "", None
            return [Report("warning", f"the standby {lost} is silent", host=lost)] if lost else []
        self._cut_off_s += passed_s
        if self._cut_off_s > self._lost_s and self.unreachable:
            self.over = True
            return [Over(
                f"neither the standby nor the arbiter answers ({self.unreachable}), so another broker may be active. "
                f"Start this broker again once the arbiter can be reached"
            )]  # fmt: skip
        if self._pending is not None:
            return []
        if self._goes_on:
            return self._remove_standby(f"it was silent for {self._silent_s:.0f} s")
        if self._asked_at is None or self._now - self._asked_at >= RETRY_S:
            self._asked_at = self._now
            return [ReadNewest()]
        return []

    def _lead(self) -> Effect:
        """Return the effect that sends a sign of life."""
        return self._send(self._peer, Lead(
            process=self._process, entry=self.entry.number,
            is_member=self._is_written, first_lsn=self._first_lsn, copies_from=self._copies_from,
        ))  # fmt: skip

    def _send(self, peer: bytes, message: Message) -> SendPeer:
        """Return the effect that sends a message to a standby."""
        return SendPeer(Envelope(run=self.run, epoch=self.entry.epoch, fence=0, message=message), peer)
