"""``streampack plan``: forecast every setting of the grid, and recommend a budget, window and packer.

Each setting of ``plan_options.grid`` is forecast by the broker's own planning (``forecast``). The recommended setting
lets the ranks spend most of their time on real tokens; if the difference is small, the base setting is kept. If no
budget was given, the base is the smallest budget that is good enough. Shapes and tight alignment are forecast but not
recommended, because their effect on kernels and compilers is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from streampack.core.model.capacity import needed_tokens
from streampack.core.model.keys.planning_keys import PACKER_KEYS, MediaLimits
from streampack.core.model.rules import Rules
from streampack.errors import SampleError, UserError
from streampack_services.amounts import counted, media_text
from streampack_services.broker.arena import SLACK
from streampack_services.forecast.forecast import (
    Forecast,
    FormedSteps,
    Order,
    forecast,
    order_of,
    planned_rules,
    steps_of,
    with_packer,
)
from streampack_services.forecast.lengths import Workload
from streampack_services.forecast.media_sizes import BYTES, ITEMS, PATCHES, unfit
from streampack_services.plan.plan_options import PlanOptions, Setting, fitting, grid

Tree = dict[str, Any]
SAME = 0.001
"""Shares of the ranks' time that differ by less than this count as the same."""
NEAR_ORDER = ("exact_fill", "joint", "sliding_ffd", "buffer_first_fit", "concatenative")
"""Packers that keep samples near their order. Others sort windows by length, so that steps differ in their mix."""
WORTH = 0.005
"""A budget is not good enough if another one gains more than this share of the ranks' time."""
WAITING = 4 / 3
"""Factor on a broker's memory: a quarter of it is for samples that wait for the merge."""
CUT = 0.01
"""A budget that cuts off more than this share of all tokens is recommended only if all others do, too."""


def advise(workload: Workload, options: PlanOptions, say: Callable[[str], None] = lambda _: None) -> Tree:
    """Forecast every setting of the grid and choose one; return a tree for JSON.

    ``settings`` has a row for each ``Setting`` with its ``Forecast``, or with the reason why it was ``refused``.
    ``take`` is the row of the recommended setting, with its ``rules`` as broker.yaml has them and the ``memory_bytes``
    that a broker needs. ``say`` is called with the name of each setting that is forecast.

    Raises SampleError for a sample over the budget if the policy is ``error``, UserError for a base without a forecast.
    """
    forecaster = _Forecaster(workload, options, say)
    if options.overlong == "error":
        refuse_overlong(workload, options.budgets[0], options.rules.limits)
    notes = _steps_notes(options, workload)
    if not options.keep_budget:
        options = _with_budget(options, forecaster)
    settings = grid(options)
    rows = [forecaster(setting) for setting in settings]
    if rows[0]["refused"]:
        raise UserError(rows[0]["refused"])
    best = replace(settings[0], axis="take", packer=_best(rows, "packer"), window=_best(rows, "window"))
    take = best if not forecaster(best)["refused"] else settings[0]
    rules = forecaster.rules(take)
    memory = int(_needed_tokens(rules, workload) * _token_bytes(rules, workload) * SLACK * WAITING)
    advised = forecaster(take) | {"rules": _rules_tree(options, take, rules), "memory_bytes": memory}
    about = workload.about()
    about["notes"] = [*about["notes"], *notes]
    return about | {
        "settings": rows, "take": advised, "precision": options.precision, "configured": options.keep_budget,
    }  # fmt: skip


def _steps_notes(options: PlanOptions, workload: Workload) -> list[str]:
    """Return sentences on how the steps of the forecast differ from the requested ones."""
    base, notes = options.setting(), list[str]()
    if options.step.get("end_of_batch"):
        notes.append(
            f"the forecast assumes batches of {base.step_samples:,} samples; in a run, marks in the streams end the "
            f"batches"
        )
    if base.step_packs not in (options.rules.packs, None):
        notes.append(
            f"a step has {base.step_packs} packs instead of {options.rules.packs}, because the packs of a step must be "
            f"a multiple of dp"
        )
    if (count := len(workload.lengths)) < (base.step_samples or 0):
        notes.append(f"the lengths do not fill a batch, so the figures are for a batch of {counted(count, 'sample')}")
    return notes


