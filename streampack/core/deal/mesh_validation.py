"""The reasons that the rules of a run cannot serve a mesh."""

from __future__ import annotations

from streampack.core.deal.assignment import packs_of_mesh
from streampack.core.deal.dynamic_cp.cp_plan import CpCosts, costs_refusal
from streampack.core.model.mesh import DynamicCp, Mesh
from streampack.core.model.rules import Rules

MOST_TOKENS = 1 << 33
"""The most tokens that a step may have, so that sums of costs do not overflow."""
AFTER_RAMPS = 1 << 62
"""A step at which nothing grows any more."""


def mesh_refusal(mesh: Mesh, rules: Rules, layout: str, variable_lengths: bool = True, step: int = 0) -> str:
    """Return an error text if these rules cannot serve ``mesh``, with the values that clash; empty if they can.

    ``variable_lengths``: the pipeline's stages exchange micro-batches of any shape. ``step``: the first step that the
    mesh reads; the packs of earlier steps may have been fewer.
    """
    if (dynamic := DynamicCp.of(layout)) is not None:
        return _groups_refusal(mesh, rules, dynamic)
    if wrong := batch_refusal(mesh, rules) or _packs_refusal(mesh, rules, step) or _cut_refusal(mesh, rules, layout):
        return wrong
    if rules.padded and mesh.pp > 1 and not variable_lengths:
        return (
            f"got pp={mesh.pp} for padded micro-batches, expected pp=1, because these micro-batches differ in shape. "
            f"If the pipeline's stages can exchange any shape, pass connect(..., variable_lengths=True). Otherwise, "
            f"use pp=1 or packing."
        )
    return ""


def _groups_refusal(mesh: Mesh, rules: Rules, dynamic: DynamicCp) -> str:
    """Return an error text if groups of ranks cannot share the packs of these rules; empty if they can."""
    batch, balance = rules.batch, rules.balance
    unlike, anew = "groups of ranks share packs of different shapes", "groups of ranks get other packs than FORM makes"
    for name, got, why in (
        ("share: prefix", rules.share, unlike),
        ("padded: true", rules.padded, unlike),
        (f"pp={mesh.pp}", mesh.pp > 1, unlike),
        ("step.micro_batch_multiple", batch and batch.micro_batch_multiple, "the plan of groups sets the number"),
        ("step.min_micro_batches", batch and batch.min_micro_batches > 1, "the plan of groups sets the number"),
        ("step.empty: error", batch and batch.empty == "error", "a plan of groups may leave ranks without samples"),
        ("balance.kind: none", balance.kind == "none", "groups of ranks are always planned by cost"),
        ("balance.patches", balance.patches, "the plan of groups knows no media"),
        ("balance.items", balance.items, "the plan of groups knows no media"),
        ("balance.sliding", balance.sliding, "the cost of groups of ranks has no windows"),
        ("limits", rules.limits, anew),
        ("max_samples_per_pack", rules.max_samples_per_pack, anew),
        ("micro_batch_size", rules.micro_batch_size, anew),
    ):
        if got:
            return (
                f"got `cp: dynamic` with {name}, expected a feed without it, because {why}. Remove `cp: dynamic` from "
                f"the feed, or {name}"
            )
    return dynamic.refusal(mesh.dp * mesh.cp, rules.budget, rules.shape, rules.align.pack) or _costs_refusal(
        rules, dynamic
    )


def _costs_refusal(rules: Rules, dynamic: DynamicCp) -> str:
    """Return an error text if the costs of a step could overflow on some mesh; empty if they cannot."""
    costs = CpCosts(*rules.balance.factors, dynamic.node, dynamic.across, dynamic.node_ranks)
    packs = rules.most_packs if rules.batch is None else rules.batch.samples or MOST_TOKENS
    tokens = min(packs * rules.budget, MOST_TOKENS)
    wrong = costs_refusal(costs, dynamic.max_group, rules.align.sample, rules.budget, tokens)
    return f"got {wrong} in `rules.balance`, or a smaller `exchange`" if wrong else ""


def _packs_refusal(mesh: Mesh, rules: Rules, step: int) -> str:
    """Return an error text if the data-parallel ranks cannot share the packs of ``step``, or of a later step."""
    packs = rules.packs_unit_from(step)
    if rules.batch is None and packs % mesh.dp:
        divisors = ", ".join(str(d) for d in range(1, min(packs, 512) + 1) if packs % d == 0)
        count = f"{packs} packs of a step"
        if packs != rules.packs:
            count = f"{packs} packs by which steps grow to {rules.packs}"
        text = f"got dp={mesh.dp}, expected a divisor of the {count} ({divisors})."
        return f"{text} Change the mesh or `rules.step.packs`"
    return ""


def _cut_refusal(mesh: Mesh, rules: Rules, layout: str) -> str:
    """Return an error text if packs cannot be cut for the context-parallel ranks; empty if they can."""
    if mesh.cp == 1 or layout == "whole":
        return ""
    if rules.share is not None:
        return (
            f"got cp={mesh.cp} and `cp_layout: {layout}` with `share: prefix`, expected cp=1 or `cp_layout: whole`, "
            f"because the samples of a pack share tokens and cannot be cut apart"
        )
    if rules.padded and layout != "zigzag":
        return (
            f"got cp={mesh.cp} and `cp_layout: {layout}` with `padded: true`, expected `cp_layout: zigzag`, which "
            f"splits each row separately, or `cp_layout: whole`"
        )
    parts = mesh.cp if layout == "contiguous" else 2 * mesh.cp
    how = f"{'' if layout == 'contiguous' else '2 * '}cp = {parts}"
    if layout == "zigzag" and (rules.align.sample % parts or rules.align.pack % parts):
        return (
            f"got cp={mesh.cp} with align.sample={rules.align.sample} and align.pack={rules.align.pack}, expected "
            f"multiples of {how}. Set `rules.align` or `planned_mesh.cp` before the run starts"
        )
    if rules.width_unit % parts:
        advice = (
            f"a budget of {rules.budget}"
            if rules.shape == "fixed"
            else f"pack widths in multiples of {rules.width_unit}"
        )
        keys = "rules.budget" if rules.shape == "fixed" else "rules.align.pack, rules.shape"
        return (
            f"got cp={mesh.cp} and {advice}, expected a multiple of {how}, because `cp_layout: {layout}` splits each "
            f"pack into {parts} equal parts. Change {keys} or the mesh"
        )
    return ""


def batch_refusal(mesh: Mesh, rules: Rules) -> str:
    """Return an error text if batches are too small for ``mesh`` and the rules have ``empty: error``; else empty."""
    batch = rules.batch
    least = packs_of_mesh(rules, 1, mesh.dp, mesh.pp)
    if batch is None or batch.empty == "pad" or least <= (samples := batch.samples or batch.min_samples):
        return ""
    key = "samples" if batch.samples else "min_samples"
    return (
        f"got batches of {samples} samples with dp={mesh.dp} and `rules.step.empty: error`, expected at least {least} "
        f"samples, so that each rank gets at least {least // mesh.dp} micro-batches. Change the mesh, "
        f"`rules.step.{key}` or `rules.step.empty`"
    )
