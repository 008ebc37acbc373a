"""Changes to a running feed, and the rules that follow from a change.

A change sets weights, adds or removes streams, begins a stage, or skips steps. A change takes effect at a step, is
recorded with the merge's position at that step, and is never undone. Formed steps stay as they are. A removed stream
keeps its number, with weight 0, since sample ids contain it. The module knows rules, not how a feed applies them.

A change is recorded as it was asked, as a difference. It becomes whole rules when it takes effect. So a change for an
early step that is asked late does not undo others, and others do not undo it. Only the ``align``, ``balance`` and
``limits`` of a stage are whole values.
"""

from __future__ import annotations

import math
import re

import msgspec
from msgspec import Struct

from streampack.core.model.keys.stage_keys import Stage, StageBegin, WeightsRamp
from streampack.core.model.rules import MAX_WEIGHT_RATIO, Rules, StreamRules
from streampack.core.packers.registry import parameters_of

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


class Cancel(Struct, frozen=True, tag=True):
    """Cancel the change with number ``id``, which has not begun."""

    id: int


class WholeRules(Struct, frozen=True, tag=True):
    """All rules anew, as versions before 0.2 recorded a change."""

    rules: Rules


Difference = Reweigh | Restream | Stage | WholeRules
"""A change of the rules."""
Ask = Reweigh | Restream | Stage | Skip | Cancel


class Scheduled(Struct, frozen=True, omit_defaults=True):
    """A change that has not taken effect.

    Attributes:
        id: Its number. The stages of broker.yaml have the first numbers.
        ask: The change.
        at: The step, or the tokens, from which on it takes effect.
        note: Text for the record.
    """

    id: int
    ask: Difference
    at: StageBegin
    note: str = ""

    @property
    def keys(self) -> set[str]:
        """Names of what it changes."""
        if isinstance(self.ask, Stage):
            return {*self.ask.rules.keys, *(["weights"] if self.ask.weights is not None else [])}
        return {"weights"} if isinstance(self.ask, Reweigh) else set()

    @property
    def name(self) -> str:
        """The name of a stage, or a text that describes the change."""
        return self.ask.name if isinstance(self.ask, Stage) and self.ask.name else describe_change(self.ask)


class Schedule(Struct, frozen=True):
    """Changes that were asked for while a run goes on, and the numbers of those that were canceled."""

    asked: list[Scheduled] = []
    canceled: list[int] = []


def parse_steps(text: str) -> Skip:
    """Return ``Skip(120, 140)`` for ``120-140``; raise ValueError for any other form."""
    match = _STEPS.fullmatch(text)
    if match is None:
        raise ValueError(f"got steps {text[:50]!r}, expected a range such as 120-140, or one step")
    first, last = match.groups()
    return Skip(int(first), int(first if last is None else last))


def describe_change(ask: Ask | WholeRules) -> str:
    """Return the change as text for the record, e.g. ``weights code=0.3 web=0.7``."""
    if isinstance(ask, Skip):
        return f"skip steps {ask.first}-{ask.last}"
    if isinstance(ask, Cancel):
        return f"cancel change {ask.id}"
    if isinstance(ask, WholeRules):
        return "rules"
    if isinstance(ask, Stage):
        return _describe_stage(ask)
    if isinstance(ask, Reweigh):
        return "weights " + _weights(ask.weights)
    added = [f"+{stream.name}" for stream in ask.add]
    return "streams " + " ".join([*added, *(f"-{name}" for name in ask.remove)])


def _describe_stage(stage: Stage) -> str:
    """Return a stage as text: its name, its rules and its weights."""
    texts, ramps = [stage.name] if stage.name else [], {"budget": stage.rules.warmup, "packs": stage.rules.packs_ramp}
    for key in stage.rules.keys:
        value, ramp = getattr(stage.rules, key), ramps.get(key)
        if isinstance(ramp, Struct):
            texts.append(f"{key}={ramp.init} to {value} over {ramp.steps} steps")
        elif key not in ("warmup", "packs_ramp"):
            texts.append(f"{key}={_of_value(value) if isinstance(value, Struct) else value}")
    if stage.weights is not None:
        over = f" over {stage.over} steps" if stage.over else ""
        texts.append("weights " + _weights(stage.weights) + over)
    return "stage " + " ".join(texts)


def _of_value(value: Struct) -> str:
    """Return a value of several keys as text: its kind, and what is not the default; all keys if all are defaults."""
    keys, kind = msgspec.to_builtins(value), getattr(value, "kind", None)
    keys = keys if kind is None else {"kind": kind} | keys
    return msgspec.json.encode(keys or msgspec.structs.asdict(value)).decode()


def _weights(weights: dict[str, float]) -> str:
    """Return weights as text, e.g. ``code=0.3 web=0.7``."""
    return " ".join(f"{name}={weight:g}" for name, weight in weights.items())


