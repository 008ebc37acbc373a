"""Hours that the ranks of a run spent on training and on waiting: file ``hours.json`` in the state_dir.

The log has decisions only, so nothing else remembers these hours once the broker has ended. A broker adds its own to
those of the brokers before it. Recovery never reads the file; a file that is lost takes these figures along, and
nothing else.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from streampack.errors import UserError

HOURS = "hours.json"
"""The file's name in a ``state_dir``."""


MOST_TIMES = 2048
"""Steps whose times are kept."""


class StepTimes(Struct, frozen=True, kw_only=True):
    """Seconds of the last steps of a feed, by step, on a mesh of ``dp`` ranks and ``pp`` pipeline stages."""

    dp: int = 0
    pp: int = 0
    seconds: dict[int, float] = {}

    def plus(self, more: StepTimes) -> StepTimes:
        """Return the times of both; those of another mesh, and those before a step that is timed again, are dropped."""
        if not more.seconds:
            return self
        same = (self.dp, self.pp) == (more.dp, more.pp)
        first = min(more.seconds)
        kept = {step: time for step, time in self.seconds.items() if same and step < first} | more.seconds
        last = sorted(kept)[-MOST_TIMES:]
        return StepTimes(dp=more.dp, pp=more.pp, seconds={step: kept[step] for step in last})


class FeedHours(Struct, frozen=True, kw_only=True):
    """Sums over all ranks of a feed.

    Attributes:
        delivered_tokens: Tokens of the packs that were formed, with padding.
        waste_tokens: Padding of these packs by cause, in tokens.
        trained_s: Seconds in which trainers worked on steps, or on other things between two steps.
        starved_s: Seconds in which ranks waited for data, by cause.
        useful_s: Seconds that the FLOPs of real tokens need at the devices' peak.
        timed_s: Seconds of the ranks that count these FLOPs.
        step_times: Times of the last steps.
    """

    delivered_tokens: int = 0
    waste_tokens: dict[str, int] = {}
    trained_s: float = 0.0
    starved_s: dict[str, float] = {}
    useful_s: float = 0.0
    timed_s: float = 0.0
    step_times: StepTimes = StepTimes()

    def plus(self, more: FeedHours) -> FeedHours:
        """Return the sums of this broker and of an earlier one."""
        waste = {
            cause: self.waste_tokens.get(cause, 0) + more.waste_tokens.get(cause, 0)
            for cause in {**self.waste_tokens, **more.waste_tokens}
        }
        starved = {
            cause: round(self.starved_s.get(cause, 0.0) + more.starved_s.get(cause, 0.0), 3)
            for cause in {**self.starved_s, **more.starved_s}
        }
        return FeedHours(
            delivered_tokens=self.delivered_tokens + more.delivered_tokens, waste_tokens=waste,
            trained_s=round(self.trained_s + more.trained_s, 3), starved_s=starved,
            useful_s=round(self.useful_s + more.useful_s, 3), timed_s=round(self.timed_s + more.timed_s, 3),
            step_times=self.step_times.plus(more.step_times),
        )  # fmt: skip


def read_hours(state_dir: Path) -> dict[str, FeedHours]:
    """Return the recorded hours of each feed; empty if none are recorded. Raises UserError if they cannot be read."""
    path = state_dir / HOURS
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, FeedHours])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}. Delete the file to count hours anew.") from None


def write_hours(state_dir: Path, feeds: dict[str, FeedHours]) -> None:
    """Replace the recorded hours. Raises OSError."""
    part = state_dir / f".{HOURS}"
    part.write_bytes(msgspec.json.format(msgspec.json.encode(feeds)) + b"\n")
    os.replace(part, state_dir / HOURS)
