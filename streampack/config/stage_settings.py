"""Settings of stages: the key ``stages`` of broker.yaml, and the file of ``streampack set stage``.

A stage names only what it changes. ``resolved`` completes it from the rules before it and from the planned mesh, and
``with_stages`` adds the stages of a feed to its rules. The structs of a stage's rules are made from those of ``rules``,
so that each key is declared once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from streampack.config.alignment import AlignSettings, Precision, derived_align
from streampack.config.rules_settings import PlannedMesh, RulesSettings, StepSettings
from streampack.config.typed_yaml import overlaid, parse_amount
from streampack.core.model.bounded import Name
from streampack.core.model.keys.key_groups import Keys
from streampack.core.model.keys.planning_keys import Balance, MediaLimits, Positive, RunKeys, Warmup
from streampack.core.model.keys.stage_keys import Stage, StageBegin, StageRules, Steps
from streampack.core.model.rule_changes import MAX_WEIGHT, apply_change
from streampack.core.model.rules import Align, Rules
from streampack.errors import ConfigError

_STAYS = "It stays for the whole run. Start a new run to change it"


class Ramp(Keys, frozen=True, kw_only=True, rename={"first": "from", "last": "to"}):
    """A value that grows evenly from one step to the next."""

    first: Annotated[Positive, Meta(description="Value at the first step of the stage")]
    last: Annotated[Positive, Meta(description="Value at the end of the growth, and from then on")]
    over: Annotated[Steps, Meta(description="Number of steps in which the value grows evenly")]

    @property
    def warmup(self) -> Warmup:
        """The growth for the rules, from the first step of the stage on."""
        return Warmup(self.first, self.over)


Value = int | Ramp


def _changing(
    name: str, kind: type[Struct], keys: Iterable[str] = (), own: Mapping[str, Any] = {}, stay: Iterable[str] = ()
) -> Any:
    """Return a struct with some ``keys`` of the settings ``kind``, each optional; default: all keys.

    Args:
        name: Name of the struct.
        kind: Settings that declare the keys.
        keys: Names of keys whose types are those of ``kind``.
        own: Types of further keys.
        stay: Names of keys of other settings that a stage cannot change.
    """
    types = {key.name: key.type for key in msgspec.structs.fields(kind)}
    chosen = {key: types[key] for key in keys or (types if not own else ())} | dict(own)
    hints = {key: _STAYS for key in (*types, *stay) if key not in chosen} | {"warmup": _WARMUP}
    fields = [(key, chosen_type | UnsetType, UNSET) for key, chosen_type in chosen.items()]
    namespace = {"__doc__": f"Keys of {kind.__name__} that a stage may change.", "hints": hints}
    return msgspec.defstruct(
        name, fields, namespace=namespace, module=__name__, frozen=True, kw_only=True, forbid_unknown_fields=True
    )


_WARMUP = "Write `budget: {from: 2048, to: 8192, over: 1000}`"
if TYPE_CHECKING:
    StageRulesSettings = Keys
else:
    StageStep = _changing("StageStep", StepSettings, own={"packs": Annotated[Positive | Ramp, Meta(
        description="Number of packs in one optimizer step, or `{from: N, to: M, over: STEPS}` to change it evenly. "
        "Only in feeds whose step is a number of packs"
    )]})  # fmt: skip
    StageRulesSettings = _changing(
        "StageRulesSettings",
        RulesSettings,
        ("packer", "window", "max_samples_per_pack", "tail", "overlong"),
        {
            "budget": Annotated[Positive | Ramp, Meta(
                description="Number of tokens in a pack, or `{from: N, to: M, over: STEPS}` to raise it evenly. The "
                "budget of feeds with `share` stays"
            )],
            "step": StageStep,
            "align": _changing("StageAlign", AlignSettings),
            "balance": _changing("StageBalance", Balance),
            "limits": _changing("StageLimits", MediaLimits) | None,
        },
        stay=(*RunKeys.__struct_fields__, "fields", "streams"),
    )  # fmt: skip


class StageAt(Keys, frozen=True, kw_only=True):
    """The begin of a stage: a step, or a number of tokens."""

    step: Annotated[
        Annotated[int, Meta(ge=0, lt=2**62)] | None, Meta(description="First step of the stage, counted from 0")
    ] = None
    tokens: Annotated[
        str | int | float | None,
        Meta(
            description="Tokens in steps, without padding, after which the stage begins: a number, or text such as "
            "`500M` or `2.8T`. The stage begins at the next step"
        ),
    ] = None

    @property
    def begin(self) -> StageBegin:
        """The begin for the rules. Raises ConfigError for tokens that are no number."""
        return StageBegin(self.step, None if self.tokens is None else parse_amount(self.tokens, "at.tokens"))


class StageSettings(Keys, frozen=True, kw_only=True):
    """A stage: from its begin on, some rules and the mixture have other values."""

    hints: ClassVar[Mapping[str, str]] = dict.fromkeys(StageRulesSettings.__struct_fields__, "Write it under `rules`")

    name: Annotated[str, Meta(max_length=200, description="Name of the stage, which status and logs show")] = ""
    at: Annotated[
        StageAt | None, Meta(description="Begin of the stage: `{step: 40000}`, or `{tokens: 2T}`")
    ] = None  # fmt: skip
    rules: StageRulesSettings = StageRulesSettings()
    weights: Annotated[
        Annotated[dict[Name, Annotated[float, Meta(ge=0, le=MAX_WEIGHT)]], Meta(min_length=1)] | None,
        Meta(
            description="The whole mixture of the stage, by stream. Other streams pause: they keep their place and "
            "give no samples. Default: the mixture stays"
        ),
    ] = None
    over: Annotated[
        Steps | None,
        Meta(
            description="Number of steps in which the mixture changes evenly to `weights`. Default: it changes at once"
        ),
    ] = None
    planned_mesh: Annotated[
        PlannedMesh | None,
        Meta(
            description="The mesh that trainers use from this stage on. `align` and `balance.group` of the stage "
            "follow from it. Default: the mesh before"
        ),
    ] = None


class MeshTerms(NamedTuple):
    """The settings from which the alignment of a stage and its groups follow."""

    mesh: PlannedMesh
    layout: str
    precision: Precision | None
    align: AlignSettings | None
    group: int | None
    """The run's ``balance.group``."""


