"""Why a rank waits for its next step, in figures that decide nothing: what it has waited for so far, by cause.

A client knows of every moment of a wait what it is for: what the broker said last, or that it is not heard. It adds
them up and says the sums with its pings, so that nothing is lost with a ping. A cause names what has to change:
``stream``: a stream whose samples are missing; ``peers``: ranks that have not returned their steps; ``join``: ranks
that are not there; ``memory``: the arena is full; ``forming``: the packer is at work; ``log``: the disk is; and
``network``: the broker has sent the step, or is not heard. What a trainer does with what it has is no wait.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from streampack.core.model.snapshot import Count

CAUSES = ("stream", "peers", "join", "memory", "forming", "log", "network")
WAIT_BOUNDS_S = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0)
"""Waits are counted up to each of these, and beyond."""

Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]
_Name = Annotated[str, Meta(min_length=1, max_length=200)]


class Missing(NamedTuple):
    """The reason that a step is missing: a cause, or another word for a person, and a description.

    ``stream``: the stream whose samples are missing, if that is the cause. ``batch``: the wait is for a program that
    pushes to end its batch, which is normal in on-policy training.
    """

    reason: str
    detail: str
    stream: str | None = None
    batch: bool = False


class Starvation(Struct, frozen=True, kw_only=True):
    """What a rank has waited for since its client began, in seconds by cause and, of the cause ``stream``, by stream;
    how many waits were as long as each of ``WAIT_BOUNDS_S`` at most and longer than the one before, and how many were
    longer than all. ``trainer_s``: how long the trainer had a step and did not ask for the next; ``step_s``: how long
    a step takes lately, from one to the next.
    """

    causes_s: Annotated[dict[_Name, Seconds], Meta(max_length=32)] = {}
    streams_s: Annotated[dict[_Name, Seconds], Meta(max_length=1024)] = {}
    waits: Annotated[list[Count], Meta(max_length=64)] = []
    trainer_s: Seconds = 0.0
    step_s: Seconds | None = None


def cause_of(reason: str) -> str:
    """The cause that a broker's word means; one that is not known is the broker's own work."""
    return reason if reason in CAUSES else "forming"


def bucket_of(seconds: float) -> int:
    """Where a wait is counted, below ``len(WAIT_BOUNDS_S) + 1``.

    >>> bucket_of(0.0), bucket_of(1e-4), bucket_of(2e-4), bucket_of(61.0)
    (0, 0, 1, 13)
    """
    return bisect_left(WAIT_BOUNDS_S, seconds)


class NextWaits:
    """Of all ranks of a feed together, those that are gone too: ``counts`` by bucket, and the ``sum`` in seconds."""

    bounds = WAIT_BOUNDS_S

    def __init__(self) -> None:
        self.counts = [0] * (len(WAIT_BOUNDS_S) + 1)
        self.sum = 0.0

    def add(self, before: Starvation | None, now: Starvation) -> None:
        """A rank says what it has waited so far; ``before`` is what it said last."""
        before = before or Starvation()
        self.sum += max(sum(now.causes_s.values()) - sum(before.causes_s.values()), 0.0)
        old = before.waits + [0] * len(now.waits)
        for n, (upto, was) in enumerate(zip(now.waits[: len(self.counts)], old, strict=False)):
            self.counts[n] += max(upto - was, 0)
