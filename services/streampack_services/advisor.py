"""``streampack plan``: which budget, window, packer and mesh some lengths ask for, from what each would give.

Around one base setting each axis of the grid is varied alone: budgets (with the packs of a step changed the other way,
so that a step has the same tokens), windows, packers, meshes. Every setting is forecast by the broker's own planning
(``forecast``). What is taken leaves the most of the ranks' time to real tokens; where that makes no difference to speak
of, it is what was given. Where no budget was given, the base is the smallest that is good enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec
import numpy as np

from streampack.alignment import derived_align
from streampack.config import PlannedMesh
from streampack.core.packers import PACKERS
from streampack.core.plan import needed_tokens
from streampack.core.rules import PACKER_KEYS, Align, Balance, Overlong, Rules
from streampack.errors import ConfigError, SampleError, UserError
from streampack_services.arena import SLACK
from streampack_services.forecast import Forecast, Order, forecast, order_of, planned_rules, with_packer
from streampack_services.lengths import Workload

Tree = dict[str, Any]
JOINT = Balance("joint")
SAME = 0.001
"""Shares of the ranks' time that differ by less are the same."""
NEAR_ORDER = ("exact_fill", "joint", "sliding_ffd", "buffer_first_fit", "concatenative")
"""Other packers rearrange whole windows, mostly by length, so that steps differ in what they hold."""
WORTH = 0.005
"""A budget is not good enough if another gains more than this."""
WAITING = 4 / 3
"""Of a broker's memory a quarter is for what waits to be merged."""
CUT = 0.01
"""A budget that cuts off more than this of all tokens is not advised where another does not."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of the grid, on ``axis``; ``step_packs`` over all ranks of ``mesh``."""

    axis: str
    budget: int
    window: int
    packer: str
    step_packs: int
    mesh: PlannedMesh
    align: Align


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What to vary: the first of ``budgets``, ``windows``, ``packers`` and ``meshes`` are the base setting.

    ``rules`` give the rest. ``align`` is None where it follows from the mesh, and so is the group of ``joint``, which
    is a packer here. ``keep_budget``: it was asked for.
    ``overlong`` None: what ``truncate`` would lose is shown; ``overlong_of_all``: it was asked for, whatever ``rules``
    say of each stream.
    """

    rules: Rules
    layout: str
    budgets: tuple[int, ...]
    windows: tuple[int, ...]
    packers: tuple[str, ...]
    meshes: tuple[PlannedMesh, ...]
    align: Align | None = None
    joint: Balance = JOINT
    overlong: Overlong | None = None
    keep_budget: bool = False
    overlong_of_all: bool = False


def default_budgets(budget: int) -> tuple[int, ...]:
    """Around one budget, it first."""
    return (budget, *(each for each in (budget // 2, budget * 2, budget * 4) if each >= 1))


def default_windows(window: int) -> tuple[int, ...]:
    return (window, *(each for each in (256, 1024, 4096) if each != window))


def default_packers(packer: str) -> tuple[str, ...]:
    """All but ``none``, which does not pack, unless it is what the rules say."""
    return (packer, *(each for each in PACKERS if each not in (packer, "none")))


def grid(options: PlanOptions) -> list[Setting]:
    """Every setting, the base first on each axis. Raises ConfigError for a base that cannot be."""
    mesh, base = options.meshes[0], _base_of(options)
    if base.budget % base.align.pack:
        raise ConfigError(
            f"budget: got {base.budget}, expected a multiple of {base.align.pack}, which the mesh asks for: take "
            f"{base.budget // base.align.pack * base.align.pack or base.align.pack}"
        )
    found = [base]
    for budget in sorted(options.budgets):
        fitting = max(budget // base.align.pack, 1) * base.align.pack
        found.append(_setting("budget", options, fitting, base.window, base.packer, mesh))
    found += [_setting("window", options, base.budget, window, base.packer, mesh) for window in sorted(options.windows)]
    found += [_setting("packer", options, base.budget, base.window, packer, mesh) for packer in options.packers]
    for each in options.meshes:
        found += _of_mesh(options, base, each)
    return found


def _base_of(options: PlanOptions) -> Setting:
    return _setting(
        "base", options, options.budgets[0], options.windows[0], options.packers[0], options.meshes[0]
    )  # fmt: skip


def _setting(axis: str, options: PlanOptions, budget: int, window: int, packer: str, mesh: PlannedMesh) -> Setting:
    align = options.align or derived_align(mesh.cp, mesh.tp, options.layout)
    packs = max(round(options.rules.packs * options.budgets[0] / budget / mesh.dp), 1) * mesh.dp
    return Setting(axis, budget, window, packer, packs, mesh, align)


def _of_mesh(options: PlanOptions, base: Setting, mesh: PlannedMesh) -> Iterator[Setting]:
    """A mesh; with tensor parallelism also with samples aligned to what context parallelism needs, and no more."""
    setting = _setting("mesh", options, base.budget, base.window, base.packer, mesh)
    setting = replace(setting, budget=max(base.budget // setting.align.pack, 1) * setting.align.pack)
    yield setting
    if options.align is None and mesh.tp > 1 and options.layout == "zigzag":
        needed = 2 * mesh.cp if mesh.cp > 1 else 1
        yield replace(setting, align=Align(sample=needed, pack=math.lcm(needed, mesh.cp * mesh.tp)))


def advise(workload: Workload, options: PlanOptions, say: Callable[[str], None] = lambda _: None) -> Tree:
    """The forecasts of the grid and what follows: a tree for JSON. ``say`` hears what is being forecast.

    ``settings`` hold each a ``Setting`` and its ``Forecast``, or why it was ``refused``; ``take`` is one more of them,
    ``why`` sentences, ``broker_yaml`` its lines. Raises SampleError for over-long samples that are an error.
    """
    forecaster = _Forecaster(workload, options, say)
    if options.overlong == "error":
        _refuse_overlong(workload, options.budgets[0])
    asked, possible = options.rules.packs, _base_of(options).step_packs
    notes = [f"a step has {possible} packs instead of {asked}: a multiple of dp"] if asked != possible else []
    if not options.keep_budget:
        options = _with_budget(options, forecaster)
    rows = [(setting, forecaster(setting)) for setting in grid(options)]
    base_setting, base = rows[0]
    if isinstance(base, str):
        raise UserError(base)
    take = replace(base_setting, axis="take", packer=_best(rows, "packer"), window=_best(rows, "window"))
    taken = forecaster(take)
    if isinstance(taken, str):
        take, taken = base_setting, base
    found = _about(workload)
    found["notes"] = [*found["notes"], *notes]
    found["settings"] = [_row(setting, result) for setting, result in rows]
    kept = forecaster.rules(take)
    keys = {key: value for key in PACKER_KEYS if (value := getattr(kept, key)) is not None}
    joint = msgspec.to_builtins(options.joint) if take.packer == "joint" else None
    memory = int(needed_tokens(kept, kept.budget + 1) * kept.token_bytes * SLACK * WAITING)
    found["take"] = _row(take, taken) | {"packer_keys": keys, "joint": joint, "memory_bytes": memory}
    return found


class _Forecaster:
    """Forecasts of settings, each made once; a text says why there is none."""

    def __init__(self, workload: Workload, options: PlanOptions, say: Callable[[str], None]) -> None:
        self._workload, self._options, self._say = workload, options, say
        self._orders: dict[int, Order] = {}
        self._made: dict[Setting, Forecast | str] = {}

    def __call__(self, setting: Setting) -> Forecast | str:
        key = replace(setting, axis="")
        if key not in self._made:
            self._say(f"{setting.packer}, budget {setting.budget}, window {setting.window}")
            self._made[key] = self._forecast(setting)
        return self._made[key]

    def rules(self, setting: Setting) -> Rules:
        """Of a setting. Raises ValueError where they contradict each other."""
        options = self._options
        rules = planned_rules(
            options.rules, self._workload, options.overlong or "truncate", all_streams=options.overlong_of_all
        )
        return with_packer(
            rules, setting.packer, options.joint.planned(setting.mesh.dp), budget=setting.budget,
            window=setting.window, packs=setting.step_packs, align=setting.align,
        )  # fmt: skip

    def _forecast(self, setting: Setting) -> Forecast | str:
        try:
            rules = self.rules(setting)
            if setting.budget not in self._orders:
                self._orders[setting.budget] = order_of(self._workload, rules)
            return forecast(self._workload, self._orders[setting.budget], rules, setting.mesh.dp)
        except (UserError, ValueError) as error:
            return str(error)


def _refuse_overlong(workload: Workload, budget: int) -> None:
    for stream in workload.streams:
        for partition, lengths in enumerate(stream.partitions):
            over = lengths > budget
            if over.any():
                at = int(np.argmax(over))
                raise SampleError(
                    f"{workload.what}: sample {partition + at * len(stream.partitions)} of {stream.name}: got "
                    f"{int(lengths[at])} tokens, expected at most {budget}, the budget: take a larger one, or "
                    f"--overlong truncate, split or drop"
                )


Rows = list[tuple[Setting, Forecast | str]]


def _forecast_on(rows: Rows, axis: str) -> list[tuple[Setting, Forecast]]:
    """What was forecast on an axis, in its order."""
    return [(setting, made) for setting, made in rows if setting.axis == axis and not isinstance(made, str)]


def _best(rows: Rows, axis: str) -> Any:
    """What leaves most of the ranks' time to real tokens; the base, if nothing is surely better to speak of."""
    base = getattr(rows[0][0], axis)
    found = [(getattr(setting, axis), made) for setting, made in _forecast_on(rows, axis)]
    found = [(value, made) for value, made in found if axis != "packer" or value in NEAR_ORDER or value == base]
    given = next((made for value, made in found if value == base), None)
    value, best = max(found, key=lambda each: each[1].useful, default=(base, given))
    if given is None or best is None:
        return value
    doubt = 2 * math.hypot(given.useful_error, best.useful_error)
    return value if best.useful > given.useful + SAME + doubt else base


