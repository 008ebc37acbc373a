"""The settings that ``streampack plan`` compares: a base setting, and variations of one axis at a time.

A value comes from an argument, else from broker.yaml or the run, else from a default around the base setting. A larger
budget has fewer packs per step, so that a step keeps its tokens; batches stay as they are. Alignment follows from the
mesh, as in a broker.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast, get_args

import msgspec

from streampack.config.alignment import AlignSettings, Precision, derived_align
from streampack.config.daemon_settings import BrokerConfig
from streampack.core.model.keys.planning_keys import Balance, Window
from streampack.core.model.keys.stream_keys import Overlong
from streampack.core.model.mesh import DynamicCp
from streampack.core.model.rules import Align, Batch, Rules
from streampack.core.model.shapes import Shape, Sizes
from streampack.core.packers import PACKERS
from streampack.errors import ConfigError, UserError
from streampack_services.forecast.forecast import rules_of_lengths, rules_of_sizes, with_packer
from streampack_services.forecast.rank_loads import PlanMesh
from streampack_services.forecast.run_lengths import Served

DERIVED, JOINT, ONE_RANK = AlignSettings(), Balance("joint"), (PlanMesh(),)
"""Without a configuration: all alignment follows from the mesh, the group of ``joint``, too, and there is one rank."""


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
class Setting:
    """One setting, and the ``axis`` that it varies.

    A step has ``step_packs`` packs over all ranks, or is a batch of ``step_samples`` samples; the other is None.
    """

    axis: str
    budget: int
    window: Window
    packer: str
    shape: Shape
    step_packs: int | None
    step_samples: int | None
    mesh: PlanMesh
    align: Align


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """All settings of a plan; of the values to compare on each axis, the first is the base setting's.

    ``rules``: all other settings; they know nothing of media without sizes of media. ``step``: the step as broker.yaml
    has it, if steps are batches. ``align``: a run's fixed multiples of tokens, or settings from which a mesh's
    multiples are derived. ``joint``: balance settings of the packer ``joint``; without a group, it follows from the
    mesh. ``keep_budget``: the user or a configuration names the first budget. ``keeps_good_budget``: another budget is
    advised only if the first is not good enough. ``batch_samples``: mean samples per batch of a run whose batches end
    at marks. ``has_media``: samples have media.
    ``overlong``: policy for samples over the budget; None forecasts ``truncate`` to show its loss. With
    ``overlong_of_all``, the policy holds for all streams, in place of their own. ``dynamic``: settings of a feed with
    ``cp: dynamic``, for which there is no grid.
    """

    rules: Rules
    align: Align | AlignSettings = DERIVED
    precision: Precision | None = None
    joint: Balance = JOINT
    meshes: tuple[PlanMesh, ...] = ONE_RANK
    layout: str = "zigzag"
    keep_budget: bool = False
    keeps_good_budget: bool = False
    batch_samples: int | None = None
    has_media: bool = False
    budgets: tuple[int, ...] = ()
    windows: tuple[Window, ...] = ()
    packers: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()
    step: dict[str, Any] = field(default_factory=dict)
    overlong: Overlong | None = None
    overlong_of_all: bool = False
    dynamic: DynamicCp | None = None

    def without_media(self) -> PlanOptions:
        """Return the settings for lengths without sizes of media."""
        return replace(self, rules=rules_of_lengths(self.rules))

    def setting(self, axis: str = "base", **values: Any) -> Setting:
        """Return the base setting with other ``values``, and about as many tokens per step."""
        first: dict[str, Any] = {"budget": self.budgets[0], "window": self.windows[0], "packer": self.packers[0]}
        first |= {"shape": self.shapes[0] if self.shapes else self.rules.shape, "mesh": self.meshes[0], **values}
        batch, dp = self.rules.batch, first["mesh"].dp
        packs = max(round(self.rules.packs * self.budgets[0] / first["budget"] / dp), 1) * dp
        return Setting(
            axis, **first, align=self.align_of(first["mesh"]), step_packs=packs if batch is None else None,
            step_samples=None if batch is None else batch.samples,
        )  # fmt: skip

    def align_of(self, mesh: PlanMesh, **changes: Any) -> Align:
        """Return the multiples of tokens that samples and packs are padded to on a mesh."""
        if isinstance(self.align, Align):
            return self.align
        settings = msgspec.structs.replace(self.align, **changes)
        return derived_align(mesh.cp, mesh.tp, self.layout, self.precision, settings)


def grid(options: PlanOptions) -> list[Setting]:
    """Return the base setting, then the settings of each axis.

    Raises ConfigError if the base budget is not a multiple of the pack alignment.
    """
    base = options.setting()
    if base.budget % base.align.pack:
        raise ConfigError(
            f"budget: got {base.budget}, expected a multiple of {base.align.pack} because of the mesh and precision. "
            f"Use {fitting(base.budget, base.align)}."
        )
    shapes = options.shapes if len(options.shapes) > 1 else _default_shapes(base)
    axes: dict[str, Iterable[Any]] = {
        "budget": (fitting(budget, base.align) for budget in sorted(options.budgets)),
        "window": sorted(options.windows, key=_auto_last) if base.step_samples is None else (),
        "packer": options.packers,
        "shape": shapes,
    }
    settings = [base, *(options.setting(axis, **{axis: value}) for axis, values in axes.items() for value in values)]
    for mesh in options.meshes:
        on_mesh = options.setting("mesh", mesh=mesh)
        aligns = [on_mesh.align]
        if isinstance(options.align, AlignSettings) and options.align.sample is None and mesh.tp > 1:
            tight = options.align_of(mesh, sample="tight")
            aligns += [tight] if tight.sample < on_mesh.align.sample else []
        settings += [replace(on_mesh, align=align, budget=fitting(base.budget, align)) for align in aligns]
    return settings


def fitting(budget: int, align: Align) -> int:
    """Return the largest multiple of ``align.pack`` up to ``budget``, at least ``align.pack`` itself."""
    return max(budget // align.pack, 1) * align.pack


def _default_shapes(base: Setting) -> list[Shape]:
    """Return the base shape, fixed, exact, multiples of about a 16th of the budget, and buckets of its quarters."""
    budget, align = base.budget, base.align.pack
    parts = [budget // n for n in (16, 8, 4, 2) if not budget % n and not budget // n % align]
    quarters = sorted({-(-budget * n // 4 // align) * align for n in (1, 2, 3)} - {budget})
    shapes: list[Shape] = [base.shape, "fixed", "exact", *(Sizes(multiple=part) for part in parts[:1])]
    shapes += [Sizes(buckets=tuple(quarters))] if quarters else []
    return list(dict.fromkeys(shapes))


def base_of_broker(broker: BrokerConfig, feed: str | None) -> PlanOptions:
    """Return the base settings of a feed in broker.yaml. Raises UserError if it has no such feed."""
    name = next(iter(broker.feeds)) if feed is None else feed
    if name not in broker.feeds:
        raise UserError(f"got feed {name!r}, expected one of: {', '.join(broker.feeds)}")
    rules, settings = rules_of_sizes(broker.plan(name)), broker.rules_of(name)
    joint = Balance("joint", group=settings.balance.group, patience=rules.balance.patience)
    mesh = PlanMesh(**msgspec.structs.asdict(broker.planned_mesh))
    return PlanOptions(
        rules, settings.align or DERIVED, broker.precision, joint, (mesh,), broker.feeds[name].layout, True,
        has_media=rules.has_extra_bytes, dynamic=DynamicCp.of(broker.feeds[name].layout),
    )  # fmt: skip


def base_of_run(run: Served, *, other_mesh: bool) -> PlanOptions:
    """Return the base settings of a run's rules.

    With ``other_mesh``, leave out the run's alignment, joint balance and mesh. Raises UserError for a feed with groups
    of ranks.
    """
    if run.has_groups:
        raise UserError(
            f"{run.what} has `cp: dynamic`, whose settings are in broker.yaml. Pass this file, too, as -c broker.yaml, "
            f"and leave out --stage"
        )
    rules = rules_of_sizes(run.rules)
    marked = rules.batch is not None and rules.batch.samples is None
    options = PlanOptions(
        rules, keep_budget=True, batch_samples=max(round(run.samples / run.steps), 1) if marked else None,
        has_media=run.rules.has_extra_bytes,
    )  # fmt: skip
    if other_mesh:
        return options
    joint = Balance("joint", group=rules.balance.group, patience=rules.balance.patience)
    return replace(options, align=rules.align, joint=joint, meshes=(run.mesh,) if run.mesh else ONE_RANK)


def options_of(args: PlanInputs, base: PlanOptions) -> PlanOptions:
    """Return the settings to forecast. Raises UserError for wrong arguments and for rules without packing."""
    if base.rules.padded:
        raise UserError(
            "The rules have `padded: true`, but plan forecasts packs. Pass only the lengths, or plan a single batch "
            "with streampack.plan_step(mode='padded')."
        )
    if base.dynamic is not None:
        _refuse_grid(args)
    meshes = tuple(map(_mesh, args.meshes)) or base.meshes
    packer, rules = base.rules.new_packer().name, with_packer(base.rules, base.rules.packer)
    rules, step = _with_step(args, rules, base)
    budgets = _numbers(args.budget, "budget") or (rules.budget,)
    windows: tuple[Window, ...] = ("auto",) if args.window == "auto" else _numbers(args.window, "window")
    windows = windows or (rules.window,)
    if len(budgets) == 1:  # half, twice and four times as many tokens
        budgets = (*budgets, *(budget for budget in (budgets[0] // 2, budgets[0] * 2, budgets[0] * 4) if budget))
    if len(windows) == 1:
        windows = tuple(dict.fromkeys((*windows, 256, 1024, 4096)))
    packers = _words(args.packer)
    for name in packers:
        _must_be_known("--packer", name, tuple(PACKERS))
    if len(packers) <= 1:  # all that go together with the rules: only exact_fill keeps limits of media
        allowed = PACKERS if rules.limits is None else ("exact_fill", "joint")
        others = [name for name in allowed if name != "none" and (rules.batch is None or name != "joint")]
        packers = tuple(dict.fromkeys((*(packers or (packer,)), *others)))
    policies = {stream.overlong for stream in rules.streams} - {"error"}
    common = policies.pop() if len(policies) == 1 else None
    overlong = args.overlong if args.overlong is not None else common
    _must_be_known("--overlong", overlong, get_args(Overlong))
    _must_be_known("--precision", args.precision, get_args(Precision))
    return replace(
        base, rules=rules, budgets=budgets, windows=windows, packers=packers, meshes=meshes,
        shapes=tuple(map(_shape, args.shapes)), step=step, overlong=cast("Overlong | None", overlong),
        precision=cast("Precision | None", args.precision) or base.precision,
        keep_budget=base.keep_budget or args.budget is not None, overlong_of_all=args.overlong is not None,
    )  # fmt: skip


def _refuse_grid(args: PlanInputs) -> None:
    """Raise UserError for options whose values only a plan of static context parallelism compares."""
    options = {
        "--budget": args.budget, "--window": args.window, "--packer": args.packer, "--shape": args.shapes,
        "--precision": args.precision, "a second --mesh": args.meshes[1:],
    }  # fmt: skip
    for name, got in options.items():
        if got:
            raise UserError(
                f"Got {name} for a feed with `cp: dynamic`, whose plan compares groups of ranks for the rules and one "
                f"mesh. Leave it out, and change broker.yaml instead."
            )


def _with_step(args: PlanInputs, rules: Rules, base: PlanOptions) -> tuple[Rules, dict[str, Any]]:
    """Return the rules with the requested step, and the setting ``step`` for broker.yaml.

    The second value is empty if a step is a number of packs. Raises UserError if arguments contradict each other, or
    if the number of samples in a batch is not known.
    """
    if args.packs is not None and args.batch is not None:
        raise UserError(
            "Got both --packs and --batch. Pass --packs for steps of packs, or --batch for steps of samples."
        )
    if args.packs is not None:
        return msgspec.structs.replace(rules, packs=args.packs, batch=None), {}
    batch = rules.batch if rules.batch is not None or args.batch is None else Batch(samples=args.batch)
    if batch is None:
        return rules, {}
    if args.window is not None:
        raise UserError("Got --window, but each step is a whole batch and needs no window. Leave --window out.")
    samples = args.batch or batch.samples or base.batch_samples
    if samples is None:
        raise UserError(
            "With `step: {end_of_batch: true}`, the size of a batch is not known. Pass its number of samples with "
            "--batch."
        )
    ends: dict[str, Any] = {"end_of_batch": True} if batch.samples is None else {"samples": samples}
    step = ends | {key: value for key, value in msgspec.to_builtins(batch).items() if key != "samples"}
    return msgspec.structs.replace(rules, batch=msgspec.structs.replace(batch, samples=samples, min_samples=1)), step


def _words(text: str | None) -> tuple[str, ...]:
    """Return the different words of a comma-separated list."""
    return tuple(dict.fromkeys(word.strip() for word in (text or "").split(",") if word.strip()))


def _auto_last(window: Window) -> float:
    """Return a key that sorts windows by size, and the automatic one last."""
    return math.inf if window == "auto" else window


def _numbers(text: str | None, name: str) -> tuple[int, ...]:
    """Return the numbers of a comma-separated list. Raises UserError, which names the option ``name``."""
    words = _words(text)
    if not all(map(_is_size, words)):
        raise UserError(f"--{name} is {text!r}. Pass whole numbers above 0, such as 4096,8192.")
    return tuple(map(int, words))


def _must_be_known(option: str, got: str | None, allowed: tuple[str, ...]) -> None:
    """Raise UserError if the value ``got`` of an option is not None and not one of ``allowed``."""
    if got is not None and got not in allowed:
        raise UserError(f"{option} is {got!r}. Pass one of: {', '.join(allowed)}.")


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
