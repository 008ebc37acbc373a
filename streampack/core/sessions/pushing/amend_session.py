"""A producer that gives values to the late fields of samples, as a pure state machine: ``handle(event) -> effects``.

Any process may amend any sample of the stream, so the session holds no lease. A message is repeated until the broker
says that its values are safe, or names the samples whose values it did not store. The broker takes each value once, so
repeats do no harm. A broker that has not got the sample yet gives no answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from streampack.core.protocol.events import Effect, Event, Report, Send
from streampack.core.protocol.handlers import Handlers
from streampack.core.protocol.message import Bye, Envelope, Who
from streampack.core.protocol.producer_messages import Amend, Amended, Done, LateFields, Offer
from streampack.core.sessions.open_messages import OpenMessages
from streampack.core.sessions.producer_base import SILENT_TEXT, Sender
from streampack.core.sessions.pushing.push_session import PUSHED


class GiveValues(Event, frozen=True):
    """The program gives values: a message with its payload."""

    message: Amend
    payload: tuple[Any, ...]


@dataclass(slots=True, kw_only=True)
class AmendSession(Sender):
    """State of one process that amends samples of ``stream``."""

    stream: str
    terms: LateFields | None = None
    """The broker's newest answer to the hello, which has the declared fields."""
    refused: dict[int, Amended] = field(default_factory=dict)
    """Answer to each message of which not all values were stored, by number."""
    open: OpenMessages[GiveValues] = field(default_factory=OpenMessages)
    """Messages without an answer, by number."""
    _greeted: int = -1
    """Epoch of the broker that knows this process; -1 for none."""

    def waiting_for(self) -> str:
        """Return a text that names the reason that values are not safe yet; empty if all are safe."""
        if self.is_silent:
            return SILENT_TEXT
        if not self.open:
            return ""
        first = next(iter(self.open.values())).message
        return (
            f"the broker to store values for samples of partition {first.partition}. It may not have these samples "
            f"yet, or its log waits for the disk"
        )

    @property
    def _offered(self) -> list[Offer]:
        """The stream that the process amends."""
        return [Offer(stream=self.stream, source_digest=PUSHED, amends=True)]

    @property
    def _has_lease(self) -> bool:
        """True if the current broker has accepted this process's offer."""
        return self._greeted == self.epoch

    _events = Handlers(Sender._events)
    _messages = Handlers(Sender._messages)

    @_events.of(GiveValues)
    def _on_values(self, event: GiveValues) -> list[Effect]:
        """Send a message of the program at once, and keep it until it is answered."""
        self.open[event.message.number] = event
        return [self._send_values(event)] if self._has_lease else []

    @_messages.of(LateFields)
    def _on_fields(self, message: LateFields, fence: int) -> list[Effect]:
        """Send the open messages to a broker that knows this process now."""
        if message.stream != self.stream:
            return []
        had_lease, self._greeted, self.terms = self._has_lease, self.epoch, message
        self._hello_next.reset()
        return [] if had_lease else self._repeat_unconfirmed()

    @_messages.of(Amended)
    def _on_answer(self, message: Amended, fence: int) -> list[Effect]:
        """Take the answer to a message."""
        if self.open.pop(message.number, None) is not None and (message.refusal or message.refused):
            self.refused[message.number] = message
        return []

    @_messages.of(Who)
    def _on_unknown(self, message: Who, fence: int) -> list[Effect]:
        """Greet a broker that does not know this process any more."""
        self._greeted = -1
        return self._hello_if_due()

    @_messages.of(Bye)
    def _on_bye(self, message: Bye, fence: int) -> list[Effect]:
        """Answer the goodbye of a broker that stops, and wait for its restart."""
        self._greeted = -1
        return [Report("info", message.reason), self._send(Bye(reason="goodbye"))]

    @_messages.of(Done)
    def _on_done(self, message: Done, fence: int) -> list[Effect]:
        """End the session with an error if values are left although the feed has ended."""
        if not self.open:
            return []
        return self._end_session(f"stream {self.stream!r}: got values after the end of the feed", "ended")

    def _forget_sessions(self) -> list[Effect]:
        """Greet the new broker before anything else is sent."""
        self._greeted = -1
        return []

    def _repeat_unconfirmed(self) -> list[Effect]:
        """Repeat the messages without an answer."""
        return [self._send_values(values) for values in self.open.values()] if self._has_lease else []

    def _send_values(self, values: GiveValues) -> Send:
        """Return the effect that sends a message with its payload."""
        return Send(Envelope(run=self.run, epoch=self.epoch, fence=0, message=values.message, payload=values.payload))
