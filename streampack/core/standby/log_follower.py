"""The standby's side, as a pure state machine: ``handle(event) -> effects``.

It copies the log of the active broker, and confirms each record once the record is safe on its own disk. If the active
broker is silent for ``takeover_s``, and the standby is a member of the newest entry, it writes the next entry. From
then on it confirms nothing more, and hears nothing more of that broker: the entry may exist although the answer is
lost. A standby that loses the race for the entry follows the winner.
"""

from __future__ import annotations

from enum import Enum

from streampack.core.protocol.events import Effect, Event, Report, Tick
from streampack.core.protocol.handlers import Handlers
from streampack.core.protocol.message import Envelope, Message, Reject
from streampack.core.protocol.standby_messages import Follow, HandOver, Lead, LogRecords, Replaced
from streampack.core.standby.arbiter_entries import (
    CreateEntry,
    Entry,
    EntryWritten,
    Newest,
    ReadNewest,
    first_entry,
    may_start,
)
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

FOLLOW_S = 0.5
"""Seconds between two messages to the active broker."""
LOOK_S = 1.0
"""Seconds between two looks at the newest entry, and between two tries to write one."""
ANSWER_S = 10.0
"""Seconds after which an entry is written again if the arbiter has not answered."""
TICK_S = 1.0
"""Most seconds that one tick counts: more means that the process was stopped."""


class FollowerPhase(Enum):
    """Phases of a standby; the value is a text for people."""

    LOOKING = "looks for the active broker"
    FOLLOWING = "copies the log"
    ASKING = "asks the arbiter to take over"
    ACTIVE = "is the active broker"


