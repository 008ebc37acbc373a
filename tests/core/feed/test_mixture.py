"""The mixture that was trained: whatever is killed and wherever trainers go, it is that of the recorded steps."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from streampack.core.journal.log_records import StepFormed
from streampack.core.model.rule_changes import Restream, Reweigh, Skip
from streampack.core.model.rules import Rules, StreamRules
from streampack.core.model.samples import ROW
from streampack.core.protocol.trainer_messages import MixedStream
from streampack.core.stats.displacement import Displacement
from tests.world.live import Live
from tests.world.planned import Data

DATA: Data = {
    "web": [[30, 28, 31, 29] * 12, [32, 27, 0, 30] * 12],
    "code": [[2, 1, 3, 2, 4] * 30],
    "math": [[8, 2, 10] * 20, [6, 6, 15, 1] * 12],
}
RULES = Rules(
    budget=32, packs=2, window=6, seed=3, streams=(StreamRules("web", 0.3, 2), StreamRules("code", 0.7, 1)),
)  # fmt: skip
MATH = StreamRules("math", 0.5, 2)


def recorded(live: Live, upto: int) -> dict[str, tuple[int, int]]:
    """Return (samples, tokens) of each stream in the recorded steps before ``upto`` that are not skipped."""
    steps = {record.step: record for record in live.records() if isinstance(record, StepFormed)}
    kept = [each for step, each in steps.items() if step < upto and not live.feed.history.is_skipped(step)]
    rows = np.concatenate([np.zeros(0, ROW), *(np.frombuffer(each.rows, ROW) for each in kept)])
    lengths = [
        rows["length"][rows["stream"] == number] for number in range(len(live.feed.latest_rules.streams))
    ]  # fmt: skip
    names = [stream.name for stream in live.feed.latest_rules.streams]
    return {name: (len(each), int(each.sum())) for name, each in zip(names, lengths, strict=True)}


def mixture(live: Live) -> dict[str, MixedStream]:
    return {row.stream: row for row in live.feed.mixture()}


def trained(live: Live) -> dict[str, tuple[int, int]]:
    return {name: (row.trained_samples, row.trained_tokens) for name, row in mixture(live).items()}


def finish(live: Live) -> int:
    """Read to the end, until the rank has returned the last step; return the number of steps."""
    live.until(lambda: live.feed.steps.released_upto == live.ended)
    assert live.ended is not None
    return live.ended


MOVES = st.lists(
    st.tuples(st.sampled_from(["read", "read", "weights", "kill", "back", "add", "remove"]), st.integers(0, 8)),
    max_size=10,
)  # fmt: skip


@given(MOVES, st.integers(0, 999))
@settings(max_examples=15)
def test_every_returned_step_counts_once_through_restarts_and_returns_to_checkpoints(
    story: list[tuple[str, int]], seed: int
) -> None:
    live = Live(RULES, DATA, seed)
    for what, n in story:
        if what == "read":
            live.read(live.had + n)
        elif what == "kill":
            live.start_broker()
        elif what == "back":
            live.go_back(max(live.had - n, 0))
        elif what == "add":
            if not live.ask(Restream(add=(MATH,))).refusal:
                live.start_producer(["math"])
        else:
            live.ask(Reweigh({"code": 0.0 if what == "remove" else (n + 1) / 10}))
        assert trained(live) == recorded(live, live.feed.history.trained.upto)
    num_steps = finish(live)
    assert trained(live) == recorded(live, num_steps)


@given(st.lists(st.tuples(st.sampled_from(["read", "kill", "back", "weights"]), st.integers(0, 8)), max_size=6))
@settings(deadline=None, max_examples=10)
def test_packs_in_merge_order_displace_no_sample_wherever_the_feed_goes(story: list[tuple[str, int]]) -> None:
    live = Live(replace(RULES, packer="concatenative"), DATA)
    for what, n in story:
        if what == "read":
            live.read(live.had + n)
        elif what == "kill":
            live.start_broker()
        elif what == "back":
            live.go_back(max(live.had - n, 0))
        else:
            live.ask(Reweigh({"code": (n + 1) / 10}))
        assert live.feed.planner.displacements.latest in (None, Displacement())
    finish(live)
    assert live.feed.planner.displacements.latest in (None, Displacement())


@given(st.integers(0, 99), st.integers(0, 9), st.integers(0, 3), st.booleans())
@settings(max_examples=8)
def test_a_skipped_step_was_not_trained(seed: int, first: int, more: int, killed: bool) -> None:
    live = Live(RULES, DATA, seed)
    live.read(1)
    first = live.feed.next_step + first
    assert not live.ask(Skip(first, first + more)).refusal
    if killed:
        live.start_broker()
    num_steps = finish(live)
    assert trained(live) == recorded(live, num_steps)
    assert live.feed.history.is_skipped(first)
    assert first < num_steps


def test_weights_of_a_stream_that_has_ended_go_to_the_others_and_shares_are_of_what_was_trained() -> None:
    live = Live(RULES, DATA)
    live.read(4)
    before = mixture(live)
    assert (before["web"].share, before["code"].share) == (0.3, 0.7)
    assert not before["code"].ended
    live.until(lambda: mixture(live)["code"].ended)
    after = mixture(live)
    assert (after["code"].share, after["code"].weight) == (0.0, 0.7)
    assert (after["web"].share, after["web"].ended) == (1.0, False)
    finish(live)
    rows, total = mixture(live), sum(sum(part) for parts in (DATA["web"], DATA["code"]) for part in parts)
    assert rows["web"].trained_tokens == sum(map(sum, DATA["web"]))
    assert rows["web"].trained_share == rows["web"].trained_tokens / total
    assert all(row.ended and row.share == 0.0 for row in rows.values())


def test_a_new_weight_is_shown_when_it_is_in_force() -> None:
    live = Live(RULES, DATA)
    live.read(1)
    live.ask(Reweigh({"web": 0.7}), live.feed.next_step + 1)
    row = mixture(live)["web"]
    assert (row.weight, row.share) == (0.3, 0.3)
    live.until(lambda: mixture(live)["web"].share != 0.3)
    assert (mixture(live)["web"].weight, mixture(live)["web"].share) == (0.7, 0.5)
