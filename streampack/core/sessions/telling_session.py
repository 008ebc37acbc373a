"""A process that tells a feed something, or asks it, as a pure state machine: ``handle(event) -> effects``.

Trainers publish policies and report values in this way, and subscribers read the values. Each message has a number, and
is repeated until the broker answers. It states what holds, so a repeat does no harm, and any broker of the run may
answer. Beside ``ClientSession``, which holds a rank, this session holds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from streampack.core.protocol.events import Effect, Event, FromBroker, Send, Tick, Unsent
from streampack.core.protocol.handlers import Handlers
from streampack.core.protocol.message import Envelope, Message, Reject
from streampack.core.protocol.result_messages import AskResults, Noted, NumberedMessage, Results
from streampack.core.sessions.open_messages import OpenMessages
from streampack.core.sessions.patience import VAIN_S
from streampack.core.sessions.producer_base import BROKER_SILENT_S, SILENT_TEXT, Finish, Leave

REPEAT_S = 1.0
"""Seconds after which a message without an answer is repeated."""


class Tell(Event, frozen=True):
    """The program has a message for the broker, with its payload."""

    message: NumberedMessage
    payload: tuple[Any, ...] = ()


@dataclass(slots=True, kw_only=True)
class TellingSession:
    """State of the connection: messages without an answer, and answers that the program has not taken."""

    run: int = 0
    epoch: int = 0
    answers: dict[int, Envelope] = field(default_factory=dict)
    """Answer to each message, by number."""
    open: OpenMessages[Tell] = field(default_factory=OpenMessages)
    """Messages of the program that the broker has not answered."""
    stall_code: ClassVar[str] = ""
    _now: float = 0.0
    _last_sent: float = 0.0
    _last_heard: float | None = None

    @property
    def reached(self) -> bool:
        """True if the broker has answered at least once."""
        return self._last_heard is not None

    @property
    def waits_in_vain(self) -> bool:
        """True if the broker has long not answered."""
        return bool(self.open) and self._now - max(self._last_heard or 0.0, self._last_sent - VAIN_S) > VAIN_S

    def waiting_for(self) -> str:
        """Return a text that names the cause of the wait; empty if there is none."""
        if not self.open:
            return ""
        silent = self._last_heard is None or self._now - self._last_heard > BROKER_SILENT_S
        asks = all(isinstance(tell.message, AskResults) for tell in self.open.values())
        if silent and not asks:
            return SILENT_TEXT
        return "the next step with reported values" if asks else "the broker's log to store values"

    def handle(self, event: Event) -> list[Effect]:
        """Return the effects of an event, for the shell to perform."""
        return self._events[type(event)](self, event)

    _events = Handlers[[], list[Effect]]()
    _events.ignore(Unsent, Leave)
    _messages = Handlers[[Envelope], list[Effect]]()
    _messages.ignore(Message)

    @_events.of(Tell)
    def _tell(self, event: Tell) -> list[Effect]:
        """Send a message of the program, and keep it until it is answered."""
        self.open[event.message.number] = event
        return [self._send(event)]

    @_events.of(Tick)
    def _tick(self, event: Tick) -> list[Effect]:
        """Repeat the messages without an answer."""
        self._now = event.now
        if not self.open or event.now - self._last_sent < REPEAT_S:
            return []
        return [self._send(tell) for tell in self.open.values()]

    @_events.of(FromBroker)
    def _receive(self, event: FromBroker) -> list[Effect]:
        """Handle a message, unless an older broker or another run sent it."""
        envelope = event.envelope
        if envelope.is_foreign(self.run, self.epoch):
            return []
        self.run, self.epoch, self._last_heard = envelope.run, envelope.epoch, self._now
        return self._messages[type(envelope.message)](self, envelope.message, envelope)

    @_messages.of(Reject)
    def _on_reject(self, message: Reject, envelope: Envelope) -> list[Effect]:
        """End the session, because the broker rejects this process."""
        return [Finish(message.detail, message.code)]

    @_messages.of(Noted, Results)
    def _on_answer(self, message: Noted | Results, envelope: Envelope) -> list[Effect]:
        """Keep the answer to a message for the program."""
        if self.open.pop(message.number, None) is not None:
            self.answers[message.number] = envelope
        return []

    def _send(self, tell: Tell) -> Send:
        """Return the effect that sends a message with its payload."""
        self._last_sent = self._now
        return Send(Envelope(run=self.run, epoch=self.epoch, fence=0, message=tell.message, payload=tell.payload))