def resolved(stage: StageSettings, rules: Rules, terms: MeshTerms) -> Stage:
    """Return a stage that begins with ``rules``, with all values that follow from others.

    Raises:
        ValueError: The stage changes nothing, or something that this feed cannot change.
    """
    values = msgspec.to_builtins(stage.rules)
    if not values and stage.weights is None and stage.planned_mesh is None:
        raise ValueError("got a stage that changes nothing, expected the key rules, weights or planned_mesh")
    _check_feed(stage, values, rules)
    keys = {key: values[key] for key in ("packer", "max_samples_per_pack", "tail", "overlong") if key in values}
    if "window" in values:
        keys["window"] = values["window"] if values["window"] == "auto" else values["window"]["samples"]
    if "limits" in values:
        keys["limits"] = values["limits"] and _laid("limits", rules.limits or MediaLimits(), values["limits"])
    if "align" in values or stage.planned_mesh is not None:
        keys["align"] = _align(stage, values.get("align", {}), rules, terms)
    if "balance" in values or (stage.planned_mesh is not None and rules.balance.kind == "joint"):
        keys["balance"] = _balance(values.get("balance", {}), rules, stage.planned_mesh, terms)
    align = keys.get("align", rules.align)
    keys |= _value(getattr(stage.rules, "budget", UNSET), "budget", "warmup", align)
    keys |= _value(getattr(getattr(stage.rules, "step", UNSET), "packs", UNSET), "packs", "packs_ramp", align)
    begin = StageBegin(step=0) if stage.at is None else stage.at.begin
    return Stage(name=stage.name, at=begin, rules=StageRules(**keys), weights=stage.weights, over=stage.over or 0)


