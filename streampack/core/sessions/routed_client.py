"""A client's session and the way of its messages, as one state machine for the shell.

The shell keeps a connection to the relay, and one to the broker while the route leads there. It marks what came through
the relay (``FromRelay``). ``Send`` goes where the route leads; ``Reroute`` tells the shell that it leads elsewhere.
"""

from __future__ import annotations

from streampack.core.protocol.events import Effect, Event, FromBroker, Tick
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
        route = self.route
        if route is None:
            return self.session.handle(event)
        if isinstance(event, RelayLost):
            return self._follow(route.lost())
        if isinstance(event, FromRelay):
            return self._from_relay(route, event.envelope)
        if isinstance(event, FromBroker) and route.by_relay:
            return []  # it was in flight when the route changed
        effects = self.session.handle(event)
        if isinstance(event, Tick):
            effects += self._follow(route.tick(event.now, self.session.has_all_requested))
        return effects

    def _from_relay(self, route: Route, envelope: Envelope) -> list[Effect]:
        """Handle a message that came through the relay; while the route leads to the broker, it is a sign of life."""
        message = envelope.message
        if isinstance(message, Elsewhere) or (isinstance(message, Reject) and message.code == "version"):
            return self._follow(route.sent_away(message.detail))
        by_relay = route.by_relay
        effects = self._follow(route.heard(message.silent_s if isinstance(message, Wait) else 0.0))
        return effects + self.session.handle(FromBroker(envelope)) if by_relay and route.by_relay else effects

    def _follow(self, found: list[Effect]) -> list[Effect]:
        """Let the session attach again over another way; turn a question to the relay into a message."""
        effects: list[Effect] = []
        for effect in found:
            if isinstance(effect, Reroute):
                effects += [effect, *self.session.handle(Rerouted())]
            elif isinstance(effect, ProbeRelay):
                effects.append(SendProbe(self.session.ping_envelope()))
        return effects
