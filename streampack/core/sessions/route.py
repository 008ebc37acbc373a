"""The way of a client's messages: through the relay of its host, or to the broker itself. A pure state machine.

A client with a relay begins there. It continues with the broker if the relay's connection ends, or if the relay sends
it away (``Elsewhere``). It does the same if the relay does not answer its pings, or has not heard the broker for long.

The client asks the relay from time to time whether it works again. It may return once the relay has answered for
``HEALTHY_S`` without a gap. It does so when it has every step that it has requested, so that nothing is sent twice.
Clients return at different times, which depend on their names.
"""

from __future__ import annotations

from dataclasses import dataclass

from streampack.core.protocol.events import Effect, Event
from streampack.core.sessions.backoff import spread

RELAY_TIMEOUT_S = 5.0
"""Seconds without an answer of the relay after which a client continues with the broker."""
BROKER_TIMEOUT_S = 30.0
"""Seconds without a message of the broker to the relay after which a client tries the broker itself."""
HEALTHY_S = 30.0
"""Seconds for which a relay must answer before clients return to it; each adds up to as much again."""
PROBE_S = 2.0
"""Seconds between two questions to a relay that is not in use."""
_TICK_S = 1.0
"""Most seconds that one tick adds to a silence: more means that the process was stopped."""


class RelayLost(Event, frozen=True):
    """The connection to the relay has ended."""


class Reroute(Effect, frozen=True):
    """Send all messages to the relay from now on (``by_relay``), or to the broker itself; ``why`` is for the log."""

    by_relay: bool
    why: str


class ProbeRelay(Effect, frozen=True):
    """Ask the relay whether it works; any answer is a sign of life."""


@dataclass(slots=True)
class Route:
    """The way of one client's messages.

    Attributes:
        name: Name of the client.
        by_relay: True while messages go through the relay.
        insists: True if the client waits for the relay until it has answered once, because its user has named it.
        answered: True if the relay has answered at least once.
        silent_s: Seconds since the relay's last message.
        healthy_s: Seconds for which the relay must answer before the client returns.
    """

    name: str
    by_relay: bool = True
    insists: bool = False
    answered: bool = False
    silent_s: float = 0.0
    healthy_s: float = HEALTHY_S
    _healthy_s: float = 0.0
    _probe_at: float = 0.0
    _now: float = 0.0

    def heard(self, broker_silent_s: float = 0.0) -> list[Effect]:
        """Take a message of the relay, which has heard the broker ``broker_silent_s`` ago."""
        self.answered = True
        self.silent_s = 0.0
        late = BROKER_TIMEOUT_S * (1.0 + spread(self.name, 0))
        if self.by_relay and broker_silent_s > late:
            return self._leave(f"the broker has not answered the relay for {broker_silent_s:.0f} s")
        return []

    def lost(self) -> list[Effect]:
        """Take the end of the relay's connection."""
        if not self.by_relay:
            self._healthy_s = 0.0
            return []
        return [] if self.insists and not self.answered else self._leave("the connection to the relay has ended")

    def sent_away(self, why: str) -> list[Effect]:
        """Take the relay's word that it does not serve this client any more."""
        return self._leave(why) if self.by_relay else []

    def tick(self, now: float, may_return: bool) -> list[Effect]:
        """Take the time; ``may_return`` is True if the client has every step that it has requested."""
        passed, self._now = min(now - self._now, _TICK_S), now
        self.silent_s += passed
        if self.by_relay:
            patient = self.insists and not self.answered
            return (
                []
                if patient or self.silent_s <= RELAY_TIMEOUT_S
                else self._leave(f"the relay has not answered for {self.silent_s:.0f} s")
            )
        self._healthy_s = self._healthy_s + passed if self.silent_s <= RELAY_TIMEOUT_S else 0.0
        if may_return and self._healthy_s >= self.healthy_s * (1.0 + spread(self.name, 1)):
            self.by_relay, self._healthy_s = True, 0.0
            return [Reroute(True, "the relay works again")]
        if now < self._probe_at:
            return []
        self._probe_at = now + PROBE_S
        return [ProbeRelay()]

    def _leave(self, why: str) -> list[Effect]:
        """Continue with the broker itself."""
        self.by_relay, self._healthy_s, self._probe_at = False, 0.0, self._now + PROBE_S
        self.silent_s = RELAY_TIMEOUT_S + 1.0  # it counts as healthy only once it answers
        return [Reroute(False, why)]
