"""Data waits: the time that a rank waits for its next step, by cause. They decide nothing.

A client knows the cause at every moment of a wait: the broker's last report, or that the broker does not answer. It
adds up the time of each cause and sends the sums with its pings, so a lost ping loses nothing. These are the causes:

- ``stream``: a stream has no samples;
- ``peers``: ranks have not returned their steps;
- ``join``: ranks have not joined;
- ``memory``: the arena is full;
- ``forming``: the packer is at work;
- ``log``: the disk is at work;
- ``network``: the broker has sent the step, or does not answer;
- ``relay``: the relay of the rank's host has the step, or has no answer from the broker.

The time in which a trainer works on a step is not a wait.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from streampack.core.model.snapshot import Count

CAUSES = ("stream", "peers", "join", "memory", "forming", "log", "network", "relay")
WAIT_BOUNDS_S = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0)
"""Bounds of the histogram of waits, in seconds."""

Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]
_Name = Annotated[str, Meta(min_length=1, max_length=200)]


class Missing(NamedTuple):
    """The reason that a step is missing: a cause or a more precise word, and a description for people.

    ``stream``: the stream whose samples are missing, if that is the cause. ``batch`` is True if a program that
    pushes samples is alive, and has not sent samples or ended its batch. That is normal in reinforcement learning.
    ``lost`` is True if the rank or producer that is waited for is silent or has left.
    """

    reason: str
    detail: str
    stream: str | None = None
    batch: bool = False
    lost: bool = False


class Starvation(Struct, frozen=True, kw_only=True):
    """The data waits of a rank since its client began.

    Attributes:
        causes_s: Seconds by cause.
        streams_s: Seconds of the cause ``stream`` by stream.
        waits: Number of waits up to each bound of ``WAIT_BOUNDS_S``, and above the last bound.
        trainer_s: Seconds in which the trainer had a step and did not ask for the next.
        step_s: Recent seconds from one step to the next; None until known.
        useful_s: Seconds that the useful FLOPs so far need at the device's peak; None if the trainer named no peak.
    """

    causes_s: Annotated[dict[_Name, Seconds], Meta(max_length=32)] = {}
    streams_s: Annotated[dict[_Name, Seconds], Meta(max_length=1024)] = {}
    waits: Annotated[list[Count], Meta(max_length=64)] = []
    trainer_s: Seconds = 0.0
    step_s: Seconds | None = None
    useful_s: Seconds | None = None


def cause_of(reason: str) -> str:
    """Return the cause of a wait for a broker's ``reason``; an unknown reason counts as ``forming``."""
    return reason if reason in CAUSES else "forming"


def bucket_of(seconds: float) -> int:
    """Return the bucket of a wait in the histogram of waits, from 0 to ``len(WAIT_BOUNDS_S)``.

    >>> bucket_of(0.0), bucket_of(1e-4), bucket_of(2e-4), bucket_of(61.0)
    (0, 0, 1, 13)
    """
    return bisect_left(WAIT_BOUNDS_S, seconds)


class NextWaits:
    """Histogram of the data waits of all ranks of a feed, past ranks included.

    ``counts`` are waits by bucket (``bucket_of``); ``sum`` is their total in seconds.
    """

    bounds = WAIT_BOUNDS_S

    def __init__(self) -> None:
        self.counts = [0] * (len(WAIT_BOUNDS_S) + 1)
        self.sum = 0.0

    def add(self, before: Starvation | None, now: Starvation) -> None:
        """Add the waits that a rank reports ``now`` beyond those that it reported ``before``, if it did."""
        before = before or Starvation()
        self.sum += max(sum(now.causes_s.values()) - sum(before.causes_s.values()), 0.0)
        old = before.waits + [0] * len(now.waits)
        for n, (upto, was) in enumerate(zip(now.waits[: len(self.counts)], old, strict=False)):
            self.counts[n] += max(upto - was, 0)
