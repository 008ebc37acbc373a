"""The last events of a broker, for bug reports."""

from __future__ import annotations

from collections import deque
from typing import Any

from streampack.core.protocol.events import Event

KEPT = 200
"""Number of events that are kept."""


class RecentEvents:
    """The last events: the kind of each, and a few small facts."""

    def __init__(self) -> None:
        self._facts: deque[tuple[Any, ...]] = deque(maxlen=KEPT)

    def note(self, event: Event) -> None:
        """Add an event. The event itself is not kept, because its payload may be large."""
        envelope = getattr(event, "envelope", None)
        if envelope is None:
            self._facts.append((type(event), getattr(event, "feed", None), getattr(event, "now", None)))
        else:
            kind, peer = type(envelope.message), getattr(event, "peer", None)
            self._facts.append((kind, peer, envelope.epoch, envelope.fence))

    @property
    def text(self) -> str:
        """The events as lines of text, the oldest first."""
        lines = [
            " ".join([kind.__name__, *(repr(fact) for fact in facts if fact is not None)])
            for kind, *facts in self._facts
        ]
        return "\n  ".join([f"the last {len(lines)} events, the oldest first:", *lines])
