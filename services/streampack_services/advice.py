"""What to take and why, in plain words, over the tree of ``advisor.advise``; and the lines for broker.yaml."""

from __future__ import annotations

from typing import Any

from streampack.config import MEMORY
from streampack.typed_tree import parse_size
from streampack_services.advisor import NEAR_ORDER

Tree = dict[str, Any]
UNEVEN = 1.05
"""Cost max / mean above this is worth a word."""
COMPARED = 3
"""Packers that are named beside the one taken."""
SAID = 0.001
"""Smaller shares are not worth one."""


def why(found: Tree, overlong: str | None) -> list[str]:
    """Sentences, the most important first."""
    return [
        *_packer(found), *_window(found), *_budget(found), *_overlong(found, overlong), *_rejected(found),
        *_alignment(found), *_balance(found), *_meshes(found), *_last_step(found), *_steps(found),
    ]  # fmt: skip


def broker_yaml(found: Tree, overlong: str | None, *, align_given: bool) -> str:
    """The lines that make a broker do what is taken."""
    take = found["take"]
    joint = take["joint"]
    rules = [f"packer: {'exact_fill' if joint else take['packer']}", f"budget: {take['budget']}"]
    rules.append(f"window: {{samples: {take['window']}}}")
    rules += [f"{key}: {value}" for key, value in take["packer_keys"].items()]
    rules.append(f"step: {{packs: {take['step_packs']}}}")
    if joint:
        rules.append(f"balance: {{{', '.join(f'{key}: {value}' for key, value in joint.items())}}}")
    if align_given and take["align"]["pack"] > 1:
        rules.append(f"align: {{sample: {take['align']['sample']}, pack: {take['align']['pack']}}}")
    if overlong is not None and overlong != "error":
        rules.append(f"overlong: {overlong}")
    elif take["overlong"]:
        rules.append("overlong: truncate")
    if found["rejected"]:
        rules.append("poison: drop")
    mesh = ", ".join(f"{name}: {size}" for name, size in take["mesh"].items() if size > 1)
    lines = [f"rules: {{{', '.join(rules)}}}"] + ([f"planned_mesh: {{{mesh}}}"] if mesh else [])
    if take["memory_bytes"] > parse_size(MEMORY, "memory"):
        lines.append(f"memory: {-(-take['memory_bytes'] // 2**30)}GiB")
    return "\n".join(lines)


def _axis(found: Tree, axis: str, key: str) -> list[Tree]:
    """Forecasts on an axis but for the one taken, the best first."""
    rows = [row for row in found["settings"] if row["axis"] == axis and not row["refused"]]
    others = [row for row in rows if row[key] != found["take"][key]]
    return sorted(others, key=lambda row: -row["useful"])


def _packer(found: Tree) -> list[str]:
    take, others = found["take"], _axis(found, "packer", "packer")
    base = next((row for row in found["settings"] if row["axis"] == "packer" and row["packer"] == take["packer"]), take)
    compared = ", ".join(f"{row['packer']} {row['useful']:.2%}" for row in others[:COMPARED])
    said = f"{take['packer']} leaves {base['useful']:.2%} of the ranks' time to real tokens"
    better = [row["packer"] for row in others if row["useful"] > base["useful"] + SAID]
    sorting = ", ".join(name for name in better if name not in NEAR_ORDER)
    sentences = [said + (f"; next: {compared}." if compared else ".")]
    if sorting:
        sentences.append(
            f"Not advised, for they rearrange whole windows, and steps differ in what they hold: {sorting}."
        )
    return sentences


def _window(found: Tree) -> list[str]:
    take, others = found["take"], sorted(_axis(found, "window", "window"), key=lambda row: int(row["window"]))
    base = next((row for row in found["settings"] if row["axis"] == "window" and row["window"] == take["window"]), None)
    if base is None or not others:
        return []
    compared = ", ".join(f"{row['window']} {_change(row['useful'] - base['useful'])}" for row in others)
    return [f"A window of {take['window']} samples: {compared}. A larger one holds samples back longer."]


