"""The client's state machine: when it takes its rank and begins, what it gives to the trainer, when it gives up.

No socket, clock or thread: events go in, effects come out.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from streampack.core.feed.resume import snapshot
from streampack.core.form.former import Former
from streampack.core.merge.schedule import merge_of
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Rules, StreamRules
from streampack.core.model.samples import SampleTable
from streampack.core.protocol.events import Effect, FromBroker, Send, Tick, Unsent
from streampack.core.protocol.message import Envelope, Message, Reject, Who
from streampack.core.protocol.step_part import StepPart
from streampack.core.protocol.trainer_messages import (
    AskSnapshot,
    AskState,
    Attach,
    Attached,
    Brought,
    Commit,
    Committed,
    End,
    Fenced,
    Get,
    Probe,
    ReaderPing,
    State,
    Wait,
)
from streampack.core.sessions.client_events import (
    Again,
    Answered,
    Ask,
    Begin,
    Broken,
    Damaged,
    Deliver,
    Ended,
    Returned,
    Waiting,
)
from streampack.core.sessions.client_session import ClientSession
from streampack.core.sessions.patience import VAIN_S, Patience
from streampack.core.stats.data_wait import Starvation

RUN, EPOCH = 9, 4
RULES = Rules(streams=(StreamRules("a"),))
SNAPSHOT = snapshot(RULES, merge_of(RULES), Former(RULES, SampleTable()))
M = TypeVar("M", bound=Message)
ASK = AskState(feed="train", step=3)


def client(*, ready: bool = False, prefetch: int = 2, patience: Patience | None = None) -> ClientSession:
    return ClientSession(
        run=0, feed="train", reader="r", host="h", pid=1, mesh=Mesh(), prefetch=prefetch, ready=ready,
        patience=patience or Patience(),
    )  # fmt: skip


def said(message: Message, *, fence: int = 1, epoch: int = EPOCH) -> FromBroker:
    return FromBroker(Envelope(run=RUN, epoch=epoch, fence=fence, message=message))


def attached(iteration: int = 0) -> Attached:
    return Attached(feed="train", reader="r", lineage=0, next_step=0, rules=RULES, layout="zigzag", iteration=iteration)


def part(
    step: int, number: int = 0, of: int = 1, *, micro_batches: int = 1, chain: bytes = b"", request: int = 0
) -> StepPart:
    return StepPart(
        feed="train", lineage=0, step=step, part=number, parts=of, first=0, micro_batches=micro_batches, digest=b"d",
        chain=chain or b"chain%d" % (step + 1), num_loss_tokens=0, num_samples=0, frames=[], packs_u32=b"",
        counts_u32=b"", loss_tokens_u32=b"", lengths_u32=b"", streams_u32=b"", indices_u64=b"", parts_u32=b"",
        request=request,
    )  # fmt: skip


def state(step: int, chain: bytes = b"") -> State:
    return State(feed="train", lineage=0, step=step, chain=chain or b"chain%d" % step, snapshot=None)


def wait(reason: str, detail: str = "rank dp=1, at node7 before") -> Wait:
    return Wait(feed="train", step=0, reason=reason, detail=detail)


def sent(effects: list[Effect], kind: type[M]) -> list[M]:
    return [e.envelope.message for e in effects if isinstance(e, Send) and isinstance(e.envelope.message, kind)]


def delivered(effects: list[Effect]) -> list[int]:
    return [e.parts[0].message.step for e in effects if isinstance(e, Deliver)]  # type: ignore[attr-defined]


def broken(effects: list[Effect]) -> Broken | None:
    return next((e for e in effects if isinstance(e, Broken)), None)


def pass_time(session: ClientSession, seconds: float, *, heard: Message | None = None) -> Broken | None:
    """Tick as the shell does, with a word of the broker each second; why the session gave up, if it did."""
    for n in range(int(seconds * 4) + 1):
        why = broken(session.handle(Tick(session._now + 0.25)))
        if why is None and heard is not None and n % 4 == 0:
            why = broken(session.handle(said(heard, fence=session.attempt)))
        if why is not None:
            return why
    return None


def cause_of(session: ClientSession) -> tuple[str, str | None]:
    return session.cause


# Taking a rank, and beginning


def test_a_rank_is_taken_at_once_and_nothing_is_asked_for_before_the_trainer_begins() -> None:
    session = client()
    (claim,) = sent(session.handle(Tick(0.1)), Attach)
    assert not claim.ready
    assert not session.handle(said(attached(), fence=0))
    later = [session.handle(Tick(float(now))) for now in range(2, 30)]
    assert len(sent([e for effects in later for e in effects], ReaderPing)) == 28, "it holds its rank"
    assert not sent([e for effects in later for e in effects], Get)
    assert not delivered(session.handle(said(part(0), fence=0)))

    (ready,) = sent(session.handle(Begin(next_step=5, chain=b"c", iteration=2, lineage=1, snapshot=SNAPSHOT)), Attach)
    assert (ready.ready, ready.next_step, ready.chain, ready.iteration) == (True, 5, b"c", 2)
    assert (ready.lineage, ready.snapshot_digest) == (1, SNAPSHOT.digest)
    for late in (attached(), attached(2)):
        assert not session.handle(said(late, fence=0)), "the answer to the first, said again"
    (get,) = sent(session.handle(said(attached(2), fence=7)), Get)
    assert (get.start, get.stop, get.done_upto) == (5, 8, 5)
    assert not delivered(session.handle(said(part(5), fence=0))), "of another attempt"
    assert delivered(session.handle(said(part(5), fence=7))) == [5]


def test_a_claim_is_repeated_until_it_is_answered_and_says_what_it_waits_for() -> None:
    session = client()
    times = [now / 4 for now in range(200) if (claims := sent(session.handle(Tick(now / 4)), Attach))]
    waits = [later - before for before, later in pairwise(times)]
    assert 1.5 <= waits[0] <= 2.75 < waits[1] <= 5.25 < waits[2], "later each time"
    assert all(6.0 <= wait <= 10.25 for wait in waits[2:])
    assert not any(claim.ready for claim in claims)
    session.handle(said(wait("join", "rank dp=0 is held by node1:77"), fence=3))
    assert session.waiting_for() == "join: rank dp=0 is held by node1:77"


def test_a_wait_for_the_end_of_a_batch_is_normal_while_the_broker_is_heard() -> None:
    session = client(ready=True)
    session.handle(said(attached()))
    session.handle(said(Wait(feed="train", step=0, reason="stream", detail="no sample", stream="a")))
    assert not session.waits_for_batch()
    session.handle(said(Wait(feed="train", step=0, reason="stream", detail="end_of_batch 1", stream="a", batch=True)))
    assert session.waits_for_batch()
    assert session.waiting_for() == "end_of_batch 1"
    pass_time(session, 20)
    assert not session.waits_for_batch(), "the broker is silent"


def test_a_wait_is_for_what_the_broker_says_until_it_has_sent_some_of_the_step_or_is_not_heard() -> None:
    session = client(ready=True)
    assert cause_of(session) == ("network", None), "nobody has answered"
    session.handle(said(attached()))
    assert cause_of(session) == ("network", None), "asked, and no word yet"
    session.handle(said(Wait(feed="train", step=0, reason="stream", detail="no sample", stream="web")))
    assert cause_of(session) == ("stream", "web")
    session.handle(said(part(0, 0, of=2)))
    assert cause_of(session) == ("network", None), "it is sent"
    session.handle(said(Wait(feed="train", step=1, reason="peers", detail="rank dp=1", stream="web")))
    assert cause_of(session) == ("peers", None)
    assert pass_time(session, 20, heard=wait("memory")) is None
    assert cause_of(session) == ("memory", None), "a word every second holds"
    assert pass_time(session, 4) is None
    assert cause_of(session) == ("network", None), "the broker has fallen silent"
    session.handle(said(wait("peers")))
    assert cause_of(session) == ("peers", None)
    session.handle(said(Who(), epoch=EPOCH + 1))
    assert cause_of(session) == ("network", None), "another broker has not said anything yet"


def test_a_reader_that_waits_for_the_others_is_heard_every_second() -> None:
    """Else it would be taken for dead, and its rank given to another."""
    session = client()
    session.handle(said(attached(), fence=0))
    session.handle(Begin())
    pings = []
    for now in range(1, 11):
        session.handle(said(wait("join"), fence=0))
        pings += sent(session.handle(Tick(float(now))), ReaderPing)
    assert len(pings) == 10


def test_the_state_of_a_checkpoint_goes_to_a_new_broker_as_well() -> None:
    session = client()
    session.handle(said(attached(), fence=0))
    session.handle(Begin(next_step=5, chain=b"c", iteration=2, lineage=1, snapshot=SNAPSHOT))
    session.handle(said(attached(2), fence=7))
    session.handle(said(part(5), fence=7))
    session.handle(Returned(6))
    (again,) = sent(session.handle(said(Who(), epoch=EPOCH + 1)), Attach)
    assert (again.ready, again.next_step, again.chain, again.iteration) == (True, 6, b"chain6", 2)
    assert again.snapshot_digest == SNAPSHOT.digest
    (given,) = sent(
        session.handle(said(AskSnapshot(feed="train", digest=SNAPSHOT.digest), fence=0, epoch=EPOCH + 1)), Brought
    )
    assert (given.digest, given.snapshot) == (SNAPSHOT.digest, SNAPSHOT)
    assert not session.handle(said(AskSnapshot(feed="train", digest=b"other"), fence=0, epoch=EPOCH + 1))
    (anew,) = sent(session.handle(Again()), Attach)
    assert (anew.next_step, anew.iteration, anew.snapshot_digest) == (0, 3, b""), (
        "the next iteration is not that checkpoint's"
    )


def test_a_reader_whose_rank_another_has_taken_over_stops() -> None:
    session = client(ready=True)
    session.handle(said(attached()))
    why = broken(session.handle(said(Fenced(feed="train", detail="node2:9 holds rank dp=0"), fence=8)))
    assert why == Broken("fenced", "node2:9 holds rank dp=0")
    assert not session.handle(Tick(100.0)), "and does not ask for the rank again"


# Steps, in order


def test_parts_and_steps_in_any_order_are_delivered_whole_and_in_order_once() -> None:
    session = client(ready=True, prefetch=1)
    session.handle(said(attached()))
    assert not session.handle(said(part(1)))
    assert not session.handle(said(part(0, 1, of=2)))
    assert not session.handle(said(part(0, 1, of=2)))
    effects = session.handle(said(part(0, 0, of=2)))
    assert delivered(effects) == [0, 1]
    assert [len(e.parts) for e in effects if isinstance(e, Deliver)] == [2, 1]
    assert not session.handle(said(part(0, 0, of=2)))


def test_the_end_waits_for_the_steps_before_it() -> None:
    session = client(ready=True, prefetch=1)
    session.handle(said(attached()))
    assert not session.handle(said(End(feed="train", lineage=0, num_steps=1, chain=b"chain1")))
    effects = session.handle(said(part(0)))
    assert isinstance(effects[-1], Ended)
    assert (effects[-1].num_steps, effects[-1].chain) == (1, b"chain1")


def test_a_client_attaches_in_place_to_a_new_broker_with_what_it_has() -> None:
    session = client(ready=True, prefetch=1)
    session.handle(said(attached()))
    session.handle(said(part(0)))
    session.handle(Returned(1))
    session.starvation = Starvation(causes_s={"peers": 3600.0})
    (again,) = sent(session.handle(said(Who(), epoch=EPOCH + 1)), Attach)
    assert (again.next_step, again.chain, again.starvation) == (1, b"chain1", session.starvation)
    assert not session.handle(said(part(1))), "a step of the old broker"


def test_a_client_asks_again_and_pings_even_if_it_wants_nothing() -> None:
    session = client(ready=True, prefetch=1)
    (asked,) = sent(session.handle(said(attached())), Get)
    first, second = (sent(session.handle(Tick(now)), Get) for now in (0.5, 3.0))
    assert not first
    assert second == [asked], "the same: that time has passed proves no loss"
    session.handle(said(part(0)))
    session.handle(said(part(1)))
    assert sent(session.handle(Tick(30.0)), ReaderPing)


def test_a_part_before_its_turn_proves_that_others_are_lost_once() -> None:
    session = client(ready=True, prefetch=3)
    (first,) = sent(session.handle(said(attached())), Get)
    assert (first.start, first.part, first.request) == (0, 0, 1)
    session.handle(said(part(0, 0, of=3, request=1)))
    (again,) = sent(session.handle(said(part(0, 2, of=3, request=1))), Get)
    assert (again.start, again.part, again.request) == (0, 1, 2)
    assert not sent(session.handle(said(part(1, 0, request=1))), Get), "it was sent before the loss was known"
    effects = session.handle(said(part(0, 1, of=3, request=2)))
    assert delivered(effects) == [0, 1]
    assert not sent(effects, Get), "nothing is missing any more"
    assert not sent(session.handle(said(part(0, 2, of=3, request=2))), Get)


@pytest.mark.parametrize("what", ["wait", "end"])
def test_a_last_part_that_is_lost_is_noticed_by_the_word_that_follows_it(what: str) -> None:
    session = client(ready=True, prefetch=3)
    session.handle(said(attached()))
    session.handle(said(part(0, request=1)))

    def word(step: int, request: int) -> Message:
        if what == "end":
            return End(feed="train", lineage=0, num_steps=step, chain=b"", request=request)
        return Wait(feed="train", step=step, reason="stream", detail="of a", request=request)

    assert not sent(session.handle(said(word(1, 1))), Get), "all that was sent has come"
    assert not sent(session.handle(said(word(2, 0))), Get), "a word about an earlier request"
    (again,) = sent(session.handle(said(word(2, 1))), Get)
    assert (again.start, again.request) == (1, 2)
    assert not sent(session.handle(said(word(2, 1))), Get), "it is asked for already"


def test_no_time_that_passes_has_anything_sent_again() -> None:
    session = client(ready=True, prefetch=3)
    session.handle(said(attached()))
    gets = [get for now in range(1, 400) for get in sent(session.handle(Tick(now / 4)), Get)]
    assert len(gets) > 5
    assert {get.request for get in gets} == {1}


def test_parts_are_confirmed_when_so_many_bytes_have_come_as_the_broker_asks_for() -> None:
    session = client(ready=True, prefetch=3)
    session.handle(said(structs.replace(attached(), ack_bytes=100)))
    gets = []
    for number in range(8):
        envelope = said(part(0, number, of=9, request=1)).envelope
        gets += sent(session.handle(FromBroker(structs.replace(envelope, payload=(b"x" * 40,)))), Get)
    assert [(get.start, get.part, get.request) for get in gets] == [(0, 3, 1), (0, 6, 1)]
    (ping,) = sent(session.handle(Tick(5.0)), ReaderPing)
    assert (ping.have_upto, ping.part) == (0, 8)


def test_a_damaged_message_is_followed_by_a_ping_whose_answer_shows_what_is_missing() -> None:
    session = client(ready=True)
    assert not session.handle(Damaged()), "nobody has answered"
    session.handle(said(attached()))
    assert sent(session.handle(Damaged()), ReaderPing)


def test_pings_come_as_often_as_the_broker_says_and_at_once_where_it_asks() -> None:
    session = client(ready=True)
    session.handle(said(structs.replace(attached(), ping_s=10.0)))
    pings = [now / 4 for now in range(1, 400) if sent(session.handle(Tick(now / 4)), ReaderPing)]
    assert 10 <= len(pings) <= 13
    assert all(7.75 <= later - before <= 10.25 for before, later in pairwise(pings))
    assert sent(session.handle(said(Probe(feed="train"), fence=0)), ReaderPing)


def test_a_message_that_never_left_is_tried_again_soon_however_often_it_was_tried() -> None:
    session = client()
    for now in range(100):
        for effect in session.handle(Tick(now / 4)):
            assert isinstance(effect, Send)
            session.handle(Unsent(effect.envelope))
    assert len([now for now in range(100, 112) if sent(session.handle(Tick(now / 4)), Attach)]) >= 1


def test_the_next_iteration_begins_at_step_0_wherever_the_one_before_was_broken_off() -> None:
    session = client(ready=True, prefetch=3)
    session.handle(said(attached()))
    session.handle(said(part(0)))
    session.handle(Returned(1))
    session.handle(said(part(2)))  # waits for step 1
    (asked,) = sent(session.handle(Again()), Attach)
    assert (asked.iteration, asked.next_step, asked.chain) == (1, 0, b"")
    (get,) = sent(session.handle(said(attached(1), fence=2)), Get)
    assert (get.start, get.done_upto) == (0, 0)
    effects = session.handle(said(part(0), fence=2)) + session.handle(said(part(1), fence=2))
    assert delivered(effects) == [0, 1], "and not what waited"
    assert session.arrivals.chain == b"chain2"


def test_an_iteration_ends_once_and_so_does_the_next() -> None:
    session = client(ready=True, prefetch=1)
    end = End(feed="train", lineage=0, num_steps=1, chain=b"chain1")
    for iteration in range(3):
        session.handle(said(attached(iteration), fence=1 + iteration))
        effects = session.handle(said(part(0), fence=1 + iteration))
        effects += session.handle(said(end, fence=1 + iteration))
        effects += session.handle(said(end, fence=1 + iteration))
        assert [type(e) for e in effects] == [Deliver, Ended]
        session.handle(Again())


def test_steps_of_the_iteration_before_are_not_taken() -> None:
    session = client(ready=True, prefetch=1)
    session.handle(said(attached()))
    session.handle(Again())
    for late in (attached(), part(0), End(feed="train", lineage=0, num_steps=0, chain=b"")):
        assert not session.handle(said(late))
    assert session.attached is None
    session.handle(said(attached(1), fence=2))
    for late in (attached(), part(0), End(feed="train", lineage=0, num_steps=0, chain=b"")):
        assert not session.handle(said(late))
    assert session.attempt == 2
    assert session.handle(said(part(0), fence=2))


def test_a_step_belongs_to_the_attempt_that_served_it_until_the_next_one_begins() -> None:
    session = client(ready=True, prefetch=1)
    assert session.last_attempt == (0, 0)
    session.handle(said(attached(), fence=3))
    session.handle(said(part(0), fence=3))
    assert session.last_attempt == (EPOCH, 3)
    session.handle(said(wait("join"), fence=0, epoch=EPOCH + 1))
    assert session.last_attempt == (EPOCH, 3), "a new broker has answered, and the ranks are not all ready"
    session.handle(said(attached(), fence=1, epoch=EPOCH + 1))
    assert session.last_attempt == (EPOCH + 1, 1)


def test_a_client_that_waits_for_an_iteration_asks_for_it_again_and_says_what_it_waits_for() -> None:
    session = client(ready=True, prefetch=1)
    session.handle(said(attached()))
    session.handle(Tick(1.0))
    session.handle(Again())
    session.handle(said(Wait(feed="train", step=0, reason="join", detail="iteration 1: dp=1"), fence=7))
    assert session.waiting_for() == "join: iteration 1: dp=1"
    (asked,) = sent(session.handle(Tick(4.0)), Attach)
    assert asked.iteration == 1
    (asked,) = sent(session.handle(FromBroker(Envelope(run=RUN, epoch=EPOCH + 1, fence=1, message=Who()))), Attach)
    assert (asked.iteration, asked.next_step) == (1, 0)


def test_a_refusal_breaks_the_session() -> None:
    (broken,) = client(ready=True, prefetch=1).handle(said(Reject(code="mesh", detail="why")))
    assert isinstance(broken, Broken)
    assert (broken.code, broken.detail) == ("mesh", "why")


# Steps that are passed over


def test_a_skipped_step_is_passed_over_and_counts_as_returned_once_those_before_it_are() -> None:
    session = client(ready=True)
    session.handle(said(attached()))
    session.handle(said(part(0)))
    assert not session.handle(said(part(1, micro_batches=0))), "step 0 is still in use"
    assert session.handle(said(part(2)))
    (get,) = sent(session.handle(Returned(1)), Get)
    assert (get.done_upto, get.start) == (2, 3)
    assert session.num_skipped == 1
    (again,) = sent(session.handle(said(Who(), epoch=EPOCH + 1)), Attach)
    assert (again.next_step, again.chain) == (2, b"chain2"), "its chain is kept like any other's"


def test_many_skipped_steps_in_a_row_are_all_asked_for_and_so_is_the_end_behind_them() -> None:
    session = client(ready=True, prefetch=1)
    effects = session.handle(said(attached()))
    served = 0
    while gets := sent(effects, Get):
        effects = []
        for step in range(served, min(gets[-1].stop, 40)):
            effects += session.handle(said(part(step, micro_batches=0)))
            served = step + 1
    assert served == 40
    assert session.handle(said(End(feed="train", lineage=0, num_steps=40, chain=b"chain40"))) == [Ended(40, b"chain40")]


@given(st.data())
def test_steps_come_in_order_once_and_what_is_returned_only_rises(data: st.DataObject) -> None:
    """Whatever is skipped, lost, repeated or reordered, and whenever the trainer takes and returns."""
    count = data.draw(st.integers(1, 8))
    skipped = data.draw(st.sets(st.integers(0, count - 1)))
    session = client(ready=True)
    ready: list[int] = []
    got: list[int] = []
    dones = [0]
    session.handle(said(attached()))
    for _ in range(data.draw(st.integers(0, 60))):
        takes = data.draw(st.booleans())
        if ready and takes:
            got.append(ready.pop(0))
            effects = session.handle(Returned(got[-1] + 1))
        else:
            step = data.draw(st.integers(0, count - 1))
            effects = session.handle(said(part(step, micro_batches=step not in skipped)))
        ready += delivered(effects)
        dones += [get.done_upto for get in sent(effects, Get)]
    wanted = [step for step in range(count) if step not in skipped]
    assert got + ready == wanted[: len(got + ready)]
    assert dones == sorted(dones)
    for step in range(count):
        ready += delivered(session.handle(said(part(step, micro_batches=step not in skipped))))
    assert got + ready == wanted
    assert session.arrivals.chain == b"chain%d" % count
    session.handle(Returned(count))
    (again,) = sent(session.handle(said(Who(), epoch=EPOCH + 1)), Attach)
    assert (again.next_step, again.chain) == (count, b"chain%d" % count)


# Questions


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize(
    ("question", "answer"),
    [(ASK, state(3)), (Commit(feed="train", step=3), Committed(feed="train", step=3))],
)
def test_a_question_is_repeated_until_its_own_answer_comes(
    question: AskState | Commit, answer: State | Committed, ready: bool
) -> None:
    session = client(ready=ready)
    session.handle(said(attached()))
    asked = sent(session.handle(Ask(question)), type(question))
    for now in range(1, 9):
        asked += sent(session.handle(Tick(float(now))), type(question))
        for other in (state(2), Committed(feed="train", step=4)):
            assert not session.handle(said(other))
    assert asked == [question] * 3
    assert session.handle(said(answer, fence=99)) == [Answered(answer)], "whatever the attempt is by now"
    assert not session.handle(said(answer)), "once"
    assert not sent(session.handle(Tick(20.0)), type(question))


def test_a_question_outlives_the_broker_it_was_asked_of() -> None:
    session = client(ready=True)
    session.handle(said(attached()))
    session.handle(Ask(ASK))
    session.handle(said(Who(), epoch=EPOCH + 1))
    session.handle(said(attached(), epoch=EPOCH + 1))
    assert sent(session.handle(Tick(3.0)), AskState) == [ASK]
    assert not session.handle(said(state(3))), "an answer of the old one"
    assert session.handle(said(state(3), epoch=EPOCH + 1)) == [Answered(state(3))]


def test_a_question_that_nobody_waits_for_any_more_is_dropped() -> None:
    session = client(ready=True, patience=Patience(answer_s=5))
    session.handle(said(attached()))
    session.handle(Ask(ASK))
    session.handle(Waiting(True))
    session.handle(Waiting(False))  # Ctrl-C
    assert not sent(session.handle(Tick(3.0)), AskState)
    session.handle(Waiting(True))
    assert pass_time(session, 30, heard=wait("stream")) is None


def test_a_state_of_other_steps_than_those_that_were_read_is_refused() -> None:
    session = client(ready=True)
    session.handle(said(attached()))
    session.handle(said(part(0)))
    session.handle(Ask(AskState(feed="train", step=1)))
    why = broken(session.handle(said(state(1, b"other"))))
    assert why == Broken("diverged", "the broker's steps before step 1 differ from the steps that this client read")


# Giving up


def waiting(patience: Patience) -> ClientSession:
    session = client(ready=True, patience=patience)
    session.handle(said(attached()))
    session.handle(Waiting(True))
    return session


def test_a_broker_that_is_gone_ends_the_wait_in_time_and_not_before() -> None:
    session = waiting(Patience(stall_s=30))
    assert pass_time(session, 29) is None
    why = pass_time(session, 2)
    assert why is not None
    assert why.code == "stall"
    assert "no message from the broker for 30 s" in why.detail


def test_a_broker_that_says_what_it_waits_for_is_waited_for_for_ever() -> None:
    assert (
        pass_time(waiting(Patience(stall_s=30, join_s=30, answer_s=30)), 600, heard=wait("stream", "no sample of web"))
        is None
    )


def test_a_trainer_that_wants_nothing_is_told_nothing_however_long_the_broker_is_silent() -> None:
    session = waiting(Patience(stall_s=30))
    session.handle(Waiting(False))
    assert pass_time(session, 600) is None
    session.handle(Waiting(True))
    assert pass_time(session, 29) is None, "a wait has its own time"
    assert pass_time(session, 2) is not None


def test_ranks_that_do_not_join_are_named_in_time() -> None:
    session = waiting(Patience(join_s=30))
    assert pass_time(session, 29, heard=wait("join")) is None
    why = pass_time(session, 3, heard=wait("join"))
    assert why is not None
    assert why.code == "stall"
    assert "have not joined in 30 s (rank dp=1, at node7 before)" in why.detail


def test_a_wait_for_ranks_begins_anew_when_a_step_came_in_between() -> None:
    session = waiting(Patience(join_s=30))
    for step in range(5):
        assert pass_time(session, 20, heard=wait("join")) is None
        session.handle(said(part(step)))
        session.handle(Returned(step + 1))


def test_a_question_is_answered_in_time_or_given_up_though_the_broker_is_heard() -> None:
    session = waiting(Patience(answer_s=30))
    session.handle(Ask(ASK))
    assert pass_time(session, 29, heard=wait("stream")) is None
    why = pass_time(session, 3, heard=wait("stream"))
    assert why is not None
    assert why.code == "stall"
    assert "no answer from the broker, expected an answer within 30 s" in why.detail


def test_a_process_that_was_stopped_for_an_hour_has_not_waited() -> None:
    session = waiting(Patience(stall_s=30, join_s=30))
    session.handle(said(wait("join")))
    assert broken(session.handle(Tick(3600.0))) is None
    assert pass_time(session, 28) is None


def test_a_broker_hangs_if_it_is_silent_while_the_trainer_waits_for_a_step() -> None:
    heard, said, asked, idle = (Patience() for _ in range(4))
    for each in (heard, said, asked):
        each.trainer_waits(True)
    asked.question_asked()  # its answer waits for a disk
    for second in range(int(VAIN_S) + 2):
        for each in (heard, said, asked, idle):
            assert not each.waits_in_vain
            each.tick(float(second))
        if second % 10 == 0:  # the longest time between two pings
            said.broker_heard()
    heard.tick(VAIN_S + 2.0)
    assert heard.waits_in_vain
    assert not any(each.waits_in_vain for each in (said, asked, idle))
    heard.broker_heard()
    assert not heard.waits_in_vain