def _with_budget(options: PlanOptions, forecaster: _Forecaster) -> PlanOptions:
    """Another base, where none was asked for: the smallest budget that is good enough, of those that cut off little.

    Good enough: no other leaves ``WORTH`` more of the ranks' time to real tokens. Little: ``CUT`` of the tokens, or as
    little as any does.
    """
    rows = [(setting, forecaster(setting)) for setting in grid(options) if setting.axis == "budget"]
    found = _forecast_on(rows, "budget")
    least = min((made.lost_share for _, made in found), default=0.0)
    found = [(setting, made) for setting, made in found if made.lost_share <= max(least, CUT)]
    best = max((made.useful for _, made in found), default=0.0)
    good = [setting for setting, made in found if made.useful >= best - WORTH]
    if not good:
        return options
    chosen = min(good, key=lambda setting: setting.budget)
    others = (each for each in options.budgets if each != chosen.budget)
    rules = msgspec.structs.replace(options.rules, packs=chosen.step_packs)
    return replace(options, rules=rules, budgets=(chosen.budget, *others))


def _row(setting: Setting, made: Forecast | str) -> Tree:
    tree: Tree = {**asdict(setting), "mesh": msgspec.to_builtins(setting.mesh)}
    tree["align"] = {"sample": setting.align.sample, "pack": setting.align.pack}
    return tree | {"refused": made if isinstance(made, str) else None} | ({} if isinstance(made, str) else asdict(made))


def _about(workload: Workload) -> Tree:
    """What was read, for the head of the answer."""
    lengths = workload.lengths
    p50, p99 = np.percentile(lengths, (50, 99)).astype(int).tolist()
    return {
        "what": workload.what,
        "lengths": {"samples": len(lengths), "tokens": int(lengths.sum()), "mean": float(lengths.mean()), "p50": p50,
                    "p99": p99, "max": int(lengths.max())},
        "whole": workload.whole,
        "rejected": workload.rejected,
        "streams": [
            {"stream": each.name, "samples": each.num_samples, "share": each.share, "pass_samples": each.total}
            for each in workload.streams
        ],
        "notes": workload.notes,
    }  # fmt: skip
