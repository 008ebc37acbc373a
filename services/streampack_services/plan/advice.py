"""Explain the advice of ``advisor.advise`` in sentences, and write the lines for broker.yaml."""

from __future__ import annotations

import math
from typing import Any

from streampack.config.daemon_settings import MEMORY
from streampack.config.typed_yaml import parse_size
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


def why(found: Tree, overlong: str | None) -> list[str]:
    """Return the reasons for the advice as sentences, the most important first.

    ``found`` is the result of ``advisor.advise``; ``overlong`` is the policy that the user asked for, or None.
    """
    return [
        *_packer(found), *_window(found), *_budget(found), *_overlong(found, overlong), *_unfit(found, overlong),
        *_rejected(found), *_bound(found), *_encoder(found), *_alignment(found), *_shape(found), *_batches(found),
        *_balance(found), *_meshes(found), *_last_step(found), *_steps(found),
    ]  # fmt: skip


def broker_yaml(found: Tree, overlong: str | None) -> str:
    """Return the lines of broker.yaml that configure the advised setting."""
    take = found["take"]
    rules = dict(take["rules"])
    if overlong is not None and overlong != "error":
        rules["overlong"] = overlong
    elif take["overlong"]:
        rules["overlong"] = "truncate"
    if found["rejected"]:
        rules["poison"] = "drop"
    mesh = {name: size for name, size in take["mesh"].items() if size > 1 and name != "pp"}
    tree = {"rules": rules, "planned_mesh": mesh, "precision": found["precision"]}
    if take["memory_bytes"] > parse_size(MEMORY, "memory"):
        tree["memory"] = f"{-(-take['memory_bytes'] // 2**30)}GiB"
    return "\n".join(f"{key}: {_flow_yaml(value)}" for key, value in tree.items() if value)


def _flow_yaml(value: Any) -> str:
    """Return a value as one line of YAML in flow style."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_flow_yaml(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_flow_yaml, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _axis(found: Tree, axis: str, key: str) -> list[Tree]:
    """Return the forecasts on ``axis`` whose ``key`` differs from the advised setting's, the best first."""
    rows = [row for row in found["settings"] if row["axis"] == axis and not row["refused"]]
    others = [row for row in rows if row[key] != found["take"][key]]
    return sorted(others, key=lambda row: -row["useful"])


def _packer(found: Tree) -> list[str]:
    """Compare the advised packer with the next best ones, and name better packers that are not advised."""
    take, others = found["take"], _axis(found, "packer", "packer")
    base = next((row for row in found["settings"] if row["axis"] == "packer" and row["packer"] == take["packer"]), take)
    compared = ", ".join(f"{row['packer']} {row['useful']:.2%}" for row in others[:COMPARED])
    work = "real tokens and media" if found["media"] else "real tokens"
    sentences = [f"With {take['packer']}, the ranks spend {base['useful']:.2%} of their time on {work}."]
    sentences[0] += f" Next best: {compared}." if compared else ""
    better = [row["packer"] for row in others if row["useful"] > base["useful"] + SAID]
    sorting = ", ".join(name for name in better if name not in NEAR_ORDER)
    if sorting and not take["step_samples"]:
        sentences.append(
            f"Packers with better figures that are not recommended: {sorting}. These packers sort whole windows by "
            f"length, so the mix of samples differs between steps."
        )
    return sentences


def _window(found: Tree) -> list[str]:
    """Compare window sizes in a sentence; empty if only one was forecast."""
    take, others = found["take"], sorted(_axis(found, "window", "window"), key=lambda row: int(row["window"]))
    base = next((row for row in found["settings"] if row["axis"] == "window" and row["window"] == take["window"]), None)
    if base is None or not others:
        return []
    compared = ", ".join(f"{row['window']} {_compared(row, base)}" for row in others)
    return [f"Compared with a window of {take['window']} samples: {compared}. A larger window delays samples longer."]


def _budget(found: Tree) -> list[str]:
    """Compare budgets in a sentence; empty if only one was forecast."""
    take, others = found["take"], sorted(_axis(found, "budget", "budget"), key=lambda row: int(row["budget"]))
    base = next((row for row in found["settings"] if row["axis"] == "budget" and row["budget"] == take["budget"]), None)
    if base is None or not others:
        return []
    compared = []
    for row in others:
        cut = row["lost_share"] - base["lost_share"]
        cuts = f" and cuts off {row['lost_share']:.2%} of the tokens" if cut > SAID else ""
        compared.append(f"{row['budget']} {_compared(row, base)}{cuts}")
    against = f"Compared with a budget of {take['budget']} tokens"
    return [f"{against}: {', '.join(compared)}. The activations of a pack must fit on a GPU."]


def _compared(row: Tree, base: Tree) -> str:
    """Return in words how much better ``row`` is than ``base``, without differences within the error of forecasts."""
    doubt = 2 * math.hypot(row["useful_error"], base["useful_error"])
    points = row["useful"] - base["useful"]
    return _change(points) if abs(points) > doubt else "is about as good"