def apply_change(rules: Rules, ask: Difference, step: int = 0) -> Rules:
    """Return the rules after a change that begins at ``step``.

    Raises ValueError, with one line of text, for a change that is not possible.
    """
    if isinstance(ask, WholeRules):
        return ask.rules
    if isinstance(ask, Stage):
        return _checked(_staged(rules, ask, step))
    if isinstance(ask, Reweigh):
        streams = _reweighed(rules, ask.weights)
    else:
        streams = _reweighed(rules, dict.fromkeys(ask.remove, 0.0)) + _check_added(rules, ask.add)
    stays = isinstance(ask, Restream) or not any(ask.weights.values())  # streams that come or go end no ramp
    ramp = rules.weights_ramp if stays else None
    return _checked(msgspec.structs.replace(rules, streams=streams, weights_ramp=ramp, stages=()))


def rules_of_stages(rules: Rules) -> list[Rules]:
    """Return the rules of a run at its begin, and after each of its stages, if these come in order."""
    stages = [msgspec.structs.replace(rules, stages=())]
    for stage in rules.stages:
        stages.append(apply_change(stages[-1], stage, stage.at.step or 0))
    return stages


def _staged(rules: Rules, stage: Stage, step: int) -> Rules:
    """Return the rules after a stage that begins at ``step``."""
    keys = {key: getattr(stage.rules, key) for key in stage.rules.keys}
    policy = keys.pop("overlong", None)
    if keys.get("packer", rules.packer) != rules.packer:
        keys["in_turn"] = "in_turn" in parameters_of(keys["packer"])
    for key, ramp in (("budget", "warmup"), ("packs", "packs_ramp")):
        if key in keys:
            keys[ramp] = msgspec.structs.replace(keys[ramp], begin=step) if ramp in keys else None
    streams = rules.streams
    if policy is not None:
        streams = tuple(msgspec.structs.replace(stream, overlong=policy) for stream in streams)
    if stage.weights is not None:
        before = rules.shares_at(step)
        streams = _mixed(msgspec.structs.replace(rules, streams=streams), stage.weights)
        total = sum(before)
        shares = tuple(weight / total for weight in before) if total else ()
        keys["weights_ramp"] = WeightsRamp(step, stage.over, shares) if stage.over and shares else None
    return msgspec.structs.replace(rules, **keys, streams=streams, stages=())


def _mixed(rules: Rules, weights: dict[str, float]) -> tuple[StreamRules, ...]:
    """Return the streams of ``rules`` with the whole mixture ``weights``; streams without a weight pause."""
    for name, weight in weights.items():
        if not weight:
            raise ValueError(
                f"stream {name!r}: got weight 0 in a stage, expected a weight above 0. Leave the stream out to pause "
                f"it, or remove it with 'streampack set streams --remove {name}'"
            )
    replace = msgspec.structs.replace
    return tuple(
        replace(stream, paused=bool(stream.weight) and stream.name not in weights)
        for stream in _reweighed(rules, weights)
    )


def _checked(rules: Rules) -> Rules:
    """Return ``rules``; raise ValueError if no stream gives samples, or the ratio of two weights is too large."""
    streams = rules.streams
    weights = {stream.name: stream.weight for stream in streams if stream.gives}
    if not weights:
        raise ValueError("got a change that removes all streams, expected at least one stream that stays")
    heaviest = max(weights.values())
    for name, weight in weights.items():
        if heaviest / weight > MAX_WEIGHT_RATIO:
            raise ValueError(
                f"stream {name!r}: got weight {weight:g}, expected at least {heaviest / MAX_WEIGHT_RATIO:g}, "
                f"1/{MAX_WEIGHT_RATIO} of the heaviest weight"
            )
    return rules


def _reweighed(rules: Rules, weights: dict[str, float]) -> tuple[StreamRules, ...]:
    """Return the streams of ``rules`` with new ``weights`` by name. Raises ValueError for a bad name or weight."""
    left = [stream.name for stream in rules.streams if stream.weight]
    for name, weight in weights.items():
        if name not in left:
            removed = ", which was removed" if any(name == stream.name for stream in rules.streams) else ""
            raise ValueError(f"got stream {name!r}{removed}, expected one of: {', '.join(left)}")
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
    return tuple(
        replace(stream, weight=weights[stream.name], paused=False) if stream.name in weights else stream
        for stream in rules.streams
    )


def _check_added(rules: Rules, added: tuple[StreamRules, ...]) -> tuple[StreamRules, ...]:
    """Return ``added``, the streams to add to ``rules``. Raises ValueError for a known name or a bad weight."""
    names = {stream.name for stream in rules.streams}
    for stream in added:
        if stream.name in names:
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
        names.add(stream.name)
    return added