def _check_feed(stage: StageSettings, values: dict[str, Any], rules: Rules) -> None:
    """Raise ValueError if a feed with ``rules`` cannot have the stage; ``values``: the stage's rules."""
    if stage.over is not None and stage.weights is None:
        raise ValueError(
            f"got `over: {stage.over}` without `weights`, expected the weights to which the mixture changes"
        )
    if stage.weights is not None and rules.merge == "arrival":
        raise ValueError(
            "got `weights` with `merge: arrival`, expected no weights, because samples are merged in order of arrival"
        )
    if rules.batch is not None and (wrong := [key for key in ("step", "window") if key in values]):
        raise ValueError(
            f"got `rules.{wrong[0]}` in a feed whose step is a batch, expected neither `step` nor `window`, because a "
            f"batch decides its packs. The kind of step stays for the whole run"
        )
    if rules.share is not None and "budget" in values:
        raise ValueError(
            "got `rules.budget` in a feed with `share: prefix`, expected no budget, because the samples of a tree stay "
            "in one pack. Start a new run to change the budget"
        )


def _value(value: Value | UnsetType, key: str, ramp: str, align: Align) -> dict[str, Any]:
    """Return the rules ``key`` and ``ramp`` for a value of a stage. Raises ValueError for a wrong budget."""
    if isinstance(value, UnsetType):
        return {}
    first, last = (value.first, value.last) if isinstance(value, Ramp) else (value, value)
    if key == "budget":
        for number in (first, last):
            if number % align.pack:
                raise ValueError(
                    f"rules.budget: got {number}, expected a multiple of {align.pack}, the alignment of packs. Use "
                    f"{number // align.pack * align.pack or align.pack}, or write `planned_mesh` for the stage"
                )
        if first > last:
            raise ValueError(
                f"rules.budget: got a ramp from {first} to {last}, expected one that rises. Write `budget: {last}`"
            )
    return {key: last} | ({ramp: value.warmup} if isinstance(value, Ramp) else {})


def _laid(key: str, before: Struct, values: dict[str, Any]) -> Any:
    """Return a value of the rules with the keys of ``values`` in place of its own. Raises ValueError naming ``key``."""
    try:
        return msgspec.convert(overlaid(msgspec.to_builtins(before), values), type(before))
    except ValueError as error:
        raise ValueError(f"rules.{key}: {error}") from None


def _align(stage: StageSettings, values: dict[str, Any], rules: Rules, terms: MeshTerms) -> Align:
    """Return the alignment of a stage. Raises ValueError for keys that need a planned mesh."""
    if stage.planned_mesh is not None:
        mesh, align = stage.planned_mesh, _laid("align", terms.align or AlignSettings(), values)
        return derived_align(mesh.cp, mesh.tp, terms.layout, terms.precision, align)
    for key, value in values.items():
        if value == "tight" or key == "lcm":
            raise ValueError(
                f"rules.align: got `{key}: {value}` without `planned_mesh`, expected a planned mesh in the stage, from "
                f"which this alignment follows"
            )
    changed = {key: value for key, value in values.items() if value is not None}
    return replace(rules.align, **changed)


def _balance(values: dict[str, Any], rules: Rules, mesh: PlannedMesh | None, terms: MeshTerms) -> Balance:
    """Return the balance of a stage; ``mesh``: the stage's own planned mesh. Raises ValueError."""
    before = rules.balance
    if mesh is not None or values.get("kind", before.kind) != "joint":
        before = replace(before, group=terms.group if values.get("kind", before.kind) == "joint" else None)
    if values.get("kind", before.kind) != "joint":
        before = replace(before, kind="none", patience=Balance().patience) if before.kind == "joint" else before
    changed: Balance = _laid("balance", before, values)
    return changed.planned((mesh or terms.mesh).dp)


