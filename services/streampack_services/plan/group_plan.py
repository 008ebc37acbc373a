"""``streampack plan`` for a feed with ``cp: dynamic``: groups of ranks beside groups of one size.

Steps are formed as by the broker, and planned as by DEAL. They are planned again with groups of each single size that
has room for the longest sample, as static context parallelism has. The best of these sizes is shown. The planner counts
the cost of the exchange between ranks; the second part of the table is without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
from rich.text import Text

from streampack.core.deal.dynamic_cp.cp_plan import CpCosts, CpPlan, plan_groups, plan_uniform
from streampack.core.deal.mesh_validation import mesh_refusal
from streampack.core.model.mesh import DynamicCp, Mesh
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64
from streampack.errors import UserError
from streampack_services.amounts import counted
from streampack_services.forecast.forecast import long_run_steps, order_of, planned_rules, steps_of, with_packer
from streampack_services.forecast.lengths import Workload
from streampack_services.plan.advice import lost_samples, mesh_text
from streampack_services.plan.advisor import refuse_overlong
from streampack_services.plan.plan_options import PlanOptions
from streampack_services.plan.plan_report import new_table, print_lengths, print_whole
from streampack_services.terminal import new_console

Tree = dict[str, Any]
LEGEND = "\n".join((
    "costliest: cost of the costliest ranks of all micro-batches / mean cost of the real tokens of a rank, no exchange",
    "micro: micro-batches per step",
    "padding: share of the capacity without real tokens",
    "exchange: tokens that ranks get from others, per real token",
    "groups: groups of ranks that share a pack, by their number of ranks",
    "static: groups of the best single size, planned in the same way",
))  # fmt: skip
MOST_FILLED = 0.95
"""Part of the ranks' tokens that a step may fill, so that groups have room."""


def compare(workload: Workload, options: PlanOptions, say: Callable[[str], None] = lambda _: None) -> Tree:
    """Plan the steps of a feed with groups of ranks; return a tree for JSON.

    ``layouts`` has two rows with the cost of the exchange, and two without it if the feed has an exchange. ``say`` is
    called with the name of each layout that is planned.

    Raises SampleError for a sample over the budget if the policy is ``error``, UserError for a mesh that cannot read
    the feed.
    """
    dynamic, mesh = options.dynamic, options.meshes[0]
    assert dynamic is not None
    if options.overlong == "error":
        refuse_overlong(workload, options.rules.budget, options.rules.limits)
    rules = planned_rules(
        options.rules, workload, options.overlong or "truncate", all_streams=options.overlong_of_all
    )  # fmt: skip
    rules = with_packer(rules, options.packers[0], options.joint.planned(mesh.dp))
    if refusal := mesh_refusal(Mesh(**msgspec.structs.asdict(mesh)), rules, dynamic.layout):
        raise UserError(refusal)
    order = order_of(workload, rules)
    steps = [order.lengths[step.packs.handles] for step in long_run_steps(order, rules, steps_of(order, rules))]
    settings = dict.fromkeys((dynamic, msgspec.structs.replace(dynamic, node=0.0, across=0.0)))
    layouts = [row for setting in settings for row in _planned(steps, mesh.dp * mesh.cp, rules, setting, say)]
    full = np.array([lengths.sum() for lengths in steps]) / (mesh.dp * mesh.cp * dynamic.rank_tokens)
    return workload.about() | {
        "mesh": msgspec.to_builtins(mesh), "dealt_by": msgspec.to_builtins(dynamic), "shape": rules.shape,
        "overlong": order.overlong, "unfit": order.unfit, "lost_share": order.lost_share,
        "steps": len(steps), "filled": float(full.sum() / np.ceil(full).sum()), "layouts": layouts,
    }  # fmt: skip


def _planned(
    steps: list[I64], ranks: int, rules: Rules, dynamic: DynamicCp, say: Callable[[str], None]
) -> Iterator[Tree]:  # fmt: skip
    """Yield the rows of dynamic context parallelism, and of the best single size; ``steps`` are samples' lengths."""
    costs, align = CpCosts(*rules.balance.factors, dynamic.node, dynamic.across, dynamic.node_ranks), rules.align.sample

    def row(size: int | None) -> Tree:
        say("dynamic" if size is None else f"groups of {size}")
        most, planner = (dynamic.max_group, plan_groups) if size is None else (size, plan_uniform)
        plans = [planner(lengths, ranks, dynamic.rank_tokens, most, costs, align) for lengths in steps]
        figures = _figures(steps, plans, ranks, rules, dynamic)
        return {"cp": size, "counts_exchange": bool(dynamic.node or dynamic.across), **figures}

    yield row(None)
    longest, largest = max(int(lengths.max()) for lengths in steps), dynamic.largest_group(ranks)
    least = dynamic.least_group(longest, ranks, align)
    yield min((row(size) for size in (1 << n for n in range(32)) if least <= size <= largest), key=_costliest)


