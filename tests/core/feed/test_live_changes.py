"""Changes of a feed that runs: they hold from where they were recorded, whatever is killed and wherever trainers go."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from streampack.core.journal.history import KEPT_STEPS
from streampack.core.model.rule_changes import Restream, Reweigh, Skip
from streampack.core.model.rules import Rules, StreamRules
from streampack.core.protocol.effects import Answer
from tests.world.live import Live
from tests.world.planned import Data, planned

DATA: Data = {
    "web": [[7, 3, 12, 9, 5, 16, 2, 8] * 12, [11, 4, 0, 6, 13] * 15],
    "code": [[5, 9, 14, 3] * 30],
    "math": [[8, 2, 10] * 20, [6, 6, 15, 1] * 12],
}
ENDED_AND_BACK = [
    ("read", 0, 2), ("read", 5, 8), ("remove", 7, 8), ("read", 7, 7), ("read", 6, 4), ("read", 8, 8), ("later", 7, 9),
    ("later", 6, 3), ("later", 8, 9), ("back", 5, 9), ("turns", 4, 6), ("read", 3, 8),
]  # fmt: skip
"""Trainers that have had the end go back: the producers were told that nobody wants more, and are started again."""
FORMED_BEFORE_ATTACHED = [("later", 1, 1), ("moved", 0, 1), ("kill", 0, 1)]
"""The broker on the other host forms steps before the trainers bring a checkpoint with a change that has no position
yet."""
RULES = Rules(
    budget=32, packs=2, window=6, seed=3, streams=(StreamRules("web", 0.7, 2), StreamRules("code", 0.3, 1)),
)  # fmt: skip
MATH = StreamRules("math", 0.5, 2)


def moves() -> st.SearchStrategy[list[tuple[str, int, int]]]:
    names = ["read", "read", "weights", "later", "kill", "back", "add", "remove", "moved", "turns"]
    return st.lists(st.tuples(st.sampled_from(names), st.integers(0, 8), st.integers(1, 9)), min_size=2, max_size=12)


def do(live: Live, what: str, n: int, m: int) -> None:
    """One thing that happens to a run."""
    if what not in ("read", "turns", "kill") and live.has_moved:
        live.until(lambda: live.is_attached)  # what it knows comes with the checkpoint
    if what == "read":
        live.read(live.had + n)
    elif what == "turns":
        for _ in range(5 * n):
            live.turn()
    elif what in ("weights", "later"):
        answer = live.ask(Reweigh({"web": m / 10}), live.had + n if what == "later" else None)
        assert answer.refusal == "" or "removed" in answer.refusal or "has ended" in answer.refusal
        assert answer.refusal or (answer.step or 0) >= live.had
    elif what == "kill":
        live.start_broker()
    elif what == "back":
        live.go_back(max(live.had - n, live.begins))
    elif what == "add":
        if not live.ask(Restream(add=(MATH,))).refusal:
            live.start_producer(["math"])
    elif what == "remove":
        live.ask(Reweigh({"code": 0.0}))
    elif what == "moved":  # another host: nothing but the checkpoint is left
        state = live.state(live.had)
        live.start_broker(lost=True)
        live.has_moved, live.begins = True, live.had  # what was changed before, and what came after, is not known here
        live.chains = {at: chain for at, chain in live.chains.items() if at[1] < live.had}
        live.go_back(live.had, state)


@given(moves(), st.integers(0, 999))
@example(ENDED_AND_BACK, 228)
@example(FORMED_BEFORE_ATTACHED, 0)
def test_every_step_is_what_an_offline_planner_gives_that_changes_its_rules_there(
    story: list[tuple[str, int, int]], seed: int
) -> None:
    live = Live(RULES, DATA, seed)
    for what, n, m in story:
        do(live, what, n, m)
    chains = live.finish()
    assert not live.errors
    assert chains == planned(RULES, DATA, [c for c in live.feed.history.changes if c.position >= 0])


@given(st.integers(0, 999), st.integers(0, 4), st.integers(0, 2))
@settings(max_examples=15)
def test_a_change_that_a_checkpoint_brings_holds_from_its_step_on_even_if_later_steps_were_formed(
    seed: int, had: int, later: int
) -> None:
    """The broker on another host forms steps ahead before the trainers attach with the checkpoint. No rank had them."""
    live = Live(RULES, DATA, seed)
    live.read(had)
    answer = live.ask(Reweigh({"web": 0.1}), live.feed.next_step + later)
    state = live.state(live.had)
    assert state.snapshot is not None
    live.stop_trainer()
    live.start_broker(lost=True)
    live.until(lambda: live.feed.next_step == 3)  # as many steps as it may be ahead
    live.chains.clear()
    live.begins = state.step
    live.go_back(state.step, state)
    live.until(lambda: live.ended is not None)
    [change] = live.changes()
    assert change.step == max(answer.step or 0, state.step)
    expected = planned(RULES, DATA, [change])
    assert {step: chain for (_, step), chain in live.chains.items()} == dict(
        enumerate(expected[state.step :], state.step)
    )
    assert not live.errors


@given(st.integers(0, 999), st.integers(1, 12), st.integers(0, 3), st.booleans())
def test_skipped_steps_are_passed_over_and_what_follows_is_unchanged(
    seed: int, first: int, more: int, killed: bool
) -> None:
    """After a loss spike: the trainers are stopped, and go back to before it, where the broker still has the steps or
    where it must form them again.
    """
    live, plain = Live(RULES, DATA, seed), planned(RULES, DATA, [])
    live.read(first + 2)
    refusal = live.ask(Skip(first, first + more)).refusal
    assert f"got step {first}, expected " in refusal, "ranks are attached that have had it"
    live.stop_trainer()
    live.until(lambda: not live.is_attached)
    assert live.ask(Skip(first, first + more)) == Answer(1, "train", first)
    if killed:
        live.start_broker()
    had = dict(live.chains)
    live.chains.clear()
    live.go_back(max(first - seed % 3, 0), chain=plain)
    live.until(lambda: live.ended is not None)
    served = {step for _, step in live.chains}
    begun = max(first - seed % 3, 0)
    assert served == set(range(begun, len(plain))) - set(range(first, first + more + 1))
    assert live.client is not None
    assert live.client.num_skipped == min(more + 1, len(plain) - first)
    assert all(chain == plain[step] for (_, step), chain in {**had, **live.chains}.items())


@given(st.integers(0, 999), st.integers(0, 12))
@settings(max_examples=10)  # long runs of one story: what differs is who comes first
def test_a_checkpoint_that_is_asked_for_late_has_nobody_go_back(seed: int, more: int) -> None:
    """The snapshot that a broker began from is read again for its state, long after memory has let go of it."""
    data = {name: [3 * lengths for lengths in partitions] for name, partitions in DATA.items()}
    live = Live(RULES, data, seed)
    live.read(10)
    live.start_broker()
    live.until(lambda: live.is_attached)
    begun, history = live.feed.readers.steps.released_upto, live.feed.history
    live.read(begun + KEPT_STEPS + 12 + more)
    at, _, kept = history.nearest(begun)
    assert at > 0, "it began from a snapshot"
    assert kept is None, "which is to be read again"
    state = live.state(begun)
    assert state.snapshot is not None
    assert state.snapshot.step == at
    assert live.finish() == planned(RULES, data, [])
    assert not live.errors