def with_stages(rules: Rules, stages: Sequence[StageSettings], terms: MeshTerms, where: str) -> Rules:
    """Return the rules of a feed with its stages; ``where``: path of the key ``stages``. Raises ConfigError."""
    now, recorded = rules, list[Stage]()
    for number, settings in enumerate(stages):
        path = f"{where}.{settings.name}" if settings.name else f"{where}[{number}]"
        if not settings.name or settings.at is None:
            key, line = ("name", "name: long") if not settings.name else ("at", "at: {step: 40000}")
            raise ConfigError(f"{path}: got no key '{key}', which is required. Write, for example, `{line}`")
        try:
            stage = resolved(settings, now, terms)
            _check_order(recorded, stage)
            now = apply_change(now, stage, stage.at.step or 0)
        except ConfigError as error:
            raise ConfigError(f"{path}.{error}") from None
        except ValueError as error:
            dot = "." if str(error).startswith("rules.") else ": "
            raise ConfigError(f"{path}{dot}{error}") from None
        recorded.append(stage)
        terms = terms._replace(mesh=settings.planned_mesh or terms.mesh)
    return replace(rules, stages=tuple(recorded))


def _check_order(before: Sequence[Stage], stage: Stage) -> None:
    """Raise ValueError if a stage has the name of one ``before`` it, comes too early, or changes what that changes."""
    for other in before:
        if other.name == stage.name:
            raise ValueError(f"got a second stage with this name, expected a name of its own, such as {stage.name}_2")
        for unit in ("step", "tokens"):
            start, other_start = getattr(stage.at, unit), getattr(other.at, unit)
            if start is None or other_start is None:
                continue
            if start < other_start:
                raise ValueError(
                    f"got `at: {{{unit}: {start}}}` after stage {other.name!r}, which begins at {other.at}, expected "
                    f"stages in the order of their begins. Write this stage before stage {other.name!r}"
                )
            twice = [key for key in _changes(stage) if key in _changes(other)]
            if start == other_start and twice:
                raise ValueError(
                    f"got {twice[0]} at {stage.at}, where stage {other.name!r} changes it, too, expected one value. "
                    f"Remove it from one of the stages"
                )


def _changes(stage: Stage) -> list[str]:
    """Return the names of what a stage changes."""
    return [*stage.rules.keys, *(["weights"] if stage.weights is not None else [])]


def written(stage: Stage) -> dict[str, Any]:
    """Return a stage as broker.yaml has it, with every value of what it changes."""
    rules: dict[str, Any] = {key: getattr(stage.rules, key) for key in stage.rules.keys}
    ramps = {"budget": rules.pop("warmup", UNSET), "packs": rules.pop("packs_ramp", UNSET)}
    for key, ramp in ramps.items():
        if isinstance(ramp, Warmup):
            rules[key] = {"from": ramp.init, "to": rules[key], "over": ramp.steps}
    if "packs" in rules:
        rules["step"] = {"packs": rules.pop("packs")}
    if isinstance(rules.get("window"), int):
        rules["window"] = {"samples": rules["window"]}
    for key, value in rules.items():
        if isinstance(value, Struct):
            rules[key] = msgspec.structs.asdict(value)
    values: dict[str, Any] = {"name": stage.name, "at": msgspec.to_builtins(stage.at), "rules": rules}
    values |= {} if stage.weights is None else {"weights": stage.weights}
    values |= {"over": stage.over} if stage.over else {}
    plain: dict[str, Any] = msgspec.to_builtins({key: value for key, value in values.items() if value})
    return plain


def other_stages(stages: Sequence[Stage], recorded: Sequence[Stage]) -> str:
    """Return a text with the differences between stages of broker.yaml and recorded ones; empty if there is none."""
    now, before = ({stage.name: stage for stage in group} for group in (stages, recorded))
    texts = [
        f"{name} ({'differs' if name in now and name in before else 'is new' if name in now else 'is missing'})"
        for name in dict.fromkeys([*now, *before])
        if now.get(name) != before.get(name)
    ]
    return ", ".join(texts) or ("the order differs" if tuple(stages) != tuple(recorded) else "")
