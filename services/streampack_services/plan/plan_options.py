"""Read the grid of settings that ``streampack plan`` compares from its arguments, broker.yaml or a run.

An argument comes first, then broker.yaml or the run, then a default around the base setting.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast, get_args

import msgspec

from streampack.config.alignment import AlignSettings, Precision
from streampack.config.daemon_settings import BrokerConfig
from streampack.core.model.keys.planning_keys import Balance
from streampack.core.model.keys.stream_keys import Overlong
from streampack.core.model.rules import Align, Batch, Rules
from streampack.core.model.shapes import Shape, Sizes
from streampack.core.packers import PACKERS
from streampack.errors import UserError
from streampack_services.forecast.forecast import rules_of_lengths, rules_of_sizes, with_packer
from streampack_services.forecast.rank_loads import PlanMesh
from streampack_services.forecast.run_lengths import Served
from streampack_services.plan.grid import DERIVED, JOINT, PlanOptions, default_budgets, default_packers, default_windows


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """The arguments of ``streampack plan``, as the user wrote them."""

    what: str | None
    configs: list[Path] = field(default_factory=list)
    budget: str | None = None
    window: str | None = None
    packer: str | None = None
    meshes: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    precision: str | None = None
    packs: int | None = None
    batch: int | None = None
    overlong: str | None = None
    samples: int | None = None
    total: int | None = None
    feed: str | None = None
    timeout_s: float = 5.0


@dataclass(frozen=True, slots=True)
class PlanBase:
    """Base settings of the grid, from a configuration or a run.

    ``align``: a run's fixed multiples of tokens, or the settings from which a mesh's multiples are derived.
    ``batch_samples``: mean samples per batch of a run whose batches end at marks. ``given``: False for defaults.
    ``has_media``: samples have media. ``rules`` do not know of media after ``without_media``.
    """

    rules: Rules
    align: Align | AlignSettings = DERIVED
    precision: Precision | None = None
    joint: Balance = JOINT
    mesh: PlanMesh | None = None
    layout: str = "zigzag"
    batch_samples: int | None = None
    given: bool = True
    has_media: bool = False

    def without_media(self) -> PlanBase:
        """Return the settings for lengths without sizes of media."""
        return replace(self, rules=rules_of_lengths(self.rules))


def base_of_broker(broker: BrokerConfig, feed: str | None) -> PlanBase:
    """Return the base settings of a feed in broker.yaml. Raises UserError if it has no such feed."""
    name = next(iter(broker.feeds)) if feed is None else feed
    if name not in broker.feeds:
        raise UserError(f"got feed {name!r}, expected one of: {', '.join(broker.feeds)}")
    rules, settings = rules_of_sizes(broker.plan(name)), broker.rules_of(name)
    joint = msgspec.structs.replace(_joint_of(rules), group=settings.balance.group)
    mesh = PlanMesh(**msgspec.structs.asdict(broker.planned_mesh))
    return PlanBase(
        rules, settings.align or DERIVED, broker.precision, joint, mesh, broker.feeds[name].cp_layout,
        has_media=bool(rules.media_fields),
    )  # fmt: skip


def base_of_run(run: Served, *, other_mesh: bool) -> PlanBase:
    """Return the base settings of a run's rules.

    With ``other_mesh``, leave out the run's alignment, joint balance and mesh.
    """
    mesh, rules = run.mesh, rules_of_sizes(run.rules)
    batch = rules.batch
    mean = max(round(run.samples / run.steps), 1) if batch is not None and batch.samples is None else None
    media = bool(run.rules.media_fields)
    if other_mesh:
        return PlanBase(rules, batch_samples=mean, has_media=media)
    return PlanBase(rules, rules.align, None, _joint_of(rules), mesh, batch_samples=mean, has_media=media)


def _joint_of(rules: Rules) -> Balance:
    """Return the settings of the packer ``joint``, with the group and patience of ``rules``."""
    return Balance("joint", group=rules.balance.group, patience=rules.balance.patience)


def options_of(given: PlanInputs, base: PlanBase) -> PlanOptions:
    """Return the grid of settings to forecast. Raises UserError for wrong arguments and for rules without packing."""
    if base.rules.padded:
        raise UserError(
            "The rules have `padded: true`, but plan forecasts packs. Pass only the lengths, or plan a single batch "
            "with streampack.plan_step(mode='padded')."
        )
    meshes = tuple(map(_mesh, given.meshes)) or (base.mesh or PlanMesh(),)
    packer, rules = base.rules.new_packer().name, with_packer(base.rules, base.rules.packer)
    rules, step = _with_step(given, rules, base)
    axes: dict[str, Any] = {}
    for axis, around in (("budget", default_budgets), ("window", default_windows)):
        asked = _numbers(getattr(given, axis), axis)
        axes[axis] = asked if len(asked) > 1 else around(asked[0] if asked else getattr(rules, axis))
    names = _words(given.packer)
    for name in names:
        _must_be_known("--packer", name, tuple(PACKERS))
    packers = names if len(names) > 1 else default_packers(names[0] if names else packer, rules)
    overlong = given.overlong if given.overlong is not None else _overlong_of(rules)
    _must_be_known("--overlong", overlong, get_args(Overlong))
    _must_be_known("--precision", given.precision, get_args(Precision))
    precision = cast("Precision | None", given.precision) or base.precision
    return PlanOptions(
        rules, base.layout, axes["budget"], axes["window"], packers, meshes, tuple(map(_shape, given.shapes)), step,
        base.align, precision, base.joint, cast("Overlong | None", overlong), base.given or given.budget is not None,
        given.overlong is not None,
    )  # fmt: skip


def _with_step(given: PlanInputs, rules: Rules, base: PlanBase) -> tuple[Rules, dict[str, Any]]:
    """Return the rules with the requested step, and the setting ``step`` for broker.yaml.

    The second value is empty if a step is a number of packs. Raises UserError if arguments contradict each other, or
    if the number of samples in a batch is not known.
    """
    if given.packs is not None and given.batch is not None:
        raise UserError(
            "Got both --packs and --batch. Pass --packs for steps of packs, or --batch for steps of samples."
        )
    if given.packs is not None:
        return msgspec.structs.replace(rules, packs=given.packs, batch=None), {}
    asked = rules.batch if rules.batch is not None or given.batch is None else Batch(samples=given.batch)
    if asked is None:
        return rules, {}
    if given.window is not None:
        raise UserError("Got --window, but each step is a whole batch and needs no window. Leave --window out.")
    samples = given.batch or asked.samples or base.batch_samples
    if samples is None:
        raise UserError(
            "With `step: {end_of_batch: true}`, the size of a batch is not known. Pass its number of samples with "
            "--batch."
        )
    others = {key: value for key, value in msgspec.to_builtins(asked).items() if key != "samples"}
    ends = rules.batch is not None and rules.batch.samples is None
    step = {"end_of_batch": True, **others} if ends else {"samples": samples, **others}
    return msgspec.structs.replace(rules, batch=msgspec.structs.replace(asked, samples=samples, min_samples=1)), step


def _overlong_of(rules: Rules) -> str | None:
    """Return the overlong policy that all streams without ``error`` share; None if there is no such policy."""
    policies = {stream.overlong for stream in rules.streams} - {"error"}
    return policies.pop() if len(policies) == 1 else None


def _words(text: str | None) -> tuple[str, ...]:
    """Return the different words of a comma-separated list."""
    return tuple(dict.fromkeys(word.strip() for word in (text or "").split(",") if word.strip()))


def _numbers(text: str | None, name: str) -> tuple[int, ...]:
    """Return the numbers of a comma-separated list. Raises UserError, which names the option ``name``."""
    words = _words(text)
    if not all(map(_is_size, words)):
        raise UserError(f"--{name} is {text!r}. Pass whole numbers above 0, such as 4096,8192.")
    return tuple(map(int, words))


def _must_be_known(option: str, got: str | None, known: tuple[str, ...]) -> None:
    """Raise UserError if the value ``got`` of an option is not None and not one of ``known``."""
    if got is not None and got not in known:
        raise UserError(f"{option} is {got!r}. Pass one of: {', '.join(known)}.")


def _mesh(text: str) -> PlanMesh:
    """Return the mesh that ``dp=8,cp=2`` names. Raises UserError."""
    sizes: dict[str, int] = {}
    for word in _words(text):
        name, _, size = word.partition("=")
        if name not in PlanMesh.__struct_fields__ or not _is_size(size) or int(size) >= 2**20:
            raise UserError(f"--mesh is {text!r}. Pass sizes of dp, cp, tp and pp, such as dp=8,cp=2.")
        sizes[name] = int(size)
    return PlanMesh(**sizes)


def _shape(text: str) -> Shape:
    """Return the shape that ``exact``, ``multiple=512`` or ``buckets=2048,4096`` names. Raises UserError."""
    name, _, sizes = text.strip().partition("=")
    words = _words(sizes)
    if name in ("fixed", "exact") and not words:
        return cast("Shape", name)
    if name == "multiple" and len(words) == 1 and _is_size(words[0]):
        return Sizes(multiple=int(words[0]))
    if name == "buckets" and words and all(map(_is_size, words)):
        return Sizes(buckets=tuple(map(int, words)))
    raise UserError(f"--shape is {text!r}. Pass fixed, exact, multiple=512 or buckets=2048,4096.")


def _is_size(word: str) -> bool:
    """Return whether a word is a whole number from 1 to 2**31 - 1."""
    return word.isascii() and word.isdigit() and 0 < int(word) < 2**31
