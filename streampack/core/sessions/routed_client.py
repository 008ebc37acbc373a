"""A client's session and the way of its messages, as one state machine for the shell.

The shell keeps a connection to the relay, and one to the broker while the route leads there. It marks what came through
the relay (``FromRelay``). ``Send`` goes where the route leads; ``Reroute`` tells the shell that it leads elsewhere.
"""

from __future__ import annotations

from streampack.core.protocol.events import Effect, Event, FromBroker, Tick
from streampack.core.protocol.handlers import Handlers
from streampack.core.protocol.message import Envelope, Reject
from streampack.core.protocol.relay_messages import Elsewhere
from streampack.core.protocol.trainer_messages import Wait
from streampack.core.sessions.client_events import Rerouted
from streampack.core.sessions.client_session import ClientSession
from streampack.core.sessions.route import ProbeRelay, RelayLost, Reroute, Route


class FromRelay(Event, frozen=True):
    """A message has come through the relay."""

    envelope: Envelope


class SendProbe(Effect, frozen=True):
    """Send a message to the relay, while messages go to the broker."""

    envelope: Envelope


class RoutedClient:
    """The session of one rank, with a relay on its host or without.

    Args:
        session: The session.
        route: The way of its messages; None if there is no relay.
    """

    def __init__(self, session: ClientSession, route: Route | None = None) -> None:
        self.session, self.route = session, route

    @property
    def by_relay(self) -> bool:
        """True while messages go through the relay."""
        return self.route is not None and self.route.by_relay

    @property
    def awaits_relay(self) -> bool:
        """True while the client waits for a relay that its user has named and that has not answered yet."""
        return self.route is not None and self.route.insists and not self.route.answered

    def handle(self, event: Event) -> list[Effect]:
        """Return the effects of an event, for the shell to perform in order."""
        if self.route is None:
            return self.session.handle(event)
        return self._events[type(event)](self, event, self.route)

    _events = Handlers[[Route], list[Effect]]()

    @_events.of(Event)
    def _on_event(self, event: Event, route: Route) -> list[Effect]:
        """Let the session handle an event."""
        return self.session.handle(event)

    @_events.of(FromBroker)
    def _from_broker(self, event: FromBroker, route: Route) -> list[Effect]:
        """Let the session handle a message; drop one that was in flight when the route changed."""
        return [] if route.by_relay else self.session.handle(event)

    @_events.of(Tick)
    def _tick(self, event: Tick, route: Route) -> list[Effect]:
        """Send the session's messages that are due, and choose the route."""
        effects = self.session.handle(event)
        return effects + self._follow(route.tick(event.now, self.session.has_all_requested))

    @_events.of(RelayLost)
    def _on_lost(self, event: RelayLost, route: Route) -> list[Effect]:
        """Follow the route after the end of the relay's connection."""
        return self._follow(route.lost())

    @_events.of(FromRelay)
    def _from_relay(self, event: FromRelay, route: Route) -> list[Effect]:
        """Handle a message that came through the relay; while the route leads to the broker, it is a sign of life."""
        envelope = event.envelope
        message = envelope.message
        if isinstance(message, Elsewhere) or (isinstance(message, Reject) and message.code == "version"):
            return self._follow(route.sent_away(message.detail))
        by_relay = route.by_relay
        effects = self._follow(route.heard(message.silent_s if isinstance(message, Wait) else 0.0))
        return effects + self.session.handle(FromBroker(envelope)) if by_relay and route.by_relay else effects

    def _follow(self, changes: list[Effect]) -> list[Effect]:
        """Let the session attach again over another way; turn a question to the relay into a message."""
        effects: list[Effect] = []
        for effect in changes:
            if isinstance(effect, Reroute):
                effects += [effect, *self.session.handle(Rerouted())]
            elif isinstance(effect, ProbeRelay):
                effects.append(SendProbe(self.session.ping_envelope()))
        return effects
