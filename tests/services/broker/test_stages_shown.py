"""Figures of a feed whose budget changes: each pack counts with its own budget, and the end is estimated by stages."""

from __future__ import annotations

import pytest
from streampack_services.broker.changes.begin_estimate import pace_of, steps_of
from streampack_services.broker.changes.change_report import changes_status

from streampack.core.model.capacity import needed_tokens
from streampack.core.model.keys.stage_keys import Stage, StageBegin, StageRules
from streampack.core.model.rules import Rules, StreamRules
from streampack.core.stats.fill import of_budgets
from tests.world.live import Live

LENGTHS = [7, 3, 12, 30, 5, 16, 2, 8] * 80
LONG = Stage(name="long", at=StageBegin(step=20), rules=StageRules(budget=128, packs=2))


def live() -> Live:
    rules = Rules(budget=32, packs=4, window=8, streams=(StreamRules("web", 1.0, 1),), stages=(LONG,))
    return Live(rules, {"web": [LENGTHS]}, quota=400, memory=needed_tokens(rules, 128) + 2000, longest=128)


def test_utilization_counts_each_pack_with_its_own_budget() -> None:
    run = live()
    run.read(30)
    formed = run.feed.figures
    capacity = sum(each.packs * budget for budget, each in formed.by_budget.items())
    assert {budget: each.packs for budget, each in formed.by_budget.items()}[32] == 80
    assert set(formed.by_budget) == {32, 128}
    assert formed.totals.tokens == sum(each.tokens for each in formed.by_budget.values())
    got = of_budgets({budget: each.moments for budget, each in formed.by_budget.items()})
    assert got.utilization == pytest.approx(formed.totals.tokens / capacity)
    assert 0.9 < got.utilization <= 1
    assert got.bin_balance > 0.9, "a full pack of 128 tokens is no heavier than a full one of 32"


def test_the_end_is_estimated_with_the_room_of_the_stages_to_come() -> None:
    run = live()
    run.read(10)
    pace = pace_of(run.feed)
    assert pace is not None
    estimated = pace.step + steps_of(run.feed, pace, sum(LENGTHS) - pace.tokens)
    assert estimated == pytest.approx(len(run.finish()), abs=2)


def test_the_next_stage_and_the_one_in_force_are_figures() -> None:
    run = live()
    run.read(3)
    before = changes_status(run.feed)
    run.read(25)
    after = changes_status(run.feed)
    assert (before.in_force.stages, before.next_step) == ({"start": 1}, 20)
    assert (after.in_force.stages, after.next_step) == ({"long": 1}, None)
    assert (before.in_force.budget, after.in_force.budget) == (32, 128)
