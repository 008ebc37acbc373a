"""``streampack plan``: forecast every setting of the grid, and recommend a budget, window and packer.

Each setting of the grid (``grid``) is forecast by the broker's own planning (``forecast``). The recommended setting
lets the ranks spend most of their time on real tokens; if the difference is small, the base setting is kept. If no
budget was given, the base is the smallest budget that is good enough. Shapes and tight alignment are forecast but not
recommended, because their effect on kernels and compilers is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import msgspec
import numpy as np

from streampack.core.model.capacity import needed_tokens
from streampack.core.model.keys.planning_keys import PACKER_KEYS, MediaLimits
from streampack.core.model.rules import Rules
from streampack.errors import SampleError, UserError
from streampack_services.amounts import media_text
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
from streampack_services.forecast.lengths import Workload, samples_text
from streampack_services.forecast.media_sizes import BYTES, ITEMS, PATCHES, unfit
from streampack_services.plan.grid import PlanOptions, Setting, base_of, fitting, grid

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

    ``settings`` lists each ``Setting`` with its ``Forecast``, or with the reason why it was ``refused``. ``take`` is
    the recommended setting, with its ``rules`` as broker.yaml has them and the ``memory_bytes`` that a broker needs.
    ``say`` is called with the name of each setting that is forecast.

    Raises SampleError for a sample over the budget if the policy is ``error``, UserError for a base without a forecast.
    """
    forecaster = _Forecaster(workload, options, say)
    if options.overlong == "error":
        _refuse_overlong(workload, options.budgets[0], options.rules.limits)
    notes = _steps_notes(options, workload)
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
    memory = int(_held_tokens(kept, workload) * _token_bytes(kept, workload) * SLACK * WAITING)
    found["take"] = _row(take, taken) | {"rules": _keys(options, take, kept), "memory_bytes": memory}
    found["precision"] = options.precision
    return found


def _steps_notes(options: PlanOptions, workload: Workload) -> list[str]:
    """Return sentences on how the steps of the forecast differ from the requested ones."""
    asked, base, notes = options.rules.packs, base_of(options), list[str]()
    if options.step.get("end_of_batch"):
        notes.append(
            f"the forecast assumes batches of {base.step_samples:,} samples; in a run, marks in the streams end the "
            f"batches"
        )
    if base.step_packs not in (asked, None):
        notes.append(
            f"a step has {base.step_packs} packs instead of {asked}, because the packs of a step must be a multiple of "
            f"dp"
        )
    if (held := len(workload.lengths)) < (base.step_samples or 0):
        notes.append(f"the lengths do not fill a batch, so the figures are for a batch of {samples_text(held)}")
    return notes


def _held_tokens(rules: Rules, workload: Workload) -> int:
    """Return the tokens that a broker must hold; if steps are batches, at least three batches of the mean size."""
    needed = needed_tokens(rules, rules.budget + 1)
    if rules.batch is None or rules.batch.samples is None:
        return needed
    return max(needed, int(3 * rules.batch.samples * np.minimum(workload.lengths, rules.budget).mean()))


def _token_bytes(rules: Rules, workload: Workload) -> float:
    """Return the mean bytes of a token with its fields, and with the media of its sample."""
    media, tokens = workload.media, int(workload.lengths.sum())
    return rules.token_bytes + (0.0 if media is None else int(media[:, BYTES].sum()) / max(tokens, 1))


def _keys(options: PlanOptions, take: Setting, rules: Rules) -> Tree:
    """Return a setting's ``rules`` as written in broker.yaml, without defaults, derived keys and sample policies."""
    tree: Tree = {"packer": rules.packer, "budget": rules.budget}
    tree |= {} if options.batched else {"window": {"samples": rules.window}}
    tree |= {key: value for key in PACKER_KEYS if (value := getattr(rules, key)) is not None}
    if rules.limits is not None:
        tree["limits"] = {key: value for key, value in msgspec.to_builtins(rules.limits).items() if value is not None}
    tree["step"] = options.step if options.batched else {"packs": take.step_packs}
    balance = msgspec.to_builtins(rules.balance)
    if take.packer == "joint":
        balance["group"] = options.joint.group  # None: follows from the mesh
    given = {
        "balance": balance, "shape": rules.shape, "warmup": options.rules.warmup, "align": options.align,
        "tail": rules.tail,
    }  # fmt: skip
    default: Tree = {"balance": {}, "shape": "fixed", "warmup": None, "align": {"lcm": 1}, "tail": "pad"}
    for key, value in given.items():
        plain = msgspec.to_builtins(value)
        plain = {k: v for k, v in plain.items() if v is not None} if isinstance(plain, dict) else plain
        tree |= {key: plain} if plain and plain != default[key] else {}
    return tree


class _Forecaster:
    """A cache of forecasts: call it with a setting to get its forecast, or the reason as text if there is none."""

    def __init__(self, workload: Workload, options: PlanOptions, say: Callable[[str], None]) -> None:
        self._workload, self._options, self._say = workload, options, say
        self._orders: dict[int, Order] = {}
        self._formed: dict[Rules, FormedSteps] = {}
        self._made: dict[Setting, Forecast | str] = {}

    def __call__(self, setting: Setting) -> Forecast | str:
        key = replace(setting, axis="")
        if key not in self._made:
            self._say(f"{setting.packer}, budget {setting.budget}, window {setting.window}")
            self._made[key] = self._forecast(setting)
        return self._made[key]

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
        mesh = setting.mesh
        try:
            rules = self.rules(setting)
            if setting.budget not in self._orders:
                self._orders[setting.budget] = order_of(self._workload, rules)
            order = self._orders[setting.budget]
            return forecast(self._workload, order, rules, mesh.dp, mesh.pp, self._steps(order, rules))
        except (UserError, ValueError) as error:
            return str(error)

    def _steps(self, order: Order, rules: Rules) -> FormedSteps:
        """Return the steps that FORM makes of the samples in an order, cached: all shapes share the same steps."""
        formed = msgspec.structs.replace(rules, shape="fixed")
        if formed not in self._formed:
            self._formed[formed] = steps_of(order, formed)
        return self._formed[formed]


