"""When snapshots are taken: often enough that a killed broker forms little again, and no more often than that is worth.

Runs are the real broker's, with a log, kills and trainers that go back; what is said of them is read in their logs.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streampack.core.feed.planner import SNAPSHOT_WINDOWS
from streampack.core.journal.log_records import SnapshotTaken, StepFormed
from streampack.core.model.rules import Rules, StreamRules
from tests.world.live import Live
from tests.world.planned import Data

DATA: Data = {"web": [[7, 3, 12, 9, 5, 16, 2, 8] * 20, [11, 4, 0, 6, 13] * 24], "code": [[5, 9, 14, 3] * 50]}
AT_HAND = 4096
"""Tokens of each partition that may wait for the merge: it is held up by no producer."""
STEPS_AHEAD = 3
"""Steps that ``Live`` has formed for a rank that has not returned them."""


def all_rules() -> st.SearchStrategy[Rules]:
    """Windows and steps of any size beside each other: steps of up to 60 samples, windows of up to 16."""

    def rules(window: int, packs: int) -> Rules:
        streams = StreamRules("web", 0.7, 2), StreamRules("code", 0.3, 1)
        return Rules(budget=32, packs=packs, window=window, seed=3, streams=streams)

    return st.builds(rules, st.integers(1, 16), st.integers(1, 14))


def stories() -> st.SearchStrategy[list[tuple[str, int]]]:
    return st.lists(st.tuples(st.sampled_from(["read", "turns", "kill", "back"]), st.integers(0, 6)), max_size=8)


def due_after(held: int, rules: Rules) -> int:
    """So many samples are in steps after a snapshot that holds so many when the next one is due."""
    return max(SNAPSHOT_WINDOWS * rules.max_window, held)


def do(live: Live, what: str, n: int) -> None:
    """One thing that happens to a run."""
    if what == "read":
        live.read(live.had + n)
    elif what == "turns":
        for _ in range(9 * n):
            live.turn()
    elif what == "kill":
        live.start_broker()
    else:
        live.go_back(max(live.had - n, 0))


@given(all_rules(), st.integers(0, 999), stories(), st.booleans())
def test_a_snapshot_is_taken_once_four_windows_and_as_many_samples_as_the_last_holds_are_in_steps_after_it(
    rules: Rules, seed: int, story: list[tuple[str, int]], slow_packer: bool
) -> None:
    """Whoever is killed or goes back meanwhile: no more are taken for that, nor fewer."""
    live = Live(rules, DATA, seed, quota=AT_HAND, slow_packer=slow_packer)
    for what, n in story:
        do(live, what, n)
    num_steps = len(live.finish())
    since, due = 0, due_after(0, rules)
    for record in live.records():
        if isinstance(record, StepFormed):
            assert since < due or record.step == num_steps - 1, f"step {record.step}: {since} samples, no snapshot"
            since += record.num_samples
        elif isinstance(record, SnapshotTaken):
            assert since >= due, f"a snapshot at step {record.snapshot.step}, {since} samples after the last"
            since, due = 0, due_after(record.snapshot.form.num_samples, rules)


@given(all_rules(), st.integers(0, 999), st.integers(1, 40), st.booleans())
def test_a_killed_broker_merges_again_four_windows_or_what_was_held_and_a_few_steps(
    rules: Rules, seed: int, steps: int, slow_packer: bool
) -> None:
    """And not all that there ever was: what it merges again, it reads again."""
    live = Live(rules, DATA, seed, quota=AT_HAND, slow_packer=slow_packer)
    live.read(steps)
    merged, held = live.feed.planner.merge.current.position, len(live.feed.planner.former.held())
    step = max(record.num_samples for record in live.records() if isinstance(record, StepFormed))
    live.start_broker()
    planner = live.feed.planner
    in_snapshot = len(planner.former.held())
    again = merged - planner.merge.current.position + in_snapshot
    assert again <= due_after(in_snapshot, rules) + (1 + STEPS_AHEAD) * step + held
