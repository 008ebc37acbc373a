"""The step at which a stage that waits for tokens is likely to begin, compared with a count step by step."""

from hypothesis import given
from hypothesis import strategies as st
from streampack_services.broker.changes.begin_estimate import estimate

from streampack.core.model.keys.planning_keys import Warmup
from streampack.core.model.keys.stage_keys import Stage, StageBegin, StageRules
from streampack.core.model.rule_changes import Scheduled, apply_change
from streampack.core.model.rules import Rules, StreamRules

RULES = Rules(budget=64, packs=4, streams=(StreamRules("web"),))


def stage(number: int, at: StageBegin, **rules: object) -> Scheduled:
    return Scheduled(number, Stage(at=at, rules=StageRules(**rules)), at)  # type: ignore[arg-type]


@given(st.integers(0, 9_000), st.integers(0, 9_000), st.integers(0, 90), st.integers(1, 60), st.integers(0, 5_000))
def test_an_estimate_is_near_a_count_step_by_step(first: int, more: int, at: int, over: int, tokens: int) -> None:
    pending = [
        stage(0, StageBegin(step=at), packs=16, packs_ramp=Warmup(4, over)),
        stage(1, StageBegin(tokens=first), budget=128),
        stage(2, StageBegin(tokens=first + more), packs=8),
    ]
    found = estimate(RULES, pending, 0, tokens, 0.5)
    counted, rules, step, total, waits = dict[int, int](), RULES, 0, float(tokens), list(pending)
    while waits:
        for each in [each for each in waits if step >= (each.at.step or 0) and total >= (each.at.tokens or 0)]:
            counted[each.id] = step
            rules = apply_change(rules, each.ask, step)
            waits.remove(each)
        total, step = total + 0.5 * rules.packs_at(step) * rules.budget_at(step), step + 1
    assert found.keys() == {1, 2}
    assert all(abs(found[number] - counted[number]) <= 1 + counted[number] // 20 for number in found)


def test_a_change_that_will_not_take_effect_is_left_out() -> None:
    pending = [stage(0, StageBegin(step=1), warmup=Warmup(65, 3)), stage(1, StageBegin(tokens=1024))]
    assert estimate(RULES, pending, 0, 0, 1.0) == {1: 4}
    assert estimate(RULES, pending, 0, 0, 0.0) == {}, "nothing is known of the tokens of a step"