def _refuse_overlong(workload: Workload, budget: int, limits: MediaLimits | None) -> None:
    """Raise SampleError if a sample has more tokens than ``budget``, or media over the ``limits`` of a pack."""
    for stream in workload.streams:
        for partition, lengths in enumerate(stream.partitions):
            sizes = stream.media[partition] if stream.media is not None and limits is not None else None
            if sizes is not None and limits is not None and (wrong := unfit(lengths, sizes, limits)).any():
                at = int(np.argmax(wrong))
                raise SampleError(
                    f"{workload.what}: got {media_text(int(sizes[at, ITEMS]), int(sizes[at, PATCHES]))} in sample "
                    f"{partition + at * len(stream.partitions)} of stream {stream.name}, expected at most the limits "
                    f"of a pack. Raise `limits` in broker.yaml, or pass --overlong drop."
                )
            over = lengths > budget
            if over.any():
                at = int(np.argmax(over))
                raise SampleError(
                    f"{workload.what}: got {int(lengths[at])} tokens in sample "
                    f"{partition + at * len(stream.partitions)} of "
                    f"stream {stream.name}, expected at most the budget of {budget} tokens. Pass a larger --budget, or "
                    f"--overlong truncate, split or drop."
                )


SettingForecasts = list[tuple[Setting, Forecast | str]]


def _forecast_on(rows: SettingForecasts, axis: str) -> list[tuple[Setting, Forecast]]:
    """Return the settings on an axis that have a forecast, in the order of the axis."""
    return [(setting, made) for setting, made in rows if setting.axis == axis and not isinstance(made, str)]


def _best(rows: SettingForecasts, axis: str) -> Any:
    """Return the value of ``axis`` that spends most of the ranks' time on real tokens.

    Return the base value, which comes first in ``rows``, if no other is clearly better.

    Any packer may be advised inside a batch, where the order of samples does not change the update. Otherwise only
    the base packer and those of ``NEAR_ORDER`` may.
    """
    base, batched = getattr(rows[0][0], axis), rows[0][0].step_samples is not None
    found = [(getattr(setting, axis), made) for setting, made in _forecast_on(rows, axis)]
    found = found if batched or axis != "packer" else [each for each in found if each[0] in (*NEAR_ORDER, base)]
    given = next((made for value, made in found if value == base), None)
    value, best = max(found, key=lambda each: each[1].useful, default=(base, given))
    if given is None or best is None:
        return value
    doubt = 2 * math.hypot(given.useful_error, best.useful_error)
    return value if best.useful > given.useful + SAME + doubt else base


def _with_budget(options: PlanOptions, forecaster: _Forecaster) -> PlanOptions:
    """Return the options with the smallest good budget as the base, for plans without a requested budget.

    A good budget loses at most the share ``CUT`` of all tokens, or the smallest share of any budget. Among the budgets
    that meet this limit, its share of useful time is within ``WORTH`` of the highest.
    """
    align = options.align_of(options.meshes[0])
    options = replace(options, budgets=tuple(dict.fromkeys(fitting(each, align) for each in options.budgets)))
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
    rules = msgspec.structs.replace(options.rules, packs=chosen.step_packs or options.rules.packs)
    return replace(options, rules=rules, budgets=(chosen.budget, *others))


def _row(setting: Setting, made: Forecast | str) -> Tree:
    """Return a setting with its forecast, or the reason for none under ``refused``, as a tree for JSON."""
    tree: Tree = {**asdict(setting), **{key: msgspec.to_builtins(getattr(setting, key)) for key in ("mesh", "shape")}}
    tree["align"] = {"sample": setting.align.sample, "pack": setting.align.pack}
    return tree | {"refused": made if isinstance(made, str) else None} | ({} if isinstance(made, str) else asdict(made))


def _about(workload: Workload) -> Tree:
    """Return counts and percentiles of the lengths and media that were read, as a tree for JSON."""
    lengths = workload.lengths
    p50, p99 = np.percentile(lengths, (50, 99)).astype(int).tolist()
    return {
        "what": workload.what,
        "lengths": {"samples": len(lengths), "tokens": int(lengths.sum()), "mean": float(lengths.mean()), "p50": p50,
                    "p99": p99, "max": int(lengths.max())},
        "media": _media_tree(workload),
        "whole": workload.whole,
        "rejected": workload.rejected,
        "streams": [
            {"stream": each.name, "samples": each.num_samples, "share": each.share, "pass_samples": each.total}
            for each in workload.streams
        ],
        "notes": workload.notes,
    }  # fmt: skip


def _media_tree(workload: Workload) -> Tree | None:
    """Return counts of the media of the samples that were read, and percentiles of patches; None without media.

    The percentiles are those of samples with media.
    """
    media = workload.media
    if media is None:
        return None
    some = media[media[:, ITEMS] > 0]
    patches = some[:, PATCHES] if len(some) else np.zeros(1, np.int64)
    p50, p99 = np.percentile(patches, (50, 99)).astype(int).tolist()
    return {
        "samples": len(some), "items": int(some[:, ITEMS].sum()), "bytes": int(some[:, BYTES].sum()),
        "patches": {"total": int(patches.sum()), "mean": float(patches.mean()), "p50": p50, "p99": p99,
                    "max": int(patches.max())},
    }  # fmt: skip
