"""The ledger of a run whose rules change: it knows the stage of each step, and that no sample is lost or repeated."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace
from streampack_services.audit.compare_runs import compare
from streampack_services.audit.verify import verify
from streampack_services.audit.why import why_step
from streampack_services.forecast.run_lengths import from_ledger
from streampack_services.ledger.formed_by import FormingRules
from streampack_services.ledger.run_history import FeedHistory
from streampack_services.log.log import Log
from streampack_services.plan.savings import savings, show_savings

from streampack.core.journal.log_records import Base, FeedFacts, Record
from streampack.core.model.capacity import needed_tokens
from streampack.core.model.keys.stage_keys import Stage, StageBegin, StageRules
from streampack.core.model.rule_changes import Cancel, Reweigh
from streampack.core.model.rules import Rules, StreamRules
from tests.services.recorded import ledger_of
from tests.world.live import Live
from tests.world.planned import Data
from tests.world.staged import StagedPlan

LONGEST = 96
DATA: Data = {
    "web": [[7, 3, 12, 90, 5, 16, 2, 8] * 9, [11, 4, 40, 6, 13] * 12],
    "code": [[5, 9, 14, 3, 61] * 20],
    "math": [[8, 2, 10] * 15],
}


def rules_of(*stages: Stage, overlong: str = "split", **keys: Any) -> Rules:
    streams = tuple(
        StreamRules(name, weight, len(DATA[name]), overlong=overlong)  # type: ignore[arg-type]
        for name, weight in (("web", 0.6), ("code", 0.3), ("math", 0.1))
    )
    return Rules(**{"budget": 32, "packs": 2, "window": 6, "seed": 3, "streams": streams, "stages": stages, **keys})


def long_stage(step: int = 6) -> Stage:
    """A budget that is four times as large, and another mixture, which comes in four steps."""
    rules = StageRules(budget=128, packs=1)
    return Stage(name="long", at=StageBegin(step=step), rules=rules, weights={"web": 0.5, "code": 0.5}, over=4)


SHORT = Stage(
    name="short", at=StageBegin(tokens=1800), rules=StageRules(budget=24, packs=4), weights={"math": 1, "web": 2}
)


def live(rules: Rules, seed: int = 1) -> Live:
    memory = needed_tokens(replace(rules, budget=128), LONGEST) + 800
    return Live(rules, DATA, seed, quota=400, memory=memory, longest=LONGEST)


budgets = st.permutations([16, 32, 96])


@given(budgets, st.sampled_from(["split", "truncate", "drop"]), st.integers(0, 99), st.integers(0, 9))
@example([96, 16, 32], "drop", 0, 8)  # a broker ends after a change, before all samples are rejected again
def test_a_run_whose_budget_changes_is_verified_after_kills_too(
    budgets: list[int], overlong: str, seed: int, killed: int
) -> None:
    stages = [Stage(at=StageBegin(step=5 * n), rules=StageRules(budget=each)) for n, each in enumerate(budgets[1:], 1)]
    run = live(rules_of(*stages, overlong=overlong, budget=budgets[0]), seed)
    for step in (killed, killed + 4):
        run.read(step)
        run.start_broker()
    run.finish()
    with ledger_of(run.records()) as ledger:
        verified = verify(ledger)
    assert (verified["named"], verified["good"]) == ([], True)
    assert verified["feeds"]["train"]["ended"]


@given(budgets, st.sampled_from(["split", "drop"]), st.sampled_from(["exact_fill", "sliding_ffd"]), st.integers(0, 99))
def test_the_ledger_tells_by_which_rules_each_step_was_formed(
    budgets: list[int], overlong: str, packer: str, seed: int
) -> None:
    stages = [
        Stage(at=StageBegin(step=4 * n), rules=StageRules(budget=each, packs=n + 1))
        for n, each in enumerate(budgets[1:], 1)
    ]
    rules = rules_of(*stages, overlong=overlong, budget=budgets[0], packer=packer, in_turn=packer == "exact_fill")
    run = live(rules, seed)
    run.finish()
    with ledger_of(run.records()) as ledger:
        forming = FormingRules(ledger, ledger.history.feeds["train"])
        for planned in StagedPlan(rules, DATA, LONGEST).plan():
            recorded = ledger.step("train", planned.number, 0)
            assert recorded is not None
            assert recorded.digest == planned.digest
            formed = forming.of(recorded).rules
            assert (formed.budget, formed.packs) == (planned.rules.budget, planned.rules.packs), planned.number


def test_why_names_the_stage_of_a_step_and_its_rules() -> None:
    run = live(rules_of(long_stage(), SHORT))
    ended = len(run.finish())
    with ledger_of(run.records()) as ledger:
        before, ramp, late, after = (why_step(ledger, step) for step in (5, 7, 11, ended - 1))
        begin = next(change.step for change in ledger.history.feeds["train"].rules if change.id == 1)
        changed = why_step(ledger, begin)
    assert before["stage"] == {
        "number": 0, "name": "start", "step": 0, "budget": 32, "packs": 2,
        "weights": {"web": 0.6, "code": 0.3, "math": 0.1}, "late": False,
    }  # fmt: skip
    assert (ramp["stage"]["number"], ramp["stage"]["name"], ramp["stage"]["step"]) == (1, "long", 6)
    assert (ramp["stage"]["budget"], ramp["stage"]["packs"], ramp["num_packs"]) == (128, 1, 1)
    assert ramp["stage"]["weights"]["math"] == pytest.approx(0.05)
    assert late["stage"]["weights"] == {"web": 0.5, "code": 0.5}
    assert (after["stage"]["name"], after["stage"]["budget"], after["num_packs"]) == ("short", 24, 4)
    assert [change["note"] for change in changed["changes"]] == ["stage short"]
    assert {"budget: 128 -> 24", "packs: 1 -> 4"} <= set(changed["changes"][0]["differences"])


def test_why_of_a_run_without_changes_has_no_stage() -> None:
    run = live(rules_of())
    run.read(3)
    with ledger_of(run.records()) as ledger:
        assert why_step(ledger, 0)["stage"] is None


def test_changes_that_are_to_come_or_were_canceled_are_in_the_history() -> None:
    run = live(rules_of(long_stage(5), Stage(at=StageBegin(step=900), rules=StageRules(packs=9))))
    run.ask(Reweigh({"web": 2}), 901)
    run.ask(Reweigh({"web": 3}), 902)
    run.ask(Cancel(3))
    run.read(7)
    records = run.records()
    base = records[0]
    assert isinstance(base, Base)
    cut = replace(base, feeds={"train": run.feed.history.facts(0)})
    for log in (records, list[Record]([cut])):
        with ledger_of(log) as ledger:
            history = ledger.history.feeds["train"]
            assert [(change.id, change.name) for change in history.pending] == [
                (1, "stage packs=9"),
                (2, "weights web=2"),
            ]
            assert set(history.canceled) == {3}
            assert [(change.id, change.step) for change in history.rules] == [(None, 0), (0, 5)]


def test_changes_of_one_step_hold_in_the_order_in_which_they_were_recorded() -> None:
    run = live(rules_of())
    run.ask(Stage(name="first", at=StageBegin(step=4), rules=StageRules(packs=3)))
    run.ask(Stage(name="second", at=StageBegin(step=4), rules=StageRules(packs=4)))
    run.read(8)
    facts: FeedFacts = run.feed.history.facts(0)
    base = run.records()[0]
    assert isinstance(base, Base)
    for log in (run.records(), list[Record]([replace(base, feeds={"train": facts})])):
        with ledger_of(log) as ledger:
            history: FeedHistory = ledger.history.feeds["train"]
            assert (history.rules_at(3).packs, history.rules_at(4).packs, history.rules_at(9).packs) == (2, 4, 4)


def test_compare_names_the_stage_that_differs() -> None:
    runs = [live(rules_of(long_stage(step)), 1) for step in (6, 8)]
    for run in runs:
        run.finish()
    with ledger_of(runs[0].records()) as one, ledger_of(runs[1].records()) as other:
        compared = compare(one, other, None)
    assert compared["step"] == 6
    assert "The rules differ: stages.long.at.step: 6 -> 8." in compared["why"]
    assert "Only the first run changed its rules at step 6: long." in compared["why"]


def test_compare_tells_where_the_same_change_began_in_each_run() -> None:
    runs = [live(rules_of(), seed) for seed in (1, 2)]
    for run, step in zip(runs, (5, 6), strict=True):
        run.ask(Reweigh({"web": 6}), step)
        run.finish()
    with ledger_of(runs[0].records()) as one, ledger_of(runs[1].records()) as other:
        compared, same = compare(one, other, None), compare(one, one, None)
    assert same["equal"]
    assert any(line.startswith(("weights web=6 began at step 5 (", "Only the first run")) for line in compared["why"])


@pytest.mark.parametrize("overlong", ["split", "drop"])
def test_steps_around_a_change_are_formed_again_from_the_log_up_to_their_record(overlong: str) -> None:
    run = live(rules_of(long_stage(), SHORT, overlong=overlong))
    chains = run.finish()
    log = list(run.disk.records)
    with ledger_of(run.records()) as ledger:
        lsns = {step.step: step.lsn for step in ledger.steps("train")}
    begins = [change.step for change in run.changes()]
    for step in sorted({begin + more for begin in begins for more in (-1, 0, 1, 2, 5)}):
        again = live(run.rules, seed=step)
        again.disk.records = log[: lsns[step] + 1]
        again.disk.safe_upto = len(again.disk.records)
        again.chains = {(0, number): chain for number, chain in enumerate(chains)}
        again.start_broker()
        again.feed.history.revisit(step)
        again.go_back(step, chain=chains)
        again.read(step + 1)
        assert not again.errors


def test_report_has_a_row_for_each_stage(tmp_path: Path) -> None:
    run = live(rules_of(long_stage(), SHORT))
    steps = len(run.finish())
    log = Log.open(tmp_path, durability="process", on_safe=lambda: None)
    for kind, body in run.disk.records:
        log.append(kind, [body])
    log.close()
    served = from_ledger(tmp_path, None)
    rows = served.stages
    assert [(row["name"], row["budget"]) for row in rows] == [("start", 32), ("long", 128), ("short", 24)]
    assert [row["steps"][0] for row in rows] == [0, 6, next(c.step for c in run.changes() if c.id == 1)]
    assert rows[-1]["steps"][1] == steps - 1
    assert sum(row["packs"] for row in rows) == served.packs
    assert all(0.8 < row["tokens"] / row["capacity"] <= 1 for row in rows[:2])
    report = savings(served, None, None)
    assert report["budget"] >= int(served.lengths.max())
    assert "The rules changed. The other ways have the same budget in all steps, 90 tokens." in report["assumptions"]
    with redirect_stdout(StringIO()) as shown:
        show_savings(report)
    assert "stage  " in shown.getvalue()
    assert len(served.order) == 10
    assert served.order[-1]["streams"]["code"]["weight_share"] == 0, "the stream pauses in the last stage"