def _needed_tokens(rules: Rules, workload: Workload) -> int:
    """Return the tokens that a broker must hold; if steps are batches, at least three batches of the mean size."""
    needed = needed_tokens(rules, rules.budget + 1)
    if rules.batch is None or rules.batch.samples is None:
        return needed
    return max(needed, int(3 * rules.batch.samples * np.minimum(workload.lengths, rules.budget).mean()))


def _token_bytes(rules: Rules, workload: Workload) -> float:
    """Return the mean bytes of a token with its fields, and with the media of its sample."""
    media, tokens = workload.media, int(workload.lengths.sum())
    return rules.token_bytes + (0.0 if media is None else int(media[:, BYTES].sum()) / max(tokens, 1))


def _rules_tree(options: PlanOptions, take: Setting, rules: Rules) -> Tree:
    """Return a setting's ``rules`` as written in broker.yaml, without defaults, derived keys and sample policies."""
    balance = msgspec.to_builtins(rules.balance)
    if take.packer == "joint":
        balance["group"] = options.joint.group  # None: follows from the mesh
    batched = rules.batch is not None
    window = None if batched or rules.window == "auto" else {"samples": rules.window}
    values = {
        "packer": rules.packer, "budget": rules.budget, "window": window,
        **{key: getattr(rules, key) for key in PACKER_KEYS}, "limits": rules.limits,
        "step": options.step if batched else {"packs": take.step_packs}, "balance": balance, "shape": rules.shape,
        "warmup": options.rules.warmup, "align": options.align, "tail": rules.tail,
    }  # fmt: skip
    defaults = {"shape": "fixed", "align": {"lcm": 1}, "tail": "pad"}
    settings: Tree = {}
    for key, value in values.items():
        plain = msgspec.to_builtins(value)
        plain = {k: v for k, v in plain.items() if v is not None} if isinstance(plain, dict) else plain
        if plain not in (None, {}, defaults.get(key)):
            settings[key] = plain
    return settings


class _Forecaster:
    """A cache of forecasts: call it with a setting to get its row, with its forecast or the reason for none."""

    def __init__(self, workload: Workload, options: PlanOptions, say: Callable[[str], None]) -> None:
        self._workload, self._options, self._say = workload, options, say
        self._orders: dict[int, Order] = {}
        self._formed: dict[Rules, FormedSteps] = {}
        self._forecasts: dict[Setting, Forecast | str] = {}

    def __call__(self, setting: Setting) -> Tree:
        key = replace(setting, axis="")
        if key not in self._forecasts:
            self._say(f"{setting.packer}, budget {setting.budget}, window {setting.window}")
            self._forecasts[key] = self._forecast(setting)
        result = self._forecasts[key]
        values: Tree = msgspec.to_builtins(setting)
        values["align"] = {"sample": setting.align.sample, "pack": setting.align.pack}
        if isinstance(result, str):
            return {**values, "refused": result}
        return {**values, "refused": None, **msgspec.to_builtins(result)}

    def rules(self, setting: Setting) -> Rules:
        """Return the rules of a setting. Raises ValueError if they contradict each other."""
        options = self._options
        rules = planned_rules(
            options.rules, self._workload, options.overlong or "truncate", all_streams=options.overlong_of_all
        )
        if (warmup := rules.warmup) is not None and warmup.init > setting.budget:
            rules = msgspec.structs.replace(rules, warmup=msgspec.structs.replace(warmup, init=setting.budget))
        return with_packer(
            rules, setting.packer, options.joint.planned(setting.mesh.dp), budget=setting.budget,
            window=setting.window, packs=setting.step_packs or rules.packs, align=setting.align, shape=setting.shape,
        )  # fmt: skip

    def _forecast(self, setting: Setting) -> Forecast | str:
        """Forecast a setting; return the reason as text if its rules contradict each other or the mesh."""
        try:
            rules = self.rules(setting)
            if setting.budget not in self._orders:
                self._orders[setting.budget] = order_of(self._workload, rules)
            order = self._orders[setting.budget]
            fixed = msgspec.structs.replace(rules, shape="fixed")  # all shapes share the same steps
            if fixed not in self._formed:
                self._formed[fixed] = steps_of(order, fixed)
            return forecast(self._workload, order, rules, setting.mesh.dp, setting.mesh.pp, self._formed[fixed])
        except (UserError, ValueError) as error:
            return str(error)


