"""The phases of a client's session, and the phases that may follow each."""

from __future__ import annotations

from enum import Enum


class ClientPhase(Enum):
    """Phases of a rank's session with its broker. ``attached``: the broker has answered its last ``Attach``."""

    CLAIMING = ("the client asks for its rank, and the trainer has not chosen a first step", False)
    HOLDING = ("the client has its rank, and the trainer has not chosen a first step", True)
    ATTACHING = ("the client asks to take part from its next step on", False)
    READING = ("the client takes part or waits for the other ranks", True)
    ENDED = ("the client has received every step of the iteration", True)
    ENDED_ATTACHING = ("the client has received every step and asks a new broker for its rank", False)
    OVER = ("the client is closed or cannot continue", False)

    def __init__(self, text: str, attached: bool) -> None:
        self.text, self.attached = text, attached


_BEGUN = frozenset({ClientPhase.ATTACHING, ClientPhase.OVER})
CLIENT_PHASES = {
    ClientPhase.CLAIMING: _BEGUN | {ClientPhase.CLAIMING, ClientPhase.HOLDING},
    ClientPhase.HOLDING: _BEGUN | {ClientPhase.CLAIMING},
    ClientPhase.ATTACHING: _BEGUN | {ClientPhase.READING},
    ClientPhase.READING: _BEGUN | {ClientPhase.ENDED},
    ClientPhase.ENDED: _BEGUN | {ClientPhase.ENDED_ATTACHING},
    ClientPhase.ENDED_ATTACHING: _BEGUN | {ClientPhase.ENDED, ClientPhase.ENDED_ATTACHING},
    ClientPhase.OVER: frozenset({ClientPhase.OVER}),
}
"""The phases that may follow each."""

ANSWERED = {
    ClientPhase.CLAIMING: ClientPhase.HOLDING,
    ClientPhase.ATTACHING: ClientPhase.READING,
    ClientPhase.ENDED_ATTACHING: ClientPhase.ENDED,
}
"""The phase that follows an ``Attached``."""
UNKNOWN = {
    ClientPhase.CLAIMING: ClientPhase.CLAIMING,
    ClientPhase.HOLDING: ClientPhase.CLAIMING,
    ClientPhase.ATTACHING: ClientPhase.ATTACHING,
    ClientPhase.READING: ClientPhase.ATTACHING,
    ClientPhase.ENDED: ClientPhase.ENDED_ATTACHING,
    ClientPhase.ENDED_ATTACHING: ClientPhase.ENDED_ATTACHING,
}
"""The phase that follows if the broker does not know this client any more."""
