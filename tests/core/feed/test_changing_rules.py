"""Stages: a run whose rules change has the same steps whatever the speed of its processes, and whatever is killed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from streampack.core.feed import live_rules
from streampack.core.feed.live_rules import LiveRules
from streampack.core.feed.planner import Planner
from streampack.core.journal.history import History
from streampack.core.journal.log_records import ChangeCanceled, StepFormed
from streampack.core.journal.recorder import Recorder
from streampack.core.model.capacity import needed_tokens
from streampack.core.model.keys.planning_keys import Warmup
from streampack.core.model.keys.stage_keys import Stage, StageBegin, StageRules
from streampack.core.model.rule_changes import Cancel, Restream, Reweigh, apply_change
from streampack.core.model.rules import Batch, Rules, StreamRules
from tests.simulation.seeds import of_seeds
from tests.world.live import Live
from tests.world.planned import Data
from tests.world.staged import StagedPlan

LONGEST = 96
DATA: Data = {
    "web": [[7, 3, 12, 90, 5, 16, 2, 8] * 12, [11, 4, 40, 6, 13] * 15],
    "code": [[5, 9, 14, 3, 61] * 30],
    "math": [[8, 2, 10] * 20, [6, 6, 15, 33] * 12],
}


def staged(overlong: str, packer: str, window: int | str, stages: list[Stage]) -> Rules:
    streams = tuple(
        StreamRules(name, weight, len(DATA[name]), overlong=overlong)  # type: ignore[arg-type]
        for name, weight in (("web", 0.6), ("code", 0.3), ("math", 0.1))
    )
    packer_keys: dict[str, Any] = {"in_turn": True} if packer == "exact_fill" else {}
    keys: dict[str, Any] = {"window": window, "packer": packer, **packer_keys}
    return Rules(budget=32, packs=2, seed=3, streams=streams, stages=tuple(stages), **keys)


@st.composite
def changed(draw: st.DrawFn) -> StageRules:
    """The rules of a stage."""
    optional: dict[str, st.SearchStrategy[Any]] = {
        "budget": st.sampled_from([16, 32, 48, 96]), "packs": st.integers(1, 4), "window": st.integers(1, 9),
        "packer": st.sampled_from(["sliding_ffd", "first_fit_decreasing", "concatenative"]),
        "max_samples_per_pack": st.integers(1, 4),
    }  # fmt: skip
    keys = draw(st.fixed_dictionaries({}, optional=optional))
    if "packs" in keys and draw(st.booleans()):
        keys["packs_ramp"] = Warmup(draw(st.integers(1, 4)), draw(st.integers(1, 5)))
    return StageRules(**keys)


def mixtures() -> st.SearchStrategy[dict[str, float] | None]:
    return st.none() | st.dictionaries(st.sampled_from(list(DATA)), st.sampled_from([0.2, 0.5, 1.0]), min_size=1)


@st.composite
def feeds(draw: st.DrawFn) -> Rules:
    """Rules with up to three stages."""
    step, tokens, stages = 0, 0, list[Stage]()
    for number in range(draw(st.integers(1, 3))):
        step, tokens = step + draw(st.integers(0, 6)), tokens + draw(st.integers(1, 400))
        at = StageBegin(tokens=tokens) if draw(st.booleans()) else StageBegin(step=step)
        weights, over = draw(mixtures()), draw(st.sampled_from([0, 0, 3]))
        stages.append(Stage(name=f"stage{number}", at=at, rules=draw(changed()), weights=weights, over=over))
    overlong = draw(st.sampled_from(["split", "truncate", "drop"]))
    packer = draw(st.sampled_from(["exact_fill", "sliding_ffd", "first_fit_decreasing"]))
    windows: list[int | str] = [3, 6, "auto"]
    return staged(overlong, packer, draw(st.sampled_from(windows)), stages)


def live(rules: Rules, seed: int, slow_packer: bool = False) -> Live:
    memory = needed_tokens(rules, LONGEST) + (500 if rules.batch is None else 9 * LONGEST)
    return Live(rules, DATA, seed, quota=200, memory=memory, longest=LONGEST, slow_packer=slow_packer)


@settings(max_examples=15)
@given(feeds(), st.integers(0, 999), st.booleans())
def test_the_steps_of_stages_are_those_of_an_offline_plan(rules: Rules, seed: int, slow_packer: bool) -> None:
    run = live(rules, seed, slow_packer)
    assert run.finish() == [step.chain for step in StagedPlan(rules, DATA, LONGEST).plan()]
    assert not run.errors


def drawn_rules(rng: random.Random) -> StageRules:
    """Rules of a stage, of a seed."""
    draw: dict[str, Callable[[], Any]] = {
        "budget": lambda: rng.choice([16, 32, 48, 96]), "packs": lambda: rng.randint(1, 4),
        "window": lambda: rng.randint(1, 9), "max_samples_per_pack": lambda: rng.randint(1, 4),
        "packer": lambda: rng.choice(["sliding_ffd", "first_fit_decreasing", "concatenative"]),
    }  # fmt: skip
    keys = {key: value() for key, value in draw.items() if rng.random() < 0.25}
    if "packs" in keys and rng.random() < 0.4:
        keys["packs_ramp"] = Warmup(rng.randint(1, 4), rng.randint(1, 5))
    return StageRules(**keys)


def drawn_mixture(rng: random.Random) -> dict[str, float] | None:
    names = rng.sample(list(DATA), rng.randint(1, 3))
    return {name: rng.choice([0.2, 0.5, 1.0]) for name in names} if rng.random() < 0.5 else None


def drawn_feed(rng: random.Random) -> Rules:
    """Rules with up to two stages, of a seed."""
    step, tokens, stages = 0, 0, list[Stage]()
    for number in range(rng.randint(0, 2)):
        step, tokens = step + rng.randint(0, 6), tokens + rng.randint(1, 400)
        at = StageBegin(tokens=tokens) if rng.random() < 0.5 else StageBegin(step=step)
        over, weights = rng.choice([0, 0, 3]), drawn_mixture(rng)
        stages.append(Stage(name=f"stage{number}", at=at, rules=drawn_rules(rng), weights=weights, over=over))
    overlong, packer = rng.choice(["split", "truncate", "drop"]), rng.choice(["exact_fill", "sliding_ffd"])
    windows: list[int | str] = [3, 6, "auto"]
    return staged(overlong, packer, rng.choice(windows), stages)


def play(rng: random.Random, run: Live) -> None:
    """Ask for changes, cancel some, kill the broker, and go back."""
    for _ in range(rng.randint(1, 6)):
        if run.ended is not None:
            return
        what, n = rng.choice(["stage", "weights", "cancel", "kill", "back", "read"]), rng.randint(0, 9)
        if what == "stage":
            at, mixture = StageBegin(step=run.had + n), drawn_mixture(rng)
            run.ask(Stage(at=at, rules=drawn_rules(rng), weights=mixture, over=n % 3))
        elif what == "weights":
            run.ask(Reweigh({"web": n + 1}), run.had + n)
        elif what == "cancel":
            run.ask(Cancel(n))
        elif what == "kill":
            run.start_broker()
        elif what == "back":
            run.go_back(max(run.had - n, 0))
        run.read(run.had + n)


@of_seeds("0:30", 30, "STAGE_SEEDS")
def test_live_changes_hold_where_they_were_recorded(seeds: range) -> None:
    """Beside the stages of the rules, with kills of the broker, and trainers that go back."""
    for seed in seeds:
        rng = random.Random(seed)
        rules = drawn_feed(rng)
        if seed % 5 == 4:
            rules = replace(rules, batch=Batch(samples=7))
        run = live(rules, seed)
        play(rng, run)
        chains, changes = run.finish(), run.changes()
        planned = StagedPlan(rules, DATA, LONGEST, changes).plan()
        assert chains == [step.chain for step in planned], f"seed {seed}"
        assert not [text for text in run.errors if "does not take effect" not in text], f"seed {seed}"
        assert len({change.id for change in changes}) == len(changes), f"seed {seed}"
        canceled = run.feed.history.canceled
        assert not canceled & {change.id for change in changes}, f"seed {seed}"


def changed_rules(kills: bool) -> list[tuple[int, int, float]]:
    """The changes of a run in which one is canceled and one follows another: step, packs, weight of web."""
    run = live(staged("split", "exact_fill", 6, []), 1)
    run.ask(Stage(at=StageBegin(step=5), rules=StageRules(packs=3)))
    run.ask(Stage(at=StageBegin(step=9), rules=StageRules(window=3)))
    run.ask(Reweigh({"web": 5}), 8)
    run.ask(Cancel(1))
    for step in (3, 6, 9) if kills else ():
        run.read(step)
        run.start_broker()
    run.finish()
    assert not run.errors
    return [(change.step, change.rules.packs, change.rules.streams[0].weight) for change in run.changes()]


@pytest.mark.parametrize("kills", [False, True])
def test_a_canceled_change_never_acts_and_a_later_change_keeps_what_an_earlier_one_set(kills: bool) -> None:
    assert changed_rules(kills) == [(5, 3, 0.6), (8, 3, 5)]


def test_cancellations_that_a_restart_forgets_and_changes_of_the_first_rules_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as mutant:
        recover = Recorder.recover
        mutant.setattr(
            Recorder, "recover", lambda self, lsn, record: (
                None if isinstance(record, ChangeCanceled) else recover(self, lsn, record)
            ),
        )  # fmt: skip
        assert [step for step, *_ in changed_rules(kills=True)] == [5, 8, 9]
    first = staged("split", "exact_fill", 6, [])
    monkeypatch.setattr(live_rules, "apply_change", lambda rules, ask, step=0: apply_change(first, ask, step))
    assert changed_rules(kills=False)[-1] == (8, 2, 5)


def test_a_number_of_a_change_is_not_used_again_once_the_log_is_cut() -> None:
    run = live(staged("split", "exact_fill", 6, [Stage(at=StageBegin(step=900))]), 1)
    asked = [run.ask(Reweigh({"web": 2}), 6).id, run.ask(Reweigh({"web": 3}), 900).id]
    run.ask(Cancel(2))
    run.read(2)
    checkpoint = run.state(2).snapshot
    run.read(9)
    cut = History(run.rules, len(run.feed.planner.merge.current.merged_samples))
    cut.recover(run.feed.history.facts(0), 0)
    assert (asked, cut.next_id, [change.id for change in cut.pending]) == ([1, 2], 3, [0])
    assert checkpoint is not None
    assert [each.id for each in checkpoint.asked] == [1]
    assert cut.knows(checkpoint)


@settings(max_examples=15)
@given(feeds(), st.integers(0, 999), st.lists(st.tuples(st.sampled_from(["kill", "back", "moved"]), st.integers(0, 9))))
def test_kills_and_going_back_around_stages_change_no_step(
    rules: Rules, seed: int, story: list[tuple[str, int]]
) -> None:
    run = live(rules, seed)
    for what, n in story[:4]:
        run.read(run.had + n)
        if what == "kill":
            run.start_broker()
        elif what == "back":
            run.go_back(max(run.had - n, run.begins))
        elif run.ended is None:
            state = run.state(run.had)
            run.start_broker(lost=True)
            run.begins = run.had
            run.go_back(run.had, state)
            run.until(lambda: run.is_attached)
    assert run.finish() == [step.chain for step in StagedPlan(rules, DATA, LONGEST).plan()]
    assert not run.errors


@settings(max_examples=20)
@given(st.sampled_from(["exact_fill", "first_fit_decreasing", "concatenative"]), st.sampled_from([6, 30, "auto"]),
       st.integers(1, 6), st.integers(0, 99), st.booleans())  # fmt: skip
def test_a_stage_begins_at_its_step_also_where_a_packer_chooses_several_steps_at_once(
    packer: str, window: int | str, step: int, seed: int, is_live: bool
) -> None:
    stage = Stage(name="wide", at=StageBegin(step=step), rules=StageRules(packs=3))
    run = live(staged("split", packer, window, [] if is_live else [stage]), seed)
    if is_live:
        run.ask(stage)
    run.finish()
    packs = [len(record.counts_u32) // 4 for record in run.records() if isinstance(record, StepFormed)]
    assert packs == [2 if number < step else 3 for number in range(len(packs))]
    assert [(change.step, change.rules.packs) for change in run.changes()] == [(step, 3)]


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("packer", ["exact_fill", "first_fit_decreasing"])
def test_a_stage_that_becomes_due_within_a_step_begins_with_the_next(packer: str, is_slow: bool) -> None:
    """It was asked for at tokens that are passed, or a cancellation made it due."""
    early = (
        Stage(name="a", at=StageBegin(step=30)),
        Stage(name="b", at=StageBegin(tokens=10), rules=StageRules(packs=4)),
    )
    for seed in range(3):
        for stages in ((), early):
            run = live(staged("split", packer, 6, list(stages)), seed, is_slow)
            run.read(3)
            run.until(lambda run=run: run.feed.planner.has_begun)  # type: ignore[misc]
            ask = Cancel(0) if stages else Stage(at=StageBegin(tokens=1), rules=StageRules(packs=5))
            assert not run.ask(ask).refusal
            run.read(run.had + 2)
            run.go_back(2)
            chains = run.finish()
            assert chains == [step.chain for step in StagedPlan(run.rules, DATA, LONGEST, run.changes()).plan()]
            assert not run.errors


def test_a_stage_soon_after_a_smaller_budget_begins_at_one_place_whatever_the_speed() -> None:
    """Packs follow the smaller budget once longer samples have left, which may be where the next stage begins."""
    data = {name: [lengths * 3 for lengths in partitions] for name, partitions in DATA.items()}
    for seed in range(9):
        rng = random.Random(seed)
        packs, tokens = rng.randint(2, 6), rng.randint(300, 1500)
        growing = StageRules(packs=packs * 3, packs_ramp=Warmup(packs, rng.randint(2, 6)))
        shorter, other = StageRules(budget=rng.choice([16, 24]), packs=packs), StageRules(packer="sliding_ffd")
        ramp = Stage(name="ramp", at=StageBegin(step=rng.randint(2, 8)), rules=growing)
        short = Stage(name="short", at=StageBegin(tokens=tokens), rules=shorter, weights={"web": 0.5, "code": 0.5})
        at = StageBegin(tokens=tokens + rng.randint(50, 500))
        last = Stage(name="last", at=at, rules=other, weights={"web": 1.0}, over=rng.randint(1, 3))
        rules = staged("truncate", "first_fit_decreasing", rng.choice([12, 20, 32]), [ramp, short, last])
        rules = replace(rules, packs=packs)
        memory = needed_tokens(rules, LONGEST) + 1500
        run = Live(rules, data, seed, quota=300, memory=memory, longest=LONGEST, slow_packer=seed % 2 == 0)
        assert run.finish() == [step.chain for step in StagedPlan(rules, data, LONGEST).plan()], f"seed {seed}"


def test_a_stage_may_have_any_weights_beside_those_of_streams_that_pause() -> None:
    rules = staged("split", "exact_fill", 6, [])
    for over in (0, 4):
        run = live(rules, 1)
        for at, mixture in ((4, {"web": 5000.0}), (9, {"code": 9000.0, "math": 3.0}), (14, {"web": 2.0, "code": 1.0})):
            assert not run.ask(Stage(at=StageBegin(step=at), weights=mixture, over=over)).refusal
        run.read(6)
        run.start_broker()
        assert run.finish() == [step.chain for step in StagedPlan(rules, DATA, LONGEST, run.changes()).plan()]
        assert not run.errors
        assert [change.step for change in run.changes()] == [4, 9, 14]


def test_a_stream_that_is_removed_does_not_end_a_change_of_weights_over_steps() -> None:
    rules = staged("split", "exact_fill", 6, [])
    grown = apply_change(rules, Stage(at=StageBegin(step=0), weights={"web": 0.1, "code": 0.8, "math": 0.1}, over=10))
    before = grown.shares_at(4)
    for ask in (Reweigh({"math": 0.0}), Restream(remove=("math",))):
        after = apply_change(grown, ask, 4).shares_at(4)
        assert after[2] == 0
        assert after[0] / after[1] == pytest.approx(before[0] / before[1], rel=0.1)
    assert apply_change(grown, Reweigh({"web": 0.3}), 4).weights_ramp is None


def test_a_sample_of_a_new_stream_that_comes_before_its_stage_ends_the_feed_by_name() -> None:
    stages = (Stage(name="long", at=StageBegin(step=20), rules=StageRules(budget=96)),)
    rules = Rules(budget=32, packs=2, window=4, in_turn=True, streams=(StreamRules("web", 1.0, 1),), stages=stages)
    run = Live(
        rules, {"web": [[9, 20, 4] * 100], "new": [[8, 60, 30] * 20]}, 1, quota=400, memory=20000, longest=LONGEST
    )
    run.read(2)
    assert not run.ask(Restream(add=(StreamRules("new", 1.0, 1),)), 4).refusal
    run.start_producer(["new"])
    with pytest.raises(AssertionError, match="overlong: sample new:1: got 60 tokens before the stage whose budget"):
        run.finish()


def test_the_end_of_a_feed_names_stages_that_never_began_and_streams_that_pause() -> None:
    stages = [
        Stage(name="one", at=StageBegin(step=3), weights={"math": 1.0}),
        Stage(name="late", at=StageBegin(tokens=10**9)),
    ]
    run = live(staged("split", "exact_fill", 6, stages), 1)
    run.finish()
    [text] = [text for text in run.warnings if "has ended" in text]
    assert "before change 1 (late) at 1,000,000,000 tokens, and while web, code paused. Samples that are left" in text


def test_a_change_that_a_waiting_stage_does_not_allow_names_the_stage() -> None:
    stage = Stage(name="joint", at=StageBegin(step=900), weights={"web": 1.0})
    run = live(staged("split", "exact_fill", 6, [stage]), 1)
    refusal = run.ask(Reweigh({"web": 0.0}), 500).refusal
    assert refusal.startswith(
        "change 0 (joint), which begins at step 900, would not be possible then: got stream 'web'"
    )
    assert refusal.endswith("Cancel it first with 'streampack set --cancel 0'")


def growing(first: int) -> tuple[Rules, Data]:
    """A run whose budget grows at step 3, over samples of which one of ``first`` tokens comes early."""
    stages = (Stage(name="long", at=StageBegin(step=3), rules=StageRules(budget=96)),)
    streams = (StreamRules("web", 1.0, 2), StreamRules("code", 1.0, 1))
    rules = Rules(budget=32, packs=2, window=4, in_turn=True, streams=streams, stages=stages)
    return rules, {"web": [[first, *[9, 20, 4] * 12, 90, 40], [8, 30] * 9], "code": [[7] * 30 + [64, 96]]}


def test_samples_that_only_a_later_stage_can_hold_wait_for_it() -> None:
    rules, data = growing(12)
    for seed in range(5):
        run = Live(rules, data, seed, quota=600, memory=needed_tokens(rules, LONGEST) + 500, longest=LONGEST)
        assert run.finish() == [step.chain for step in StagedPlan(rules, data, LONGEST).plan()]
        assert not run.errors


def test_a_sample_whose_turn_comes_before_its_stage_ends_the_feed_by_name() -> None:
    rules, data = growing(40)
    run = Live(rules, data, 1, quota=600, memory=needed_tokens(rules, LONGEST) + 500, longest=LONGEST)
    with pytest.raises(AssertionError, match="overlong: sample web:0: got 40 tokens before the stage whose budget"):
        run.finish()


def is_planned(seed: int) -> bool:
    """Return whether a run with one stage has the steps of the offline plan."""
    rng = random.Random(seed)
    keys: dict[str, Any] = {"budget": rng.choice([16, 48, 96]), "packer": rng.choice(["exact_fill", "sliding_ffd"])}
    stage = Stage(name="next", at=StageBegin(step=rng.randint(1, 6)), rules=StageRules(**keys))
    rules = staged("split", "first_fit_decreasing", 6, [stage])
    expected = [step.chain for step in StagedPlan(rules, DATA, LONGEST).plan()]
    run = live(rules, seed)
    run.until(lambda: run.ended is not None or run.had > 30, turns=3000)
    return all(chain == expected[step] for (_, step), chain in run.chains.items())


@pytest.mark.parametrize(
    ("kind", "name", "mutant"),
    [
        (LiveRules, "is_strict", lambda self, next_step: False),
        (Planner, "_read_again", lambda self: []),
    ],
    ids=["the merge reads on", "pieces are cut when samples come"],
)
def test_without_a_rule_of_stages_steps_are_others(
    kind: type, name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = {seed: is_planned(seed) for seed in range(3)}
    assert all(plans.values())
    monkeypatch.setattr(kind, name, mutant)
    for seed in range(30):
        try:
            if not is_planned(seed):
                return
        except AssertionError:
            return
    pytest.fail("30 runs have the same steps without the rule")


def test_the_last_asked_of_two_changes_of_one_rule_at_one_step_holds_with_a_warning() -> None:
    rules = staged("split", "exact_fill", 6, [])
    run = live(rules, 1)
    for packs in (1, 3):
        run.ask(Stage(at=StageBegin(step=6), rules=StageRules(packs=packs)))
    run.finish()
    assert [change.rules.packs for change in run.changes()] == [1, 3]
    assert run.feed.planner.former.rules.packs == 3
    assert any("change 1 sets what change 0 (stage packs=1) sets at step 6, too" in text for text in run.warnings)