def refuse_overlong(workload: Workload, budget: int, limits: MediaLimits | None) -> None:
    """Raise SampleError if a sample has more tokens than ``budget``, or media over the ``limits`` of a pack."""
    for stream in workload.streams:
        for partition, lengths in enumerate(stream.partitions):
            sizes = stream.media[partition] if stream.media is not None and limits is not None else None
            if sizes is not None and limits is not None and (wrong := unfit(lengths, sizes, limits)).any():
                at = int(np.argmax(wrong))
                media = media_text(int(sizes[at, ITEMS]), int(sizes[at, PATCHES]))
                limit, remedy = "the limits of a pack", "Raise `limits` in broker.yaml, or pass --overlong drop."
            elif (over := lengths > budget).any():
                at = int(np.argmax(over))
                media, limit = f"{int(lengths[at])} tokens", f"the budget of {budget} tokens"
                remedy = "Pass a larger --budget, or --overlong truncate, split or drop."
            else:
                continue
            raise SampleError(
                f"{workload.what}: got {media} in sample {partition + at * len(stream.partitions)} of stream "
                f"{stream.name}, expected at most {limit}. {remedy}"
            )


def _best(rows: list[Tree], axis: str) -> Any:
    """Return the value of ``axis`` that spends most of the ranks' time on real tokens.

    Return the base value, which comes first in ``rows``, if no other is clearly better.

    Any packer may be advised inside a batch, where the order of samples does not change the update. Otherwise only
    the base packer and those of ``NEAR_ORDER`` may.
    """
    base = rows[0]
    rows = [row for row in rows if row["axis"] == axis and not row["refused"]]
    if axis == "packer" and base["step_samples"] is None:
        rows = [row for row in rows if row["packer"] in (*NEAR_ORDER, base["packer"])]
    own = next((row for row in rows if row[axis] == base[axis]), None)
    best = max(rows, key=lambda row: row["useful"], default=base)
    if own is None:
        return best[axis]
    doubt = 2 * math.hypot(own["useful_error"], best["useful_error"])
    return best[axis] if best["useful"] > own["useful"] + SAME + doubt else base[axis]


def _with_budget(options: PlanOptions, forecaster: _Forecaster) -> PlanOptions:
    """Return the options with the smallest good budget as the base, for plans without a requested budget.

    A good budget loses at most the share ``CUT`` of all tokens, or the smallest share of any budget. Among the budgets
    that meet this limit, its share of useful time is within ``WORTH`` of the highest.
    """
    align = options.align_of(options.meshes[0])
    options = replace(options, budgets=tuple(dict.fromkeys(fitting(budget, align) for budget in options.budgets)))
    rows = [forecaster(setting) for setting in grid(options) if setting.axis == "budget"]
    rows = [row for row in rows if not row["refused"]]
    least = min((row["lost_share"] for row in rows), default=0.0)
    rows = [row for row in rows if row["lost_share"] <= max(least, CUT)]
    best = max((row["useful"] for row in rows), default=0.0)
    good = [row for row in rows if row["useful"] >= best - WORTH]
    if not good:
        return options
    kept = [row for row in good if options.keeps_good_budget and row["budget"] == options.budgets[0]]
    chosen = min(kept or good, key=lambda row: row["budget"])
    budgets = tuple(dict.fromkeys((chosen["budget"], *options.budgets)))
    rules = msgspec.structs.replace(options.rules, packs=chosen["step_packs"] or options.rules.packs)
    return replace(options, rules=rules, budgets=budgets)
