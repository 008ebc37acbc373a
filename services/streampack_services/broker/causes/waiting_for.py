"""The reason that a feed's next step is missing, as a part of a snapshot."""

from __future__ import annotations

from msgspec import Struct

WAITS_FOR = {"peers": "trainers", "join": "ranks", "stream": "samples", "memory": "room", "forming": "the packer"}
"""Words for reasons of a wait, if they differ from their keys."""


class WaitingFor(Struct, frozen=True, kw_only=True):
    """The reason that a feed's next step is missing."""

    reason: str
    """One of ``core.stats.data_wait.CAUSES``, or another word, such as ``failed``."""
    detail: str
    """A description for a person."""
    stream: str | None
    """The stream whose samples are missing; None for other reasons."""
    batch: bool
    """True while a program that pushes has not ended its batch, which is normal in on-policy training."""
    lost: bool = False
    """True if the rank or producer that is waited for is silent or gone."""

    @property
    def text(self) -> str:
        """One line: ``waiting for trainers: no rank is attached``."""
        return self.text_after("")

    def text_after(self, lasting: str) -> str:
        """Return the line with a duration such as `` for 25 s``; empty for none."""
        if self.reason == "failed":
            return self.detail
        if self.batch:
            return f"waiting{lasting} for {self.detail}"
        return f"waiting for {WAITS_FOR.get(self.reason, self.reason)}{lasting}: {self.detail}"
