"""The stages on the page about a run that changes: each is planned as it stands, and runs on small packs."""

from __future__ import annotations

from math import gcd
from typing import Any

import pytest
import yaml
from msgspec import UNSET
from msgspec.structs import replace

from streampack.config.config_validation import checked
from streampack.config.daemon_settings import BrokerConfig
from streampack.config.typed_yaml import convert
from streampack.core.model.capacity import needed_tokens
from streampack.core.model.keys.planning_keys import Warmup
from streampack.core.model.keys.stage_keys import Stage, StageBegin
from streampack.core.model.rule_changes import rules_of_stages
from streampack.core.model.rules import Align, Rules
from tests.docs.pages import BLOCKS, Block
from tests.world.live import Live
from tests.world.planned import Data
from tests.world.staged import StagedPlan

RUNS = [
    block
    for block in BLOCKS
    if block.page == "docs/how-to/change-a-run.md"
    and block.language == "yaml"
    and "streams" in yaml.safe_load(block.code)
]
LONGEST = 96


def planned(block: Block) -> Rules:
    return checked(convert(yaml.safe_load(block.code), BrokerConfig)).plan()


def small(rules: Rules) -> Rules:
    """The same run with small packs, and stages that begin after a few steps: ratios of budgets and packs stay."""
    least = min(each.budget for each in rules_of_stages(rules))
    unit = gcd(*(each.packs_unit for each in rules_of_stages(rules)))

    def ramp(of: Warmup, by: int) -> Warmup:
        return Warmup(of.init // by, min(of.steps, 4))

    stages = list[Stage]()
    for number, stage in enumerate(rules.stages):
        keys = stage.rules
        changed: dict[str, Any] = {"align": Align()} if keys.align is not UNSET else {}
        changed |= {"budget": 16 * keys.budget // least} if keys.budget is not UNSET else {}
        changed |= {"packs": keys.packs // unit} if keys.packs is not UNSET else {}
        changed |= {"packs_ramp": ramp(keys.packs_ramp, unit)} if keys.packs_ramp is not UNSET else {}
        at = StageBegin(step=6 * number + 3 * (stage.at.step != 0))
        if stage.at.tokens is not None:
            at = StageBegin(tokens=16 * (rules.packs // unit) * (6 * number + 3))
        stages.append(replace(stage, at=at, over=min(stage.over, 4), rules=replace(keys, **changed)))
    batch = None if rules.batch is None else replace(rules.batch, samples=8)
    streams = tuple(replace(stream, overlong="split", pushed=False) for stream in rules.streams)
    return replace(
        rules, batch=batch, budget=16 * rules.budget // least, packs=rules.packs // unit, align=Align(),
        stages=tuple(stages), streams=streams, merge="schedule",
    )  # fmt: skip


@pytest.mark.parametrize("block", RUNS, ids=lambda block: yaml.safe_load(block.code)["run"])
def test_each_stage_of_the_page_begins_and_the_steps_are_those_of_an_offline_plan(block: Block) -> None:
    assert len(planned(block).stages) >= 1
    rules = small(planned(block))
    lengths = [3 + 7 * i % 29 for i in range(300)]
    data: Data = {stream.name: [lengths[p:] for p in range(stream.partitions)] for stream in rules.streams}
    run = Live(rules, data, 1, quota=400, memory=needed_tokens(rules, LONGEST) + 2000, longest=LONGEST)
    run.read(40)
    began = [change.name for change in run.changes()]
    assert began == [stage.name for stage in rules.stages]
    expected = [step.chain for step in StagedPlan(rules, data, LONGEST).plan()]
    assert all(chain == expected[step] for (_, step), chain in run.chains.items())


def test_the_page_has_a_recipe_for_each_wish() -> None:
    runs = {yaml.safe_load(block.code)["run"] for block in RUNS}
    wishes = {"longer-sequence", "other-blend", "context-and-mixture", "schedule-of-weights", "longer-rollouts"}
    assert wishes <= runs