def _change(points: float) -> str:
    """Return a gain or loss of the ranks' useful time, a fraction, as text: ``gains 0.46%``."""
    return "is as good" if abs(points) < SAID else f"{'gains' if points > 0 else 'loses'} {abs(points):.2%}"


def _overlong(found: Tree, overlong: str | None) -> list[str]:
    """Describe the samples over the budget, and the tokens that the policy loses; empty for no such samples."""
    take = found["take"]
    if not take["overlong"]:
        return []
    over = f"{take['overlong']:,} of {found['lengths']['samples']:,} samples are longer than the budget"
    lost = f"loses {take['lost_share']:.2%} of all tokens"
    if overlong is None:
        stops = "If broker.yaml does not set `overlong`, a run stops at the first of these samples"
        return [f"{over}. `overlong: truncate` {lost}, `overlong: split` loses none. {stops}."]
    return [f"{over}. `overlong: {overlong}` {lost}."]


def _unfit(found: Tree, overlong: str | None) -> list[str]:
    """Describe the samples whose media alone exceed the limits of a pack; empty for no such samples."""
    if not found["take"]["unfit"]:
        return []
    over = f"{found['take']['unfit']:,} of {found['lengths']['samples']:,} samples have media that exceed `limits`"
    if overlong is None:
        return [
            f"{over}. If broker.yaml does not set `overlong`, a run stops at the first. Any other policy drops them."
        ]
    return [f"{over}. `overlong: {overlong}` drops them."]


def _bound(found: Tree) -> list[str]:
    """Advise on limits of media that fill most packs, so that tokens leave room; empty if tokens fill most packs."""
    take = found["take"]
    for axis in ("patches", "items"):
        share = take["bound_by"].get(axis, 0.0)
        if share > MOST and take["waste"]["pack_tail"] > SAID:
            room = f"{axis.capitalize()} fill most packs ({share:.0%}), and {take['waste']['pack_tail']:.2%} of the"
            return [f"{room} capacity has no tokens. Raise `limits.{axis}` or lower `budget`."]
    return []


def _encoder(found: Tree) -> list[str]:
    """Advise to balance the cost of media, if ranks differ in patches and the rules give patches no cost."""
    take = found["take"]
    balance = take["rules"].get("balance", {})
    if balance.get("patches") or balance.get("items") or take["patches_max_over_mean"] < UNEVEN:
        return []
    ratio = f"The most patches of a rank are {take['patches_max_over_mean']:.2f} times the mean"
    return [f"{ratio}, because media cost nothing. Set `balance: {{patches: [a, b]}}` for equal work in the encoder."]


def _rejected(found: Tree) -> list[str]:
    """Return a sentence with the number of invalid samples; empty for none."""
    if not found["rejected"]:
        return []
    drops = "`poison: drop` drops invalid samples"
    stops = "Without this setting, a run stops at the first invalid sample"
    return [f"{found['rejected']:,} samples are not valid. {drops}. {stops}."]


def _alignment(found: Tree) -> list[str]:
    """Describe the padding for alignment, if it is large, and the saving of tight alignment, if it applies."""
    take, said = found["take"], list[str]()
    if take["waste"]["alignment"] > SAID:
        padded = f"The mesh needs samples padded to multiples of {take['align']['sample']} tokens. This padding takes"
        said.append(f"{padded} {take['waste']['alignment']:.2%} of the capacity.")
    rows = [row for row in found["settings"] if row["axis"] == "mesh" and not row["refused"]]
    for tight in rows:
        given = next((row for row in rows if row["mesh"] == tight["mesh"]), tight)
        if tight["mesh"] == take["mesh"] and tight["align"] != given["align"]:
            saved = given["waste"]["alignment"] - tight["waste"]["alignment"]
            said.append(
                f"`align: {{sample: tight}}` pads samples only to multiples of {tight['align']['sample']} tokens. This "
                f"saves {saved:.2%} of the capacity. The ranks' time on real tokens changes by "
                f"{tight['useful'] - given['useful']:+.2%}. Tight alignment is not tested on GPUs yet."
            )
    return said


def _shape(found: Tree) -> list[str]:
    """Describe the gain or loss by other shapes of packs; empty if no shape makes a difference."""
    rows = [row for row in found["settings"] if row["axis"] == "shape" and not row["refused"]]
    base = next((row for row in rows if row["shape"] == found["take"]["shape"]), None)
    if base is None:
        return []
    said = [f"{shape_text(row['shape'])} {_change(row['useful'] - base['useful'])}" for row in rows if row is not base
            if abs(row["useful"] - base["useful"]) >= SAID]  # fmt: skip
    stages = base["mesh"]["pp"]
    pipeline = (
        f" With {stages} pipeline stages, all packs of a step are padded to the longest one." if stages > 1 else ""
    )
    shapes = f"packs of shape {shape_text(base['shape'])}"
    if not said:
        return (
            [f"Compared with {shapes}, no other shape gains much.{pipeline}"]
            if stages > 1 or base["step_samples"]
            else []
        )
    return [
        f"Compared with {shapes}: {', '.join(said)}. Compilers and CUDA graphs need few different shapes.{pipeline}"
    ]


