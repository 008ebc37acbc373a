"""``streampack plan --stage``: recommend a stage for a running broker, from the lengths of its stream.

The stage keeps about as many tokens in a step. It changes the budget only if another one clearly gains, and names only
what differs from the rules in force. A person reads the stage, and asks for it with ``streampack set stage``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from streampack.config.rules_settings import PlannedMesh
from streampack.config.stage_settings import MeshTerms, StageSettings, resolved
from streampack.core.model.capacity import needed_tokens
from streampack.core.model.rule_changes import apply_change
from streampack.core.model.rules import Rules
from streampack_services.amounts import counted
from streampack_services.forecast.lengths import Workload
from streampack_services.forecast.rank_loads import PlanMesh
from streampack_services.plan import advice
from streampack_services.plan.advisor import advise
from streampack_services.plan.plan_options import PlanOptions

Tree = dict[str, Any]
AHEAD = 100
"""Steps from now to the begin of the stage, so that a person has time to read it."""
WIDTH = 100
"""Most characters of a line with a comment."""


@dataclass(frozen=True, slots=True)
class RunningFeed:
    """The feed of a running broker: its ``rules`` in force, and the broker's ``endpoint``.

    ``next_step``: the next step to form. ``held_tokens``: the most tokens that the feed may hold. ``cut_samples``:
    samples that the rules cut or dropped since the broker started, because they were too long.
    """

    endpoint: str
    rules: Rules
    next_step: int
    held_tokens: int
    cut_samples: int
    mesh: PlanMesh | None = None


def advise_stage(
    workload: Workload, options: PlanOptions, running: RunningFeed, say: Callable[[str], None] = lambda _: None
) -> Tree:
    """Return the plan of ``advisor.advise`` as a tree for JSON, with the ``stage`` that it recommends.

    ``stage`` is None if the rules in force are as good. ``in_force``: the row of the rules in force. ``stage_yaml``:
    the stage with the reasons as comments.
    """
    rules = running.rules
    may_change_budget = len(options.budgets) > 1 and rules.share is None
    report = advise(workload, replace(options, keep_budget=not may_change_budget, keeps_good_budget=True), say)
    report["why"] = [line for line in advice.why(report, options.overlong) if "--mesh" not in line]
    report["in_force"] = next(
        row for row in report["settings"] if (row["axis"], row["budget"]) == ("budget", rules.budget)
    )
    changed = _changes(rules, report["take"])
    report["stage"] = None
    if changed:
        name = f"budget_{report['take']['budget']}" if "budget" in changed else "planned"
        report["stage"] = {"name": name, "at": {"step": running.next_step + AHEAD}, "rules": changed}
        report["why"] += _limits(running, report["stage"])
    report["stage_yaml"] = _text(report, running)
    return report


def _changes(rules: Rules, take: Tree) -> Tree:
    """Return the rules of the advised setting that differ from those in force, as a stage has them."""
    changed: Tree = {}
    if take["budget"] != rules.budget:
        changed["budget"] = take["budget"]
    if take["step_packs"] not in (None, rules.packs):
        changed["step"] = {"packs": take["step_packs"]}
    if rules.batch is None and take["window"] != rules.window:
        changed["window"] = take["window"] if take["window"] == "auto" else {"samples": take["window"]}
    if take["packer"] != rules.new_packer().name:
        changed["balance"] = {"kind": "joint" if take["packer"] == "joint" else "deal"}
    return changed


def _limits(running: RunningFeed, stage: Tree) -> list[str]:
    """Return what a person must know before asking for the stage, as sentences. Raises ValueError if it cannot be."""
    mesh = running.mesh or PlanMesh()
    terms = MeshTerms(PlannedMesh(dp=mesh.dp, cp=mesh.cp), "zigzag", None, None, running.rules.balance.group)
    stage_rules = resolved(msgspec.convert(stage, StageSettings), running.rules, terms)
    after = apply_change(running.rules, stage_rules, running.next_step)
    sentences, needed = list[str](), needed_tokens(after, after.budget + 1)
    if needed > running.held_tokens:
        sentences.append(
            f"The stage needs {needed:,} tokens of memory, and the feed may hold {running.held_tokens:,}. The broker "
            f"refuses it. Start the broker with more `memory`."
        )
    if running.cut_samples and after.budget > running.rules.budget:
        sentences.append(
            f"{counted(running.cut_samples, 'sample')} were cut or dropped so far because they are longer than a "
            f"budget. The forecast has the lengths after the cut; the stage cuts fewer of them."
        )
    return sentences


def _text(report: Tree, running: RunningFeed) -> str:
    """Return the recommended stage as YAML, with the reasons as comments."""
    now, take, stage = report["in_force"], report["take"], report["stage"]
    head = f"{report['what']}, next step {running.next_step:,}."
    if stage is None:
        lines = [head, f"The rules in force are as good as any other: {_figures(now)}.", *report["why"]]
        return _comments(lines)
    lines = [
        head,
        f"In force: {_figures(now)}.",
        f"This stage: {_figures(take)}.",
        *report["why"],
        f"Ask for it with: streampack set stage FILE -e {running.endpoint}",
    ]
    yaml = "".join(f"{key}: {advice.flow_yaml(value)}\n" for key, value in stage.items())
    return _comments(lines) + yaml


def _figures(row: Tree) -> str:
    """Return a setting and its forecast as text."""
    packs = "" if row["step_packs"] is None else f", {counted(row['step_packs'], 'pack')} a step"
    window = "" if row["step_samples"] is not None else f", window {advice.window_text(row['window'])}"
    rules = f"budget {row['budget']:,}{packs}{window}, {row['packer']}"
    return (
        f"{rules}: {row['useful']:.2%} of the ranks' time useful, utilization {row['utilization']:.2%}, load imbalance "
        f"{row['step_cost_max_over_mean']:.3f}"
    )


def _comments(sentences: list[str]) -> str:
    """Return sentences as comments of YAML, each on its own lines."""
    lines = [line for sentence in sentences for line in textwrap.wrap(sentence, WIDTH - 2)]
    return "".join(f"# {line}\n" for line in lines)
