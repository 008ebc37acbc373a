"""The three state machines, case by case: who may send and read what, and what each side is told.

No socket, clock or thread: events go in, effects come out.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack.core.intake.intake import MAX_UNMERGED
from streampack.core.intake.leases import PRODUCER_SILENT_S
from streampack.core.model.capacity import FeedPlan, needed_tokens
from streampack.core.model.keys.stream_keys import Overlong
from streampack.core.model.rules import Rules, StreamRules
from streampack.core.model.snapshot import Snapshot
from streampack.core.protocol.effects import (
    Drain,
    FromProducer,
    FromTrainer,
)
from streampack.core.protocol.events import Effect, Event, FromBroker, Send, Tick
from streampack.core.protocol.message import Bye, Envelope, Message, Reject, Who
from streampack.core.protocol.producer_messages import (
    Done,
    Eos,
    Flow,
    Hello,
    Lease,
    Offer,
    ProducerPing,
    Revoke,
    Samples,
    Sent,
)
from streampack.core.protocol.step_part import StepPart
from streampack.core.protocol.trainer_messages import AskSnapshot, Attached, Brought, End, ReaderPing, Wait
from streampack.core.sessions.producer_base import PING_S, Chunk, Failed, Finish, Leave
from streampack.core.sessions.producer_session import EndOfPartition, Forget, ProducerSession, Read, ReadFirst
from streampack.errors import InternalError
from streampack.wire import frames as wire
from tests.core.sessions.any_messages import EVENTS, SNAPSHOTS
from tests.core.sessions.bench import BUDGET, EPOCH, MAX_SAMPLE, QUOTA, RUN, Bench, attach, fill, get, hello
from tests.world.chunks import chunk_of, message_of
from tests.world.shell import M

# Readers


@pytest.mark.parametrize(
    ("dp", "cp", "words"), [(3, 1, ["dp=3", "4 packs", "1, 2, 4"]), (1, 2, ["cp=2", "align", "2 * cp = 4"])]
)
def test_a_mesh_that_the_rules_cannot_serve_is_refused_naming_both(dp: int, cp: int, words: list[str]) -> None:
    bench = Bench()
    bench.read(b"1", attach("r", dp=dp, cp=cp))
    (refused,) = bench.heard(b"1", Reject)
    assert refused.code == "mesh"
    assert all(word in refused.detail for word in words), refused.detail


def test_a_mesh_of_absurd_size_costs_nothing() -> None:
    bench = Bench()
    bench.read(b"1", attach("r", tp=4096, pp=4096))
    assert bench.heard(b"1", Reject)
    bench.read(b"1", attach("r", tp=4096, pp=32))
    bench.read(b"1", get(1))
    bench.handle(Tick(1.0))
    assert "131071 of 131072 ranks" in bench.heard(b"1", Wait)[-1].detail


def test_missing_ranks_are_named_and_nothing_is_served() -> None:
    bench = Bench()
    bench.produce(b"p", hello("p", "a", "b"))
    fill(bench)
    bench.read(b"1", attach("r", dp=2))
    bench.read(b"1", get(3))
    bench.handle(Tick(1.0))
    wait = bench.heard(b"1", Wait)[-1]
    assert wait.reason == "join"
    assert "1 of 2 ranks" in wait.detail
    assert "dp=1" in wait.detail
    assert not bench.heard(b"1", StepPart)


def test_a_stream_that_gives_nothing_is_named() -> None:
    bench = Bench()
    bench.produce(b"p", hello("p", "b"))
    bench.read(b"1", attach("r"))
    bench.read(b"1", get(1))
    bench.handle(Tick(1.0))
    wait = bench.heard(b"1", Wait)[-1]
    assert wait.reason == "stream"
    assert "'a' partition 0 of 2" in wait.detail
    assert "no producer offers it" in wait.detail


def test_a_feed_that_is_not_served_is_refused_naming_both() -> None:
    bench = Bench()
    bench.read(b"1", attach("r", feed="valid"))
    (refused,) = bench.heard(b"1", Reject)
    assert "'valid'" in refused.detail
    assert "'train'" in refused.detail


def serve_two_steps(bench: Bench) -> None:
    bench.produce(b"p", hello("p", "a", "b"))
    fill(bench)
    bench.read(b"1", attach("r"))
    bench.read(b"1", get(3))
    bench.read(b"1", get(4, start=3, done=2))
    assert bench.feed.readers.steps.released_upto == 2


def test_an_older_copy_of_attach_changes_nothing() -> None:
    bench = Bench()
    serve_two_steps(bench)
    bench.read(b"1", attach("r"))
    assert not bench.heard(b"1", Reject)
    assert len(bench.heard(b"1", Attached)) == 2
    assert bench.feed.readers.steps.released_upto == 2
    bench.read(b"1", get(4, start=2, done=2, request=1))
    assert bench.heard(b"1", StepPart)[-1].step == 3


def test_a_reader_whose_past_differs_is_refused_at_once_or_when_its_step_comes() -> None:
    at_once, later = Bench(), Bench()
    serve_two_steps(at_once)
    at_once.read(b"1", Bye())
    at_once.read(b"2", attach("other", next_step=2, chain=b"another past"))
    assert at_once.heard(b"2", Reject)[-1].code == "diverged"
    later.read(b"2", attach("other", next_step=2, chain=b"another past"))
    assert not later.heard(b"2", Reject)
    later.produce(b"p", hello("p", "a", "b"))
    fill(later)
    assert later.heard(b"2", Reject)[-1].code == "diverged"
    assert not later.heard(b"2", StepPart)


def test_reads_are_pure() -> None:
    bench = Bench()
    bench.produce(b"p", hello("p", "a", "b"))
    fill(bench)
    bench.read(b"1", attach("r"))
    bench.read(b"1", get(2))
    bench.read(b"1", get(2, request=1))
    first, second = bench.heard(b"1", StepPart)[:2], bench.heard(b"1", StepPart)[2:]
    assert [msgspec.structs.replace(part, request=1) for part in first] == second
    assert [part.step for part in first] == [0, 1]


def test_messages_of_another_attempt_change_nothing_and_are_answered_with_this_one() -> None:
    bench = Bench()
    serve_two_steps(bench)
    told = len(bench.heard(b"1", Attached))
    bench.read(b"1", get(64, start=4, done=4), fence=0)
    assert bench.feed.readers.steps.released_upto == 2
    assert len(bench.heard(b"1", Attached)) == told + 1


def test_a_rank_that_left_after_the_end_does_not_keep_the_others_from_it() -> None:
    bench = Bench(merged=1024)
    bench.produce(b"p", hello("p", "a", "b"))
    bench.read(b"1", attach("one", dp=2))
    bench.read(b"2", attach("two", dp=2, dp_rank=1))
    fill(bench)
    bench.read(b"1", get(8))
    bench.read(b"1", get(8, start=5, done=5))
    assert bench.heard(b"1", End)
    bench.read(b"1", Bye())
    bench.read(b"2", get(8))
    assert [part.step for part in bench.heard(b"2", StepPart)] == [0, 1, 2, 3, 4]
    assert bench.heard(b"2", End)


def test_a_farewell_counts_whatever_attempt_it_names() -> None:
    bench = Bench()
    bench.read(b"1", attach("r"))
    bench.read(b"1", Bye(), fence=0)
    assert bench.feed.readers.num_readers == 0


# Iterations


def in_two(merged: int = 1024, chunks: int = 6) -> Bench:
    """A feed of two ranks, both in its first iteration, each with two steps returned."""
    bench = Bench(merged=merged)
    bench.produce(b"p", hello("p", "a", "b"))
    for rank, peer in enumerate((b"0", b"1")):
        bench.read(peer, attach(f"r{rank}", dp=2, dp_rank=rank))
    fill(bench, chunks=chunks)
    for peer in (b"0", b"1"):
        bench.read(peer, get(3))
        bench.read(peer, get(3, start=3, done=2))
    assert bench.feed.readers.steps.released_upto == 2
    return bench


def again(bench: Bench, rank: int, iteration: int = 1, *, name: str = "", next_step: int = 0) -> None:
    """Rank ``rank`` of two asks for an iteration."""
    peer = name.encode() or b"%d" % rank
    bench.read(peer, attach(name or f"r{rank}", dp=2, dp_rank=rank, iteration=iteration, next_step=next_step))


def steps_of(bench: Bench, peer: bytes) -> list[tuple[int, bytes]]:
    return [(part.step, part.digest) for part in bench.heard(peer, StepPart)]


@pytest.mark.parametrize("returned", [0, 2, 5])
def test_each_iteration_has_the_steps_of_the_first(returned: int) -> None:
    """Wherever the one before was broken off."""
    bench = Bench(merged=1024)
    bench.produce(b"p", hello("p", "a", "b"))
    bench.read(b"1", attach("r"))
    fill(bench)
    bench.read(b"1", get(8))
    expected = steps_of(bench, b"1")
    assert [step for step, _ in expected] == [0, 1, 2, 3, 4]
    for iteration in (1, 2, 3):
        bench.read(b"1", get(8, start=5, done=returned))
        sessions = bench.sessions(b"p")
        bench.read(b"1", attach("r", iteration=iteration))
        assert bench.heard(b"1", Attached)[-1].iteration == iteration
        if returned:
            assert all(bench.sessions(b"p")[key] > session for key, session in sessions.items())
            assert {lease.first_seq for lease in bench.heard(b"p", Lease)[-3:]} == {0}
            fill(bench)
        bench.read(b"1", get(8))
        assert steps_of(bench, b"1") == expected * (iteration + 1)
        assert bench.heard(b"1", End)[-1].num_steps == 5


def test_an_iteration_begins_when_the_last_rank_comes_to_it() -> None:
    bench = in_two()
    again(bench, 0)
    assert bench.feed.readers.attempts.iteration == 0
    wait = bench.heard(b"0", Wait)[-1]
    assert (wait.step, wait.reason) == (0, "join")
    assert wait.detail == (
        "iteration 1 waits, because 1 of 2 ranks are still in the previous iteration: dp=1 cp=0 tp=0 pp=0 at r1-host:1"
    )
    bench.read(b"1", get(8, start=3, done=3))
    assert bench.heard(b"1", StepPart)[-1].step == 4, "the other holds it back no longer"
    assert bench.feed.readers.steps.released_upto == 3
    again(bench, 1)
    assert bench.feed.readers.attempts.iteration == 1
    assert bench.feed.readers.steps.released_upto == 0
    assert [bench.heard(peer, Attached)[-1].iteration for peer in (b"0", b"1")] == [1, 1]


def test_messages_of_the_iteration_before_change_nothing() -> None:
    bench = in_two()
    again(bench, 0)
    before = len(bench.heard(b"0", StepPart))
    bench.read(b"0", get(5, start=3, done=3))
    assert bench.heard(b"0", Who), "it believes to be in the iteration that it has left"
    bench.read(b"0", attach("r0", dp=2, dp_rank=0))  # an older copy
    again(bench, 1)
    fill(bench)
    bench.read(b"0", get(5, start=3, done=3), fence=1)
    assert len(bench.heard(b"0", StepPart)) == before
    assert bench.feed.readers.steps.released_upto == 0
    assert bench.feed.readers.attempts.iteration == 1


def test_samples_of_the_iteration_before_are_revoked_and_not_taken() -> None:
    bench = in_two()
    sessions = bench.sessions(b"p")
    again(bench, 0)
    again(bench, 1)
    revoked = len(bench.heard(b"p", Revoke))
    for key, session in sessions.items():
        bench.samples(b"p", key, 0, [4, 5], session)
        bench.produce(b"p", Eos(stream=key[0], partition=key[1], total=0), session)
    assert bench.taken == [0, 0, 0]
    assert len(bench.heard(b"p", Revoke)) == revoked + 2 * len(sessions)


def test_nothing_is_read_on_while_a_rank_is_gone_between_two_iterations() -> None:
    """All have left the first one, and one of them the job: it may come back to either."""
    bench = in_two(merged=4096, chunks=40)
    formed = bench.feed.readers.steps.formed_upto
    assert formed > 5
    again(bench, 0)
    bench.read(b"0", Bye())
    again(bench, 1)
    bench.handle(Tick(1.0))
    assert bench.feed.readers.steps.released_upto == 2
    assert bench.feed.readers.steps.formed_upto == formed
    assert (
        bench.feed.readers.steps.wait_for_ranks("peers").detail
        == "dp=0 cp=0 tp=0 pp=0 left between two iterations: restart all ranks from a checkpoint"
    )
    assert "1 of 2 ranks are still in the previous iteration: dp=0" in bench.heard(b"1", Wait)[-1].detail
    again(bench, 0, 0, name="new", next_step=2)
    bench.read(b"new", get(4, start=2))
    assert [step for step, _ in steps_of(bench, b"new")] == [2, 3]


def test_a_rank_that_left_between_two_iterations_and_comes_back_begins_the_next() -> None:
    bench = in_two()
    again(bench, 0)
    bench.read(b"0", Bye())
    again(bench, 1)
    again(bench, 0, name="new")
    assert bench.feed.readers.attempts.iteration == 1
    assert bench.heard(b"new", Attached)[-1].iteration == 1


def test_a_rank_that_never_comes_to_the_next_iteration_is_named_and_the_job_is_not_over() -> None:
    bench = in_two()
    for peer in (b"0", b"1"):
        bench.read(peer, get(8, start=3, done=3))
        bench.read(peer, get(8, start=5, done=5))
    again(bench, 0)
    bench.read(b"1", Bye())
    bench.handle(Tick(1.0))
    assert not bench.core.finished
    assert not bench.heard(b"p", Done)
    assert "1 of 2 ranks are still in the previous iteration: dp=1" in bench.heard(b"0", Wait)[-1].detail
    bench.read(b"0", Bye())
    assert bench.core.finished, "the first was read to its end"


def test_an_iteration_that_was_broken_off_is_no_end() -> None:
    bench = in_two()
    for peer in (b"0", b"1"):
        bench.read(peer, get(8, start=3, done=3))
        bench.read(peer, get(8, start=5, done=5))
    again(bench, 0)
    again(bench, 1)
    for peer in (b"0", b"1"):
        bench.read(peer, Bye())
    assert not bench.core.finished
    assert not bench.heard(b"p", Done)


def test_an_iteration_that_is_over_is_begun_again_by_all_or_by_none() -> None:
    bench = in_two()
    again(bench, 0)
    again(bench, 1)
    bench.handle(Tick(1.0))
    bench.read(b"1", Bye())
    again(bench, 1, 0, name="late")
    for now in range(2, 14):
        bench.read(b"0", ReaderPing(feed="train", reader="r0", done_upto=0, have_upto=0))
        again(bench, 1, 0, name="late")
        bench.handle(Tick(float(now)))
    (refused,) = bench.heard(b"late", Reject)
    assert refused.code == "round_gone"
    assert "got iteration 0 of feed 'train', expected iteration 1" in refused.detail
    assert "r0-host:1" in refused.detail
    bench.read(b"0", Bye())
    again(bench, 0, 0, name="one")
    again(bench, 1, 0, name="two")
    assert bench.heard(b"one", Attached)[-1].iteration == 0
    assert bench.feed.readers.attempts.iteration == 0


def test_a_new_broker_serves_the_earliest_iteration_that_a_rank_is_in() -> None:
    bench = Bench(merged=1024)
    bench.produce(b"p", hello("p", "a", "b"))
    again(bench, 0, 3)
    assert bench.feed.readers.attempts.number == 0
    again(bench, 1, 2, next_step=4)
    assert bench.feed.readers.attempts.iteration == 2
    fill(bench)
    bench.read(b"1", get(8, start=4))
    assert [step for step, _ in steps_of(bench, b"1")] == [4]
    assert not steps_of(bench, b"0")
    again(bench, 1, 3)
    assert bench.feed.readers.attempts.iteration == 3
    assert not bench.heard(b"0", Reject) + bench.heard(b"1", Reject)


def test_a_rank_that_waits_for_an_iteration_is_told_of_a_drain_until_it_hears() -> None:
    bench = in_two()
    again(bench, 0)
    bench.handle(Drain())
    assert len(bench.heard(b"0", Bye)) == 1
    again(bench, 0)  # it has not heard
    assert len(bench.heard(b"0", Bye)) == 2
    bench.handle(Tick(1.0))
    assert len(bench.heard(b"0", Bye)) == 3
    assert not bench.heard(b"1", Bye), "it gets what is formed"
    bench.read(b"1", get(8, start=3, done=3))
    assert bench.heard(b"1", StepPart)[-1].step == 4
    again(bench, 1)
    assert bench.heard(b"1", Bye)


def test_a_producer_that_dies_and_one_that_joins_as_a_feed_goes_back_change_no_step() -> None:
    bench = Bench(merged=1024)
    bench.produce(b"p", hello("p", "a", "b"))
    bench.read(b"1", attach("r"))
    fill(bench)
    bench.read(b"1", get(8))
    expected = steps_of(bench, b"1")
    bench.read(b"1", get(8, start=5, done=5))
    bench.produce(b"p", Bye())
    bench.read(b"1", attach("r", iteration=1))
    assert not bench.heard(b"1", Reject)
    bench.produce(b"q", hello("q", "a", "b"))
    assert {lease.first_seq for lease in bench.heard(b"q", Lease)} == {0}
    fill(bench, b"q")
    bench.read(b"1", get(8))
    assert steps_of(bench, b"1") == expected * 2


def extent(found: Any, seen: set[int]) -> int:
    """How many numbers and other things an object holds, all the way down."""
    if id(found) in seen or isinstance(found, type | str | int | float | bytes) or found is None:
        return 1
    seen.add(id(found))
    if isinstance(found, np.ndarray):
        return int(found.size)
    if isinstance(found, dict):
        return sum(extent(each, seen) for each in found.values())
    if isinstance(found, list | tuple | set | frozenset):
        return sum(extent(each, seen) for each in found)
    names = [
        *getattr(found, "__dict__", ()),
        *(n for kind in type(found).__mro__ for n in getattr(kind, "__slots__", ())),
    ]
    return 1 + sum(extent(getattr(found, name, None), seen) for name in names)


def test_two_hundred_iterations_leave_nothing_behind() -> None:
    bench = in_two()
    extents = []
    for iteration in range(1, 211):
        broken_off = iteration % 3
        again(bench, iteration % 2, iteration)
        again(bench, (iteration + 1) % 2, iteration)
        bench.stores.clear()
        fill(bench)
        for peer in (b"0", b"1"):
            bench.read(peer, get(8))
            bench.read(peer, get(8, start=5, done=(5, 2, 1)[broken_off]))
        assert bench.feed.memory.held_tokens == int(bench.core.table.length[sorted(bench.handles.live)].sum())
        bench.said = [said for said in bench.said if isinstance(said[1].message, Lease)][-3:]
        if broken_off == 0:
            assert not bench.handles.live, "all of it was returned"
        if iteration % 21 == 0:
            extents.append(extent(bench.core, set()))
    assert len(extents) == 10
    assert max(extents) <= extents[0]


def test_iterating_a_feed_moves_no_other() -> None:
    rules = Rules(budget=BUDGET, packs=4, window=4, streams=(StreamRules("c", 1.0, 2),))
    bench = Bench(merged=1024, more=[FeedPlan("valid", rules, 1024)])
    bench.produce(b"p", hello("p", "a", "b", "c"))
    fill(bench)
    valid = bench.core.feeds["valid"]
    bench.read(b"1", attach("r"))
    bench.read(b"2", attach("v", feed="valid"), fence=0)
    bench.read(b"1", get(8))
    bench.read(b"2", get(2), fence=1)
    before, told = bench.sessions(b"p"), len(bench.said)
    for iteration in (1, 2, 3):
        bench.read(b"2", get(2, start=2, done=1), fence=valid.readers.attempts.number)
        bench.read(b"2", attach("v", feed="valid", iteration=iteration), fence=0)
        for key, session in bench.sessions(b"p").items():
            assert (key[0] == "c") == (session != before[key]), key
        for n in range(6):
            for key, session in bench.sessions(b"p").items():
                if key[0] == "c":
                    bench.samples(b"p", key, 4 * n, [4, 5, 3, 4], session)
        bench.read(b"2", get(2), fence=valid.readers.attempts.number)
    assert [e for to, e in bench.said[told:] if to == b"1" and not isinstance(e.message, Wait)] == []
    found = steps_of(bench, b"2")
    assert [step for step, _ in found] == [0, 1] * 4
    assert found == found[:2] * 4


def test_a_feed_that_a_stream_has_stopped_begins_again_with_all_its_streams() -> None:
    streams = (StreamRules("c", 1.0, 1, on_exhaust="stop"), StreamRules("d", 1.0, 1))
    rules = Rules(budget=BUDGET, packs=4, window=4, streams=streams)
    bench = Bench(merged=1024, more=[FeedPlan("valid", rules, 1024)])
    bench.produce(b"p", hello("p", "a", "b", "c", "d"))
    valid = bench.core.feeds["valid"]
    others = {key: session for key, session in bench.sessions(b"p").items() if key[0] in "ab"}
    found = []
    for iteration in (0, 1, 2):
        bench.read(b"2", attach("v", feed="valid", iteration=iteration), fence=0)
        sessions = bench.sessions(b"p")
        for n in range(4):
            for key in (("c", 0), ("d", 0)):
                bench.samples(b"p", key, 4 * n, [4, 5, 3, 4], sessions[key])
        bench.produce(b"p", Eos(stream="c", partition=0, total=16), sessions["c", 0])
        ended = {(flow.stream, flow.partition) for flow in bench.heard(b"p", Flow) if flow.ended}
        assert ended == {("c", 0), ("d", 0)}, "no more of the other stream is wanted"
        at = len(steps_of(bench, b"2"))
        bench.read(b"2", get(8), fence=valid.readers.attempts.number)
        found.append(steps_of(bench, b"2")[at:])
        assert valid.readers.steps.end is not None
        bench.read(
            b"2",
            get(8, start=valid.readers.steps.formed_upto, done=valid.readers.steps.formed_upto),
            fence=valid.readers.attempts.number,
        )
        assert valid.memory.held_tokens == 0
    assert found[0] == found[1] == found[2]
    assert others.items() <= bench.sessions(b"p").items()


# Producers


def test_other_data_under_a_streams_name_is_refused_naming_both_digests() -> None:
    bench = Bench()
    bench.produce(b"1", hello("one", "a", digest="first"))
    bench.produce(b"2", hello("two", "a", digest="second"))
    (refused,) = bench.heard(b"2", Reject)
    assert refused.code == "source_digest"
    assert "first" in refused.detail
    assert "second" in refused.detail


def test_a_stream_that_is_not_known_is_refused_naming_those_that_are() -> None:
    bench = Bench()
    bench.produce(b"1", hello("one", "a", "typo", digest="of one"))
    (refused,) = bench.heard(b"1", Reject)
    assert refused.code == "unknown_stream"
    assert "'typo'" in refused.detail
    assert "a, b" in refused.detail
    bench.produce(b"2", hello("two", "a", digest="of two"))
    assert not bench.heard(b"2", Reject), "a refused producer decided what the stream's data are"


def test_leases_are_shared_evenly_and_moved_when_a_producer_joins_or_leaves() -> None:
    bench = Bench()
    bench.produce(b"1", hello("one", "a", "b"))
    before = bench.sessions(b"1")
    assert set(before) == {("a", 0), ("a", 1), ("b", 0)}
    bench.produce(b"2", hello("two", "a"))
    (moved,) = bench.sessions(b"2").items()
    assert moved[0][0] == "a"
    assert moved[1] > max(before.values()), "a move begins a new session"
    bench.produce(b"1", Bye())
    assert set(bench.sessions(b"2")) == {("a", 0), ("a", 1)}
    assert "no producer offers it" in bench.core.leases.producers.describe(2)


def test_a_producer_that_falls_silent_loses_its_leases() -> None:
    bench = Bench()
    bench.produce(b"1", hello("one", "a"))
    bench.produce(b"2", hello("two", "a"))
    bench.handle(Tick(PRODUCER_SILENT_S - 1))
    bench.produce(b"2", ProducerPing(producer="two"))
    bench.handle(Tick(PRODUCER_SILENT_S + 1))
    assert set(bench.sessions(b"2")) == {("a", 0), ("a", 1)}
    assert bench.core.leases.rebalancer.vanished == 1
    bench.handle(Tick(2 * PRODUCER_SILENT_S + 1))
    text = bench.core.leases.producers.describe(0)
    assert f"was heard {PRODUCER_SILENT_S:.0f} s ago; no producer offers it" in text, "the last that was heard"
    assert bench.core.leases.producers.is_lost(0)
    bench.produce(b"3", hello("three", "a"))
    assert not bench.core.leases.producers.is_lost(0)
    bench.handle(Tick(2 * PRODUCER_SILENT_S + 9))
    assert "silent for 5 s" in bench.core.leases.producers.describe(0)
    assert bench.core.leases.producers.is_lost(0)
    bench.produce(b"1", ProducerPing(producer="one"))
    assert bench.heard(b"1", Who)


def test_a_producer_started_again_under_its_name_goes_on_at_once_where_it_was() -> None:
    bench = Bench()
    bench.produce(b"1", hello("one", "a"))
    before = bench.sessions(b"1")
    bench.samples(b"1", ("a", 0), 0, [4, 5], before["a", 0])
    bench.produce(b"1'", msgspec.structs.replace(hello("one", "a"), pid=2))
    after = bench.sessions(b"1'")
    assert all(after[key] > session for key, session in before.items()), "a new session: it has sent nothing yet"
    assert {lease.partition: lease.first_seq for lease in bench.heard(b"1'", Lease)} == {0: 2, 1: 0}
    bench.samples(b"1", ("a", 0), 2, [3], before["a", 0])  # of the dead process, still on its way
    assert bench.taken == [2, 0, 0]
    bench.samples(b"1'", ("a", 0), 2, [3], after["a", 0])
    assert bench.taken == [3, 0, 0]
    assert (bench.core.leases.num_producers, bench.core.leases.rebalancer.vanished) == (1, 1)


def test_a_producer_that_only_connects_again_keeps_its_sessions() -> None:
    bench = Bench()
    bench.produce(b"1", hello("one", "a"))
    bench.produce(b"1'", hello("one", "a"))
    assert bench.sessions(b"1'") == bench.sessions(b"1")
    assert bench.core.leases.rebalancer.vanished == 0


def test_messages_of_an_old_session_are_revoked_and_change_nothing() -> None:
    bench = Bench()
    bench.produce(b"1", hello("one", "a"))
    old = bench.sessions(b"1")["a", 1]
    bench.produce(b"2", hello("two", "a"))
    bench.samples(b"1", ("a", 1), 0, [4, 4], old)
    bench.produce(b"1", Eos(stream="a", partition=1, total=0), old)
    bench.produce(b"1", Sent(stream="a", partition=1, next_seq=7), old)
    assert bench.taken == [0, 0, 0]
    assert len(bench.heard(b"1", Revoke)) == 3
    assert not bench.core.leases.partitions.intakes[1].ended


def test_messages_of_an_older_broker_change_nothing() -> None:
    bench = Bench()
    bench.produce(b"1", hello("one", "b"))
    old = Envelope(
        run=RUN, epoch=EPOCH - 1, fence=bench.sessions(b"1")["b", 0], message=message_of(("b", 0), 0, [1]),
        payload=(bytes(4),),
    )  # fmt: skip
    bench.handle(FromProducer(b"1", old))
    assert bench.taken == [0, 0, 0]
    assert bench.heard(b"1", Who)


@pytest.mark.parametrize(("run", "epoch"), [(RUN + 1, EPOCH), (RUN, EPOCH + 1)])
def test_messages_of_another_run_or_a_newer_broker_are_counted_and_only_their_sender_learns_of_it(
    run: int, epoch: int
) -> None:
    bench = Bench()
    bench.produce(b"0", hello("zero", "b"))
    bench.said.clear()
    bench.handle(FromProducer(b"1", Envelope(run=run, epoch=epoch, fence=0, message=hello("one", "a"))))
    bench.handle(FromTrainer(b"2", Envelope(run=run, epoch=epoch, fence=0, message=attach("r"))))
    assert bench.core.foreign == 2
    assert [(peer, type(e.message)) for peer, e in bench.said] == [(b"1", Who), (b"2", Who)]
    assert all(e.is_foreign(run, epoch) for _, e in bench.said)


def test_a_broker_that_has_just_started_outbids_the_one_before_whatever_its_clock_says() -> None:
    bench = Bench()
    bench.handle(FromTrainer(b"2", Envelope(run=RUN, epoch=EPOCH + 7, fence=3, message=attach("r", next_step=4))))
    bench.produce(b"1", hello("one", "a"))
    assert bench.core.epoch == EPOCH + 8
    assert bench.heard(b"2", Attached)
    assert bench.core.foreign == 0


def test_more_rejected_samples_than_may_wait_do_not_stop_the_merge() -> None:
    """Credits widen when the merge passes over them, though it takes nothing."""
    bench = Bench()
    bench.produce(b"1", hello("one", "a", "b"))
    sessions = bench.sessions(b"1")
    empty = [0] * 4096
    for n in range(2 * MAX_UNMERGED // len(empty)):
        for key, session in sorted(sessions.items()):
            bench.samples(b"1", key, n * len(empty), empty, session)
    assert bench.taken[:2] == [2 * MAX_UNMERGED] * 2  # the stream whose turn it is; the other waits for it


@pytest.mark.parametrize("side", ["producers", "trainers"])
def test_a_peer_at_the_other_sides_address_is_told(side: str) -> None:
    bench = Bench()
    if side == "producers":
        bench.produce(b"1", attach("r"))
    else:
        bench.read(b"1", hello("one", "a"))
    (refused,) = bench.heard(b"1", Reject)
    assert refused.code == "wrong_address"
    assert side in refused.detail


def test_a_stream_of_which_nothing_was_taken_may_be_offered_with_other_data() -> None:
    bench = Bench()
    bench.produce(b"1", hello("one", "b", digest="mistaken"))
    bench.produce(b"1", Bye(reason="goodbye"))
    bench.produce(b"2", hello("two", "b", digest="mended"))
    assert not bench.heard(b"2", Reject)
    assert ("b", 0) in bench.sessions(b"2")


def test_a_partial_overlap_of_a_chunk_is_cut() -> None:
    bench = Bench()
    bench.produce(b"1", hello("one", "b"))
    session = bench.sessions(b"1")["b", 0]
    bench.samples(b"1", ("b", 0), 0, [3, 4], session)
    bench.samples(b"1", ("b", 0), 1, [4, 5, 6], session)
    assert bench.taken[2] == 4
    assert bench.stores[-1].lengths.tolist() == [5, 6]
    assert bench.stores[-1].offsets.tolist() == [4, 9]
    bench.samples(b"1", ("b", 0), 0, [3, 4], session)
    assert bench.taken[2] == 4


def test_a_gap_begins_a_new_session_where_samples_are_missing() -> None:
    bench = Bench()
    bench.produce(b"1", hello("one", "b"))
    session = bench.sessions(b"1")["b", 0]
    bench.samples(b"1", ("b", 0), 0, [3, 4], session)
    bench.samples(b"1", ("b", 0), 3, [5], session)
    lease = bench.heard(b"1", Lease)[-1]
    assert (lease.first_seq, lease.cursor) == (2, (0, 0, 2))
    assert bench.sessions(b"1")["b", 0] > session


def test_a_lost_last_chunk_is_asked_for_when_the_producer_says_how_far_it_is() -> None:
    bench = Bench()
    bench.produce(b"1", hello("one", "b"))
    session = bench.sessions(b"1")["b", 0]
    bench.produce(b"1", Sent(stream="b", partition=0, next_seq=0), session)
    assert bench.sessions(b"1")["b", 0] == session
    bench.produce(b"1", Sent(stream="b", partition=0, next_seq=2), session)
    assert bench.sessions(b"1")["b", 0] > session


def test_a_stream_that_ends_before_what_was_taken_is_refused() -> None:
    bench = Bench()
    bench.produce(b"1", hello("one", "b"))
    session = bench.sessions(b"1")["b", 0]
    bench.samples(b"1", ("b", 0), 0, [3, 4], session)
    bench.produce(b"1", Eos(stream="b", partition=0, total=1), session)
    (refused,) = bench.heard(b"1", Reject)
    assert refused.code == "short_stream"
    assert "after 1 samples" in refused.detail
    assert "at least 2 samples" in refused.detail
    assert "files have changed" in bench.core.leases.producers.describe(2)


def test_a_producer_that_fails_gives_its_leases_up_and_its_reason_is_told() -> None:
    bench = Bench()
    bench.produce(b"1", hello("one", "b"))
    bench.produce(b"1", ProducerPing(producer="one", failure="b.jsonl:7: is not JSON"))
    assert "b.jsonl:7" in bench.core.leases.producers.describe(2)
    bench.produce(b"2", hello("two", "b"))
    bench.samples(b"2", ("b", 0), 0, [3], bench.sessions(b"2")["b", 0])
    assert "b.jsonl:7" not in bench.core.leases.producers.describe(2)


@pytest.mark.parametrize(
    ("policy", "lengths"), [("truncate", [3, 16, 4]), ("drop", [3, 4]), ("split", [3, 16, 4, 4]), ("error", [])]
)
def test_an_over_long_sample_meets_the_policy(policy: Overlong, lengths: list[int]) -> None:
    bench = Bench(overlong=policy)
    bench.produce(b"1", hello("one", "b"))
    bench.samples(b"1", ("b", 0), 0, [3, 20, 4], bench.sessions(b"1")["b", 0])
    stored = [length for store in bench.stores for length in store.lengths.tolist()]
    assert stored == lengths
    if policy == "error":
        (refused,) = bench.heard(b"1", Reject)
        assert "sample b:1" in refused.detail
        assert "20 tokens" in refused.detail
        assert bench.taken[2] == 0
    else:
        assert bench.taken[2] == 3
        assert bench.feed.planner.admission.counts[1].overlong == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lengths_u32": b"abc"}, "expected 4 bytes per sample"),
        ({"crcs_u32": b"abcd"}, "expected 4 bytes per sample"),
        ({"lengths_u32": b"", "crcs_u32": b"", "loss_tokens_u32": b""}, "chunk of 0 samples"),
        ({"loss_tokens_u32": np.array([2, 4], "<u4").tobytes()}, "as many loss tokens as tokens"),
        ({"loss_tokens_u32": np.array([2, 2**32 - 1], "<u4").tobytes()}, "as many loss tokens as tokens"),
        ({"rejected": {"empty": 1}}, "1 rejected samples"),
        ({"base_seq": 3}, "ended after 4"),
    ],
)
def test_a_malformed_chunk_is_refused_and_changes_nothing(changes: dict[str, Any], said: str) -> None:
    bench = Bench()
    bench.produce(b"1", hello("one", "b"))
    session = bench.sessions(b"1")["b", 0]
    bench.samples(b"1", ("b", 0), 0, [3, 4, 3, 4], session)
    if "base_seq" in changes:
        bench.produce(b"1", Eos(stream="b", partition=0, total=4), session)
    chunk = msgspec.structs.replace(message_of(("b", 0), 4, [3, 4]), **changes)
    bench.produce(b"1", chunk, session, np.arange(7, dtype="<i4").tobytes())
    assert said in bench.heard(b"1", Reject)[-1].detail
    assert bench.taken[2] == 4
    assert len(bench.stores) == 1


def test_a_chunk_beyond_the_credits_is_not_taken() -> None:
    bench = Bench()
    bench.produce(b"1", hello("one", "b"))
    bench.samples(b"1", ("b", 0), 0, [1] * (QUOTA + 1), bench.sessions(b"1")["b", 0])
    assert bench.taken[2] == 0
    assert not bench.stores


def read_to_the_end(bench: Bench, peer: bytes) -> None:
    bench.read(peer, get(8))
    bench.read(peer, get(8, start=5, done=5))
    assert bench.heard(peer, End)


def test_producers_are_told_to_go_when_everything_is_read_and_the_readers_have_left() -> None:
    """Not before: another iteration, or a broker that was started again, would need them."""
    bench = Bench(merged=1024)
    bench.produce(b"p", hello("p", "a", "b"))
    bench.read(b"1", attach("r"))
    fill(bench)
    read_to_the_end(bench, b"1")
    bench.produce(b"p", ProducerPing(producer="p"))
    assert not bench.heard(b"p", Done)
    bench.read(b"1", Bye())
    assert bench.heard(b"p", Done)
    bench.produce(b"q", hello("q", "a", "b"))
    assert bench.heard(b"q", Done), "and those that come later"


def test_with_several_feeds_producers_stay() -> None:
    rules = Rules(budget=BUDGET, packs=4, window=4, streams=(StreamRules("c", 1.0, 1),))
    bench = Bench(merged=1024, more=[FeedPlan("valid", rules, needed_tokens(rules, MAX_SAMPLE))])
    bench.produce(b"p", hello("p", "a", "b", "c"))
    bench.read(b"1", attach("r"))
    fill(bench)
    read_to_the_end(bench, b"1")
    bench.read(b"1", Bye())
    assert bench.core.finished
    assert not bench.heard(b"p", Done)


def test_a_drain_says_farewell_to_both_sides_and_gives_no_lease() -> None:
    bench = Bench()
    bench.produce(b"1", hello("one", "a"))
    bench.read(b"2", attach("r"))
    bench.handle(Drain())
    assert "stopping" in bench.heard(b"1", Bye)[-1].reason
    assert "stopping" in bench.heard(b"2", Bye)[-1].reason
    bench.produce(b"3", hello("two", "a", "b"))
    assert bench.heard(b"3", Bye)
    assert not bench.heard(b"3", Lease)


# A producer's side


def producer() -> ProducerSession:
    return ProducerSession(run=0, producer="p", host="h", pid=1, offers=[Offer(stream="b", source_digest="d")])


def from_broker(message: Message, fence: int = 1, epoch: int = EPOCH) -> FromBroker:
    return FromBroker(Envelope(run=RUN, epoch=epoch, fence=fence, message=message))


def lease(first: int = 0) -> Lease:
    return Lease(
        stream="b", partition=0, partitions=1, first_seq=first, cursor=None, seed=0, passes=1, dtype="int32",
        overlong="error", poison="error", max_sample_tokens=16, max_chunk_bytes=64,
    )  # fmt: skip


def flow(grant_bytes: int, *, expected: int = 0, ended: bool = False) -> Flow:
    return Flow(
        stream="b", partition=0, expected_seq=expected, grant_seq=100, grant_bytes=grant_bytes, durable_seq=expected,
        ended=ended,
    )  # fmt: skip


def chunk(num: int = 2, session: int = 1, epoch: int = EPOCH) -> Chunk:
    return chunk_of(("b", 0), [bytes(16)] * num, (0, 0, num), session=(epoch, session))


def sent(effects: list[Effect], kind: type[M]) -> list[M]:
    return [e.envelope.message for e in effects if isinstance(e, Send) and isinstance(e.envelope.message, kind)]


def test_a_producer_without_a_lease_does_not_say_that_the_broker_is_silent() -> None:
    """The broker answers its first message, and no ping."""
    session = producer()
    session.handle(Tick(0.0))
    assert session.waiting_for() == "an answer of the broker"
    session.handle(from_broker(Who()))
    lease_ = "a lease, because other producers hold every partition or all partitions have ended"
    assert session.waiting_for() == lease_
    session.handle(Tick(60.0))
    assert session.waiting_for() == f"{lease_}, or the broker does not answer"


def test_a_producer_that_has_sent_everything_does_not_blame_the_trainers() -> None:
    session = producer()
    session.handle(Tick(0.0))
    session.handle(from_broker(lease(), fence=1))
    assert session.waiting_for() == ""
    (held,) = session.held.values()
    session.handle(EndOfPartition((held.lease.stream, held.lease.partition), held.session))
    assert "this producer has sent all its samples" in session.waiting_for()


def test_a_lost_lease_heals() -> None:
    session = producer()
    assert sent(session.handle(Tick(0.0)), Hello)
    assert sent(session.handle(Tick(1.5)), Hello), "no lease came, so it asks again"
    assert sent(session.handle(Tick(4.5)), Hello), "and again, later"
    session.handle(from_broker(lease(), fence=1))
    assert not sent(session.handle(Tick(9.0)), Hello)
    assert sent(session.handle(from_broker(flow(64), fence=2)), Hello), "credit of a lease that it does not know"


def test_a_partition_that_the_merge_waits_for_is_read_first_unless_its_chunk_can_be_sent() -> None:
    session, wanted = producer(), msgspec.structs.replace(flow(64), wanted=True)
    session.handle(from_broker(lease()))
    assert session.handle(from_broker(wanted)) == [ReadFirst(("b", 0), (EPOCH, 1))]
    session.handle(from_broker(lease(), 2))
    session.handle(chunk(session=2))
    effects = session.handle(from_broker(wanted, 2))
    assert sent(effects, Samples)
    assert not [effect for effect in effects if isinstance(effect, ReadFirst)]


def test_a_lost_flow_heals() -> None:
    bench, session = Bench(), producer()
    bench.produce(b"1", hello("p", "b"))
    fence = bench.sessions(b"1")["b", 0]
    session.handle(from_broker(lease(), fence))
    assert not sent(session.handle(chunk(session=fence)), Samples), "sent without credit"
    bench.said.clear()
    (ping,) = sent(session.handle(Tick(PING_S)), ProducerPing)
    bench.produce(b"1", ping)
    (again,) = bench.heard(b"1", Flow)
    assert sent(session.handle(from_broker(again, fence)), Samples)


def test_a_producer_keeps_its_credit_and_credits_are_absolute() -> None:
    session = producer()
    session.handle(from_broker(lease()))
    session.handle(chunk(2))
    assert not sent(session.handle(from_broker(flow(31))), Samples)
    assert not sent(session.handle(from_broker(flow(31))), Samples)
    assert sent(session.handle(from_broker(flow(32))), Samples)


def test_a_producer_says_how_far_it_is_when_the_broker_does_not_know() -> None:
    session = producer()
    session.handle(from_broker(lease()))
    session.handle(from_broker(flow(64)))
    assert sent(session.handle(chunk(2)), Samples)
    assert not sent(session.handle(Tick(PING_S)), Sent), "it has just sent"
    assert [say.next_seq for say in sent(session.handle(Tick(2 * PING_S)), Sent)] == [2]
    session.handle(from_broker(flow(64, expected=2)))
    assert not sent(session.handle(Tick(3 * PING_S)), Sent)


def test_the_end_is_said_until_it_is_known() -> None:
    session = producer()
    session.handle(from_broker(lease()))
    assert sent(session.handle(EndOfPartition(("b", 0), (EPOCH, 1))), Eos)
    assert sent(session.handle(Tick(PING_S)), Eos)
    session.handle(from_broker(flow(64, ended=True)))
    assert not sent(session.handle(Tick(2 * PING_S)), Eos)


def test_a_stream_that_the_broker_closes_is_read_no_further_and_its_end_is_not_said() -> None:
    """The feed has ended before it: neither a chunk that is still read nor its end may begin a session anew."""
    session = producer()
    session.handle(Tick(0.0))
    session.handle(from_broker(lease()))
    session.handle(from_broker(flow(1 << 20)))
    effects = session.handle(from_broker(flow(1 << 20, ended=True)))
    assert [e.key for e in effects if isinstance(e, Forget)] == [("b", 0)]
    assert session.handle(chunk()) == []
    assert session.handle(EndOfPartition(("b", 0), (EPOCH, 1))) == []
    effects = session.handle(Tick(5.0))
    assert not sent(effects, Eos) + sent(effects, Sent) + sent(effects, Samples)
    assert [e for e in session.handle(from_broker(Done())) if isinstance(e, Finish)]


def test_a_read_of_an_older_broker_is_not_taken_for_one_of_the_new() -> None:
    session = producer()
    session.handle(from_broker(lease()))
    effects = session.handle(from_broker(lease(5), epoch=EPOCH + 1))
    assert [e.session for e in effects if isinstance(e, Forget)] == [(EPOCH, 1)]
    assert [(e.session, e.seq) for e in effects if isinstance(e, Read)] == [((EPOCH + 1, 1), 5)]
    session.handle(chunk(session=1, epoch=EPOCH))
    assert session.held["b", 0].chunk is None


def test_a_chunk_that_was_not_asked_for_raises_with_the_phases_of_its_lease() -> None:
    session = producer()
    session.handle(from_broker(lease()))
    session.handle(chunk())
    with pytest.raises(
        InternalError, match=r"stream 'b' partition 0 .* from phase HOLDING to phase HOLDING.*READING -> HOLDING$"
    ):
        session.handle(chunk())


def test_a_lease_that_was_revoked_is_not_taken_up_again() -> None:
    session = producer()
    session.handle(from_broker(lease()))
    session.handle(from_broker(Revoke(stream="b", partition=0)))
    assert not session.handle(from_broker(lease()))
    assert not session.held


def test_a_producer_that_leaves_or_is_refused_does_nothing_more() -> None:
    left, refused = producer(), producer()
    assert sent(left.handle(Leave()), Bye)
    assert not left.handle(Tick(9.0))
    (finish,) = refused.handle(from_broker(Reject(code="short_stream", detail="why")))
    assert isinstance(finish, Finish)
    assert (finish.error, finish.code) == ("why", "short_stream")
    assert sent(producer().handle(Failed("why")), ProducerPing)[0].failure == "why"


# Hostile peers


@settings(max_examples=100)
@given(
    st.lists(EVENTS, max_size=40), st.sampled_from(["error", "truncate", "drop", "split"]), st.integers(0, 4),
    st.sampled_from([None, *SNAPSHOTS]),
)  # fmt: skip
def test_no_sequence_of_messages_breaks_the_broker_or_moves_its_memory_beyond_its_bounds(
    events: list[Any], overlong: Overlong, chunks: int, awaited: Snapshot | None
) -> None:
    bench, now = Bench(overlong=overlong), 0.0
    script: list[Event] = []
    if awaited is not None:
        named = msgspec.structs.replace(attach("s", next_step=awaited.step), snapshot_digest=awaited.digest)
        bench.read(b"3", named)
        assert bench.heard(b"3", AskSnapshot)
    if chunks:
        bench.produce(b"1", hello("p", "a", "b", digest="d"))
        bench.read(b"2", attach("r"))
        fill(bench, b"1", chunks)
    for peer, is_producer, fence, epoch, run, (message, payload), wait in events:
        frames = (payload,) if isinstance(message, Samples) else ()
        envelope = wire.decode(
            wire.encode(Envelope(run=run, epoch=epoch, fence=fence, message=message, payload=frames))
        )
        script.append(FromProducer(peer, envelope) if is_producer else FromTrainer(peer, envelope))
        now += wait
        script.append(Tick(now))
    for event in script:
        bench.handle(event)
    if awaited is not None:
        bench.read(b"3", Brought(feed="train", digest=awaited.digest, snapshot=awaited))
        bench.handle(Tick(now + 1.0))
    leases = bench.core.leases
    waiting = [intake.kept_tokens - intake.merged_tokens for intake in leases.partitions.intakes]
    assert all(0 <= tokens <= QUOTA for tokens in waiting)
    assert 0 <= bench.feed.memory.held_tokens <= bench.feed.plan.merged_tokens
    assert (
        int(bench.core.table.length[sorted(bench.handles.live)].sum()) == sum(waiting) + bench.feed.memory.held_tokens
    )
    assert leases.num_producers <= 3
    assert bench.feed.readers.num_readers <= 3
