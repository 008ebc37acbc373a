"""Changes to a running feed, and the rules that follow from a change.

A change sets weights, adds or removes streams, or skips steps. A change takes effect at a step, is recorded with the
merge's position at that step, and is never undone. Formed steps stay as they are. A removed stream keeps its number,
with weight 0, since sample ids contain it. The module knows rules, not how a feed applies them.
"""

from __future__ import annotations

import math
import re

import msgspec
from msgspec import Struct

from streampack.core.model.rules import MAX_WEIGHT_RATIO, Rules, StreamRules

MAX_WEIGHT = 1e9
_STEPS = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)


class Reweigh(Struct, frozen=True, tag=True):
    """New weights by stream name; other streams keep theirs. 0 removes a stream."""

    weights: dict[str, float]


class Restream(Struct, frozen=True, tag=True):
    """Streams to add, behind the existing ones, and names of streams to remove."""

    add: tuple[StreamRules, ...] = ()
    remove: tuple[str, ...] = ()


class Skip(Struct, frozen=True, tag=True):
    """Every rank skips the steps ``first`` to ``last``; later steps do not change."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last:
            raise ValueError(f"got steps {self.first} to {self.last}, expected 0 <= first step <= last step")


Ask = Reweigh | Restream | Skip


def parse_steps(text: str) -> Skip:
    """Return ``Skip(120, 140)`` for ``120-140``; raise ValueError for any other form."""
    match = _STEPS.fullmatch(text)
    if match is None:
        raise ValueError(f"got steps {text[:50]!r}, expected a range such as 120-140, or one step")
    first, last = match.groups()
    return Skip(int(first), int(first if last is None else last))


def describe_change(ask: Ask) -> str:
    """Return the change as text for the record, e.g. ``weights code=0.3 web=0.7``."""
    if isinstance(ask, Skip):
        return f"skip steps {ask.first}-{ask.last}"
    if isinstance(ask, Reweigh):
        return "weights " + " ".join(f"{name}={weight:g}" for name, weight in ask.weights.items())
    added = [f"+{stream.name}" for stream in ask.add]
    return "streams " + " ".join([*added, *(f"-{name}" for name in ask.remove)])


def apply_change(rules: Rules, ask: Reweigh | Restream) -> Rules:
    """Return the rules after a change. Raises ValueError, with one line of text, for a change that is not possible."""
    if isinstance(ask, Reweigh):
        streams = _reweighed(rules, ask.weights)
    else:
        streams = _reweighed(rules, dict.fromkeys(ask.remove, 0.0)) + _check_added(rules, ask.add)
    weights = {stream.name: stream.weight for stream in streams if stream.weight}
    if not weights:
        raise ValueError("got a change that removes all streams, expected at least one stream that stays")
    heaviest = max(weights.values())
    for name, weight in weights.items():
        if heaviest / weight > MAX_WEIGHT_RATIO:
            raise ValueError(
                f"stream {name!r}: got weight {weight:g}, expected at least {heaviest / MAX_WEIGHT_RATIO:g}, "
                f"1/{MAX_WEIGHT_RATIO} of the heaviest weight"
            )
    return msgspec.structs.replace(rules, streams=streams)


def _reweighed(rules: Rules, weights: dict[str, float]) -> tuple[StreamRules, ...]:
    """Return the streams of ``rules`` with new ``weights`` by name. Raises ValueError for a bad name or weight."""
    left = [stream.name for stream in rules.streams if stream.weight]
    for name, weight in weights.items():
        if name not in left:
            gone = ", which was removed" if any(name == stream.name for stream in rules.streams) else ""
            raise ValueError(f"got stream {name!r}{gone}, expected one of: {', '.join(left)}")
        if not (math.isfinite(weight) and 0 <= weight <= MAX_WEIGHT):
            raise ValueError(
                f"stream {name!r}: got weight {weight:g}, expected 0 to {MAX_WEIGHT:g}. Weight 0 removes the stream"
            )
        if weight and rules.merge == "arrival":
            raise ValueError(
                f"stream {name!r}: got weight {weight:g} with `merge: arrival`, expected 0, which removes the stream. "
                f"Other weights have no effect, because samples are merged in order of arrival"
            )
    replace = msgspec.structs.replace
    return tuple(replace(stream, weight=weights.get(stream.name, stream.weight)) for stream in rules.streams)


def _check_added(rules: Rules, added: tuple[StreamRules, ...]) -> tuple[StreamRules, ...]:
    """Return ``added``, the streams to add to ``rules``. Raises ValueError for a known name or a bad weight."""
    known = {stream.name for stream in rules.streams}
    for stream in added:
        if stream.name in known:
            raise ValueError(
                f"got a new stream {stream.name!r}, expected an unused name, because a current or removed stream of "
                f"this feed has this name"
            )
        if not (math.isfinite(stream.weight) and 0 < stream.weight <= MAX_WEIGHT):
            raise ValueError(
                f"stream {stream.name!r}: got weight {stream.weight:g}, expected a weight above 0 and up to "
                f"{MAX_WEIGHT:g}"
            )
        if stream.pushed and rules.merge == "schedule":
            raise ValueError(
                f"stream {stream.name!r}: got a pushed stream with `merge: schedule`, expected `merge: arrival`"
            )
        known.add(stream.name)
    return added
