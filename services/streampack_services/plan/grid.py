"""The settings that ``streampack plan`` compares: a base setting, and variations of one axis at a time.

The axes are budget, window, packer, shape of packs and mesh. A larger budget has fewer packs per step, so that a step
keeps its tokens; batches stay as they are. Alignment follows from the mesh, as in a broker.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from streampack.config.alignment import AlignSettings, Precision, derived_align
from streampack.core.model.keys.planning_keys import Balance
from streampack.core.model.keys.stream_keys import Overlong
from streampack.core.model.rules import Align, Rules
from streampack.core.model.shapes import Shape, Sizes
from streampack.core.packers import PACKERS
from streampack.errors import ConfigError
from streampack_services.forecast.rank_loads import PlanMesh

JOINT = Balance("joint")
DERIVED = AlignSettings()
"""Derive all alignment from the mesh."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of the grid, and the ``axis`` that it varies.

    A step has ``step_packs`` packs over all ranks, or is a batch of ``step_samples`` samples; the other is None.
    """

    axis: str
    budget: int
    window: int
    packer: str
    shape: Shape
    step_packs: int | None
    step_samples: int | None
    mesh: PlanMesh
    align: Align


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The values to compare on each axis; the first of each is the base setting's.

    ``rules``: all other settings. ``step``: the step as broker.yaml has it, if steps are batches.
    ``align``: fixed multiples of tokens, or settings from which a mesh's multiples are derived.
    ``joint``: balance settings of the packer ``joint``; without a group, the group is derived from the mesh.
    ``keep_budget``: the user asked for the first budget.
    ``overlong``: policy for samples over the budget; None forecasts ``truncate`` to show its loss.
    ``overlong_of_all``: the policy holds for all streams, in place of their own.
    """

    rules: Rules
    layout: str
    budgets: tuple[int, ...]
    windows: tuple[int, ...]
    packers: tuple[str, ...]
    meshes: tuple[PlanMesh, ...]
    shapes: tuple[Shape, ...] = ()
    step: dict[str, Any] = field(default_factory=dict)
    align: Align | AlignSettings = DERIVED
    precision: Precision | None = None
    joint: Balance = JOINT
    overlong: Overlong | None = None
    keep_budget: bool = False
    overlong_of_all: bool = False

    @property
    def batched(self) -> bool:
        """True if steps are batches of samples, False if steps are numbers of packs."""
        return self.rules.batch is not None

    def align_of(self, mesh: PlanMesh) -> Align:
        """Return the multiples of tokens that samples and packs are padded to on a mesh."""
        if isinstance(self.align, Align):
            return self.align
        return derived_align(mesh.cp, mesh.tp, self.layout, self.precision, self.align)


def default_budgets(budget: int) -> tuple[int, ...]:
    """Return a budget, then half, twice and four times of it."""
    return (budget, *(each for each in (budget // 2, budget * 2, budget * 4) if each >= 1))


def default_windows(window: int) -> tuple[int, ...]:
    """Return ``window``, then those of 256, 1024 and 4096 samples that differ from it."""
    return (window, *(each for each in (256, 1024, 4096) if each != window))


def default_packers(packer: str, rules: Rules) -> tuple[str, ...]:
    """Return ``packer``, then all others that go together with ``rules``, except ``none``.

    Batches exclude ``joint``. Only ``exact_fill`` keeps limits of media, also with the balance ``joint``.
    """
    without = ("none", "joint") if rules.batch is not None else ("none",)
    known = PACKERS if rules.limits is None else ("exact_fill", "joint")
    return (packer, *(each for each in known if each not in (packer, *without)))


def default_shapes(shape: Shape, budget: int, align: int) -> tuple[Shape, ...]:
    """Return ``shape``, then fixed, exact, multiples of about a 16th of the budget, and buckets of quarters of it."""
    found: list[Shape] = ["fixed", "exact"]
    parts = [budget // n for n in (16, 8, 4, 2) if not budget % n and not budget // n % align]
    found += [Sizes(multiple=part) for part in parts[:1]]
    quarters = sorted({-(-budget * n // 4 // align) * align for n in (1, 2, 3)} - {budget})
    found += [Sizes(buckets=tuple(quarters))] if quarters else []
    return (shape, *(each for each in found if each != shape))


def fitting(budget: int, align: Align) -> int:
    """Return the largest multiple of ``align.pack`` up to ``budget``, at least ``align.pack`` itself."""
    return max(budget // align.pack, 1) * align.pack


def base_of(options: PlanOptions) -> Setting:
    """Return the base setting: the first value of each axis."""
    return _setting("base", options, options.budgets[0], options.windows[0], options.packers[0], options.meshes[0])


def grid(options: PlanOptions) -> list[Setting]:
    """Return the base setting, then the settings of each axis.

    Raises ConfigError if the base budget is not a multiple of the pack alignment.
    """
    mesh, base = options.meshes[0], base_of(options)
    if base.budget % base.align.pack:
        raise ConfigError(
            f"budget: got {base.budget}, expected a multiple of {base.align.pack} because of the mesh and precision. "
            f"Use {fitting(base.budget, base.align)}."
        )
    budgets = (fitting(budget, base.align) for budget in sorted(options.budgets))
    found = [base, *(_setting("budget", options, budget, base.window, base.packer, mesh) for budget in budgets)]
    if not options.batched:
        found += [
            _setting("window", options, base.budget, window, base.packer, mesh) for window in sorted(options.windows)
        ]
    found += [_setting("packer", options, base.budget, base.window, packer, mesh) for packer in options.packers]
    shapes = options.shapes if len(options.shapes) > 1 else default_shapes(base.shape, base.budget, base.align.pack)
    found += [replace(base, axis="shape", shape=shape) for shape in shapes]
    for each in options.meshes:
        found += _of_mesh(options, base, each)
    return found


def _setting(axis: str, options: PlanOptions, budget: int, window: int, packer: str, mesh: PlanMesh) -> Setting:
    """Return a setting with the base shape, and about as many tokens per step as the base setting."""
    rules, batch = options.rules, options.rules.batch
    packs = max(round(rules.packs * options.budgets[0] / budget / mesh.dp), 1) * mesh.dp if batch is None else None
    samples, shape = batch.samples if batch is not None else None, options.shapes[0] if options.shapes else rules.shape
    return Setting(axis, budget, window, packer, shape, packs, samples, mesh, options.align_of(mesh))


def _of_mesh(options: PlanOptions, base: Setting, mesh: PlanMesh) -> Iterator[Setting]:
    """Yield the base setting on a mesh; with tensor parallelism also with the tight sample alignment, if it differs."""
    setting = _setting("mesh", options, base.budget, base.window, base.packer, mesh)
    yield replace(setting, budget=fitting(base.budget, setting.align))
    given = options.align
    if isinstance(given, AlignSettings) and given.sample is None and mesh.tp > 1:
        align = replace(options, align=msgspec.structs.replace(given, sample="tight")).align_of(mesh)
        if align.sample < setting.align.sample:
            yield replace(setting, align=align, budget=fitting(base.budget, align))
