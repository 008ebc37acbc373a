"""Who reads which rank, and when an attempt begins: every way in which trainers come, go, die and come back.

``Desk`` is a feed's readers with steps that are made up. Time moves by ``Desk.wait``, in which those that live ping.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from streampack.core.model.mesh import DynamicCp, ReadBy
from streampack.core.model.snapshot import Snapshot
from streampack.core.protocol.message import Bye, Envelope, Message, Reject, Who
from streampack.core.protocol.step_part import StepPart
from streampack.core.protocol.trainer_messages import (
    AskSnapshot,
    AskState,
    Attach,
    Attached,
    Brought,
    Commit,
    Committed,
    Fenced,
    Get,
    Probe,
    State,
    Wait,
)
from streampack.core.serve.attempts import NEWS_A_TICK
from streampack.core.serve.rank_registry import CLAIM_S, RESTART_S
from streampack.core.serve.readers import READER_SILENT_S
from streampack.core.stats.data_wait import Missing, Starvation
from tests.core.serve.desk import EPOCH, TICK_S, Desk, attach, ping, reading
from tests.world.made_up import chain_of, digest_of, snapshot_at

# Why a step is not there


def asking(start: int, done: int) -> Get:
    return Get(feed="train", lineage=0, start=start, stop=start + 2, done_upto=done, request=1)


def out_of_steps() -> tuple[Desk, int]:
    """Ranks that have returned all steps that there are, and how many."""
    desk = reading()
    desk.ahead, formed = 0, desk.readers.steps.formed_upto
    for name in ("a0", "a1"):
        desk.take(name, formed)
    desk.said.clear()
    return desk, formed


def test_ranks_that_nobody_holds_are_named_with_where_they_were() -> None:
    desk = Desk()
    assert (desk.readers.num_ranks, desk.readers.absent) == (0, "")
    desk.come("a0")
    assert (desk.readers.num_ranks, desk.readers.absent) == (2, "1 of 2 ranks are not there: dp=1 cp=0 tp=0 pp=0")
    desk.come("a1", rank=1)
    assert desk.readers.absent == ""
    desk.die("a1")
    desk.wait(READER_SILENT_S + 2.0)
    assert desk.readers.absent == "1 of 2 ranks are not there: dp=1 cp=0 tp=0 pp=0, which was at host-of-a1:1"


def test_a_rank_without_steps_hears_at_once_what_is_missing_and_one_with_steps_does_not() -> None:
    desk, upto = out_of_steps()
    fence = desk.attempt
    desk.say(b"a0", asking(upto, upto - 1), fence)
    assert not desk.heard("a0", Wait), "it has the step before"
    desk.say(b"a0", asking(upto, upto), fence)
    assert desk.heard("a0", Wait) == [Wait(feed="train", step=upto, reason="forming", detail="of samples", request=1)]
    desk.ahead = 1
    desk.form()
    desk.say(b"a1", asking(upto, upto), fence)
    assert desk.steps("a0") == desk.steps("a1") == [upto]
    assert not desk.heard("a1", Wait), "what is there is sent, and no more said"


def test_the_word_for_a_wait_is_a_new_one_once_a_step_was_formed() -> None:
    """All that wait are told the same, worked out once, but a step later it may be another stream."""
    desk, upto = out_of_steps()
    missing = iter([Missing("stream", "no sample of web", "web"), Missing("stream", "no sample of code", "code")])
    desk.waiting_for = lambda: next(missing)
    desk.readers.tick(desk.now)
    desk.said.clear()
    for name in ("a0", "a1"):
        desk.say(name.encode(), asking(upto, upto), desk.attempt)
        assert desk.heard(name, Wait)[-1].stream == "web"
    desk.ahead = 1
    desk.form()
    desk.ahead = 0
    desk.say(b"a0", asking(upto + 1, upto + 1), desk.attempt)
    assert desk.heard("a0", Wait)[-1].stream == "code"


def test_ranks_without_steps_hear_again_only_when_the_cause_of_their_wait_changes() -> None:
    desk, upto = out_of_steps()
    missing = Missing("forming", "of samples")
    desk.waiting_for = lambda: missing
    desk.readers.tick(desk.now)
    desk.say(b"a0", asking(upto, upto), desk.attempt)
    desk.say(b"a1", asking(upto, upto - 1), desk.attempt)
    for now, forming, heard in (
        (Missing("stream", "no sample of web", "web"), False, "web"),
        (Missing("stream", "none of web from another", "web"), False, None),
        (Missing("stream", "no sample of code", "code"), False, "code"),
        (Missing("forming", "of samples"), False, None),
        (Missing("forming", "of samples"), True, "forming"),
        (Missing("stream", "no sample of code", "code"), False, "code"),
    ):
        missing = now
        desk.said.clear()
        desk.perform(desk.readers.sender.tell_starving(forming))
        assert [w.stream or w.reason for w in desk.heard("a0", Wait)] == ([] if heard is None else [heard])
        assert not desk.heard("a1", Wait), "it has a step"
    desk.ahead = 1
    desk.form()
    desk.said.clear()
    missing = Missing("memory", "the arena is full")
    desk.perform(desk.readers.sender.tell_starving())
    assert not desk.said, "it has one again"


def test_the_same_stream_is_named_again_after_each_step_that_was_waited_for() -> None:
    """A step that is being packed when it is asked for may want the next chunk of the stream that the last one did."""
    desk, upto = out_of_steps()
    desk.ahead = 0
    for step in range(upto, upto + 3):
        missing = Missing("forming", "of samples")
        desk.waiting_for = lambda: missing  # noqa: B023
        desk.said.clear()
        desk.say(b"a0", asking(step, step), desk.attempt)
        missing = Missing("stream", "no sample of web", "web")
        desk.perform(desk.readers.sender.tell_starving(forming=False))
        assert [w.stream or w.reason for w in desk.heard("a0", Wait)] == ["forming", "web"]
        desk.say(b"a1", asking(step, step), desk.attempt)
        desk.ahead = 1
        desk.form()
        desk.ahead = 0


def test_a_rank_that_has_left_waits_for_nothing() -> None:
    desk, upto = out_of_steps()
    desk.say(b"a0", asking(upto, upto), desk.attempt)
    desk.say(b"a0", Bye())
    desk.said.clear()
    desk.waiting_for = lambda: Missing("log", "full")
    desk.perform(desk.readers.sender.tell_starving())
    assert not desk.said
    assert not desk.readers.receivers.starving, "nor is it kept for ever"


# Two processes and one rank


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("holder_ready", [True, False])
def test_a_rank_whose_holder_lives_is_refused_within_two_seconds_naming_both(ready: bool, holder_ready: bool) -> None:
    desk = Desk()
    desk.come("first", ready=holder_ready)
    desk.wait(1.0)
    second = desk.come("second", ready=ready)
    assert not desk.heard(second, Reject), "it may have died a moment ago"
    assert "host-of-first" in desk.heard(second, Wait)[-1].detail
    desk.wait(2.0)
    (refused,) = desk.heard(second, Reject)
    assert refused.code == "rank_taken"
    assert "host-of-first" in refused.detail
    assert "host-of-second" in refused.detail
    assert desk.readers.num_readers == 1


def test_a_refused_process_that_did_not_hear_it_is_refused_again() -> None:
    desk = Desk()
    desk.come("first")
    for _ in range(3):
        desk.come("second")
        desk.wait(2.0)
    assert len(desk.heard("second", Reject)) == 3
    assert desk.readers.link.refused == 3


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("gone_s", [0.25, 1.0, 2.75])
def test_a_rank_whose_holder_was_killed_is_taken_over_once_it_was_silent(ready: bool, gone_s: float) -> None:
    desk = reading()
    desk.die("a0")
    desk.wait(gone_s)
    desk.come("b0", 4, ready=ready)
    assert not desk.heard("b0", Attached)
    desk.wait(CLAIM_S + 2 * TICK_S - gone_s)
    assert desk.heard("b0", Attached)
    assert desk.readers.num_readers == 2


def test_a_rank_whose_holder_has_long_been_silent_is_taken_over_at_the_next_tick() -> None:
    desk = reading()
    desk.die("a0")
    desk.wait(CLAIM_S + 1)
    desk.come("b0", 4)
    desk.wait(TICK_S)
    assert desk.heard("b0", Attached)


def test_a_broker_that_hung_does_not_take_the_ranks_of_those_that_it_did_not_hear() -> None:
    """What they said meanwhile comes right after the tick, and a claim may come before it."""
    desk = reading()
    desk.now += 30 * CLAIM_S
    desk.come("b0", 4)
    desk.say(b"a0", ping("a0"))
    desk.say(b"a1", ping("a1"))
    desk.wait(3.0)
    assert desk.heard("b0", Reject)[0].code == "rank_taken"


@pytest.mark.parametrize(
    "word",
    [ping("a0", 6), Get(feed="train", lineage=0, start=0, stop=9, done_upto=6, request=7), attach("a0"), Bye()],
    ids=lambda word: type(word).__name__,
)
def test_a_process_whose_rank_was_taken_over_is_fenced_and_changes_nothing(word: Message) -> None:
    desk = reading()
    desk.take("a1", 6)
    desk.die("a0")
    desk.wait(CLAIM_S + 1)
    desk.come("b0", 4)
    desk.wait(1.0)
    before = desk.state()
    desk.say(b"a0", word, fence=desk.attempt)
    assert desk.state() == before
    desk.say(b"a0", attach("a0", 4), fence=desk.attempt)  # what a client says when it is asked who it is
    (fenced,) = desk.heard("a0", Fenced)[-1:]
    assert "host-of-b0" in fenced.detail
    assert "dp=0/2" in fenced.detail
    assert desk.state() == before


def test_a_silent_process_that_nobody_replaced_takes_its_rank_again() -> None:
    desk = reading()
    desk.die("a0")
    desk.wait(READER_SILENT_S + 1)
    assert desk.readers.num_readers == 1
    desk.come("a0", 4)
    assert not desk.heard("a0", Fenced)
    desk.take("a0", 6, 4)
    assert desk.steps("a0")[-2:] == [4, 5]


def test_a_silent_rank_is_named_with_its_seconds_and_only_one_that_left_needs_a_restart() -> None:
    desk = reading()
    steps = desk.readers.steps
    assert not steps.wait_for_ranks("peers").lost
    desk.die("a0")
    for more_s, silent_s in ((6.0, 5), (READER_SILENT_S, 20)):
        desk.wait(more_s)
        waits = steps.wait_for_ranks("peers", "the arena is full: ")
        assert waits.lost
        assert waits.detail.startswith("the arena is full: rank dp=0/2")
        assert "host-of-a0" in waits.detail
        assert f"has been silent for {silent_s} s, after 4 steps" in waits.detail
        assert "Training goes on when it is back" in waits.detail
    desk.come("a0", 4)
    assert not steps.wait_for_ranks("peers").lost
    desk.say(b"a0", Bye())
    waits = steps.wait_for_ranks("peers")
    assert waits.lost
    assert waits.detail.endswith("left after 4 steps: restart all ranks from a checkpoint")


def test_ranks_are_all_there_while_none_has_left() -> None:
    desk, seen = Desk(), []
    for name, rank, message in (("a0", 0, None), ("a1", 1, None), ("a1", 1, Bye()), ("b1", 1, None)):
        if message is None:
            desk.come(name, rank=rank)
        else:
            desk.say(name.encode(), message)
        seen.append((desk.readers.steps.all_there, desk.readers.steps.joined))
    assert seen == [(False, False), (True, True), (False, True), (True, True)], "what is formed is still served"


def test_the_wait_of_a_process_goes_on_where_it_comes_back_to_its_rank() -> None:
    """Its counts are of its whole life: none falls to nothing, and none of them is counted again."""
    desk = reading()
    said = Starvation(causes_s={"stream": 40.0}, waits=[3])
    desk.say(b"a0", structs.replace(ping("a0"), starvation=said, stats={"steps": 7.0}))
    desk.die("a0")
    desk.wait(READER_SILENT_S + 1)
    desk.come("a0", 4)
    row = next(row for row in desk.readers.steps.stats() if row.ranks[0] == 0)
    assert (row.starvation, row.stats) == (said, {"steps": 7.0})
    desk.say(b"a0", structs.replace(ping("a0"), starvation=Starvation(causes_s={"stream": 41.0}, waits=[4])))
    assert (desk.readers.steps.next_waits.sum, desk.readers.steps.next_waits.counts[0]) == (41.0, 4)
    desk.die("a0")
    desk.wait(READER_SILENT_S + 1)
    desk.come("other", 4)
    assert next(row.starvation for row in desk.readers.steps.stats() if row.ranks[0] == 0) is None


def test_a_process_that_said_goodbye_leaves_its_rank_to_the_next_at_once() -> None:
    desk = reading()
    desk.say(b"a0", Bye())
    desk.die("a0")
    desk.come("b0", 4)
    assert desk.heard("b0", Attached)
    desk.take("b0", 6, 4)
    assert desk.steps("b0") == [4, 5]


# In place


def test_a_process_that_takes_over_gets_the_same_steps_and_the_others_notice_nothing() -> None:
    desk = reading()
    desk.take("a0", 7, 4)
    desk.take("a1", 7, 4)
    expected = [part for part in desk.heard("a0", StepPart) if part.step >= 4]
    desk.die("a0")
    desk.wait(1.0)
    told = len(desk.heard("a1", Message))
    desk.come("b0", 4, ready=False)
    desk.wait(CLAIM_S)
    desk.say(b"b0", attach("b0", 4))
    desk.take("b0", 7, 4)
    assert desk.heard("b0", StepPart) == expected
    assert desk.attempt == 1
    assert not desk.rewinds
    assert len(desk.heard("a1", Message)) == told


def test_half_of_the_ranks_may_be_replaced_in_place_one_after_the_other() -> None:
    desk = reading(dp=4)
    desk.die("a0", "a2")
    desk.come("b0", 4, dp=4, rank=0)
    desk.wait(CLAIM_S + 1)
    desk.come("b2", 4, dp=4, rank=2)
    desk.wait(1.0)
    for name in ("b0", "a1", "b2", "a3"):
        desk.take(name, 6)
    assert desk.readers.steps.released_upto == 6
    assert desk.attempt == 1


def test_steps_that_a_rank_went_back_over_are_kept_for_ranks_that_have_not_come_back_yet() -> None:
    """All were killed, and the first that is back is ahead of the others: its steps must not be gone for them."""
    desk = reading(dp=2)
    for name in ("a0", "a1"):
        desk.take(name, 7, 4)
    desk.take("a1", 7, 7)
    desk.die("a0", "a1")
    desk.wait(CLAIM_S + 1)
    desk.come("b0", 4)
    desk.wait(TICK_S)
    desk.take("b0", 7)
    assert desk.readers.steps.released_upto == 4
    desk.come("b1", 4, rank=1)
    desk.wait(TICK_S)
    desk.take("b1", 7, 4)
    assert desk.steps("b1") == [4, 5, 6]
    desk.take("b1", 7)
    desk.wait(1.0)
    assert desk.readers.steps.released_upto == 7
    assert desk.attempt == 1


def test_a_rank_that_lives_while_another_is_replaced_holds_nothing_back() -> None:
    desk = reading(dp=2)
    desk.die("a0")
    desk.wait(CLAIM_S + 1)
    desk.come("b0", 4)
    desk.wait(2.0)
    desk.take("b0", 6)
    desk.take("a1", 6)
    assert desk.readers.steps.released_upto == 6


# All go back


@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize("ready_first", [True, False])
def test_trainers_that_were_all_killed_begin_again_where_their_checkpoint_says(step: int, ready_first: bool) -> None:
    desk = reading(upto=4)
    first = {part.step: part for part in desk.heard("a0", StepPart)}
    desk.die("a0", "a1")
    brought = snapshot_at(step) if step else None
    if not ready_first:
        desk.come_all("b", ready=False)
    desk.come_all("b", step, snapshot=brought)
    desk.wait(CLAIM_S + 1)
    assert desk.attempt == 2
    assert desk.rewinds == [(step, brought)]
    assert desk.readers.steps.released_upto == step
    assert [desk.heard(name, Attached)[-1].next_step for name in ("b0", "b1")] == [step, step]
    for name in ("b0", "b1"):
        desk.take(name, step + 3, step)
    assert [part.digest for part in desk.heard("b0", StepPart)] == [digest_of(n) for n in range(step, step + 3)]
    assert [part for part in desk.heard("b0", StepPart) if part.step in first] == [
        first[n] for n in range(step, min(step + 3, 4))
    ]


def test_the_earliest_step_that_a_rank_asks_for_is_where_all_begin_and_each_gets_its_own() -> None:
    desk = reading(upto=4)
    desk.die("a0", "a1")
    desk.wait(CLAIM_S + 1)
    desk.come("b0", 3)
    desk.come("b1", 2, rank=1)
    desk.wait(1.0)
    assert desk.rewinds == [(2, None)]
    desk.take("b0", 4, 3)
    desk.take("b1", 4, 2)
    assert desk.steps("b0") == [3]
    assert desk.steps("b1") == [2, 3]


def test_the_nearest_snapshot_that_ranks_bring_is_taken_and_none_that_is_too_late() -> None:
    desk = Desk()
    nearest = snapshot_at(19)
    desk.come("b0", 21, dp=4, snapshot=snapshot_at(21))
    desk.come("b1", 20, dp=4, rank=1, snapshot=snapshot_at(10))
    desk.come("b2", 20, dp=4, rank=2, snapshot=nearest)
    desk.come("b3", 20, dp=4, rank=3)
    assert desk.rewinds == [(20, nearest)]
    assert desk.readers.steps.released_upto == 20


def test_while_old_trainers_live_those_that_go_back_wait_and_are_refused_after_ten_seconds_naming_them() -> None:
    desk = reading(upto=4)
    desk.say(b"a0", Bye())
    desk.die("a0")
    desk.come("b0", 2)
    desk.wait(RESTART_S - 1)
    assert not desk.heard("b0", Reject)
    assert "1 of 2 ranks are not ready: dp=1 cp=0 tp=0 pp=0 at host-of-a1:1" in desk.heard("b0", Wait)[-1].detail
    desk.wait(2.5)
    (refused,) = desk.heard("b0", Reject)
    assert refused.code == "step_gone"
    assert "got a request to start at step 2, expected step 4 or later" in refused.detail
    assert "host-of-a1" in refused.detail
    assert desk.attempt == 1


def test_claims_of_trainers_that_go_back_are_refused_after_ten_seconds_too() -> None:
    desk = reading(upto=4)
    desk.come_all("b", 2)
    desk.wait(RESTART_S - 1)
    assert not desk.heard("b0", Reject) + desk.heard("b1", Reject)
    desk.wait(2.5)
    assert [desk.heard(name, Reject)[0].code for name in ("b0", "b1")] == ["step_gone", "step_gone"]
    desk.take("a0", 6, 4)
    assert desk.steps("a0")[-1] == 5, "the old ones read on"


def test_a_process_that_goes_on_while_it_claims_its_rank_begins_where_it_is_then() -> None:
    """It reads steps of an earlier broker that is cut off. The process that it replaced has done more, for a while."""
    desk = reading(upto=4)
    desk.die("a0")
    desk.come("b0", 2)
    desk.say(b"b0", attach("b0", 5))
    desk.say(b"b0", attach("b0", 3))  # an older message that comes late
    desk.wait(READER_SILENT_S + CLAIM_S)
    assert not desk.heard("b0", Reject)
    assert desk.attempt == 1
    desk.take("b0", 6, 5)
    assert desk.steps("b0")[:1] == [5]


def test_a_process_that_goes_on_with_other_steps_while_it_claims_its_rank_is_refused() -> None:
    desk = reading(upto=4)
    desk.die("a0")
    desk.come("b0", 2)
    desk.say(b"b0", structs.replace(attach("b0", 5), chain=b"of other steps !"))
    assert [refused.code for refused in desk.heard("b0", Reject)] == ["diverged"]


def test_old_trainers_that_take_a_while_to_die_are_waited_for() -> None:
    desk = reading(upto=4)
    desk.come_all("b", 2)
    desk.wait(5.0)
    desk.die("a0", "a1")
    desk.wait(CLAIM_S + 1)
    assert desk.attempt == 2
    assert desk.rewinds == [(2, None)]


def test_processes_that_live_may_all_go_back_in_a_later_iteration() -> None:
    """A trainer that loads a checkpoint and begins to iterate again."""
    desk = reading(upto=4)
    desk.say(b"a0", attach("a0", 1, iteration=1))
    assert (
        "iteration 1 waits, because 1 of 2 ranks are still in the previous iteration: dp=1"
        in desk.heard("a0", Wait)[-1].detail
    )
    desk.take("a1", 6, 5)
    assert desk.steps("a1")[-1] == 5
    desk.say(b"a1", attach("a1", 1, rank=1, iteration=1))
    assert desk.attempt == 2
    assert desk.rewinds == [(1, None)]
    assert desk.readers.attempts.iteration == 1
    desk.take("a0", 3, 1)
    assert desk.steps("a0")[-2:] == [1, 2]


def test_a_process_that_waits_for_the_next_iteration_and_died_takes_no_part_in_what_its_successor_asks_for() -> None:
    desk = reading()
    desk.say(b"a0", attach("a0", iteration=1))
    desk.say(b"a1", Bye())
    desk.die("a0", "a1")
    desk.come_all("b", 2)
    assert desk.attempt == 1, "a0 may be dead"
    desk.wait(CLAIM_S + 1)
    assert (desk.attempt, desk.readers.attempts.iteration) == (2, 0)
    assert [desk.fence(b"b0"), desk.fence(b"b1")] == [2, 2]


def test_ranks_that_wait_begin_once_a_claim_to_one_that_lives_is_refused() -> None:
    desk = Desk()
    desk.come("a0")
    desk.come("twice")
    desk.come("a1", rank=1)
    assert desk.attempt == 0
    assert desk.heard("a1", Wait)[-1].detail.startswith("all ranks are ready: host-of-twice:1 asks for rank dp=0/2")
    desk.wait(2.0)
    assert desk.heard("twice", Reject)
    assert desk.attempt == 1


def test_ranks_that_wait_begin_once_a_process_that_claimed_one_is_gone() -> None:
    desk = Desk()
    desk.come("a0")
    twice = desk.come("twice")
    desk.come("a1", rank=1)
    desk.say(twice, Bye())
    desk.die("twice")
    desk.take("a1", 2, 0)
    desk.wait(TICK_S)
    assert desk.attempt == 1


def test_ranks_that_wait_begin_once_a_claim_of_another_mesh_is_refused() -> None:
    desk = Desk()
    desk.come("a0")
    desk.come("four", dp=4, rank=3)
    desk.come("a1", rank=1)
    assert desk.attempt == 0
    desk.wait(2.0)
    assert desk.heard("four", Reject)
    assert desk.attempt == 1


def test_an_iteration_that_was_not_read_on_is_begun_again_without_going_back() -> None:
    desk = Desk()
    desk.come_all("a")
    for iteration in (1, 2):
        for rank in (0, 1):
            desk.say(b"a%d" % rank, attach(f"a{rank}", rank=rank, iteration=iteration))
    assert desk.attempt == 3
    assert not desk.rewinds


# Another mesh


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 1), (2, 1)])
@pytest.mark.parametrize("step", [2, 4, 5])
def test_another_mesh_takes_over_once_the_old_one_is_gone_and_gets_the_same_steps(
    before: int, after: int, step: int
) -> None:
    desk = reading(upto=4, dp=before)
    for rank in range(before):
        desk.take(f"a{rank}", 7, 4)
    desk.die(*(f"a{rank}" for rank in range(before)))
    desk.come_all("b", step, dp=after, ready=False)
    desk.wait(1.0)
    assert not desk.heard("b0", Attached)
    desk.wait(CLAIM_S)
    assert all(desk.heard(f"b{rank}", Attached) for rank in range(after))
    assert desk.attempt == 1, "nobody has begun"
    desk.come_all("b", step, dp=after)
    assert desk.attempt == 2
    assert desk.rewinds == ([(step, None)] if step < 4 else [])
    for rank in range(after):
        desk.take(f"b{rank}", 7, step)
        assert [part.digest for part in desk.heard(f"b{rank}", StepPart)] == [digest_of(n) for n in range(step, 7)]
    packs = [
        np.frombuffer(part.packs_u32, "<u4") for r in range(after) for part in desk.heard(f"b{r}", StepPart)
        if part.step == 6
    ]  # fmt: skip
    assert sorted(np.concatenate(packs).tolist()) == [0, 1, 2, 3]
    assert {part.num_loss_tokens for part in desk.heard("b0", StepPart) if part.step == 6} == {60}
    desk.say(b"a0", attach("a0", 4, dp=before))
    assert desk.heard("a0", Fenced)


def test_another_mesh_while_the_old_one_lives_is_refused_after_ten_seconds_naming_both() -> None:
    desk = reading(upto=4)
    desk.come("b0", 2, dp=4)
    desk.wait(RESTART_S - 1)
    assert not desk.heard("b0", Reject)
    assert "dp=0 cp=0 tp=0 pp=0 at host-of-a0:1" in desk.heard("b0", Wait)[-1].detail
    desk.wait(2.5)
    (refused,) = desk.heard("b0", Reject)
    assert refused.code == "mesh"
    assert "(4, 1, 1, 1)" in refused.detail
    assert "(2, 1, 1, 1)" in refused.detail
    assert "host-of-a" in refused.detail


@pytest.mark.parametrize("ready", [True, False])
def test_where_nothing_is_read_yet_another_mesh_is_a_mistake_and_refused_within_two_seconds(ready: bool) -> None:
    desk = Desk()
    desk.come("one", dp=2, ready=ready)
    desk.come("two", dp=4, rank=1, ready=ready)
    desk.come("three", dp=2, rank=1, ready=ready, readers=ReadBy(tp=(0,)))
    desk.wait(2.0)
    (two,), (three,) = desk.heard("two", Reject), desk.heard("three", Reject)
    assert (two.code, three.code) == ("mesh", "mesh")
    assert "(4, 1, 1, 1), expected (2, 1, 1, 1), the mesh of the reader at host-of-one:1" in two.detail
    assert "got readers tp=[0], expected all, as the reader at host-of-one:1 declared" in three.detail


def test_a_mesh_that_nobody_holds_any_more_gives_way_at_once() -> None:
    desk = reading(upto=4)
    for name in ("a0", "a1"):
        desk.say(name.encode(), Bye())
    desk.die("a0", "a1")
    desk.come_all("b", 4, dp=4)
    assert desk.attempt == 2
    assert not desk.rewinds


# Ready or not


def test_a_rank_that_is_not_ready_begins_no_attempt_and_is_sent_no_step() -> None:
    desk = Desk()
    desk.come_all("a", ready=False)
    desk.wait(5.0)
    assert desk.attempt == 0
    assert all(len(desk.heard(name, Attached)) == 1 for name in ("a0", "a1"))
    assert not desk.heard("a0", Wait), "it waits for nothing"
    desk.take("a0", 3, 0)
    assert desk.heard("a0", Who), "it believes that it has begun"
    desk.say(b"a0", attach("a0"))
    desk.take("a0", 3, 0)
    assert not desk.heard("a0", StepPart)
    assert "1 of 2 ranks are not ready: dp=1 cp=0 tp=0 pp=0 at host-of-a1:1" in desk.heard("a0", Wait)[-1].detail
    desk.say(b"a1", attach("a1", rank=1))
    assert desk.attempt == 1
    desk.take("a0", 3, 0)
    assert desk.steps("a0") == [0, 1, 2]


def test_a_rank_that_is_not_ready_causes_no_rewind_and_holds_nobody_back() -> None:
    desk = reading(upto=4)
    desk.die("a0")
    desk.wait(CLAIM_S + 1)
    desk.come("b0", ready=False)
    desk.wait(30.0)
    assert not desk.rewinds
    assert desk.attempt == 1
    assert desk.heard("b0", Attached)
    assert not desk.heard("b0", Reject)
    desk.take("a1", 6, 4)
    assert desk.steps("a1")[-2:] == [4, 5]


def test_a_rank_that_is_missing_is_named_with_the_host_that_it_had() -> None:
    desk = reading(upto=4)
    desk.die("a0", "a1")
    desk.wait(READER_SILENT_S + 2)
    desk.come("b0", 2)
    desk.wait(1.0)
    wait = desk.heard("b0", Wait)[-1]
    assert wait.reason == "join"
    assert wait.detail == "1 of 2 ranks are not ready: dp=1 cp=0 tp=0 pp=0, which was at host-of-a1:1"


# Copies and old news


@settings(max_examples=60)
@given(st.data())
def test_attaches_that_come_again_late_or_in_another_order_change_nothing(data: st.DataObject) -> None:
    """Each process says: here; ready; again ready where it was; and for a later round. All of it may be repeated."""
    desk = Desk()
    script: list[tuple[bytes, Attach]] = []
    for words in (
        [attach(f"a{rank}", rank=rank, ready=False) for rank in (0, 1)],
        [attach(f"a{rank}", rank=rank) for rank in (0, 1)],
        [attach(f"a{rank}", 2, rank=rank, iteration=1) for rank in (0, 1)],
    ):
        for rank, word in enumerate(words):
            script.append((b"a%d" % rank, word))
            desk.say(*script[-1])
        for name in ("a0", "a1"):
            desk.take(name, 6, 3)
        before = desk.state()
        for peer, word in data.draw(st.lists(st.sampled_from(script), max_size=8)):
            desk.say(peer, word, fence=data.draw(st.integers(0, desk.attempt)))
            assert desk.state() == before
    assert desk.attempt == 2


def test_messages_of_another_attempt_or_to_another_broker_change_nothing() -> None:
    desk = reading(upto=4)
    for fence, epoch in ((0, EPOCH), (desk.attempt + 1, EPOCH), (desk.attempt, EPOCH - 1)):
        before, told = desk.state(), len(desk.heard("a0", Attached))
        desk.say(b"a0", Get(feed="train", lineage=0, start=4, stop=9, done_upto=9, request=9), fence, epoch)
        assert desk.state() == before
        assert len(desk.heard("a0", Attached)) == told + 1, "and is answered with this one"


def test_a_process_that_connects_anew_is_served_there() -> None:
    desk = reading(upto=4)
    desk.say(b"new", attach("a0"), fence=1)
    desk.say(b"new", Get(feed="train", lineage=0, start=4, stop=5, done_upto=4, request=1), fence=1)
    assert desk.steps("new") == [4]
    assert not desk.readers.knows(b"a0")


# Other steps


@pytest.mark.parametrize("known", [True, False])
def test_readers_that_had_other_steps_are_refused_before_anything_is_served(known: bool) -> None:
    desk = reading(upto=4) if known else Desk(ahead=3)
    if known:
        desk.die("a0", "a1")
        desk.wait(READER_SILENT_S + 1)
    desk.come_all("b", 4, chain=b"other steps")
    if not known:
        assert desk.rewinds == [(4, None)]
        desk.perform(desk.readers.attempts.check(4, chain_of(4)))
    assert [desk.heard(name, Reject)[0].code for name in ("b0", "b1")] == ["diverged", "diverged"]
    assert not desk.steps("b0") + desk.steps("b1")
    assert desk.readers.num_readers == 0


def test_a_rank_further_on_whose_past_differs_is_refused_when_its_step_is_formed() -> None:
    desk = Desk(ahead=2)
    desk.come("b0", 0)
    desk.come("b1", 3, rank=1, chain=b"other steps")
    assert not desk.heard("b1", Reject)
    desk.take("b0", 2)
    assert desk.heard("b1", Reject)[0].code == "diverged"


# Checkpoints, and steps that are passed over


def test_states_and_commits_are_answered_to_whoever_asks_in_whatever_attempt() -> None:
    desk = reading(upto=4)
    desk.die("a0")
    desk.come("b0", 4, ready=False)
    for peer in (b"a1", b"b0"):
        desk.say(peer, AskState(feed="train", step=3), fence=77, epoch=1)
        desk.say(peer, Commit(feed="train", step=3), fence=0)
        assert desk.heard(peer, State)[0].chain == chain_of(3)
        assert desk.heard(peer, Committed)[0].step == 3


def test_a_commit_is_answered_when_it_is_noted_and_not_before() -> None:
    desk = reading(upto=4)
    desk.durable = False
    for peer, step in ((b"a0", 2), (b"a1", 4), (b"a0", 3)):
        desk.say(peer, Commit(feed="train", step=step))
    assert not desk.heard("a0", Committed)
    desk.perform(desk.readers.questions.committed(3))
    assert [done.step for done in desk.heard("a0", Committed)] == [3]
    assert not desk.heard("a1", Committed)
    desk.perform(desk.readers.questions.committed(4))
    assert [done.step for done in desk.heard("a1", Committed)] == [4]


def test_a_step_that_is_passed_over_comes_without_packs_and_counts() -> None:
    desk = Desk(ahead=3)
    desk.skipped.add(1)
    desk.come_all("a")
    for name in ("a0", "a1"):
        desk.take(name, 3, 2)
    (over,) = [part for part in desk.heard("a1", StepPart) if part.step == 1]
    assert (over.parts, over.micro_batches, over.frames, over.packs_u32) == (1, 0, [], b"")
    assert (over.digest, over.chain, over.num_loss_tokens) == (digest_of(1), chain_of(2), 10)
    assert desk.steps("a1") == [0, 1, 2]
    assert desk.readers.steps.released_upto == 2


def test_a_drain_is_told_to_those_that_wait_and_to_those_that_have_not_begun() -> None:
    desk = reading(upto=4)
    desk.die("a0")
    desk.wait(CLAIM_S + 1)
    desk.come("b0", ready=False)
    desk.come("b1", 4, rank=1)
    desk.wait(TICK_S)
    desk.perform(desk.readers.drain())
    assert desk.heard("b0", Bye)
    assert desk.heard("b1", Bye)
    assert not desk.heard("a1", Bye), "it gets what is formed"


# Anything

_NAMES = ["p", "q", "r", "s", "t", "u"]
_WORDS = st.one_of(
    st.tuples(
        st.just("attach"), st.sampled_from(_NAMES), st.sampled_from([(1, 0), (2, 0), (2, 1), (2, 0), (2, 1)]),
        st.integers(0, 8), st.integers(0, 1), st.booleans(),
    ),
    st.tuples(st.just("take"), st.sampled_from(_NAMES), st.integers(1, 4), st.integers(-1, 1), st.integers(0, 3)),
    st.tuples(st.just("die"), st.sampled_from(_NAMES)),
    st.tuples(st.just("bye"), st.sampled_from(_NAMES)),
    st.tuples(st.just("wait"), st.sampled_from([0.25, 1.0, 4.0, 16.0])),
)  # fmt: skip


def check(desk: Desk) -> None:
    """What holds whatever happens: fences, holders, steps."""
    readers = desk.readers
    held = readers.registry.held
    assert len({(r.mesh.sizes, r.readers) for r in held.values()}) <= 1, "two meshes at once"
    assert all(r.mesh.ranks == ranks and r.holds for ranks, r in held.items())
    assert not {r.name for r in readers.registry} & readers.registry.fenced.keys(), "a fenced process is still known"
    assert 0 <= readers.steps.released_upto <= readers.steps.formed_upto
    entered = {r.peer: r for r in readers.registry if r.entered}
    assert all(r.fence == desk.attempt and r.holds for r in entered.values())
    assert len(readers.steps.returned) in (0, readers.registry.num_ranks), "an attempt is of all ranks"
    fences = [e.fence for _, e in desk.said if isinstance(e.message, StepPart)]
    assert fences == sorted(fences), "a step of an attempt that is over went out"
    assert all(0 < fence <= desk.attempt for fence in fences)


@settings(max_examples=100)
@given(st.lists(_WORDS, max_size=40))
def test_one_process_holds_a_rank_and_a_job_can_always_begin_again_whatever_trainers_do(words: list[Any]) -> None:
    desk = Desk()
    for kind, *rest in words:
        if kind == "attach":
            name, (dp, rank), step, iteration, ready = rest
            desk.come(name, step, dp=dp, rank=rank, iteration=iteration, ready=ready)
        elif kind == "take":
            name, count, delta, request = rest
            at = max(desk.readers.steps.released_upto + delta, 0)
            desk.say(
                name.encode(),
                Get(feed="train", lineage=0, start=at, stop=at + count, done_upto=at, request=request),
            )
        elif kind == "wait":
            desk.wait(*rest)
        else:
            desk.alive.pop(rest[0], None)
            if kind == "bye":
                desk.say(rest[0].encode(), Bye())
        check(desk)
    desk.alive.clear()
    for name, step in (
        ("x", 3),
        ("y", 1),
    ):  # whatever it was, a job of new processes begins
        desk.wait(CLAIM_S + 1)
        desk.come_all(name, step, dp=4)
        desk.wait(1.0)
        for rank in range(4):
            desk.take(f"{name}{rank}", step + 2, step)
            assert desk.steps(f"{name}{rank}") == [step, step + 1]
        desk.alive.clear()
        check(desk)


def test_ranks_that_come_by_the_hundred_hear_within_a_tick_who_is_missing() -> None:
    desk = Desk(packs=4 * NEWS_A_TICK)
    for rank in range(3 * NEWS_A_TICK):
        desk.come(f"a{rank}", dp=4 * NEWS_A_TICK, rank=rank)
        assert desk.heard(f"a{rank}", Wait), "each is told something at once"
    desk.wait(1.5)
    missing = f"{NEWS_A_TICK} of {4 * NEWS_A_TICK} ranks are not ready: dp={3 * NEWS_A_TICK} "
    assert all(desk.heard(name, Wait)[-1].detail.startswith(missing) for name in desk.alive)


# Bytes on their way


PART = 4 * 16 * 4
"""Bytes of a step for the one rank: 4 packs of 16 tokens."""


def wide(dp: int = 1, leaving_bytes: int = 2 * PART) -> Desk:
    """Ranks whose steps are as large as packs are, of which only so many bytes may be on their way."""
    desk = Desk(ahead=6)
    desk.readers.receivers.flows.leaving_bytes = leaving_bytes
    desk.readers.steps.kept.num_bytes = lambda packs, mesh, frames, shards=1: PART  # type: ignore[method-assign]
    desk.come_all("a", dp=dp)
    return desk


def confirm(desk: Desk, name: str, upto: int, stop: int = 9, request: int = 0) -> None:
    desk.say(name.encode(), Get(feed="train", lineage=0, start=upto, stop=stop, done_upto=0, request=request))


def test_only_so_many_bytes_are_sent_as_are_not_confirmed() -> None:
    desk = wide()
    confirm(desk, "a0", 0)
    assert desk.steps("a0") == [0, 1]
    confirm(desk, "a0", 0)
    desk.wait(30.0)
    assert desk.steps("a0") == [0, 1, 2, 3, 4, 5], "pings confirm, too"
    assert desk.readers.receivers.flows.resent_bytes == 0
    desk = wide()
    confirm(desk, "a0", 0)
    confirm(desk, "a0", 1)
    assert desk.steps("a0") == [0, 1, 2]
    assert desk.readers.receivers.flows.queued_bytes == 2 * PART


def test_no_number_of_requests_has_anything_sent_twice_without_proof_of_loss() -> None:
    desk = wide(leaving_bytes=1 << 20)
    for _ in range(20):
        confirm(desk, "a0", 0)
        desk.now += 10.0
    assert desk.steps("a0") == [0, 1, 2, 3, 4, 5]
    confirm(desk, "a0", 2, request=1)
    assert desk.steps("a0") == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5]
    assert desk.readers.receivers.flows.resent_bytes == 4 * PART
    confirm(desk, "a0", 2, request=2)
    assert len(desk.steps("a0")) == 10, "one proof a second, where nothing is confirmed in between"


def test_ranks_that_share_the_memory_for_what_is_sent_have_their_turns() -> None:
    """At most one part is on its way to any of them: each is served when the one before has confirmed."""
    desk = wide(dp=4, leaving_bytes=1)
    for rank in range(4):
        confirm(desk, f"a{rank}", 0)
    assert [desk.steps(f"a{rank}") for rank in range(4)] == [[0], [], [], []]
    for rank in range(3):
        confirm(desk, f"a{rank}", 1)
    assert [desk.steps(f"a{rank}") for rank in range(4)] == [[0], [0], [0], [0]]
    confirm(desk, "a3", 1)
    assert [len(desk.steps(f"a{rank}")) for rank in range(4)] == [2, 1, 1, 1]
    desk.say(b"a0", Bye())
    desk.perform(desk.readers.tick(desk.now))
    assert [len(desk.steps(f"a{rank}")) for rank in range(1, 4)] == [2, 1, 1], "one that leaves gives up its turn"


def test_a_rank_that_asks_for_the_next_iteration_gives_up_its_turn() -> None:
    """It confirms nothing of the round before any more, and others wait for that."""
    desk = wide(dp=2, leaving_bytes=1)
    confirm(desk, "a0", 0)
    confirm(desk, "a1", 0)
    assert (desk.steps("a0"), desk.steps("a1")) == ([0], [])
    desk.say(b"a0", attach("a0", iteration=1))
    desk.perform(desk.readers.tick(desk.now))
    assert desk.steps("a1") == [0]


def test_a_part_that_the_router_dropped_is_sent_when_the_reader_is_heard_again() -> None:
    desk = wide(leaving_bytes=1 << 20)
    confirm(desk, "a0", 0)
    dropped = next(e for to, e in desk.said if isinstance(e.message, StepPart) and e.message.step == 3)
    desk.readers.receivers.not_sent(b"a0", dropped)
    assert desk.readers.receivers.flows.queued_bytes == 3 * PART
    desk.ahead = 12
    desk.form()
    assert desk.steps("a0") == [0, 1, 2, 3, 4, 5], "not at once: its connection may be gone"
    confirm(desk, "a0", 3)
    assert desk.steps("a0") == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8]


# Pings of thousands of ranks


def test_many_ranks_ping_less_often() -> None:
    desk = Desk()
    desk.readers.attempts.pings_a_second = 0.2
    peer, _ = desk.come_all("a")
    assert desk.heard(peer, Attached)[-1].ping_s == 10.0
    assert Desk().readers.attempts.ping_s == 1.0


def test_a_holder_that_pings_every_ten_seconds_is_asked_before_it_loses_its_rank() -> None:
    desk = Desk()
    desk.readers.attempts.pings_a_second = 0.2
    desk.come_all("a")
    for name in ("a0", "a1"):
        del desk.alive[name]  # no ping for a while: the interval is 10 s
    desk.wait(9.0)
    desk.come("b0", 0)
    for _ in range(20):
        desk.wait(0.25)
        if desk.heard("a0", Probe):
            desk.say(b"a0", ping("a0"))  # as a client does
    assert not desk.heard("a0", Fenced)
    assert [refused.code for refused in desk.heard("b0", Reject)] == ["rank_taken"]


def test_a_holder_that_is_dead_loses_its_rank_though_pings_are_rare() -> None:
    desk = Desk()
    desk.readers.attempts.pings_a_second = 0.2
    desk.come_all("a")
    desk.wait(2.0)
    desk.die("a0")
    desk.come("b0", 0)
    desk.wait(13.0)
    assert desk.heard("a0", Probe)
    assert desk.heard("b0", Attached)


RANKS = 16_384


def test_sixteen_thousand_ranks_restart_at_once() -> None:
    """All are killed, and come again before any is known to be gone."""
    desk = Desk(ahead=2, packs=RANKS)
    for n in range(RANKS):
        desk.perform(desk.readers.receive(b"a%d" % n, said(attach(f"a{n}", dp=RANKS, rank=n)), desk.now))
    assert desk.attempt == 1
    assert desk.readers.attempts.ping_s == 10.0
    desk.now += 2.0
    desk.said.clear()
    for n in range(RANKS):
        desk.perform(desk.readers.receive(b"b%d" % n, said(attach(f"b{n}", dp=RANKS, rank=n)), desk.now))
    kinds = Counter(type(envelope.message) for _, envelope in desk.said)
    assert kinds == {Wait: RANKS}, "none is refused"
    desk.said.clear()
    for _ in range(12):
        desk.now += 1.0
        desk.perform(desk.readers.tick(desk.now))
    kinds = Counter(type(envelope.message) for _, envelope in desk.said)
    assert kinds[Attached] == RANKS, "each takes its rank"
    assert not desk.readers.registry.claims
    assert kinds[Probe] <= 12 * RANKS
    assert not kinds[Reject]


def said(message: Message) -> Envelope:
    return Envelope(run=0, epoch=0, fence=0, message=message)


# Snapshots


def asked(desk: Desk) -> list[bytes]:
    """Who was asked for a snapshot."""
    return [to for to, envelope in desk.said if isinstance(envelope.message, AskSnapshot)]


def brought(taken: Snapshot) -> Brought:
    return Brought(feed="train", digest=taken.digest, snapshot=taken)


def test_one_rank_of_all_is_asked_for_the_snapshot_that_they_begin_with() -> None:
    desk, taken = Desk(), snapshot_at(19)
    desk.brings = False
    desk.come_all("b", 20, dp=4, snapshot=taken)
    assert asked(desk) == [b"b0"]
    desk.wait(20.0)
    desk.come("b1", 20, dp=4, rank=1, snapshot=taken)
    assert asked(desk) == [b"b0"], "only a rank that has sent nothing is asked again"
    assert desk.attempt == 0
    assert "snapshot" in desk.heard("b1", Wait)[-1].detail
    desk.say(b"b0", brought(taken))
    assert (desk.attempt, desk.rewinds) == (1, [(20, taken)])
    assert all(desk.heard(f"b{rank}", Attached)[-1].next_step == 20 for rank in range(4))


def test_a_rank_that_attaches_again_without_its_snapshot_is_asked_again_and_another_where_it_is_gone() -> None:
    desk, taken = Desk(), snapshot_at(19)
    desk.brings = False
    desk.come_all("b", 20, snapshot=taken)
    desk.come("b0", 20, snapshot=taken)
    assert asked(desk) == [b"b0"], "its answer may be on its way"
    desk.wait(3.0)
    desk.come("b0", 20, snapshot=taken)
    assert asked(desk) == [b"b0", b"b0"]
    desk.say(b"b0", Bye())
    desk.come("b1", 20, rank=1, snapshot=taken)
    assert asked(desk) == [b"b0", b"b0", b"b1"]
    desk.say(b"b1", brought(taken))
    desk.come("c0", 20, snapshot=taken)
    assert desk.rewinds == [(20, taken)]


def test_a_snapshot_that_is_not_the_one_that_was_asked_for_is_refused() -> None:
    desk, taken = Desk(), snapshot_at(19)
    desk.brings = False
    desk.come_all("b", 20, snapshot=taken)
    desk.say(b"b1", brought(snapshot_at(18)))
    assert not desk.heard("b1", Reject), "nobody has asked for that"
    desk.say(b"b0", Brought(feed="train", digest=taken.digest, snapshot=snapshot_at(18)))
    assert [refused.code for refused in desk.heard("b0", Reject)] == ["snapshot"]
    assert not desk.rewinds


def test_a_rank_that_is_not_ready_until_its_snapshot_is_there_begins_no_attempt_at_an_earlier_place() -> None:
    desk, taken = Desk(), snapshot_at(19)
    desk.brings = False
    desk.come("b0")
    desk.say(b"b0", attach("b0", 20, iteration=1, snapshot=taken))
    desk.come("b1", 20, rank=1, iteration=1, snapshot=taken)
    assert desk.attempt == 0
    desk.say(b"b0", brought(taken))
    assert (desk.attempt, desk.rewinds) == (1, [(20, taken)])


# Layouts


@pytest.mark.parametrize("dealt_by", ["contiguous", DynamicCp(rank_tokens=8, max_group=8).layout])
def test_a_rank_that_goes_on_with_steps_of_another_layout_is_refused(dealt_by: str) -> None:
    desk = Desk()
    peer = desk.come("a0", 3, going_on=0, dealt_by=dealt_by)
    (reject,) = [e.message for to, e in desk.said if to == peer and isinstance(e.message, Reject)]
    assert reject.code == "mesh"
    assert f"steps dealt by {dealt_by!r}, but feed 'train' has 'zigzag' now. Restart all trainers" in reject.detail
    peer = desk.come("a1", 3, rank=1, going_on=0, dealt_by="zigzag")
    assert not [e for to, e in desk.said if to == peer and isinstance(e.message, Reject)]
