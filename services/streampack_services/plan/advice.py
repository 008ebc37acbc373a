"""Explain the advice of ``advisor.advise`` in sentences, and write the lines for broker.yaml."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from streampack.config.daemon_settings import MEMORY
from streampack.config.typed_yaml import parse_size
from streampack.core.model.keys.planning_keys import Window
from streampack_services.amounts import counted
from streampack_services.plan.advisor import NEAR_ORDER

Tree = dict[str, Any]
UNEVEN = 1.05
"""A load imbalance (max / mean cost) below this counts as balanced."""
COMPARED = 3
"""Number of other packers to name beside the recommended one."""
MOST = 0.5
"""An axis fills most packs if it is the fullest in more than this share of the packs."""
SAID = 0.001
"""Shares below this are not mentioned."""


def why(plan: Tree, overlong: str | None) -> list[str]:
    """Return the reasons for the advice as sentences, the most important first.

    ``plan`` is the result of ``advisor.advise``; ``overlong`` is the policy that the user asked for, or None.
    """
    parts = (
        _next_best,
        _packer,
        _window,
        _budget,
        lost_samples,
        _media,
        _alignment,
        _shape,
        _batches,
        _balance,
        _meshes,
        _steps,
    )
    values = plan | {"overlong": overlong}
    return [sentence for part in parts for sentence in part(values, plan["take"])]


def broker_yaml(plan: Tree, overlong: str | None) -> str:
    """Return the lines of broker.yaml that configure the advised setting."""
    take = plan["take"]
    rules = dict(take["rules"])
    if overlong is not None and overlong != "error":
        rules["overlong"] = overlong
    elif take["overlong"]:
        rules["overlong"] = "truncate"
    if plan["rejected"]:
        rules["poison"] = "drop"
    mesh = {name: size for name, size in take["mesh"].items() if size > 1 and name != "pp"}
    settings = {"rules": rules, "planned_mesh": mesh, "precision": plan["precision"]}
    if take["memory_bytes"] > parse_size(MEMORY, "memory"):
        settings["memory"] = f"{-(-take['memory_bytes'] // 2**30)}GiB"
    return "\n".join(f"{key}: {flow_yaml(value)}" for key, value in settings.items() if value)


def flow_yaml(value: Any) -> str:
    """Return a value as one line of YAML in flow style."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1 << 20)
    return str(text).removesuffix("...\n").strip()


# How values are named, here and in tables and charts


def shape_text(shape: Any) -> str:
    """Return a shape as text: ``exact``, ``multiple 512`` or ``buckets 2048 4096``."""
    if isinstance(shape, str):
        return shape
    if shape.get("multiple"):
        return f"multiple {shape['multiple']}"
    return f"buckets {' '.join(map(str, shape['buckets']))}"


def mesh_text(mesh: Tree) -> str:
    """Return a mesh as text: ``dp=4 cp=2``."""
    return " ".join(f"{name}={size}" for name, size in mesh.items() if size > 1 or name == "dp")


def window_text(window: Window) -> str:
    """Return a window as text: ``1,024`` or ``auto``."""
    return window if window == "auto" else f"{window:,}"


def setting_name(row: Tree) -> str:
    """Return the value that a setting has on its axis, as text: ``window 256``."""
    axis, align = row["axis"], row["align"]["sample"]
    names: dict[str, Callable[[], str]] = {
        "shape": lambda: shape_text(row["shape"]),
        "mesh": lambda: mesh_text(row["mesh"]) + (f", align {align}" if align > 1 else ""),
        "packer": lambda: str(row["packer"]),
        "window": lambda: f"window {window_text(row['window'])}",
    }
    return names[axis]() if axis in names else f"{axis} {row[axis]:,}"


def is_taken(row: Tree, take: Tree) -> bool:
    """Return whether a setting has the recommended value on its axis."""
    return bool(row[row["axis"]] == take[row["axis"]] and row["align"] == take["align"])


def forecast_rows(plan: Tree, axis: str | None = None) -> list[Tree]:
    """Return the rows with a forecast, but the base; with ``axis``, only its rows."""
    rows = [row for row in plan["settings"] if row["axis"] != "base" and not row["refused"]]
    return rows if axis is None else [row for row in rows if row["axis"] == axis]