class LogFollower:
    """The state of one standby.

    Args:
        run: The run.
        name: Name of this host.
        process: Identifies this process.
        address: Address at which it would ship its log.
        log_epoch: Epoch of the broker whose log is on the own disk; 0 if there is none.
        log_id: Identifies the log on the own disk.
        least_epoch: Least epoch of the first active broker of a run.
        takeover_s: Seconds of silence after which the active broker is lost.
        goes_on: True if it would serve without a standby, once it is active.
        config_digest: Digest of the settings that decide the steps.
        producers, trainers: Addresses at which it would serve.
        waits: True if it does not begin a run: it waits until there is an active broker.

    Attributes:
        phase: The phase now.
        leader: The newest entry of the active broker that is known; None before the first look.
        is_member: True if the standby may take over, as far as it knows.
    """

    def __init__(
        self, run: int, name: str, process: str, address: str, *, log_epoch: int, log_id: str, least_epoch: int = 1,
        takeover_s: float, goes_on: bool, config_digest: bytes = b"", producers: str = "", trainers: str = "",
        waits: bool = True,
    ) -> None:  # fmt: skip
        self.run, self.name, self.process, self.address = run, name, process, address
        self.log_epoch, self._log_id, self._takeover_s, self._goes_on = log_epoch, log_id, takeover_s, goes_on
        self._config_digest, self._least_epoch = config_digest, least_epoch
        self._producers, self._trainers, self._waits = producers, trainers, waits
        self.phase = FollowerPhase.LOOKING
        self.leader: Entry | None = None
        self.is_member = False
        self.unreachable = ""
        """Reason why the arbiter cannot be reached; empty if it can."""
        self.refused = ""
        """Reason why the active broker does not accept this standby; empty if it does."""
        self._looks = True
        """True if the newest entry must be read at once."""
        self._first_lsn = self._num_logs = 0
        self._asked_entry: Entry | None = None
        self._silent_s = 0.0
        self._handed_over = False
        """True once the active broker has said that it ends; what it sends afterwards is no sign of life."""
        self._now = self._look_at = self._follow_at = 0.0
        self._next_lsn = self._safe_upto = 0

    @property
    def waits_for(self) -> str:
        """A text that says what this standby does, or waits for."""
        if self.unreachable:
            return f"cannot reach the arbiter: {self.unreachable}"
        if self.phase is FollowerPhase.LOOKING:
            return "waits for an active broker"
        if self.phase is not FollowerPhase.FOLLOWING or self.leader is None:
            return str(self.phase.value)
        if self.refused:
            return self.refused
        state = "has every safe record" if self.is_member else "copies the log"
        silent = f"; {self.leader.active} is silent for {self._silent_s:.0f} s" if self._silent_s > 2 else ""
        return f"{state} of {self.leader.active}{silent}"

    def handle(self, event: Event) -> list[Effect]:
        """Return the effects of an event, for the shell to perform in order."""
        return self._events[type(event)](self, event)

    _events = Handlers[[], list[Effect]]()
    _events.ignore(Event)
    _messages = Handlers[[Envelope, Entry], list[Effect]]()
    _messages.ignore(Message)

    @_events.of(LogState)
    def _on_log(self, event: LogState) -> list[Effect]:
        """Take the state of the own log, and confirm records that are safe now."""
        moved = event.safe_upto > self._safe_upto
        self._next_lsn, self._safe_upto = event.next_lsn, event.safe_upto
        return self._follow() if moved and self.phase is FollowerPhase.FOLLOWING else []

    # The arbiter

    @_events.of(Newest)
    def _on_newest(self, newest: Newest) -> list[Effect]:
        """Handle the newest entry: follow its active broker, or become active if no other broker is."""
        self.unreachable = newest.why
        entry = newest.entry
        if newest.why or self.phase in (FollowerPhase.ASKING, FollowerPhase.ACTIVE):
            return []
        if entry is None:
            return [] if self._waits else self._ask(None)
        if entry.active == self.name:
            self.phase, self.leader = FollowerPhase.LOOKING, None
            if may_start(entry, self.name, self.log_epoch, self._log_id):
                return self._ask(entry)
            self.refused = (
                f"entry {entry.number} of the arbiter says that this host has the log of epoch {entry.epoch}, but its "
                f"state_dir has not. Restore the state_dir, or wait until the standby takes over. If another host has "
                f"the name {self.name!r}, give this one another `standby.name`"
            )
            return []
        if self.leader is None or entry.epoch != self.leader.epoch:
            self.phase, self._silent_s, self.refused = FollowerPhase.FOLLOWING, 0.0, ""
            self._handed_over = False
        self.leader = entry
        self.is_member = may_start(entry, self.name, self.log_epoch, self._log_id)
        return []

    def _ask(self, newest: Entry | None) -> list[Effect]:
        """Write the next entry, to become the active broker."""
        self.phase, self._look_at = FollowerPhase.ASKING, self._now + ANSWER_S
        self._asked_entry = first_entry(
            newest, name=self.name, process=self.process, log_id=self._log_id, address=self.address,
            epoch=max(self.log_epoch + 1, self._least_epoch if newest is None else 0), goes_on=self._goes_on,
            takes_over=newest is not None and newest.active != self.name,
        )  # fmt: skip
        text = f"asks the arbiter for entry {self._asked_entry.number}, to be the active broker"
        return [Report("info", text), CreateEntry(self._asked_entry)]

    @_events.of(EntryWritten)
    def _entry_written(self, event: EntryWritten) -> list[Effect]:
        """Handle the arbiter's answer to this standby's own entry."""
        if event.entry != self._asked_entry or self.phase is not FollowerPhase.ASKING:
            return []
        self.unreachable = event.why
        if event.present is None:
            self._look_at = self._now + LOOK_S
            return []
        self._asked_entry = None
        if event.won:
            self.phase = FollowerPhase.ACTIVE
            return [TakeOver(event.entry)]
        self.phase, self.leader, self.is_member, self._waits = FollowerPhase.LOOKING, None, False, True
        self._looks = True
        return [Report("info", f"the broker of {event.present.active} is active")]

    # The active broker

    @_events.of(FromPeer)
    def _on_peer(self, event: FromPeer) -> list[Effect]:
        """Handle a message of the active broker, while this standby follows it."""
        return self._receive(event.envelope) if self.phase is FollowerPhase.FOLLOWING else []

    def _receive(self, envelope: Envelope) -> list[Effect]:
        """Handle a message of the active broker, unless an older one sent it."""
        message, leader = envelope.message, self.leader
        assert leader is not None
        if isinstance(message, Reject):
            self.refused = message.detail
            return []
        if envelope.run != self.run or envelope.epoch != leader.epoch:
            self._looks = self._looks or (envelope.run == self.run and envelope.epoch > leader.epoch)
            return []
        return self._messages[type(message)](self, message, envelope, leader)

    @_messages.of(Replaced)
    def _on_replaced(self, message: Replaced, envelope: Envelope, leader: Entry) -> list[Effect]:
        """Note that the active broker has another standby."""
        self.refused = f"the standby {message.name} is connected already"
        return []

    @_messages.of(HandOver)
    def _on_hand_over(self, message: HandOver, envelope: Envelope, leader: Entry) -> list[Effect]:
        """Prepare to take over, or end with the run."""
        self._silent_s, self._handed_over = self._takeover_s + 1.0, True
        return [Over("the run has ended")] if message.finished else []

    def _heard(self) -> None:
        """Note a sign of life."""
        if not self._handed_over:
            self._silent_s = 0.0

    @_messages.of(Lead)
    def _on_lead(self, message: Lead, envelope: Envelope, leader: Entry) -> list[Effect]:
        """Handle a sign of life."""
        if message.process != self.process:
            return []
        self.refused = ""
        self._heard()
        if message.copies_from >= 0:
            self.is_member = False
            if self.log_epoch == leader.epoch and self._next_lsn >= message.copies_from:
                return self._follow()  # the log was discarded already
            return self._discard(message.copies_from, leader)
        self._looks = self._looks or message.entry > leader.number
        if message.first_lsn <= self._first_lsn:
            return []
        self._first_lsn = message.first_lsn
        return [CutBelow(message.first_lsn)]

    def _discard(self, first: int, leader: Entry) -> list[Effect]:
        """Discard the own log; the copy of the active broker's log begins with record ``first``."""
        self._num_logs += 1
        self.log_epoch, self._log_id = leader.epoch, f"{self.process}.{self._num_logs}"
        self._first_lsn = first
        self._next_lsn = self._safe_upto = first
        return [Discard(first, leader.epoch, self._log_id), *self._follow()]

    @_messages.of(LogRecords)
    def _on_records(self, message: LogRecords, envelope: Envelope, leader: Entry) -> list[Effect]:
        """Write the records that are not on the own disk yet; records after a gap are dropped."""
        self._heard()
        payload, count = envelope.payload, len(message.kinds)
        raw = message.sizes_u32
        sizes = tuple(int.from_bytes(raw[at : at + 4], "little") for at in range(0, len(raw), 4))
        fits = len(sizes) == count and len(payload) == 1 and memoryview(payload[0]).nbytes == sum(sizes)
        skip = self._next_lsn - message.first
        if self.log_epoch != leader.epoch or not fits or not 0 <= skip < count:
            return []
        body = memoryview(payload[0]).cast("B")[sum(sizes[:skip]) :]
        written = WriteRecords(self._next_lsn, message.kinds[skip:], sizes[skip:], body)
        self._next_lsn += count - skip
        return [written, *self._follow()]

    def _follow(self) -> list[Effect]:
        """Tell the active broker what this standby has."""
        assert self.leader is not None
        self._follow_at = self._now + FOLLOW_S
        message = Follow(
            name=self.name, process=self.process, log_epoch=self.log_epoch,
            have_upto=self._next_lsn, safe_upto=self._safe_upto, config_digest=self._config_digest,
            producers=self._producers, trainers=self._trainers,
        )  # fmt: skip
        return [SendPeer(Envelope(run=self.run, epoch=self.leader.epoch, fence=0, message=message))]

    # Time

    @_events.of(Tick)
    def _tick(self, event: Tick) -> list[Effect]:
        """Look at the newest entry, send a sign of life, and take over from a silent broker."""
        now = event.now
        passed, self._now = min(max(now - self._now, 0.0), TICK_S), now
        self._silent_s += passed
        if self.phase is FollowerPhase.ASKING:
            if now < self._look_at or self._asked_entry is None:
                return []
            self._look_at = now + ANSWER_S
            return [CreateEntry(self._asked_entry)]
        effects: list[Effect] = []
        if self.phase is FollowerPhase.FOLLOWING:
            if self.is_member and self._silent_s > self._takeover_s and not self.unreachable:
                return self._ask(self.leader)
            if now >= self._follow_at:
                effects += self._follow()
        if self.phase is FollowerPhase.LOOKING or self._silent_s > LOOK_S:
            self._looks = self._looks or now >= self._look_at
        if self._looks:
            self._looks, self._look_at = False, now + LOOK_S
            effects.append(ReadNewest())
        return effects
