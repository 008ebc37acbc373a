"""Cases of reinforcement learning: all streams are pushed, and late fields or pacing, or both, are on.

``RL_CASES`` between them have steps of packs and batches of samples, marks, groups, split samples, and shards of
context-parallel ranks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec

from streampack.core.model.fields import Field
from tests.simulation.data import Case, case, with_media

FIELDS = (
    Field(name="advantages", dtype="float32", align="target", late=True),
    Field(name="logprobs", dtype="float32", align="target", pad=-1),
    Field(name="reward", dtype="float64", axis="sample", late=True),
    Field(name="weight", dtype="float32", late=True, pad=2),
    Field(name="origin", dtype="float32", axis="sample"),
)
LATE_PACKS, LATE_SPLIT, LATE_BATCHES, LATE_MARKS, PACED, PACED_LATE = RL_CASES = range(6)
RL_MEDIA = {6: LATE_SPLIT, 7: PACED_LATE, 8: LATE_MARKS, 9: PACED}
"""Cases whose samples have media, which no seed has of itself, and the case that each is without media."""
TIMED = 10
"""A case whose samples are dropped if a late field does not come in time, which no seed has of itself."""
_BASES = {TIMED: 10, LATE_PACKS: 10, LATE_SPLIT: 11, LATE_BATCHES: 12, LATE_MARKS: 13, PACED: 12, PACED_LATE: 12}
"""The case of the simulation whose sizes, lengths and rules each has, but for what is set here."""


@lru_cache
def rl_case(number: int, lag: int = 0) -> Case:
    """Case ``number``; samples of paced cases may be ``lag`` policies old when they are trained."""
    if number in RL_MEDIA:
        return with_media(rl_case(RL_MEDIA[number], lag))
    base = case(_BASES[number])
    streams = tuple(msgspec.structs.replace(stream, pushed=True) for stream in base.rules.streams)
    rules: dict[str, Any] = {"share": None, "streams": streams}
    if number != PACED:
        rules["fields"] = FIELDS
    if number == TIMED:
        rules["late_timeout_s"] = 1
    if number in (PACED, PACED_LATE):
        rules |= {"paces": True, "max_policy_lag": lag}
    return replace(base, rules=msgspec.structs.replace(base.rules, **rules))