def _on_axis(plan: Tree, axis: str) -> tuple[Tree | None, list[Tree]]:
    """Return the row with the advised value on ``axis``, None if it has no forecast, and the rows with others."""
    rows, taken = forecast_rows(plan, axis), plan["take"][axis]
    return next((row for row in rows if row[axis] == taken), None), [row for row in rows if row[axis] != taken]


# The sentences, by subject; each function yields those of its subject


def _next_best(plan: Tree, take: Tree) -> Iterator[str]:
    """Say what single changes of budget, window and packer would gain against the base settings, best first."""
    base = plan["settings"][0]
    batched = bool(base["step_samples"])
    rows = [row for axis in ("budget", "window", "packer") for row in forecast_rows(plan, axis)]
    gains = [
        (row["useful"] - base["useful"], row) for row in rows
        if row["lost_share"] <= base["lost_share"] + SAID
        and row["useful"] - base["useful"] > max(SAID, _doubt(row, base))
        and (row["axis"] != "packer" or batched or row["packer"] in NEAR_ORDER)
    ]  # fmt: skip
    window = "" if batched else f", window {window_text(base['window'])}"
    settings = f"budget {base['budget']:,}{window}, {base['packer']}: {base['useful']:.2%} useful"
    against = f"{'your' if plan['configured'] else 'the base'} settings ({settings})"
    if not gains:
        yield f"Next best: no other budget, window or packer gains more than the forecast's error over {against}."
        return
    best_first = sorted(gains, key=lambda pair: -pair[0])[:COMPARED]
    changes = ", ".join(f"{setting_name(row)} gains {points:.2%}" for points, row in best_first)
    yield f"Next best, compared with {against}: {changes} of the ranks' time."


def _packer(plan: Tree, take: Tree) -> Iterator[str]:
    """Compare the advised packer with the best others, and name better packers that are not advised."""
    own, others = _on_axis(plan, "packer")
    useful = (own or take)["useful"]
    others.sort(key=lambda row: -row["useful"])
    work = "real tokens and media" if plan["media"] else "real tokens"
    compared = ", ".join(f"{row['packer']} {row['useful']:.2%}" for row in others[:COMPARED])
    others_text = f" Other packers: {compared}." if compared else ""
    yield f"With {take['packer']}, the ranks spend {useful:.2%} of their time on {work}.{others_text}"
    better = [row["packer"] for row in others if row["useful"] > useful + SAID]
    sorting = ", ".join(name for name in better if name not in NEAR_ORDER)
    if sorting and not take["step_samples"]:
        yield (
            f"Packers with better figures that are not recommended: {sorting}. These packers sort whole windows by "
            f"length, so the mix of samples differs between steps."
        )


def _window(plan: Tree, take: Tree) -> Iterator[str]:
    """Compare the sizes of the window."""
    base, others = _on_axis(plan, "window")
    if base and others:
        compared = ", ".join(
            f"{window_text(row['window'])} {_compared(row, base)} "
            f"(displaced {counted(row['displacement_p99'], 'step')})"
            for row in others
        )
        own = "the automatic window" if take["window"] == "auto" else f"a window of {take['window']:,} samples"
        own += f" (displaced {counted(base['displacement_p99'], 'step')})"
        yield f"Compared with {own}: {compared}. A larger window moves samples further from their turn."


def _budget(plan: Tree, take: Tree) -> Iterator[str]:
    """Compare the budgets."""
    base, others = _on_axis(plan, "budget")
    if base and others:
        compared = []
        for row in others:
            cuts = row["lost_share"] > base["lost_share"] + SAID
            cut = f" and cuts off {row['lost_share']:.2%} of the tokens" if cuts else ""
            compared.append(f"{row['budget']} {_compared(row, base)}{cut}")
        against = f"Compared with a budget of {take['budget']} tokens"
        yield f"{against}: {', '.join(compared)}. The activations of a pack must fit on a GPU."


def _compared(row: Tree, base: Tree) -> str:
    """Return in words how much better ``row`` is than ``base``, without differences within the error of forecasts."""
    points = row["useful"] - base["useful"]
    return _change(points) if abs(points) > _doubt(row, base) else "is about as good"


