"""The pushed samples of one partition that are in no step, with the reason of each, for programs that amend them.

Values of late fields may come for a sample long after it was dropped. Ranges of numbers keep the memory small.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping

from streampack.core.protocol.producer_messages import OVERLONG
from streampack.core.staging.staged_chunk import DISCARDED, LATE_TIMEOUT

POLICY_LAG = "policy_lag"
"""Reason of samples whose policy was too old when they came."""
ENDED, LOST, OTHER_VALUE, DEFAULT_USED = "ended", "lost", "other_value", "default_used"
REJECTED = "rejected"
REASONS = {
    LATE_TIMEOUT: "the sample was dropped, because a late field did not come within `late_timeout_s`",
    DISCARDED: "the sample was dropped, because the trainers went back to an earlier step",
    POLICY_LAG: "the sample was dropped, because its policy was too old (`max_policy_lag`)",
    OVERLONG: "the sample was dropped, because it or its media exceed the limits of a pack",
    ENDED: "the sample is not trained, because its partition or its feed ended before, or its stream was removed",
    DEFAULT_USED: "the field's default is used, because the value did not come within `late_timeout_s`",
    LOST: (
        "got a value for a sample of another process, expected the id that `Producer.sample_ids` returned. The sample "
        "with this id was lost before it was stored"
    ),
    OTHER_VALUE: (
        "got another value of {field} than before, expected the same value. A value cannot be changed once it is stored"
    ),
}
"""Sentence for each reason that values were not stored; samples that are rejected when they come have others."""
CONTRADICTIONS = (LOST, OTHER_VALUE)
"""Reasons that are mistakes of the program. The others follow from the rules of the run."""
MOST_REASONS = 60
"""Most reasons in one answer; further ones count as ``rejected``."""
MOST_RANGES = 1 << 12
"""Ranges that are remembered of a partition; the lowest are forgotten first."""
DroppedRange = tuple[int, int, str]
"""(first sample, first sample after the range, reason)."""


class DroppedSamples:
    """Numbers of dropped samples with their reasons; the first reason of a sample stays."""

    def __init__(self) -> None:
        self.ranges: list[DroppedRange] = []
        """The ranges in order; they do not overlap."""

    def add(self, seqs: Iterable[int], reasons: Iterable[str]) -> int:
        """Note that the samples ``seqs`` were dropped, each for one of the ``reasons``; return how many are new."""
        reason, new = " or ".join(sorted(reasons))[:200] or REJECTED, 0
        for seq in seqs:
            at = bisect_right(self.ranges, seq, key=lambda one: one[0])
            if at and seq < self.ranges[at - 1][1]:
                continue
            first, stop, begin, end = seq, seq + 1, at, at
            if at and self.ranges[at - 1][1:] == (seq, reason):
                first, begin = self.ranges[at - 1][0], at - 1
            if at < len(self.ranges) and (self.ranges[at][0], self.ranges[at][2]) == (stop, reason):
                stop, end = self.ranges[at][1], at + 1
            self.ranges[begin:end] = [(first, stop, reason)]
            new += 1
        del self.ranges[: max(len(self.ranges) - MOST_RANGES, 0)]
        return new

    def reason(self, seq: int) -> str:
        """Return the reason that sample ``seq`` was dropped; empty if it was not, or if that is forgotten."""
        at = bisect_right(self.ranges, seq, key=lambda one: one[0]) - 1
        return self.ranges[at][2] if at >= 0 and seq < self.ranges[at][1] else ""


def by_reason(reasons: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the samples of each reason, from the reason of each sample."""
    numbers: dict[str, list[int]] = {}
    for seq, reason in reasons.items():
        numbers.setdefault(reason if reason in numbers or len(numbers) < MOST_REASONS else REJECTED, []).append(seq)
    return numbers


def contradiction(reasons: Mapping[int, str], field: str) -> str:
    """Return a text that names a sample whose values contradict earlier ones; empty if there is none.

    Args:
        reasons: Reason of each sample whose values are not stored.
        field: Name of a field that has another value already.
    """
    numbers = by_reason(reasons)
    for reason in (reason for reason in CONTRADICTIONS if reason in numbers):
        first, *others = numbers[reason]
        return f"sample {first}{f' and {len(others)} more' if others else ''}: {REASONS[reason].format(field=field)}"
    return ""