def _costliest(row: Tree) -> float:
    return float(row["costliest_over_mean"])


def _figures(steps: list[I64], plans: list[CpPlan], ranks: int, rules: Rules, dynamic: DynamicCp) -> Tree:
    """Return the figures of the steps as planned."""
    groups, delivered, exchanged = Counter[int](), 0, 0
    for lengths, plan in zip(steps, plans, strict=True):
        units = dynamic.aligns(plan.size, rules.align.sample)[plan.group_of]
        slots = np.zeros(len(plan.size), np.int64)
        np.add.at(slots, plan.group_of, -(-lengths // units) * units)
        delivered += int(dynamic.widths(slots, plan.size, rules.shape, rules.align.pack).sum())
        exchanged += int(((plan.size[plan.group_of] - 1) * lengths).sum())
        groups.update(plan.size[slots > 0].tolist())
    tokens = sum(int(lengths.sum()) for lengths in steps)
    needed = sum(int(rules.balance.costs(lengths).sum()) for lengths in steps) / ranks
    return {
        "costliest_over_mean": sum(plan.critical_path for plan in plans) / needed,
        "micro_batches": sum(plan.num_micro_batches for plan in plans) / len(plans),
        "padding": 1 - tokens / delivered, "exchanged_per_token": exchanged / tokens,
        "groups": {str(size): count for size, count in sorted(groups.items())},
    }  # fmt: skip


def why(plan: Tree, overlong: str | None) -> list[str]:
    """Return what the result of ``compare`` means, as sentences.

    ``overlong`` is the policy that the user asked for, or None.
    """
    dynamic, static, *_ = plan["layouts"]
    less = 1 - dynamic["costliest_over_mean"] / static["costliest_over_mean"]
    time = f"{abs(less):.1%} {'less' if less >= 0 else 'more'} time"
    sentences = [
        f"By the cost of samples, steps take {time} than with `cp: static` and cp={static['cp']}.",
        *lost_samples(plan | {"overlong": overlong}, plan),
    ]
    if static["exchanged_per_token"]:
        saved = 1 - dynamic["exchanged_per_token"] / static["exchanged_per_token"]
        sentences.insert(1, f"Ranks exchange {abs(saved):.1%} {'fewer' if saved >= 0 else 'more'} tokens.")
    if plan["filled"] > MOST_FILLED:
        sentences.append(
            f"A step fills its micro-batches to {plan['filled']:.2f}. Above {MOST_FILLED}, groups lack room, and each "
            f"step adds a nearly empty one. Change `step`."
        )
    if plan["shape"] == "fixed":
        sentences.append(
            "With `shape: fixed`, each rank computes `rank_tokens` tokens in every micro-batch, so the gain is "
            "smaller. Set `shape: exact`."
        )
    return sentences


def show(plan: Tree) -> None:
    """Print the result of ``compare``, with its ``why``."""
    console, by = new_console(), plan["dealt_by"]
    print_lengths(plan, console)
    console.print(
        f"{counted(plan['steps'], 'step')} on {mesh_text(plan['mesh'])}: groups of up to {by['max_group']} ranks of "
        f"{by['rank_tokens']:,} tokens, exchange {by['node']:g} in a node and {by['across']:g} across\n",
        soft_wrap=True,
    )
    table = new_table(["layout", "costliest", "micro", "padding", "exchange", "groups"])
    for at, row in enumerate(plan["layouts"]):
        if at == 2:
            table.add_row()
            table.add_row(Text("without the cost of exchange:", "dim"))
        table.add_row(
            "dynamic" if row["cp"] is None else f"static, cp={row['cp']}", f"{row['costliest_over_mean']:.3f}",
            f"{row['micro_batches']:.1f}", f"{row['padding']:.2%}", f"{row['exchanged_per_token']:.2f}",
            "  ".join(f"{size}: {count:,}" for size, count in row["groups"].items()),
        )  # fmt: skip
    print_whole(table)
    console.print(f"\n{LEGEND}\n", style="dim")
    for sentence in plan["why"]:
        console.print(f"- {sentence}")