def _doubt(row: Tree, base: Tree) -> float:
    """Return the error of the difference between the useful time of two forecasts."""
    return 2 * math.hypot(row["useful_error"], base["useful_error"])


def _change(points: float) -> str:
    """Return a gain or loss of the ranks' useful time, a fraction, as text: ``gains 0.46%``."""
    return "is as good" if abs(points) < SAID else f"{'gains' if points > 0 else 'loses'} {abs(points):.2%}"


def lost_samples(plan: Tree, take: Tree) -> Iterator[str]:
    """Describe samples over the budget, with media over the limits, and those that are not valid."""
    of_all, overlong = f"of {plan['lengths']['samples']:,} samples", plan["overlong"]
    stops = "If broker.yaml does not set `overlong`, a run stops at the first"
    if take["overlong"]:
        over = f"{take['overlong']:,} {of_all} are longer than the budget. `overlong: {overlong or 'truncate'}`"
        lost = f"{over} loses {take['lost_share']:.2%} of all tokens"
        yield f"{lost}." if overlong else f"{lost}, `overlong: split` loses none. {stops} of these samples."
    if take["unfit"]:
        drops = f"`overlong: {overlong}` drops them." if overlong else f"{stops}. Any other policy drops them."
        yield f"{take['unfit']:,} {of_all} have media that exceed `limits`. {drops}"
    if plan["rejected"]:
        yield (
            f"{plan['rejected']:,} samples are not valid. `poison: drop` drops invalid samples. Without this "
            f"setting, a run stops at the first invalid sample."
        )


def _media(plan: Tree, take: Tree) -> Iterator[str]:
    """Advise on limits of media that fill most packs, and on the cost of media if ranks differ in patches."""
    tail, balance = take["waste"]["pack_tail"], take["rules"].get("balance", {})
    fullest = {axis: share for axis, share in take["bound_by"].items() if share > MOST and axis != "tokens"}
    for axis, share in fullest.items() if tail > SAID else ():
        room = f"{axis.capitalize()} fill most packs ({share:.0%}), and {tail:.2%} of the"
        yield f"{room} capacity has no tokens. Raise `limits.{axis}` or lower `budget`."
    if not balance.get("patches") and not balance.get("items") and take["patches_max_over_mean"] >= UNEVEN:
        ratio = f"The most patches of a rank are {take['patches_max_over_mean']:.2f} times the mean"
        yield f"{ratio}, because media cost nothing. Set `balance: {{patches: [a, b]}}` for equal work in the encoder."


def _alignment(plan: Tree, take: Tree) -> Iterator[str]:
    """Describe the padding for alignment, if it is large, and the saving of tight alignment, if it applies."""
    if take["waste"]["alignment"] > SAID:
        padded = f"The mesh needs samples padded to multiples of {take['align']['sample']} tokens. This padding takes"
        yield f"{padded} {take['waste']['alignment']:.2%} of the capacity."
    rows = [row for row in forecast_rows(plan, "mesh") if row["mesh"] == take["mesh"]]
    for tight in rows:
        if tight["align"] != rows[0]["align"]:
            saved = rows[0]["waste"]["alignment"] - tight["waste"]["alignment"]
            yield (
                f"`align: {{sample: tight}}` pads samples only to multiples of {tight['align']['sample']} tokens. This "
                f"saves {saved:.2%} of the capacity. The ranks' time on real tokens changes by "
                f"{tight['useful'] - rows[0]['useful']:+.2%}. Tight alignment is not tested on GPUs yet."
            )


def _shape(plan: Tree, take: Tree) -> Iterator[str]:
    """Describe the gain or loss by other shapes of packs."""
    base, others = _on_axis(plan, "shape")
    if base is None:
        return
    gains = [(shape_text(row["shape"]), row["useful"] - base["useful"]) for row in others]
    compared = [f"{name} {_change(points)}" for name, points in gains if abs(points) >= SAID]
    against, stages = f"Compared with packs of shape {shape_text(base['shape'])}", take["mesh"]["pp"]
    pipeline = f" With {stages} pipeline stages, all packs of a step are padded to the longest one." * (stages > 1)
    if compared:
        yield f"{against}: {', '.join(compared)}. Compilers and CUDA graphs need few different shapes.{pipeline}"
    elif stages > 1 or base["step_samples"]:
        yield f"{against}, no other shape gains much.{pipeline}"