def _budget(found: Tree) -> list[str]:
    take, others = found["take"], sorted(_axis(found, "budget", "budget"), key=lambda row: int(row["budget"]))
    base = next((row for row in found["settings"] if row["axis"] == "budget" and row["budget"] == take["budget"]), None)
    if base is None or not others:
        return []
    compared = []
    for row in others:
        cut = row["lost_share"] - base["lost_share"]
        cuts = f" and cuts off {row['lost_share']:.2%} of the tokens" if cut > SAID else ""
        compared.append(f"{row['budget']} {_change(row['useful'] - base['useful'])}{cuts}")
    return [f"A budget of {take['budget']} tokens: {', '.join(compared)}. Activations of a whole pack must fit a GPU."]


def _change(points: float) -> str:
    return "is as good" if abs(points) < SAID else f"{'gains' if points > 0 else 'loses'} {abs(points):.2%}"


def _overlong(found: Tree, overlong: str | None) -> list[str]:
    take = found["take"]
    if not take["overlong"]:
        return []
    over = f"{take['overlong']:,} of {found['lengths']['samples']:,} samples are longer than the budget"
    lost = f"{take['lost_share']:.2%} of all tokens are lost"
    if overlong is None:
        stops = "without overlong in broker.yaml a run would stop at the first"
        return [f"{over}. Truncated, {lost}; split, none; {stops}."]
    return [f"{over}: {overlong}, {lost}."]


def _rejected(found: Tree) -> list[str]:
    if not found["rejected"]:
        return []
    return [f"{found['rejected']:,} samples cannot be used: poison: drop counts them, without it a run stops there."]


def _alignment(found: Tree) -> list[str]:
    take, said = found["take"], list[str]()
    if take["waste"]["alignment"] > SAID:
        padded = f"Samples padded to multiples of {take['align']['sample']} tokens, which the mesh asks for, take"
        said.append(f"{padded} {take['waste']['alignment']:.2%}.")
    rows = (row for row in found["settings"] if row["axis"] == "mesh" and not row["refused"])
    for row in rows:
        if row["mesh"] == take["mesh"] and row["align"] != take["align"]:
            align = f"align: {{sample: {row['align']['sample']}, pack: {row['align']['pack']}}}"
            said.append(f"{align}, all that the kernels' split needs, would take {row['waste']['alignment']:.2%}: not "
                        f"proved on GPUs yet.")  # fmt: skip
    return said


def _balance(found: Tree) -> list[str]:
    take = found["take"]
    dp = take["mesh"]["dp"]
    if dp == 1:
        return ["On one data-parallel rank nobody waits for another; --mesh dp=8,cp=2 says what yours costs."]
    said = f"The dearest of {dp} ranks needs {take['cost_max_over_mean']:.3f} times the mean of its micro-batch"
    if take["cost_max_over_mean"] < UNEVEN:
        return [f"{said}: balanced."]
    joint = "" if take["packer"] == "joint" else "; balance: joint forms packs that cost the same"
    return [f"{said}: the others wait. More packs a step give DEAL more to choose from{joint}."]


def _meshes(found: Tree) -> list[str]:
    """Meshes beside each other, where several were given, each with the alignment that is derived from it."""
    rows: dict[str, float] = {}
    for row in found["settings"]:
        if row["axis"] == "mesh" and not row["refused"]:
            mesh = " ".join(f"{name}={size}" for name, size in row["mesh"].items() if size > 1 or name == "dp")
            rows.setdefault(mesh, row["useful"])
    if len(rows) < 2:
        return []
    compared = ", ".join(f"{mesh} {useful:.2%}" for mesh, useful in sorted(rows.items(), key=lambda each: -each[1]))
    return [f"Meshes, by the ranks' time for real tokens: {compared}; what kernels and links cost is not in it."]


def _last_step(found: Tree) -> list[str]:
    share = found["take"]["waste"]["empty_pack"]
    if share <= 0.005:
        return []
    return [f"Empty packs of the last step take {share:.2%}: fewer packs a step, several passes, or tail: drop."]


def _steps(found: Tree) -> list[str]:
    take = found["take"]
    if take["steps"] is None:
        return ["How many steps a pass has is not known: --total says how many samples it has."]
    if take["steps_low"] == take["steps_high"]:
        return [f"A pass is {take['steps']:,} steps of {take['step_packs']} packs."]
    return [f"A pass is {take['steps']:,} steps, most likely (95 %) {take['steps_low']:,} to {take['steps_high']:,}."]
