"""``plan --stage``: a stage for the rules in force, that the configuration and the rules accept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from streampack_services.forecast.lengths import of_lengths
from streampack_services.plan.plan_options import PlanOptions
from streampack_services.plan.stage_plan import RunningFeed, advise_stage

from streampack.config.rules_settings import PlannedMesh
from streampack.config.stage_settings import MeshTerms, StageSettings, resolved
from streampack.config.typed_yaml import parse_tree
from streampack.core.model.rule_changes import apply_change
from streampack.core.model.rules import Rules, StreamRules

STREAMS = (StreamRules("web", 1.0, 1, overlong="truncate"),)
RULES = Rules(budget=1024, packs=16, window=64, in_turn=True, streams=STREAMS)
LENGTHS = np.random.default_rng(1).integers(100, 1000, 6000)


def advised(rules: Rules = RULES, lengths: Any = LENGTHS, **running: Any) -> dict[str, Any]:
    budget = rules.budget
    options = PlanOptions(
        rules, align=rules.align, keep_budget=True, budgets=(budget, budget // 2, 2 * budget, 4 * budget),
        windows=(rules.window, 256), packers=("exact_fill", "joint"), overlong="truncate",
    )  # fmt: skip
    feed = RunningFeed("http://node0:7400", rules, 1234, 10**9, 0)
    return advise_stage(of_lengths("a run", lengths, 6000, None), options, replace(feed, **running))


def test_the_stage_has_the_same_tokens_a_step_and_is_accepted() -> None:
    report = advised()
    stage = report["stage"]
    assert stage["rules"]["budget"] in (2048, 4096)
    assert stage["rules"]["budget"] * stage["rules"]["step"]["packs"] == RULES.budget * RULES.packs
    assert stage["at"] == {"step": 1334}
    tree = parse_tree(report["stage_yaml"], "stage.yaml")
    assert tree == stage
    terms = MeshTerms(PlannedMesh(), "zigzag", None, None, None)
    asked = resolved(msgspec.convert(tree, StageSettings), RULES, terms)
    assert apply_change(RULES, asked).budget == stage["rules"]["budget"]
    assert report["take"]["useful"] > report["in_force"]["useful"]
    assert "# In force: budget 1,024, 16 packs a step, window 64, exact_fill:" in report["stage_yaml"]
    assert "# Ask for it with: streampack set stage FILE -e http://node0:7400" in report["stage_yaml"]


def test_rules_that_are_good_stay_and_no_stage_is_written() -> None:
    report = advised(lengths=np.full(6000, 64))
    assert report["stage"] is None
    assert all(line.startswith("# ") for line in report["stage_yaml"].splitlines())
    assert "# The rules in force are as good as any other: budget 1,024, 16 packs" in report["stage_yaml"]


def test_the_reasons_name_memory_that_is_missing_and_samples_that_were_cut() -> None:
    why = " ".join(advised(held_tokens=1000, cut_samples=7)["why"])
    assert "and the feed may hold 1,000. The broker refuses it." in why
    assert "7 samples were cut or dropped so far" in why