def _batches(plan: Tree, take: Tree) -> Iterator[str]:
    """Describe the packs and micro-batches of a batch, if steps are batches."""
    if not take["step_samples"]:
        return
    low, high, dp = take["micro_batches_low"], take["micro_batches_high"], take["mesh"]["dp"]
    micro = f"{low if low == high else f'{low} to {high}'} micro-batch{'es' * (high > 1)}"
    ranks = f" on each of {dp} ranks" if dp > 1 else ""
    split, empty = take["split_share"], take["waste"]["empty_pack"]
    needs = [f"{split:.1%} of the packs are split from other packs"] if split > SAID else []
    needs += [f"empty packs take {empty:.1%} of the capacity"] if empty > SAID else []
    equal = f" So that every rank has the same number of packs, {' and '.join(needs)}." if needs else ""
    batch = counted(take["step_samples"], "sample")
    yield f"A batch of {batch} forms {take['formed_packs']:.1f} packs, in {micro}{ranks}.{equal}"


def _balance(plan: Tree, take: Tree) -> Iterator[str]:
    """Describe the load imbalance over the data-parallel ranks, and how to lower it."""
    dp, ratio = take["mesh"]["dp"], take["cost_max_over_mean"]
    imbalance = f"The load imbalance (max / mean cost) over {dp} data-parallel ranks is {ratio:.3f}"
    bound = take["bound_by"]
    no_room = sum(bound.values()) - bound.get("tokens", 0.0) > MOST  # to move samples
    if dp == 1:
        yield "A single data-parallel rank does not wait. To see the cost of your mesh, pass --mesh, such as dp=8,cp=2."
    elif ratio < UNEVEN:
        yield f"{imbalance}, which is balanced."
    elif take["step_samples"]:
        yield f"{imbalance}. Larger batches lower the imbalance."
    elif take["packer"] == "joint" or no_room:
        yield f"{imbalance}. More packs per step lower the imbalance."
    else:
        lower = "More packs per step lower the imbalance, and so does `balance: joint`, which forms packs of equal cost"
        yield f"{imbalance}. {lower}."


def _meshes(plan: Tree, take: Tree) -> Iterator[str]:
    """Compare the meshes, if there are several."""
    useful: dict[str, float] = {}
    for row in forecast_rows(plan, "mesh"):
        useful.setdefault(mesh_text(row["mesh"]), row["useful"])
    if len(useful) > 1:
        best_first = sorted(useful.items(), key=lambda named: -named[1])
        compared = ", ".join(f"{mesh} {share:.2%}" for mesh, share in best_first)
        share = f"Share of the time that ranks spend on real tokens, by mesh: {compared}"
        yield f"{share}. The forecast leaves out kernels and links."


def _steps(plan: Tree, take: Tree) -> Iterator[str]:
    """Describe the empty packs of the last step, and the steps of a pass, with their 95% interval if estimated."""
    empty, warmup, steps = take["waste"]["empty_pack"], take["rules"].get("warmup"), take["steps"]
    if empty > 0.005 and not take["step_samples"]:
        takes = f"Empty packs of the last step take {empty:.2%} of the capacity"
        yield f"{takes}. To avoid empty packs, set fewer packs per step or `tail: drop`."
    grows = ""
    if warmup:
        grows = f"; in the first {warmup['steps']:,} steps, the budget grows from {warmup['init']:,} tokens"
    if steps is None:
        yield "The number of steps per pass is not known. Set the number of samples per pass with --total."
    elif take["steps_low"] == take["steps_high"]:
        size = counted(take["step_samples"], "sample") if take["step_samples"] else counted(take["step_packs"], "pack")
        yield f"A pass has {counted(steps, 'step')} of {size}{grows}."
    else:
        interval = f"{take['steps_low']:,} to {take['steps_high']:,}"
        yield f"A pass has {steps:,} steps (95% interval: {interval}){grows}."