def shape_text(shape: Any) -> str:
    """Return a shape as text: ``exact``, ``multiple 512`` or ``buckets 2048 4096``."""
    if isinstance(shape, str):
        return shape
    if shape.get("multiple"):
        return f"multiple {shape['multiple']}"
    return f"buckets {' '.join(map(str, shape['buckets']))}"


def _batches(found: Tree) -> list[str]:
    """Describe the packs and micro-batches of a batch; empty if steps are counted in packs."""
    take = found["take"]
    if not take["step_samples"]:
        return []
    low, high, dp = take["micro_batches_low"], take["micro_batches_high"], take["mesh"]["dp"]
    ranks = f" on each of {dp} ranks" if dp > 1 else ""
    micro = _counted(low, high, "micro-batch", "micro-batches")
    said = f"A batch of {take['step_samples']:,} samples forms {take['formed_packs']:.1f} packs, in {micro}{ranks}."
    split, empty = take["split_share"], take["waste"]["empty_pack"]
    needs = [f"{split:.1%} of the packs are split from other packs"] if split > SAID else []
    needs += [f"empty packs take {empty:.1%} of the capacity"] if empty > SAID else []
    said += f" So that every rank has the same number of packs, {' and '.join(needs)}." if needs else ""
    return [said]


def _counted(low: int, high: int, one: str, many: str) -> str:
    """Return ``1 micro-batch``, ``3 micro-batches`` or ``3 to 4 micro-batches``."""
    return f"{low} {one if low == 1 else many}" if low == high else f"{low} to {high} {many}"


def _balance(found: Tree) -> list[str]:
    """Describe the load imbalance over the data-parallel ranks, and how to lower it."""
    take = found["take"]
    dp = take["mesh"]["dp"]
    if dp == 1:
        return [
            "A single data-parallel rank does not wait. To see the cost of your mesh, pass --mesh, such as dp=8,cp=2."
        ]
    said = f"The load imbalance (max / mean cost) over {dp} data-parallel ranks is {take['cost_max_over_mean']:.3f}"
    if take["cost_max_over_mean"] < UNEVEN:
        return [f"{said}, which is balanced."]
    if take["step_samples"]:
        return [f"{said}. Larger batches lower the imbalance."]
    no_room = sum(take["bound_by"].values()) - take["bound_by"].get("tokens", 0.0) > 0.5  # to move samples
    no_joint = take["packer"] == "joint" or no_room
    joint = "" if no_joint else ", and so does `balance: joint`, which forms packs of equal cost"
    return [f"{said}. More packs per step lower the imbalance{joint}."]


def _meshes(found: Tree) -> list[str]:
    """Compare the meshes in a sentence; empty if only one was given."""
    rows: dict[str, float] = {}
    for row in found["settings"]:
        if row["axis"] == "mesh" and not row["refused"]:
            mesh = " ".join(f"{name}={size}" for name, size in row["mesh"].items() if size > 1 or name == "dp")
            rows.setdefault(mesh, row["useful"])
    if len(rows) < 2:
        return []
    compared = ", ".join(f"{mesh} {useful:.2%}" for mesh, useful in sorted(rows.items(), key=lambda each: -each[1]))
    share = f"Share of the time that ranks spend on real tokens, by mesh: {compared}"
    return [f"{share}. The forecast leaves out kernels and links."]


def _last_step(found: Tree) -> list[str]:
    """Describe the empty packs of the last step, and how to avoid them; empty if they are few."""
    share = found["take"]["waste"]["empty_pack"]
    if share <= 0.005 or found["take"]["step_samples"]:
        return []
    takes = f"Empty packs of the last step take {share:.2%} of the capacity"
    return [f"{takes}. To avoid empty packs, set fewer packs per step or `tail: drop`."]


def _steps(found: Tree) -> list[str]:
    """Return a sentence with the steps of a pass, and their 95% interval if they are estimated."""
    take = found["take"]
    warmup = take["rules"].get("warmup")
    among = (
        f"; in the first {warmup['steps']:,} steps, the budget grows from {warmup['init']:,} tokens" if warmup else ""
    )
    if take["steps"] is None:
        return ["The number of steps per pass is not known. Set the number of samples per pass with --total."]
    if take["steps_low"] == take["steps_high"]:
        of = f"{take['step_samples']:,} samples" if take["step_samples"] else f"{take['step_packs']} packs"
        return [f"A pass has {take['steps']:,} step{'s' * (take['steps'] != 1)} of {of}{among}."]
    return [
        f"A pass has {take['steps']:,} steps (95% interval: {take['steps_low']:,} to {take['steps_high']:,}){among}."
    ]
